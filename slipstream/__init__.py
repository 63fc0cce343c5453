"""Slipstream captions videos with a big Video-LLM and a small one that writes ahead of it: the same text, sooner.

    with slipstream.Captioner() as captioner:
        print(captioner.caption("holiday.mp4").text)

What this module offers is loaded when it is first used: the services and the decoders import it too.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from slipstream import errors
    from slipstream.archive.messages import Batch, BatchItem, Job, Receipt
    from slipstream.archive.queue import JobState, Priority
    from slipstream.client.async_captioner import AsyncCaptioner, AsyncCaptionStream, connect_async
    from slipstream.client.batch_handles import Archive, AsyncArchive, AsyncBatchHandle, BatchHandle
    from slipstream.client.caption_client import RemotePath, Video
    from slipstream.client.sync_captioner import Captioner, CaptionStream, DocumentStream, connect
    from slipstream.documents.messages import DocumentFacts, PageDraft, PagePicture
    from slipstream.documents.reading import PageReading
    from slipstream.engine.loading import load_model
    from slipstream.messages import (
        Caption,
        CaptionEvent,
        CommittedText,
        CommittedToken,
        FilmFacts,
        KeptTokens,
        Segment,
        SegmentCaption,
        Speculation,
        StageChange,
        Timings,
        TokenLogprob,
        Trace,
        VideoFacts,
    )
    from slipstream.options import CaptionOptions
    from slipstream.service_info import GatewayInfo
    from slipstream.speculation.protocol import FinishReason

# fmt: off
__all__ = [
    "Archive", "AsyncArchive", "AsyncBatchHandle", "AsyncCaptionStream", "AsyncCaptioner", "Batch", "BatchHandle",
    "BatchItem", "Caption", "CaptionEvent", "CaptionOptions", "CaptionStream", "Captioner", "CommittedText",
    "CommittedToken", "DocumentFacts", "DocumentStream", "FilmFacts", "FinishReason", "GatewayInfo", "Job",
    "JobState", "KeptTokens", "PageDraft", "PagePicture", "PageReading", "Priority", "Receipt", "RemotePath",
    "Segment", "SegmentCaption", "Speculation", "StageChange", "Timings", "TokenLogprob", "Trace", "Video",
    "VideoFacts", "__version__", "connect", "connect_async", "errors", "load_model",
]
# fmt: on
_NAMES = {
    "archive.messages": "Batch BatchItem Job Receipt",
    "archive.queue": "JobState Priority",
    "client.async_captioner": "AsyncCaptionStream AsyncCaptioner connect_async",
    "client.batch_handles": "Archive AsyncArchive AsyncBatchHandle BatchHandle",
    "client.caption_client": "RemotePath Video",
    "client.sync_captioner": "CaptionStream Captioner DocumentStream connect",
    "documents.messages": "DocumentFacts PageDraft PagePicture",
    "documents.reading": "PageReading",
    "engine.loading": "load_model",
    "options": "CaptionOptions",
    "service_info": "GatewayInfo",
    "speculation.protocol": "FinishReason",
}
"""What is not in `slipstream.messages`, by its module."""
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # a type checker would believe any name of a module that has `__getattr__`

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "errors":
            return importlib.import_module("slipstream.errors")
        return getattr(importlib.import_module(f"slipstream.{_HOMES.get(name, 'messages')}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
