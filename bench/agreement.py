"""Where the draft agrees with the target: its own choice after every prefix of the target's text.

This is the draft that a stack runs, with the same tokens kept, but fed the text as it is; so it says for every output
position whether a draft token there is accepted, also where a stack never asked. Runs in the reference process.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.reference import engine_model, frames_of
from bench.tasks import Agreement, Task
from services.target.engine import default_guidance_layer
from slipstream.models import Prefill, VideoLM
from slipstream.pruning import Guidance, VideoTokens, get_pruner, prune
from slipstream.pruning.uv import make_guidance


def draft_agreement(task: Task, token_ids: tuple[int, ...], pruner: str, alpha: float) -> Agreement:
    """Agreement on the text `token_ids`, with `pruner` pruning a share `alpha` of the video."""
    logits, num_kept = draft_logits(task, token_ids, pruner, alpha)
    return Agreement(tuple((logits.argmax(dim=-1) == torch.tensor(token_ids)).tolist()), num_kept)


def draft_logits(task: Task, token_ids: Sequence[int], pruner: str, alpha: float) -> tuple[Tensor, int]:
    """What the draft makes of every prefix of a text, logits [n, vocab], and how many video tokens it keeps."""
    target, draft, frames = engine_model(task.target), engine_model(task.draft), frames_of(task)
    plan = draft.plan_prompt(task.prompt, len(frames))
    with torch.inference_mode():
        guidance = early_guidance(target, target.start_prefill(plan, target.encode_frames(frames)))
        embeddings = draft.encode_frames(frames)
        video = VideoTokens(plan.num_video_tokens, plan.num_steps, embeddings)
        keep = prune(get_pruner(pruner), video, alpha, guidance=guidance, seed=0)
        state, first_logits = draft.start_prefill(plan, embeddings, keep=keep).finish()
        rows = draft.step([(state, token_ids[:-1])])[0] if len(token_ids) > 1 else first_logits[None, :][:0]
    return torch.cat([first_logits[None, :], rows]), len(keep)


def early_guidance(target: VideoLM, prefill: Prefill) -> Guidance:
    """The guidance of a prefill that no layer has run of; runs it up to the guidance layer."""
    before = prefill.video_states(), prefill.text_states()
    prefill.run_layers(default_guidance_layer(target.info.num_layers))
    return make_guidance(*before, prefill.video_states(), prefill.text_states(), kind="scores")
