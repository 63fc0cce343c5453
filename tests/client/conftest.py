"""A fake gateway, and captioners at it."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from slipstream.client.sync_captioner import Captioner, connect
from tests.cli.fake_gateway import FakeGateway, good_video


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as running:
        yield running


@pytest.fixture
def captioner(gateway: FakeGateway) -> Iterator[Captioner]:
    with connect(gateway.address) as connected:
        yield connected


@pytest.fixture
def video(tmp_path: Path) -> Path:
    return good_video(tmp_path / "a.mp4", os.urandom(1_200_000))


class Proxy:
    """A context manager that passes one connection's bytes on until `cut`, as when a gateway is lost."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._upstream = socket.create_connection((host, int(port)))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.cut()

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._upstream.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _serve(self) -> None:
        with self._upstream, self._listener, self._listener.accept()[0] as client:
            back = threading.Thread(target=_pump, args=(client, self._upstream))
            back.start()
            _pump(self._upstream, client)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Until either side ends; then both do."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(gateway: FakeGateway) -> Iterator[Proxy]:
    with Proxy(gateway.address) as running:
        yield running
