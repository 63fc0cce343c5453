"""The target's engine with prompts that ride along: whoever decodes meanwhile, every text is what it is without."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import torch

from slipstream.engine import VideoLM, load_model
from slipstream.engine import rides as rides_module
from slipstream.engine.ride_plan import RideCounts, RidePlanner
from slipstream.engine.rides import Rides, RidingPrompt
from slipstream.engine.row_prefill import Ride, RowPrefill
from slipstream.engine.target_engine import TargetEngine, TargetLimits
from slipstream.engine.target_prefill import TargetSession
from slipstream.engine.thread import ModelThread
from slipstream.sampling.params import SamplingParams
from slipstream.session_messages import JudgeRequest, Prefilled, PrefillStage, StageProgress, TargetStart
from slipstream.speculation.protocol import ROOT, TokenTree
from tests.services.model_sessions import some_frames
from tests.support.held_memory import no_collection
from tests.support.processes import eventually
from tests.support.tiny_checkpoint import write_tiny_llava, write_tiny_qwen

MIB = 1024 * 1024
NUM_TOKENS = 24
SAMPLINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=1.0, seed=7)}
WINDOWS = ((), (3, 4, 5), (9,))
TREE = TokenTree((3, 4, 5, 6), (ROOT, 0, ROOT, 2))


@pytest.fixture(scope="module", params=["llava_onevision", "qwen2_5_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    write = {"llava_onevision": write_tiny_llava, "qwen2_5_vl": write_tiny_qwen}[request.param]
    return load_model(str(write(Path(tmp_path_factory.mktemp("target")), seed=5, layers=5)))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass carries a few rows, more or fewer of them in turn, so that a test depends on no clock."""
    turns = iter(range(10**9))

    def next_counts(
        planner: RidePlanner, num_rows: int, done: RideCounts, prompt_rows: int, *, beside_people: bool
    ) -> RideCounts:
        turn = next(turns)
        first = min(1 + turn % 4, prompt_rows - done.first)
        return RideCounts(first, min(turn % 3, done.first + first - done.second))

    monkeypatch.setattr(RidePlanner, "next_counts", next_counts)


@pytest.fixture
def riding(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[RowPrefill]]:
    """Prompts that have stood in line."""
    prompts, join = list[weakref.ref[RowPrefill]](), Rides.join

    def noted(rides: Rides, prefill: RowPrefill) -> RidingPrompt:
        prompts.append(weakref.ref(prefill))
        return join(rides, prefill)

    monkeypatch.setattr(Rides, "join", noted)
    return prompts


@pytest.fixture
def rode(monkeypatch: pytest.MonkeyPatch) -> list[RideCounts]:
    """What decoding passes have carried."""
    counts: list[RideCounts] = []
    run = RowPrefill.run_along

    def run_along(prefill: RowPrefill, batch: list, ride: RideCounts) -> list[torch.Tensor]:  # type: ignore[type-arg]
        counts.extend([ride] if batch else [])
        return run(prefill, batch, ride)

    monkeypatch.setattr(RowPrefill, "run_along", run_along)
    return counts


@asynccontextmanager
async def running(model: VideoLM, ride_along: float, **limits: int) -> AsyncIterator[TargetEngine]:
    thread = ModelThread(1)
    settings = {"max_sessions": 8, "kv_budget_bytes": 64 * MIB, "guidance_layer": 2} | limits
    try:
        yield TargetEngine(model, thread, TargetLimits(ride_along=ride_along, **settings))
    finally:
        await asyncio.to_thread(thread.close)


async def opened(engine: TargetEngine, name: str, seed: int, *, in_background: bool, sampling: str) -> TargetSession:
    request = TargetStart(name, "What?", NUM_TOKENS, True, sampling=SAMPLINGS[sampling], in_background=in_background)
    frames = some_frames(4, seed)
    session = await engine.open(request, len(frames), frames.shape[1:3])
    session.work.frames = frames
    return session


async def decoded(engine: TargetEngine, session: TargetSession) -> list[int]:
    """To the end of the text: plain passes, chains and trees in turn."""
    async for _ in engine.judge(session, JudgeRequest()):
        pass
    turn = 0
    while len(session.committed) < NUM_TOKENS:
        turn += 1
        request = JudgeRequest(TREE.token_ids, tree=TREE) if turn % 4 == 3 else JudgeRequest(WINDOWS[turn % 3])
        async for judgement in engine.judge(session, request):
            if judgement.verdict.finish_reason is not None:
                return session.committed
    return session.committed


async def captioned(
    engine: TargetEngine, seed: int, *, in_background: bool, sampling: str, until: Callable[[], object] = lambda: True
) -> tuple[list[int], Prefilled]:
    """Decoded from when `until` says so."""
    session = await opened(engine, f"{seed}", seed, in_background=in_background, sampling=sampling)
    *_, facts = [event async for event in engine.prefill(session)]
    assert isinstance(facts, Prefilled)
    await eventually(until)
    text = await decoded(engine, session)
    await engine.close(session)
    return text, facts


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_texts_are_those_without_rides(
    model: VideoLM,
    always: None,
    rode: list[RideCounts],
    riding: list[object],
    sampling: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """People's texts are begun once there is a prompt to ride along, and none runs alone before they are whole."""
    async with running(model, 0.0) as engine:
        expected = [(await captioned(engine, seed, in_background=False, sampling=sampling))[0] for seed in range(4)]
    assert not rode
    async with running(model, 1.0) as engine:
        archive = asyncio.gather(*(captioned(engine, n, in_background=True, sampling=sampling) for n in range(2, 4)))
        people = (captioned(engine, n, in_background=False, sampling=sampling, until=lambda: riding) for n in range(2))
        with monkeypatch.context() as held:
            held.setattr(Rides, "_queue_alone", lambda rides: None)
            found = await asyncio.gather(*people)
        assert engine._rides is not None
        engine._rides._queue_alone()
        found += await archive
    assert [text for text, _ in found] == expected
    assert rode, "prompts rode along"
    facts = [facts for _, facts in found]
    assert all(each.prompt_tokens == facts[0].prompt_tokens and each.kv_bytes for each in facts)
    assert all(each.prefill_until_guidance_s > 0 and each.prefill_after_guidance_s > 0 for each in facts)


async def test_alone_a_prompt_in_the_background_runs_by_itself_and_gives_its_guidance_first(model: VideoLM) -> None:
    async with running(model, 0.0) as engine:
        session = await opened(engine, "a", 1, in_background=True, sampling="greedy")
        assert [event async for event in engine.prefill(session)]
        expected = session.guidance.result()
    async with running(model, 1.0, prefix_cache_bytes=16 * MIB) as engine:
        session = await opened(engine, "a", 1, in_background=True, sampling="greedy")
        events = []
        async for event in engine.prefill(session):
            events.append(event)
            if isinstance(event, StageProgress) and event.stage is PrefillStage.PREFILL and 0 < event.done <= 2:
                assert session.guidance.done() and event.done == 2, "no layer behind L has run"
        guidance = session.guidance.result()
        for ours, theirs in ((guidance.video_states, expected.video_states), (guidance.text_sums, expected.text_sums)):
            assert ours is not None and theirs is not None
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)
        done = [event.done for event in events if isinstance(event, StageProgress) and event.stage == "prefill"]
        assert done == sorted(set(done)) and (done[0], done[-1]) == (0, 5)
        again = await opened(engine, "b", 1, in_background=True, sampling="greedy")
        *_, facts = [event async for event in engine.prefill(again)]
        assert isinstance(facts, Prefilled) and facts.reused_tokens == session.plan.text_start, "its rows are shared"


@pytest.mark.parametrize("guidance_layer", [5, 4])
async def test_a_prompt_runs_alone_though_no_layer_is_behind_its_guidance(model: VideoLM, guidance_layer: int) -> None:
    """There are five."""
    async with running(model, 0.0) as engine:
        expected, _ = await captioned(engine, 1, in_background=False, sampling="greedy")
    async with running(model, 1.0, guidance_layer=guidance_layer) as engine, asyncio.timeout(60):
        text, facts = await captioned(engine, 1, in_background=True, sampling="greedy")
    assert text == expected and facts.prefill_until_guidance_s > 0


async def test_who_leaves_while_riding_frees_its_memory_and_the_next_rides(model: VideoLM, always: None) -> None:
    async with running(model, 1.0) as engine:
        host = await opened(engine, "host", 0, in_background=True, sampling="greedy")
        assert [event async for event in engine.prefill(host)]
        gone = await opened(engine, "gone", 1, in_background=True, sampling="greedy")
        stays = await opened(engine, "stays", 2, in_background=True, sampling="greedy")

        async def leave() -> None:
            async for event in engine.prefill(gone):
                if isinstance(event, StageProgress) and event.stage is PrefillStage.PREFILL and event.done:
                    break
            await engine.close(gone)

        async def stay() -> list[int]:
            assert [event async for event in engine.prefill(stays)]
            return await decoded(engine, stays)

        _, text, _ = await asyncio.gather(leave(), stay(), decoded(engine, host))
        assert engine._rides is not None and not engine._rides._prompts
        assert len(text) == NUM_TOKENS and engine.admission.num_admitted == 2
    async with running(model, 0.0) as engine:
        assert text == (await captioned(engine, 2, in_background=False, sampling="greedy"))[0]


@pytest.mark.parametrize("place", [0, 1])
async def test_a_prompt_that_leaves_while_it_rides_is_gone_without_a_collection(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch, riding: list[weakref.ref[RowPrefill]], place: int
) -> None:
    """Its rows are most of its memory, be it the first in line or the next."""

    async def prefilled(session: TargetSession) -> None:
        async with aclosing(engine.prefill(session)) as events:
            async for _ in events:
                pass

    monkeypatch.setattr(Rides, "_queue_alone", lambda rides: None)  # so they stand in line until they leave
    async with running(model, 1.0) as engine:
        with no_collection():
            sessions = [await opened(engine, f"{n}", n, in_background=True, sampling="greedy") for n in range(2)]
            prefills = [asyncio.create_task(prefilled(session)) for session in sessions]
            await eventually(lambda: len(riding) == 2)
            leaving = prefills.pop(place)
            leaving.cancel()
            await asyncio.wait([leaving])
            del leaving
            await engine.close(sessions[place])
            gone, stays = riding[place], riding[1 - place]
            await eventually(lambda: gone() is None)
            assert stays() is not None
            prefills[0].cancel()
            await asyncio.wait(prefills)
            await engine.close(sessions[1 - place])


async def test_a_prompt_that_has_ridden_keeps_its_keys_and_values_alone(
    model: VideoLM, riding: list[weakref.ref[RowPrefill]]
) -> None:
    """Its rows' states are several times what a caption's answer takes, and nobody counts them."""
    async with running(model, 1.0) as engine:
        with no_collection():
            session = await opened(engine, "a", 1, in_background=True, sampling="greedy")
            async for _ in engine.prefill(session):
                pass
            await eventually(lambda: riding[0]() is None)
            assert len(await decoded(engine, session)) == NUM_TOKENS
            await engine.close(session)


async def test_a_prompt_that_is_done_stands_in_nobodys_way(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its session takes note of it; meanwhile the next one's rows run."""
    go_on, held = RidingPrompt.end, list[RidingPrompt]()

    def end(prompt: RidingPrompt) -> None:
        if prompt.prefill.is_done and not held:
            held.append(prompt)
        else:
            go_on(prompt)

    monkeypatch.setattr(RidingPrompt, "end", end)
    async with running(model, 1.0) as engine:
        both = [asyncio.create_task(captioned(engine, n, in_background=True, sampling="greedy")) for n in (0, 1)]
        (done,), (waits,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        assert len(done.result()[0]) == NUM_TOKENS and held
        go_on(held[0])
        assert len((await waits)[0]) == NUM_TOKENS


async def test_rows_that_fail_end_their_own_session_only(
    model: VideoLM, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(prefill: RowPrefill, batch: object, counts: RideCounts) -> list[torch.Tensor]:
        raise RuntimeError("out of memory")

    async with running(model, 0.0) as engine:
        expected, _ = await captioned(engine, 0, in_background=True, sampling="greedy")
    async with running(model, 1.0) as engine:
        host = await opened(engine, "host", 0, in_background=True, sampling="greedy")
        assert [event async for event in engine.prefill(host)]
        rider = await opened(engine, "rider", 1, in_background=True, sampling="greedy")
        monkeypatch.setattr(rides_module.RowPrefill, "run_along", broken)

        async def fail() -> None:
            with pytest.raises(RuntimeError, match="out of memory"):
                async for _ in engine.prefill(rider):
                    pass

        text, _ = await asyncio.gather(decoded(engine, host), fail())
        assert text == expected
        monkeypatch.undo()
        text, _ = await captioned(engine, 5, in_background=True, sampling="greedy")
        assert len(text) == NUM_TOKENS


async def test_a_pass_that_fails_without_its_riders_too_ends_none_of_them(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one whose last rows it has run: nobody else would tell it to go on."""

    def whatever_is_left(
        planner: RidePlanner, num_rows: int, done: RideCounts, prompt_rows: int, *, beside_people: bool
    ) -> RideCounts:
        return RideCounts(prompt_rows - done.first, prompt_rows - done.second)

    run, step = RowPrefill.run_along, model.step_and_choose

    def fails_behind_its_rows(prefill: RowPrefill, batch: list, counts: RideCounts) -> list[torch.Tensor]:  # type: ignore[type-arg]
        run(prefill, batch, counts)
        raise RuntimeError("out of memory")

    def fails_alone(batch: object, ride: Ride | None = None) -> object:
        if ride is None:
            raise RuntimeError("out of memory")
        return step(batch, ride)  # type: ignore[arg-type]

    monkeypatch.setattr(RidePlanner, "next_counts", whatever_is_left)
    async with running(model, 0.0) as engine:
        expected, _ = await captioned(engine, 1, in_background=True, sampling="greedy")
    async with running(model, 1.0) as engine:
        host = await opened(engine, "host", 0, in_background=True, sampling="greedy")
        assert [event async for event in engine.prefill(host)]
        rides = engine._rides
        assert rides is not None
        with monkeypatch.context() as failing:
            failing.setattr(Rides, "_queue_alone", lambda rides: None)
            failing.setattr(RowPrefill, "run_along", fails_behind_its_rows)
            failing.setattr(model, "step_and_choose", fails_alone)
            rider = asyncio.create_task(captioned(engine, 1, in_background=True, sampling="greedy"))
            await eventually(lambda: rides._prompts)
            with pytest.raises(RuntimeError, match="out of memory"):
                await decoded(engine, host)
        text, _ = await rider
        assert text == expected
