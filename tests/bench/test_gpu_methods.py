"""The comparison of methods as a run on a GPU asks for it: its processes there, and what it does within its minutes."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.common import NO_TIME, Budget, Task
from bench.gpu.checks import COMMANDS
from bench.methods import comparison
from bench.methods.comparison import Comparison, Processes
from bench.methods.document import make_document
from bench.methods.listing import Place
from bench.methods.program import parse_work
from bench.methods.samples import Sample
from bench.report.page import show

CAPTION_S, WARM_UP_S = 10.0, 1.0


def compare(minutes_s: float, argv: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Comparison, Any]:
    """A run whose captions take so long by a clock of its own, and its document."""
    now = [0.0]
    _, methods = parse_work(argv)
    clips = [Path(f"/tmp/clip-{number}.mp4") for number in range(int(argv[argv.index("--clips") + 1]))]

    async def caption(name: str, place: Place, clip: Path, options: Any) -> Sample:
        now[0] += WARM_UP_S if options.get("max_new_tokens", 0) == comparison.WARM_UP_TOKENS else CAPTION_S
        return Sample(name, str(clip), (1, 2), 40.0, first_token_s=0.0)

    async def consult() -> None:
        return

    task = Task(clips[0], 8, "what?", 320, Path("target"), Path("draft"))
    processes = Processes({Place.PAIR: None}, None, "what?")  # type: ignore[dict-item, arg-type]
    run = Comparison(processes, methods, clips, task, Budget(minutes_s, lambda: now[0]))
    monkeypatch.setattr(run, "_caption", caption)
    monkeypatch.setattr(run, "_consult", consult)

    async def measure() -> None:
        await run.warm_up()
        await run.run()

    asyncio.run(measure())
    document = make_document(
        run.findings, methods, task, clips, {"command": "", "started": "", "wall_s": now[0], "minutes": 0}
    )
    show(document)
    return run, document


ASKED = ("--clips", "2", "--methods", "autoregressive", "sd", "slipstream")


def test_all_is_measured_where_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run, document = compare(600.0, ASKED, monkeypatch)
    assert [sample.method for sample in run.findings.samples] == [
        *("autoregressive", "sd", "slipstream"),
        *("sd", "slipstream", "autoregressive"),
    ]
    assert [sample.method for sample in run.findings.timelines] == ["autoregressive", "sd", "slipstream"]
    assert not run.findings.notes and document["setup"]["clips"] == 2


def test_a_method_gives_way_to_the_clock_on_the_first_clip_too(monkeypatch: pytest.MonkeyPatch) -> None:
    run, document = compare(3 * WARM_UP_S + 2.5 * CAPTION_S, ASKED, monkeypatch)
    assert [sample.method for sample in run.findings.samples] == ["autoregressive", "sd"]
    assert all(NO_TIME in note for note in run.findings.notes) and not run.findings.timelines
    assert [note.partition(" ")[0] for note in run.findings.notes] == ["slipstream", "1", *["timeline"] * 3]
    assert document["wall_s"] <= 3 * WARM_UP_S + 2.5 * CAPTION_S


def test_a_clip_is_begun_where_there_is_time_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = compare(3 * WARM_UP_S + 5 * CAPTION_S, ASKED, monkeypatch)
    assert [sample.method for sample in run.findings.samples] == ["autoregressive", "sd", "slipstream"]
    assert run.findings.notes[0].startswith("1 of 2 clips") and run.findings.num_clips == 1


@pytest.mark.parametrize("minutes_s", [0.0, 1.5 * WARM_UP_S])
def test_a_run_whose_time_is_up_before_the_first_clip_still_has_a_document(
    minutes_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, document = compare(minutes_s, ASKED, monkeypatch)
    assert not run.findings.samples and document["methods"] == []
    assert run.findings.notes and all(NO_TIME in note for note in run.findings.notes)


@pytest.mark.parametrize(("device", "threads", "pin"), [("cpu", 1, True), ("cuda:0", None, False)])
def test_models_have_a_core_each_on_a_cpu_alone(device: str, threads: int | None, pin: bool) -> None:
    settings = comparison._settings(Path("target"), Path("draft"), device, "float32")
    for place in (Place.PAIR, Place.SAME):
        assert (settings[place].threads, settings[place].pin, settings[place].device) == (threads, pin, device)
    assert (Place.BOTH_CORES in settings) == pin


def test_the_list_for_a_gpu_asks_for_methods_that_there_are() -> None:
    given, methods = parse_work(COMMANDS["methods"])
    assert {method.place for method in methods} == {Place.PAIR} and (given.clips, len(methods)) == (1, 5)
    assert list(COMMANDS)[-1] == "replay"
