from slipstream.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_UNSPECIFIED: _ClassVar[Stage]
    STAGE_QUEUED: _ClassVar[Stage]
    STAGE_ENCODE: _ClassVar[Stage]
    STAGE_PREFILL: _ClassVar[Stage]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class GuidanceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GUIDANCE_KIND_UNSPECIFIED: _ClassVar[GuidanceKind]
    GUIDANCE_KIND_HIDDEN_STATES: _ClassVar[GuidanceKind]
    GUIDANCE_KIND_SCORES: _ClassVar[GuidanceKind]
STAGE_UNSPECIFIED: Stage
STAGE_QUEUED: Stage
STAGE_ENCODE: Stage
STAGE_PREFILL: Stage
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
GUIDANCE_KIND_UNSPECIFIED: GuidanceKind
GUIDANCE_KIND_HIDDEN_STATES: GuidanceKind
GUIDANCE_KIND_SCORES: GuidanceKind

class TargetRequest(_message.Message):
    __slots__ = ("start", "frames", "judge", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    JUDGE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: TargetStart
    frames: _common_pb2.FrameChunk
    judge: Judge
    end: _common_pb2.End
    def __init__(self, start: _Optional[_Union[TargetStart, _Mapping]] = ..., frames: _Optional[_Union[_common_pb2.FrameChunk, _Mapping]] = ..., judge: _Optional[_Union[Judge, _Mapping]] = ..., end: _Optional[_Union[_common_pb2.End, _Mapping]] = ...) -> None: ...

class TargetStart(_message.Message):
    __slots__ = ("session_id", "prompt", "frames", "max_new_tokens", "with_guidance", "sampling", "with_attention", "lossy", "self_draft", "guidance_capability", "hints", "in_background", "system", "turns", "logprobs", "top_logprobs", "thinking")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WITH_GUIDANCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    WITH_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    SELF_DRAFT_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    IN_BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prompt: str
    frames: _common_pb2.FramesHeader
    max_new_tokens: int
    with_guidance: bool
    sampling: _common_pb2.Sampling
    with_attention: bool
    lossy: Lossy
    self_draft: SelfDraft
    guidance_capability: bytes
    hints: Hints
    in_background: bool
    system: str
    turns: _containers.RepeatedScalarFieldContainer[str]
    logprobs: bool
    top_logprobs: int
    thinking: str
    def __init__(self, session_id: _Optional[str] = ..., prompt: _Optional[str] = ..., frames: _Optional[_Union[_common_pb2.FramesHeader, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., with_guidance: bool = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., with_attention: bool = ..., lossy: _Optional[_Union[Lossy, _Mapping]] = ..., self_draft: _Optional[_Union[SelfDraft, _Mapping]] = ..., guidance_capability: _Optional[bytes] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ..., in_background: bool = ..., system: _Optional[str] = ..., turns: _Optional[_Iterable[str]] = ..., logprobs: bool = ..., top_logprobs: _Optional[int] = ..., thinking: _Optional[str] = ...) -> None: ...

class Hints(_message.Message):
    __slots__ = ("texts", "max_rows", "tolerance", "tolerance_rule")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_RULE_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    max_rows: int
    tolerance: float
    tolerance_rule: str
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., max_rows: _Optional[int] = ..., tolerance: _Optional[float] = ..., tolerance_rule: _Optional[str] = ...) -> None: ...

class Lossy(_message.Message):
    __slots__ = ("method", "keep")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    method: str
    keep: float
    def __init__(self, method: _Optional[str] = ..., keep: _Optional[float] = ...) -> None: ...

class SelfDraft(_message.Message):
    __slots__ = ("num_kept", "drafter")
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    num_kept: int
    drafter: str
    def __init__(self, num_kept: _Optional[int] = ..., drafter: _Optional[str] = ...) -> None: ...

class Judge(_message.Message):
    __slots__ = ("window", "num_passes", "proposals", "parents", "self_draft")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSES_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SELF_DRAFT_FIELD_NUMBER: _ClassVar[int]
    window: _containers.RepeatedScalarFieldContainer[int]
    num_passes: int
    proposals: _containers.RepeatedCompositeFieldContainer[_common_pb2.Proposal]
    parents: _containers.RepeatedScalarFieldContainer[int]
    self_draft: int
    def __init__(self, window: _Optional[_Iterable[int]] = ..., num_passes: _Optional[int] = ..., proposals: _Optional[_Iterable[_Union[_common_pb2.Proposal, _Mapping]]] = ..., parents: _Optional[_Iterable[int]] = ..., self_draft: _Optional[int] = ...) -> None: ...

class TargetEvent(_message.Message):
    __slots__ = ("progress", "prefilled", "verdict")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    prefilled: Prefilled
    verdict: Verdict
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("stage", "done", "total")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    stage: Stage
    done: int
    total: int
    def __init__(self, stage: _Optional[_Union[Stage, str]] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("prompt_tokens", "video_tokens", "encode_s", "prefill_until_guidance_s", "prefill_after_guidance_s", "kv_bytes", "reused_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_UNTIL_GUIDANCE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_AFTER_GUIDANCE_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    video_tokens: int
    encode_s: float
    prefill_until_guidance_s: float
    prefill_after_guidance_s: float
    kv_bytes: int
    reused_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., video_tokens: _Optional[int] = ..., encode_s: _Optional[float] = ..., prefill_until_guidance_s: _Optional[float] = ..., prefill_after_guidance_s: _Optional[float] = ..., kv_bytes: _Optional[int] = ..., reused_tokens: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("num_accepted", "own_token", "pieces", "finish_reason", "pass_s", "stop_string", "path", "drafted", "num_drafted", "draft_s", "company", "kept_s", "logprobs", "top_logprobs")
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    OWN_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PASS_S_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    COMPANY_FIELD_NUMBER: _ClassVar[int]
    KEPT_S_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    num_accepted: int
    own_token: int
    pieces: _containers.RepeatedScalarFieldContainer[str]
    finish_reason: FinishReason
    pass_s: float
    stop_string: str
    path: _containers.RepeatedScalarFieldContainer[int]
    drafted: _containers.RepeatedScalarFieldContainer[int]
    num_drafted: int
    draft_s: float
    company: Company
    kept_s: float
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, num_accepted: _Optional[int] = ..., own_token: _Optional[int] = ..., pieces: _Optional[_Iterable[str]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., pass_s: _Optional[float] = ..., stop_string: _Optional[str] = ..., path: _Optional[_Iterable[int]] = ..., drafted: _Optional[_Iterable[int]] = ..., num_drafted: _Optional[int] = ..., draft_s: _Optional[float] = ..., company: _Optional[_Union[Company, _Mapping]] = ..., kept_s: _Optional[float] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Company(_message.Message):
    __slots__ = ("num_sessions", "plain_s", "row_s")
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_S_FIELD_NUMBER: _ClassVar[int]
    ROW_S_FIELD_NUMBER: _ClassVar[int]
    num_sessions: int
    plain_s: float
    row_s: float
    def __init__(self, num_sessions: _Optional[int] = ..., plain_s: _Optional[float] = ..., row_s: _Optional[float] = ...) -> None: ...

class PullGuidanceRequest(_message.Message):
    __slots__ = ("session_id", "kind", "score", "capability")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    kind: GuidanceKind
    score: str
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., kind: _Optional[_Union[GuidanceKind, str]] = ..., score: _Optional[str] = ..., capability: _Optional[bytes] = ...) -> None: ...

class AddHintsRequest(_message.Message):
    __slots__ = ("session_id", "texts", "capability")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    texts: _containers.RepeatedScalarFieldContainer[str]
    capability: bytes
    def __init__(self, session_id: _Optional[str] = ..., texts: _Optional[_Iterable[str]] = ..., capability: _Optional[bytes] = ...) -> None: ...

class AddHintsResponse(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class GuidanceChunk(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: GuidanceHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[GuidanceHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class GuidanceHeader(_message.Message):
    __slots__ = ("kind", "video_tokens", "hidden_size", "layer")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VIDEO_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    kind: GuidanceKind
    video_tokens: int
    hidden_size: int
    layer: int
    def __init__(self, kind: _Optional[_Union[GuidanceKind, str]] = ..., video_tokens: _Optional[int] = ..., hidden_size: _Optional[int] = ..., layer: _Optional[int] = ...) -> None: ...
