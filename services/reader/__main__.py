"""Starts the reader service: `python -m slipstream.services.reader --listen ADDRESS`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from slipstream.budget import MIB
from slipstream.config import between, option
from slipstream.documents.messages import DocumentLimits
from slipstream.documents.pool import ReaderPool, check_packages
from slipstream.metrics import PROCESS
from slipstream.rpc.security import TokenOptions
from slipstream.rpc.server import Lifecycle, run_service
from slipstream.rpc.service_options import Callers, ServiceOptions
from slipstream.services.reader.servicer import ReaderServicer

SERVES = ("slipstream.rpc.v1.Reader",)


@dataclass(frozen=True, kw_only=True)
class ReaderConfig(ServiceOptions, TokenOptions):
    """Options of the reader service."""

    max_documents: int = option(
        "documents read at once, each by a process on one core", default=2, check=between(1, 256)
    )
    max_queued: int = option("documents that may wait for their turn", default=16, check=between(0, 4096))
    max_document_mb: int = option("MiB of the largest document", default=64, check=between(1, 2048))
    max_pages: int = option("pages read of one document", default=500, check=between(1, 100_000))
    max_page_pixels: int = option(
        "pixels of a page's picture; larger pages are drawn smaller",
        default=DocumentLimits.max_page_pixels,
        check=between(10_000, 64_000_000),
    )
    open_s: float = option("seconds for opening a document", default=DocumentLimits.open_s, check=between(0.1, 3600))
    page_s: float = option("seconds for one page", default=DocumentLimits.page_s, check=between(0.1, 3600))
    memory_mb: int = option("MiB that one reading process may allocate", default=2048, check=between(256, 2**20))
    upload_idle_s: float = option("longest pause within an upload", default=30.0, check=between(0.1, 3600))
    min_upload_rate: int = option(
        "fewest bytes a second of an upload, on average; 0 for any", default=16 * 1024, check=between(0, 2**40)
    )
    owner_share: float = option(
        "share of the places for documents that one caller may have, 0 to 1", default=0.5, check=between(0, 1)
    )

    @property
    def callers(self) -> Callers:
        """Gateways, and whoever reads by the OCR alone."""
        return Callers(self.tokens, self.owner_share)

    @property
    def limits(self) -> DocumentLimits:
        """Of one document."""
        return DocumentLimits(
            max_bytes=self.max_document_mb * MIB,
            max_pages=self.max_pages,
            max_page_pixels=self.max_page_pixels,
            open_s=self.open_s,
            page_s=self.page_s,
        )


async def setup(server: grpc.aio.Server, config: ReaderConfig, lifecycle: Lifecycle) -> Callable[[], Awaitable[None]]:
    """Starts a first process, which loads the models, and registers the servicer."""
    check_packages()
    pool = ReaderPool(config.limits, max_documents=config.max_documents, memory_bytes=config.memory_mb * MIB)
    try:
        await pool.wait_prepared()
    except BaseException:
        pool.close()
        raise
    servicer = ReaderServicer(
        pool,
        max_documents=config.max_documents,
        max_queued=config.max_queued,
        owner_share=config.owner_share,
        upload_idle_s=config.upload_idle_s,
        min_upload_rate=config.min_upload_rate,
    )
    PROCESS.watch(servicer.places)
    servicer.register(server)

    async def close() -> None:
        pool.close()

    return close


if __name__ == "__main__":
    run_service("reader", ReaderConfig, setup, SERVES)
