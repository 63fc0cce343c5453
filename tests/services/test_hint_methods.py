"""Drafting from hints at a tiny target: right, wrong, late, endless or lossy ones."""

import asyncio
import random
from dataclasses import replace

import pytest

from slipstream.engine import VideoLM, judging, load_model
from slipstream.engine.local_drafter import MAX_HINT_TOKENS, PIECE_TOKENS, HintRoom
from slipstream.engine.target_engine import MAX_HINT_CALLS, TargetEngine
from slipstream.engine.target_prefill import TargetSession
from slipstream.errors import InvalidRequest, LimitExceeded, SessionGone
from slipstream.rpc import session_codec
from slipstream.rpc.v1 import target_pb2
from slipstream.sampling.params import SamplingParams
from slipstream.session_messages import Judgement, JudgeRequest
from slipstream.speculation.company import ALONE, Company
from slipstream.speculation.hints.tolerance import Hints, Tolerance, ToleranceRule
from slipstream.speculation.lines import MAX_NODES
from slipstream.speculation.pacing import WindowCosts
from tests.services.model_sessions import CAPABILITY
from tests.services.test_target_methods import NUM_TOKENS, judged, model, plain_text, running, started
from tests.support.tiny_checkpoint import write_tiny_llava

__all__ = ["model"]
DEPTH = 12
ROUNDS = JudgeRequest(num_passes=NUM_TOKENS, self_draft=DEPTH)
SAMPLINGS = [SamplingParams(), SamplingParams(temperature=0.9, seed=3), SamplingParams(repetition_penalty=1.2)]


class SteadyCosts(WindowCosts):
    """As on a machine that nothing else keeps busy, which would make windows short."""

    def observe(self, window_len: int, seconds: float, company: Company = ALONE) -> None:
        super().observe(window_len, 0.01 + 0.0002 * window_len, replace(company, plain_s=0.0, row_s=0.0))


@pytest.fixture(autouse=True)
def steady_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "WindowCosts", SteadyCosts)


async def opened(engine: TargetEngine, method: str, hints: Hints | None = None, **asked: object) -> TargetSession:
    hints = hints or Hints(max_rows=24)
    return await started(engine, "own", local_drafter=method, hints=hints, guidance_capability=CAPABILITY, **asked)


def wrong(token_ids: list[int], vocab_size: int, share: float) -> list[int]:
    order = random.Random(1)
    return [order.randrange(vocab_size) if order.random() < share else token for token in token_ids]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", ["hints", "hsd"])
async def test_a_true_hint_gives_several_tokens_a_pass_and_the_same_text(
    model: VideoLM, method: str, sampling: SamplingParams
) -> None:
    async with running(model) as engine:
        expected = await plain_text(engine, sampling=sampling)
        session = await opened(engine, method, sampling=sampling)
        assert session.hints.add([expected]) == len(expected)
        judgements = await judged(engine, session, ROUNDS)
        assert session.committed == expected
        assert len(judgements) < NUM_TOKENS / 3
        for judgement in judgements:
            verdict = judgement.verdict
            assert len(verdict.drafted) == verdict.num_accepted <= judgement.facts.num_drafted
            assert not verdict.path, "the caller knows no nodes of a tree that it did not send"


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", ["hints", "hsd", "prompt_lookup"])
async def test_hints_of_any_kind_leave_the_text_alone(model: VideoLM, method: str, sampling: SamplingParams) -> None:
    vocab_size = model.info.vocab_size
    async with running(model) as engine:
        expected = await plain_text(engine, sampling=sampling)
        session = await opened(engine, method, sampling=sampling)
        assert (session.hints is None) == (method == "prompt_lookup")
        if session.hints is not None:
            session.hints.add([wrong(expected, vocab_size, 0.2), wrong(expected, vocab_size, 1.0), [-1, 2**40]])
        judgements = await judged(engine, session, ROUNDS)
        assert session.committed == expected
        assert max((judgement.facts.num_drafted for judgement in judgements), default=0) <= 24


async def test_hints_that_come_late_help_from_then_on(model: VideoLM) -> None:
    async with running(model) as engine:
        expected = await plain_text(engine)
        text = model.decode(expected)
        session = await opened(engine, "hints")
        before = await judged(engine, session, JudgeRequest(num_passes=10, self_draft=DEPTH))
        assert sum(judgement.facts.num_drafted for judgement in before) == 0
        num_tokens = await engine.add_hints("own", [text], capability=CAPABILITY)
        assert num_tokens == len(model.tokenize(text)) + 1, "and an end of text"
        session.hints.add([expected])
        after = await judged(engine, session, ROUNDS)
        assert session.committed == expected
        assert len(after) < (NUM_TOKENS - 11) / 2


async def test_a_long_hint_is_read_in_pass_by_pass(model: VideoLM) -> None:
    async with running(model) as engine:
        expected = await plain_text(engine)
        session = await opened(engine, "hints")
        noise = random.Random(1).choices(range(model.info.vocab_size), k=2 * PIECE_TOKENS - len(expected) // 2)
        session.hints.add([[*noise, *expected]])
        assert len(session.hints.waiting) == 3, "the end of the text is in two pieces"
        await judged(engine, session, JudgeRequest(num_passes=1, self_draft=DEPTH))
        assert len(session.hints.waiting) == 2
        judgements = await judged(engine, session, ROUNDS)
        assert session.committed == expected
        assert len(judgements) < NUM_TOKENS / 2


async def test_who_may_give_a_session_hints(model: VideoLM) -> None:
    async with running(model) as engine:
        await opened(engine, "hints")
        await started(engine, "endless", local_drafter="hints", hints=Hints(max_rows=8), guidance_capability=CAPABILITY)
        with pytest.raises(SessionGone):
            await engine.add_hints("own", ["text"], capability=b"another one of 16")
        for _ in range(MAX_HINT_CALLS):
            await engine.add_hints("own", [], capability=CAPABILITY)
        assert await engine.add_hints("endless", ["x" * 8_000_000], capability=CAPABILITY) <= MAX_HINT_TOKENS
        with pytest.raises(LimitExceeded, match="at once"):
            await engine.add_hints("own", [], capability=CAPABILITY)
        await started(engine, "plain", guidance_capability=CAPABILITY)
        with pytest.raises(InvalidRequest, match="no hints"):
            await engine.add_hints("plain", ["text"], capability=CAPABILITY)
        await started(engine, "std", local_drafter="std", self_draft_kept=4)
        with pytest.raises(InvalidRequest, match="no hints"):
            await engine.add_hints("std", ["text"], capability=b"")


async def test_prompt_lookup_has_texts_of_its_own(model: VideoLM) -> None:
    async with running(model) as engine:
        expected = await plain_text(engine)
        session = await opened(engine, "prompt_lookup", Hints(("a text",), max_rows=24))
        with pytest.raises(InvalidRequest, match="no hints"):
            await engine.add_hints("own", ["text"], capability=CAPABILITY)
        await judged(engine, session, ROUNDS)
        assert session.committed == expected


async def test_a_hint_belongs_to_its_session_alone(model: VideoLM) -> None:
    """No text of one caption, and so of one owner, is ever drafted in another."""
    async with running(model) as engine:
        expected = await plain_text(engine)
        with_hints = await opened(engine, "hints")
        with_hints.hints.add([expected])
        beside = await started(engine, "beside", local_drafter="hints", hints=Hints(max_rows=24))
        await asyncio.gather(judged(engine, with_hints, ROUNDS), judged(engine, beside, ROUNDS))
        after = await started(engine, "after", local_drafter="hints", hints=Hints(max_rows=24))
        for session in (beside, after):
            judgements: list[Judgement] = []
            if len(session.committed) < NUM_TOKENS:
                judgements = await judged(engine, session, ROUNDS)
            assert session.committed == expected
            assert sum(judgement.facts.num_drafted for judgement in judgements) == 0


# -- beside a draft ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
async def test_hints_beside_a_draft_s_windows(model: VideoLM, sampling: SamplingParams, share: float) -> None:
    """Windows that are right, in part or not at all, and hints that are: each pass judges both."""
    vocab_size = model.info.vocab_size
    async with running(model) as engine:
        expected = await plain_text(engine, sampling=sampling)
        session = await opened(engine, "hints_draft", sampling=sampling)
        session.hints.add([wrong(expected, vocab_size, share)])
        order, num_from_hints, num_from_draft = random.Random(3), 0, 0
        while (num_before := len(session.committed)) < NUM_TOKENS:
            line = wrong(expected, vocab_size, order.choice((0.0, 0.3, 1.0)))
            window = tuple(line[num_before:][: order.choice((0, 3, 6))])
            judgements = await judged(engine, session, JudgeRequest(window, order.choice((1, 2)), self_draft=DEPTH))
            judgement = judgements[0]
            verdict = judgement.verdict
            assert not verdict.path and len(verdict.drafted) == verdict.num_accepted
            foreseen = verdict.num_of(window)
            num_from_draft += foreseen
            num_from_hints += verdict.num_accepted - foreseen
            committed = session.committed[num_before:]
            assert list(verdict.committed(window)) == committed[: verdict.num_accepted + 1]
            assert judgement.facts.num_drafted <= 24
        assert session.committed == expected
        assert num_from_draft > 3
        assert (num_from_hints > 3) or share


async def test_a_line_alone_is_judged_as_a_chain(model: VideoLM) -> None:
    async with running(model) as engine:
        expected = await plain_text(engine)
        session = await opened(engine, "hints_draft")
        [judgement] = await judged(engine, session, JudgeRequest(tuple(expected[1:7]), self_draft=DEPTH))
        assert judgement.verdict.drafted == tuple(expected[1:7]) and judgement.facts.num_drafted == 0
        [judgement] = await judged(engine, session, JudgeRequest(tuple(expected[8:40]), self_draft=2))
        assert session.committed == expected, "a window is judged whole, and no token too many"


async def test_who_takes_windows_beside_its_own(model: VideoLM) -> None:
    async with running(model) as engine:
        session = await opened(engine, "hints")
        with pytest.raises(InvalidRequest, match="takes no window beside"):
            await judged(engine, session, JudgeRequest((1, 2), self_draft=DEPTH))


async def test_a_strict_target_judges_the_line_before_hints(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_tiny_llava(tmp_path_factory.mktemp("strict"), seed=5, layers=3)
    async with running(load_model(str(folder), strict_width=8)) as engine:
        expected = await plain_text(engine)
        session = await opened(engine, "hints_draft", Hints(max_rows=24))
        session.hints.add([expected])
        windows = 0
        while (num_before := len(session.committed)) < NUM_TOKENS:
            window = tuple(expected[num_before:][: 5 * (windows % 2)])
            [judgement] = await judged(engine, session, JudgeRequest(window, self_draft=DEPTH))
            assert len(window) + judgement.facts.num_drafted <= 7
            assert not window or not judgement.facts.num_drafted
            windows += 1
        assert session.committed == expected and windows < NUM_TOKENS / 2


# -- tolerance --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(ToleranceRule))
async def test_tolerance_is_lossy_below_one_and_repeats_itself(model: VideoLM, rule: str) -> None:
    async with running(model) as engine:
        expected = await plain_text(engine)
        texts = []
        for tau in (1.0, 0.01, 0.01):
            session = await opened(engine, "hsd", Hints(max_rows=24, tolerance=Tolerance(tau, rule)))
            session.hints.add([wrong(expected, model.info.vocab_size, 0.15)])
            await judged(engine, session, ROUNDS)
            texts.append(session.committed)
            await engine.close(session)
        assert texts[0] == expected
        assert texts[1] == texts[2]
        assert texts[1] != expected, "this hint changes it, or the test says nothing"


@pytest.mark.parametrize(
    ("method", "sampling"), [("hints", SamplingParams()), ("hsd", SamplingParams(temperature=0.5))]
)
async def test_a_tolerance_that_a_session_cannot_have(model: VideoLM, method: str, sampling: SamplingParams) -> None:
    async with running(model) as engine:
        with pytest.raises(InvalidRequest, match="tolerance below 1"):
            await opened(engine, method, Hints(tolerance=Tolerance(0.75)), sampling=sampling)


async def test_a_strict_target_is_drafted_chains(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_tiny_llava(tmp_path_factory.mktemp("strict"), seed=5, layers=3)
    async with running(load_model(str(folder), strict_width=8)) as engine:
        expected = await plain_text(engine)
        session = await opened(engine, "hints", Hints(max_rows=24))
        session.hints.add([expected, wrong(expected, 100, 0.3)])
        judgements = await judged(engine, session, ROUNDS)
        assert session.committed == expected
        assert len(judgements) < NUM_TOKENS
        assert max(judgement.facts.num_drafted for judgement in judgements) <= 7


async def test_the_rows_of_a_tree_count_in_the_budget(model: VideoLM) -> None:
    async with running(model) as engine:
        before = engine.admission.used_bytes
        session = await opened(engine, "hints", Hints(max_rows=200))
        used = engine.admission.used_bytes - before
        assert used == model.kv_bytes(session.plan.num_tokens + NUM_TOKENS + 200)
        expected = await plain_text(engine)
        session.hints.add([expected])
        await judged(engine, session, ROUNDS)
        assert session.work.state.kv_bytes <= used


def test_a_session_takes_so_many_tokens_of_hints_and_no_more() -> None:
    room = HintRoom()
    assert room.add([[1] * (MAX_HINT_TOKENS - 10), [2] * 100, [3]]) == MAX_HINT_TOKENS
    assert room.add([[4]]) == 0
    assert sum(len(piece.token_ids) for piece in room.waiting) == MAX_HINT_TOKENS
    assert max(len(piece.token_ids) for piece in room.waiting) == PIECE_TOKENS
    assert [piece.token_ids[0] for piece in room.waiting if not piece.goes_on] == [1, 2]


def test_hints_on_the_wire() -> None:
    message = target_pb2.Hints(texts=["a", "b"], max_rows=10_000)
    assert session_codec._read_hints(message) == Hints(("a", "b"), MAX_NODES)
    hints = Hints(("a",), 5, Tolerance(0.5, "probability_ratio"))
    assert session_codec._read_hints(session_codec._hints_message(hints)) == hints
    with pytest.raises(InvalidRequest, match="tolerance"):
        session_codec._read_hints(target_pb2.Hints(tolerance=1.5))
