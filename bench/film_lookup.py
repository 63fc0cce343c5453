"""Segments of a film that are drafted from the captions of earlier ones, beside a draft and plain decoding.

The film is made of held-out clips, a segment each; every method captions all of it by itself. The first segment has no
earlier one, and is left out of the figures.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from bench.common import held_out_clips, say
from bench.tables import print_rows
from slipstream import Caption, connect_async
from slipstream.stack.local import FRESH, Stack, StackOptions
from tests.support.films import write_film

PLAIN = "autoregressive"
METHODS = (PLAIN, "slipstream", "hints", "hints_draft")
CLIP_S, FRAMES_A_S = 20, 8


async def run_lookup(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `lookup`."""
    with tempfile.TemporaryDirectory(prefix="slipstream-lookup-") as folder:
        path = Path(folder) / "film.mkv"
        path.write_bytes(film_of(held_out_clips(given.lookup_clips)))
        models = {"target_model": given.target, "draft_model": given.draft}
        async with Stack(StackOptions(threads=1, pin=True, extra_flags=FRESH, **models)) as stack:
            said = {name: await _captioned(stack.gateway_address, path, name, given) for name in METHODS}
    rows = [_row(name, said[name], said[PLAIN]) for name in METHODS]
    print_rows(f"Films: drafts from earlier segments ({given.lookup_clips} segments of {CLIP_S} s)", rows)
    return {"rows": rows, "segments": given.lookup_clips, "differing": sum(row["differing"] for row in rows)}


def film_of(clips: Sequence[Path]) -> bytes:
    """The beginnings of the clips, one behind the other; a shorter one stands still in the end."""
    pictures: list[NDArray[np.uint8]] = []
    for clip in clips:
        with av.open(str(clip)) as container:
            frames = [np.asarray(frame.to_ndarray(format="rgb24"), np.uint8) for frame in container.decode(video=0)]
        shown = frames[: CLIP_S * FRAMES_A_S]
        pictures += shown + shown[-1:] * (CLIP_S * FRAMES_A_S - len(shown))
    return write_film(pictures, [number / FRAMES_A_S for number in range(len(pictures))], codec="ffv1")


async def _captioned(address: str, film: Path, method: str, given: argparse.Namespace) -> list[Caption]:
    asked = {"num_frames": given.lookup_frames, "max_new_tokens": given.lookup_tokens, "segments": f"fixed:{CLIP_S}s"}
    captions: list[Caption] = []
    async with connect_async(address) as captioner:
        async for part in captioner.caption_segments(film, method=method, **asked):
            assert part.caption is not None, part.segment.error
            captions.append(part.caption)
            say(f"{method}: segment {part.segment.number}, {part.caption.decoding_rate:.0f} tokens/s")
    return captions


def _row(method: str, captions: Sequence[Caption], plain: Sequence[Caption]) -> dict[str, Any]:
    """Medians over the segments but the first, and how many texts are not plain decoding's."""
    later, beside = captions[1:], plain[1:]
    tokens = [one.num_tokens for one in later]
    return {
        "method": method,
        "decoding": round(
            statistics.median(
                one.decoding_rate / other.decoding_rate for one, other in zip(later, beside, strict=True)
            ),
            2,
        ),
        "tokens_a_pass": round(
            statistics.median((n - 1) / one.speculation.passes for n, one in zip(tokens, later, strict=True)), 2
        ),
        "from_hints": round(sum(one.speculation.accepted_prediction_tokens for one in later) / sum(tokens), 2),
        "tau": round(statistics.median(one.speculation.tau for one in later), 2),
        "differing": sum(one.text != other.text for one, other in zip(captions, plain, strict=True)),
    }
