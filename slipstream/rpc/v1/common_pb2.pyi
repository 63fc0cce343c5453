from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_id", "model_type", "dtype", "device", "tokenizer_digest", "vocab_size", "hidden_size", "num_layers", "max_context", "tokens_per_frame", "max_frames", "revision", "protocol_version", "least_protocol_version", "frame_size", "sampling_defaults", "load", "gpu_uuids", "uses_mps", "surface", "keeps_structure", "tells_logprobs", "honours")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_FRAME_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEAST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FRAME_SIZE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    GPU_UUIDS_FIELD_NUMBER: _ClassVar[int]
    USES_MPS_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    KEEPS_STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    TELLS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HONOURS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    model_type: str
    dtype: str
    device: str
    tokenizer_digest: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    tokens_per_frame: int
    max_frames: int
    revision: str
    protocol_version: int
    least_protocol_version: int
    frame_size: FrameSize
    sampling_defaults: SamplingDefaults
    load: ServiceLoad
    gpu_uuids: _containers.RepeatedScalarFieldContainer[str]
    uses_mps: bool
    surface: str
    keeps_structure: bool
    tells_logprobs: bool
    honours: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model_id: _Optional[str] = ..., model_type: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., max_context: _Optional[int] = ..., tokens_per_frame: _Optional[int] = ..., max_frames: _Optional[int] = ..., revision: _Optional[str] = ..., protocol_version: _Optional[int] = ..., least_protocol_version: _Optional[int] = ..., frame_size: _Optional[_Union[FrameSize, _Mapping]] = ..., sampling_defaults: _Optional[_Union[SamplingDefaults, _Mapping]] = ..., load: _Optional[_Union[ServiceLoad, _Mapping]] = ..., gpu_uuids: _Optional[_Iterable[str]] = ..., uses_mps: bool = ..., surface: _Optional[str] = ..., keeps_structure: bool = ..., tells_logprobs: bool = ..., honours: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "piece", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    piece: str
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., piece: _Optional[str] = ..., logprob: _Optional[float] = ...) -> None: ...

class ServiceLoad(_message.Message):
    __slots__ = ("sessions", "max_sessions", "queued", "kv_bytes", "kv_budget_bytes")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    max_sessions: int
    queued: int
    kv_bytes: int
    kv_budget_bytes: int
    def __init__(self, sessions: _Optional[int] = ..., max_sessions: _Optional[int] = ..., queued: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., kv_budget_bytes: _Optional[int] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "repetition_penalty", "min_p")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    min_p: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_p: _Optional[float] = ...) -> None: ...

class FrameSize(_message.Message):
    __slots__ = ("height", "width", "multiple", "min_pixels", "max_pixels", "frames_per_step", "frame_pixels", "shortest_edge", "longest_edge", "lanczos", "capped_pixels", "shares_most")
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    FRAME_PIXELS_FIELD_NUMBER: _ClassVar[int]
    SHORTEST_EDGE_FIELD_NUMBER: _ClassVar[int]
    LONGEST_EDGE_FIELD_NUMBER: _ClassVar[int]
    LANCZOS_FIELD_NUMBER: _ClassVar[int]
    CAPPED_PIXELS_FIELD_NUMBER: _ClassVar[int]
    SHARES_MOST_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    multiple: int
    min_pixels: int
    max_pixels: int
    frames_per_step: int
    frame_pixels: int
    shortest_edge: int
    longest_edge: int
    lanczos: bool
    capped_pixels: int
    shares_most: bool
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ..., multiple: _Optional[int] = ..., min_pixels: _Optional[int] = ..., max_pixels: _Optional[int] = ..., frames_per_step: _Optional[int] = ..., frame_pixels: _Optional[int] = ..., shortest_edge: _Optional[int] = ..., longest_edge: _Optional[int] = ..., lanczos: bool = ..., capped_pixels: _Optional[int] = ..., shares_most: bool = ...) -> None: ...

class FramesHeader(_message.Message):
    __slots__ = ("num_frames", "width", "height", "seconds_per_frame", "times_s")
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_FRAME_FIELD_NUMBER: _ClassVar[int]
    TIMES_S_FIELD_NUMBER: _ClassVar[int]
    num_frames: int
    width: int
    height: int
    seconds_per_frame: float
    times_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, num_frames: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., seconds_per_frame: _Optional[float] = ..., times_s: _Optional[_Iterable[float]] = ...) -> None: ...

class FrameChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "repetition_penalty", "seed", "rule", "stop", "json_schema", "regex", "choice", "min_p", "presence_penalty", "frequency_penalty", "min_new_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int
    rule: str
    stop: _containers.RepeatedScalarFieldContainer[str]
    json_schema: str
    regex: str
    choice: _containers.RepeatedScalarFieldContainer[str]
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    min_new_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., rule: _Optional[str] = ..., stop: _Optional[_Iterable[str]] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Iterable[str]] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., min_new_tokens: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("token_ids", "probabilities")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ...) -> None: ...

class KeptTokens(_message.Message):
    __slots__ = ("bitmap", "num_steps", "num_rows", "num_columns", "middle_square", "times_s")
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    MIDDLE_SQUARE_FIELD_NUMBER: _ClassVar[int]
    TIMES_S_FIELD_NUMBER: _ClassVar[int]
    bitmap: bytes
    num_steps: int
    num_rows: int
    num_columns: int
    middle_square: bool
    times_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, bitmap: _Optional[bytes] = ..., num_steps: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_columns: _Optional[int] = ..., middle_square: bool = ..., times_s: _Optional[_Iterable[float]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
