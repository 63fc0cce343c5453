"""Records from rank 0 to a follower and what it answers: JSON in frames on a socket, with signs of life both ways.

A process that has died is known at once, by its closed socket; one that stands still, by its silence.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

SIGN_S = 0.5
PATIENCE_S = 300.0
"""Of silence: then a rank that loads counts as lost, whose libraries may hold the interpreter for long."""
_HEADER_BYTES = 4
_MAX_RECORD_BYTES = 1 << 26
GREETING_S = 5.0
"""For the first record of who connects."""


class LinkLost(ConnectionError):
    """The other side has ended, or stands still."""


class Link:
    """One end. Sends from any thread; one thread reads."""

    def __init__(self, end: socket.socket) -> None:
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(PATIENCE_S)
        self._end = end
        self._sending = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._give_signs, name="signs", daemon=True).start()

    def expect_signs(self, silence_s: float) -> None:
        """From now on so much silence is a loss."""
        self._end.settimeout(silence_s)

    def send(self, record: Mapping[str, Any]) -> None:
        """Raises `LinkLost`."""
        self._send(json.dumps(record).encode())

    def receive(self) -> dict[str, Any]:
        """The next record. Raises `LinkLost`."""
        while not (num_bytes := int.from_bytes(self._take(_HEADER_BYTES), "big")):
            pass
        if num_bytes > _MAX_RECORD_BYTES:
            raise LinkLost(f"it sent a record of {num_bytes} bytes")
        try:
            record = json.loads(self._take(num_bytes))
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise LinkLost("it sent something that is no record")
        return record

    def receive_greeting(self) -> dict[str, Any]:
        """The first record, from somebody who may be a stranger. Raises `LinkLost`."""
        self._end.settimeout(GREETING_S)
        greeting = self.receive()
        self._end.settimeout(PATIENCE_S)
        return greeting

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _give_signs(self) -> None:
        while not self._closed.wait(SIGN_S):
            try:
                self._send(b"")
            except LinkLost:
                return

    def _send(self, data: bytes) -> None:
        try:
            with self._sending:
                self._end.sendall(len(data).to_bytes(_HEADER_BYTES, "big") + data)
        except TimeoutError:
            raise LinkLost("it takes nothing any more") from None
        except OSError as error:
            raise LinkLost(f"its connection is broken: {error.strerror or error}") from None

    def _take(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            try:
                part = self._end.recv(num_bytes - len(data))
            except TimeoutError:
                raise LinkLost(f"it has been silent for {self._end.gettimeout():g} s") from None
            except OSError as error:
                raise LinkLost(f"its connection is broken: {error.strerror or error}") from None
            if not part:
                raise LinkLost("it has ended")
            data += part
        return bytes(data)


def connect(address: tuple[str, int], greeting: Mapping[str, Any], patience_s: float) -> Link:
    """Rank 0's link, as soon as it listens. Raises `LinkLost`."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            link = Link(socket.create_connection(address, timeout=patience_s))
        except OSError as error:
            if time.monotonic() > deadline:
                raise LinkLost(f"rank 0 is not reachable at {address[0]}:{address[1]}: {error}") from None
            time.sleep(0.1)
        else:
            link.send(greeting)
            return link


def read_all(link: Link, on_record: Callable[[dict[str, Any]], None], on_lost: Callable[[str], None]) -> None:
    """Reads on a thread of its own until the link is lost."""

    def read() -> None:
        try:
            while True:
                on_record(link.receive())
        except LinkLost as error:
            on_lost(str(error))

    threading.Thread(target=read, name="link", daemon=True).start()
