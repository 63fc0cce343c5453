"""Every check for a GPU at tiny size on the CPU, through its own command: all lines run but those for CUDA alone."""

import asyncio
import json
import subprocess
import sys
import time
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
from bench.common import NO_TIME, ROOT
from bench.gpu import checks, folders, passes, serve, tp
from bench.gpu.checks import Report, failures, run_all
from bench.gpu.measure import attempt
from bench.gpu.random_model import GEOMETRIES, tiny
from bench.output import finish
from slipstream.engine import load_model
from slipstream.engine.static.steps import StaticSteps
from slipstream.errors import SlipstreamError
from slipstream.families.checkpoints import folders_tokenizer_digest
from slipstream.stack.local import StackOptions
from tests.support.variants import some

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


WITHOUT_AV = "import importlib, sys; sys.modules['av'] = None; [*map(importlib.import_module, sys.argv[1:])]"


@pytest.mark.long
def test_commands_that_caption_nothing_need_no_video_library() -> None:
    names = ("gpu-graph", "gpu-kernels", "gpu-vision", "gpu", "gpu-check")
    modules = {PROGRAMS[name][0].partition(":")[0] for name in names}
    subprocess.run([sys.executable, "-c", WITHOUT_AV, *modules], cwd=ROOT, check=True)


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
    report.shows("seconds", 100.0)
    assert [row["ok"] for row in report.rows] == [True, False, False, False, False, None]
    assert report.rows[3]["value"] == "no memory" and not report.ok


def test_a_device_that_is_lost_loses_no_other_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    assert attempt(refuse) == {"error": "AcceleratorError: CUDA error: device-side assert triggered"}


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
            {"name": "two", "sizes": [{"passes": {"error": "no memory"}}, {}]},
        ],
        "notes": [f"std: {NO_TIME} for it", "sd lost its draft"],
    }
    assert [line.partition(":")[0] for line in failures(document)] == ["a", "std", "sd", "slipstream", "two"]
    assert [line.partition(":")[0] for line in failures(document, tiny=True)] == ["a", "std", "sd", "two"]


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


@pytest.mark.parametrize("end", ["time.sleep(600)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_a_command_printed_outlives_it(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    communicate, printed = subprocess.Popen.communicate, tmp_path / "a.txt"

    def once_it_has_printed(*given: Any, **options: Any) -> Any:
        while not printed.read_text():
            time.sleep(0.01)
        return communicate(*given, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", once_it_has_printed)
    monkeypatch.setattr(checks, "LIMIT_S", 0.1 if "sleep" in end else 60)
    script = f"import os, signal, time; print('measured so far'); {end}"
    assert not checks.run_one([sys.executable, "-c", script], tmp_path / "a.json")["ok"]
    assert printed.read_text() == "measured so far\n"


def test_a_document_that_does_not_name_its_device_is_told(tmp_path: Path) -> None:
    for number, said in enumerate(({}, {"device_name": "its own"})):
        kept, script = tmp_path / f"{number}.json", f"print({json.dumps(said)!r})"
        assert checks.run_one([sys.executable, "-c", script], kept, told={"device_name": "a GPU"})["ok"]
        assert json.loads(kept.read_text()) == {"device_name": "a GPU"} | said


def test_all_commands_run_in_order_whatever_they_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, told = [], []

    def run_one(argv: Any, kept: Path, **others: Any) -> dict[str, Any]:
        asked.append(argv)
        told.append(others["told"])
        return {"ok": len(asked) > 1}

    monkeypatch.setattr(checks, "run_one", run_one)
    rows = run_all(list(checks.COMMANDS), "cuda:0", tmp_path, tiny=False, device_name="a GPU")
    assert told == [{"device_name": "a GPU"}] * (len(rows) - 1) + [{}], "the last one needs no GPU"
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


@pytest.mark.parametrize("stack", some(["pair", "strict", "own-draft"], keep=("pair",)))
def test_serve(run: Any, stack: str, tmp_path: Path) -> None:
    options = ("--folders", str(tmp_path), "--logs", str(tmp_path / "logs"))
    document, status = run("gpu-serve", "--only", stack, *options)
    assert status == 0 and all(judged(document).values())
    if stack == "pair":
        assert document["pair"]["second_prompt"]["reused_tokens"] > 0
        assert any(row["check"].startswith("device memory beside weights") for row in document["checks"])
        assert {
            "ready, s",
            "encoding of a plain caption, s",
            "encoding while both models encode, s",
            "guidance of a second prompt: all of the target's layers, s",
            "guidance of a second prompt: the draft's wait, hashing of frames included, s",
        } < {row["check"] for row in document["checks"] if row["value"] is not None and row["value"] >= 0}
        assert document["pair"]["plain_timings"]["draft_encode_s"] == 0
    else:
        assert judged(document)
    assert document[stack]["events"] == {"target": [], "draft": []}, "a CPU takes no static steps by itself"
    for name in ("target", "draft", "gateway"):
        assert '"event"' in (tmp_path / "logs" / stack / f"{name}.log").read_text()
    memory = document[stack]["memory"]
    assert all(0 < memory["anonymous_bytes"][name] <= peak for name, peak in memory["host_bytes"].items())


def test_a_stack_that_fails_leaves_its_logs(tmp_path: Path) -> None:
    options = StackOptions(draft_model=None, extra_flags={"target": ("--kv-budget-mb", "none")}, restart=False)

    async def start() -> None:
        async with serve.running(options, CPU, tmp_path):
            raise AssertionError("the target has no such budget")

    (tmp_path / "draft.log").write_text("of an earlier run")
    with pytest.raises(SlipstreamError):
        asyncio.run(start())
    assert "kv-budget-mb" in (tmp_path / "target.log").read_text() and not (tmp_path / "draft.log").exists()


def test_events_of_a_log_say_by_which_way_a_model_goes(tmp_path: Path) -> None:
    entries = [
        {"event": "service.ready", "service": "target"},
        {"event": "static_attention.tried", "name": "varlen", "seconds": 0.01, "timestamp": "now", "level": "info"},
        {"event": "vision_attention.tried", "name": "flash-attn", "error": 0.001},
        {"event": "static_steps.on", "layers": "compiled", "service": "target"},
    ]
    log = tmp_path / "target.log"
    log.write_text("\n".join(["a library's own words", "17", *map(json.dumps, entries), '{"event": "static_steps.o']))
    assert serve.told_events(log) == [
        {"event": "static_attention.tried", "name": "varlen", "seconds": 0.01, "level": "info"},
        {"event": "vision_attention.tried", "name": "flash-attn", "error": 0.001},
        {"event": "static_steps.on", "layers": "compiled"},
    ]
    assert serve.told_events(tmp_path / "draft.log") == []


def test_models_without_static_steps_do_not_pass() -> None:
    report = Report(Namespace(device=torch.device("cuda"), tiny=False))
    on, differing = [{"event": "static_steps.on"}], [{"event": "static_steps.differ"}]
    serve.judge_static(report, "pair", {"target": on, "draft": on})
    serve.judge_static(report, "strict", {"target": differing, "draft": []})
    assert [row["ok"] for row in report.rows] == [True, True, False, False]
    assert "static_steps.differ" in report.rows[2]["value"]


def test_graph(run: Any) -> None:
    document, _ = run("gpu-graph", "--repeats", "1", "--models", "Qwen2.5-VL-7B", "--tokens", "4")
    found = document["measured"]["Qwen2.5-VL-7B"]
    size = found["eager"]["sizes"]["96"]
    assert set(size["T_p"]) == {"1", "2", "4", "8", "16", "32"} and size["T_q"] > 0
    assert found["a_token"]["operations"] > 50
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
    calls = passes.count_calls({"both": lambda: numbers.exp().sin(), "one": numbers.exp}, CPU)
    unseen = {"launches": None, "waits": None, "kernels": None}
    assert calls == {"both": unseen | {"operations": 2}, "one": unseen | {"operations": 1}}


def test_a_profiler_that_sees_no_gpu_counts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.warns(UserWarning, match="CUDA"):
        (calls,) = passes.count_calls({"a run": torch.ones(3).exp}, torch.device("cuda")).values()
    assert (calls["launches"], calls["waits"], calls["kernels"]) == (None, None, None)
    assert "CUPTI" in "".join(capsys.readouterr())


def test_kernels(run: Any) -> None:
    document, status = run("gpu-kernels", "--repeats", "1")
    assert status == 0 and all(judged(document).values())
    here = {"sdpa", "joined, matmul", "joined, torch flash"}
    assert {name for name, way in document["ways"].items() if "error" not in way} == here
    assert document["decision"] in here
    assert len(document["cases"]["sdpa"]) == 16
    assert document["joins"] == {"28/4 heads": "plain", "64/8 heads": "plain"}, "a CPU compiles none"


def test_vision(run: Any) -> None:
    document, status = run("gpu-vision")
    assert status == 0
    assert {tower: row["chunks"] for tower, row in document["towers"].items()} == {"Qwen ViT": 2, "SigLIP": 2}
    assert all(row["pixels_s"] > 0 and row["calls"]["operations"] > 0 for row in document["towers"].values())


def test_a_profiler_that_fails_takes_no_seconds_along(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runs: object, device: object) -> None:
        raise ValueError("too many values to unpack")

    monkeypatch.setattr(passes, "count_calls", fail)
    document, _ = run("gpu-vision")
    told = {row["check"].rpartition(": ")[2]: row["value"] for row in document["checks"]}
    assert told["seconds"] > 0
    assert told["kernels"] == told["waits"] == "ValueError: too many values to unpack"


@pytest.mark.long
def test_fault(run: Any) -> None:
    document, status = run("gpu-fault")
    assert status == 0 and document["gone_s"] > 0 and document["exit_status"] > 0
    assert judged(document) == {"the fault was planted": True, "the target ended with an error": True}


@pytest.mark.long
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
