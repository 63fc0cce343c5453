"""A text about a whole film, from the captions of its segments: the prompts for it, and what of them fits the context.

Pure: who asks the target is told in a callback. Where not all captions fit at once, groups of them are summed up first,
and then their sums; which segments are in a group depends on the captions and the model alone.
"""

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from slipstream.captioning.plan import CaptionPlan
from slipstream.errors import LimitExceeded, UnreadableVideo
from slipstream.messages import Caption, Segment
from slipstream.options import DEFAULT_SUMMARY_PROMPT
from slipstream.video.messages import SampledVideo

TEMPLATE_TOKENS = 256
"""Left for the chat around the prompt."""
SLACK = 1 / 16
"""Of a caption's tokens: read again in a line of text, it may be cut into a few more."""


@dataclass(frozen=True)
class TimedText:
    """What was said of a part of a film."""

    start_s: float
    end_s: float
    text: str
    num_tokens: int
    """As it was written; read again it may have a few more."""

    @classmethod
    def of(cls, segment: Segment, captions: Sequence[Caption]) -> "TimedText":
        """Of a segment: the answers to all of its prompts."""
        said = " ".join(word for caption in captions for word in caption.text.split())
        return cls(segment.start_s, segment.end_s, said, sum(caption.num_tokens for caption in captions))

    @property
    def line(self) -> str:
        """In a prompt."""
        return f"{self._times} {self.text}"

    @property
    def most_tokens(self) -> int:
        """Of the line. A token has at least one byte."""
        return self.num_tokens + int(self.num_tokens * SLACK) + len(self._times) + 2

    @property
    def _times(self) -> str:
        return f"[{_clock(self.start_s)} - {_clock(self.end_s)}]"


Ask = Callable[[CaptionPlan, Sequence[str]], Awaitable[Caption]]
"""Has the target answer a plan about no video; the warnings are to stand with the answer."""
Once = Callable[[str, Callable[[], Awaitable[Caption]]], Awaitable[Caption]]
"""Gives the text of a group by its prompt, from an earlier run or else by the call, which makes it."""


async def not_kept(prompt: str, make: Callable[[], Awaitable[Caption]]) -> Caption:
    """Where there are no earlier runs."""
    return await make()


async def sum_up(
    plan: CaptionPlan, said: Sequence[TimedText], max_context: int, ask: Ask, once: Once = not_kept
) -> Caption:
    """The text about a film, whose caption's warnings say where groups were summed up first.

    Args:
        plan: the film's.
        said: of its segments, in order; those without a text count for nothing.
        max_context: of the target, tokens.

    Raises:
        UnreadableVideo: nothing was said.
        LimitExceeded: not even two captions fit the context.
        SlipstreamError: whatever `ask` and `once` raise.
    """
    question = plan.options.get("summary_prompt", DEFAULT_SUMMARY_PROMPT)
    room = max_context - plan.options.max_new_tokens - len(question.encode()) - TEMPLATE_TOKENS
    texts = [one for one in said if one.text]
    if not texts:
        raise UnreadableVideo("no segment has a caption that could be summed up")
    while True:
        try:
            return await _sum_up_within(room, plan, question, texts, ask, once)
        except LimitExceeded:  # read again, the texts have more tokens than they were written with
            room //= 2
            if len(in_groups(texts, room)) == len(texts):
                raise


async def _sum_up_within(
    room: int, plan: CaptionPlan, question: str, texts: Sequence[TimedText], ask: Ask, once: Once
) -> Caption:
    """See `sum_up`; no prompt has texts of more than `room` tokens. Raises `LimitExceeded` where that cannot be."""
    warnings: list[str] = []
    for level in itertools.count(1):
        groups = in_groups(texts, room)
        if len(groups) == 1:
            return await ask(_asked(plan, question, texts, "-whole"), warnings)
        if len(groups) == len(texts):
            raise LimitExceeded(
                "the model's context has no room for two captions and a summary; ask for fewer new tokens, or for a"
                " shorter summary prompt"
            )
        warnings.append(
            f"{len(texts)} texts do not fit the model's context at once; they were summed up in {len(groups)} groups"
            " first"
        )
        sums = []
        for number, group in enumerate(groups):
            asked = _asked(plan, question, group, f"-whole-{level}-{number}")
            caption = await once(asked.options.prompt, partial(ask, asked, ()))
            sums.append(TimedText.of(Segment(0, group[0].start_s, group[-1].end_s), [caption]))
        texts = sums
    raise AssertionError("each level has fewer texts than the one before")


def in_groups(texts: Sequence[TimedText], room: int) -> list[list[TimedText]]:
    """As many neighbours together as fit so many tokens; one that does not fit is alone."""
    groups: list[list[TimedText]] = []
    left = -1
    for text in texts:
        if not groups or text.most_tokens > left:
            groups.append([])
            left = room
        groups[-1].append(text)
        left -= text.most_tokens
    return groups


def nothing_seen(warnings: Sequence[str]) -> SampledVideo:
    """In the place of a video: no frames, no time."""
    return SampledVideo(np.empty((0, 0, 0, 3), dtype=np.uint8), (), 0.0, 0, 0, "", 0, tuple(warnings))


def _asked(plan: CaptionPlan, question: str, texts: Sequence[TimedText], name: str) -> CaptionPlan:
    prompt = "\n".join([question, "", *(text.line for text in texts)])
    return plan.about_text(prompt).named(name)


def _clock(seconds: float) -> str:
    sign, whole = "-" if seconds < 0 else "", round(abs(seconds))
    return f"{sign}{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}"
