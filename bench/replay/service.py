"""A model service at another device's pace: `python -m bench.replay.service --role target --replay TABLE ...`.

All other options are those of the service itself, which is the real one.
"""

import argparse
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from bench.replay.device_times import ROLES, load_device_times
from bench.replay.model import ReplayedModel
from slipstream.config import between, option
from slipstream.engine.target_engine import default_guidance_layer
from slipstream.engine.video_lm import VideoLM
from slipstream.logs import get_logger
from slipstream.rpc.server import Lifecycle, run_service
from slipstream.services.draft import __main__ as draft
from slipstream.services.target import __main__ as target


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    replay: str = option("passes last as long as in this table of a device, see bench/replay/device_times.py")
    replay_speed: float = option("divides all times of --replay", default=1.0, check=between(0.001, 1000))
    replay_overlap: float = option(
        "share of a decoding pass in which rows that ride along take no time",
        default=1.0,
        check=between(0, 1),
    )

    def paced(self, model: VideoLM, role: str, *, guidance_layer: int = 0) -> ReplayedModel:
        """The model at the pace of the table's part for `role`. Raises `InvalidConfig` when there is no such table."""
        times = load_device_times(self.replay, role, self.replay_speed)
        note = "passes last as a table says"
        get_logger().warning("replay.on", table=times.name, speed=self.replay_speed, note=note)
        by_alpha, overlap = role == "draft", self.replay_overlap
        return ReplayedModel(model, times, by_alpha=by_alpha, guidance_layer=guidance_layer, overlap=overlap)


@dataclass(frozen=True, kw_only=True)
class ReplayTargetConfig(target.TargetConfig, ReplayOptions):
    """Options of a target that replays."""


@dataclass(frozen=True, kw_only=True)
class ReplayDraftConfig(draft.DraftConfig, ReplayOptions):
    """Options of a draft that replays."""


async def setup_target(
    server: grpc.aio.Server, config: ReplayTargetConfig, lifecycle: Lifecycle
) -> Callable[[], Awaitable[None]]:
    def paced(model: VideoLM) -> VideoLM:
        layer = config.guidance_layer or default_guidance_layer(model.info.num_layers)
        return config.paced(model, "target", guidance_layer=layer)

    return await target.setup(server, config, lifecycle, paced)


async def setup_draft(
    server: grpc.aio.Server, config: ReplayDraftConfig, lifecycle: Lifecycle
) -> Callable[[], Awaitable[None]]:
    return await draft.setup(server, config, lifecycle, lambda model: config.paced(model, "draft"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.replay.service", add_help=False, allow_abbrev=False)
    parser.add_argument("--role", choices=ROLES, required=True)
    given, sys.argv[1:] = parser.parse_known_args()
    if given.role == "target":
        run_service("target", ReplayTargetConfig, setup_target, target.SERVES)
    else:
        run_service("draft", ReplayDraftConfig, setup_draft, draft.SERVES)


if __name__ == "__main__":
    main()
