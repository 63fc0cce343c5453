from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REGION_KIND_UNSPECIFIED: _ClassVar[RegionKind]
    REGION_KIND_TEXT: _ClassVar[RegionKind]
    REGION_KIND_HEADING: _ClassVar[RegionKind]
    REGION_KIND_FIGURE: _ClassVar[RegionKind]
    REGION_KIND_CAPTION: _ClassVar[RegionKind]
    REGION_KIND_TABLE: _ClassVar[RegionKind]
    REGION_KIND_HEADER: _ClassVar[RegionKind]
    REGION_KIND_FOOTER: _ClassVar[RegionKind]
    REGION_KIND_REFERENCE: _ClassVar[RegionKind]
    REGION_KIND_FORMULA: _ClassVar[RegionKind]

class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORIGIN_UNSPECIFIED: _ClassVar[Origin]
    ORIGIN_TEXT_LAYER: _ClassVar[Origin]
    ORIGIN_OCR: _ClassVar[Origin]
REGION_KIND_UNSPECIFIED: RegionKind
REGION_KIND_TEXT: RegionKind
REGION_KIND_HEADING: RegionKind
REGION_KIND_FIGURE: RegionKind
REGION_KIND_CAPTION: RegionKind
REGION_KIND_TABLE: RegionKind
REGION_KIND_HEADER: RegionKind
REGION_KIND_FOOTER: RegionKind
REGION_KIND_REFERENCE: RegionKind
REGION_KIND_FORMULA: RegionKind
ORIGIN_UNSPECIFIED: Origin
ORIGIN_TEXT_LAYER: Origin
ORIGIN_OCR: Origin

class GetReaderRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReaderInfo(_message.Message):
    __slots__ = ("version", "max_bytes", "max_pages", "max_page_pixels", "max_documents")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_PAGE_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    version: str
    max_bytes: int
    max_pages: int
    max_page_pixels: int
    max_documents: int
    def __init__(self, version: _Optional[str] = ..., max_bytes: _Optional[int] = ..., max_pages: _Optional[int] = ..., max_page_pixels: _Optional[int] = ..., max_documents: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("start", "data")
    START_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    start: ReadStart
    data: bytes
    def __init__(self, start: _Optional[_Union[ReadStart, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReadStart(_message.Message):
    __slots__ = ("pages", "dpi", "ocr_dpi", "pictures", "no_text_layer", "num_bytes", "no_ocr")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DPI_FIELD_NUMBER: _ClassVar[int]
    OCR_DPI_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    NO_TEXT_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NO_OCR_FIELD_NUMBER: _ClassVar[int]
    pages: str
    dpi: int
    ocr_dpi: int
    pictures: bool
    no_text_layer: bool
    num_bytes: int
    no_ocr: bool
    def __init__(self, pages: _Optional[str] = ..., dpi: _Optional[int] = ..., ocr_dpi: _Optional[int] = ..., pictures: bool = ..., no_text_layer: bool = ..., num_bytes: _Optional[int] = ..., no_ocr: bool = ...) -> None: ...

class ReadEvent(_message.Message):
    __slots__ = ("facts", "picture", "data", "draft")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    PICTURE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    facts: DocumentFacts
    picture: PagePicture
    data: bytes
    draft: PageDraft
    def __init__(self, facts: _Optional[_Union[DocumentFacts, _Mapping]] = ..., picture: _Optional[_Union[PagePicture, _Mapping]] = ..., data: _Optional[bytes] = ..., draft: _Optional[_Union[PageDraft, _Mapping]] = ...) -> None: ...

class DocumentFacts(_message.Message):
    __slots__ = ("num_pages", "pages")
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_pages: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ...) -> None: ...

class PagePicture(_message.Message):
    __slots__ = ("page", "width", "height", "dpi", "num_bytes")
    PAGE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    DPI_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    page: int
    width: int
    height: int
    dpi: float
    num_bytes: int
    def __init__(self, page: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., dpi: _Optional[float] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class PageDraft(_message.Message):
    __slots__ = ("page", "regions", "warnings", "seconds")
    PAGE_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    page: int
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    seconds: float
    def __init__(self, page: _Optional[int] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., seconds: _Optional[float] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("left", "top", "right", "bottom", "kind", "order", "text", "score", "origin")
    LEFT_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    BOTTOM_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    left: int
    top: int
    right: int
    bottom: int
    kind: RegionKind
    order: int
    text: str
    score: float
    origin: Origin
    def __init__(self, left: _Optional[int] = ..., top: _Optional[int] = ..., right: _Optional[int] = ..., bottom: _Optional[int] = ..., kind: _Optional[_Union[RegionKind, str]] = ..., order: _Optional[int] = ..., text: _Optional[str] = ..., score: _Optional[float] = ..., origin: _Optional[_Union[Origin, str]] = ...) -> None: ...
