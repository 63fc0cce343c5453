"""A reader service without OCR: it draws real documents and takes their text layer, and loads no model."""

from functools import partial
from typing import Any

from slipstream.documents.pool import ReaderPool
from slipstream.rpc.server import run_service
from slipstream.services.reader import __main__ as service

if __name__ == "__main__":
    quick: Any = partial(ReaderPool, module="tests.support.bad_reader")
    service.ReaderPool = quick  # type: ignore[misc]
    run_service("reader", service.ReaderConfig, service.setup, service.SERVES)
