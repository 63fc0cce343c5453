"""The region stage of a page with a target that is made up: in whatever order regions end, and however they fail."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.budget import Admission
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.document_captioner import DocumentCaptioner, hint_texts
from slipstream.captioning.page_regions import SPARE_TOKENS, PageRegions
from slipstream.captioning.plan import CaptionPlan, make_plan
from slipstream.documents.messages import Box, Origin, PageDraft, PagePicture, Region, RegionKind, RegionStage
from slipstream.documents.reading import DocumentOptions
from slipstream.errors import InvalidRequest, LimitExceeded, Overloaded, ServiceUnavailable, SessionGone
from slipstream.frame_size import ANY_SIZE
from slipstream.messages import Caption, Speculation, StageChange
from slipstream.options import CaptionOptions
from slipstream.service_info import ModelInfo
from tests.support.processes import eventually

SIDE = 10
CONFIG = GatewayConfig(listen="", target="t:1", reader="r:1")
FAILURES: Sequence[Callable[[], BaseException]] = (
    lambda: Overloaded("no room"),
    lambda: LimitExceeded("too large"),
    lambda: InvalidRequest("too narrow"),
    lambda: ServiceUnavailable("the target is gone"),
    lambda: SessionGone("cancelled"),
    lambda: RuntimeError("a mistake of ours"),
)
PLAN = make_plan(
    CaptionOptions(method="hsd", tolerance=0.75, num_frames=1, max_new_tokens=100, prediction=("of the page",)),
    CONFIG,
    request_id="a-p1",
)


class World:
    """A page of regions in a column, and what the target does with each: a text, or a failure."""

    def __init__(self, ends: Sequence[str | Callable[[], BaseException]], at_once: int = 3) -> None:
        self.ends = ends
        boxes = [Box(0, SIDE * number, SIDE, SIDE * (number + 1)) for number in range(len(ends))]
        self.draft = PageDraft(
            1,
            SIDE,
            SIDE * len(ends),
            tuple(Region(box, RegionKind.TEXT, order, "", 1.0, Origin.OCR) for order, box in enumerate(boxes)),
        )
        rows = b"".join(bytes([number]) * (3 * SIDE * SIDE) for number in range(len(ends)))
        self.picture = PagePicture(1, SIDE, SIDE * len(ends), 72, rows)
        self.texts = [f"drafted {number}" for number in range(len(ends))]
        self.steps: list[asyncio.Event] = []
        self.in_work = self.most_in_work = 0
        self.plans: dict[int, CaptionPlan] = {}
        self.said: list[StageChange] = []
        self.regions = PageRegions(self.picture, ANY_SIZE, asyncio.Semaphore(at_once), self.read, self.said.append)

    async def read(self, picture: PagePicture, plan: CaptionPlan) -> Caption:
        number = picture.pixels[0]
        assert picture == PagePicture(1, SIDE, SIDE, 72, bytes([number]) * (3 * SIDE * SIDE))
        self.plans[number] = plan
        self.in_work += 1
        self.most_in_work = max(self.in_work, self.most_in_work)
        try:
            event = asyncio.Event()
            self.steps.append(event)
            await event.wait()
        finally:
            self.in_work -= 1
        end = self.ends[number]
        if callable(end):
            raise end()
        speculation = Speculation(passes=2, accepted_prediction_tokens=3, rejected_prediction_tokens=4)
        return Caption(end, 5, None, speculation=speculation)

    async def drive(self, choose: Random) -> None:
        """Lets one or the other go on."""
        while True:
            await asyncio.sleep(0.001)
            if self.steps:
                self.steps.pop(choose.randrange(len(self.steps))).set()


async def read_all(world: World, seed: int, plan: CaptionPlan = PLAN) -> tuple[str, ...]:
    driving, before = asyncio.create_task(world.drive(Random(seed))), asyncio.all_tasks()
    try:
        return await world.regions.read_all(world.draft, world.texts, plan)
    finally:
        assert asyncio.all_tasks() - before == {driving} - before and not world.in_work
        driving.cancel()


ends = st.lists(st.one_of(st.sampled_from(["read a", "read b", ""]), st.sampled_from(FAILURES)), min_size=1, max_size=6)


@settings(max_examples=40)
@given(ends, st.integers(0, 2**32), st.integers(1, 4))
def test_texts_are_in_reading_order_and_a_region_that_fails_is_as_the_reader_says(
    ends: list[str | Callable[[], BaseException]], seed: int, at_once: int
) -> None:
    async def run() -> tuple[World, tuple[str, ...]]:
        world = World(ends, at_once)
        return world, await read_all(world, seed)

    world, texts = asyncio.run(run())
    read = [end for end in ends if isinstance(end, str) and end]
    assert texts == tuple(
        end if isinstance(end, str) and end else drafted for end, drafted in zip(ends, world.texts, strict=True)
    )
    assert world.most_in_work <= at_once
    facts, number = world.regions.facts, len(read)
    assert (facts.num_regions, facts.num_read, facts.num_tokens) == (len(ends), number, 5 * number)
    assert (facts.passes, facts.accepted_prediction_tokens) == (2 * number, 3 * number)
    assert facts.rejected_prediction_tokens == 4 * number and (facts.seconds > 0) == bool(read)
    assert world.said == [StageChange("regions", done, len(ends)) for done in range(len(ends) + 1)]


async def test_a_region_is_asked_for_as_its_page_with_its_own_words_as_the_hint() -> None:
    world = World(["read"] * 2)
    world.texts = ["drafted", "drafted at some length: \u4e2d" * 9]
    await read_all(world, 0)
    assert [plan.request_id for plan in world.plans.values()] == ["a-p1-r0", "a-p1-r1"]
    for number, plan in world.plans.items():
        assert plan.options.prediction == (world.texts[number],) and plan.hints is not None
        assert plan.method == PLAN.method and plan.tolerance == PLAN.tolerance and plan.options.tolerance == 0.75
    assert [plan.options.max_new_tokens for plan in world.plans.values()] == [len("drafted") + SPARE_TOKENS, 100]


@pytest.mark.parametrize("form", [{"regex": "{.*}", "temperature": 0.5}, {"min_new_tokens": 90, "seed": 3}])
async def test_the_form_of_a_page_is_not_asked_of_its_regions(form: dict[str, Any]) -> None:
    world = World(["read"])
    await read_all(world, 0, make_plan(CaptionOptions(method="hints", num_frames=1, **form), CONFIG))
    (plan,) = world.plans.values()
    assert not plan.sampling.is_structured and plan.sampling.min_new_tokens == 0
    assert (plan.sampling.temperature, plan.sampling.seed) == (form.get("temperature", 0), form.get("seed", 0))
    assert plan.options.sampling == plan.sampling


async def test_a_page_that_has_ended_leaves_no_region_in_work() -> None:
    world = World(["read"] * 6)
    before = asyncio.all_tasks()
    reading = asyncio.create_task(world.regions.read_all(world.draft, world.texts, PLAN))
    await eventually(lambda: world.in_work == 3)
    world.steps[0].set()
    await eventually(lambda: world.regions.facts.num_read)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert asyncio.all_tasks() == before and not world.in_work
    assert (world.regions.facts.num_regions, world.regions.facts.num_read) == (6, 1)


async def test_a_page_without_regions_has_none_to_read() -> None:
    world = World(["read"])
    assert await world.regions.read_all(PageDraft(1, SIDE, SIDE, ()), (), PLAN) == ()
    assert world.regions.facts == RegionStage() and not world.plans


def test_hints_are_the_page_or_the_set_of_its_regions() -> None:
    assert hint_texts(["a", "", "b"], "hints") == ("a\n\nb",)
    assert hint_texts(["a", "", "b"], "hsd") == ("a", "b")
    assert hint_texts(["", ""], "hints") == hint_texts([], "hsd") == ()


def test_hints_are_written_as_the_target_writes_unless_another_way_is_asked_for() -> None:
    target = SimpleNamespace(model=ModelInfo(surface="html_tables"))
    captioner = SimpleNamespace(peers=SimpleNamespace(target=target))
    documents = DocumentCaptioner(CONFIG, cast(GatewayCaptioner, captioner), None)
    assert documents.surface(DocumentOptions()) == "html_tables"
    assert documents.surface(DocumentOptions(surface="lines")) == "lines"
    target.model = None  # it has not answered yet
    assert documents.surface(DocumentOptions()) == "markdown"


async def test_pages_of_the_archive_have_room_for_their_frames_after_people() -> None:
    read = list[bool]()

    async def caption(plan: CaptionPlan, *given: Any, **facts: Any) -> None:
        read.append(plan.in_background)

    frames = Admission(budget_bytes=3 * SIDE * SIDE, max_sessions=1, max_queued=2, queue_timeout_s=60.0, what="gateway")
    captioner = SimpleNamespace(
        peers=SimpleNamespace(target=SimpleNamespace(model=None)),
        media=SimpleNamespace(frames=frames),
        caption=caption,
    )
    documents = DocumentCaptioner(CONFIG, cast(GatewayCaptioner, captioner), None)
    picture = World(["read"]).picture
    served = frames.reserve(1)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for in_background in (True, False):
            regions = documents.regions_of(picture, lambda event: None)
            group.create_task(regions._read(picture, replace(PLAN, in_background=in_background)))
            await asyncio.sleep(0)
        assert frames.num_queued == 2
        served.release()
    assert read == [False, True]
