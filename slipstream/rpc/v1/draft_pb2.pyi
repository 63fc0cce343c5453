from slipstream.rpc.v1 import common_pb2 as _common_pb2
from slipstream.rpc.v1 import target_pb2 as _target_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("start", "frames", "restart", "advance", "end", "move")
    START_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    start: DraftStart
    frames: _common_pb2.FrameChunk
    restart: Restart
    advance: Advance
    end: _common_pb2.End
    move: Move
    def __init__(self, start: _Optional[_Union[DraftStart, _Mapping]] = ..., frames: _Optional[_Union[_common_pb2.FrameChunk, _Mapping]] = ..., restart: _Optional[_Union[Restart, _Mapping]] = ..., advance: _Optional[_Union[Advance, _Mapping]] = ..., end: _Optional[_Union[_common_pb2.End, _Mapping]] = ..., move: _Optional[_Union[Move, _Mapping]] = ...) -> None: ...

class DraftStart(_message.Message):
    __slots__ = ("session_id", "prompt", "frames", "pruner", "alpha", "positions", "guidance", "guidance_address", "seed", "committed", "write_until", "first_chunk", "epoch", "sampling", "tree", "guidance_capability", "vocab_size", "width", "max_rows", "want_kept", "least_chance", "system", "turns", "max_new_tokens", "in_background", "thinking")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    PRUNER_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    WRITE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    WANT_KEPT_FIELD_NUMBER: _ClassVar[int]
    LEAST_CHANCE_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prompt: str
    frames: _common_pb2.FramesHeader
    pruner: str
    alpha: float
    positions: str
    guidance: _target_pb2.GuidanceKind
    guidance_address: str
    seed: int
    committed: _containers.RepeatedScalarFieldContainer[int]
    write_until: int
    first_chunk: int
    epoch: int
    sampling: _common_pb2.Sampling
    tree: bool
    guidance_capability: bytes
    vocab_size: int
    width: int
    max_rows: int
    want_kept: bool
    least_chance: float
    system: str
    turns: _containers.RepeatedScalarFieldContainer[str]
    max_new_tokens: int
    in_background: bool
    thinking: str
    def __init__(self, session_id: _Optional[str] = ..., prompt: _Optional[str] = ..., frames: _Optional[_Union[_common_pb2.FramesHeader, _Mapping]] = ..., pruner: _Optional[str] = ..., alpha: _Optional[float] = ..., positions: _Optional[str] = ..., guidance: _Optional[_Union[_target_pb2.GuidanceKind, str]] = ..., guidance_address: _Optional[str] = ..., seed: _Optional[int] = ..., committed: _Optional[_Iterable[int]] = ..., write_until: _Optional[int] = ..., first_chunk: _Optional[int] = ..., epoch: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., tree: bool = ..., guidance_capability: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., width: _Optional[int] = ..., max_rows: _Optional[int] = ..., want_kept: bool = ..., least_chance: _Optional[float] = ..., system: _Optional[str] = ..., turns: _Optional[_Iterable[str]] = ..., max_new_tokens: _Optional[int] = ..., in_background: bool = ..., thinking: _Optional[str] = ...) -> None: ...

class Restart(_message.Message):
    __slots__ = ("epoch", "keep", "suffix", "write_until", "first_chunk")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    WRITE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    keep: int
    suffix: _containers.RepeatedScalarFieldContainer[int]
    write_until: int
    first_chunk: int
    def __init__(self, epoch: _Optional[int] = ..., keep: _Optional[int] = ..., suffix: _Optional[_Iterable[int]] = ..., write_until: _Optional[int] = ..., first_chunk: _Optional[int] = ...) -> None: ...

class Advance(_message.Message):
    __slots__ = ("epoch", "write_until")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WRITE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    write_until: int
    def __init__(self, epoch: _Optional[int] = ..., write_until: _Optional[int] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("epoch", "root", "write_until")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    WRITE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    root: int
    write_until: int
    def __init__(self, epoch: _Optional[int] = ..., root: _Optional[int] = ..., write_until: _Optional[int] = ...) -> None: ...

class DraftEvent(_message.Message):
    __slots__ = ("ready", "tokens")
    READY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ready: DraftReady
    tokens: DraftTokens
    def __init__(self, ready: _Optional[_Union[DraftReady, _Mapping]] = ..., tokens: _Optional[_Union[DraftTokens, _Mapping]] = ...) -> None: ...

class DraftReady(_message.Message):
    __slots__ = ("kept_tokens", "video_tokens", "encode_s", "guidance_s", "prune_s", "prefill_s", "guidance_bytes", "kept_digest", "kept")
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_S_FIELD_NUMBER: _ClassVar[int]
    PRUNE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept_tokens: int
    video_tokens: int
    encode_s: float
    guidance_s: float
    prune_s: float
    prefill_s: float
    guidance_bytes: int
    kept_digest: str
    kept: _common_pb2.KeptTokens
    def __init__(self, kept_tokens: _Optional[int] = ..., video_tokens: _Optional[int] = ..., encode_s: _Optional[float] = ..., guidance_s: _Optional[float] = ..., prune_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., guidance_bytes: _Optional[int] = ..., kept_digest: _Optional[str] = ..., kept: _Optional[_Union[_common_pb2.KeptTokens, _Mapping]] = ...) -> None: ...

class DraftTokens(_message.Message):
    __slots__ = ("epoch", "position", "token_ids", "pass_s", "proposals", "parents", "chances", "num_passes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PASS_S_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CHANCES_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    pass_s: float
    proposals: _containers.RepeatedCompositeFieldContainer[_common_pb2.Proposal]
    parents: _containers.RepeatedScalarFieldContainer[int]
    chances: _containers.RepeatedScalarFieldContainer[float]
    num_passes: int
    def __init__(self, epoch: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., pass_s: _Optional[float] = ..., proposals: _Optional[_Iterable[_Union[_common_pb2.Proposal, _Mapping]]] = ..., parents: _Optional[_Iterable[int]] = ..., chances: _Optional[_Iterable[float]] = ..., num_passes: _Optional[int] = ...) -> None: ...
