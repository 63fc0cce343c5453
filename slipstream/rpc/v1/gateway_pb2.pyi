from slipstream.rpc.v1 import common_pb2 as _common_pb2
from slipstream.rpc.v1 import reader_pb2 as _reader_pb2
from slipstream.rpc.v1 import target_pb2 as _target_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CaptionRequest(_message.Message):
    __slots__ = ("options", "video", "resume_after")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    RESUME_AFTER_FIELD_NUMBER: _ClassVar[int]
    options: CaptionOptions
    video: bytes
    resume_after: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, options: _Optional[_Union[CaptionOptions, _Mapping]] = ..., video: _Optional[bytes] = ..., resume_after: _Optional[_Iterable[int]] = ...) -> None: ...

class CaptionOptions(_message.Message):
    __slots__ = ("path", "request_id", "prompt", "method", "num_frames", "max_new_tokens", "pruner", "alpha", "policy", "max_window", "guidance", "positions", "seed", "temperature", "top_k", "top_p", "repetition_penalty", "sampling_rule", "stop", "gate", "gamma", "shape", "lossy", "lossy_keep", "trace", "prediction", "tolerance", "tolerance_rule", "segments", "want_kept", "duplicates", "skip_marked", "prompts", "summary", "summary_prompt", "fps", "system", "turns", "json_schema", "regex", "choice", "logprobs", "top_logprobs", "min_p", "presence_penalty", "frequency_penalty", "min_new_tokens", "thinking")
    PATH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRUNER_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_WINDOW_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_RULE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    LOSSY_KEEP_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_RULE_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    WANT_KEPT_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    SKIP_MARKED_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_PROMPT_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    path: str
    request_id: str
    prompt: str
    method: str
    num_frames: int
    max_new_tokens: int
    pruner: str
    alpha: float
    policy: str
    max_window: int
    guidance: str
    positions: str
    seed: int
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    sampling_rule: str
    stop: _containers.RepeatedScalarFieldContainer[str]
    gate: bool
    gamma: int
    shape: str
    lossy: str
    lossy_keep: float
    trace: bool
    prediction: _containers.RepeatedScalarFieldContainer[str]
    tolerance: float
    tolerance_rule: str
    segments: str
    want_kept: bool
    duplicates: str
    skip_marked: str
    prompts: _containers.RepeatedScalarFieldContainer[str]
    summary: bool
    summary_prompt: str
    fps: float
    system: str
    turns: _containers.RepeatedScalarFieldContainer[str]
    json_schema: str
    regex: str
    choice: _containers.RepeatedScalarFieldContainer[str]
    logprobs: bool
    top_logprobs: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    min_new_tokens: int
    thinking: str
    def __init__(self, path: _Optional[str] = ..., request_id: _Optional[str] = ..., prompt: _Optional[str] = ..., method: _Optional[str] = ..., num_frames: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., pruner: _Optional[str] = ..., alpha: _Optional[float] = ..., policy: _Optional[str] = ..., max_window: _Optional[int] = ..., guidance: _Optional[str] = ..., positions: _Optional[str] = ..., seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., sampling_rule: _Optional[str] = ..., stop: _Optional[_Iterable[str]] = ..., gate: bool = ..., gamma: _Optional[int] = ..., shape: _Optional[str] = ..., lossy: _Optional[str] = ..., lossy_keep: _Optional[float] = ..., trace: bool = ..., prediction: _Optional[_Iterable[str]] = ..., tolerance: _Optional[float] = ..., tolerance_rule: _Optional[str] = ..., segments: _Optional[str] = ..., want_kept: bool = ..., duplicates: _Optional[str] = ..., skip_marked: _Optional[str] = ..., prompts: _Optional[_Iterable[str]] = ..., summary: bool = ..., summary_prompt: _Optional[str] = ..., fps: _Optional[float] = ..., system: _Optional[str] = ..., turns: _Optional[_Iterable[str]] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Iterable[str]] = ..., logprobs: bool = ..., top_logprobs: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., min_new_tokens: _Optional[int] = ..., thinking: _Optional[str] = ...) -> None: ...

class FilmEvent(_message.Message):
    __slots__ = ("film", "segment", "caption")
    FILM_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CAPTION_FIELD_NUMBER: _ClassVar[int]
    film: FilmFacts
    segment: Segment
    caption: CaptionEvent
    def __init__(self, film: _Optional[_Union[FilmFacts, _Mapping]] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., caption: _Optional[_Union[CaptionEvent, _Mapping]] = ...) -> None: ...

class FilmFacts(_message.Message):
    __slots__ = ("num_segments", "start_s", "duration_s", "warnings")
    NUM_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    num_segments: int
    start_s: float
    duration_s: float
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_segments: _Optional[int] = ..., start_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("number", "start_s", "end_s", "error", "prompt", "is_summary")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    IS_SUMMARY_FIELD_NUMBER: _ClassVar[int]
    number: int
    start_s: float
    end_s: float
    error: str
    prompt: int
    is_summary: bool
    def __init__(self, number: _Optional[int] = ..., start_s: _Optional[float] = ..., end_s: _Optional[float] = ..., error: _Optional[str] = ..., prompt: _Optional[int] = ..., is_summary: bool = ...) -> None: ...

class ReadDocumentRequest(_message.Message):
    __slots__ = ("options", "document")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    options: DocumentOptions
    document: bytes
    def __init__(self, options: _Optional[_Union[DocumentOptions, _Mapping]] = ..., document: _Optional[bytes] = ...) -> None: ...

class DocumentOptions(_message.Message):
    __slots__ = ("path", "request_id", "pages", "dpi", "ocr_dpi", "no_text_layer", "surface", "pictures", "caption", "stage", "ocr")
    PATH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DPI_FIELD_NUMBER: _ClassVar[int]
    OCR_DPI_FIELD_NUMBER: _ClassVar[int]
    NO_TEXT_LAYER_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    CAPTION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OCR_FIELD_NUMBER: _ClassVar[int]
    path: str
    request_id: str
    pages: str
    dpi: int
    ocr_dpi: int
    no_text_layer: bool
    surface: str
    pictures: bool
    caption: CaptionOptions
    stage: str
    ocr: str
    def __init__(self, path: _Optional[str] = ..., request_id: _Optional[str] = ..., pages: _Optional[str] = ..., dpi: _Optional[int] = ..., ocr_dpi: _Optional[int] = ..., no_text_layer: bool = ..., surface: _Optional[str] = ..., pictures: bool = ..., caption: _Optional[_Union[CaptionOptions, _Mapping]] = ..., stage: _Optional[str] = ..., ocr: _Optional[str] = ...) -> None: ...

class ReadDocumentEvent(_message.Message):
    __slots__ = ("facts", "page", "pixels", "caption", "draft")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    CAPTION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    facts: _reader_pb2.DocumentFacts
    page: _reader_pb2.PagePicture
    pixels: bytes
    caption: CaptionEvent
    draft: _reader_pb2.PageDraft
    def __init__(self, facts: _Optional[_Union[_reader_pb2.DocumentFacts, _Mapping]] = ..., page: _Optional[_Union[_reader_pb2.PagePicture, _Mapping]] = ..., pixels: _Optional[bytes] = ..., caption: _Optional[_Union[CaptionEvent, _Mapping]] = ..., draft: _Optional[_Union[_reader_pb2.PageDraft, _Mapping]] = ...) -> None: ...

class CaptionEvent(_message.Message):
    __slots__ = ("stage", "text", "summary", "trace", "kept")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    stage: StageChange
    text: CommittedText
    summary: Summary
    trace: Trace
    kept: _common_pb2.KeptTokens
    def __init__(self, stage: _Optional[_Union[StageChange, _Mapping]] = ..., text: _Optional[_Union[CommittedText, _Mapping]] = ..., summary: _Optional[_Union[Summary, _Mapping]] = ..., trace: _Optional[_Union[Trace, _Mapping]] = ..., kept: _Optional[_Union[_common_pb2.KeptTokens, _Mapping]] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("kind", "at_s", "asked_s", "pass_s", "tokens", "accepted", "stale")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    ASKED_S_FIELD_NUMBER: _ClassVar[int]
    PASS_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    at_s: float
    asked_s: float
    pass_s: float
    tokens: int
    accepted: int
    stale: bool
    def __init__(self, kind: _Optional[str] = ..., at_s: _Optional[float] = ..., asked_s: _Optional[float] = ..., pass_s: _Optional[float] = ..., tokens: _Optional[int] = ..., accepted: _Optional[int] = ..., stale: bool = ...) -> None: ...

class StageChange(_message.Message):
    __slots__ = ("stage", "done", "total", "detail")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    stage: str
    done: int
    total: int
    detail: str
    def __init__(self, stage: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class CommittedText(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[CommittedToken]
    def __init__(self, tokens: _Optional[_Iterable[_Union[CommittedToken, _Mapping]]] = ...) -> None: ...

class CommittedToken(_message.Message):
    __slots__ = ("token_id", "piece", "from_draft", "logprob", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    FROM_DRAFT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    piece: str
    from_draft: bool
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, token_id: _Optional[int] = ..., piece: _Optional[str] = ..., from_draft: bool = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Summary(_message.Message):
    __slots__ = ("request_id", "text", "num_tokens", "finish_reason", "method", "pruner", "alpha", "policy", "max_window", "video", "timings", "speculation", "stop_string", "lossy", "lossy_keep", "tolerance", "tolerance_rule", "regions", "shared", "skipped", "avg_logprob")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PRUNER_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MAX_WINDOW_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    LOSSY_KEEP_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_RULE_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    AVG_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    num_tokens: int
    finish_reason: _target_pb2.FinishReason
    method: str
    pruner: str
    alpha: float
    policy: str
    max_window: int
    video: VideoFacts
    timings: Timings
    speculation: Speculation
    stop_string: str
    lossy: str
    lossy_keep: float
    tolerance: float
    tolerance_rule: str
    regions: RegionStage
    shared: SharedFrom
    skipped: str
    avg_logprob: float
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., num_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[_target_pb2.FinishReason, str]] = ..., method: _Optional[str] = ..., pruner: _Optional[str] = ..., alpha: _Optional[float] = ..., policy: _Optional[str] = ..., max_window: _Optional[int] = ..., video: _Optional[_Union[VideoFacts, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., stop_string: _Optional[str] = ..., lossy: _Optional[str] = ..., lossy_keep: _Optional[float] = ..., tolerance: _Optional[float] = ..., tolerance_rule: _Optional[str] = ..., regions: _Optional[_Union[RegionStage, _Mapping]] = ..., shared: _Optional[_Union[SharedFrom, _Mapping]] = ..., skipped: _Optional[str] = ..., avg_logprob: _Optional[float] = ...) -> None: ...

class SharedFrom(_message.Message):
    __slots__ = ("job_id", "segment", "distance")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    segment: int
    distance: float
    def __init__(self, job_id: _Optional[str] = ..., segment: _Optional[int] = ..., distance: _Optional[float] = ...) -> None: ...

class RegionStage(_message.Message):
    __slots__ = ("num_regions", "num_read", "num_tokens", "passes", "accepted_prediction_tokens", "rejected_prediction_tokens", "seconds")
    NUM_REGIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_READ_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_regions: int
    num_read: int
    num_tokens: int
    passes: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    seconds: float
    def __init__(self, num_regions: _Optional[int] = ..., num_read: _Optional[int] = ..., num_tokens: _Optional[int] = ..., passes: _Optional[int] = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class VideoFacts(_message.Message):
    __slots__ = ("num_frames", "width", "height", "duration_s", "timestamps_s", "warnings", "video_tokens", "prompt_tokens", "reused_tokens", "marks")
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_S_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    num_frames: int
    width: int
    height: int
    duration_s: float
    timestamps_s: _containers.RepeatedScalarFieldContainer[float]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    video_tokens: int
    prompt_tokens: int
    reused_tokens: int
    marks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, num_frames: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., duration_s: _Optional[float] = ..., timestamps_s: _Optional[_Iterable[float]] = ..., warnings: _Optional[_Iterable[str]] = ..., video_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., marks: _Optional[_Iterable[str]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("decode_s", "target_encode_s", "target_prefill_s", "draft_encode_s", "draft_guidance_s", "draft_prune_s", "draft_prefill_s", "first_token_s", "draft_ready_s", "generate_s", "total_s", "longest_gap_s", "resumptions", "resume_s")
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_GUIDANCE_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PRUNE_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_READY_S_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_GAP_S_FIELD_NUMBER: _ClassVar[int]
    RESUMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RESUME_S_FIELD_NUMBER: _ClassVar[int]
    decode_s: float
    target_encode_s: float
    target_prefill_s: float
    draft_encode_s: float
    draft_guidance_s: float
    draft_prune_s: float
    draft_prefill_s: float
    first_token_s: float
    draft_ready_s: float
    generate_s: float
    total_s: float
    longest_gap_s: float
    resumptions: int
    resume_s: float
    def __init__(self, decode_s: _Optional[float] = ..., target_encode_s: _Optional[float] = ..., target_prefill_s: _Optional[float] = ..., draft_encode_s: _Optional[float] = ..., draft_guidance_s: _Optional[float] = ..., draft_prune_s: _Optional[float] = ..., draft_prefill_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., draft_ready_s: _Optional[float] = ..., generate_s: _Optional[float] = ..., total_s: _Optional[float] = ..., longest_gap_s: _Optional[float] = ..., resumptions: _Optional[int] = ..., resume_s: _Optional[float] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("passes", "windows", "judged", "accepted", "restarts", "drafts_lost", "tau", "mean_accepted_length", "target_pass_s", "plain_pass_s", "draft_pass_s", "speed_ratio", "kept_tokens", "guidance_bytes", "kept_digest", "held_s", "pass_costs", "gate_closings", "gated_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens", "gate_start", "gate_reason", "plain_token_s")
    PASSES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_LOST_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TARGET_PASS_S_FIELD_NUMBER: _ClassVar[int]
    PLAIN_PASS_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PASS_S_FIELD_NUMBER: _ClassVar[int]
    SPEED_RATIO_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HELD_S_FIELD_NUMBER: _ClassVar[int]
    PASS_COSTS_FIELD_NUMBER: _ClassVar[int]
    GATE_CLOSINGS_FIELD_NUMBER: _ClassVar[int]
    GATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GATE_START_FIELD_NUMBER: _ClassVar[int]
    GATE_REASON_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    passes: int
    windows: int
    judged: int
    accepted: int
    restarts: int
    drafts_lost: int
    tau: float
    mean_accepted_length: float
    target_pass_s: float
    plain_pass_s: float
    draft_pass_s: float
    speed_ratio: float
    kept_tokens: int
    guidance_bytes: int
    kept_digest: str
    held_s: float
    pass_costs: _containers.RepeatedCompositeFieldContainer[PassCost]
    gate_closings: int
    gated_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    gate_start: str
    gate_reason: str
    plain_token_s: float
    def __init__(self, passes: _Optional[int] = ..., windows: _Optional[int] = ..., judged: _Optional[int] = ..., accepted: _Optional[int] = ..., restarts: _Optional[int] = ..., drafts_lost: _Optional[int] = ..., tau: _Optional[float] = ..., mean_accepted_length: _Optional[float] = ..., target_pass_s: _Optional[float] = ..., plain_pass_s: _Optional[float] = ..., draft_pass_s: _Optional[float] = ..., speed_ratio: _Optional[float] = ..., kept_tokens: _Optional[int] = ..., guidance_bytes: _Optional[int] = ..., kept_digest: _Optional[str] = ..., held_s: _Optional[float] = ..., pass_costs: _Optional[_Iterable[_Union[PassCost, _Mapping]]] = ..., gate_closings: _Optional[int] = ..., gated_tokens: _Optional[int] = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ..., gate_start: _Optional[str] = ..., gate_reason: _Optional[str] = ..., plain_token_s: _Optional[float] = ...) -> None: ...

class PassCost(_message.Message):
    __slots__ = ("window", "count", "pass_s", "round_s")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PASS_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_S_FIELD_NUMBER: _ClassVar[int]
    window: int
    count: int
    pass_s: float
    round_s: float
    def __init__(self, window: _Optional[int] = ..., count: _Optional[int] = ..., pass_s: _Optional[float] = ..., round_s: _Optional[float] = ...) -> None: ...

class GetGatewayRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GatewayInfo(_message.Message):
    __slots__ = ("version", "target_model", "draft_model", "tokens_per_frame", "max_frames", "max_new_tokens", "max_window", "max_video_bytes", "default_prompt", "accepts_paths", "reads_documents", "placements", "gates_open", "gates_closed", "archive", "peers", "target_revision", "target_dtype", "draft_revision", "draft_dtype", "surface")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_FRAME_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_WINDOW_FIELD_NUMBER: _ClassVar[int]
    MAX_VIDEO_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_PROMPT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_PATHS_FIELD_NUMBER: _ClassVar[int]
    READS_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    GATES_OPEN_FIELD_NUMBER: _ClassVar[int]
    GATES_CLOSED_FIELD_NUMBER: _ClassVar[int]
    ARCHIVE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TARGET_REVISION_FIELD_NUMBER: _ClassVar[int]
    TARGET_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_REVISION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    version: str
    target_model: str
    draft_model: str
    tokens_per_frame: int
    max_frames: int
    max_new_tokens: int
    max_window: int
    max_video_bytes: int
    default_prompt: str
    accepts_paths: bool
    reads_documents: bool
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    gates_open: int
    gates_closed: int
    archive: ArchiveInfo
    peers: _containers.RepeatedCompositeFieldContainer[PeerInfo]
    target_revision: str
    target_dtype: str
    draft_revision: str
    draft_dtype: str
    surface: str
    def __init__(self, version: _Optional[str] = ..., target_model: _Optional[str] = ..., draft_model: _Optional[str] = ..., tokens_per_frame: _Optional[int] = ..., max_frames: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., max_window: _Optional[int] = ..., max_video_bytes: _Optional[int] = ..., default_prompt: _Optional[str] = ..., accepts_paths: bool = ..., reads_documents: bool = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., gates_open: _Optional[int] = ..., gates_closed: _Optional[int] = ..., archive: _Optional[_Union[ArchiveInfo, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[PeerInfo, _Mapping]]] = ..., target_revision: _Optional[str] = ..., target_dtype: _Optional[str] = ..., draft_revision: _Optional[str] = ..., draft_dtype: _Optional[str] = ..., surface: _Optional[str] = ...) -> None: ...

class PeerInfo(_message.Message):
    __slots__ = ("role", "number", "left_out", "load", "placed")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    role: str
    number: int
    left_out: str
    load: _common_pb2.ServiceLoad
    placed: int
    def __init__(self, role: _Optional[str] = ..., number: _Optional[int] = ..., left_out: _Optional[str] = ..., load: _Optional[_Union[_common_pb2.ServiceLoad, _Mapping]] = ..., placed: _Optional[int] = ...) -> None: ...

class ArchiveInfo(_message.Message):
    __slots__ = ("takes_writes", "worker", "jobs", "max_jobs", "lease_age_s", "lease_s")
    TAKES_WRITES_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    MAX_JOBS_FIELD_NUMBER: _ClassVar[int]
    LEASE_AGE_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    takes_writes: bool
    worker: str
    jobs: int
    max_jobs: int
    lease_age_s: float
    lease_s: float
    def __init__(self, takes_writes: bool = ..., worker: _Optional[str] = ..., jobs: _Optional[int] = ..., max_jobs: _Optional[int] = ..., lease_age_s: _Optional[float] = ..., lease_s: _Optional[float] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("targets", "decoding_at_least", "decoding_at_most", "devices_at_least", "devices_at_most")
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    DECODING_AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    DECODING_AT_MOST_FIELD_NUMBER: _ClassVar[int]
    DEVICES_AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    DEVICES_AT_MOST_FIELD_NUMBER: _ClassVar[int]
    targets: int
    decoding_at_least: float
    decoding_at_most: float
    devices_at_least: float
    devices_at_most: float
    def __init__(self, targets: _Optional[int] = ..., decoding_at_least: _Optional[float] = ..., decoding_at_most: _Optional[float] = ..., devices_at_least: _Optional[float] = ..., devices_at_most: _Optional[float] = ...) -> None: ...
