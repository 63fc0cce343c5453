"""Replays of device times: the tables, the figures in their time, and a real stack that takes as long as it is told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.methods.samples import Sample, WindowCost
from bench.replay.device_times import load_device_times
from bench.replay.rows import TABLES, open_replay, replay_rows, replaying
from slipstream import connect_async
from slipstream.errors import InvalidConfig
from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1.common_pb2 import GetModelRequest
from slipstream.rpc.v1.target_pb2_grpc import TargetStub
from slipstream.stack.local import FRESH, Stack, StackOptions
from tests.support.processes import logged
from tests.support.world import NUM_FRAMES, PROMPT, World

LARGEST = TABLES / "7b-72b.json"


def test_a_replay_runs_as_fast_as_its_passes_stay_long_enough() -> None:
    assert open_replay(LARGEST, 4.0).speed == 4.0
    assert open_replay(LARGEST, 100.0).speed == pytest.approx(8.4)
    assert open_replay(TABLES / "0.5b-7b.json", 4.0).speed == pytest.approx(0.0783 / 0.05)


def test_a_fast_devices_table_is_run_slower_than_it_is(tmp_path: Path) -> None:
    table = {"name": "fast", "target": {"pass_s": {"1": 0.005}}, "draft": {"pass_s": {"0": 0.0008}}}
    (tmp_path / "fast.json").write_text(json.dumps(table))
    assert open_replay(tmp_path / "fast.json", 2.0).speed == pytest.approx(0.1)


def test_a_table_without_its_prefill_is_the_same_otherwise(tmp_path: Path) -> None:
    whole = open_replay(LARGEST, 2.0)
    short = whole.without_prefill(tmp_path)
    assert (whole.target.prefill_s, short.target.prefill_s) == (44.23, None)
    assert load_device_times(str(short.path), "target", 1.0) == short.target
    assert load_device_times(str(short.path), "draft", 1.0) == short.draft
    assert short.target.points == whole.target.points


def test_a_shorter_prompt_is_prefilled_in_proportion(tmp_path: Path) -> None:
    page = open_replay(LARGEST, 2.0).of_prompts(tmp_path, 2508)
    assert (page.target.prefill_s, page.draft.prefill_s) == pytest.approx((44.23 * 2508 / 25088, 7.92 * 2508 / 25088))
    assert page.target.points == open_replay(LARGEST, 2.0).target.points and page.speed == 2.0
    own = {"name": "own", "target": {"pass_s": {"1": 1}}, "draft": {"pass_s": {"0": 1}}}
    (tmp_path / "own.json").write_text(json.dumps(own))
    with pytest.raises(InvalidConfig, match="prefill_tokens"):
        open_replay(tmp_path / "own.json", 1.0).of_prompts(tmp_path, 100)


def test_a_replaying_stack_has_other_model_services(tmp_path: Path) -> None:
    options = replaying(StackOptions(extra_flags=FRESH), tmp_path / "a.json", 2.0, roles=("draft",))
    assert options.modules["target"] == StackOptions().modules["target"]
    assert options.modules["draft"] == "bench.replay.service"
    words = ("--role", "draft", "--replay", str(tmp_path / "a.json"), "--replay-speed", "2")
    assert options.extra_flags == {**FRESH, "draft": (*FRESH["draft"], *words)}


def _sample(method: str, rate: float, pass_s: float, **figures: float) -> Sample:
    costs = {0: WindowCost(10, pass_s, pass_s)}
    return Sample(method, "a", (1, 2, 3), rate, 5.0, figures={"target_pass_s": pass_s, **figures}, costs=costs)


def test_figures_are_shown_in_the_table_s_own_time() -> None:
    plain = replace(_sample("autoregressive", 9.0, 0.105), total_s=60.0)
    ours = replace(_sample("parallelvlm", 27.0, 0.106, draft_pass_s=0.0120, tau=0.8), total_s=40.0)
    alone, drafted = replay_rows(open_replay(LARGEST, 4.0), [plain, ours], {"parallelvlm": 0.9})
    assert (alone["tokens_per_s"], alone["speedup"], alone["T_q"], alone["late"]) == (2.25, 1.0, None, False)
    assert (drafted["speedup"], drafted["paper_speedup"], drafted["tau"]) == (3.0, 3.36, 0.8)
    assert drafted["T_p"] == pytest.approx(0.424)
    assert drafted["T_q"] == pytest.approx(0.048)
    assert drafted["c"] == pytest.approx(0.420 / 0.0466)
    assert (drafted["first_token_s"], drafted["end_to_end"]) == (20.0, 1.5)
    assert not drafted["late"]


@pytest.mark.parametrize(("pass_s", "draft_pass_s"), [(0.2, 0.0117), (0.105, 0.02)])
def test_passes_that_took_too_long_are_told(pass_s: float, draft_pass_s: float) -> None:
    sample = _sample("parallelvlm", 9.0, pass_s, draft_pass_s=draft_pass_s)
    (row,) = replay_rows(open_replay(LARGEST, 4.0), [sample], {"parallelvlm": 0.9})
    assert row["late"]


def test_passes_of_several_rows_take_longer_by_the_table() -> None:
    sample, replay = _sample("slipstream_tree", 9.0, 0.105, draft_pass_s=0.0145), open_replay(LARGEST, 4.0)
    for most_rows, late in ((6, False), (1, True)):
        (row,) = replay_rows(replay, [sample], {"slipstream_tree": 0.9}, {"slipstream_tree": most_rows})
        assert row["late"] is late


@pytest.mark.long
async def test_a_stack_takes_as_long_as_it_is_told_and_says_so(world: World, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    times = {"target": {"pass_s": {"1": 0.2}}, "draft": {"pass_s": {"0": 0.1}}}
    table.write_text(json.dumps({"name": "slow device"} | times))
    async with Stack(replaying(world.stack_options(), table, 4.0)) as stack:
        async with connect_async(stack.gateway_address) as captioner:
            caption = await captioner.caption(
                world.clips[0], PROMPT, num_frames=NUM_FRAMES, max_new_tokens=12, method="sd", gamma=3
            )
        for service in ("target", "draft"):
            assert logged(stack.processes[service].log_path, "replay.on", level="warning", table="slow device")
        async with open_channel(stack.processes["target"].address) as channel:
            model = await TargetStub(channel).GetModel(GetModelRequest(), timeout=60)
    assert [token.token_id for token in caption.tokens] == world.answer(0, 12)
    assert model.device == "replay:slow device"
    assert all(cost.pass_s >= 0.05 for cost in caption.speculation.pass_costs)
    assert caption.speculation.draft_pass_s >= 0.02  # the first token of a line needs no pass
