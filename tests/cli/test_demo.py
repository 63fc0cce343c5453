"""The demo's figures, its table and document, and how it ends without the trainer's package."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.cli import demo
from slipstream.cli.app import run
from slipstream.cli.demo import ArchiveResult, ClipResult, demo_document, demo_table
from slipstream.messages import Caption, CommittedToken, Speculation
from slipstream.rpc.archive_codec import read_batch, read_job
from slipstream.rpc.codec import read_summary
from slipstream.rpc.v1 import archive_pb2 as pb
from tests.cli.fake_gateway import make_summary

CAPTION = "A large red circle moves to the left."


def result(name: str = "clip-1", plain_ids: tuple[int, ...] = (1, 2)) -> ClipResult:
    plain = caption("autoregressive", plain_ids, generate_s=1.5)
    return ClipResult(name, 3, 4, plain, caption("slipstream", (1, 2), generate_s=0.5))


def caption(method: str, token_ids: tuple[int, ...], generate_s: float) -> Caption:
    summary = read_summary(make_summary(method, generate_s=generate_s, text=CAPTION))
    return replace(summary, tokens=tuple(CommittedToken(token_id, "", False) for token_id in token_ids))


def archive_result() -> ArchiveResult:
    batch = read_batch(pb.Batch(counts=pb.JobCounts(total=1, done=1), created_s=1.0, ended_s=37.0))
    job = read_job(pb.Job(custom_id="clip-1", state=pb.JOB_STATE_DONE, summary=make_summary(text=CAPTION)))
    return ArchiveResult(batch, (job,), {"clip-1": CAPTION})


def test_the_archives_part(capsys: pytest.CaptureFixture[str]) -> None:
    archived = archive_result()
    assert archived.document() == {"jobs": 1, "done": 1, "identical": True, "videos_per_hour": 100.0}
    Console(width=140).print(archived.table())
    assert "clip-1  done" in capsys.readouterr().out
    assert not replace(archived, jobs=(replace(archived.jobs[0], caption=None),)).identical


def test_document() -> None:
    document = demo_document([result("clip-1"), result("clip-2")], frames=8)
    assert json.loads(json.dumps(document)) == document
    assert document["clips"] == len(document["rows"]) == 2
    assert document["identical"] is True
    assert document["decode_speedup"] == pytest.approx(3.0)
    assert document["end_to_end_speedup"] == pytest.approx(2.0)
    assert (document["tau"], document["c"]) == (0.75, 12.5)
    assert (document["kept_tokens"], document["video_tokens"]) == (50, 500)
    assert document["attribute_accuracy"] == 0.75


def test_one_other_token_is_not_identical() -> None:
    assert demo_document([result(), result(plain_ids=(1, 3))], frames=8)["identical"] is False


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=140).print(demo_table([result("clip-8001"), result("clip-8002", plain_ids=(1, 3))]))
    first, second = (line for line in capsys.readouterr().out.splitlines() if "A large red" in line)
    for cell in ("8001 ", "A large red", "3/4", "2.7", "8.0", "3.00x", "2.00x", "0.75", "12.5", "50/500", "yes"):
        assert cell in first
    assert "NO" in second


def test_the_last_line_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = [result()]
    archived: ArchiveResult | None = archive_result()

    async def caption_clips(*arguments: object) -> tuple[list[ClipResult], ArchiveResult | None]:
        return results, archived

    monkeypatch.setattr(demo, "_sample_clips", lambda count: [Path("clip-1.mp4")])
    monkeypatch.setattr(demo, "_caption_clips", caption_clips)
    assert run(["demo"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["identical"] is True
    assert run(["demo", "--json-only"]) == 0
    assert json.loads(capsys.readouterr().out)["clips"] == 1
    results[0] = result(plain_ids=(1, 3))
    assert run(["demo"]) == 1
    undrafted = replace(result().speculative, speculation=Speculation())
    results[0] = replace(result(), speculative=undrafted)
    assert run(["demo"]) == 1
    assert "the draft took no part in clip-1" in " ".join(capsys.readouterr().err.split())
    results[0] = result()
    assert archived is not None
    archived.direct["clip-1"] = "Another text."
    assert run(["demo"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["archive"]["identical"] is False
    archived = None
    assert run(["demo"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["archive"] is None


def test_without_the_trainers_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "training.world", None)
    assert run(["demo"]) == 2
    assert "package `training`" in capsys.readouterr().err
