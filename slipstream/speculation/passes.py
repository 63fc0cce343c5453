"""What the target has been asked for: the window in flight and the plain passes behind it. Pure bookkeeping."""

import enum

from slipstream.errors import ProtocolViolation
from slipstream.speculation.protocol import Verdict


class PassKind(enum.Enum):
    """Why passes were asked for, which decides what their seconds say."""

    PREFILL = enum.auto()
    SPECULATIVE = enum.auto()
    PLAIN = enum.auto()
    SELF = enum.auto()
    """The target drafts every window itself."""


class Passes:
    """The passes of one request to the target. At first that is the prefill, which answers like a plain pass."""

    def __init__(self) -> None:
        self.window: tuple[int, ...] | None = ()
        """The window that the next verdict is about; None while nothing runs."""
        self.depth = 0
        """Tokens that the window can commit: its length, or the depth of a tree."""
        self.kind = PassKind.PREFILL
        self.num_asked = self.num_left = 1

    @property
    def running(self) -> bool:
        """A verdict is still to come."""
        return self.window is not None

    @property
    def follows_another(self) -> bool:
        """The pass whose verdict comes next was not the first of its request: no round trip is in its seconds."""
        return self.num_left < self.num_asked

    @property
    def most_tokens(self) -> int:
        """How many tokens the passes that run (or else the next one) can commit beside what is pending."""
        num_windows = max(self.num_left, 1) if self.kind is PassKind.SELF else 1
        return self.depth * num_windows + max(self.num_left, 1)

    def ask(self, window: tuple[int, ...], depth: int, kind: PassKind, num_passes: int) -> None:
        """A new request: the first pass over `window`, the others over nothing."""
        self.window, self.depth, self.kind = window, depth, kind
        self.num_asked = self.num_left = num_passes

    def answer(self, verdict: Verdict) -> tuple[tuple[int, ...], int]:
        """Takes the verdict over the window in flight, which is returned with its depth. Raises `ProtocolViolation` for
        a verdict that answers nothing."""
        window, depth = self.window, self.depth
        nodes = verdict.path or range(0 if verdict.drafted else verdict.num_accepted)
        if window is None or verdict.num_accepted > depth or any(node >= len(window) for node in nodes):
            raise ProtocolViolation("the target sent a verdict that no window was waiting for")
        if verdict.own_token is None and verdict.finish_reason is None:
            raise ProtocolViolation("the target sent a verdict without its own token, and the text goes on")
        self.num_left = 0 if verdict.finish_reason is not None else self.num_left - 1
        self.window = () if self.num_left else None
        self.depth = depth if self.kind is PassKind.SELF else 0
        return window, depth
