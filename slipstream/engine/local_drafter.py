"""Drafters that run at the target, in the session that they draft for: what one is, and how it is found by its method.

All of a drafter runs on the model's thread. It cannot harm the text: whatever it proposes is judged like a window of
the draft service.
"""

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from slipstream.engine.forward import DecodeState
from slipstream.engine.segments import Window
from slipstream.engine.text_attention import TextAttention
from slipstream.engine.video_lm import PromptPlan
from slipstream.errors import InvalidRequest
from slipstream.logs import get_logger
from slipstream.sampling.sampler import TargetSampler
from slipstream.speculation.methods import METHODS
from slipstream.speculation.pacing import WindowCosts
from slipstream.speculation.protocol import TokenTree

Drafting = Generator[tuple[DecodeState, Window], Tensor, Sequence[int] | TokenTree | None]
"""One window in the making. Yields steps of the model, which may be packed with those of other sessions, and is sent
the logits [n, vocab] that follow each of a step's tokens; returns the tokens of the window, or a tree of them. None or
no token: the pass is a plain one."""


MAX_HINT_TOKENS = 65_536
"""Of all hints of a session: their index takes some 30 MB then. What is more than that is left out."""


PIECE_TOKENS = 4096
"""Read in before one pass; that many take some 20 ms, and other sessions wait for the same thread."""


class HintPiece(NamedTuple):
    """A part of a hint text that one pass reads in."""

    token_ids: tuple[int, ...]
    goes_on: bool
    """It is more of the text of the piece before."""


class HintRoom:
    """The hints of one session on their way from the event loop to the model's thread, and how many it may have."""

    def __init__(self) -> None:
        self.waiting: deque[HintPiece] = deque()
        """What the drafter has not taken yet; it takes them from the left."""
        self.num_tokens = 0

    def add(self, texts: Iterable[Sequence[int]]) -> int:
        """Takes tokenised texts as far as there is room; how many tokens that were. On the event loop."""
        num_before = self.num_tokens
        for text in texts:
            taken = tuple(text[: MAX_HINT_TOKENS - self.num_tokens])
            if len(taken) < len(text):
                get_logger().warning("hints.cut", num_tokens=len(text), num_taken=len(taken), most=MAX_HINT_TOKENS)
            for first in range(0, len(taken), PIECE_TOKENS):
                self.waiting.append(HintPiece(taken[first : first + PIECE_TOKENS], goes_on=first > 0))
            self.num_tokens += len(taken)
        return self.num_tokens - num_before


@dataclass(frozen=True, eq=False)
class DraftingSession:
    """A session whose prompt has run, as its drafter sees it."""

    plan: PromptPlan
    state: DecodeState
    """The session's own cache: the prompt and all committed tokens but the last one. Not to be changed."""
    attention: TextAttention | None
    """Of the prompt; None unless the drafter needs it."""
    sampler: TargetSampler
    num_kept: int
    """Video tokens that were asked for, for a drafter that sees a part of them."""
    headroom: int
    """Tokens that a cache of the drafter's own takes behind the prompt: the answer, and what fills up its last step."""
    vocab_size: int
    max_rows: int = 0
    """Most rows of a tree of hints."""
    as_chain: bool = False
    """The model judges no trees."""
    costs: WindowCosts = field(default_factory=WindowCosts)
    """T_p(k) as passes at this model were measured, this session's included."""
    hints: HintRoom = field(default_factory=HintRoom)


class LocalDrafter(Protocol):
    """Drafts windows for one session. A method names its class in `Method.local_drafter`."""

    needs_attention: ClassVar[bool] = False
    """Whether the attention of the text to the video is recorded while the prompt runs."""

    @staticmethod
    def max_cached_tokens(plan: PromptPlan, num_kept: int, max_new_tokens: int) -> int:
        """Tokens that a cache of the drafter's own will hold at most; they count against the target's memory."""
        return 0

    def __init__(self, session: DraftingSession) -> None: ...

    def draft(self, committed: Sequence[int], num_tokens: int) -> Drafting:
        """At most `num_tokens` tokens, 0 or more, that may follow the `committed` ones of the answer; of a tree so many
        levels."""
        ...

    def draft_beside(self, line: Sequence[int], committed: Sequence[int], num_tokens: int) -> Drafting:
        """The same for a hybrid method, whose draft service wrote `line`: what is returned begins with it. One that
        adds nothing to such a line leaves it as it came."""
        yield from ()
        return line

    def on_commit(self) -> None:
        """More tokens are committed and in the session's cache; what was drafted is of no use any more."""

    def close(self) -> None:
        """The session has ended: frees what the drafter holds."""


def find_local_drafter(method: str) -> type[LocalDrafter]:
    """The drafter of that method.

    Raises:
        InvalidRequest: no such method, or one that does not draft at the target.
    """
    path = METHODS[method].local_drafter if method in METHODS else ""
    if not path:
        known = ", ".join(name for name, each in METHODS.items() if each.local_drafter)
        raise InvalidRequest(f"method {method!r} has no drafter at the target; known: {known}")
    found: type[LocalDrafter] = resolve_name(path)
    return found
