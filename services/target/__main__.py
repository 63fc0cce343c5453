"""Starts the target service: `python -m slipstream.services.target --model DIR --listen ADDRESS`."""

import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import grpc

from slipstream.config import between, option, parse_config
from slipstream.engine.parallel.follower import run_follower
from slipstream.engine.parallel.ranks import RankOrder, rank_here
from slipstream.engine.prefix_cache import share_of_keys
from slipstream.engine.startup import ModelServiceConfig, rank_order, start_model
from slipstream.engine.target_engine import TargetEngine, TargetLimits
from slipstream.engine.video_lm import VideoLM
from slipstream.errors import InvalidConfig, ModelNotUsable
from slipstream.logs import configure_logs, log_all_output
from slipstream.metrics import REGISTRY, ModelMetrics, watch_frames
from slipstream.rpc.server import Lifecycle, run_service
from slipstream.services.target.servicer import TargetServicer

SERVES = ("slipstream.rpc.v1.Target",)
KV_SHARE = 0.5
"""Of the memory that is left when the weights are loaded, how much keys and values may take when nobody said."""
PREFIX_RATIO = 0.5
"""Bytes of prefills that are kept to one of keys and values, when nobody said."""


@dataclass(frozen=True, kw_only=True)
class TargetConfig(ModelServiceConfig):
    """Options of the target service."""

    pool_flags: ClassVar[Sequence[str]] = ("--kv-budget-mb", "--prefix-cache-mb")

    guidance_layer: int = option(
        "layer L after which guidance is taken; 0 for 20, at most a quarter of the layers",
        default=0,
        check=between(0, 512),
    )
    max_queued: int = option(
        "captions that may wait for a place; more are refused", default=64, check=between(0, 100_000)
    )
    queue_timeout_s: float = option(
        "seconds that a caption may wait for a place", default=60.0, check=between(0.01, 86_400)
    )
    prefix_cache_mb: int = option(
        "MiB for the prefills of videos that were captioned before; 0 keeps none, -1 half as much as keys and values",
        default=-1,
        check=between(-1, 2**30),
    )
    idle_timeout_s: float = option(
        "seconds that a session's caller may leave the target waiting for its next message",
        default=600.0,
        check=between(0.01, 86_400),
    )
    strict_width: int = option(
        "run every pass alone and at this width, so that windows are judged by the very kernels of plain decoding;"
        " longer windows are cut, prefills are not reused; 0 is off; -1: passes that happen to run alone have a fixed"
        " width on CUDA, where that costs at most 5%",
        default=-1,
        check=between(-1, 1024),
    )
    ride_along: float = option(
        "how much longer a pass may become by rows of the archive's next prompts, as a share of its time, at most 0.1"
        " beside a caption that somebody waits for; 0: prompts run by themselves",
        default=0.0,
        check=between(0.0, 100.0),
    )
    advertise: str = option(
        "address at which drafts reach this very process, where the gateway's --target leads to several;"
        " :PORT stands for this machine's name",
        default="",
    )

    @property
    def told_width(self) -> int:
        """Of every pass; 0 where none was named."""
        return max(0, self.strict_width)

    def check_rides(self) -> None:
        """Raises `InvalidConfig` for a model whose passes carry nothing."""
        if self.ride_along and (self.told_width or len(self.devices) > 1):
            raise InvalidConfig("--ride-along is for a model in one process, without --strict-width; leave it out")

    @property
    def own_address(self) -> str:
        """Where drafts are told to pull guidance; empty: where the gateway calls."""
        return f"{socket.gethostname()}{self.advertise}" if self.advertise.startswith(":") else self.advertise


async def setup(
    server: grpc.aio.Server,
    config: TargetConfig,
    lifecycle: Lifecycle,
    wrap_model: Callable[[VideoLM], VideoLM] = lambda model: model,
) -> Callable[[], Awaitable[None]]:
    """Loads the weights, runs a warm-up pass and registers the servicer of what `wrap_model` makes of the model."""
    config.check_rides()
    model, thread = await start_model(config, lifecycle.fail, strict_width=config.told_width)
    if config.ride_along and model.runner.recurs:
        raise ModelNotUsable(f"{config.model} has linear attention; start it without --ride-along")
    prefix_cache_mb = 0 if config.told_width else config.prefix_cache_mb
    kv_budget_bytes, prefix_cache_bytes = config.budgets(model, KV_SHARE, prefix_cache_mb, PREFIX_RATIO)
    keys_share = share_of_keys(model.runner.kv_bytes_per_token, model.info.hidden_size)
    pool_bytes = kv_budget_bytes + int(keys_share * prefix_cache_bytes)
    await config.open_static_steps(model, thread, pool_bytes, fix_widths=config.strict_width < 0)
    limits = TargetLimits(
        guidance_layer=config.guidance_layer,
        max_sessions=config.max_sessions,
        kv_budget_bytes=kv_budget_bytes,
        frames_budget_bytes=config.frames_budget_bytes,
        max_queued=config.max_queued,
        queue_timeout_s=config.queue_timeout_s,
        prefix_cache_bytes=prefix_cache_bytes,
        ride_along=config.ride_along,
    )
    metrics = ModelMetrics(REGISTRY)
    model = wrap_model(model)
    model.on_pass = metrics.passed
    engine = TargetEngine(model, thread, limits)
    metrics.watch(engine.admission)
    watch_frames(engine.frames)
    servicer = TargetServicer(engine, config.own_address, idle_timeout_s=config.idle_timeout_s)
    servicer.register(server)

    async def close() -> None:
        thread.close()

    return close


def _follower_order() -> RankOrder:
    """What every rank is told the same. Raises `InvalidConfig`."""
    config = parse_config(TargetConfig, "target", sys.argv[1:], os.environ)
    return rank_order(config, config.told_width)


def main() -> None:
    """Serves; as a rank of `torchrun` other than 0, holds a share of the model for the one that does."""
    if rank_here():
        log_all_output()
        configure_logs("target")
        run_follower(_follower_order)
    run_service("target", TargetConfig, setup, SERVES)


if __name__ == "__main__":
    main()
