"""The pass that every model runs before it calls itself ready: kernels are chosen, memory is touched, faults show."""

import numpy as np

from slipstream.models.base import VideoLM

FRAMES, SIDE, STEPS = 2, 64, (1, 2, 4, 8)


def warm_up(model: VideoLM) -> None:
    """Encodes a few grey frames, prefills a prompt and judges a few windows. Runs on the model's thread."""
    plan = model.plan_prompt("Describe this video.", FRAMES, frame_size=(SIDE, SIDE))
    embeddings = model.encode_frames(np.full((FRAMES, SIDE, SIDE, 3), 127, dtype=np.uint8))
    state, _ = model.start_prefill(plan, embeddings).finish()
    for num_tokens in (size for size in STEPS if not model.strict_width or size <= model.strict_width):
        model.step([(state, [0] * num_tokens)])
        state.rollback(plan.num_tokens)
    state.close()
