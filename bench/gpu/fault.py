"""`gpu-fault`: an assert that fails on the device, in one session of a running target, must end its process soon.

After it CUDA gives the process no other answer than an error: a target that lived on would say SERVING and fail every
caption. The target is the real one, with the pocket model; this module is also that service, with the assert in it:
`python -m bench.gpu.fault --model ... --fails-at 8`.
"""

import asyncio
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from bench.common import held_out_clips, run_caption, run_to_end, say
from bench.gpu.checks import Report, make_gpu_parser, parse_device
from slipstream import CaptionOptions, connect_async
from slipstream.config import between, option
from slipstream.engine import thread
from slipstream.engine.segments import PassRows, Window
from slipstream.engine.thread import finish_work
from slipstream.engine.video_lm import DecodeState, VideoLM
from slipstream.errors import SlipstreamError
from slipstream.logs import get_logger
from slipstream.rpc.server import Lifecycle, run_service
from slipstream.services.target import __main__ as target
from slipstream.stack.local import Stack, StackOptions
from tests.support.processes import logged

MOST_S, PATIENCE_S = 5.0, 60.0
FAILS_AT = 8
BLOW = "fault.planted"

# -- service ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FaultyTargetConfig(target.TargetConfig):
    fails_at: int = option("output tokens at which an assert fails on the device", check=between(1, 10**6))


class FaultyModel(VideoLM):
    """Another model, whose parts it shares, until one of its sessions is so long."""

    def __init__(self, model: VideoLM, fails_at: int) -> None:
        vars(self).update(vars(model))
        self._fails_at = fails_at

    def _run_step(self, batch: Sequence[tuple[DecodeState, Window]]) -> list[PassRows]:
        if any(state.num_tokens - state.num_prompt_tokens >= self._fails_at for state, _ in batch):
            get_logger().warning(BLOW, at_s=time.monotonic())
            fail_on(torch.device(self.info.device))
        return super()._run_step(batch)


def fail_on(device: torch.device) -> None:
    """An index out of range, which a kernel finds out. On a CPU, which cannot fail so, CUDA's error, behind which
    nothing answers this process."""
    if device.type != "cuda":
        thread.device_answers = lambda: False
        raise RuntimeError("CUDA error: device-side assert triggered (none: this is a CPU)")
    torch.zeros(1, device=device)[torch.tensor([1 << 20], device=device)].sum()
    finish_work(device)


async def setup(
    server: grpc.aio.Server, config: FaultyTargetConfig, lifecycle: Lifecycle
) -> Callable[[], Awaitable[None]]:
    return await target.setup(server, config, lifecycle, lambda model: FaultyModel(model, config.fails_at))


# -- check ------------------------------------------------------------------------------------------------------------


async def measure(given: Namespace, report: Report) -> dict[str, Any]:
    """Seconds from the fault to the end of the process: both read the machine's monotonic clock."""
    (clip,) = held_out_clips(1)
    options = StackOptions(
        draft_model=None,
        device=str(given.device),
        threads=1,
        restart=False,
        modules={**StackOptions().modules, "target": "bench.gpu.fault"},
        # A small pool: what the driver takes to free the half of a GPU is no part of what is timed.
        extra_flags={"target": ("--fails-at", str(FAILS_AT), "--kv-budget-mb", "256", "--prefix-cache-mb", "0")},
    )
    asked = CaptionOptions(method="autoregressive", num_frames=8, max_new_tokens=64)
    caption_error = ""
    async with Stack(options, report=say) as stack, connect_async(stack.gateway_address) as captioner:
        process = stack.processes["target"]
        captioning = asyncio.create_task(run_caption(captioner, clip, asked))
        try:
            status = await asyncio.wait_for(process.wait_exit(), PATIENCE_S)
        except TimeoutError:
            status = None
        ended_s = time.monotonic()
        blows = logged(process.log_path, BLOW)
        captioning.cancel()
        try:
            await captioning
        except (SlipstreamError, asyncio.CancelledError) as error:
            caption_error = f"{type(error).__name__}: {error}"
    gone_s = ended_s - blows[0]["at_s"] if blows and status is not None else None
    report.equals("the fault was planted", len(blows) > 0, True)
    report.equals("the target ended with an error", status not in (None, 0), True)
    report.at_most("from the fault to its end, s", gone_s, MOST_S)
    return {"exit_status": status, "gone_s": gone_s, "caption_ended_with": caption_error}


def main(argv: Sequence[str]) -> None:
    given = parse_device(make_gpu_parser("gpu-fault", "A failed assert on the device ends the target."), argv)
    report = Report(given)
    report.finish(labels=(), **run_to_end(measure(given, report)))


if __name__ == "__main__":
    run_service("target", FaultyTargetConfig, setup, target.SERVES)
