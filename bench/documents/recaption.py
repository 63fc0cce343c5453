"""The pocket archive captioned again, with earlier captions as hints and no draft process.

Earlier captions are the target's own of half the frames, its own of the same frames, and those of other checkpoints:
an older one of the same model, and the pocket draft, a model of a tenth of the size, alone at the target's place, which
sees other things. Every caption of a clip finds the clip's prefill at hand, and all of its methods take turns, so that
a machine whose speed drifts favours none. `archive` is the same change of model by the commands of the archive.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import MODELS, PROMPT, Captioned, held_out_clips, is_whole, run_caption, say
from bench.documents.resubmitted import HINTED, measure_resubmitted
from slipstream import AsyncCaptioner, CaptionOptions
from slipstream.client.connection import GatewayAddress
from slipstream.stack.local import Stack, StackOptions

PLAIN = "plain"
PROMISED, LEAST_SPEEDUP = ("hints, half the frames", "hints, older checkpoint"), 2.0
"""Of decoding, times plain."""
MAX_TOKENS = 320
Variant = tuple[str, str]
"""A method, and whose text it is told: "half" (its own, of half the frames), "small" (the smaller checkpoint's),
"older" (an earlier one's of the same model), "own" (its own), "other" (its own, of another clip)."""
VARIANTS: dict[str, Variant] = {
    PLAIN: ("autoregressive", ""),
    "hints, half the frames": ("hints", "half"),
    "hsd, half the frames": ("hsd", "half"),
    "hints, smaller checkpoint": ("hints", "small"),
    "hsd, smaller checkpoint": ("hsd", "small"),
    "hints, own captions": ("hints", "own"),
    "hsd, own captions": ("hsd", "own"),
    "hints, other clips": ("hints", "other"),
    "hsd, other clips": ("hsd", "other"),
    "hints, older checkpoint": ("hints", "older"),
    "hsd, older checkpoint": ("hsd", "older"),
    "prompt_lookup": ("prompt_lookup", ""),
}


def _stack(model: Path) -> Stack:
    return Stack(StackOptions(target_model=model, draft_model=None, threads=1))


async def _texts(model: Path, clips: Sequence[Path], asked: Mapping[str, Any], num_frames: int) -> list[str]:
    """What a checkpoint says of the clips, of so many frames."""
    options = CaptionOptions(**asked, num_frames=num_frames, method="autoregressive")
    async with _stack(model) as stack, AsyncCaptioner(gateway=GatewayAddress(stack.gateway_address)) as captioner:
        return [(await run_caption(captioner, clip, options)).caption.text for clip in clips]


async def measure_recaption(
    num_clips: int, num_frames: int, rounds: int, *, newer: Path, older: Path
) -> dict[str, Any]:
    """Decoding's speed by method and hint, as times of plain decoding, and whether the texts are the same.

    Args:
        newer: the target.
        older: a checkpoint of the same model, whose captions are hints, too.
    """
    clips = held_out_clips(num_clips)
    rows = await _measure_variants(clips, num_frames, rounds, newer, older)
    words = ("--prompt", PROMPT, "--max-new-tokens", str(MAX_TOKENS), "--frames", str(num_frames))
    archive = await measure_resubmitted(older, newer, clips, words, rounds)
    return {"rows": rows, "archive": archive, "clips": len(clips), "frames": num_frames, "rounds": rounds}


def is_recaption_kept(found: Mapping[str, Any]) -> bool:
    """All texts are plain decoding's, every item of the archive had its hint, and what is promised is fast enough."""
    hinted = [row for row in found["archive"] if row["way"] == HINTED]
    promised = [row for row in found["rows"] if row["hints"] in PROMISED]
    return (
        all(is_whole(row["identical"]) for row in [*found["rows"], *found["archive"]])
        and all(is_whole(row["hinted"]) for row in hinted)
        and all(row["decoding_speedup"] >= LEAST_SPEEDUP for row in [*promised, *hinted])
    )


async def _measure_variants(
    clips: Sequence[Path], num_frames: int, rounds: int, newer: Path, older: Path
) -> list[dict[str, Any]]:
    """Through the interactive call."""
    prompt: dict[str, Any] = {"prompt": PROMPT, "max_new_tokens": MAX_TOKENS}
    texts = {"small": await _texts(MODELS["draft"], clips, prompt, num_frames)}
    texts["half"] = await _texts(newer, clips, prompt, num_frames // 2)
    texts["older"] = await _texts(older, clips, prompt, num_frames)
    say(f"there are earlier captions of {len(clips)} clips")
    asked = prompt | {"num_frames": num_frames}
    captioned: dict[str, list[list[Captioned]]] = {name: [] for name in VARIANTS}
    async with (
        _stack(newer) as stack,
        AsyncCaptioner(gateway=GatewayAddress(stack.gateway_address)) as captioner,
    ):
        plain = CaptionOptions(**asked, method="autoregressive")
        texts["own"] = [(await run_caption(captioner, clip, plain)).caption.text for clip in clips]
        texts["other"] = [*texts["own"][1:], texts["own"][0]]
        for number, clip in enumerate(clips):
            found: dict[str, list[Captioned]] = {name: [] for name in VARIANTS}
            for turn in range(rounds):
                for name in _rotated(list(VARIANTS), number + turn):
                    method, of = VARIANTS[name]
                    prediction = (texts[of][number],) if of else ()
                    options = CaptionOptions(**asked, method=method, prediction=prediction)
                    found[name].append(await run_caption(captioner, clip, options))
            for name, of_clip in found.items():
                captioned[name].append(of_clip)
            say(f"clip {number + 1} of {len(clips)}")
    return [_row(name, captioned[name], captioned[PLAIN]) for name in VARIANTS]


def _rotated(names: Sequence[str], by: int) -> list[str]:
    by %= len(names)
    return [*names[by:], *names[:by]]


def _row(name: str, captioned: Sequence[Sequence[Captioned]], plain: Sequence[Sequence[Captioned]]) -> dict[str, Any]:
    """Over clips, the seconds of each being the median of its rounds."""
    own_s, plain_s = _decoding_s(captioned), _decoding_s(plain)
    all_captions = [one.caption for of_clip in captioned for one in of_clip]
    speculation = [caption.speculation for caption in all_captions]
    expected = [of_clip[0].token_ids for of_clip in plain]
    same = sum(one.token_ids == text for of_clip, text in zip(captioned, expected, strict=True) for one in of_clip)
    passes = sum(each.passes for each in speculation)
    rows = sum(each.accepted_prediction_tokens + each.rejected_prediction_tokens for each in speculation)
    return {
        "hints": name,
        "decoding_speedup": round(plain_s / own_s, 2),
        "tokens_per_s": round(sum(caption.num_tokens for caption in all_captions) / len(captioned[0]) / own_s, 1),
        "tokens_a_pass": round(sum(caption.num_tokens - 1 for caption in all_captions) / passes, 2),
        "rows_a_pass": round(rows / passes, 1),
        "identical": f"{same}/{len(all_captions)}",
    }


def _decoding_s(captioned: Sequence[Sequence[Captioned]]) -> float:
    """Over all clips; of each the median of its rounds."""
    return sum(median(one.caption.timings.generate_s for one in of_clip) for of_clip in captioned)
