"""A document as a target reads it: what is asked of it, what is said meanwhile, and what comes of a page."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from slipstream.documents.messages import DocumentRequest, PageDraft, PagePicture, ReadEvent
from slipstream.documents.pages import check_request
from slipstream.documents.surfaces import SURFACES
from slipstream.errors import InvalidRequest, ProtocolViolation
from slipstream.messages import Caption, CaptionEvent, CommittedText, CommittedToken
from slipstream.options import CaptionOptions

PAGE_OPTIONS = CaptionOptions(prompt="Read this page.", num_frames=1, method="hints")
"""What is asked of a page where nothing else was."""
NOT_OF_PAGES = ("segments", "summary", "summary_prompt", "duplicates", "skip_marked", "turns", "num_frames", "fps")
"""Options of captions that a page has no use for."""
STAGES = ("page", "region+page")
"""How a page is read: by the target at once, or after its regions (hierarchical speculative decoding, section 3.1)."""


OCR_WHEN = ("always", "paying", "never")
"""When pages without a genuine text layer are read by OCR: `paying` is while it saves time, see `OcrGate`."""


@dataclass(frozen=True)
class DocumentOptions:
    """What to ask of a document, and how."""

    request: DocumentRequest = field(default_factory=DocumentRequest)
    """Which pages, and how they are drawn and read; `pictures`: whether the caller wants the pixels."""
    surface: str = ""
    """How the target writes, one of `SURFACES`; empty: as it says itself."""
    caption: CaptionOptions = field(default_factory=CaptionOptions)
    """Of each page."""
    stage: str = "page"
    """One of `STAGES`."""
    ocr: str = "always"
    """One of `OCR_WHEN`."""

    @property
    def reads_regions(self) -> bool:
        """The target reads the regions of a page before the page."""
        return self.stage == "region+page"

    def check(self) -> "DocumentOptions":
        """Itself. Raises `InvalidRequest` for what no gateway takes."""
        check_request(self.request)
        if self.surface and self.surface not in SURFACES:
            raise InvalidRequest(f"surface {self.surface!r} is unknown; choose one of {', '.join(SURFACES)}")
        if self.stage not in STAGES:
            raise InvalidRequest(f"stage {self.stage!r} is unknown; choose one of {', '.join(STAGES)}")
        if self.ocr not in OCR_WHEN:
            raise InvalidRequest(f"ocr {self.ocr!r} is unknown; choose one of {', '.join(OCR_WHEN)}")
        if self.caption.in_segments:
            raise InvalidRequest("segments must be left out: a page has no segments")
        for name in ("duplicates", "skip_marked"):
            if name in self.caption.given():
                raise InvalidRequest(f"{name} must be left out: pages are all read")
        if self.caption.get("turns", ()):
            raise InvalidRequest("turns must be left out: pages are read, and there is no conversation about them")
        for name, of_a_page in (("num_frames", 1), ("fps", 0)):
            if self.caption.get(name, of_a_page) != of_a_page:
                raise InvalidRequest(f"{name} must be left out: a page is one frame")
        return self


DocumentEvent = ReadEvent | CaptionEvent
"""The facts once; then for each page in order its picture, what its caption says to the `Caption`, and its draft."""


@dataclass(frozen=True)
class PageReading:
    """One page, read twice."""

    picture: PagePicture
    """With pixels where they were asked for."""
    draft: PageDraft
    """What the document's own text layer says, or the OCR."""
    caption: Caption
    """The target's reading, with what the hints saved."""

    @property
    def page(self) -> int:
        """From 1."""
        return self.picture.page

    @property
    def text(self) -> str:
        """The target's, which does not depend on the draft."""
        return self.caption.text


async def page_readings(events: AsyncGenerator[DocumentEvent, None]) -> AsyncGenerator[PageReading, None]:
    """The pages, each when the last of its events has come. Closed, it closes the events.

    Raises `ProtocolViolation` for events out of order."""
    picture: PagePicture | None = None
    caption: Caption | None = None
    tokens: list[CommittedToken] = []
    async with aclosing(events):
        async for event in events:
            match event:
                case PagePicture():
                    picture, caption, tokens = event, None, []
                case CommittedText():
                    tokens += event.tokens
                case Caption():
                    caption = replace(event, tokens=tuple(tokens))
                case PageDraft():
                    if picture is None or caption is None:
                        raise ProtocolViolation("the gateway ended a page that it has not read")
                    yield PageReading(picture, event, caption)
                    picture = caption = None
