"""The seam for drafters at the target: one class and one `Method` line, and the text is still plain decoding's."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from slipstream.engine import VideoLM
from slipstream.engine.local_drafter import Drafting, DraftingSession, LocalDrafter, find_local_drafter
from slipstream.errors import InvalidRequest
from slipstream.sampling.params import SamplingParams
from slipstream.session_messages import JudgeRequest
from slipstream.speculation.methods import METHODS, Drafter, Method
from tests.services.test_target_methods import NUM_TOKENS, judged, model, plain_text, running, started

__all__ = ["model"]


class PromptLookup(LocalDrafter):
    """What followed the last token where it stood before, in the answer or in the prompt."""

    def __init__(self, session: DraftingSession) -> None:
        self._prompt = session.plan.token_ids
        self.num_told = 0
        self.is_closed = False

    def draft(self, committed: Sequence[int], num_tokens: int) -> Drafting:
        seen = [*self._prompt, *committed]
        places = [place for place, token in enumerate(seen[:-1]) if token == seen[-1]]
        yield from ()
        return seen[places[-1] + 1 :][:num_tokens] if places else []

    def on_commit(self) -> None:
        self.num_told += 1

    def close(self) -> None:
        self.is_closed = True


class Greedy(PromptLookup):
    """Drafts more than it is asked for."""

    def draft(self, committed: Sequence[int], num_tokens: int) -> Drafting:
        yield from ()
        return [committed[-1]] * (num_tokens + 100)


@pytest.fixture(params=[PromptLookup, Greedy])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Method:
    path = f"{__name__}:{request.param.__name__}"
    made = Method("prompt_lookup", Drafter.SELF, gamma=5, local_drafter=path)
    monkeypatch.setitem(METHODS, made.name, made)
    return made


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.2, seed=3)])
async def test_a_drafter_of_another_kind_commits_the_text_of_plain_decoding(
    model: VideoLM, method: Method, sampling: SamplingParams
) -> None:
    async with running(model) as engine:
        expected = await plain_text(engine, sampling=sampling)
        before = engine.admission.used_bytes
        session = await started(engine, "own", local_drafter=method.name, sampling=sampling)
        assert session.attention is None, "it needs none"
        assert engine.admission.used_bytes - before == model.kv_bytes(session.plan.num_tokens + NUM_TOKENS)
        judgements = await judged(engine, session, JudgeRequest(num_passes=2, self_draft=5))
        judgements += await judged(engine, session, JudgeRequest(num_passes=NUM_TOKENS, self_draft=5))
        assert session.committed == expected
        assert sum(judgement.facts.num_drafted for judgement in judgements) > 0
        assert max(judgement.facts.num_drafted for judgement in judgements) <= 5
        drafter = session.drafter
        assert isinstance(drafter, PromptLookup)
        assert drafter.num_told == len(judgements)
        await engine.close(session)
        assert drafter.is_closed


async def test_a_line_that_a_draft_service_wrote_is_judged_as_it_came(
    model: VideoLM, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, method.name, replace(method, drafter=Drafter.DRAFT))
    async with running(model) as engine:
        expected = await plain_text(engine)
        session = await started(engine, "own", local_drafter=method.name)
        line = (*expected[1:3], (expected[3] + 1) % session.sampler.vocab_size)
        (judgement,) = await judged(engine, session, JudgeRequest(line, self_draft=5))
        assert (judgement.verdict.num_accepted, judgement.facts.num_drafted) == (2, 0)
        assert session.committed == expected[:4]
        await engine.close(session)


def fail(*asked: object) -> None:
    raise KeyError("nothing")


async def test_a_drafter_that_fails_ends_its_session_alone(
    model: VideoLM, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model) as engine:
        session = await started(engine, "own", local_drafter=method.name)
        await judged(engine, session, JudgeRequest(self_draft=5))
        monkeypatch.setattr(type(session.drafter), "draft", fail)
        with pytest.raises(KeyError):
            await judged(engine, session, JudgeRequest(num_passes=3, self_draft=5))
        await engine.close(session)
        assert len(await plain_text(engine)) == NUM_TOKENS


@pytest.mark.parametrize("name", ["slipstream", "os:system", ""])
def test_a_name_without_a_drafter_lists_those_there_are(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"no drafter at the target; known: std"):
        find_local_drafter(name)
