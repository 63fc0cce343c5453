"""Damaged videos through the gateway's decoders: every answer is frames or a documented error, in time.

Sound files must be decoded as before afterwards, and no process, descriptor or memory may be left. `make faults` tries
2,000 files of modern formats, and as many of old ones at the tier that takes all.
"""

import asyncio
import collections
import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import strategies as st

from slipstream.budget import trim_memory
from slipstream.errors import InvalidRequest, LimitExceeded, SlipstreamError, UnreadableVideo
from slipstream.video.messages import DecodeLimits
from slipstream.video.pool import DecodePool
from tests.support.clip_kinds import CLIPS, DOUBTFUL_KEYS, H263, OLD_CLIPS, THEORA
from tests.support.fuzzing import fuzz, report_findings
from tests.support.media import make_clip
from tests.support.processes import eventually, file_threads_rest, our_children
from tests.support.written_clips import REPEATING_CLIPS, WRITTEN_CLIPS, vc1_asf

WORKERS = 2
FRAMES = 6
TIMEOUT_S = 10.0
LATEST_S = TIMEOUT_S + 5.0
"""By then even a decoder that hung and was replaced has been answered for."""
MAX_GROWTH_BYTES = 64 * 1024**2
MAX_JOBS = 250
"""That a decoder does before it is replaced."""
DOCUMENTED = (UnreadableVideo, LimitExceeded, InvalidRequest)
MOST_PICTURES = 20
"""Of a sound file: those of many bytes are slow to damage."""
HEAD_BYTES, TAIL_BYTES = 800, 1200
"""What a demuxer reads first, and where an MP4 or AVI has its index."""
LENGTHS = (0, 1, 7, 8, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
ORDERS: tuple[Literal["big", "little"], ...] = ("big", "little")
WAYS = ("flip bits", "head", "tail", "truncate", "splice", "lengths")


def modern_files() -> list[bytes]:
    """One of each kind, in groups of few pictures."""
    specs = (replace(spec, times_ms=spec.times_ms[:MOST_PICTURES]) for spec in CLIPS.values())
    return [*map(make_clip, specs), make_clip(DOUBTFUL_KEYS), make_clip(H263)]


def old_files() -> list[bytes]:
    """The same; also what PyAV cannot write."""
    written = [make() for make in (*WRITTEN_CLIPS.values(), *REPEATING_CLIPS.values(), vc1_asf)]
    return [
        *(make_clip(spec) for clips in OLD_CLIPS.values() for spec in clips.values()),
        THEORA.read_bytes(),
        *written,
    ]


@st.composite
def damaged_files(draw: st.DrawFn, sound: Sequence[bytes]) -> bytes:
    """One of the sound files, damaged in one to three ways."""
    data = bytearray(draw(st.sampled_from(sound)))
    for way in draw(st.lists(st.sampled_from(WAYS), min_size=1, max_size=3)):
        if data:
            _damage(draw, data, way, sound)
    return bytes(data)


def _damage(draw: st.DrawFn, data: bytearray, way: str, sound: Sequence[bytes]) -> None:
    places = st.integers(0, len(data) - 1)
    match way:
        case "flip bits":
            for at, bit in draw(st.lists(st.tuples(places, st.integers(0, 7)), min_size=1, max_size=64)):
                data[at] ^= 1 << bit
        case "head" | "tail":
            width = min(len(data), HEAD_BYTES if way == "head" else TAIL_BYTES)
            ends = st.tuples(st.integers(0, width - 1), st.integers(0, 255))
            for at, value in draw(st.lists(ends, min_size=1, max_size=16)):
                data[at if way == "head" else -1 - at] = value
        case "truncate":
            del data[draw(places) :]
        case "splice":
            _splice(draw, data, sound)
        case "lengths":
            _falsify_length(draw, data)


def _splice(draw: st.DrawFn, data: bytearray, sound: Sequence[bytes]) -> None:
    """A piece is removed, repeated, zeroed, or taken from another file."""
    start, length = draw(st.integers(0, len(data) - 1)), draw(st.integers(1, 2048))
    piece = bytes(data[start : start + length])
    other = draw(st.sampled_from(sound))
    from_other = other[draw(st.integers(0, len(other) - 1)) :][: len(piece)]
    data[start : start + length] = draw(st.sampled_from([b"", piece * 2, bytes(len(piece)), from_other]))


def _falsify_length(draw: st.DrawFn, data: bytearray) -> None:
    """A number that looks like a length becomes another one."""
    order = draw(st.sampled_from(ORDERS))
    numbers = np.ndarray(
        max(len(data) - 4, 0), dtype=">u4" if order == "big" else "<u4", buffer=bytes(data), strides=(1,)
    )
    places = np.flatnonzero((numbers > 0) & (numbers <= len(data)))
    at = int(places[draw(st.integers(0, len(places) - 1))]) if len(places) else 0
    value = draw(st.sampled_from([*LENGTHS, len(data)]) | st.integers(0, 2**32 - 1))
    data[at : at + 4] = value.to_bytes(4, order)


@pytest.mark.parametrize(
    ("kind", "make_sound", "formats", "usual_examples"),
    [("files", modern_files, "archive", 60), pytest.param("old-files", old_files, "all", 40, marks=pytest.mark.long)],
    ids=["files", "old-files"],
)
def test_damaged_files_give_frames_or_a_documented_error(
    kind: str, make_sound: Callable[[], list[bytes]], formats: str, usual_examples: int
) -> None:
    sound = make_sound()
    outcomes: collections.Counter[str] = collections.Counter()
    pool = DecodePool(WORKERS, DecodeLimits(timeout_s=TIMEOUT_S, formats=formats), max_jobs=MAX_JOBS)
    with asyncio.Runner() as runner:
        runner.run(_prepare(pool))
        try:
            at_first = [runner.run(_frames_digest(pool, data)) for data in sound * WORKERS]
            runner.run(file_threads_rest())
            before = _held()

            def decode(data: bytes) -> None:
                outcomes[runner.run(_outcome(pool, data))] += 1

            fuzz(damaged_files(sound), decode, usual_examples)
            assert [runner.run(_frames_digest(pool, data)) for data in sound * WORKERS] == at_first
            with contextlib.suppress(TimeoutError):
                runner.run(eventually(lambda: not any(_left(before, _held()).values())))
            after = _held()
        finally:
            runner.run(_close(pool))
    assert not any(_left(before, after).values()), _left(before, after)
    grown_bytes = after["rss_bytes"] - before["rss_bytes"]
    assert grown_bytes < MAX_GROWTH_BYTES
    found = {"files": outcomes.total(), "outcomes": dict(outcomes), "parent_growth_mb": round(grown_bytes / 1e6, 1)}
    report_findings(kind, found)


async def _prepare(pool: DecodePool) -> None:
    """On the loop that its decoders are watched by."""
    pool.prepare()


async def _close(pool: DecodePool) -> None:
    pool.close()


async def _outcome(pool: DecodePool, data: bytes) -> str:
    """Raises what is not documented, and TimeoutError for a decoder that hangs."""
    try:
        async with asyncio.timeout(LATEST_S):
            video = await _sample(pool, data)
    except DOCUMENTED as error:
        return _kind(error)
    assert 1 <= len(video.frames) <= FRAMES
    return "frames, with a warning" if video.warnings else "frames"


async def _frames_digest(pool: DecodePool, data: bytes) -> str:
    return hashlib.sha256((await _sample(pool, data)).frames.tobytes()).hexdigest()


async def _sample(pool: DecodePool, data: bytes) -> Any:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return await pool.sample(file.fileno(), FRAMES)


def _kind(error: SlipstreamError) -> str:
    """The class, and apart from it what happened to the decoder itself."""
    for accident in ("crashed", "killed", "broke", "more memory", "longer than"):
        if accident in str(error):
            return f"{type(error).__name__}, {accident}"
    return type(error).__name__


def _left(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in ("processes", "descriptors", "mappings")}


def _held() -> dict[str, int]:
    """What this process holds."""
    trim_memory()  # what the examples left, of many sizes: the measure is of what is held
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "processes": len(our_children()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:"),
    }
