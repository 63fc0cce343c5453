"""What of a film's captions goes into which prompt of its summary: all of it, in order, in prompts that fit."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.film_summary import TimedText, in_groups, sum_up
from slipstream.captioning.plan import CaptionPlan, make_plan
from slipstream.errors import LimitExceeded, UnreadableVideo
from slipstream.messages import Caption, Segment
from slipstream.options import CaptionOptions
from slipstream.speculation.protocol import FinishReason

CONFIG = GatewayConfig(listen="", target="t:1", draft="d:1")
PLAN = make_plan(
    CaptionOptions("What?", segments="fixed:1s", summary=True, summary_prompt="Sum up.", max_new_tokens=50), CONFIG
)
TEXTS = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(
    lambda sizes: [
        TimedText(float(number), number + 1.0, f"t{number} " + "x" * size, size) for number, size in enumerate(sizes)
    ]
)


@given(TEXTS, st.integers(0, 400))
def test_groups_are_the_texts_in_order_and_fit(texts: list[TimedText], room: int) -> None:
    groups = in_groups(texts, room)
    assert [text for group in groups for text in group] == texts
    assert all(len(group) == 1 or sum(text.most_tokens for text in group) <= room for group in groups)
    for group, following in pairwise(groups):
        assert sum(text.most_tokens for text in group) + following[0].most_tokens > room, "no group is cut early"


class Target:
    """Answers with a number, and refuses prompts that it counts as too long."""

    def __init__(self, most_chars: int = 10**6) -> None:
        self.asked: list[CaptionPlan] = []
        self._most_chars = most_chars

    async def answer(self, plan: CaptionPlan, warnings: Sequence[str]) -> Caption:
        if len(plan.options.prompt) > self._most_chars:
            raise LimitExceeded("too long")
        self.asked.append(plan)
        return Caption(
            f"sum {len(self.asked)}" + "".join(f" ({warning})" for warning in warnings), 3, FinishReason.STOP
        )


@given(TEXTS, st.integers(500, 3000))
def test_every_text_is_in_one_prompt_of_the_first_level(texts: list[TimedText], max_context: int) -> None:
    target = Target()
    said = asyncio.run(sum_up(PLAN, texts, max_context, target.answer))
    lines = [line for plan in target.asked for line in plan.options.prompt.splitlines()[2:]]
    assert [line for line in lines if " t" in line] == [text.line for text in texts]
    assert ("do not fit" in said.text) == (len(target.asked) > 1)
    for plan in target.asked:
        assert plan.options.prompt.startswith("Sum up.\n\n[00:00:") and not plan.has_video
        assert not plan.options.in_segments and "summary" not in plan.options.given()


def test_a_prompt_that_the_target_finds_too_long_is_cut_into_more() -> None:
    texts = [TimedText(float(number), number + 1.0, "x" * 40, 40) for number in range(12)]
    target = Target(most_chars=300)
    said = asyncio.run(sum_up(PLAN, texts, 4000, target.answer))
    assert len(target.asked) > 1 and "groups first" in said.text
    with pytest.raises(LimitExceeded, match="too long"):
        asyncio.run(sum_up(PLAN, texts, 4000, Target(most_chars=20).answer))


def test_segments_without_a_text_count_for_nothing() -> None:
    silent, spoken = TimedText(0, 1, "", 0), TimedText(-1, 3723.6, "a dog", 2)
    target = Target()
    asyncio.run(sum_up(PLAN, [silent, spoken], 4000, target.answer))
    assert target.asked[0].options.prompt == "Sum up.\n\n[-00:00:01 - 01:02:04] a dog"
    with pytest.raises(UnreadableVideo, match="no segment has a caption"):
        asyncio.run(sum_up(PLAN, [silent], 4000, target.answer))
    with pytest.raises(LimitExceeded, match="no room for two captions"):
        asyncio.run(sum_up(PLAN, [spoken, spoken], 300, target.answer))


def test_a_segment_has_no_text_where_no_prompt_has_an_answer() -> None:
    """As of a black one that was left out: a summary of nothing would be made up."""
    segment, empty, spoken = Segment(0, 0.0, 1.0), Caption("", 0, None), Caption(" a\n dog", 2, None)
    assert [TimedText.of(segment, said).text for said in ([empty], [empty, empty])] == ["", ""]
    assert TimedText.of(segment, [empty, spoken, empty, spoken]).text == "a dog a dog"
