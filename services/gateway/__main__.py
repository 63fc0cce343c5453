"""Starts the gateway: `python -m slipstream.services.gateway --listen ADDRESS --target ADDRESS [--draft ADDRESS]`."""

import asyncio
import os
from collections.abc import Awaitable, Callable

import grpc

from slipstream.archive.queue import JobQueue
from slipstream.archive.service import ArchiveService, make_queue
from slipstream.archive.spill_queue import SpillQueue
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.document_captioner import DocumentCaptioner
from slipstream.captioning.film_captioner import FilmCaptioner
from slipstream.captioning.media import Media
from slipstream.errors import InvalidConfig, ModelNotUsable, SlipstreamError, VersionMismatch, with_notes
from slipstream.logs import get_logger
from slipstream.metrics import PROCESS, REGISTRY, GatewayMetrics, PeerFigures, watch_frames
from slipstream.rpc.peers import Peers
from slipstream.rpc.pools import Pool, peer_infos
from slipstream.rpc.reader import RemoteReader
from slipstream.rpc.server import HealthWatch, Lifecycle, run_service
from slipstream.rpc.tracing import tracing_here
from slipstream.services.gateway.archive_servicer import ArchiveServicer
from slipstream.services.gateway.scaler import open_scaler
from slipstream.services.gateway.servicer import GatewayServicer
from slipstream.video.paths import shared_part


def _check_roots(config: GatewayConfig) -> None:
    for root in map(shared_part, config.roots):
        if not os.path.isdir(root):  # `Path.is_dir` raises for a name that is too long
            raise InvalidConfig(f"--video-roots: {str(root)!r} is no directory")


async def setup(server: grpc.aio.Server, config: GatewayConfig, lifecycle: Lifecycle) -> Callable[[], Awaitable[None]]:
    """Registers the servicers when the target is there. KEDA, where it is to be told anything, is told before."""
    _check_roots(config)
    metrics = GatewayMetrics(REGISTRY)
    queue = make_queue(config, metrics)
    if isinstance(queue, SpillQueue):
        await queue.check_folder()
    if not config.scaler_listen:
        return await serve(server, config, lifecycle, metrics, queue)
    close_scaler = await open_scaler(config, queue, lifecycle.stopping)
    try:
        close_others = await serve(server, config, lifecycle, metrics, queue)
    except BaseException:
        await close_scaler()
        raise

    async def close() -> None:
        await close_scaler()
        await close_others()

    return close


async def serve(
    server: grpc.aio.Server,
    config: GatewayConfig,
    lifecycle: Lifecycle,
    metrics: GatewayMetrics,
    queue: JobQueue | None,
) -> Callable[[], Awaitable[None]]:
    """Waits for the target, checks that the draft fits if it is up already, and registers the servicers."""
    peers = Peers(
        config.target,
        config.draft,
        config.peer_security(),
        draft_away_s=config.draft_away_s,
        on_draft_fault=metrics.draft_faulted,
    )
    REGISTRY.register(PeerFigures(lambda: peer_infos((peers.target, peers.draft))))
    await peers.target.wait(config.start_timeout_s)
    if isinstance(peers.target, Pool):
        await peers.target.check()
    if peers.draft is not None:
        try:
            await peers.find_draft()
        except SlipstreamError as error:  # such as another release, which may be about to be replaced
            if isinstance(error, ModelNotUsable | InvalidConfig) and not isinstance(error, VersionMismatch):
                raise  # it will never fit
            get_logger().warning("draft.missing", reason=with_notes(error))
    media = Media(config, on_confined=metrics.confined)
    media.prepare()
    watch_frames(media.frames)
    captioner = GatewayCaptioner(config, peers, media, metrics)
    PROCESS.watch(captioner.places, *media.ceilings)
    reader = RemoteReader(config.reader, config.peer_security()) if config.reader else None
    documents = DocumentCaptioner(config, captioner, reader)
    films = FilmCaptioner(config, captioner)
    watch = HealthWatch("target", "", peers.target.ask, lifecycle)  # without it there is no gateway
    archive = ArchiveService(config, captioner, documents, watch, lifecycle, queue, tracing_here())
    GatewayServicer(config, captioner, documents, films, archive.info).register(server)
    needed = (watch, archive.watch)
    ArchiveServicer(config, archive.queue, lifecycle.stopping, tracing_here(), peers, needed).register(server)
    archive.start()
    watching = [asyncio.create_task(watch.run()), asyncio.create_task(peers.watch_draft())]

    async def close() -> None:
        await archive.close()
        for task in watching:
            task.cancel()
        media.close()
        await peers.close()
        if reader is not None:
            await reader.close()

    return close


if __name__ == "__main__":
    run_service("gateway", GatewayConfig, setup, ["slipstream.rpc.v1.Gateway", "slipstream.rpc.v1.Archive"])
