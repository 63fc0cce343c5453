"""Ports for tests that must name one before anything listens there."""

import contextlib
import random
import socket

NOT_GIVEN_OUT = range(20_000, 30_000)
"""The kernel gives none of these to a connection, or to whoever asks for any port."""


def free_port(*hosts: str) -> int:
    """One that nothing listens on at any of these addresses."""
    for _ in range(100):
        port = random.choice(NOT_GIVEN_OUT)
        with contextlib.suppress(OSError), contextlib.ExitStack() as exits:
            for host in hosts or ("127.0.0.1",):
                exits.enter_context(socket.create_server((host, port)))
            return port
    raise AssertionError("no port is free")
