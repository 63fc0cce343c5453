"""Films in segments on the command line: what is shown, what subtitles and JSON lines say, what cannot be written."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from slipstream.archive.messages import (
    Batch,
    BatchTotals,
    Job,
    JobCounts,
    JobKind,
    JobPart,
    ModelReceipt,
    Receipt,
)
from slipstream.archive.queue import BatchState, JobState
from slipstream.archive.subtitles import SEGMENTS_NOTE, segment_cue, srt_of, vtt_of
from slipstream.archive.text_index import parse_question
from slipstream.cli.app import run
from slipstream.cli.archive.job_lines import job_record
from slipstream.cli.archive.output import Format, Output, open_writer
from slipstream.cli.caption import caption_options
from slipstream.cli.film import caption_film, check_subtitles, clock_time, segment_line, segment_record
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.archive_search import open_batch, open_export
from slipstream.client.async_captioner import AsyncCaptioner
from slipstream.client.caption_client import CAPTION_TIMEOUT_S
from slipstream.client.connection import GatewayAddress
from slipstream.client.film_client import FILM_TIMEOUT_S
from slipstream.errors import InvalidConfig
from slipstream.messages import Caption, Segment, SegmentCaption, SharedFrom, VideoFacts
from slipstream.options import CaptionOptions
from slipstream.rpc.v1 import gateway_pb2
from slipstream.speculation.protocol import FinishReason
from tests.cli.fake_gateway import FakeGateway, good_video, make_summary
from tests.support.processes import eventually

MODEL = ModelReceipt("big", "r1", "float32")
RECEIPT = Receipt("0.2.0", MODEL, None, {"segments": "fixed:10s"}, "ab", 12, "cd", runs=2)
TEXTS = ("A dog runs.\n\nIt --> jumps & <i>.", "", "\x1b[31mred")
NOWHERE = "127.0.0.1:1"
ROUNDED_UP = 1.01
"""gRPC sends a deadline with three digits at most, rounded up: minutes to a second, hours to ten."""


def caption(text: str) -> Caption:
    return Caption(text, 3, FinishReason.STOP, options={"method": "autoregressive"})


PARTS = [
    JobPart(0, caption=caption(TEXTS[0]), receipt=RECEIPT, segment=Segment(0, 1.4, 11.4)),
    JobPart(1, segment=Segment(1, 11.4, 21.36, "torn"), error="torn"),
    JobPart(2, caption=caption(TEXTS[2]), receipt=RECEIPT, segment=Segment(2, 21.36, 3723.0004)),
]
JOB = Job(
    *("j", "film", "/film.mkv", JobState.DONE, "", "", "", 0, 0, "w", 1.0, 2.0, 3.0),
    receipt=RECEIPT,
    kind=JobKind.FILM,
    parts_total=3,
    parts_done=3,
)


def test_json_lines_carry_the_true_times_and_what_went_wrong() -> None:
    record = job_record(JOB, PARTS)
    assert [(part["start_s"], part["end_s"]) for part in record["parts"]] == [
        (1.4, 11.4),
        (11.4, 21.36),
        (21.36, 3723.0004),
    ]
    assert record["parts"][1] == {"segment": 1, "start_s": 11.4, "end_s": 21.36, "error": "torn"}
    assert record["parts"][0]["receipt"]["text_sha256"] == "cd" and record["kind"] == "film"
    assert record["text"] == f"{TEXTS[0]}\n\n{TEXTS[2]}"


def test_subtitles_of_the_archive_carry_them_too(tmp_path: Path) -> None:
    for form in (Format.VTT, Format.SRT):
        assert form.takes(JOB)
        with open_writer(Output(str(tmp_path), form)) as write:
            write(JOB, PARTS)
    assert not Format.MD.takes(JOB)
    assert (tmp_path / "film.vtt").read_text() == (
        f"WEBVTT\n\n{SEGMENTS_NOTE}\n\n00:00:01.400 --> 00:00:11.400\nA dog runs. It --&gt; jumps &amp; &lt;i&gt;.\n\n"
        "00:00:21.360 --> 01:02:03.000\n[31mred\n"
    )
    assert (tmp_path / "film.srt").read_text() == (
        "1\n00:00:01,400 --> 00:00:11,400\nA dog runs. It -> jumps & <i>.\n\n"
        "2\n00:00:21,360 --> 01:02:03,000\n[31mred\n"
    )


def test_times_before_zero_and_segments_without_length_are_cues_all_the_same() -> None:
    cues = [segment_cue(-0.5, 0.25, ["a"]), segment_cue(0.25, 0.25, ["b"])]
    assert srt_of(cues).count("-->") == 2 and "00:00:00,250 --> 00:00:00,251" in srt_of(cues)
    assert vtt_of([], SEGMENTS_NOTE) == f"WEBVTT\n\n{SEGMENTS_NOTE}\n" and not srt_of([])


def test_every_answer_about_a_segment_has_a_line() -> None:
    cues = [
        segment_cue(0, 1, ["A dog\n\n\x07 runs.", "\x01", "", "Ye\x01s,\tno\x0bmore."]),
        segment_cue(1, 2, ["\x01"]),
    ]
    assert srt_of(cues) == "1\n00:00:00,000 --> 00:00:01,000\nA dog runs.\nYes, no more.\n"
    assert vtt_of(cues, "NOTE").endswith("01.000\nA dog runs.\nYes, no more.\n")


def test_a_text_that_is_not_of_the_segments_own_frames_says_so() -> None:
    shared = Caption("a cat", 2, None, shared=SharedFrom("", 3, 4.5))
    line = segment_line(SegmentCaption(Segment(5), shared))
    assert "segment 3, a near-duplicate at distance 4.5; not made from these frames" in line
    record = segment_record("film", SegmentCaption(Segment(5), shared))
    assert record["shared"] == {"job_id": "", "segment": 3, "distance": 4.5} and "skipped" not in record
    black = Caption("", 0, None, video=VideoFacts(marks=("black",)), skipped="black")
    assert "[black, so not captioned]" in segment_line(SegmentCaption(Segment(6), black))
    record = segment_record("film", SegmentCaption(Segment(6), black))
    assert (record["skipped"], record["video"]["marks"]) == ("black", ("black",)) and "shared" not in record


def test_what_people_and_programs_are_shown() -> None:
    shown = segment_line(SegmentCaption(Segment(2, 21.36, 3723.0004), caption(TEXTS[2])))
    assert shown.startswith("00:00:21.360 - 01:02:03.000  \N{REPLACEMENT CHARACTER}[31mred\n[3 tokens")
    assert segment_line(SegmentCaption(Segment(1, -1.5, 2.0, "torn"), None)) == "-00:00:01.500 - 00:00:02.000  (torn)"
    assert clock_time(59.9996) == "00:01:00.000"
    record = segment_record("a.mkv", SegmentCaption(Segment(1, 11.4, 21.36, "torn"), None))
    assert record == {"file": "a.mkv", "segment": 1, "start_s": 11.4, "end_s": 21.36, "error": "torn"}
    assert segment_record("a.mkv", SegmentCaption(Segment(), caption("x")))["text"] == "x"


@pytest.mark.parametrize(
    ("name", "options", "num_videos", "said"),
    [
        ("a.txt", CaptionOptions(segments="shots"), 1, "must end in .vtt or .srt"),
        ("a.vtt", CaptionOptions(), 1, "give --segments too"),
        ("a.SRT", CaptionOptions(segments="shots"), 2, "is a file for one film: give 2 films one by one"),
        ("/nowhere/a.srt", CaptionOptions(segments="shots"), 1, "its folder does not exist"),
    ],
)
def test_subtitles_that_cannot_be_written(name: str, options: CaptionOptions, num_videos: int, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        check_subtitles(Path(name), options, num_videos)


# -- the command ------------------------------------------------------------------------------------------------------


class FilmGateway(FakeGateway):
    """Cuts what it is sent into two segments, of which the second is torn, or lost with the gateway, or never comes, or
    neither does, unless it is sent what is sound."""

    left_s = 0.0
    """How long the last caller would wait."""

    async def CaptionSegments(
        self, request_iterator: AsyncIterator[gateway_pb2.CaptionRequest], context: Any
    ) -> AsyncIterator[gateway_pb2.FilmEvent]:
        requests = [request async for request in request_iterator]
        self.left_s = context.time_remaining()
        self.options, content = requests[0].options, b"".join(request.video for request in requests[1:])
        film = gateway_pb2.FilmFacts(num_segments=2, start_s=1.5, duration_s=4.0, warnings=["the file is cut off"])
        yield gateway_pb2.FilmEvent(film=film)
        if content == b"hang at once":
            await asyncio.sleep(3600)
        yield gateway_pb2.FilmEvent(segment=gateway_pb2.Segment(number=0, start_s=1.5, end_s=3.5))
        yield gateway_pb2.FilmEvent(caption=gateway_pb2.CaptionEvent(summary=make_summary(text="A dog.")))
        if content == b"lost":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the target was lost")
        if content == b"hang":
            await asyncio.sleep(3600)
        error = "" if content == b"sound" else "torn"
        yield gateway_pb2.FilmEvent(segment=gateway_pb2.Segment(number=1, start_s=3.5, end_s=5.5, error=error))
        if not error:
            yield gateway_pb2.FilmEvent(caption=gateway_pb2.CaptionEvent(summary=make_summary(text="A cat.")))


@pytest.fixture
def films() -> Iterator[FilmGateway]:
    with FilmGateway() as running:
        yield running


def test_a_film_is_shown_segment_by_segment_and_written_as_subtitles(
    films: FilmGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    film, subtitles = good_video(tmp_path / "a.mkv"), tmp_path / "a.srt"
    command = ["caption", str(film), "--gateway", films.address, "--segments", "fixed:2s"]
    assert run([*command, "--subtitles", str(subtitles)]) == 2
    output = capsys.readouterr()
    first, _, torn = output.out.splitlines()
    assert first == "00:00:01.500 - 00:00:03.500  A dog." and torn == "00:00:03.500 - 00:00:05.500  (torn)"
    assert "the file is cut off" in output.err and "segment 1: torn" in output.err
    assert subtitles.read_text() == "1\n00:00:01,500 --> 00:00:03,500\nA dog.\n"
    assert films.options.segments == "fixed:2s"
    assert run([*command, "--json"]) == 2
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["segment"], line["start_s"], line["end_s"]) for line in lines] == [(0, 1.5, 3.5), (1, 3.5, 5.5)]
    assert (lines[0]["text"], lines[1]["error"]) == ("A dog.", "torn")


def test_a_torn_segment_is_in_the_status_of_all_films(films: FilmGateway, tmp_path: Path) -> None:
    torn, sound = good_video(tmp_path / "torn.mkv"), good_video(tmp_path / "sound.mkv", b"sound")
    command = ["caption", "--gateway", films.address, "--segments", "fixed:2s"]
    assert run([*command, str(torn), str(sound)]) == 2 and run([*command, str(sound)]) == 0


def test_a_film_may_take_as_long_as_by_the_library(films: FilmGateway, tmp_path: Path) -> None:
    film = good_video(tmp_path / "a.mkv", b"sound")
    command = ["caption", str(film), "--gateway", films.address, "--segments", "fixed:2s"]
    assert run(command) == 0 and CAPTION_TIMEOUT_S < films.left_s <= FILM_TIMEOUT_S * ROUNDED_UP
    assert run([*command, "--timeout", "300"]) == 0 and films.left_s <= 300 * ROUNDED_UP


def test_what_came_before_an_error_is_shown_and_written(
    films: FilmGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    film, subtitles = good_video(tmp_path / "a.mkv", b"lost"), tmp_path / "a.vtt"
    command = ["caption", str(film), "--gateway", films.address, "--segments", "shots", "--subtitles", str(subtitles)]
    assert run(command) != 0
    output = capsys.readouterr()
    assert (
        "A dog." in output.out
        and "lost behind 1 captions of segments" in output.err
        and "A dog." in subtitles.read_text()
    )
    assert run(["caption", str(film), "--gateway", films.address, "--segments", "fixed:0s"]) == 2
    assert "at least 0.001 s" in capsys.readouterr().err


def test_a_film_of_which_nothing_came_leaves_the_file_that_is_there(tmp_path: Path) -> None:
    film, subtitles = good_video(tmp_path / "a.mkv"), tmp_path / "a.vtt"
    subtitles.write_text("WEBVTT")
    assert run(["caption", str(film), "--gateway", NOWHERE, "--segments", "shots", "--subtitles", str(subtitles)]) == 4
    assert subtitles.read_text() == "WEBVTT"


@pytest.mark.parametrize(("content", "shown", "kept"), [(b"hang", "A dog.", "A dog."), (b"hang at once", "", "old")])
async def test_what_came_before_an_interruption_is_written(
    films: FilmGateway, tmp_path: Path, content: bytes, shown: str, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    subtitles, options = tmp_path / "a.srt", CaptionOptions(segments="shots")
    subtitles.write_text("old")
    film = str(good_video(tmp_path / "a.mkv", content))
    async with AsyncCaptioner(gateway=GatewayAddress(films.address)) as captioner:
        work = asyncio.create_task(caption_film(captioner, film, options, 60, False, subtitles))
        await eventually(lambda: films.left_s and shown in capsys.readouterr().out)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert kept in subtitles.read_text()


def test_several_prompts_and_a_summary_are_shown() -> None:
    both = SegmentCaption(Segment(0, 1.4, 11.4), caption("a dog"), (caption("nobody"),))
    assert [line for line in segment_line(both).splitlines() if not line.startswith("[")] == [
        "00:00:01.400 - 00:00:11.400  a dog",
        "00:00:01.400 - 00:00:11.400  nobody",
    ]
    record = segment_record("film.mkv", both)
    assert record["text"] == "a dog" and list(record["texts"]) == ["a dog", "nobody"]
    whole = SegmentCaption(Segment(1, 1.4, 21.0, is_summary=True), caption("all of it"))
    assert segment_line(whole).startswith("00:00:01.400 - 00:00:21.000 (all)  all of it\n[")
    record = segment_record("film.mkv", whole)
    assert set(record) == {"file", "summary"} and record["summary"]["text"] == "all of it"
    failed = SegmentCaption(Segment(1, 1.4, 21.0, "no room", is_summary=True), None)
    assert segment_record("film.mkv", failed)["summary"] == {"error": "no room"}


def test_one_prompt_is_the_prompt_and_several_are_prompts() -> None:
    assert caption_options(prompts=["a"]).given() == {"prompt": "a"}
    assert caption_options(prompts=["a", "b"], summary=True).given() == {"prompts": ("a", "b"), "summary": True}
    assert CaptionOptions.from_mapping({"prompts": ["a", "b"]}) == CaptionOptions(prompts=("a", "b"))


ANSWERED = [
    *(
        JobPart(number, caption=caption(text), receipt=RECEIPT, segment=Segment(0, 0, 10, prompt=number))
        for number, text in enumerate(("a dog", "nobody"))
    ),
    JobPart(2, segment=Segment(0, 0, 10, "torn", prompt=2), error="torn"),
    JobPart(3, caption=caption("all"), receipt=RECEIPT, segment=Segment(1, 0, 10, is_summary=True)),
]


def test_a_summary_is_in_no_subtitle_and_all_answers_are(tmp_path: Path) -> None:
    with open_writer(Output(str(tmp_path), Format.SRT)) as write:
        write(JOB, ANSWERED)
    assert (tmp_path / "film.srt").read_text() == "1\n00:00:00,000 --> 00:00:10,000\na dog\nnobody\n"
    record = job_record(JOB, ANSWERED)
    assert record["text"] == "a dog\n\nnobody" and record["summary"]["text"] == "all"


class _OneFilm:
    """An archive of one batch."""

    async def get(self, batch: str) -> Batch:
        return Batch("b", "", BatchState.COMPLETED, {}, JobCounts(total=1, done=1), 0.0, 3.0, BatchTotals())

    async def jobs(self, batch: str) -> AsyncIterator[Job]:
        yield JOB

    async def parts(self, batch: str, job: Job) -> AsyncIterator[JobPart]:
        for part in ANSWERED:
            yield part


async def test_a_batch_and_its_export_are_found_by_every_answer_and_by_the_summary(tmp_path: Path) -> None:
    export, client = tmp_path / "captions.jsonl", cast(ArchiveClient, _OneFilm())
    export.write_text(json.dumps(job_record(JOB, ANSWERED)))
    for index in (open_export(str(export), tmp_path), await open_batch(client, "b", tmp_path)):
        with index:
            assert len(index) == 3
            for word, is_segment in {"dog": True, "nobody": True, "all": False}.items():
                (found,) = index.search(parse_question(word), 9).passages
                assert (found.start_s, found.is_segment) == (0, is_segment)
