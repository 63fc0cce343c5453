"""What may be wrong with a text, as far as numbers show it: marks on a result, to be looked at by people. Pure.

A mark is no verdict: a text with one may be right, and one without may be wrong. Some compare a result with others of
its batch, which `BatchNorms` sums up.
"""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.messages import Caption
from slipstream.speculation.protocol import FinishReason

LOOP_WORDS, LOOP_TIMES, LONGEST_PERIOD = 12, 3, 64
"""The same words at least so often in a row, and so many in all; repetitions of longer pieces are not looked for."""
VARIED_FROM, NGRAM, LEAST_DISTINCT = 60, 4, 0.4
"""In a text of so many words, the least share of its runs of `NGRAM` words that are different ones."""
LOOKED_AT = 2000
"""Words at a text's end, where loops are."""
SHORT_SHARE, SHORT_WORDS = 0.25, 3
"""Of the batch's median; and what is short where the batch says nothing."""
LEAST_JUDGED = 32
"""Draft tokens without which a text's acceptance says nothing."""
LEAST_RESULTS = 20
"""Of a batch, before it says what is usual."""
SPREADS, LEAST_DISTANCE, LEAST_DOUBT = 4.0, 0.15, 0.25
"""Out of range is what is that many standard deviations from the median, and at least so far: a share of tokens, or a
mean logprob."""
_SIGMA = 1.4826
"""Standard deviations in a median absolute deviation, of a normal distribution."""

_UNPARTED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
"""Scripts in which no space parts words, or not from all that is written on to them."""
CHARACTER = re.compile(rf"[{_UNPARTED}](?<=\w)")
"""One of theirs, which counts as a word."""
WORD = re.compile(rf"[^\W{_UNPARTED}]+|{CHARACTER.pattern}")


class Mark(StrEnum):
    """What is odd about a text."""

    EMPTY = "empty"
    """It has no letter and no digit."""
    SHORT = "short"
    """It has few words for an answer to its prompt."""
    CUT = "cut"
    """It was ended by `max_new_tokens`."""
    LOOPED = "looped"
    """It says the same again and again."""
    ACCEPTANCE = "acceptance"
    """The target accepted far fewer, or far more, of the draft's tokens than is usual of its prompt's answers."""
    UNSURE = "unsure"
    """The target found its tokens far less likely than is usual of its prompt's answers."""


COUNTED_MARKS = (Mark.EMPTY, Mark.CUT, Mark.LOOPED)
"""Those that a text has by itself: a batch's totals count them when its results are kept."""


@dataclass(frozen=True)
class Usual:
    """What is usual of a number."""

    median: float
    spread: float
    """Its standard deviation, as far as outliers do not make it."""

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Usual | None":
        """None: too few say it."""
        if len(numbers) < LEAST_RESULTS:
            return None
        middle = statistics.median(numbers)
        return cls(middle, _SIGMA * statistics.median(abs(number - middle) for number in numbers))

    def is_far(self, distance: float, least: float) -> bool:
        """Whether what is so far from the median is out of range."""
        return distance > max(SPREADS * self.spread, least)


@dataclass(frozen=True)
class Norms:
    """What is usual of some texts. None: too few say it."""

    median_words: float | None = None
    acceptance: Usual | None = None
    """The share of the draft's tokens that became text."""
    avg_logprob: Usual | None = None

    @classmethod
    def of(cls, captions: Iterable[Caption]) -> "Norms":
        """Of these; what was skipped has no text that could be usual."""
        said = [caption for caption in captions if not caption.skipped]
        if len(said) < LEAST_RESULTS:
            return cls()
        return cls(
            median_words=statistics.median(len(words_of(caption.text)) for caption in said),
            acceptance=Usual.of([share for caption in said if (share := _acceptance(caption)) is not None]),
            avg_logprob=Usual.of([caption.avg_logprob for caption in said if caption.avg_logprob is not None]),
        )


UNKNOWN = Norms()


@dataclass(frozen=True)
class BatchNorms:
    """What is usual in a batch, by the prompt that is answered: one asks for a word, another for a page."""

    by_prompt: Mapping[str, Norms] = field(default_factory=dict)
    """Those of which enough is known."""
    whole: Norms = UNKNOWN
    """Of all texts; counts where no prompt has enough of them, as in a batch with a prompt an item."""

    @classmethod
    def of(cls, answers: Iterable[tuple[str, Caption]]) -> "BatchNorms":
        """Of some results of a batch with their prompts, pages and segments included."""
        texts: dict[str, list[Caption]] = {}
        for prompt, caption in answers:
            texts.setdefault(prompt, []).append(caption)
        by_prompt = {prompt: norms for prompt, said in texts.items() if (norms := Norms.of(said)) != UNKNOWN}
        return cls(by_prompt, Norms.of(caption for said in texts.values() for caption in said))

    def to(self, prompt: str) -> Norms:
        """What is usual of its answers."""
        return self.by_prompt.get(prompt, UNKNOWN) if self.by_prompt else self.whole


UNKNOWN_BATCH = BatchNorms()


def marks_of(caption: Caption, norms: Norms = UNKNOWN) -> tuple[Mark, ...]:
    """What is odd about a result, in the order of `Mark`. One that was skipped has no text because it was asked so."""
    if caption.skipped:
        return ()
    words = words_of(caption.text)
    found = {
        Mark.EMPTY: not words,
        Mark.SHORT: bool(words) and _is_short(len(words), norms),
        Mark.CUT: caption.finish_reason is FinishReason.LENGTH,
        Mark.LOOPED: is_looped(words),
        Mark.ACCEPTANCE: _is_out_of_range(_acceptance(caption), norms.acceptance),
        Mark.UNSURE: _is_unsure(caption.avg_logprob, norms.avg_logprob),
    }
    return tuple(mark for mark, is_so in found.items() if is_so)


def words_of(text: str) -> list[str]:
    """The words of a text, without case and punctuation."""
    return WORD.findall(text.casefold())


def is_looped(words: Sequence[str]) -> bool:
    """Whether a piece is repeated at once, or most of the text has been said before."""
    words = words[-LOOKED_AT:]
    for period in range(1, min(LONGEST_PERIOD, len(words) // LOOP_TIMES) + 1):
        if _longest_run(words, period) + period >= max(LOOP_TIMES * period, LOOP_WORDS):
            return True
    runs = [tuple(words[start : start + NGRAM]) for start in range(len(words) - NGRAM + 1)]
    return len(words) >= VARIED_FROM and len(set(runs)) < LEAST_DISTINCT * len(runs)


def _longest_run(words: Sequence[str], period: int) -> int:
    """The most words in a row that are the same as those `period` before them."""
    longest = current = 0
    for early, late in zip(words, words[period:], strict=False):
        current = current + 1 if early == late else 0
        longest = max(longest, current)
    return longest


def _is_short(num_words: int, norms: Norms) -> bool:
    return num_words < (SHORT_WORDS if norms.median_words is None else SHORT_SHARE * norms.median_words)


def _acceptance(caption: Caption) -> float | None:
    speculation = caption.speculation
    return speculation.accepted / speculation.judged if speculation.judged >= LEAST_JUDGED else None


def _is_out_of_range(share: float | None, usual: Usual | None) -> bool:
    return share is not None and usual is not None and usual.is_far(abs(share - usual.median), LEAST_DISTANCE)


def _is_unsure(logprob: float | None, usual: Usual | None) -> bool:
    return logprob is not None and usual is not None and usual.is_far(usual.median - logprob, LEAST_DOUBT)
