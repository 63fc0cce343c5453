"""The parts `formats` and `damaged`: clips of every tier by the decoders that a gateway has, sound and damaged.

The clips are those of the tests' tables. Each frame of them shows its own number, so it is known which frames a sample
must have, and when. Damaged ones are what the part `old-files` of the fault runs tries, by the same code.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import av

from bench.common import say
from bench.faults.damaged import run_damage
from slipstream.errors import UnreadableVideo
from slipstream.logs import configure_logs
from slipstream.video.formats import TIERS
from slipstream.video.messages import DecodeLimits, SampledVideo
from slipstream.video.pool import DecodePool
from tests.support.clip_kinds import CLIPS, DOUBTFUL_KEYS, OLD_CLIPS
from tests.support.media import ClipSpec, expected_indices, make_clip, read_index

NAMES = list(TIERS)
NUM_FRAMES = (1, 5)
TIME_TOLERANCE_S = 2e-3
"""Containers round."""
HUNG, CRASHED = ("longer than",), ("crashed", "killed", "broke")
"""What a decoder's error says that was stopped, or ended by itself."""


@dataclass(frozen=True)
class Clip:
    """One of the tables."""

    tier: str
    """The first that takes it."""
    name: str
    spec: ClipSpec


def all_clips() -> Iterator[Clip]:
    """Of all tiers."""
    for tier, clips in {NAMES[0]: CLIPS | {"h263 avi": DOUBTFUL_KEYS}, **OLD_CLIPS}.items():
        yield from (Clip(tier, name, spec) for name, spec in clips.items())


async def run_formats(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `formats`."""
    configure_logs("formats", "warning")
    wrong: list[str] = []
    taken_below: list[str] = []
    seen: dict[str, set[int]] = {tier: set() for tier in NAMES}
    num_clips = 0
    pools = {tier: DecodePool(1, DecodeLimits(formats=tier)) for tier in NAMES}
    try:
        for clip in all_clips():
            num_clips += 1
            data = make_clip(clip.spec)
            seen[clip.tier].add(_codec_of(data))
            if reason := await _fault(pools[clip.tier], data, clip.spec):
                wrong.append(f"{clip.tier}: {clip.name}: {reason}")
            if clip.tier != NAMES[0] and await _is_taken(pools[NAMES[NAMES.index(clip.tier) - 1]], data):
                taken_below.append(clip.name)
    finally:
        for pool in pools.values():
            pool.close()
    say(f"{num_clips} clips, {len(wrong)} of them wrong")
    return {
        "clips": num_clips,
        "clips_wrong": len(wrong),
        "wrong": wrong,
        "taken_by_the_tier_below": len(taken_below),
        "codecs": {tier: _coverage(tier, set.union(*seen.values())) for tier in NAMES},
    }


def fault_of(video: SampledVideo, spec: ClipSpec, num_frames: int) -> str:
    """What is wrong with the frames that were sampled of a clip; empty: nothing."""
    expected = expected_indices(spec.times_ms, num_frames)
    shown = [read_index(frame) for frame in video.frames]
    if shown != expected:
        return f"frames {shown}, not {expected}"
    true_s = [(spec.times_ms[index] - spec.times_ms[0]) / 1000 for index in expected]
    if any(abs(one - other) > TIME_TOLERANCE_S for one, other in zip(video.timestamps_s, true_s, strict=True)):
        return f"times {video.timestamps_s}, not {true_s}"
    return ""


async def _fault(pool: DecodePool, data: bytes, spec: ClipSpec) -> str:
    for num_frames in NUM_FRAMES:
        try:
            with await _sample(pool, data, num_frames) as video:
                if reason := fault_of(video, spec, num_frames):
                    return reason
        except Exception as error:  # whatever is wrong with one, the others are looked at
            return f"{type(error).__name__}: {error}"
    return ""


async def _is_taken(pool: DecodePool, data: bytes) -> bool:
    try:
        (await _sample(pool, data, 1)).close()
    except UnreadableVideo:
        return False
    return True


async def _sample(pool: DecodePool, data: bytes, num_frames: int) -> SampledVideo:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return await pool.sample(file.fileno(), num_frames)


def _codec_of(data: bytes) -> int:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with av.open(file.name) as container:
            return _id_of(container.streams.video[0].codec_context.name)


def _coverage(tier: str, seen: set[int]) -> dict[str, Any]:
    """Which codecs of the tier some clip has, and which none has though libav could write one."""
    listed = {_id_of(name): name for name in reversed(TIERS[tier].codecs)}
    unseen = {number: name for number, name in listed.items() if number not in seen}
    writable = sorted(name for number, name in unseen.items() if number in _written())
    return {"listed": len(listed), "seen": len(listed) - len(unseen), "unseen_though_written": writable}


def _id_of(decoder: str) -> int:
    return int(av.Codec(decoder, "r").id)


def _written() -> set[int]:
    """What libav here has an encoder for."""
    found = set()
    for name in av.codecs_available:
        try:
            found.add(int(av.Codec(name, "w").id))
        except ValueError:  # a decoder only
            continue
    return found


async def run_damaged(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `damaged`."""
    found = await run_damage("old-files", given.seed, given.damaged_files)
    return found | {
        "failed": int(not found["passed"]),
        "files_missing": given.damaged_files - int(found.get("files", 0)),
        "crashed": _counted(found, CRASHED),
        "hung": _counted(found, HUNG),
    }


def _counted(found: Mapping[str, Any], accidents: tuple[str, ...]) -> int:
    outcomes: Mapping[str, int] = found.get("outcomes", {})
    return sum(count for kind, count in outcomes.items() if any(word in kind for word in accidents))
