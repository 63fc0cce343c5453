"""Which draft tokens become text: greedy acceptance and the end of the text. Pure; knows no model and no wire."""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """Why a text ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Verdict:
    """What the target says of a window. `window[:num_accepted]`, then `own_token`, are committed for good."""

    num_accepted: int
    own_token: int | None
    """The correction or bonus token; None when the text ended inside the accepted tokens."""
    finish_reason: FinishReason | None = None

    def committed(self, window: Sequence[int]) -> tuple[int, ...]:
        """The tokens that this verdict adds to the text."""
        accepted = tuple(window[: self.num_accepted])
        return accepted if self.own_token is None else (*accepted, self.own_token)


@dataclass(frozen=True)
class StopRule:
    """When the text ends: at an end-of-text token (kept as the last token), or at `max_new_tokens`."""

    eos_token_ids: Collection[int]
    max_new_tokens: int


def accept_greedy(window: Sequence[int], target_choices: Sequence[int]) -> tuple[int, int]:
    """Length of the accepted prefix and the target's own next token.

    `target_choices` [len(window) + 1] holds the target's argmax after the committed text, after `window[:1]`, and so on
    (paper 000, section 2.2, with p and q one-hot).
    """
    if len(target_choices) != len(window) + 1:
        raise ValueError(f"a window of {len(window)} needs {len(window) + 1} choices, not {len(target_choices)}")
    num_accepted = 0
    while num_accepted < len(window) and window[num_accepted] == target_choices[num_accepted]:
        num_accepted += 1
    return num_accepted, target_choices[num_accepted]


def judge_window(window: Sequence[int], target_choices: Sequence[int], num_committed: int, rule: StopRule) -> Verdict:
    """Greedy acceptance, cut where the text ends: no token after an end-of-text token or past the limit leaves here."""
    num_accepted, own_token = accept_greedy(window, target_choices)
    tokens = (*window[:num_accepted], own_token)
    for index, token in enumerate(tokens):
        reason = _end_at(token, num_committed + index + 1, rule)
        if reason is not None:
            if index < num_accepted:
                return Verdict(index + 1, None, reason)
            return Verdict(num_accepted, own_token, reason)
    return Verdict(num_accepted, own_token)


def _end_at(token: int, length: int, rule: StopRule) -> FinishReason | None:
    if token in rule.eos_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= rule.max_new_tokens else None
