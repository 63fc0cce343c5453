"""A bad draft of the benchmarks is bad: its lines are not those of the model whose parts it has."""

from pathlib import Path

import pytest

from bench.guarantees.bad_draft import VICES, BadDraftConfig, BadModel
from slipstream.engine import VideoLM
from tests.services.model_sessions import some_frames
from tests.services.test_draft_writer import NUM_TOKENS, SHAPES, draft_model, line, running, started
from tests.support.variants import one_in

TURNS_AT = 6


def bad_model(model: VideoLM, vice: str) -> BadModel:
    config = BadDraftConfig(model="tiny", listen="unix:unused", vice=vice, turns_at=TURNS_AT, slow_pass_ms=1)
    return BadModel(model, config)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vice", VICES)
@one_in(3, "shape", "vice")
async def test_a_bad_draft_writes_badly(vice: str, shape: str, tmp_path: Path) -> None:
    good = draft_model(tmp_path, shape)
    bad = bad_model(good, vice)
    lines = []
    for model in (good, bad):
        async with running(model) as engine:
            lines.append(await line(engine, await started(engine, some_frames()), NUM_TOKENS))
    num_alike = next((place for place, (one, other) in enumerate(zip(*lines, strict=True)) if one != other), NUM_TOKENS)
    first_wrong = {"nonsense": 1, "weak": 1, "weak and slow": 1, "turns bad": TURNS_AT + 1}
    assert num_alike == first_wrong.get(vice, NUM_TOKENS)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_slow_draft_is_slow_at_every_token(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr("bench.guarantees.bad_draft.time.sleep", naps.append)
    slow = bad_model(draft_model(tmp_path, shape), "slow")
    async with running(slow) as engine:
        await line(engine, await started(engine, some_frames()), NUM_TOKENS)
    assert naps == [0.001] * (NUM_TOKENS - 1), "the first token comes from the prefill"
