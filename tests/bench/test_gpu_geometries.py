"""The GPU benchmark: its geometries have the published sizes, and every measurement runs on a CPU with tiny ones."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

import bench.gpu.measure as measure_module
from bench.gpu.checks import TimeUp, failures
from bench.gpu.measure import (
    Clock,
    Job,
    attempt,
    measure_all,
    measure_draft,
    measure_memory,
    measure_passes,
    measure_prefill,
    measure_static_passes,
)
from bench.gpu.program import measure, parse_plan
from bench.gpu.random_model import (
    GEOMETRIES,
    PAIRS,
    Geometry,
    RandomModel,
    chain,
    count_parameters,
    plan_of,
    tiny,
)
from bench.gpu.tables import best_graph_s, graph_passes, markdown, pair_rows, replay_tables, write_tables
from bench.replay.device_times import load_device_times
from slipstream.engine.attention import JoinedKernel, SdpaKernel, by_flash
from slipstream.engine.forward import DecodeState
from slipstream.speculation.protocol import TokenTree
from tests.support.variants import one_in

CPU = torch.device("cpu")
SMALL = [tiny(GEOMETRIES["llava-onevision-qwen2-0.5b"]), tiny(GEOMETRIES["Qwen2.5-VL-7B"])]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=SMALL, ids=lambda shape: shape.family)
def model(request: pytest.FixtureRequest) -> RandomModel:
    return RandomModel.make(request.param, CPU, torch.float32)


def job_of(model: RandomModel, num_video_tokens: int = 100) -> Job:
    return Job(model, Clock(CPU, repeats=2, warm_up=1), num_video_tokens)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_geometry_has_as_many_parameters_as_the_checkpoint(geometry: Geometry) -> None:
    assert count_parameters(geometry) == pytest.approx(geometry.published_parameters, rel=0.02)


def test_bytes_of_a_pass_are_those_of_the_published_numbers() -> None:
    meta = torch.device("meta")
    model = RandomModel.make(GEOMETRIES["Qwen2.5-VL-32B"], meta, torch.bfloat16)
    assert model.pass_bytes(25_000) - model.pass_bytes(0) == 25_000 * 262_144  # 64 layers, 8 heads of 128, K and V
    assert model.pass_bytes(0) == pytest.approx(64e9, rel=0.01)


def test_every_pair_is_made_of_known_geometries() -> None:
    assert all(pair.draft in GEOMETRIES and pair.target in GEOMETRIES for pair in PAIRS)


def test_weights_are_finite_and_tied_where_the_checkpoint_ties_them(model: RandomModel) -> None:
    parts: Any = model.upstream
    assert all(bool(parameter.isfinite().all()) for parameter in parts.parameters())
    tied = parts.lm_head.weight is parts.model.language_model.embed_tokens.weight
    assert tied == model.geometry.text.get("tie_word_embeddings", False)


def window_logits(model: RandomModel, kernel: SdpaKernel, window: Any) -> torch.Tensor:
    state = model.filled_state(model.runner(kernel), 90)
    (logits,) = model.engine(kernel).step([(state, window)])
    return logits


@pytest.mark.parametrize("window", [chain(1), chain(5), TokenTree((4, 5, 6), (-1, 0, 0))], ids=["one", "five", "tree"])
def test_the_joined_kernel_gives_the_same_logits(model: RandomModel, window: Any) -> None:
    expected = window_logits(model, SdpaKernel(), window)
    torch.testing.assert_close(window_logits(model, JoinedKernel(by_flash), window), expected, rtol=1e-4, atol=1e-5)


def test_the_joined_kernel_takes_bf16() -> None:
    model = RandomModel.make(SMALL[0], CPU, torch.bfloat16)
    expected = window_logits(model, SdpaKernel(), chain(4))
    torch.testing.assert_close(window_logits(model, JoinedKernel(by_flash), chain(4)), expected, rtol=0.05, atol=0.02)


def test_a_filled_cache_is_as_long_as_a_real_one(model: RandomModel) -> None:
    engine, plan = model.engine(SdpaKernel()), plan_of(40)
    state, _ = engine.start_prefill(plan, model.video_embeddings(40)).finish()
    filled: DecodeState = model.filled_state(model.runner(SdpaKernel()), plan.num_tokens)
    assert filled.num_tokens == state.num_tokens
    assert filled.next_position == state.next_position


def test_passes_and_prefill_and_memory_are_measured(model: RandomModel) -> None:
    job = job_of(model)
    passes, static, prefill, memory = (dict[str, Any]() for _ in range(4))
    measure_passes(job, passes, (1, 4))
    measure_static_passes(job, static, (1, 4))
    assert set(passes) == {"1", "4"} == set(static["passes"])
    assert not static["captured"] and static["attention"] and graph_passes({"static_passes": static}) == {}
    measure_prefill(job, prefill)
    hidden = model.geometry.text["hidden_size"]
    assert prefill["layer"] == 1
    assert prefill["guidance"]["states_bytes"] == 2 * 100 * hidden * 2 + 2 * hidden * 4
    assert prefill["guidance"]["scores_bytes"] == 400
    measure_memory(job, memory)
    assert memory["peak_bytes"] is None and memory["kv_bytes"] > 0


def test_the_draft_keeps_what_alpha_says(model: RandomModel) -> None:
    found: dict[str, Any] = {}
    measure_draft(job_of(model), found, (0.0, 0.9, 1.0))
    assert [row["kept"] for row in found.values()] == [100, 10, 0]
    for row in found.values():
        static = row["static"]
        assert static["same_tokens"] == 1.0 and static["largest_difference"] < 1e-4
        assert not static["captured"] and static["s"] > 0 and static["ahead_s"] > 0
        assert best_graph_s(row) is None
        assert row["prefill"]["s"] > 0


def test_what_does_not_work_here_is_told_and_ends_nothing(model: RandomModel) -> None:
    found = attempt(lambda: measure_passes(Job(model, Clock(CPU), 100, attention="flash"), {}))
    assert found["error"].startswith("ModelNotUsable")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llava-onevision-qwen2-0.5b", {"draft"}),
        ("Qwen2.5-VL-7B", {"draft"}),
        ("Qwen2.5-VL-32B", {"static_passes"}),
        ("Qwen2.5-VL-3B", {"static_passes"}),
    ],
)
@one_in(3, "name")
def test_what_a_model_is_for_decides_what_is_measured(
    name: str, parts: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for measured in ("measure_prefill", "measure_passes", "measure_static_passes", "measure_draft", "measure_memory"):
        monkeypatch.setattr(measure_module, measured, lambda job, found: found.update(s=1.0))
    row: dict[str, Any] = {}
    measure_all(Job(SimpleNamespace(geometry=GEOMETRIES[name], device=CPU), Clock(CPU), 8), row)  # type: ignore[arg-type]
    assert set(row) == {"video_tokens", "prefill", "passes", "memory"} | parts


@pytest.mark.long
def test_a_time_limit_keeps_what_was_measured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the draft, three shares in: their rows are in the document, the tables and what people read."""

    def late(*_: Any) -> NoReturn:
        raise TimeUp

    names, draft_at, asked = [PAIRS[0].target, PAIRS[0].draft], measure_module._draft_at, list[float]()

    def some(job: Job, alpha: float) -> dict[str, Any]:
        asked.append(alpha)
        return draft_at(job, alpha) if len(asked) < 4 else late()

    monkeypatch.setattr(measure_module, "_draft_at", some)
    sizes = ("--video-tokens", "64", "96", "--models", *names)
    plan = parse_plan(["--device", "cpu", "--tiny", "--repeats", "1", "--dtype", "float32", *sizes])
    document = json.loads(json.dumps(measure(plan)))
    target, draft = document["models"]
    assert document["unfinished"] and failures(document) == ["the time was up before all was measured"]
    assert [set(row) for row in target["sizes"]] == [
        {"video_tokens", "prefill", "passes", "static_passes", "memory"} for _ in range(2)
    ]
    assert [set(row) for row in draft["sizes"]] == [{"video_tokens", "prefill", "passes", "draft"}]
    assert list(draft["sizes"][0]["draft"]) == ["0.0", "0.5", "0.9"]
    assert [row["alpha"] for row in document["pairs"]] == ["0.0", "0.5", "0.9"] and len(document["replay_tables"]) == 1
    assert "Draft tokens" not in markdown({**document, "models": [target]}) and "Draft tokens" in markdown(document)

    monkeypatch.setattr(measure_module, "measure_passes", late)
    document = measure(plan)
    assert [set(row) for row in document["models"][0]["sizes"]] == [{"video_tokens", "prefill", "passes"}]
    assert document["pairs"] == document["replay_tables"] == [] and markdown(document)


@pytest.mark.long
def test_a_run_makes_one_document_with_tables_that_can_be_replayed(tmp_path: Path) -> None:
    names = [PAIRS[0].draft, PAIRS[0].target]
    out = tmp_path / "gpu.json"
    argv = ["--device", "cpu", "--tiny", "--repeats", "1", "--video-tokens", "64", "--models", *names]
    plan = parse_plan([*argv, "--dtype", "float32", "--out", str(out)])
    document = json.loads(json.dumps(measure(plan)))
    assert json.loads(out.read_text())["unfinished"]  # what a run that is cut off leaves
    assert {row["alpha"] for row in document["pairs"]} == {"0.0", "0.5", "0.9", "0.95", "1.0"}
    assert all(row["c"] > 0 for row in document["pairs"])
    (table,) = document["replay_tables"]
    assert set(table["target"]) == {"pass_s", "prefill_s", "guidance_s", "encode_frame_s"}
    assert set(table["draft"]) == {"pass_s", "prefill_s"}
    assert "TINY" in table["source"]
    (path,) = write_tables([table], tmp_path / "tables")
    assert json.loads(path.read_text()) == table
    for role, place in (("target", 32), ("draft", 0.9)):
        times = load_device_times(str(path), role, speed=1.0)
        assert times.pass_s(place) == table[role]["pass_s"][str(place)]
    text = markdown(document)
    assert "TINY" in text


def test_graph_times_of_both_make_a_table_of_their_own() -> None:
    captured = {"captured": True, "s": 0.003, "ahead_s": 0.002}
    row: dict[str, Any] = {"eager": {"s": 0.01}, "static": captured}
    draft = {"video_tokens": 8, "draft": {"0.9": row}}
    static = {"captured": True, "passes": {"1": {"s": 0.03}, "32": {"s": 0.035}}}
    target: dict[str, Any] = {"video_tokens": 8, "passes": {"1": {"s": 0.04}, "32": {"s": 0.05}}}
    target |= {"static_passes": static, "prefill": {"error": "no memory"}}
    models = {PAIRS[0].draft: [draft], PAIRS[0].target: [target]}
    (pair,) = pair_rows(PAIRS[0], models)
    assert pair["c"] == pytest.approx(4) and pair["graph_c"] == pytest.approx(15)
    document = {
        "models": [
            {"name": PAIRS[0].draft, "sizes": [draft], "encoding": {}},
            {"name": PAIRS[0].target, "sizes": [target], "encoding": {"error": "no"}},
        ],
        "device_name": "a GPU",
        "dtype": "bfloat16",
        "tiny": False,
    }
    eager, graphed = replay_tables(document)
    assert eager["draft"]["pass_s"] == {"0.9": 0.01} and eager["target"] == {"pass_s": {"1": 0.04, "32": 0.05}}
    assert graphed["draft"]["pass_s"] == {"0.9": 0.002} and graphed["target"] == {"pass_s": {"1": 0.03, "32": 0.035}}
    assert graphed["name"] == f"{eager['name']}, from graphs"
    for of, part, right in ((row, "static", captured), (target, "static_passes", static)):
        for without in ({**right, "captured": False}, {"error": "RuntimeError: no"}):
            of[part] = without
            assert replay_tables(document) == [eager], "no table mixes graphs with ordinary passes"
            assert "graph_c" not in pair_rows(PAIRS[0], models)[0]
        of[part] = right


@pytest.mark.parametrize("argv", [["--device", "cpu"], ["--device", "cuda"]])
def test_full_size_models_are_refused_without_a_gpu(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        parse_plan(argv)
