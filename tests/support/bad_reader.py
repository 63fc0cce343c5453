"""Readers that misbehave: what runs instead of `slipstream.documents.child`, without any model.

What to do is read from the document's first bytes, `WHEN VERB ARGUMENT`: at `open`, `draw` or `draft`, of the page in
the argument if there is one. Such a document has three pages.
"""

import json
import os
import signal
import socket
import sys
import time
from typing import Any

import numpy as np

from slipstream.documents import child
from slipstream.documents.messages import Box, TextLine
from slipstream.documents.page_reader import Picture

SIZE = (40, 30)


class NoEyes:
    """Reads one line on every page."""

    has_layout = False

    def lines(self, picture: Picture) -> list[TextLine]:
        return [TextLine(Box(1, 1, 20, 9), "a line", 1.0)]

    def read_line(self, picture: Picture, box: Box) -> str:
        return ""

    def zones(self, picture: Picture) -> list[Any]:
        return []

    def knows(self, char: str) -> bool:
        return True


class BadDocument:
    """Does what its bytes say."""

    num_pages = 3

    def __init__(self, data: bytes) -> None:
        self.when, self.verb, *rest = data.decode().split(" ", 2)
        self.argument = rest[0] if rest else ""
        self.page = 0

    def do(self, when: str) -> None:
        if when == self.when and (self.page in (0, 2)):
            getattr(self, self.verb)()

    def draw(self, page: int, dpi: float, max_pixels: int) -> tuple[Picture, float]:
        self.page = page
        self.do("draw")
        return np.full((SIZE[1], SIZE[0], 3), page, dtype=np.uint8), float(dpi)

    def text_lines(self, page: int, picture: Picture) -> list[TextLine]:
        self.do("draft")
        return []

    def crash(self) -> None:
        signal.raise_signal(signal.SIGSEGV)

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def exit(self) -> None:
        os._exit(3)

    def hang(self) -> None:
        time.sleep(600)

    def starve(self) -> None:
        """Works on for so many seconds, but for most of them others have the core."""
        until = time.monotonic() + float(self.argument)
        while time.monotonic() < until:
            busy_until = time.thread_time() + 0.005
            while time.thread_time() < busy_until:
                pass
            time.sleep(0.03)

    def spin(self) -> None:
        while True:
            pass

    def eat(self) -> None:
        bytearray(2**40)

    def say(self) -> None:
        CONNECTION[0].send(self.argument.encode())
        time.sleep(600)

    def draft(self) -> None:
        """Puts a draft of its own in the place of the sound one."""
        sound = child.draft_to_json
        child.draft_to_json = lambda draft: sound(draft) | json.loads(self.argument)

    def shout(self) -> None:
        for _ in range(1000):
            os.write(2, b"x" * 100 + b"\n")

    def probe(self) -> None:
        """Says what it can still do."""
        able = []
        for name, act in {
            "read": lambda: open("/etc/hostname").close(),
            "write": lambda: open("/tmp/from-a-reader", "w").close(),
            "connect": lambda: socket.create_connection(("127.0.0.1", 9), 1),
            "fork": os.fork,
        }.items():
            try:
                act()
                able.append(name)
            except Exception:
                continue
        raise child.UnreadableDocument(f"able to: {able}")


CONNECTION: list[socket.socket] = []
sound_open, sound_init = child.open_document, child._Reading.__init__


def open_document(data: bytes, limits: Any) -> Any:
    if data.startswith((b"open ", b"draw ", b"draft ")):
        document = BadDocument(data)
        document.do("open")
        return document
    return sound_open(data, limits)


def init(self: Any, connection: socket.socket, *rest: Any) -> None:
    CONNECTION.append(connection)
    sound_init(self, connection, *rest)


if __name__ == "__main__":
    child.Recogniser = NoEyes  # type: ignore[misc, assignment]
    child.open_document = open_document
    child._Reading.__init__ = init  # type: ignore[assignment]
    child.main(*map(int, sys.argv[1:]))
