"""Several prompts about every segment of a film: what the second costs beside the first, whose prefill it finds.

The film is made of held-out clips, a segment each. Every prompt is also asked by itself, of the whole film anew: the
texts must be the same. A summary is made, too; what the pocket target says there is nonsense, its time is not.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import held_out_clips, say
from bench.film_lookup import CLIP_S, film_of
from bench.tables import print_rows
from slipstream import Caption, connect_async
from slipstream.client.async_captioner import AsyncCaptioner
from slipstream.messages import SegmentCaption
from slipstream.stack.local import FRESH, Stack, StackOptions

PROMPTS = ("Describe this video in detail.", "What moves in this video?")
METHODS = ("autoregressive", "slipstream")
MOST_SHARE = 0.05
"""Of the first prompt's prefill that the second's may take."""


async def run_prompts(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `prompts`."""
    with tempfile.TemporaryDirectory(prefix="slipstream-prompts-") as folder:
        path = Path(folder) / "film.mkv"
        path.write_bytes(film_of(held_out_clips(given.lookup_clips)))
        models = {"target_model": given.target, "draft_model": given.draft}
        rows = []
        flags = {"gateway": FRESH["gateway"]}  # the target and the draft keep what they have seen
        for method in METHODS:  # each with a target that has seen none of it
            async with (
                Stack(StackOptions(threads=1, pin=True, extra_flags=flags, **models)) as stack,
                connect_async(stack.gateway_address) as captioner,
            ):
                rows.append(await _row(captioner, path, method, given))
    print_rows(f"Films: {len(PROMPTS)} prompts a segment ({given.lookup_clips} segments of {CLIP_S} s)", rows)
    too_dear = sum(row["second_share"] > MOST_SHARE for row in rows)
    return {"rows": rows, "differing": sum(row["differing"] for row in rows), "too_dear": too_dear}


async def _row(captioner: AsyncCaptioner, path: Path, method: str, given: argparse.Namespace) -> dict[str, Any]:
    asked = {"num_frames": given.lookup_frames, "max_new_tokens": given.lookup_tokens, "segments": f"fixed:{CLIP_S}s"}
    film = captioner.caption_segments(path, method=method, prompts=PROMPTS, summary=True, **asked)
    *parts, whole = [part async for part in film]
    say(f"{method}: {len(parts)} segments with {len(PROMPTS)} prompts")
    assert whole.caption is not None, whole.segment.error
    firsts, seconds = ([_prefill_s(part.captions[index]) for part in parts] for index in (0, 1))
    return {
        "method": method,
        "first_prefill_s": round(statistics.median(firsts), 4),
        "second_prefill_s": round(statistics.median(seconds), 4),
        "second_share": round(statistics.median(late / early for early, late in zip(firsts, seconds, strict=True)), 4),
        "reused": round(statistics.median(_reused(part.captions[1]) for part in parts), 3),
        "summary_prompt_tokens": whole.caption.video.prompt_tokens,
        "summary_s": round(whole.caption.timings.total_s, 2),
        "differing": await _differing(captioner, path, method, asked, parts),
    }


async def _differing(
    captioner: AsyncCaptioner, path: Path, method: str, asked: Mapping[str, Any], parts: Sequence[SegmentCaption]
) -> int:
    """Texts that are others where their prompt is asked alone."""
    differing = 0
    for index, prompt in enumerate(PROMPTS):
        alone = [one.text async for one in captioner.caption_segments(path, prompt, method=method, **asked)]
        differing += sum(text != part.texts[index] for text, part in zip(alone, parts, strict=True))
    return differing


def _prefill_s(caption: Caption) -> float:
    """Seconds of the target before the first token: the vision tower and the prompt."""
    return caption.timings.target_encode_s + caption.timings.target_prefill_s


def _reused(caption: Caption) -> float:
    return caption.video.reused_tokens / caption.video.prompt_tokens
