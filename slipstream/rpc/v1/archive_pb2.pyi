from slipstream.rpc.v1 import gateway_pb2 as _gateway_pb2
from slipstream.rpc.v1 import reader_pb2 as _reader_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_KIND_UNSPECIFIED: _ClassVar[JobKind]
    JOB_KIND_VIDEO: _ClassVar[JobKind]
    JOB_KIND_DOCUMENT: _ClassVar[JobKind]
    JOB_KIND_FILM: _ClassVar[JobKind]

class JobPriority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_PRIORITY_UNSPECIFIED: _ClassVar[JobPriority]
    JOB_PRIORITY_HIGH: _ClassVar[JobPriority]
    JOB_PRIORITY_NORMAL: _ClassVar[JobPriority]
    JOB_PRIORITY_LOW: _ClassVar[JobPriority]

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_QUEUED: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_DONE: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_DEAD: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]

class BatchState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BATCH_STATE_UNSPECIFIED: _ClassVar[BatchState]
    BATCH_STATE_OPEN: _ClassVar[BatchState]
    BATCH_STATE_IN_PROGRESS: _ClassVar[BatchState]
    BATCH_STATE_COMPLETED: _ClassVar[BatchState]
    BATCH_STATE_CANCELLING: _ClassVar[BatchState]
    BATCH_STATE_CANCELLED: _ClassVar[BatchState]
JOB_KIND_UNSPECIFIED: JobKind
JOB_KIND_VIDEO: JobKind
JOB_KIND_DOCUMENT: JobKind
JOB_KIND_FILM: JobKind
JOB_PRIORITY_UNSPECIFIED: JobPriority
JOB_PRIORITY_HIGH: JobPriority
JOB_PRIORITY_NORMAL: JobPriority
JOB_PRIORITY_LOW: JobPriority
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_DONE: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_DEAD: JobState
JOB_STATE_CANCELLED: JobState
BATCH_STATE_UNSPECIFIED: BatchState
BATCH_STATE_OPEN: BatchState
BATCH_STATE_IN_PROGRESS: BatchState
BATCH_STATE_COMPLETED: BatchState
BATCH_STATE_CANCELLING: BatchState
BATCH_STATE_CANCELLED: BatchState

class SubmitBatchRequest(_message.Message):
    __slots__ = ("batch", "item")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    batch: BatchOptions
    item: BatchItem
    def __init__(self, batch: _Optional[_Union[BatchOptions, _Mapping]] = ..., item: _Optional[_Union[BatchItem, _Mapping]] = ...) -> None: ...

class BatchOptions(_message.Message):
    __slots__ = ("key", "caption", "metadata", "priority", "document", "more_follows")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAPTION_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    MORE_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    key: str
    caption: _gateway_pb2.CaptionOptions
    metadata: _containers.ScalarMap[str, str]
    priority: JobPriority
    document: DocumentReading
    more_follows: bool
    def __init__(self, key: _Optional[str] = ..., caption: _Optional[_Union[_gateway_pb2.CaptionOptions, _Mapping]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., priority: _Optional[_Union[JobPriority, str]] = ..., document: _Optional[_Union[DocumentReading, _Mapping]] = ..., more_follows: bool = ...) -> None: ...

class DocumentReading(_message.Message):
    __slots__ = ("pages", "dpi", "text_layer", "stage", "ocr", "surface")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DPI_FIELD_NUMBER: _ClassVar[int]
    TEXT_LAYER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OCR_FIELD_NUMBER: _ClassVar[int]
    SURFACE_FIELD_NUMBER: _ClassVar[int]
    pages: str
    dpi: int
    text_layer: bool
    stage: str
    ocr: str
    surface: str
    def __init__(self, pages: _Optional[str] = ..., dpi: _Optional[int] = ..., text_layer: bool = ..., stage: _Optional[str] = ..., ocr: _Optional[str] = ..., surface: _Optional[str] = ...) -> None: ...

class BatchItem(_message.Message):
    __slots__ = ("custom_id", "source", "caption", "sha256", "kind", "document", "emptied")
    CUSTOM_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CAPTION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    EMPTIED_FIELD_NUMBER: _ClassVar[int]
    custom_id: str
    source: str
    caption: _gateway_pb2.CaptionOptions
    sha256: str
    kind: JobKind
    document: DocumentReading
    emptied: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, custom_id: _Optional[str] = ..., source: _Optional[str] = ..., caption: _Optional[_Union[_gateway_pb2.CaptionOptions, _Mapping]] = ..., sha256: _Optional[str] = ..., kind: _Optional[_Union[JobKind, str]] = ..., document: _Optional[_Union[DocumentReading, _Mapping]] = ..., emptied: _Optional[_Iterable[str]] = ...) -> None: ...

class SubmitBatchResponse(_message.Message):
    __slots__ = ("batch_id", "num_added", "num_known", "num_conflicts", "conflicts", "num_rejected")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_ADDED_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    NUM_CONFLICTS_FIELD_NUMBER: _ClassVar[int]
    CONFLICTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    num_added: int
    num_known: int
    num_conflicts: int
    conflicts: _containers.RepeatedScalarFieldContainer[str]
    num_rejected: int
    def __init__(self, batch_id: _Optional[str] = ..., num_added: _Optional[int] = ..., num_known: _Optional[int] = ..., num_conflicts: _Optional[int] = ..., conflicts: _Optional[_Iterable[str]] = ..., num_rejected: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("batch_id", "key", "state", "metadata", "counts", "created_s", "ended_s", "totals", "parts_total", "parts_done", "parts_bytes", "obstacle", "obstacle_s")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    PARTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PARTS_DONE_FIELD_NUMBER: _ClassVar[int]
    PARTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_S_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    key: str
    state: BatchState
    metadata: _containers.ScalarMap[str, str]
    counts: JobCounts
    created_s: float
    ended_s: float
    totals: BatchTotals
    parts_total: int
    parts_done: int
    parts_bytes: int
    obstacle: str
    obstacle_s: float
    def __init__(self, batch_id: _Optional[str] = ..., key: _Optional[str] = ..., state: _Optional[_Union[BatchState, str]] = ..., metadata: _Optional[_Mapping[str, str]] = ..., counts: _Optional[_Union[JobCounts, _Mapping]] = ..., created_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., totals: _Optional[_Union[BatchTotals, _Mapping]] = ..., parts_total: _Optional[int] = ..., parts_done: _Optional[int] = ..., parts_bytes: _Optional[int] = ..., obstacle: _Optional[str] = ..., obstacle_s: _Optional[float] = ...) -> None: ...

class JobCounts(_message.Message):
    __slots__ = ("total", "queued", "running", "done", "failed", "dead", "cancelled")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    total: int
    queued: int
    running: int
    done: int
    failed: int
    dead: int
    cancelled: int
    def __init__(self, total: _Optional[int] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., done: _Optional[int] = ..., failed: _Optional[int] = ..., dead: _Optional[int] = ..., cancelled: _Optional[int] = ...) -> None: ...

class BatchTotals(_message.Message):
    __slots__ = ("tokens", "video_s", "decode_s", "first_token_s", "generate_s", "plain_generate_s", "judged", "accepted", "reused", "pages", "segments", "empty", "cut", "looped", "shared", "skipped")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    PLAIN_GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    LOOPED_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    video_s: float
    decode_s: float
    first_token_s: float
    generate_s: float
    plain_generate_s: float
    judged: int
    accepted: int
    reused: int
    pages: int
    segments: int
    empty: int
    cut: int
    looped: int
    shared: int
    skipped: int
    def __init__(self, tokens: _Optional[int] = ..., video_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., generate_s: _Optional[float] = ..., plain_generate_s: _Optional[float] = ..., judged: _Optional[int] = ..., accepted: _Optional[int] = ..., reused: _Optional[int] = ..., pages: _Optional[int] = ..., segments: _Optional[int] = ..., empty: _Optional[int] = ..., cut: _Optional[int] = ..., looped: _Optional[int] = ..., shared: _Optional[int] = ..., skipped: _Optional[int] = ...) -> None: ...

class GetBatchRequest(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: str
    def __init__(self, batch: _Optional[str] = ...) -> None: ...

class WatchBatchRequest(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: str
    def __init__(self, batch: _Optional[str] = ...) -> None: ...

class ListBatchesRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListBatchesResponse(_message.Message):
    __slots__ = ("batches",)
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[Batch]
    def __init__(self, batches: _Optional[_Iterable[_Union[Batch, _Mapping]]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("batch", "states", "page_token", "page_size")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    batch: str
    states: _containers.RepeatedScalarFieldContainer[JobState]
    page_token: str
    page_size: int
    def __init__(self, batch: _Optional[str] = ..., states: _Optional[_Iterable[_Union[JobState, str]]] = ..., page_token: _Optional[str] = ..., page_size: _Optional[int] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs", "next_page_token")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    next_page_token: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("job_id", "custom_id", "source", "state", "progress", "error", "error_code", "attempts", "crashes", "worker", "created_s", "started_s", "ended_s", "summary", "receipt", "kind", "parts_total", "parts_done")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CRASHES_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PARTS_DONE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    custom_id: str
    source: str
    state: JobState
    progress: str
    error: str
    error_code: str
    attempts: int
    crashes: int
    worker: str
    created_s: float
    started_s: float
    ended_s: float
    summary: _gateway_pb2.Summary
    receipt: Receipt
    kind: JobKind
    parts_total: int
    parts_done: int
    def __init__(self, job_id: _Optional[str] = ..., custom_id: _Optional[str] = ..., source: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., progress: _Optional[str] = ..., error: _Optional[str] = ..., error_code: _Optional[str] = ..., attempts: _Optional[int] = ..., crashes: _Optional[int] = ..., worker: _Optional[str] = ..., created_s: _Optional[float] = ..., started_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., summary: _Optional[_Union[_gateway_pb2.Summary, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., kind: _Optional[_Union[JobKind, str]] = ..., parts_total: _Optional[int] = ..., parts_done: _Optional[int] = ...) -> None: ...

class ListPartsRequest(_message.Message):
    __slots__ = ("batch", "job_id", "page_token")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    batch: str
    job_id: str
    page_token: str
    def __init__(self, batch: _Optional[str] = ..., job_id: _Optional[str] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListPartsResponse(_message.Message):
    __slots__ = ("parts", "next_page_token")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[JobPart]
    next_page_token: str
    def __init__(self, parts: _Optional[_Iterable[_Union[JobPart, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class JobPart(_message.Message):
    __slots__ = ("number", "page", "width", "height", "dpi", "summary", "receipt", "draft", "error", "segment")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    DPI_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    number: int
    page: int
    width: int
    height: int
    dpi: float
    summary: _gateway_pb2.Summary
    receipt: Receipt
    draft: _reader_pb2.PageDraft
    error: str
    segment: _gateway_pb2.Segment
    def __init__(self, number: _Optional[int] = ..., page: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., dpi: _Optional[float] = ..., summary: _Optional[_Union[_gateway_pb2.Summary, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., draft: _Optional[_Union[_reader_pb2.PageDraft, _Mapping]] = ..., error: _Optional[str] = ..., segment: _Optional[_Union[_gateway_pb2.Segment, _Mapping]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("slipstream_version", "target", "draft", "options", "video_sha256", "video_bytes", "text_sha256", "runs", "reused", "accepted_prediction_tokens", "rejected_prediction_tokens", "shared", "skipped")
    SLIPSTREAM_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_SHA256_FIELD_NUMBER: _ClassVar[int]
    VIDEO_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEXT_SHA256_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    slipstream_version: str
    target: ModelReceipt
    draft: ModelReceipt
    options: _gateway_pb2.CaptionOptions
    video_sha256: str
    video_bytes: int
    text_sha256: str
    runs: int
    reused: bool
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    shared: _gateway_pb2.SharedFrom
    skipped: str
    def __init__(self, slipstream_version: _Optional[str] = ..., target: _Optional[_Union[ModelReceipt, _Mapping]] = ..., draft: _Optional[_Union[ModelReceipt, _Mapping]] = ..., options: _Optional[_Union[_gateway_pb2.CaptionOptions, _Mapping]] = ..., video_sha256: _Optional[str] = ..., video_bytes: _Optional[int] = ..., text_sha256: _Optional[str] = ..., runs: _Optional[int] = ..., reused: bool = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ..., shared: _Optional[_Union[_gateway_pb2.SharedFrom, _Mapping]] = ..., skipped: _Optional[str] = ...) -> None: ...

class ModelReceipt(_message.Message):
    __slots__ = ("model_id", "revision", "dtype")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    revision: str
    dtype: str
    def __init__(self, model_id: _Optional[str] = ..., revision: _Optional[str] = ..., dtype: _Optional[str] = ...) -> None: ...

class CancelBatchRequest(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: str
    def __init__(self, batch: _Optional[str] = ...) -> None: ...

class RetryDeadRequest(_message.Message):
    __slots__ = ("batch", "include_failed")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_FAILED_FIELD_NUMBER: _ClassVar[int]
    batch: str
    include_failed: bool
    def __init__(self, batch: _Optional[str] = ..., include_failed: bool = ...) -> None: ...

class RetryDeadResponse(_message.Message):
    __slots__ = ("num_retried",)
    NUM_RETRIED_FIELD_NUMBER: _ClassVar[int]
    num_retried: int
    def __init__(self, num_retried: _Optional[int] = ...) -> None: ...
