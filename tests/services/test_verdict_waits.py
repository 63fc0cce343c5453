"""How often a verdict of the target waits for the device: once, whatever the window, and once for all of a pass.

Every call that a GPU would have to be waited for is counted: the wait itself, and whatever makes numbers of a tensor.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from slipstream.engine import VideoLM, load_model, video_lm
from slipstream.engine.target_engine import TargetEngine, TargetLimits
from slipstream.engine.target_prefill import TargetSession
from slipstream.engine.thread import ModelThread
from slipstream.sampling import noise, penalties
from slipstream.sampling import sampler as sampler_module
from slipstream.sampling.params import Proposal, SamplingParams
from slipstream.sampling.sampler import TargetSampler
from slipstream.session_messages import JudgeRequest, TargetStart
from slipstream.speculation.protocol import TokenTree
from tests.engine.conftest import random_frames
from tests.support.tiny_checkpoint import write_tiny_llava

READS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")
NUM_TOKENS = 40


@pytest.fixture(scope="module", params=["static", "ordinary"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    model = load_model(str(write_tiny_llava(tmp_path_factory.mktemp("waits"), seed=5, layers=3)))
    if request.param == "static":
        model.open_static_steps(2**24)
    return model


@contextlib.asynccontextmanager
async def running(model: VideoLM) -> AsyncIterator[TargetEngine]:
    thread = ModelThread(1)
    try:
        yield TargetEngine(model, thread, TargetLimits(max_sessions=8, kv_budget_bytes=2**26, guidance_layer=2))
    finally:
        await asyncio.to_thread(thread.close)


async def opened(engine: TargetEngine, name: str, sampling: SamplingParams) -> TargetSession:
    frames = random_frames(4, 1)
    request = TargetStart(name, "Describe.", NUM_TOKENS, with_guidance=False, sampling=sampling)
    session = await engine.open(request, len(frames), frames.shape[1:3])
    session.rule = type(session.rule)(frozenset({10_000}), NUM_TOKENS)
    session.work.frames = frames
    async for _ in engine.prefill(session):
        pass
    await judge(engine, session, JudgeRequest())
    return session


async def judge(engine: TargetEngine, session: TargetSession, request: JudgeRequest) -> list[Any]:
    return [judgement async for judgement in engine.judge(session, request)]


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    waits: list[str] = []

    def counting(name: str) -> Any:
        read = getattr(torch.Tensor, name)
        return lambda tensor, *args: waits.append(name) or read(tensor, *args)

    with monkeypatch.context() as patch:
        patch.setattr(video_lm, "finish_work", lambda device: waits.append("finish_work"))
        for name in READS:
            patch.setattr(torch.Tensor, name, counting(name))
        yield waits


GREEDY = SamplingParams()
TREE = TokenTree((7, 8, 9, 10), (-1, -1, 0, 1))


@pytest.mark.parametrize(
    "request_", [JudgeRequest(), JudgeRequest((5, 6, 7)), JudgeRequest(TREE.token_ids, tree=TREE)], ids=str
)
async def test_a_verdict_waits_once(model: VideoLM, monkeypatch: pytest.MonkeyPatch, request_: JudgeRequest) -> None:
    async with running(model) as engine:
        session = await opened(engine, "s", GREEDY)
        with counted(monkeypatch) as waits:
            (judgement,) = await judge(engine, session, request_)
        assert waits == ["tolist"]
        assert judgement.verdict.own_token == session.committed[-1]


async def test_all_that_plain_decoding_asks_for_waits_once_a_token(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model) as engine:
        session = await opened(engine, "s", GREEDY)
        with counted(monkeypatch) as waits:
            await judge(engine, session, JudgeRequest(num_passes=9))
        assert waits == ["tolist"] * 9


async def test_a_path_of_a_tree_is_accepted_without_another_wait(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(model) as engine:
        plain, session = [await opened(engine, name, GREEDY) for name in ("plain", "tree")]
        await judge(engine, plain, JudgeRequest(num_passes=4))
        first, second, third = plain.committed[1:4]
        tree = TokenTree((3, first, 4, second), (-1, -1, 0, 1))
        with counted(monkeypatch) as waits:
            (judgement,) = await judge(engine, session, JudgeRequest(tree.token_ids, tree=tree))
        assert judgement.verdict.path == (1, 3) and judgement.verdict.own_token == third
        assert waits.count("tolist") == 1 and "finish_work" not in waits
        assert session.committed == plain.committed[:4]


async def test_sessions_of_one_pass_wait_once_together(model: VideoLM) -> None:
    async with running(model) as engine:
        sessions = [await opened(engine, name, GREEDY) for name in "ab"]
        batch = [(session.work.state, (session.committed[-1], 5, 6)) for session in sessions]
        with torch.inference_mode(), pytest.MonkeyPatch.context() as monkeypatch, counted(monkeypatch) as waits:
            found = model.step_and_choose(batch)
        assert waits == ["tolist"]
        for rows in found:
            assert rows.largest == rows.logits.argmax(-1).tolist()


async def test_who_samples_beside_the_greedy_has_its_own_logits(model: VideoLM) -> None:
    sampled = SamplingParams(temperature=0.8, seed=3)
    texts = []
    for together in (False, True):
        async with running(model) as engine:
            sessions = [await opened(engine, name, asked) for name, asked in (("g", GREEDY), ("s", sampled))]
            asked = [judge(engine, session, JudgeRequest(num_passes=20)) for session in sessions]
            if together:
                await asyncio.gather(*asked)
            else:
                for each in asked:
                    await each
            texts.append([session.committed for session in sessions])
    assert texts[0] == texts[1]


async def test_logits_that_are_no_numbers_end_a_caption(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(model) as engine:
        session = await opened(engine, "s", GREEDY)
        run = model._run_step

        def broken(batch: Any) -> Any:
            found = run(batch)
            return [type(rows)(rows.logits * torch.nan) for rows in found]

        monkeypatch.setattr(model, "_run_step", broken)
        with pytest.raises(Exception, match="not finite"):
            await judge(engine, session, JudgeRequest((5, 6)))


async def test_a_sampled_verdict_waits_no_more_for_a_longer_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the rule that tests each token, too: what it needs of all rows is read together."""
    params = SamplingParams(temperature=0.9, seed=3, rule="rejection")
    counts = []
    for length in (1, 7):
        logits, window = torch.zeros(length + 1, 300), [9] * length
        proposals = [Proposal((9, 10), (0.001, 0.999))] * length  # p is above q, so each is accepted
        with counted(monkeypatch) as waits:
            assert TargetSampler(params, (), 300).judge(logits, (), window, proposals)[0] == length
        assert waits.count("__float__") == length, "of what the draft sent, which lies on the CPU"
        counts.append(len(waits) - length)
    assert counts[0] == counts[1] <= 3


PENALISED = SamplingParams(repetition_penalty=1.1)
SAMPLING = {
    "penalty": (PENALISED, 1),
    "counts, least length": (SamplingParams(presence_penalty=0.5, min_new_tokens=4), 3),
    "coupled": (SamplingParams(temperature=0.9, seed=3), 1),
    "coupled, penalty": (SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.1), 2),
    "rejection": (SamplingParams(temperature=0.9, seed=3, rule="rejection"), 3),
}


@pytest.mark.parametrize("rule", SAMPLING)
def test_what_a_verdict_brings_to_the_device_is_not_waited_for(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is made of the host's numbers on a GPU is a copy from memory that the GPU cannot read by itself,
    and a wait. `SAMPLING` has how many copies there may be."""
    params, most = SAMPLING[rule]
    brought: list[torch.Size] = []

    def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        brought.append(tensor.shape)
        return tensor

    make, move = torch.tensor, torch.Tensor.to

    def tensor(*given: Any, **asked: Any) -> torch.Tensor:
        assert "device" not in asked, "made on the device"
        return make(*given, **asked)

    def to(each: torch.Tensor, *given: Any, **asked: Any) -> torch.Tensor:
        assert "device" not in asked and not isinstance(given[0], torch.device | str), "moved to the device"
        return move(each, *given, **asked)

    width = 2**17  # whose noise is not made for several positions at once
    window, proposals = (9, 10, 11), [Proposal((9, 10, 11), (0.999, 0.0005, 0.0005))] * 3
    logits = torch.randn(4, width, generator=torch.Generator().manual_seed(1))
    sampler = TargetSampler(params, (5, 6), width, ends=(2,))
    expected = sampler.judge(logits, (7,), window, proposals)
    for module in (sampler_module, penalties, noise):
        monkeypatch.setattr(module, "to_device", to_device)
    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert sampler.judge(logits, (7,), window, proposals) == expected
    assert 0 < len(brought) <= most
