"""`slipstream archive submit` against a fake archive: what is sent, repetition, a full backlog."""

import json
import os
import time
from pathlib import Path

import grpc
import pytest

from slipstream.cli.app import run
from slipstream.cli.archive import sources
from slipstream.cli.archive.output import Format, check_unread
from slipstream.client import archive_client as submit_module
from slipstream.errors import InvalidConfig
from slipstream.rpc.guards import ANSWERED
from slipstream.rpc.v1 import archive_pb2 as pb
from tests.cli.fake_archive import TEXT, FakeArchive
from tests.cli.fake_gateway import FakeGateway


def submit(archive: FakeGateway, *words: object) -> int:
    return run(["archive", "submit", *map(str, words), "--gateway", archive.address])


def only_batch(archive: FakeArchive) -> dict[str, pb.BatchItem]:
    (batch,) = archive.batches.values()
    return batch.items


def test_a_folder_is_handed_in_once(archive: FakeArchive, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(archive, folder, "--prompt", "why") == 0
    items = only_batch(archive)
    assert list(items) == ["b.mp4", "deep/a.MKV", "deep/er/c.webm"]
    assert [item.source for item in items.values()] == [str(folder / name) for name in items]
    assert capsys.readouterr().out == "batch batch-0: 3 added, 0 known already\n"
    (folder / "new.mp4").write_bytes(b"x")
    assert submit(archive, folder, "--prompt", "why") == 0
    assert capsys.readouterr().out == "batch batch-0: 1 added, 3 known already\n"
    assert submit(archive, folder, "--prompt", "when") == 0
    assert len(archive.batches) == 2


def test_the_batch_carries_the_options(archive: FakeArchive, folder: Path) -> None:
    given = ["--name", "mine", "--priority", "high", "--meta", "a=1", "--meta", "b=x=y", "--frames", "4", "--stop", "."]
    assert submit(archive, folder, *given) == 0
    options = archive.batches["mine"].options
    assert dict(options.metadata) == {"a": "1", "b": "x=y"}
    assert options.priority == pb.JOB_PRIORITY_HIGH
    assert (options.caption.num_frames, list(options.caption.stop)) == (4, ["."])
    assert not options.caption.HasField("prompt")


def test_what_a_folder_has_beside_videos_is_counted(
    archive: FakeArchive, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("readme", "a.txt", "deep/b.TXT", "c.swf", "d.srt", "e.nfo", "f.jpg", "deep/.hidden.txt", "deep/g.pdf"):
        (folder / name).write_bytes(b"x")
    videos = [f"old/{number}{suffix}" for number, suffix in enumerate((".ogm", ".QT", ".divx", ".mod", ".wm"))]
    (folder / "old").mkdir()
    for name in videos:
        (folder / name).write_bytes(b"x")
    assert submit(archive, folder, "--name", "all") == 0
    assert set(videos) <= set(archive.batches["all"].items) and len(archive.batches["all"].items) == 3 + len(videos)
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert told.startswith(f"slipstream: {folder}: left out, as no videos by their suffixes: .txt 3, ")
    assert told.endswith(", others (9 files in all)")
    assert submit(archive, f"{folder}/*", "--documents", "--name", "documents") == 0
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert "as no documents by their suffixes: " in told and "(15 files in all)" in told
    assert submit(archive, folder / "old", "--name", "none") == 0
    assert "left out" not in capsys.readouterr().err


def test_links_that_lead_nowhere_and_pipes_are_named(
    archive: FakeArchive, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "gone.mp4").symlink_to("nowhere.mp4")
    (folder / "linked.mp4").symlink_to("b.mp4")
    (folder / "up.mp4").symlink_to("deep")
    os.mkfifo(folder / "pipe.mkv")
    assert submit(archive, folder) == 2
    assert sorted(only_batch(archive)) == ["b.mp4", "deep/a.MKV", "deep/er/c.webm", "linked.mp4"]
    told = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert told == [
        f"slipstream: {folder}/gone.mp4: skipped: it is a link to what is not there",
        f"slipstream: {folder}/pipe.mkv: skipped: it is no regular file",
    ]
    assert submit(archive, f"{folder}/*[!p].m*", "--name", "pattern") == 2
    assert list(archive.batches["pattern"].items) == ["b.mp4", "linked.mp4"]
    assert [line for line in capsys.readouterr().err.splitlines() if "skipped" in line] == told
    assert submit(archive, folder / "b.mp4", folder / "pipe.mkv", "--name", "words") == 2
    assert list(archive.batches["words"].items) == ["b.mp4"]
    assert told[1] in capsys.readouterr().err


def test_suffixes_that_are_counted_by_name_are_bounded(
    archive: FakeArchive, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "MOST_SUFFIXES", 2)
    for name in ("a.log.1", "b.log.2", "c.log.3", "d.log.4", "e.log.1"):
        (folder / name).write_bytes(b"x")
    assert submit(archive, folder) == 0
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert told.count("others") == 1 and told.endswith(" files in all)")


def test_patterns_files_and_roots(archive: FakeArchive, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert submit(archive, "**/*", "--name", "glob") == 0
    assert list(archive.batches["glob"].items) == ["b.mp4", "deep/a.MKV", "deep/er/c.webm"]
    assert submit(archive, f"{folder}/d*/er/*.webm", "--name", "deep") == 0
    assert list(archive.batches["deep"].items) == ["deep/er/c.webm"]
    assert submit(archive, "notes.txt", "deep/a.MKV", "https://x/y.mp4", "--name", "files") == 0
    assert list(archive.batches["files"].items) == ["notes.txt", "a.MKV", "https://x/y.mp4"]
    assert submit(archive, "deep/er", "--root", ".", "--name", "root") == 0
    assert list(archive.batches["root"].items) == ["deep/er/c.webm"]
    assert submit(archive, "b.mp4", "--root", "deep", "--name", "outside") == 2


def test_a_pattern_goes_through_links_to_folders_that_it_names_and_no_others(
    archive: FakeArchive, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two links that lead up would never end."""
    monkeypatch.chdir(folder)
    for link in ("up", "again"):
        (folder / "deep" / link).symlink_to(folder)
    for number, (pattern, found) in enumerate(
        {
            "**": ["b.mp4", "deep/a.MKV", "deep/er/c.webm"],
            f"{folder}/**/**/*.webm": ["deep/er/c.webm"],
            "**/up/*.mp4": ["deep/up/b.mp4"],
            "deep/u*/**/er/*": ["up/deep/er/c.webm"],
        }.items()
    ):
        assert submit(archive, pattern, "--name", str(number)) == 0
        assert list(archive.batches[str(number)].items) == found


def test_nothing_to_hand_in(archive: FakeArchive, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(archive, tmp_path / "none.mp4") == 3
    (tmp_path / "empty").mkdir()
    assert submit(archive, tmp_path / "empty") == 3
    assert submit(archive, f"{tmp_path}/*.mp4") == 3
    assert "there is nothing to hand in" in capsys.readouterr().err


def test_a_name_that_is_no_text_is_left_out(
    archive: FakeArchive, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / os.fsdecode(b"bad\xff.mp4")).write_bytes(b"x")
    assert submit(archive, folder) == 2
    assert len(only_batch(archive)) == 3
    told = capsys.readouterr().err
    assert "its name is not UTF-8" in told and "1 could not be handed in" in told


def test_an_output_that_takes_no_files_is_told_before_anything_is_handed_in(
    archive: FakeArchive, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(folder))  # for root, too
    for output in (folder / "a.jsonl", folder, folder / "srt"):
        form = ["--format", "srt"] if output.suffix == "" else []
        assert submit(archive, folder / "b.mp4", "--output", output, *form) == 2
        assert "takes no" in capsys.readouterr().err
    assert not archive.batches
    assert submit(archive, folder / "b.mp4", "--output", folder / "deep" / "yet" / "to be", "--format", "srt") == 0


def test_links_in_a_circle_are_told(archive: FakeArchive, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "circle").symlink_to("back")
    (folder / "back").symlink_to("circle")
    circle, video = folder / "circle", folder / "b.mp4"
    for words in (
        [folder, "--root", circle],
        [circle / "*.mp4"],
        [video, "--output", circle],
        [video, "--output", circle / "a.jsonl"],
        [video, "--output", circle, "--format", "vtt"],
    ):
        assert submit(archive, *words) == 2
        assert "/circle" in (told := capsys.readouterr().err) and "its links lead in a circle" in told
    assert not archive.batches and circle.is_symlink()


def test_names_that_are_no_custom_id_get_one(archive: FakeArchive, tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*(["x" * 100] * 3))
    folder.mkdir(parents=True)
    for name in ("long.mp4", "other.mp4"):
        (folder / name).write_bytes(b"x")
    (tmp_path / "at 10\u202fAM.mov").write_bytes(b"x")
    assert submit(archive, tmp_path) == 0
    first, *others = only_batch(archive)
    assert first.startswith("at 10_AM.mov~")
    assert len({*others}) == 2
    assert all(len(name) <= 256 and name.isprintable() for name in others)


def test_equal_names_of_two_folders_are_told(
    archive: FakeArchive, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(archive, folder, folder / "deep" / "er") == 0
    assert submit(archive, folder / "deep", folder / "deep/er/c.webm", folder / "deep/er", "--name", "n") == 0
    (folder / "deep" / "c.webm").write_bytes(b"x")
    assert submit(archive, folder / "deep", folder / "deep" / "er", "--name", "two") == 2
    errors = capsys.readouterr().err
    assert "c.webm: the batch has this item with another source" in errors
    assert "1 items were not taken" in errors


def test_goes_on_when_the_backlog_has_room_again(
    archive: FakeArchive, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit_module, "PIECE_ITEMS", 2)
    archive.refusals = [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
    assert submit(archive, folder) == 0
    assert len(only_batch(archive)) == 3
    assert "waiting for room" in capsys.readouterr().err


def test_a_gateway_that_goes_away_is_waited_for(
    archive: FakeArchive, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_module, "PIECE_ITEMS", 1)
    monkeypatch.setattr(submit_module, "FIRST_PAUSE_S", 0.01)
    archive.room = 0
    archive.refusals = [None, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE]  # type: ignore[list-item]
    assert submit(archive, folder) == 0
    assert len(only_batch(archive)) == 3
    archive.refusals = [grpc.StatusCode.UNAVAILABLE]
    assert submit(archive, folder / "b.mp4") == 4


def test_a_gateway_without_its_queue_is_waited_for_from_the_first_item(
    archive: FakeArchive, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there and says itself that it cannot now; one that is not there at all may be a wrong address."""
    monkeypatch.setattr(submit_module, "FIRST_PAUSE_S", 0.01)
    archive.refusals, archive.refused_with = [grpc.StatusCode.UNAVAILABLE] * 2, ANSWERED
    assert submit(archive, folder) == 0
    assert len(only_batch(archive)) == 3


def test_waits_and_writes_results_and_errors(
    archive: FakeArchive, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "captions.jsonl"
    assert submit(archive, folder, "--output", output) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["b.mp4", "deep/a.MKV", "deep/er/c.webm"]
    assert {line["text"] for line in lines} == {TEXT}
    assert not (tmp_path / "captions.jsonl.errors.jsonl").exists()
    (folder / "bad.mp4").write_bytes(b"x")
    archive.lost_watches = 1
    assert submit(archive, folder, "--output", output, "--json") == 5
    told = capsys.readouterr()
    assert told.err.endswith(f"slipstream: 1 without a result, and why: {output}.errors.jsonl\n")
    document = json.loads(told.out)
    assert (document["added"], document["known"], document["rejected"]) == (1, 3, 1)
    assert document["batch"]["counts"]["failed"] == 1
    (error,) = (tmp_path / "captions.jsonl.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["error_code"] == "INVALID_ARGUMENT"
    assert len(output.read_text().splitlines()) == 3


def test_results_on_stdout(archive: FakeArchive, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(archive, folder, "--output", "-", "--format", "csv") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert submit(archive, folder, "--output", "-", "--json") == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--output", "/nowhere/x.jsonl"],
        ["--output", "{folder}"],
        ["--output", "-", "--format", "vtt"],
        ["--output", "{folder}/b.mp4", "--format", "srt"],
        ["--meta", "x"],
    ],
)
def test_bad_words_are_found_before_anything_is_handed_in(
    archive: FakeArchive, folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(archive, folder, *(word.format(folder=folder) for word in words)) == 2
    assert archive.submits == 0
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("output", ["list.jsonl", "link.csv", "LIST", "old.jsonl", "errors"])
def test_what_is_read_is_not_written_over(
    archive: FakeArchive,
    tmp_path: Path,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = json.dumps({"path": "a.mp4", "text": "A car.", "receipt": {"video_sha256": "ab" * 32}})
    Path("list.jsonl").write_text('{"path": "a.mp4"}')
    Path("errors.errors.jsonl").write_text('{"path": "b.mp4"}')
    Path("old.jsonl").write_text(line)
    Path("link.csv").symlink_to("list.jsonl")
    output = f"file://{tmp_path}/list.jsonl" if output == "LIST" else output
    words = ["./list.jsonl", "errors.errors.jsonl", "--hints-from", tmp_path / "old.jsonl", "--output", output]
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert submit(archive, *words) == 2
    assert "which is read" in capsys.readouterr().err
    assert archive.submits == 0 and before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_an_object_that_is_read_is_not_written_over() -> None:
    with pytest.raises(InvalidConfig, match=r"it would take the place of s3://films/list\.csv, which is read"):
        check_unread("s3://films/list.csv", Format.CSV, ["s3://other/list.csv", "s3://films/list.csv"])
    check_unread("s3://films/", Format.VTT, ["s3://films/", "https://example.org/a.mp4"])


def test_subtitles_may_lie_beside_their_videos(archive: FakeArchive, folder: Path) -> None:
    assert submit(archive, folder, "--output", folder, "--format", "vtt") == 0
    assert (folder / "b.mp4").read_bytes() == b"x" and list(folder.glob("b.*vtt"))


def test_a_gateway_without_an_archive(gateway: FakeGateway, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(gateway, folder) == 2
    assert "this gateway has no archive" in capsys.readouterr().err


def test_many_items_in_little_memory(archive: FakeArchive, tmp_path: Path) -> None:
    manifest = tmp_path / "many.jsonl"
    manifest.write_text("".join(f'{{"path": "{number}.mp4"}}\n' for number in range(3_000)))
    began = time.monotonic()
    assert submit(archive, manifest) == 0
    assert time.monotonic() - began < 60
    assert len(only_batch(archive)) == 3_000
    assert archive.submits == 6
