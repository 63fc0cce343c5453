"""Films and documents whose parts take too long answer what captions answer. The models are made up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.document_captioner import DocumentCaptioner
from slipstream.captioning.film_captioner import FilmCaptioner
from slipstream.captioning.media import Media
from slipstream.captioning.plan import CaptionPlan, make_plan
from slipstream.documents.reading import DocumentOptions
from slipstream.errors import DeadlineExceeded, Overloaded
from slipstream.messages import Caption
from slipstream.options import CaptionOptions
from slipstream.rpc.callers import Places
from slipstream.rpc.reader import RemoteReader
from slipstream.video.files import VideoFile
from slipstream.video.messages import SampledVideo
from tests.services import test_documents_by_address as documents
from tests.support import film_world as films
from tests.support.processes import eventually

LIMIT_S = 0.05


async def sent(data: bytes = b"bytes") -> AsyncIterator[bytes]:
    yield data


class FilmMedia(films.FakeMedia):
    """Of a caller, who uploads."""

    @asynccontextmanager
    async def open(self, path: str, upload: AsyncIterator[bytes], owner: str) -> AsyncIterator[VideoFile]:
        async with self.open_source(path, owner) as source:
            yield source


class FilmModels(films.FakeCaptioner):
    """Never answers about the film as a whole, or about anything."""

    def __init__(self, *, captions_segments: bool) -> None:
        super().__init__()
        self.media = FilmMedia()
        self.model = replace(self.model, max_context=4096)
        self.places = Places("captions", 4)
        self._captions_segments = captions_segments

    async def caption(self, plan: CaptionPlan, video: SampledVideo, *about: Any, **more: Any) -> Caption:
        if not (plan.has_video and self._captions_segments):
            await asyncio.Event().wait()
        return await super().caption(plan, video, *about, **more)


@pytest.mark.parametrize(("captions_segments", "what"), [(False, "segment 0"), (True, "the summary")])
async def test_a_part_of_a_film_that_takes_too_long(captions_segments: bool, what: str) -> None:
    config = replace(films.CONFIG, request_timeout_s=LIMIT_S)
    models = FilmModels(captions_segments=captions_segments)
    plan = make_plan(CaptionOptions(segments="fixed:1s", summary=True), config)
    events = FilmCaptioner(config, cast(GatewayCaptioner, models)).caption_interactively(plan, sent())
    with pytest.raises(DeadlineExceeded, match=rf"{what} was not captioned within this server's limit of 0\.05 s"):
        [event async for event in events]
    assert not models.media.num_open, "all frames are freed"


class SilentTarget(documents.FakeCaptioner):
    async def caption(self, plan: CaptionPlan, *about: Any, **more: Any) -> Caption:
        await asyncio.Event().wait()
        raise AssertionError("not reached")


async def test_a_page_that_takes_too_long() -> None:
    config = replace(documents.CONFIG, request_timeout_s=LIMIT_S)
    media = Media(config)
    captioner = cast(GatewayCaptioner, SilentTarget(media))
    reader = cast(RemoteReader, documents.FakeReader(media))
    try:
        reading = DocumentCaptioner(config, captioner, reader)
        asked = DocumentOptions()
        events = reading.read_interactively(asked, reading.plan(asked), sent(documents.PDF))
        with pytest.raises(DeadlineExceeded, match=r"page 1 was not read within this server's limit of 0\.05 s"):
            [event async for event in events]
    finally:
        media.close()


async def test_a_document_that_waits_for_its_turn_keeps_no_caption_from_its_place() -> None:
    config = replace(documents.CONFIG, documents_at_once=1)
    media = Media(config)
    models = SilentTarget(media)
    reading = DocumentCaptioner(config, cast(GatewayCaptioner, models), cast(RemoteReader, documents.FakeReader(media)))
    asked, uploaded = DocumentOptions(), 0

    async def upload() -> AsyncIterator[bytes]:
        nonlocal uploaded
        yield documents.PDF
        uploaded += 1

    async def read() -> None:
        async for _ in reading.read_interactively(asked, reading.plan(asked), upload()):
            pass

    callers = [asyncio.create_task(read()) for _ in range(3)]
    await eventually(lambda: uploaded == 3 and models.places.used > 0)
    await asyncio.sleep(0.05)
    assert models.places.used == config.pages_at_once
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    assert not models.places.used
    media.close()


@pytest.mark.parametrize("kind", ["film", "document"])
async def test_who_may_have_no_captions_is_told_before_anything_is_uploaded(kind: str) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        raise AssertionError("nothing is uploaded")
        yield b""

    media, places = Media(documents.CONFIG), Places("captions", 4, own_limit=lambda: 0)
    if kind == "film":
        config, models = films.CONFIG, cast(GatewayCaptioner, FilmModels(captions_segments=True))
        models.places = places
        plan = make_plan(CaptionOptions(segments="fixed:1s"), config)
        events: Any = FilmCaptioner(config, models).caption_interactively(plan, nothing())
    else:
        captioner = cast(GatewayCaptioner, documents.FakeCaptioner(media))
        captioner.places = places
        reading = DocumentCaptioner(documents.CONFIG, captioner, cast(RemoteReader, documents.FakeReader(media)))
        asked = DocumentOptions()
        events = reading.read_interactively(asked, reading.plan(asked), nothing())
    with pytest.raises(Overloaded, match="one caller may have 0 of 4"):
        await anext(events)
    media.close()
