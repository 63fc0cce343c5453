"""Where the draft agrees with the target: its own choice after every prefix of the target's text.

This is the draft that a stack runs, with the same tokens kept, but fed the text as it is; so it says for every output
position whether a draft token there is accepted, also where a stack never asked. Runs in the reference process.
"""

import torch
from torch import Tensor

from bench.reference import engine_model, frames_of
from bench.tasks import Agreement, Task
from services.target.engine import default_guidance_layer
from slipstream.models import VideoLM
from slipstream.pruning import Guidance, get_pruner, prune
from slipstream.pruning.uv import make_guidance
from slipstream.rpc.codec import Frames


def draft_agreement(task: Task, token_ids: tuple[int, ...], pruner: str, alpha: float) -> Agreement:
    """Agreement on the text `token_ids`, with `pruner` pruning a share `alpha` of the video."""
    draft, frames = engine_model(task.draft), frames_of(task)
    guidance = _guidance(engine_model(task.target), task.prompt, frames)
    plan = draft.plan_prompt(task.prompt, len(frames))
    keep = prune(get_pruner(pruner), plan.num_video_tokens, alpha, guidance=guidance, seed=0)
    with torch.inference_mode():
        prefill = draft.start_prefill(plan, draft.encode_frames(frames), keep=keep)
        state, first_logits = prefill.finish()
        rows = draft.step([(state, token_ids[:-1])])[0] if len(token_ids) > 1 else first_logits[None, :][:0]
    choices = torch.cat([first_logits[None, :], rows]).argmax(dim=-1)
    return Agreement(tuple((choices == torch.tensor(token_ids)).tolist()), len(keep))


def _guidance(target: VideoLM, prompt: str, frames: Frames) -> Guidance:
    plan = target.plan_prompt(prompt, len(frames))
    with torch.inference_mode():
        prefill = target.start_prefill(plan, target.encode_frames(frames))
        before: tuple[Tensor, Tensor] = prefill.video_states(), prefill.text_states()
        prefill.run_layers(default_guidance_layer(target.info.num_layers))
        return make_guidance(*before, prefill.video_states(), prefill.text_states(), kind="scores")
