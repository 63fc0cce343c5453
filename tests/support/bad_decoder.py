"""Decoder processes that misbehave: what runs instead of `slipstream.video.child`.

What to do is read from the video's bytes, so that one pool meets every kind: `crash SIGSEGV`, `exit`, `hang`, `eat`,
`print TEXT`, `flood`, `probe`, `answer BYTES`. Anything else is decoded as it should be.
"""

import errno
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable

from slipstream.video import child
from slipstream.video.messages import Answer, DecodeRequest, Refused

sound_serve = child._serve
PARENT_PID = int(sys.argv[-1])


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
    signal.raise_signal(getattr(signal, name))
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
    free = resource.RLIM_INFINITY
    attempts: dict[str, Callable[[], object]] = {
        "read a file": lambda: os.open("/etc/passwd", os.O_RDONLY),
        "write a file": lambda: os.open("/tmp/captured", os.O_WRONLY | os.O_CREAT),
        "remove a file": lambda: os.unlink("/tmp/captured"),
        "write the video": lambda: os.write(video, b"x"),
        "run a program": lambda: os.execv("/bin/true", ["true"]),
        "fork": os.fork,
        "signal its parent": lambda: os.kill(PARENT_PID, 0),
        "limit its parent": lambda: resource.prlimit(PARENT_PID, resource.RLIMIT_CORE),
        "connect": lambda: socket.socket().connect(("127.0.0.1", 1)),
        "raise its limits": lambda: resource.setrlimit(resource.RLIMIT_AS, (free, free)),
        "take memory": lambda: bytearray(8 * 1024**3),
        "open many": lambda: open_many(video),
    }
    return json.dumps({name: outcome(attempt) for name, attempt in attempts.items()} | {"knows": sorted(os.environ)})


def open_many(video: int) -> None:
    copies: list[int] = []
    try:
        for _ in range(64):
            copies.append(os.dup(video))
    finally:
        for copy in copies:
            os.close(copy)


def outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (OSError, MemoryError, ValueError) as failure:
        number = getattr(failure, "errno", None)
        return errno.errorcode[number] if number else type(failure).__name__
    return "done"


if __name__ == "__main__":
    child._serve = misbehave
    child.main(*map(int, sys.argv[1:]))
