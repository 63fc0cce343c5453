"""Starts the draft service: `python -m slipstream.services.draft --model DIR --listen ADDRESS`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from slipstream.config import between, option
from slipstream.engine.draft_engine import DraftEngine, DraftLimits
from slipstream.engine.startup import ModelServiceConfig, start_model
from slipstream.engine.video_lm import VideoLM
from slipstream.metrics import REGISTRY, ModelMetrics, watch_frames
from slipstream.rpc.server import Lifecycle, run_service
from slipstream.services.draft.servicer import DraftServicer, Targets

SERVES = ("slipstream.rpc.v1.Draft",)
KV_SHARE = 0.25
"""Of the memory that is left when the weights are loaded, how much keys and values may take when nobody said."""
EMBEDDINGS_RATIO = 1 / 3
"""Bytes of embeddings that are kept to one of keys and values, when nobody said."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig(ModelServiceConfig):
    """Options of the draft service."""

    embedding_cache_mb: int = option(
        "MiB for the embeddings of videos that were captioned before; 0 keeps none, -1 a third as much as keys and"
        " values",
        default=-1,
        check=between(-1, 2**30),
    )
    guidance_targets: str = option(
        "addresses of the targets that guidance may be pulled from, separated by ','; empty for any",
        default="",
    )

    @property
    def allowed_targets(self) -> frozenset[str]:
        """Those addresses; none: any."""
        return frozenset(filter(None, (address.strip() for address in self.guidance_targets.split(","))))


async def setup(
    server: grpc.aio.Server,
    config: DraftConfig,
    lifecycle: Lifecycle,
    wrap_model: Callable[[VideoLM], VideoLM] = lambda model: model,
) -> Callable[[], Awaitable[None]]:
    """Loads the weights, runs a warm-up pass and registers the servicer of what `wrap_model` makes of the model."""
    model, thread = await start_model(config, lifecycle.fail, writes=True)
    kv_budget_bytes, embedding_cache_bytes = config.budgets(
        model, KV_SHARE, config.embedding_cache_mb, EMBEDDINGS_RATIO
    )
    await config.open_static_steps(model, thread, kv_budget_bytes)
    limits = DraftLimits(
        max_sessions=config.max_sessions,
        kv_budget_bytes=kv_budget_bytes,
        frames_budget_bytes=config.frames_budget_bytes,
        embedding_cache_bytes=embedding_cache_bytes,
    )
    metrics = ModelMetrics(REGISTRY)
    model = wrap_model(model)
    model.on_pass = metrics.passed
    engine = DraftEngine(model, thread, limits)
    metrics.watch(engine.admission)
    watch_frames(engine.frames)
    servicer = DraftServicer(engine, Targets(config.allowed_targets, config.peer_security()))
    servicer.register(server)

    async def close() -> None:
        await servicer.close()
        thread.close()

    return close


if __name__ == "__main__":
    run_service("draft", DraftConfig, setup, SERVES)
