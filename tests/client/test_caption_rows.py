"""What an actor of Ray makes of its batches, without Ray: every row once in the parts, whoever dies where."""

import importlib.util
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import connect, ray
from slipstream.archive.messages import Job
from slipstream.archive.queue import DamagedRecord
from slipstream.archive.records import job_of
from slipstream.archive.result_files import LINES, TABLE, read_block, survey
from slipstream.archive.result_table import digest_of
from slipstream.archive.results_folder import ResultsFolder
from slipstream.archive.row_parts import RowParts
from slipstream.client.caption_client import RemotePath, check_video
from slipstream.client.sync_captioner import run_in_background
from slipstream.errors import (
    InvalidConfig,
    Overloaded,
    ServiceUnavailable,
    UnreadableMedia,
    VersionMismatch,
    VideoNotFound,
)
from slipstream.messages import Caption
from slipstream.options import CaptionOptions
from slipstream.ray import CaptionRows, Columns, Row, Stage
from slipstream.service_info import GatewayInfo


class Killed(BaseException):
    """The actor dies here."""


class Captioner:
    """Says of each video its name, its options and who said it."""

    def __init__(self, name: str = "a", on_caption: Callable[[Any], None] = lambda video: None) -> None:
        self.asked = Counter[Any]()
        self._name = name
        self._on_caption = on_caption
        self.target, self.draft = "target", ""
        self.info_errors: list[Exception] = []
        """What it answers first when it is asked what it is."""

    def info(self) -> GatewayInfo:
        if self.info_errors:
            raise self.info_errors.pop()
        return GatewayInfo(target_model=self.target, draft_model=self.draft)

    def caption(self, video: Any, *, options: CaptionOptions) -> Caption:
        self.asked[video] += 1
        self._on_caption(video)
        return Caption(f"{self._name} saw {video!r} {options.given()}", 3, None)


def actor(folder: Path, captioner: Any, options: Any = None, columns: Columns | None = None) -> CaptionRows:
    """At a start of its own: it knows the parts that are there."""
    url = f"file://{folder}"
    known = run_in_background(RowParts(url).known())
    stage = Stage(lambda: captioner, url, lambda: known, options or {}, columns or Columns(), at_once=2)
    return CaptionRows(stage)


def table(*sources: str) -> Any:
    return pyarrow.table({"source": list(sources)})


def kept(folder: Path) -> list[Job]:
    """What is in the parts. Each has a table of its own."""
    parts = sorted(folder.glob(f"*{LINES}"))
    for part in parts:
        digest = survey("", part.read_bytes()).digest
        assert digest_of(Path(str(part).removesuffix(LINES) + TABLE).read_bytes()) == digest
    return [job_of(job.record) for part in parts for job in read_block(part.read_bytes())]


def test_rows_get_captions_and_a_part(tmp_path: Path) -> None:
    rows = pyarrow.table({"source": ["a.mp4", "s3://films/b.mp4"], "n": [1, 2]})
    answer = actor(tmp_path, Captioner(), options={"num_frames": 8})(rows).to_pylist()
    assert [row["n"] for row in answer] == [1, 2] and {row["caption_state"] for row in answer} == {"done"}
    assert answer[0]["caption"] == "a saw 'a.mp4' {'num_frames': 8}"
    assert repr(RemotePath("s3://films/b.mp4")) in answer[1]["caption"]
    jobs = kept(tmp_path)
    assert [(job.job_id, job.caption.text) for job in jobs if job.caption] == [
        (row["caption_id"], row["caption"]) for row in answer
    ]
    assert [job.source for job in jobs] == ["a.mp4", "s3://films/b.mp4"] and jobs[0].receipt is not None
    assert jobs[0].receipt.target.model_id == "target"


def test_a_row_names_its_video(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="'source' is null in a row of the dataset"):
        actor(tmp_path, Captioner())(pyarrow.table({"source": ["a.mp4", None]}))


@pytest.mark.parametrize(
    ("columns", "value", "complaint"),
    [
        (
            Columns(content="c"),
            "/videos/other.mp4",
            "'c' must hold the videos' bytes, and has str: '/videos/other.mp4'",
        ),
        (Columns(options="c"), '{"seed": 1}', "'c' must hold structs, and has str: "),
        (Columns(options="c"), 3, "'c' must hold structs, and has int: '3'"),
    ],
)
def test_a_column_of_something_else_is_refused(tmp_path: Path, columns: Columns, value: Any, complaint: str) -> None:
    captioner = Captioner()
    with pytest.raises(InvalidConfig, match=complaint):
        actor(tmp_path, captioner, columns=columns)(pyarrow.table({"source": ["a", "b"], "c": [None, value]}))
    assert not captioner.asked and not kept(tmp_path)


def test_content_and_options_of_a_row(tmp_path: Path) -> None:
    rows = pyarrow.table({"path": ["a", "b"], "bytes": [b"1", b"2"], "how": [{"seed": 4}, {"seed": None}]})
    columns = Columns(source="path", content="bytes", options="how")
    answer = actor(tmp_path, Captioner(), {"seed": 1}, columns)(rows).to_pylist()
    assert [row["caption"] for row in answer] == ["a saw b'1' {'seed': 4}", "a saw b'2' {'seed': 1}"]
    assert [job.receipt.video_bytes for job in kept(tmp_path) if job.receipt] == [1, 1]


def test_whole_numbers_may_be_floats(tmp_path: Path) -> None:
    """As pandas has them in a column with gaps."""
    how = [{"num_frames": 8.0, "temperature": 1.0}, {"num_frames": None, "temperature": None}, {"num_frames": 8.5}]
    rows = pyarrow.table({"source": ["a", "b", "c"], "how": how})
    answer = actor(tmp_path, Captioner(), {"seed": 1}, Columns(options="how"))(rows).to_pylist()
    assert [row["caption"] for row in answer] == [
        "a saw 'a' {'num_frames': 8, 'temperature': 1.0, 'seed': 1}",
        "a saw 'b' {'seed': 1}",
        None,
    ]
    assert "num_frames must be a whole number" in answer[2]["caption_error"]


def test_what_is_in_a_part_is_not_captioned_again(tmp_path: Path) -> None:
    first = actor(tmp_path, Captioner("first"))(table("a", "b"))
    later = Captioner("later")
    assert actor(tmp_path, later)(table("a", "b")) == first
    grown = actor(tmp_path, later)(table("c", "b")).column("caption").to_pylist()
    assert [text[:9] for text in grown] == ["later saw", "first saw"] and later.asked == {"c": 1}
    assert sorted(job.source for job in kept(tmp_path)) == ["a", "b", "c"]


def test_two_actors_with_one_batch_keep_one_of_its_captions(tmp_path: Path) -> None:
    """One was cut off, and its batch given to another: both come to the end."""
    answers = []
    fast = actor(tmp_path, Captioner("fast"))

    def overtaken(video: Any) -> None:
        if not answers:
            answers.append(fast(table("a", "b")))

    answers.append(actor(tmp_path, Captioner("slow", overtaken))(table("a", "b")))
    assert answers[0] == answers[1] and len(kept(tmp_path)) == 2


def test_rows_that_fail_are_marked(tmp_path: Path) -> None:
    errors = {"broken": UnreadableMedia("no video"), "missing": VideoNotFound("no such file")}

    def fail(video: str) -> None:
        if video in errors:
            raise errors[video]

    answer = actor(tmp_path, Captioner("first", fail))(table("broken", "missing", "good")).to_pylist()
    assert [(row["caption_state"], row["caption_error"]) for row in answer] == [
        ("failed", "no video"),
        ("dead", "no such file"),
        ("done", None),
    ]
    assert [job.source for job in kept(tmp_path)] == ["broken", "good"]
    later = Captioner("later")
    states = actor(tmp_path, later)(table("broken", "missing", "good")).column("caption_state").to_pylist()
    assert states == ["failed", "done", "done"] and later.asked == {"missing": 1}
    assert Counter(job.source for job in kept(tmp_path)) == {"broken": 1, "good": 1, "missing": 1}


def test_a_file_that_cannot_be_read_now_is_tried_again(tmp_path: Path) -> None:
    video = tmp_path / "a.mp4"
    video.symlink_to(video)
    folder = tmp_path / "parts"
    folder.mkdir()

    def states(rows: Any, columns: Columns | None = None) -> Any:
        return actor(folder, Captioner("a", check_video), columns=columns)(rows).column("caption_state").to_pylist()

    assert states(table(str(video))) == ["dead"] and not kept(folder)
    video.unlink()
    video.write_bytes(b"video")
    assert states(table(str(video))) == ["done"]
    empty = pyarrow.table({"source": ["b"], "bytes": [b""]})
    assert states(empty, Columns(content="bytes")) == ["failed"], "which no machine can read"


def test_an_option_that_is_wrong_fails_its_row(tmp_path: Path) -> None:
    rows = pyarrow.table({"source": ["a", "b"], "how": [{"num_frames": 0}, {"num_frames": 4}]})
    answer = actor(tmp_path, Captioner(), columns=Columns(options="how"))(rows).to_pylist()
    assert [row["caption_state"] for row in answer] == ["failed", "done"]
    assert "num_frames must be at least 1" in answer[0]["caption_error"]


@pytest.mark.parametrize("error", [Overloaded("full"), ServiceUnavailable("away")])
def test_a_gateway_that_is_away_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(ray, "PAUSES_S", (0.0, 0.0))
    left = [error, error]

    def fail(video: Any) -> None:
        if left:
            raise left.pop()

    assert actor(tmp_path, Captioner("a", fail))(table("a")).column("caption_state").to_pylist() == ["done"]
    left += [error] * 3
    assert actor(tmp_path, Captioner("a", fail))(table("b")).column("caption_state").to_pylist() == ["dead"]
    assert [job.source for job in kept(tmp_path)] == ["a"]


def test_what_was_made_while_the_gateway_became_another_is_given_up(tmp_path: Path) -> None:
    """Receipts would name models that may not have made it."""

    def restart(video: Any) -> None:
        if video == "broken":
            raise UnreadableMedia("no video")
        if video == "b":
            captioner.target = "another"

    captioner = Captioner("a", restart)
    rows = actor(tmp_path, captioner)
    assert rows(table("a")).column("caption_state").to_pylist() == ["done"]
    answer = rows(table("b", "c", "broken")).to_pylist()
    assert [row["caption_state"] for row in answer] == ["dead", "dead", "failed"]
    assert "with other models" in answer[0]["caption_error"] and answer[0]["caption"] is None
    assert rows(table("b", "c")).column("caption_state").to_pylist() == ["done", "done"]
    made_by = {job.source: job.receipt.target.model_id for job in kept(tmp_path) if job.receipt}
    assert made_by == {"a": "target", "b": "another", "c": "another"}


def test_a_gateway_that_does_not_say_what_it_is_gives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "PAUSES_S", (0.0,))
    rows = actor(tmp_path, captioner := Captioner())
    captioner.info_errors = [ServiceUnavailable("away")] * 3
    assert rows(table("a")).column("caption_error").to_pylist() == ["away"] and not captioner.asked
    captioner.info_errors = [ServiceUnavailable("away")]
    assert rows(table("a")).column("caption_state").to_pylist() == ["done"]


def test_a_draft_may_join_and_leave_meanwhile(tmp_path: Path) -> None:
    drafts = {"a": "small", "b": "", "c": "small", "d": "smaller"}
    captioner = Captioner("a", lambda video: setattr(captioner, "draft", drafts[video]))
    rows = actor(tmp_path, captioner)
    states = [rows(table(source)).column("caption_state").to_pylist() for source in drafts]
    assert states == [["done"], ["done"], ["done"], ["dead"]]


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 7),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    deaths=st.lists(st.integers(0, 14), max_size=4),
)
def test_every_row_is_kept_once_wherever_an_actor_dies(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, sizes: Sequence[int], deaths: Sequence[int]
) -> None:
    """Each start has batches of another size; it dies at a step: a caption, before an object is put, or after it."""
    folder, sources = tmp_path_factory.mktemp("parts"), [f"{number}.mp4" for number in range(num_rows)]
    steps_left = [0]

    def step(video: Any = None) -> None:
        steps_left[0] -= 1
        if steps_left[0] == 0:
            raise Killed

    async def put(self: ResultsFolder, name: str, data: bytes) -> bytes | None:
        step()
        there = await whole_put(self, name, data)
        step()
        return there

    whole_put = ResultsFolder.put
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResultsFolder, "put", put)
        for start, death in enumerate([*deaths, 0]):
            size, steps_left[0] = sizes[start % len(sizes)], 0
            captioner = actor(folder, Captioner(str(start), step))
            steps_left[0] = death
            texts: list[Any] = []
            try:
                for at in range(0, num_rows, size):
                    texts += captioner(table(*sources[at : at + size])).column("caption").to_pylist()
            except Killed:
                continue
            assert len(texts) == num_rows and all(texts)
    jobs = kept(folder)
    assert sorted(job.source for job in jobs) == sources
    assert {job.caption.text for job in jobs if job.caption} == set(texts)


def test_the_name_of_a_row_is_its_source_and_options() -> None:
    first = Row("a", options={"seed": 1, "alpha": 0.5})
    assert first.id_with({"num_frames": 4}) == Row("a", options={"alpha": 0.5, "num_frames": 4}).id_with({"seed": 1})
    others = [Row("b"), Row("a"), Row("a", options={"seed": 2}), Row("a", options={"prompt": "seed"}), first]
    assert len({row.id_with({}) for row in others}) == len(others)


def test_what_is_wrong_with_the_job_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no column 'source'; it has path"):
        actor(tmp_path, Captioner())(pyarrow.table({"path": ["a"]}))
    with pytest.raises(InvalidConfig, match="a column 'caption' already"):
        actor(tmp_path, Captioner())(pyarrow.table({"source": ["a"], "caption": ["b"]}))
    with pytest.raises(InvalidConfig, match=r"^parts: 'films' is no address"):
        RowParts("films")
    (tmp_path / f"part-1{LINES}").write_bytes(b"no part")
    with pytest.raises(DamagedRecord, match=f"part-1{LINES} is no part: .*; move it away"):
        actor(tmp_path, Captioner())


def test_an_actor_without_a_captioner_names_its_machine(tmp_path: Path) -> None:
    def make() -> Any:
        raise InvalidConfig("no checkpoint at /models/big")

    stage = Stage(make, f"file://{tmp_path}", dict, {}, Columns(), at_once=1)
    with pytest.raises(InvalidConfig, match=r"no captioner on .+: no checkpoint at /models/big"):
        CaptionRows(stage)
    with pytest.raises(VersionMismatch, match=r"the driver 0.1.0: install the same"):
        CaptionRows(Stage(make, f"file://{tmp_path}", dict, {}, Columns(), at_once=1, version="0.1.0"))


def test_a_stage_travels() -> None:
    make: Any = partial(connect, "127.0.0.1:1")
    stage = Stage(make, "file:///parts", dict, CaptionOptions(num_frames=8).given(), Columns(), at_once=1)
    there = pickle.loads(pickle.dumps(stage))  # noqa: S301 (our own)
    assert (there.options, there.columns, there.version) == ({"num_frames": 8}, Columns(), stage.version)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"pip install 'slipstream\[ray\]'"):
        ray.caption(None, parts=f"file://{tmp_path}")
