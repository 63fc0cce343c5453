"""A replayed model answers as the model itself does, and takes as long as the table says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.replay.device_times import DeviceTimes, load_device_times
from bench.replay.model import Pace, ReplayedModel
from bench.replay.rows import TABLES
from slipstream.engine.ride_plan import RideCounts
from slipstream.engine.row_prefill import Ride
from slipstream.errors import InvalidConfig
from tests.engine.conftest import Pair, load_pair, random_frames
from tests.support.tiny_checkpoint import write_tiny_llava

PROMPT = "What moves?"


class Clock:
    """Time passes while somebody sleeps, and by `step_s` whenever it is read."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s, self.step_s = 0.0, step_s
        self.slept_s: list[float] = []

    def read(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def replay(pair: Pair, times: DeviceTimes, clock: Clock, **others: Any) -> ReplayedModel:
    return ReplayedModel(pair.ours, times, pace=Pace(clock.read, clock.sleep), **{"by_alpha": False, **others})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_pair(write_tiny_llava(tmp_path_factory.mktemp("tiny"), seed=7))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    target = {"pass_s": {"1": 0.4, "9": 0.8}, "prefill_s": 8.0, "guidance_s": 4.0, "encode_frame_s": 0.2}
    draft = {"pass_s": {"0.9": 0.1, "0": 0.3}}
    path.write_text(json.dumps({"name": "test", "source": "made up", "target": target, "draft": draft}))
    return path


def test_a_table_is_read_at_a_speed(table: Path) -> None:
    target, draft = load_device_times(str(table), "target", 4.0), load_device_times(str(table), "draft", 1.0)
    assert target == DeviceTimes("test", ((1.0, 0.1), (9.0, 0.2)), 2.0, 1.0, 0.05)
    assert draft == DeviceTimes("test", ((0.0, 0.3), (0.9, 0.1)))


def test_between_two_points_lies_a_straight_line() -> None:
    times = DeviceTimes("test", ((1.0, 0.1), (9.0, 0.2)))
    assert [times.pass_s(rows) for rows in (0, 1, 5, 9, 30)] == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.2])


def test_guidance_divides_a_prefill() -> None:
    times = DeviceTimes("test", ((1.0, 0.1),), prefill_s=8.0, guidance_s=5.0)
    assert [times.layer_s(layer, 8, 2) for layer in (0, 1, 2, 7)] == [2.5, 2.5, 0.5, 0.5]
    assert DeviceTimes("test", ((1.0, 0.1),), prefill_s=8.0).layer_s(5, 8, 2) == 1.0
    assert DeviceTimes("test", ((1.0, 0.1),)).layer_s(5, 8, 2) == 0.0


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_are_tables(path: Path) -> None:
    target, draft = (load_device_times(str(path), role, 1.0) for role in ("target", "draft"))
    assert target.pass_s(1) > draft.pass_s(0.9) > 0


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "no json",
        '{"name": "a", "target": {"pass_s": {}}}',
        '{"name": "a", "target": {"pass_s": {"1": -1}}}',
        '{"name": "a", "target": {"pass_s": {"1": 1}, "prefil_s": 1}}',
        '{"name": "a", "target": {"pass_s": {"1": 1}, "prefill_s": 1, "guidance_s": 2}}',
    ],
)
def test_what_is_no_table_is_refused_at_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match="no table of times"):
        load_device_times(str(path), "target", 1.0)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"missing\.json: No such file"):
        load_device_times(str(tmp_path / "missing.json"), "target", 1.0)


def test_passes_last_by_their_rows_and_answer_the_same(pair: Pair) -> None:
    frames, clock = random_frames(2, seed=1), Clock()
    model = replay(pair, DeviceTimes("test", ((1.0, 0.1), (9.0, 0.2)), prefill_s=2.0, encode_frame_s=0.05), clock)
    plan, state, logits = pair.prefill(PROMPT, frames)
    embeddings = model.encode_frames(frames)
    prefill = model.start_prefill(plan, embeddings)
    prefill.run_layers(1)
    own_state, own_logits = prefill.finish()
    assert torch.equal(own_logits, logits)
    assert torch.equal(model.step([(own_state, [1, 2, 3, 4, 5])])[0], pair.ours.step([(state, [1, 2, 3, 4, 5])])[0])
    layer_s = 2.0 / model.info.num_layers
    assert clock.slept_s == pytest.approx([0.1, layer_s, 2.0 - layer_s, 0.15])
    assert (model.info.device, pair.ours.info.device) == ("replay:test", "cpu")
    assert model.kv_bytes(10) == pair.ours.kv_bytes(10)


@pytest.mark.parametrize(
    ("overlap", "pass_s"),
    [
        (0.0, 0.1 + 0.03),  # on top of the pass
        (1.0, 0.1),  # in the time in which it waits for memory
        (0.5, 0.1 + 0.015),
    ],
)
def test_a_ride_lasts_as_long_as_its_rows_have_no_room(pair: Pair, overlap: float, pass_s: float) -> None:
    frames, clock = random_frames(2, seed=1), Clock()
    plan, state, _ = pair.prefill(PROMPT, frames)
    times = DeviceTimes("test", ((1.0, 0.1),), prefill_s=plan.num_tokens * 0.01)
    model = replay(pair, times, clock, overlap=overlap)
    prefill = model.start_row_prefill(plan, model.encode_frames(frames), guidance_layer=1)
    model.step([(state, [1])], Ride(prefill, RideCounts(3, 3)))
    prefill.run_alone(RideCounts(2, 2))
    model.step([(state, [1, 2])], Ride(prefill, RideCounts(20, 20)))
    crowded_s = 0.1 + 0.2 - overlap * (0.1 - 0.02)  # two rows of its own take 0.02 of it
    assert clock.slept_s == pytest.approx([pass_s, 0.02, crowded_s])


def test_a_draft_s_passes_last_by_what_it_keeps(pair: Pair) -> None:
    frames, clock = random_frames(2, seed=1), Clock()
    model = replay(pair, DeviceTimes("test", ((0.0, 0.3), (1.0, 0.1)), prefill_s=1.0), clock, by_alpha=True)
    plan = model.plan_prompt(PROMPT, 2)
    embeddings, half = model.encode_frames(frames), torch.arange(plan.num_video_tokens // 2)
    states = [model.start_prefill(plan, embeddings, keep=keep).finish()[0] for keep in (None, half)]
    full_s, half_s = clock.slept_s
    assert half_s == pytest.approx(full_s * (1 - (plan.num_video_tokens - len(half)) / plan.num_tokens))
    for batch in ([states[0]], [states[1]], states):
        model.step([(state, [1]) for state in batch])
    alpha = 1 - len(half) / plan.num_video_tokens
    assert clock.slept_s[2:] == pytest.approx([0.3, 0.3 - 0.2 * alpha, 0.3])


def test_passes_that_really_take_longer_are_counted() -> None:
    clock = Clock(step_s=1.0)
    pace = Pace(clock.read, clock.sleep)
    for seconds in (0.0, 0.5, 1.0, 1.5):
        with pace.lasting(seconds):
            pass
    assert (pace.num_lasted, pace.num_late) == (3, 1)
    assert clock.slept_s == [0.5]
