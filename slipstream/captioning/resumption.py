"""A caption goes on after the tokens that were delivered, at a target that has not seen them: may it, and how. Pure."""

from slipstream.errors import ProtocolViolation, ResumeMismatch
from slipstream.messages import CommittedToken
from slipstream.session_messages import Judgement
from slipstream.speculation.protocol import JudgeWindow, Verdict

MAX_RESUMPTIONS = 5
MAX_IN_VAIN = 2
"""Resumptions in a row without a new token: a caption that kills its target must not go on doing that."""
REPLAY_WINDOW = 64
"""Delivered tokens in one pass: each is a row of logits."""


class Resumptions:
    """How often one caption may lose its target."""

    def __init__(self) -> None:
        self.count = 0
        self._num_tokens = -1
        self._num_in_vain = 0

    def begin(self, num_tokens: int) -> bool:
        """Whether the caption may go on once more, with so many tokens."""
        self._num_in_vain = self._num_in_vain + 1 if num_tokens == self._num_tokens else 0
        self._num_tokens = num_tokens
        if self.count == MAX_RESUMPTIONS or self._num_in_vain == MAX_IN_VAIN:
            return False
        self.count += 1
        return True


class Replay:
    """Brings a target that begins with the prompt to where the text stood.

    The delivered tokens are its windows, as if a draft had written them. So they cost a pass for many instead of one
    each, and the target accepts what it would have written itself and nothing else: what follows is never another
    model's text behind them.
    """

    def __init__(self, delivered: tuple[int, ...]) -> None:
        self.tokens: list[CommittedToken] = []
        """Those that were found again."""
        self._delivered = delivered
        self._window: tuple[int, ...] = ()

    @property
    def window(self) -> JudgeWindow:
        """What to judge next."""
        return JudgeWindow(self._window, 1)

    def take(self, judgement: Judgement) -> Judgement | None:
        """What the judgement says of the text behind the delivered tokens, over an empty window. None: nothing yet, ask
        for `window`.

        Raises:
            ResumeMismatch: the target writes another text.
            ProtocolViolation: a verdict that answers nothing.
        """
        verdict = judgement.verdict
        if verdict.path or verdict.num_accepted > len(self._window):
            raise ProtocolViolation("the target sent a verdict that no window was waiting for")
        tokens = verdict.committed(self._window)
        told = judgement.tokens(tokens)
        if not told:
            raise ProtocolViolation("the target sent a verdict that commits nothing")
        expected = self._delivered[len(self.tokens) :]
        known, fresh = tokens[: len(expected)], tokens[len(expected) :]
        has_ended = verdict.finish_reason is not None
        if known != expected[: len(tokens)] or (has_ended and len(known) < len(expected)):
            raise ResumeMismatch(self._complaint(tokens))
        self.tokens += told[: len(known)]
        self._window = expected[len(known) :][:REPLAY_WINDOW]
        if not fresh and not has_ended:
            return None
        verdict = Verdict(0, fresh[0] if fresh else None, verdict.finish_reason, verdict.stop_string)
        return judgement.behind(len(known), verdict)

    def _complaint(self, tokens: tuple[int, ...]) -> str:
        expected = self._delivered[len(self.tokens) :]
        pairs = zip(tokens, expected, strict=False)
        same = next((index for index, (now, then) in enumerate(pairs) if now != then), len(tokens))
        return (
            f"the caption cannot go on after its {len(self._delivered)} delivered tokens: token"
            f" {len(self.tokens) + same + 1} would be another one now (another model, device, precision or video);"
            " ask for it anew"
        )
