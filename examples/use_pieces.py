"""Pieces of the library alone: a pruner on tensors, and the protocol with a toy model."""

import torch

from slipstream.pruning import Guidance, VideoTokens, get_pruner, prune
from slipstream.speculation.pacing import CostModel, Sequential
from slipstream.speculation.pipeline import Pipeline
from slipstream.speculation.protocol import JudgeWindow, RestartLine, StopRule, judge_window

scores = torch.rand(8 * 49, generator=torch.Generator().manual_seed(0))  # one for each token of 8 frames
kept = prune(get_pruner("uv"), VideoTokens(8 * 49, num_steps=8), alpha=0.9, guidance=Guidance(scores=scores))
print(f"{len(kept)} of {len(scores)} video tokens kept, the first ones {kept[:4].tolist()}")

model = lambda text: (3 * sum(text[-3:]) + len(text)) % 50  # noqa: E731 (tokens in, the likeliest next one out)
pipeline, draft, num_passes = Pipeline(Sequential(4), CostModel(), max_window=4, vocab_size=50), [], 0
pipeline.on_draft_joining()
actions = [*pipeline.on_draft_ready(num_known=0), JudgeWindow((), 1)]  # the first pass is the prefill's
while pipeline.finish_reason is None:
    match actions.pop(0) if actions else None:
        case JudgeWindow(window):
            text, num_passes = pipeline.committed, num_passes + 1
            choices = [model([*text, *window[:known]]) for known in range(len(window) + 1)]
            actions += pipeline.on_verdict(judge_window(window, choices, len(text), StopRule((), max_new_tokens=60)))
        case RestartLine(epoch, keep, suffix):
            draft[keep:] = suffix
        case None:  # all is done: the draft, which is right six times out of seven, writes its next token
            draft.append(model(draft) if len(draft) % 7 else 0)
            actions += pipeline.on_draft_tokens(epoch, len(draft) - 1, draft[-1:])
print(f"{len(pipeline.committed)} tokens in {num_passes} target passes, {pipeline.num_accepted} of them the draft's")
