"""Several prompts about every segment of a film: what the second costs beside the first, whose prefill it finds.

The film is made of held-out clips, a segment each. It is captioned while somebody waits, and in the archive with two
slots, which has two segments at the models at once and puts them in an order of its own. Every prompt is also asked by
itself, of the whole film anew: the texts must be the same. A summary is made, too; what the pocket target says there is
nonsense, its time is not.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import held_out_clips, say
from bench.faults.batches import archive_of, list_jobs, submit, wait_ended
from bench.film_lookup import CLIP_S, film_of
from bench.tables import print_rows
from slipstream import Caption, connect_async
from slipstream.archive.messages import BatchItem
from slipstream.client.async_captioner import AsyncCaptioner
from slipstream.stack.local import FRESH, Stack, StackOptions

PROMPTS = ("Describe this video in detail.", "What moves in this video?")
METHODS = ("autoregressive", "slipstream")
SLOTS = 2
"""Of the archive."""
MOST_SHARE = 0.05
"""Of the first prompt's prefill that the second's may take."""
TIMEOUT_S = 1800.0
Answers = Sequence[Sequence[Caption]]
"""[segments][prompts]"""


async def run_prompts(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `prompts`."""
    with tempfile.TemporaryDirectory(prefix="slipstream-prompts-") as folder:
        path = Path(folder) / "film.mkv"
        path.write_bytes(film_of(held_out_clips(given.lookup_clips)))
        rows = [await _row(path, method, way, given) for method in METHODS for way in (INTERACTIVE, ARCHIVE)]
    print_rows(f"Films: {len(PROMPTS)} prompts a segment ({given.lookup_clips} segments of {CLIP_S} s)", rows)
    too_dear = sum(row["second_share"] > MOST_SHARE for row in rows)
    return {"rows": rows, "differing": sum(row["differing"] for row in rows), "too_dear": too_dear}


async def _row(path: Path, method: str, way: str, given: argparse.Namespace) -> dict[str, Any]:
    """By a target that has seen nothing of the film, and keeps what it has seen."""
    asked = {
        "method": method,
        "num_frames": given.lookup_frames,
        "max_new_tokens": given.lookup_tokens,
        "segments": f"fixed:{CLIP_S}s",
    }
    options = StackOptions(
        target_model=given.target,
        draft_model=given.draft,
        threads=1,
        pin=True,
        archive=True,
        archive_slots=SLOTS,
        video_roots=(path.parent,),
        extra_flags={"gateway": FRESH["gateway"]},
    )
    async with Stack(options) as stack, connect_async(stack.gateway_address) as captioner:
        answers, summary = await WAYS[way](captioner, path, asked)
        say(f"{method}, {way}: {len(answers)} segments with {len(PROMPTS)} prompts")
        firsts, seconds = ([_prefill_s(of_one[index]) for of_one in answers] for index in (0, 1))
        share = statistics.median(late / early for early, late in zip(firsts, seconds, strict=True))
        return {
            "method": method,
            "way": way,
            "first_prefill_s": round(statistics.median(firsts), 4),
            "second_prefill_s": round(statistics.median(seconds), 4),
            "second_share": round(share, 4),
            "reused": round(statistics.median(_reused(of_one[1]) for of_one in answers), 3),
            "summary_prompt_tokens": summary.video.prompt_tokens,
            "summary_s": round(summary.timings.total_s, 2),
            "differing": await _differing(captioner, path, asked, answers),
        }


async def _interactive(captioner: AsyncCaptioner, path: Path, asked: Mapping[str, Any]) -> tuple[Answers, Caption]:
    film = captioner.caption_segments(path, prompts=PROMPTS, summary=True, **asked)
    *parts, whole = [part async for part in film]
    assert whole.caption is not None, whole.segment.error
    return [part.captions for part in parts], whole.caption


async def _archived(captioner: AsyncCaptioner, path: Path, asked: Mapping[str, Any]) -> tuple[Answers, Caption]:
    """The same, as a job that has two segments at the models at once."""
    item = BatchItem("film", str(path), {**asked, "prompts": PROMPTS, "summary": True})
    batch = await submit(captioner, "film", [item])
    await wait_ended([captioner], batch, TIMEOUT_S)
    (job,) = await list_jobs(captioner, batch)
    answers: dict[int, dict[int, Caption]] = {}
    summary: Caption | None = None
    async for part in (await archive_of(captioner)).parts(batch, job):
        assert part.segment is not None and part.caption is not None, part.error or job.error
        if part.segment.is_summary:
            summary = part.caption
        else:
            answers.setdefault(part.segment.number, {})[part.segment.prompt] = part.caption
    assert summary is not None, job.error
    return [[of_one[index] for index in range(len(PROMPTS))] for _, of_one in sorted(answers.items())], summary


INTERACTIVE, ARCHIVE = "interactive", f"archive, {SLOTS} slots"
WAYS = {INTERACTIVE: _interactive, ARCHIVE: _archived}


async def _differing(captioner: AsyncCaptioner, path: Path, asked: Mapping[str, Any], answers: Answers) -> int:
    """Texts that are others where their prompt is asked alone."""
    differing = 0
    for index, prompt in enumerate(PROMPTS):
        alone = [one.text async for one in captioner.caption_segments(path, prompt, **asked)]
        differing += sum(text != of_one[index].text for text, of_one in zip(alone, answers, strict=True))
    return differing


def _prefill_s(caption: Caption) -> float:
    """Seconds of the target before the first token: the vision tower and the prompt."""
    return caption.timings.target_encode_s + caption.timings.target_prefill_s


def _reused(caption: Caption) -> float:
    return caption.video.reused_tokens / caption.video.prompt_tokens
