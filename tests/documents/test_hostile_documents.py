"""Readers that crash, hang, lie or eat, and hostile documents: an error or an empty draft, and the next one is read."""

import asyncio
import json
import os
import random
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Never

import psutil
import pytest
import pytest_asyncio

from tests.support.variants import one_in, some

pytest.importorskip("pypdfium2")

from slipstream.documents import child
from slipstream.documents import pool as pool_module
from slipstream.documents.messages import (
    MAX_DRAFT_BYTES,
    DocumentFacts,
    DocumentLimits,
    DocumentRequest,
    PageDraft,
    PagePicture,
    ReadEvent,
)
from slipstream.documents.pool import ReaderPool
from slipstream.errors import InvalidRequest, LimitExceeded, ServiceUnavailable, SlipstreamError, UnreadableDocument
from slipstream.video.confine import PROTECTIONS
from tests.support.bad_reader import NoEyes
from tests.support.documents import (
    A4,
    cyclic,
    cyclic_form,
    drawn_picture,
    encrypted,
    forms_within_forms,
    image_bytes,
    make_pdf,
    many_pages,
    pdf_of,
    tiff_of,
    words_at,
)
from tests.support.processes import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = DocumentLimits(page_s=2, open_s=10, max_pages=50, max_page_pixels=1_000_000, max_source_pixels=4_000_000)
GOOD = pdf_of([words_at(72, 700, "one"), words_at(72, 700, "two")])
WHOLE = DocumentRequest()
CONFINED: dict[str, bool] = {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[ReaderPool]:
    made = ReaderPool(LIMITS, module="tests.support.bad_reader", on_confined=CONFINED.update)
    yield made
    made.close()


async def events(pool: ReaderPool, data: bytes, request: DocumentRequest = WHOLE) -> list[ReadEvent]:
    return [event async for event in pool.read(data, request)]


async def drafts(pool: ReaderPool, data: bytes, request: DocumentRequest = WHOLE) -> list[PageDraft]:
    return [event for event in await events(pool, data, request) if isinstance(event, PageDraft)]


async def check_sound(pool: ReaderPool) -> None:
    assert [len(draft.regions) for draft in await drafts(pool, GOOD)] == [1, 1]


async def test_events_come_in_order_and_pixels_only_if_asked_for(pool: ReaderPool) -> None:
    facts, first, _, second, draft = await events(pool, GOOD, DocumentRequest(dpi=72, pictures=True, pages="2,1"))
    assert facts == DocumentFacts(2, (2, 1))
    assert isinstance(first, PagePicture) and isinstance(second, PagePicture) and isinstance(draft, PageDraft)
    assert (first.page, first.width, first.height, first.dpi) == (2, *A4, 72)
    assert len(first.pixels) == 3 * A4[0] * A4[1] and first.pixels != second.pixels and first.pixels.count(255) > 1e6
    assert not any(event.pixels for event in await events(pool, GOOD) if isinstance(event, PagePicture))


async def test_all_protections_are_told(pool: ReaderPool) -> None:
    await check_sound(pool)
    assert set(CONFINED) == set(PROTECTIONS) and CONFINED["memory"] and CONFINED["files"]


@pytest.mark.parametrize("verb", some(["crash", "exit", "killed"], keep=("crash",)))
async def test_a_reader_that_ends_before_the_picture_ends_the_document(pool: ReaderPool, verb: str) -> None:
    for when in ("open", "draw"):
        with pytest.raises(UnreadableDocument, match="cannot be opened: its reader crashed"):
            await events(pool, f"{when} {verb}".encode())
    await check_sound(pool)


@pytest.mark.parametrize("verb", some(["crash", "exit", "killed", "hang", "eat"], keep=("killed", "hang", "eat")))
async def test_a_reader_that_ends_within_a_draft_costs_that_draft_alone(pool: ReaderPool, verb: str) -> None:
    first, lost, last = await drafts(pool, f"draft {verb}".encode())
    assert first.regions and last.regions and not lost.regions
    assert "could not be read" in lost.warnings[0]


@pytest.mark.long
async def test_a_reader_that_gets_too_little_of_a_core_is_given_more_time(pool: ReaderPool) -> None:
    for when in ("draw", "draft"):
        assert all(draft.regions for draft in await drafts(pool, f"{when} starve {2 * LIMITS.page_s}".encode()))


async def test_a_draft_has_as_much_of_the_processor_as_its_picture_had(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[object] = []
    monkeypatch.setattr(child, "limit_cpu", steps.append)
    monkeypatch.setattr(child, "_say", lambda connection, kind, **fields: steps.append(kind))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    document, memory = os.memfd_create("document"), os.memfd_create("memory")
    os.write(document, GOOD)
    os.ftruncate(memory, 3 * LIMITS.max_page_pixels + MAX_DRAFT_BYTES)
    with ours, theirs:
        ours.send(json.dumps({"page": 1}).encode())
        ours.shutdown(socket.SHUT_WR)
        child._Reading(theirs, NoEyes(), LIMITS, document, memory).serve()  # type: ignore[arg-type]
    os.close(memory)
    assert steps == [12, "opened", 4, "drawn", 4, "drafted"]


async def test_a_document_of_such_pages_has_an_end(pool: ReaderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_LOST_DRAFTS", 0)
    with pytest.raises(LimitExceeded, match="1 pages could not be read, page 2 the last of them"):
        await events(pool, b"draft crash")


@pytest.mark.parametrize("verb", some(["hang", "spin"], keep=("spin",)))
async def test_a_reader_that_hangs_is_killed(pool: ReaderPool, verb: str) -> None:
    with pytest.raises(LimitExceeded, match="page 2 cannot be opened in time"):
        await events(pool, f"draw {verb}".encode())
    await check_sound(pool)


@pytest.mark.parametrize(
    "lie",
    [
        {"page": 7},
        {"width": 9999},
        {"regions": 5},
        {"seconds": -1},
        {"regions": [{"box": [0, 0, 999, 9], "kind": "text", "order": 0, "text": "", "score": 1, "origin": "ocr"}]},
        {"regions": [{"box": [0, 0, 9, 9], "kind": "novel", "order": 0, "text": "", "score": 1, "origin": "ocr"}]},
        {"regions": [{"box": [0, 0, 9, 9], "kind": "text", "order": 3, "text": "", "score": 1, "origin": "ocr"}]},
        {"regions": [{"box": [0, 0, 9, 9], "kind": "text", "order": 0, "text": "", "score": 7, "origin": "ocr"}]},
        {"regions": [{"box": [0, 0, 9, 9], "kind": "text", "order": 0, "text": 7, "score": 1, "origin": "ocr"}]},
    ],
)
@one_in(3, "lie")
async def test_a_draft_that_cannot_be_is_done_without(pool: ReaderPool, lie: dict[str, object]) -> None:
    drafted = await drafts(pool, b"draft draft " + json.dumps(lie).encode())
    assert [bool(draft.regions) for draft in drafted] == [True, False, True]


@pytest.mark.parametrize(
    "answer",
    some(
        [
            "",
            "nonsense",
            "[]",
            "{}",
            "[" * 9000,
            "{}" * 10_000,
            '{"drawn": {}}',
            '{"drawn": {"width": 1, "height": "2", "dpi": 3}}',
            '{"drawn": {"width": 100000, "height": 100000, "dpi": 3}}',
            '{"drawn": {"width": 1, "height": 2, "dpi": 1e99}}',
            '{"refused": {"error": "SystemExit", "message": ""}}',
            '{"drafted": {"num_bytes": 5}}',
        ],
        keep=("nonsense", "{}", '{"drawn": {}}', '{"drafted": {"num_bytes": 5}}'),
    ),
)
async def test_a_reader_that_talks_nonsense_is_killed(pool: ReaderPool, answer: str) -> None:
    with pytest.raises(SlipstreamError, match="page 2 cannot be opened"):
        await events(pool, b"draw say " + answer.encode())


async def test_what_a_reader_refuses_is_cut_and_cleaned(pool: ReaderPool) -> None:
    answer = json.dumps({"refused": {"error": "UnreadableDocument", "message": "\x1b[31m" + "x" * 5000}})
    with pytest.raises(UnreadableDocument) as caught:
        await events(pool, b"draw say " + answer.encode())
    assert len(str(caught.value)) < 700 and "\x1b" not in str(caught.value)


async def test_a_reader_can_do_nothing_outside(pool: ReaderPool) -> None:
    with pytest.raises(UnreadableDocument, match=r"able to: \[\]"):
        await events(pool, b"open probe")


async def test_a_reader_that_prints_for_ever_does_no_harm(pool: ReaderPool) -> None:
    assert len(await drafts(pool, b"draft shout")) == 3


async def test_a_reader_killed_from_outside_is_replaced_in_the_middle(pool: ReaderPool) -> None:
    seen: list[bool] = []
    async with aclosing(pool.read(many_pages(4), DocumentRequest())) as reading:
        async for event in reading:
            if isinstance(event, PageDraft):
                seen.append(bool(event.regions))
                for pid in pool.pids:  # the spare as well
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    assert len(seen) == 4 and seen[0]
    await check_sound(pool)


async def test_whoever_stops_listening_ends_the_reader(pool: ReaderPool) -> None:
    await pool.wait_prepared()
    before = set(pool.pids)
    reading = pool.read(b"draft hang", DocumentRequest(pages="2"))
    assert isinstance(await anext(reading), DocumentFacts) and isinstance(await anext(reading), PagePicture)
    waiting = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    busy = [psutil.Process(pid) for pid in set(pool.pids) & before]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.to_thread(psutil.wait_procs, busy, 60)
    assert busy and not any(process.is_running() for process in busy)
    await check_sound(pool)


async def test_a_pool_that_is_closed_reads_nothing_and_leaves_no_process() -> None:
    pool = ReaderPool(LIMITS, module="tests.support.bad_reader")
    await pool.wait_prepared()
    processes = [psutil.Process(pid) for pid in pool.pids]
    pool.close()
    assert not any(process.is_running() for process in processes)
    with pytest.raises(ServiceUnavailable, match="shutting down"):
        await events(pool, GOOD)


@pytest.mark.parametrize("verb", ["open hang", "draw hang", "draft hang"])
async def test_whoever_reads_when_the_pool_closes_is_told_at_once(verb: str) -> None:
    pool = ReaderPool(replace(LIMITS, page_s=60, open_s=60), module="tests.support.bad_reader")
    reading = asyncio.ensure_future(events(pool, verb.encode(), DocumentRequest(pages="2")))
    await pool.wait_prepared()
    await eventually(lambda: pool.reading_pids)
    pool.close()
    with pytest.raises(ServiceUnavailable, match="shutting down"):
        await asyncio.wait_for(reading, 30)
    assert not pool.pids


async def test_of_a_spare_that_died_nothing_is_left() -> None:
    pool = ReaderPool(LIMITS, module="tests.support.bad_reader")
    try:
        await pool.wait_prepared()
        held = psutil.Process().num_fds()
        for _ in range(3):
            (dead,) = pool.pids
            os.kill(dead, signal.SIGKILL)
            await eventually(lambda: not pool.pids)
            await pool.wait_prepared()
        assert psutil.Process().num_fds() == held
    finally:
        pool.close()


async def test_a_reader_is_not_lost_where_its_successor_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ReaderPool(LIMITS, module="tests.support.bad_reader")
    try:
        await pool.wait_prepared()
        with monkeypatch.context() as patched:
            patched.setattr(pool_module, "ReaderProcess", refuses_to_start)
            assert [len(draft.regions) for draft in await drafts(pool, GOOD)] == [1, 1]
            with pytest.raises(ServiceUnavailable, match="no reader of documents can be started now"):
                await drafts(pool, GOOD)
        await check_sound(pool)
    finally:
        pool.close()


def refuses_to_start(*given: object) -> Never:
    raise BlockingIOError("no more processes")


async def test_a_reader_that_is_stopped_with_all_below_it_leaves_no_process() -> None:
    pool = ReaderPool(LIMITS, module="tests.support.bad_reader")
    await pool.wait_prepared()
    processes = [psutil.Process(pid) for pid in pool.pids]
    processes += [below for process in processes for below in process.children(recursive=True)]
    for process in processes:
        process.suspend()
    pool.close()
    await eventually(lambda: not any(map(is_there, processes)))


def is_there(process: psutil.Process) -> bool:
    """Whether it runs or is stopped; who was its parent may not have noticed its end."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_reader_that_was_just_discarded_is_reaped_when_the_pool_closes() -> None:
    pool = ReaderPool(LIMITS, module="tests.support.bad_reader")
    reader = await pool.take()
    pool.discard(reader)
    pool.close()
    assert reader.process.returncode == -signal.SIGKILL


# -- hostile files, through the real parsers ---------------------------------------------------------------------------

REFUSED: dict[str, tuple[bytes, type[SlipstreamError], str]] = {
    "encrypted": (encrypted(), UnreadableDocument, "needs a password; documents with one are not taken"),
    "no bytes": (b"", UnreadableDocument, "no bytes"),
    "no document": (b"GIF89a nothing", UnreadableDocument, "neither a PDF nor"),
    "a PDF's head alone": (b"%PDF-1.7\n", UnreadableDocument, "damaged, cut off or empty"),
    "half a PDF": (GOOD[: len(GOOD) // 2], UnreadableDocument, "damaged|no page|cannot be read"),
    "no page": (
        make_pdf([b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [] /Count 0 >>"]),
        UnreadableDocument,
        "no page|damaged, cut off or empty",
    ),
    "a tree of pages that holds itself": (cyclic(), UnreadableDocument, "damaged"),
    "more pages than are read": (many_pages(60), LimitExceeded, 'such as pages "1-50"'),
    "a page that is drawn for ever": (forms_within_forms(), LimitExceeded, "page 1 cannot be opened in time"),
    "half a PNG": (image_bytes(drawn_picture(), "PNG")[:300], UnreadableDocument, "damaged"),
    "half a JPEG's head": (image_bytes(drawn_picture(), "JPEG")[:20], UnreadableDocument, "damaged"),
    "half a WebP": (image_bytes(drawn_picture(), "WEBP")[:300], UnreadableDocument, "damaged"),
    "a large WebP": (image_bytes(drawn_picture(size=(3000, 2000)), "WEBP"), LimitExceeded, "scale it down"),
    "too large an image": (image_bytes(drawn_picture(size=(3000, 2000)), "PNG"), LimitExceeded, "scale it down"),
    "an SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", UnreadableDocument, "neither a PDF nor"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", UnreadableDocument, "neither a PDF nor"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_files_that_are_refused(pool: ReaderPool, name: str) -> None:
    data, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        await events(pool, data)


async def test_a_file_beyond_the_limit_is_not_looked_at() -> None:
    small = ReaderPool(DocumentLimits(max_bytes=10), module="tests.support.bad_reader")
    with pytest.raises(LimitExceeded, match="at most 10 bytes"):
        await events(small, GOOD)
    assert not small.pids


READ: dict[str, tuple[bytes, int]] = {
    "a form that draws itself": (cyclic_form(), 1),
    "a page of 8,400 points": (pdf_of([words_at(72, 700, "x")], size=(8400, 8400)), 1),
    "a thousand pages, of which a few are asked for": (many_pages(1000), 3),
    "a palette": (image_bytes(drawn_picture(), "PNG", "P"), 1),
    "one bit": (image_bytes(drawn_picture(), "PNG", "1"), 1),
    "grey with transparency": (image_bytes(drawn_picture(), "PNG", "LA"), 1),
    "sixteen bits": (image_bytes(drawn_picture(), "PNG", "I;16"), 1),
    "CMYK": (image_bytes(drawn_picture(), "JPEG", "CMYK"), 1),
    "fax": (image_bytes(drawn_picture(), "TIFF", "1", compression="group4"), 1),
    "LZW": (image_bytes(drawn_picture(), "TIFF", compression="tiff_lzw"), 1),
    "a TIFF of three": (tiff_of([drawn_picture(size=(90, 90))] * 3), 3),
}
READ_SHORT = (
    "a form that draws itself",
    "a thousand pages, of which a few are asked for",
    "CMYK",
    "fax",
    "a TIFF of three",
)
"""Those that stay in `make test`: the others are more pictures, and a page that is large."""


@pytest.mark.parametrize("name", some(READ, keep=READ_SHORT))
async def test_files_that_are_read(pool: ReaderPool, name: str) -> None:
    data, num_pages = READ[name]
    said = await events(pool, data, DocumentRequest(pages=f"1-{num_pages}", pictures=True))
    pictures = [event for event in said if isinstance(event, PagePicture)]
    assert len(pictures) == num_pages and all(event.width * event.height <= 1_000_000 for event in pictures)
    assert all(len(set(event.pixels)) > 1 for event in pictures), "drawn black on white"
    assert sum(isinstance(event, PageDraft) for event in said) == num_pages


@pytest.mark.parametrize(
    ("request_", "words"), [(DocumentRequest(pages="3"), "pages 1 to 2"), (DocumentRequest(dpi=1), "dpi")]
)
async def test_requests_that_are_refused(pool: ReaderPool, request_: DocumentRequest, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await events(pool, GOOD, request_)


@pytest.mark.parametrize("seed", range(12))
@one_in(4, "seed")
async def test_damaged_files_give_documented_errors_or_drafts(pool: ReaderPool, seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray((GOOD, image_bytes(drawn_picture(), "PNG"), image_bytes(drawn_picture(), "TIFF", "1"))[seed % 3])
    for _ in range(1 + seed):
        data[chance.randrange(len(data))] = chance.randrange(256)
    with suppress(UnreadableDocument, LimitExceeded):
        await events(pool, bytes(data))
    await check_sound(pool)
