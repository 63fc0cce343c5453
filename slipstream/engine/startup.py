"""What a process that owns a model can be told at start, and how its model comes up."""

import os
import sys
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.budget import MIB, available_bytes, host_budget
from slipstream.config import between, one_of, option
from slipstream.engine.loading import load_model
from slipstream.engine.thread import ModelThread
from slipstream.engine.video_lm import VideoLM
from slipstream.errors import InvalidConfig
from slipstream.logs import LEVELS
from slipstream.rpc.tls import WireOptions

# -- config -----------------------------------------------------------------------------------------------------------

FRAMES_SHARE = 0.25
"""Of the memory that is left when the weights are loaded, how much frames may take when nobody said."""


@dataclass(frozen=True, kw_only=True)
class ModelServiceConfig(WireOptions):
    """Options of a model service."""

    model: str = option("checkpoint: a directory, or a hub id")
    listen: str = option("address to serve on: HOST:PORT, port 0 for any, or unix:/path")
    device: str = option("torch device of the weights", default="cpu")
    dtype: str = option(
        "weights are converted to this type", default="float32", check=one_of("float32", "bfloat16", "float16")
    )
    attention: str = option("attention kernel: auto, matmul, sdpa or flash", default="auto")
    threads: int = option("torch threads of the model; 0 leaves the choice to torch", default=0, check=between(0, 1024))
    cpu: int = option("core to run on; -1 leaves the choice to the system", default=-1, check=between(-1, 4095))
    max_sessions: int = option("captions served at once", default=16, check=between(1, 4096))
    kv_budget_mb: int = option(
        "MiB for keys and values of all captions; 0 takes a share of the memory that is available at start",
        default=0,
        check=between(0, 2**30),
    )
    frames_budget_mb: int = option(
        "MiB for the frames of captions that are not encoded yet; 0 takes a share of the memory that is available at"
        " start",
        default=0,
        check=between(0, 2**30),
    )
    log_level: str = option("least severe log event", default="info", check=one_of(*LEVELS))

    @property
    def num_threads(self) -> int:
        """Threads for torch: as told, or the cores this process may run on."""
        return self.threads or len(os.sched_getaffinity(0))

    def kv_budget(self, model: VideoLM, share: float, set_aside_bytes: int = 0) -> int:
        """Bytes for keys and values: as told, or `share` of what is available on the model's device beside
        `set_aside_bytes`."""
        if self.kv_budget_mb:
            return self.kv_budget_mb * MIB
        device = torch.device(model.info.device)
        available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
        return max(0, int(share * (available - set_aside_bytes)))

    @property
    def frames_budget_bytes(self) -> int:
        """Bytes for frames, which lie in the machine's memory whatever the device is."""
        return host_budget(self.frames_budget_mb, FRAMES_SHARE)

    def pin(self) -> None:
        """Ties the process to its core, if one was named. Raises `InvalidConfig` when there is no such core."""
        if self.cpu < 0:
            return
        if sys.platform != "linux":
            raise InvalidConfig("--cpu is supported on Linux only")
        try:
            os.sched_setaffinity(0, {self.cpu})
        except OSError:
            raise InvalidConfig(f"--cpu {self.cpu}: this machine has no such core for us") from None


# -- warmup -----------------------------------------------------------------------------------------------------------

# How a model comes up: loaded on its own thread, and one pass run, so that kernels are chosen and faults show.

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
