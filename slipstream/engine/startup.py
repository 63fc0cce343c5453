"""What a process that owns a model can be told at start, and how its model comes up."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from slipstream.budget import MIB, available_bytes, host_budget, num_cores
from slipstream.config import between, one_of, option
from slipstream.engine.loading import AUTO, DTYPES, load_model
from slipstream.engine.parallel.mirror import Director
from slipstream.engine.parallel.mirrored_recurrent import mirrored_runner
from slipstream.engine.parallel.ranks import Leader, RankOrder, lead, rank_here
from slipstream.engine.parallel.shards import MOST_ORDERED_ROWS, check_checkpoint
from slipstream.engine.parallel.steps import MirroredSteps
from slipstream.engine.static.steps import StaticSteps
from slipstream.engine.thread import ModelThread
from slipstream.engine.trial import relative_error
from slipstream.engine.video_lm import DecodeState, VideoLM
from slipstream.errors import DeviceLost, InvalidConfig, ModelNotUsable, SlipstreamError
from slipstream.logs import get_logger
from slipstream.rpc.service_options import ServiceOptions

# -- config -----------------------------------------------------------------------------------------------------------

FRAMES_SHARE = 0.25
"""Of the memory that is left when the weights are loaded, how much frames may take when nobody said."""


@dataclass(frozen=True, kw_only=True)
class ModelServiceConfig(ServiceOptions):
    """Options of a model service."""

    pool_flags: ClassVar[Sequence[str]] = ("--kv-budget-mb",)
    """What decides how large the pool of static steps is."""

    model: str = option("checkpoint: a directory, or a hub id")
    device: str = option("torch device of the weights", default="cpu")
    dtype: str = option(
        "weights are converted to this type; auto: bfloat16 on CUDA, float32 elsewhere",
        default=AUTO,
        check=one_of(*DTYPES),
    )
    gpus: str = option(
        "numbers of the GPUs that share the model, such as 0,1,2,3 (tensor parallelism); none: --device alone",
        default="",
    )
    ranks: int = option(
        "processes that share the model on the CPU; as many GPUs are named by --gpus", default=1, check=between(1, 64)
    )
    attention: str = option("attention kernel: auto, matmul, sdpa, flash, joined or compiled", default="auto")
    static_steps: str = option(
        "decoding steps of fixed shapes over one pool of keys and values, which a GPU replays as graphs: auto, on or"
        " off; auto: on CUDA",
        default=AUTO,
        check=one_of(AUTO, "on", "off"),
    )
    threads: int = option("torch threads of the model; 0: the cores that it may use", default=0, check=between(0, 1024))
    prefill_threads: int = option(
        "torch threads of its prefills and of all else that is not decoding; 0: those of --threads",
        default=0,
        check=between(0, 1024),
    )
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

    @property
    def devices(self) -> tuple[str, ...]:
        """One for each process that shares the model: under `torchrun` all that it has started, each with the GPU of
        its number on its machine. Raises `InvalidConfig`."""
        if rank_here() is not None:
            if self.gpus or self.ranks > 1:
                raise InvalidConfig("torchrun says which ranks there are; leave out --gpus and --ranks")
            device = f"cuda:{_told_by_torchrun('LOCAL_RANK')}" if self.device.startswith("cuda") else self.device
            return (device,) * _told_by_torchrun("WORLD_SIZE")
        if not self.gpus:
            if self.ranks > 1 and self.device != "cpu":
                raise InvalidConfig("--ranks shares a model on the CPU; name the GPUs instead, such as --gpus 0,1")
            return (self.device,) * self.ranks
        numbers = [part.strip() for part in self.gpus.split(",")]
        if not all(number.isdecimal() for number in numbers) or len(set(numbers)) < len(numbers):
            raise InvalidConfig(f"--gpus {self.gpus}: numbers of different GPUs are wanted, such as 0,1,2,3")
        if self.ranks not in (1, len(numbers)) or self.device not in ("cpu", f"cuda:{numbers[0]}"):
            raise InvalidConfig("--gpus says which devices there are, and how many; leave out --device and --ranks")
        return tuple(f"cuda:{int(number)}" for number in numbers)

    @property
    def num_threads(self) -> int:
        """Threads for torch: as told, or the cores this process may use."""
        return self.threads or num_cores()

    def budgets(self, model: VideoLM, share: float, cache_mb: int, cache_ratio: float) -> tuple[int, int]:
        """Bytes for keys and values of captions, and for a cache of what is kept of earlier ones. Where nobody said how
        many, a caption that takes all of them leaves room for the pass that computes them. Raises `ModelNotUsable` when
        there is no room for any.

        Args:
            share: of what is available on the model's device, where nobody said how much.
            cache_mb: MiB of the cache, or -1 for `cache_ratio` of the bytes for keys and values.
        """
        asked_bytes = None if cache_mb < 0 else cache_mb * MIB
        least_bytes = model.kv_bytes(1)
        if self.kv_budget_mb:
            kv_bytes = self.kv_budget_mb * MIB
            if kv_bytes < least_bytes:
                least_mb = -(-least_bytes // MIB)
                raise ModelNotUsable(f"--kv-budget-mb {self.kv_budget_mb}: a caption takes {least_mb} at least")
            return kv_bytes, int(cache_ratio * kv_bytes) if asked_bytes is None else asked_bytes
        device = torch.device(model.info.device)
        available = model.room(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes())
        if asked_bytes is None:
            kv_bytes = int(share * available / (1 + cache_ratio))
        else:
            kv_bytes = int(share * max(0, available - asked_bytes))
        cache_bytes = int(cache_ratio * kv_bytes) if asked_bytes is None else asked_bytes
        prefill_bytes = model.prefill_bytes(kv_bytes)
        kv_bytes = min(kv_bytes, available - cache_bytes - prefill_bytes)
        if kv_bytes < least_bytes:
            missing = max(0, cache_bytes + prefill_bytes + least_bytes - available)
            raise ModelNotUsable(
                f"{model.info.model_id}: the weights leave {available / 1e9:.1f} GB on {device}, too little for the"
                f" keys and values of a caption beside {prefill_bytes / 1e9:.1f} GB that a prompt needs as it is run"
                f" ({missing / 1e9:.1f} GB are missing); give target and draft a GPU each (--draft-device), spread the"
                " target over several with --gpus, take a smaller checkpoint, or set --kv-budget-mb (slipstream up:"
                " --target-kv-budget-mb, --draft-kv-budget-mb)"
            )
        return kv_bytes, cache_bytes

    async def open_static_steps(
        self, model: VideoLM, thread: ModelThread, num_bytes: int, *, fix_widths: bool = False
    ) -> None:
        """Has a model that is ready take static steps over a pool of so many bytes, where that was asked for.

        `fix_widths`: on CUDA, see `StaticSteps.fix_widths`. A CPU pays for every row.

        Raises `ModelNotUsable` when there is no room for the pool.
        """
        if model.runner.recurs:
            if self.static_steps == "on":
                raise ModelNotUsable(f"{model.info.model_id} has linear attention; start it without --static-steps on")
            return
        on_cuda = torch.device(model.info.device).type == "cuda"
        if self.static_steps == "on" or (self.static_steps == AUTO and on_cuda):
            try:
                await thread.run(lambda: try_static_steps(model, num_bytes, fix_widths=fix_widths and on_cuda))
            except (ModelNotUsable, torch.OutOfMemoryError) as error:
                why = str(error).partition("\n")[0]
                advice = f"set a lower {' or '.join(self.pool_flags)}, or start with --static-steps off"
                raise ModelNotUsable(f"{why}; {advice}") from error

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


def _told_by_torchrun(name: str) -> int:
    """Raises `InvalidConfig` where it, or whatever else has said which rank this is, has not said that."""
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise InvalidConfig(f"RANK is set, as torchrun sets it, and {name} is not; start with torchrun, or unset RANK")
    return int(value)


# -- warmup -----------------------------------------------------------------------------------------------------------

# How a model comes up: loaded on its own thread, and one pass run, so that kernels are chosen and faults show.

FRAMES, SIDE, STEPS = 2, 64, (1, 2, 4, 8)
MPS_VARIABLE, MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
"""Where clients look for the daemon's pipes."""
MAX_DIFFERENCE = 0.05
"""Of a static step's logits from those of any other step, beside the largest: more than 16 bits explain."""


async def start_model(
    config: ModelServiceConfig, fail: Callable[[SlipstreamError], None], *, strict_width: int = 0, writes: bool = False
) -> tuple[VideoLM, ModelThread]:
    """A model that is ready, and the thread that owns it. Raises `ModelNotUsable`, or `InvalidConfig` for the core.

    `fail` hears, on the event loop, when its device is of no use any more. `writes`: lines, as a draft does.
    """
    if rank_here():
        raise InvalidConfig("torchrun spreads targets only; start this service by itself, or with --gpus")
    if sys.flags.optimize > 1:
        raise InvalidConfig(
            "Python leaves out docstrings here, which transformers reads: start it without -OO, or with"
            " PYTHONOPTIMIZE=1 in place of 2"
        )
    config.pin()
    order = rank_order(config, strict_width)
    if config.prefill_threads and order.size > 1:
        raise InvalidConfig("--prefill-threads works with one process; leave it out where several share the model")
    thread = ModelThread(config.num_threads, config.prefill_threads)
    loop = asyncio.get_running_loop()
    thread.on_device_lost = partial(_tell_lost, loop, order.devices[0], fail)

    def on_lost(error: SlipstreamError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may have ended
            loop.call_soon_threadsafe(fail, error)

    model = await thread.run(lambda: _load(order) if order.size == 1 else load_together(order, on_lost)[0])
    model.info = replace(model.info, gpu_uuids=gpu_uuids(order.devices), uses_mps=uses_mps())
    await thread.run(lambda: warm_up(model, writes=writes))
    return model, thread


def gpu_uuids(devices: Sequence[str]) -> tuple[str, ...]:
    """Of those of these devices that are GPUs of this machine, sorted."""
    gpus = [device for device in devices if torch.device(device).type == "cuda"]
    return tuple(sorted({str(torch.cuda.get_device_properties(device).uuid) for device in gpus}))


def uses_mps() -> bool:
    """Whether CUDA finds the pipes of an MPS daemon, and so becomes a client of it."""
    return (Path(os.environ.get(MPS_VARIABLE) or MPS_FOLDER) / "control").exists()


def rank_order(config: ModelServiceConfig, strict_width: int) -> RankOrder:
    """What every process that shares the model is told. Raises `InvalidConfig`."""
    if strict_width > MOST_ORDERED_ROWS and len(config.devices) > 2:
        raise InvalidConfig(
            f"--strict-width is at most {MOST_ORDERED_ROWS} where more than two processes share the model: sums of more"
            " rows have no order that they keep"
        )
    return RankOrder(config.model, config.devices, config.dtype, config.attention, strict_width, config.num_threads)


def _load(order: RankOrder, **options: Any) -> VideoLM:
    return load_model(
        order.model,
        dtype=order.dtype,
        device=order.devices[0],
        attention=order.attention,
        strict_width=order.strict_width,
        **options,
    )


def load_together(order: RankOrder, on_lost: Callable[[SlipstreamError], None]) -> tuple[VideoLM, Leader]:
    """A model whose other shares are held by other processes, and what holds those."""
    if rank_here() is None:  # what torchrun has started waits for this rank, and not for as long as a download takes
        check_checkpoint(order.model, order.size)
    leader = lead(order, on_lost)
    try:
        director = Director(leader, torch.device(order.devices[0]))
        model = _load(order, group=leader, make_runner=partial(mirrored_runner, director=director))
        model.make_static_steps = partial(MirroredSteps, director=director)
        leader.ready()
    except BaseException as error:
        loss = leader.loss
        leader.close()
        if loss is not None and not isinstance(error, ModelNotUsable):
            raise ModelNotUsable(f"{order.model}: {loss}") from error
        raise
    return model, leader


def _tell_lost(
    loop: asyncio.AbstractEventLoop, device: str, fail: Callable[[SlipstreamError], None], error: BaseException
) -> None:
    reason = str(error).partition("\n")[0]
    loop.call_soon_threadsafe(fail, DeviceLost(f"{device} failed, and this process cannot use it any more: {reason}"))


def try_static_steps(model: VideoLM, num_bytes: int, *, fix_widths: bool = False) -> None:
    """Has the model take static steps if they can be had and their logits are those of its other steps, up to
    rounding."""
    model.open_static_steps(num_bytes)
    steps, model.static = model.static, None
    assert steps is not None, "they have just been opened"
    differences = _differences(model, steps)
    facts: dict[str, Any] = {"attention": steps.attention, "layers": steps.layers}
    if not differences:
        get_logger().warning("static_steps.none", **facts, missing=list(map(str, steps.missing)))
        steps.drop()
    elif not (difference := float(np.max(differences))) <= MAX_DIFFERENCE:  # which NaN is not either
        get_logger().warning("static_steps.differ", difference=difference, attention=steps.attention)
        steps.drop()
    else:
        model.static = steps
        if fix_widths:
            steps.fix_widths()
        steps.prepare()
        facts |= {"fixed_widths": steps.fixed_widths, "missing": list(map(str, steps.missing))}
        get_logger().info("static_steps.on", **facts, difference=difference)


def _differences(model: VideoLM, steps: StaticSteps) -> list[float]:
    """How far the logits of each static step are from those of an ordinary step, beside the largest logit."""
    state = _short_prefill(model)
    differences = []
    for num_tokens in _steps_of(model):
        window = [0] * num_tokens
        (right,) = model.step([(state, window)])
        state.rollback(state.num_prompt_tokens)
        found = steps.run([(state, window)])
        state.rollback(state.num_prompt_tokens)
        if found is not None:
            differences.append(relative_error(found[0].logits, right))
    state.close()
    return differences


def warm_up(model: VideoLM, *, writes: bool = False) -> None:
    """Encodes a few grey frames, prefills a prompt, judges a few windows and `writes` a token. Runs on the model's
    thread."""
    state = _short_prefill(model)
    for num_tokens in _steps_of(model):
        model.step([(state, [0] * num_tokens)])
        state.rollback(state.num_prompt_tokens)
    if writes:
        model.write_ahead([(state, 0)], 1)
    state.close()


def _short_prefill(model: VideoLM) -> DecodeState:
    plan = model.plan_prompt("Describe this video.", FRAMES, frame_size=(SIDE, SIDE))
    embeddings = model.encode_frames(np.full((FRAMES, SIDE, SIDE, 3), 127, dtype=np.uint8))
    return model.start_prefill(plan, embeddings).finish()[0]


def _steps_of(model: VideoLM) -> list[int]:
    return [size for size in STEPS if not model.strict_width or size <= model.strict_width]
