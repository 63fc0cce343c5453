"""Does a draft agree more when kept video tokens stay where they were?

For both families and several pruned shares, the draft reads the target's own greedy captions of held-out clips and
says after every word what it would have written; a draft token there is accepted when the two are equal. "original"
leaves kept video tokens at their positions, "compact" closes the gaps. Everything runs in this process.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.common import PROMPT, ROOT, held_out_clips, say
from bench.methods.agreement import early_guidance
from slipstream.engine import PromptPlan, VideoLM, load_model
from slipstream.pruning import Guidance, VideoTokens, get_pruner, prune
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits
from training.world import FULL_SCENES

PAIRS: dict[str, tuple[str, tuple[int, int]]] = {
    "llava_onevision": ("models/pocket", FULL_SCENES),
    "qwen2_5_vl": ("models/pocket-qwen", (1, 3)),
}
"""Family -> its pair, and the fewest and most scenes of the clips that it was trained for."""
ALPHAS = (0.0, 0.5, 0.9, 1.0)
SCHEMES = ("original", "compact")
PRUNER = "uv_spread"
MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class Clip:
    """A clip, what the target says of it, and what it tells the draft."""

    frames: NDArray[np.uint8]
    seconds_per_frame: float
    token_ids: list[int]
    guidance: Guidance


def measure_positions(num_clips: int = 6, num_frames: int = 32) -> dict[str, Any]:
    """Per family and pruned share: accepted tokens with either scheme, and how many were judged."""
    return {family: _measure_pair(family, num_clips, num_frames) for family in PAIRS}


@torch.inference_mode()
def _measure_pair(family: str, num_clips: int, num_frames: int) -> dict[str, Any]:
    folder, num_scenes = PAIRS[family]
    target, draft = (load_model(str(ROOT / folder / role)) for role in ("target", "draft"))
    right = dict.fromkeys([(alpha, scheme) for alpha in ALPHAS for scheme in SCHEMES], 0)
    num_tokens = 0
    for number, path in enumerate(held_out_clips(num_clips, num_scenes), 1):
        clip = _read(target, path, num_frames)
        num_tokens += len(clip.token_ids)
        for alpha, scheme in right:
            right[alpha, scheme] += _num_agreeing(draft, clip, alpha, scheme)
        say(f"positions, {family}: clip {number} of {num_clips}, {num_tokens} tokens")
    by_alpha = {
        str(alpha): {scheme: round(right[alpha, scheme] / num_tokens, 4) for scheme in SCHEMES} for alpha in ALPHAS
    }
    return {"tokens": num_tokens, "clips": num_clips, "acceptance": by_alpha}


def _read(target: VideoLM, path: Path, num_frames: int) -> Clip:
    """The target's greedy caption of a clip, and its guidance."""
    with path.open("rb") as source:
        sampled = sample_video(source, num_frames, DecodeLimits())
    seconds_per_frame = sampled.duration_s / len(sampled.frames)
    plan = _plan(target, sampled.frames, seconds_per_frame)
    prefill = target.start_prefill(plan, target.encode_frames(sampled.frames))
    guidance = early_guidance(target, prefill)
    state, logits = prefill.finish()
    token_ids = [int(logits.argmax())]
    while token_ids[-1] not in target.info.eos_token_ids and len(token_ids) < MAX_NEW_TOKENS:
        token_ids.append(int(target.step([(state, token_ids[-1:])])[0][-1].argmax()))
    return Clip(sampled.frames, seconds_per_frame, token_ids, guidance)


def _num_agreeing(draft: VideoLM, clip: Clip, alpha: float, scheme: str) -> int:
    """Tokens of the target's caption that the draft would write too, given the words before each."""
    plan = _plan(draft, clip.frames, clip.seconds_per_frame)
    embeddings = draft.encode_frames(clip.frames)
    video = VideoTokens(plan.num_video_tokens, plan.num_steps, embeddings)
    keep = prune(get_pruner(PRUNER), video, alpha, guidance=clip.guidance, seed=0)
    state, first_logits = draft.start_prefill(plan, embeddings, keep=keep, positions=scheme).finish()
    (rows,) = draft.step([(state, clip.token_ids)])
    choices = torch.cat([first_logits[None], rows[:-1]]).argmax(dim=-1)
    return int((choices == torch.tensor(clip.token_ids)).sum())


def _plan(model: VideoLM, frames: NDArray[np.uint8], seconds_per_frame: float) -> PromptPlan:
    return model.plan_prompt(PROMPT, len(frames), frame_size=frames.shape[1:3], seconds_per_frame=seconds_per_frame)
