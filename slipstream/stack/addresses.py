"""Where a stack's gateway will listen: a port or a socket that is free, and likely to be free when it has started."""

import errno
import os
import random
import socket
from collections import deque
from pathlib import Path

from slipstream.errors import InvalidConfig
from slipstream.stack.process import BETWEEN_ADDRESSES, LONGEST_SOCKET_PATH

UNASSIGNED_PORTS = range(20_000, 30_000)
"""Linux gives none of these to a connection, or to whoever asks for any port."""
PORT_TRIES = 50
_dice = random.SystemRandom()
"""Not the generator that programs seed, and forks share: several that start at once would all choose the same port, and
be served by the stack of whoever came first."""
_held: deque[int] = deque()
"""Sockets at the ports that were chosen of late, where who is to listen may not do so yet: nobody else's search finds
such a port free, in whatever process it is, and a server may listen there all the same."""
MOST_HELD = 100


def gateway_address(listen: str | None) -> str:
    """The address that the gateway will have. Raises when it cannot be had."""
    if listen is None:
        listen = "127.0.0.1:0"
    if listen.startswith("unix:"):
        return _free_socket_path(listen)
    host, _, port_text = listen.rpartition(":")
    if not host or not port_text.isdecimal() or int(port_text) > 65_535:
        raise InvalidConfig(f"cannot listen at {listen!r}: give host:port or unix:PATH")
    return f"{host}:{_free_port(host.strip('[]'), int(port_text))}"


def _free_port(host: str, port: int) -> int:
    """The port itself; for 0 one that is likely to be free still when the gateway has started."""
    family, reason = socket.AF_INET6 if ":" in host else socket.AF_INET, ""
    for candidate in [port] if port else _dice.sample(UNASSIGNED_PORTS, PORT_TRIES):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, port > 0)  # as a server would, not as a search
            try:
                probe.bind((host, candidate))
            except OSError as error:
                reason = "the port is in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
            else:
                if not port:
                    _hold(probe)
                return candidate
    raise InvalidConfig(f"cannot listen at {host}:{port}: {reason}")


def _hold(bound: socket.socket) -> None:
    """Keeps the port from other searches until many more were chosen. Servers share it, as this one does not listen."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held.append(bound.detach())
    if len(_held) > MOST_HELD:
        os.close(_held.popleft())


def _free_socket_path(listen: str) -> str:
    path = listen.removeprefix("unix:")
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise InvalidConfig(f"cannot listen at {listen}: the path is longer than {LONGEST_SOCKET_PATH} bytes")
    if BETWEEN_ADDRESSES in path:
        raise InvalidConfig(f"cannot listen at {listen}: a ',' is between the addresses of several; give another path")
    if not Path(path).parent.is_dir():
        raise InvalidConfig(f"cannot listen at {listen}: its folder does not exist")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return listen
    raise InvalidConfig(f"cannot listen at {listen}: the socket is in use")
