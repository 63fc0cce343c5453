"""Which draft tokens become text: acceptance by equality and the end of the text. Pure; knows no model and no wire."""

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
    stop_string: str = ""
    """The stop string that ended the text, if one did."""

    def committed(self, window: Sequence[int]) -> tuple[int, ...]:
        """The tokens that this verdict adds to the text."""
        accepted = tuple(window[: self.num_accepted])
        return accepted if self.own_token is None else (*accepted, self.own_token)

    def ended_at(self, index: int, reason: FinishReason, stop_string: str = "") -> "Verdict":
        """The verdict cut behind its committed token `index`, which ends the text."""
        if index < self.num_accepted:
            return Verdict(index + 1, None, reason, stop_string)
        return Verdict(self.num_accepted, self.own_token, reason, stop_string)


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


def end_verdict(
    window: Sequence[int], num_accepted: int, own_token: int, num_committed: int, rule: StopRule
) -> Verdict:
    """The verdict on a window of which a sampler accepted `num_accepted` tokens, cut where the text ends.

    No token after an end-of-text token or past the limit leaves here. Stop strings end the text later still: see
    `models.stops`.
    """
    verdict = Verdict(num_accepted, own_token)
    for index, token in enumerate(verdict.committed(window)):
        reason = _end_at(token, num_committed + index + 1, rule)
        if reason is not None:
            return verdict.ended_at(index, reason)
    return verdict


def judge_window(window: Sequence[int], target_choices: Sequence[int], num_committed: int, rule: StopRule) -> Verdict:
    """Acceptance by equality with the target's choices, cut where the text ends."""
    return end_verdict(window, *accept_greedy(window, target_choices), num_committed, rule)


def _end_at(token: int, length: int, rule: StopRule) -> FinishReason | None:
    if token in rule.eos_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= rule.max_new_tokens else None
