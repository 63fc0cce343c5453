"""Decoder processes that misbehave: what runs instead of `slipstream.video.child`.

What to do is read from the video's bytes, so that one pool meets every kind: `crash SIGSEGV`, `exit`, `hang`, `eat`,
`print TEXT`, `flood`, `probe`, `answer BYTES`. Anything else is decoded as it should be.
"""

import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from slipstream.video import child
from slipstream.video.messages import Answer, DecodeRequest, Refused

sound_serve = child._serve


def misbehave(connection: socket.socket, request: DecodeRequest, video: int, frames: int) -> Answer:
    """Stands in for the decoder's own function."""
    verb, _, rest = os.pread(video, 100_000, 0).partition(b" ")
    doers: dict[bytes, Callable[[], str]] = {
        b"crash": lambda: crash(rest.decode()),
        b"exit": lambda: sys.exit(3),
        b"hang": hang,
        b"eat": lambda: str(len(bytearray(2**40))),
        b"print": lambda: shout(rest),
        b"flood": lambda: flood(connection),
        b"probe": lambda: probe(video),
        b"answer": lambda: say(connection, rest),
    }
    if verb not in doers:
        return sound_serve(connection, request, video, frames)
    message = doers[verb]()
    os.close(video)
    os.close(frames)
    return Refused("UnreadableVideo", message)


def crash(name: str) -> str:
    os.kill(os.getpid(), getattr(signal, name))
    return hang()


def hang() -> str:
    time.sleep(600)
    return "woken up"


def shout(text: bytes) -> str:
    os.write(1, b"one\n")
    os.write(2, text + b"\n" + b"x" * 5000 + b"\nno end")
    return "printed"


def flood(connection: socket.socket) -> str:
    while True:
        connection.send(b'{"Progress": {"done": 1, "total": 1}}')


def say(connection: socket.socket, answer: bytes) -> str:
    connection.send(answer)
    return hang()


def probe(video: int) -> str:
    """What a captured decoder can still do, as JSON."""

    def write_video() -> None:
        os.write(video, b"x")

    def write_file() -> None:
        with open("/tmp/captured", "wb", buffering=0) as file:
            file.write(b"x")

    def connect() -> None:
        socket.create_connection(("127.0.0.1", 1), timeout=1)

    def raise_limits() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def take_memory() -> None:
        bytearray(8 * 1024**3)

    def open_many() -> None:
        copies = []
        try:
            for _ in range(64):
                copies.append(os.dup(video))
        finally:
            for copy in copies:
                os.close(copy)

    attempts = (write_video, write_file, connect, raise_limits, take_memory, open_many)
    outcomes = {attempt.__name__: outcome(attempt) for attempt in attempts}
    with suppress(OSError):
        os.unlink("/tmp/captured")
    return json.dumps(outcomes | {"environment": sorted(os.environ)})


def outcome(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except (OSError, MemoryError, ValueError) as failure:
        return f"{type(failure).__name__} {getattr(failure, 'errno', None)}"
    return "done"


if __name__ == "__main__":
    child._serve = misbehave
    child.main(*map(int, sys.argv[1:]))
