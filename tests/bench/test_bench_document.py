"""The document of a run whose figures are made up."""

import json
from dataclasses import replace
from pathlib import Path

from bench.common import Task, Usage
from bench.methods.agreement import Agreement
from bench.methods.comparison import Findings, recorded_pruner
from bench.methods.document import make_document
from bench.methods.listing import Family, methods
from bench.methods.program import SEED, kept_to, parse_work
from bench.methods.samples import Sample, WindowCost, timeline
from bench.simulate_trees import TreeTrace
from slipstream import CaptionOptions, Trace

TABLE = methods(side_clips=1)
FIGURES = {
    "video_tokens": 6272.0,
    "generate_s": 2.0,
    "plain_pass_s": 0.02,
    "draft_pass_s": 0.002,
    "tau": 0.9,
    "mean_accepted_length": 9.0,
    "mean_tokens_per_pass": 4.0,
}
COSTS = {0: WindowCost(4, 0.02, 0.021), 4: WindowCost(20, 0.03, 0.031)}


def sample(name: str, rate: float) -> Sample:
    usage = {"target": Usage(1.0, 1000), "draft": Usage(1.0, 500)}
    return Sample(name, "/tmp/clip-1.mp4", (1,) * 100, rate, 5.0, 8.0, FIGURES, COSTS, usage)


def test_all_that_was_found_is_in_the_document() -> None:
    clip = "/tmp/clip-1.mp4"
    findings = Findings(
        samples=[sample(method.name, 40.0 if method.name == "autoregressive" else 90.0) for method in TABLE],
        timelines=[sample("slipstream", 80.0)],
        agreements={"uv_spread": {clip: Agreement(TreeTrace((0,) * 90 + (9,) * 10, ((0.9, 0.05, 0.01),) * 100), 627)}},
        accepted={"fastv": [0.9]},
        kept={"uv": [1, 2]},
        num_clips=1,
    )
    task = Task(Path(clip), 128, "what?", 320, Path("target"), Path("draft"))
    run = {"command": "python -m bench", "started": "now", "wall_s": 1.0, "minutes": 27.0, "device": "cpu"}
    document = json.loads(json.dumps(make_document(findings, TABLE, task, [Path(clip)], run)))

    rows = {row["name"]: row for row in document["methods"]}
    assert list(rows) == [method.name for method in TABLE]
    assert {"name", "speedup", "speedup_transformers", "identical", "lossy", "M", "tau", "T_p", "T_q", "c"} <= set(
        rows["slipstream"]
    )
    assert rows["slipstream"]["speedup"] == 2.25
    assert rows["fastv"]["A"] == 0.9
    assert document["prediction_error"] is not None
    assert document["kept"]["grid"] == [7, 7]
    assert document["timelines"]["slipstream"] == {"clip": "clip-1", "trace": []}


def test_sampled_runs_leave_out_what_samples_otherwise_or_is_lossy() -> None:
    _, greedy = parse_work([])
    given, sampled = parse_work(["--temperature", "1"])
    assert given.temperature == 1.0
    assert [m.name for m in sampled] == [m.name for m in greedy if m.family not in (Family.LOSSY, Family.OUTSIDE)]


def test_runs_of_a_structure_leave_out_the_same_and_ask_for_it(tmp_path: Path) -> None:
    (tmp_path / "scene.json").write_text('{"type": "object"}')
    given, structured = parse_work(["--json-schema", str(tmp_path / "scene.json"), "--temperature", "0.5"])
    assert kept_to(given) == CaptionOptions(json_schema='{"type": "object"}', temperature=0.5, seed=SEED)
    assert structured == parse_work(["--temperature", "1"])[1]


def test_one_pruner_for_every_draft_that_sees_the_video() -> None:
    own, asked = (
        {method.name: method.options.get("pruner", None) for method in parse_work(words)[1]}
        for words in ([], ["--pruner", "uv"])
    )
    assert own["slipstream"] is None and own["specvlm_uniform"] == "uniform"
    assert {name for name, pruner in asked.items() if pruner == "uv"} == {
        *("sd", "sd_tree", "specvlm", "specvlm_chain", "specvlm_attention", "specvlm_uniform", "parallelvlm"),
        *("parallelvlm_same", "slipstream", "slipstream_open", "slipstream_both_cores"),
        *("slipstream_siblings", "slipstream_branches", "slipstream_tree"),
    }


def test_a_pass_lies_in_the_middle_of_its_round() -> None:
    trace = (
        Trace(kind="pass", at_s=10.0),
        Trace(kind="pass", at_s=10.05, asked_s=10.0, pass_s=0.03, tokens=4, accepted=3),
        Trace(kind="draft", at_s=10.06, pass_s=0.002, tokens=2, stale=True),
        Trace(kind="restart", at_s=10.07),
    )
    assert timeline(replace(sample("sd", 90.0), trace=trace))["trace"] == [
        {"t_s": 0.05, "kind": "pass", "start_s": 0.01, "pass_s": 0.03, "window": 4, "accepted": 3},
        {"t_s": 0.06, "kind": "draft", "tokens": 2, "pass_s": 0.002, "stale": True},
        {"t_s": 0.07, "kind": "restart"},
    ]


def test_only_drafts_that_can_be_asked_alone_have_a_recorded_agreement() -> None:
    recorded = {method.name: recorded_pruner(method) for method in TABLE}
    assert recorded["slipstream"] == "uv_spread"
    assert recorded["sd"] == "none"
    assert recorded["specvlm"] is recorded["std"] is recorded["fastv"] is recorded["parallelvlm_same"] is None
