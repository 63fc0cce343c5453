"""Every check for a GPU at tiny size on the CPU, through its own command: all lines run but those for CUDA alone."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from bench.__main__ import PROGRAMS, main
from bench.gpu import checks, folders, kernels, passes, serve, tp
from bench.gpu.checks import Report, failures, run_all
from bench.gpu.measure import attempt
from bench.gpu.random_model import GEOMETRIES, tiny
from bench.output import finish
from slipstream.engine import load_model
from slipstream.engine.static.steps import StaticSteps
from slipstream.families.checkpoints import folders_tokenizer_digest

TINY = ("--tiny", "--device", "cpu")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a program; its document, and its exit status."""
    monkeypatch.setattr(checks, "finish", partial(finish, folder=tmp_path / "results"))

    def run(name: str, *options: str) -> tuple[dict[str, Any], int]:
        status = 0
        try:
            main([name, *TINY, *options])
        except SystemExit as ended:
            status = int(ended.code or 0)
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        return json.loads(Path(document["file"]).read_text()), status

    return run


def judged(document: dict[str, Any]) -> dict[str, bool]:
    """What a run on a CPU can tell."""
    return {row["check"]: row["ok"] for row in document["checks"] if row["ok"] is not None}


# -- reports ----------------------------------------------------------------------------------------------------------


def test_a_tiny_run_judges_no_speed() -> None:
    report = Report(Namespace(device=CPU, tiny=True))
    report.at_most("seconds", 100.0, 1.0)
    assert [row["ok"] for row in report.rows] == [None] and report.ok


def test_a_full_run_judges_all_and_takes_nothing_missing_for_good() -> None:
    report = Report(Namespace(device=torch.device("cuda"), tiny=False))
    for value in (1.0, 1.1, None, {"error": "no memory"}):
        report.at_most("seconds", value, 1.0)
    report.equals("text", "a", "b")
    assert [row["ok"] for row in report.rows] == [True, False, False, False, False]
    assert report.rows[3]["value"] == "no memory" and not report.ok


def test_what_was_measured_before_the_time_was_up_is_kept() -> None:
    found, report = list[int](), Report(Namespace(device=CPU, tiny=True))
    with checks.bounded(0.05) as bound:
        while True:
            checks_left = attempt(lambda: found.append(len(found)))
            assert checks_left is None, "it is no error of what is measured"
    assert bound.was_reached and found
    report.in_time(bound)
    assert not report.ok
    with checks.bounded(60) as bound:
        pass
    report = Report(Namespace(device=CPU, tiny=True))
    report.in_time(bound)
    assert not bound.was_reached and report.rows == []


@pytest.mark.parametrize("name", ["gpu-graph", "gpu-kernels", "gpu-vision", "gpu-serve"])
def test_a_command_ends_by_itself_when_its_time_is_up(run: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "OWN_LIMIT_S", 0.0)
    monkeypatch.setattr(checks, "OWN_LIMIT_S", 0.05)
    document, status = run(name)
    assert status == 1 and any("time" in str(row) or row["check"] == "measured" for row in document["checks"])
    assert failures(document)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("gpu-")])
def test_full_size_is_refused_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cpu", "cuda"):
        with pytest.raises(SystemExit) as refused:
            main([name, "--device", device])
        assert refused.value.code == 2


def test_failures_are_named() -> None:
    document = {
        "checks": [{"check": "a", "ok": False}, {"check": "b", "ok": None}, {"check": "c", "ok": True}],
        "methods": [
            {"name": "sd", "identical": 0.5, "lossy": False, "family": "sequential"},
            {"name": "fastv", "identical": 0.0, "lossy": True, "family": "lossy"},
            {"name": "transformers", "identical": 0.0, "lossy": False, "family": "outside"},
        ],
        "tables": [{"methods": [{"method": "slipstream", "identical": 1.0, "late": True}]}],
        "models": [
            {"name": "one", "sizes": [{"passes": {"1": {"s": 1.0}}}]},
            {"name": "two", "sizes": [{"passes": {"error": "no memory"}}]},
        ],
    }
    assert [line.partition(":")[0] for line in failures(document)] == ["a", "sd", "slipstream", "two"]
    assert [line.partition(":")[0] for line in failures(document, tiny=True)] == ["a", "sd", "two"]


@pytest.mark.parametrize(
    ("script", "ok", "words"),
    [
        ("print('a table'); print({document!r})", True, ""),
        ("print({document!r}); raise SystemExit(1)", False, ""),
        ("print({failed!r})", False, "too slow"),
        ("print('no document')", False, "without a document"),
        ("raise SystemExit(2)", False, "exit status 2"),
        ("import time; time.sleep(600)", False, "longer than"),
    ],
)
def test_what_a_command_leaves(
    script: str, ok: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "LIMIT_S", 0.5 if "sleep" in script else 60)
    failed = json.dumps({"checks": [{"check": "too slow", "ok": False}]})
    script = script.format(document=json.dumps({"checks": []}), failed=failed)
    row = checks.run_one([sys.executable, "-c", script], tmp_path / "a.json")
    assert row["ok"] == ok and words in row["failed"]
    assert not ok or json.loads((tmp_path / "a.json").read_text()) == {"checks": []}


def test_all_commands_run_in_order_whatever_they_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(checks, "run_one", lambda argv, kept, tiny: asked.append(argv) or {"ok": len(asked) > 1})
    rows = run_all(list(checks.COMMANDS), "cuda:0", tmp_path, tiny=False)
    assert [row["command"] for row in rows] == list(checks.COMMANDS) == [argv[3] for argv in asked]
    assert not rows[0]["ok"] and all(row["ok"] for row in rows[1:])
    tables = str(tmp_path / "tables")
    assert [argv[3] for argv in asked if tables in argv] == ["gpu", "replay"] and asked[0][3] == "gpu-serve"
    assert all(name in PROGRAMS for name in checks.COMMANDS)


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "Qwen2.5-VL-3B"])
def test_a_written_folder_has_the_hubs_form_and_all_weights(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SHARD_BYTES", 60_000)
    main(["gpu-write", *TINY, "--model", name, str(tmp_path / "a")])
    path = tmp_path / "a"
    places = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(places.values())) > 1
    assert {"visual.patch_embed.proj.weight", "model.embed_tokens.weight", "model.norm.weight"} < places.keys()
    assert ("lm_head.weight" in places) == (name == "Qwen2.5-VL-7B")  # the 3B's head is its embeddings
    config = json.loads((path / "config.json").read_text())
    assert "text_config" not in config and config["rope_scaling"]["type"] == "mrope"
    assert (path / "chat_template.json").is_file() and (path / "preprocessor_config.json").is_file()
    _, report = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    model = load_model(str(path))
    assert model.info.eos_token_ids == (2, 0)
    for shard in set(places.values()):
        with safe_open(path / shard, "pt") as opened:
            assert all(opened.get_tensor(key).dtype == torch.bfloat16 for key in opened.keys())  # noqa: SIM118


def test_written_pairs_share_their_tokenizer(tmp_path: Path) -> None:
    written = [
        folders.write_folder(tiny(GEOMETRIES[name]), tmp_path / name, CPU, seed=seed)
        for seed, name in enumerate(("Qwen2.5-VL-7B", "Qwen2.5-VL-3B"))
    ]
    assert len({folders_tokenizer_digest(path) for path in written}) == 1


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", ["pair", "strict", "own-draft"])
def test_serve(run: Any, stack: str, tmp_path: Path) -> None:
    document, status = run("gpu-serve", "--only", stack, "--folders", str(tmp_path))
    assert status == 0 and all(judged(document).values())
    if stack == "pair":
        assert document["pair"]["second_prompt"]["reused_tokens"] > 0
        assert any(row["check"].startswith("device memory beside weights") for row in document["checks"])
        assert {"ready, s", "encoding, s", "guidance of a second prompt, s"} < {
            row["check"] for row in document["checks"] if row["value"] is not None and row["value"] >= 0
        }
    else:
        assert judged(document)
    memory = document[stack]["memory"]
    assert all(0 < memory["anonymous_bytes"][name] <= peak for name, peak in memory["host_bytes"].items())


def test_graph(run: Any) -> None:
    document, _ = run("gpu-graph", "--repeats", "1", "--models", "Qwen2.5-VL-7B", "--tokens", "4")
    found = document["measured"]["Qwen2.5-VL-7B"]
    size = found["eager"]["sizes"]["96"]
    assert set(size["T_p"]) == {"1", "2", "4", "8", "16", "32"} and size["T_q"] > 0
    assert found["eager"]["a_token"]["operations"] > 50
    assert found["static"]["attention"] and set(found["static"]["sizes"]) == {"96", "192"}
    assert found["ids"] is True and all(judged(document).values())


def test_a_graph_that_cannot_be_had_is_a_failure(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes its place writes the same ids as itself."""
    monkeypatch.setattr(StaticSteps, "make", lambda *_: None)
    document, status = run("gpu-graph", "--repeats", "1", "--models", "Qwen2.5-VL-7B", "--tokens", "4")
    assert status == 1
    failed = [row["check"] for row in document["checks"] if row["ok"] is False]
    assert [name.partition(": ")[2] for name in failed] == [
        "static steps",
        "ids of graphs are those of the same steps unrecorded",
    ]


def test_calls_are_counted_by_name() -> None:
    numbers = torch.ones(3)
    calls = passes.count_calls(lambda: numbers.exp().sin(), CPU)
    assert calls == {"launches": 0, "waits": 0, "kernels": 0, "operations": 2}


def test_kernels(run: Any) -> None:
    document, status = run("gpu-kernels", "--repeats", "1")
    assert status == 0 and all(judged(document).values())
    here = {"sdpa", "joined, matmul", "joined, torch flash"}
    assert {name for name, way in document["ways"].items() if "error" not in way} == here
    assert document["decision"] in here
    assert len(document["cases"]["sdpa"]) == 16


def test_the_decision_is_the_fastest_right_way() -> None:
    way = {"error_of_maths": 1e-3, "fixed_bits": True, "s_of_all": 1.0}
    ways = {
        "slow": way,
        "fast": {**way, "s_of_all": 0.5},
        "wrong": {**way, "error_of_maths": 0.1, "s_of_all": 0.1},
        "shifting": {**way, "fixed_bits": False, "s_of_all": 0.1},
        "untimed": {**way, "error": "no graph", "s_of_all": 0.0},
        "absent": {"error": "no module"},
    }
    assert kernels.decide(ways) == "fast"
    assert kernels.decide({"wrong": ways["wrong"], "absent": ways["absent"]}) is None


def test_a_way_that_reads_behind_its_window_is_found_out() -> None:
    case = kernels.make_case((4, 2), 16, 50, 8, CPU, torch.float32, seed=0)
    (sdpa,) = [make() for name, make in kernels.make_ways(CPU, torch.float32).items() if name == "sdpa"]
    torch.testing.assert_close(sdpa(case).double(), case.maths(), rtol=1e-5, atol=1e-6)
    assert kernels.has_fixed_bits(sdpa, case) and kernels.has_bits_of_one_row(sdpa, case)
    assert not kernels.has_fixed_bits(lambda one: one.query + one.seen[0].mean(), case)


def test_vision(run: Any) -> None:
    document, status = run("gpu-vision")
    assert status == 0
    assert {tower: row["chunks"] for tower, row in document["towers"].items()} == {"Qwen ViT": 2, "SigLIP": 2}


def test_fault(run: Any) -> None:
    document, status = run("gpu-fault")
    assert status == 0 and document["gone_s"] > 0 and document["exit_status"] > 0
    assert judged(document) == {"the fault was planted": True, "the target ended with an error": True}


def test_ranks(run: Any) -> None:
    document, status = run("gpu-tp", "--tp", "2", "--repeats", "1")
    assert status == 0 and all(judged(document).values())
    assert len(document["peak_bytes"]) == 2 and set(document["T_p"]) == {"1", "8"} == set(document["static"]["T_p"])
    assert document["static"]["layers"] == "exact" and document["static"]["difference"] < 1e-4


def test_a_share_is_one_part_of_a_model() -> None:
    geometry = tiny(GEOMETRIES["Qwen2.5-VL-72B"])
    shares = [
        tp.make_share(geometry, SimpleNamespace(rank=rank, size=2), CPU, torch.float32)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    for share in shares:
        layer = share.model.language_model.layers[0]
        assert layer.self_attn.q_proj.weight.shape == (16, 32) and layer.self_attn.k_proj.weight.shape == (8, 32)
        assert layer.mlp.down_proj.weight.shape == (32, 32) and share.lm_head.weight.shape == (336, 32)
        assert not any(weight.is_meta for weight in share.model.language_model.parameters())
    tables = [share.model.language_model.embed_tokens.weight for share in shares]
    assert torch.equal(*tables)
