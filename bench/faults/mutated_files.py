"""`python -m bench.faults.mutated_files`: damaged videos through the gateway's decoders.

Every answer must be frames or a documented error, in time; sound files must be decoded as before in between, and no
process, descriptor or memory may be left. The last line is JSON; exit status 1 if any of that was not so.
"""

import argparse
import asyncio
import collections
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from bench.running import run_to_end, say
from slipstream.errors import InvalidRequest, LimitExceeded, SlipstreamError, UnreadableVideo
from slipstream.logs import configure_logs
from slipstream.video.sampled import DecodeLimits
from slipstream.video.pool import DecodePool
from tests.support.media import ClipSpec, even_times_ms, make_clip

WORKERS = 2
FRAMES = 6
TIMEOUT_S = 10.0
LATEST_S = TIMEOUT_S + 5.0
"""By then even a decoder that hung and was replaced has been answered for."""
MAX_GROWTH_BYTES = 64 * 1024**2
CHECK_EVERY = 250
DOCUMENTED = (UnreadableVideo, LimitExceeded, InvalidRequest)
_FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
_TIMES_MS = even_times_ms(20)
SOUND = {
    "mp4": ClipSpec(_TIMES_MS, codec_options={"g": "6"}),
    "fragmented mp4": ClipSpec(_TIMES_MS, codec_options={"g": "6"}, container_options=_FRAGMENTED),
    "mkv": ClipSpec(_TIMES_MS, container="matroska", codec_options={"g": "6"}),
    "webm": ClipSpec(_TIMES_MS, container="webm", codec="libvpx", codec_options={"b": "200k", "g": "6"}),
    "avi": ClipSpec(_TIMES_MS, container="avi", codec="mpeg4", codec_options={"g": "6"}),
    "ts": ClipSpec(_TIMES_MS, container="mpegts", codec="mpeg2video", codec_options={"g": "6"}),
}
_LENGTHS = (0, 1, 7, 8, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_ORDERS: tuple[Literal["big", "little"], ...] = ("big", "little")
Way = Callable[[random.Random, bytearray, Sequence[bytes]], None]


def flip_bits(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """1 to 64 bits, anywhere."""
    for _ in range(2 ** chance.randrange(7)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def damage_head(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """1 to 16 bytes of what a demuxer reads first."""
    for _ in range(2 ** chance.randrange(5)):
        data[chance.randrange(min(len(data), 800))] = chance.randrange(256)


def damage_tail(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """1 to 16 bytes near the end, where an MP4 or AVI has its index."""
    for _ in range(2 ** chance.randrange(5)):
        data[-1 - chance.randrange(min(len(data), 1200))] = chance.randrange(256)


def truncate(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Cut off anywhere."""
    del data[chance.randrange(len(data)) :]


def splice(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """A piece is removed, repeated, zeroed, or taken from another file."""
    start = chance.randrange(len(data))
    end = min(len(data), start + 2 ** chance.randrange(12))
    other = chance.choice(others)
    from_other = other[chance.randrange(len(other)) :][: end - start]
    data[start:end] = chance.choice([b"", bytes(data[start:end]) * 2, bytes(end - start), from_other])


def falsify_lengths(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """Numbers that look like lengths become others."""
    for _ in range(chance.randrange(1, 4)):
        order = chance.choice(_ORDERS)
        places = [at for at in range(len(data) - 4) if 0 < int.from_bytes(data[at : at + 4], order) <= len(data)]
        at = chance.choice(places or [0])
        value = chance.choice([*_LENGTHS, len(data), chance.randrange(2**32)])
        data[at : at + 4] = value.to_bytes(4, order)


WAYS: tuple[Way, ...] = (flip_bits, damage_head, damage_tail, truncate, splice, falsify_lengths)


def mutated(seed: int, number: int, sound: Sequence[bytes]) -> bytes:
    """The file of that number: one of the sound ones, damaged in one to three ways."""
    chance = random.Random(f"{seed}/{number}")
    data = bytearray(sound[number % len(sound)])
    for _ in range(chance.choice([1, 1, 2, 3])):
        if data:
            chance.choice(WAYS)(chance, data, sound)
    return bytes(data)


class _Run:
    """The files of one seed on one pool."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.sound = [make_clip(spec) for spec in SOUND.values()]
        self.pool = DecodePool(WORKERS, DecodeLimits(timeout_s=TIMEOUT_S), max_jobs=CHECK_EVERY)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.undocumented: list[str] = []
        self.slowest_s = 0.0
        self.num_changed = 0
        """How often a sound file was not decoded as at first."""
        self._at_first: list[str] = []

    async def feed(self, numbers: range) -> None:
        """One worker's share of the files."""
        for number in numbers:
            began_s = time.monotonic()
            try:
                outcome = await self._outcome(mutated(self.seed, number, self.sound))
            except Exception as failure:
                outcome = "undocumented"
                self.undocumented.append(f"file {number}: {failure!r}")
            self.outcomes[outcome] += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)

    async def check_sound(self) -> None:
        """Whether the sound files still give the same frames."""
        found = [await self._frames_digest(data) for data in self.sound]
        self._at_first = self._at_first or found
        self.num_changed += sum(now != then for now, then in zip(found, self._at_first, strict=True))

    async def _outcome(self, data: bytes) -> str:
        with _file_of(data) as file:
            try:
                async with asyncio.timeout(LATEST_S):
                    video = await self.pool.sample(file, FRAMES)
            except TimeoutError:
                return "hung"
            except DOCUMENTED as error:
                return _kind(error)
        assert 1 <= len(video.frames) <= FRAMES
        return "frames, with a warning" if video.warnings else "frames"

    async def _frames_digest(self, data: bytes) -> str:
        with _file_of(data) as file:
            return hashlib.sha256((await self.pool.sample(file, FRAMES)).frames.tobytes()).hexdigest()


async def mutated_files(count: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Decodes `count` damaged files; the figures, and `passed`. Number and seed make a file again: `mutated`."""
    run = _Run(seed)
    began_s = time.monotonic()
    run.pool.prepare()
    try:
        await asyncio.gather(*(run.check_sound() for _ in range(WORKERS)))
        before = _held()
        for start in range(0, count, CHECK_EVERY):
            end = min(start + CHECK_EVERY, count)
            await asyncio.gather(*(run.feed(range(start + worker, end, WORKERS)) for worker in range(WORKERS)))
            await run.check_sound()
            say(f"{end} of {count} files, {time.monotonic() - began_s:.0f} s, {dict(run.outcomes)}")
        await asyncio.sleep(0.5)
        after = _held()
    finally:
        run.pool.close()
    return _report(run, count, before, after, time.monotonic() - began_s)


def _report(run: _Run, count: int, before: dict[str, int], after: dict[str, int], total_s: float) -> dict[str, Any]:
    grown_bytes = after["rss_bytes"] - before["rss_bytes"]
    left = {name: after[name] - before[name] for name in ("processes", "descriptors", "mappings")}
    passed = (
        run.outcomes.total() == count
        and not run.undocumented
        and not run.outcomes["hung"]
        and not run.num_changed
        and grown_bytes < MAX_GROWTH_BYTES
        and not any(left.values())
    )
    return {
        "files": count,
        "seed": run.seed,
        "outcomes": dict(run.outcomes.most_common()),
        "undocumented": run.undocumented[:10],
        "sound_files_changed": run.num_changed,
        "slowest_s": round(run.slowest_s, 2),
        "parent_growth_mb": round(grown_bytes / 1e6, 1),
        "left_behind": left,
        "total_s": round(total_s, 1),
        "passed": passed,
    }


def _kind(error: SlipstreamError) -> str:
    """The class, and apart from it what happened to the decoder itself."""
    for accident in ("crashed", "killed", "broke", "more memory", "longer than"):
        if accident in str(error):
            return f"{type(error).__name__}, {accident}"
    return type(error).__name__


def _held() -> dict[str, int]:
    """What this process holds."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "processes": sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:"),
    }


@contextmanager
def _file_of(data: bytes) -> Iterator[int]:
    """Descriptor of a file with that content."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.fileno()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.mutated_files")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    configure_logs("bench", "error")
    found = run_to_end(mutated_files(given.count, given.seed))
    print(json.dumps(found))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
