"""How a model comes up: loaded on its own thread, and one pass run, so that kernels are chosen and faults show."""

import numpy as np

from slipstream.models.base import VideoLM
from slipstream.models.config import ModelServiceConfig
from slipstream.models.registry import load_model
from slipstream.models.thread import ModelThread

FRAMES, SIDE, STEPS = 2, 64, (1, 2, 4, 8)


async def start_model(config: ModelServiceConfig, *, strict_width: int = 0) -> tuple[VideoLM, ModelThread]:
    """A model that is ready, and the thread that owns it. Raises `ModelNotUsable`, or `InvalidConfig` for the core."""
    config.pin()
    thread = ModelThread(config.num_threads)
    model = await thread.run(
        lambda: load_model(
            config.model,
            dtype=config.dtype,
            device=config.device,
            attention=config.attention,
            strict_width=strict_width,
        )
    )
    await thread.run(lambda: warm_up(model))
    return model, thread


def warm_up(model: VideoLM) -> None:
    """Encodes a few grey frames, prefills a prompt and judges a few windows. Runs on the model's thread."""
    plan = model.plan_prompt("Describe this video.", FRAMES, frame_size=(SIDE, SIDE))
    embeddings = model.encode_frames(np.full((FRAMES, SIDE, SIDE, 3), 127, dtype=np.uint8))
    state, _ = model.start_prefill(plan, embeddings).finish()
    for num_tokens in (size for size in STEPS if not model.strict_width or size <= model.strict_width):
        model.step([(state, [0] * num_tokens)])
        state.rollback(plan.num_tokens)
    state.close()
