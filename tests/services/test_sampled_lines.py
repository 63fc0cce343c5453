"""Lines that the draft draws: the model writes on by itself and asks for each token, which changes nothing."""

import asyncio
from typing import Any

import pytest

from slipstream.engine import VideoLM, line_writer
from slipstream.engine.draft_engine import DraftEngine
from slipstream.engine.draft_session import DraftSession
from slipstream.errors import SlipstreamError
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import read_proposal
from slipstream.session_messages import DraftTokens
from slipstream.speculation.protocol import ROOT, RestartLine
from tests.services.model_sessions import some_frames
from tests.services.test_draft_writer import SHAPES, draft_model, line, running, started
from tests.support.variants import one_in

NUM_TOKENS = 20
SAMPLINGS = {
    "drawn": SamplingParams(temperature=1.0, seed=5),
    "from few": SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=5),
    "penalised": SamplingParams(repetition_penalty=3.0),
    "rejection": SamplingParams(temperature=1.0, seed=5, rule="rejection"),
}
LINES = {
    "chain": {},
    "siblings": {"width": 2, "max_rows": 1},
    "branches": {"width": 2, "max_rows": 2},
    "one branch": {"width": 1, "max_rows": 2},
}


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    return draft_model(tmp_path_factory.mktemp("draft"), request.param)


@pytest.fixture
def chosen(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """What the sampler chose, and what was written, at each call in which it chose."""
    found, write_ahead = list[tuple[list[int], list[int]]](), model.write_ahead

    def spy(batch: Any, num_tokens: int, note: Any) -> Any:
        asked = list[int]()

        def noted(logits: Any) -> int | None:
            token: int | None = note(logits)
            asked.extend([token] if token is not None else [])
            return token

        written = write_ahead(batch, num_tokens, noted)
        if asked:
            found.append((asked, written[0]))
        return written

    monkeypatch.setattr(model, "write_ahead", spy)
    return found


async def heard(engine: DraftEngine, session: DraftSession, num_tokens: int) -> list[DraftTokens]:
    """Chunks until the main path has so many tokens."""
    chunks: list[DraftTokens] = []
    async for chunk in engine.write(session):
        chunks.append(chunk)
        if len(main_path(chunks)) >= num_tokens:
            return chunks
    raise AssertionError("the line ended")


def main_path(chunks: list[DraftTokens]) -> list[int]:
    """The tokens of a chain, or of a tree along each node's first candidate."""
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    parents = [parent for chunk in chunks for parent in chunk.parents]
    if not parents:
        return tokens
    path, node = list[int](), ROOT
    while node in parents:
        node = parents.index(node)
        path.append(tokens[node])
    return path


def check_proposals(chunks: list[DraftTokens], vocab_size: int) -> None:
    """Each token has the one that it was drawn from."""
    assert chunks
    for chunk in chunks:
        for token, proposal in zip(chunk.token_ids, chunk.proposals, strict=True):
            assert read_proposal(proposal, token, vocab_size) is not None


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("how", LINES.values(), ids=LINES)
@one_in(4, "model", "how", "sampling")
async def test_what_is_chosen_ahead_is_what_is_chosen_step_by_step(
    model: VideoLM,
    chosen: list[tuple[list[int], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    how: dict[str, int],
    sampling: SamplingParams,
) -> None:
    num_tokens = NUM_TOKENS if how != LINES["branches"] else 3  # what is drawn is unlikely, and others are read before
    async with running(model) as engine:
        ahead = await heard(engine, await started(engine, some_frames(), sampling=sampling, **how), num_tokens)
        if how != LINES["branches"]:
            assert bool(chosen) == (model.most_nodes > 0), "the model of static steps feeds its largest alone"
        monkeypatch.setattr(model, "write_ahead", lambda *_: None)
        steps = await heard(engine, await started(engine, some_frames(), sampling=sampling, **how), num_tokens)
    assert main_path(ahead)[:num_tokens] == main_path(steps)[:num_tokens]
    assert len(set(main_path(ahead))) >= 3, "a text that says something"
    assert all(asked == written for asked, written in chosen)
    if sampling.sends_proposals and not how:
        check_proposals(ahead, model.info.vocab_size)
        check_proposals(steps, model.info.vocab_size)


@pytest.mark.parametrize("flush_s", [0.0, 60.0], ids=["token by token", "whole"])
async def test_tokens_keep_their_proposals_when_chunks_are_cut_and_lines_restart(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch, flush_s: float
) -> None:
    monkeypatch.setattr(line_writer, "FLUSH_S", flush_s)
    async with running(model) as engine:
        session = await started(engine, some_frames(), sampling=SAMPLINGS["rejection"])
        first = await heard(engine, session, NUM_TOKENS)
        engine.order(session, RestartLine(2, 6, (first[0].token_ids[0],), NUM_TOKENS, 3))
        async for chunk in engine.write(session):
            if chunk.epoch == 2:
                first.append(chunk)
                if chunk.position + len(chunk.token_ids) == NUM_TOKENS:
                    break
    check_proposals(first, model.info.vocab_size)


async def test_a_line_that_is_drawn_restarts_where_it_is_told(model: VideoLM) -> None:
    """On the same prefix it says the same again: the numbers belong to positions."""
    async with running(model) as engine:
        session = await started(engine, some_frames(), sampling=SAMPLINGS["drawn"])
        first = await line(engine, session, NUM_TOKENS)
        engine.order(session, RestartLine(2, 6, (first[6],), NUM_TOKENS, 1))
        assert await line(engine, session, NUM_TOKENS - 7, epoch=2) == first[7:]


async def test_sessions_that_draw_beside_others_write_what_they_write_alone(model: VideoLM) -> None:
    asked = [{"sampling": sampling} for sampling in SAMPLINGS.values()] + [{}]
    async with running(model) as engine:
        alone = []
        for each in asked:
            session = await started(engine, some_frames(), **each)
            alone.append(await line(engine, session, NUM_TOKENS))
            await engine.close(session)
        sessions = [await started(engine, some_frames(), **each) for each in asked]
        assert await asyncio.gather(*(line(engine, session, NUM_TOKENS) for session in sessions)) == alone


async def test_a_sampler_that_fails_ends_its_own_line_only(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(model) as engine:
        bad, good = [await started(engine, some_frames(), sampling=SAMPLINGS["drawn"]) for _ in range(2)]
        choose = bad.line.sampler.choose

        def fails(logits: Any, output: Any) -> Any:
            if len(output) == 5:
                raise SlipstreamError("no number")
            return choose(logits, output)

        monkeypatch.setattr(bad.line.sampler, "choose", fails)
        with pytest.raises(SlipstreamError, match="no number"):
            await line(engine, bad, NUM_TOKENS)
        assert bad.line.output == (await line(engine, good, NUM_TOKENS))[:5]
