"""What all endpoints share: configuration, gateways, room for requests, who may call, files, and figures."""

import asyncio
from dataclasses import dataclass, field

from slipstream.captioning.fetch import Fetcher, parse_hosts
from slipstream.rpc.callers import Places
from slipstream.rpc.security import TokenFile
from slipstream.rpc.tracing import Tracing
from slipstream.services.front.batches import Batches
from slipstream.services.front.bodies import request_places, spool_places
from slipstream.services.front.config import FrontConfig
from slipstream.services.front.figures import FrontFigures
from slipstream.services.front.file_store import FileStore
from slipstream.services.front.gateways import Gateways
from slipstream.services.front.norms import KnownNorms
from slipstream.services.front.readiness import Readiness
from slipstream.services.front.sources import Sources


@dataclass(frozen=True)
class Front:
    """Of one process."""

    config: FrontConfig
    gateways: Gateways
    sources: Sources
    requests: Places
    spooled: Places
    figures: FrontFigures
    readiness: Readiness
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process begins to end."""
    tokens: TokenFile | None = None
    """None: nobody is asked who it is."""
    files: FileStore | None = None
    batches: Batches | None = None
    """None: there is no folder for them."""
    tracing: Tracing | None = None
    norms: KnownNorms = field(default_factory=KnownNorms)
    """What is usual in the batches that the page shows."""


def make_front(config: FrontConfig, figures: FrontFigures, tracing: Tracing | None = None) -> Front:
    """Needs a running event loop. Raises `InvalidConfig`."""
    gateways = Gateways(config)
    files = FileStore(config) if config.data else None
    spooled = spool_places(config)
    fetcher = Fetcher(parse_hosts(config.url_hosts), config.max_body_bytes, config.url_timeout_s)
    return Front(
        config=config,
        gateways=gateways,
        sources=Sources(fetcher.fetch, files, config.max_body_bytes, spooled),
        requests=request_places(config),
        spooled=spooled,
        figures=figures,
        readiness=Readiness(gateways, config.data),
        tokens=TokenFile(config.tokens) if config.tokens else None,
        files=files,
        batches=None if files is None else Batches(config, gateways, files),
        tracing=tracing,
    )
