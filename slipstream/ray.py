"""A stage for Ray Data: captions the rows of a dataset in actors, and keeps what is done as parts in a folder.

Ray gives out the work and repeats what dies; the parts see to it that nothing is kept twice. Ray itself is imported
when a stage is made.
"""

import hashlib
import json
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from slipstream import __version__
from slipstream.archive.messages import OptionValues, Receipt
from slipstream.archive.queue import JobRecord, JobState
from slipstream.archive.records import JobPayload, job_of, write_job, write_result
from slipstream.archive.row_parts import BATCH, ID_CHARS, Records, RowParts, part_name
from slipstream.client.batch_handles import is_url, item_name
from slipstream.client.caption_client import RemotePath, Video
from slipstream.client.receipts import caller_receipt
from slipstream.client.sync_captioner import Captioner, run_in_background
from slipstream.config import whole_number
from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    Overloaded,
    ServiceUnavailable,
    SlipstreamError,
    UnreadableVideo,
    VersionMismatch,
)
from slipstream.messages import Caption
from slipstream.options import OPTIONS, CaptionOptions
from slipstream.service_info import GatewayInfo

PAUSES_S = (1.0, 5.0, 25.0)
"""Before each further attempt at a row whose gateway is full or away, unless it says itself how long."""
MAKERS = ("version", "target_model", "target_revision", "target_dtype", "draft_model", "draft_revision", "draft_dtype")
"""What receipts have of what a gateway says of itself; "" is not known, as of a draft that is away."""
ANSWERS = ("caption", "caption_state", "caption_error", "caption_id")
"""The columns that rows get."""
WHOLE = frozenset(spec.name for spec in OPTIONS if spec.kind is int)
"""Options that are whole numbers, which a table has as floats where one of their column is missing."""
AnswerT = TypeVar("AnswerT")

# -- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """Which columns of the dataset say what."""

    source: str = "source"
    """The video's name: a path on the worker, or an address that the gateway opens."""
    content: str = ""
    """Its bytes, where Ray has read them; the source then only names it."""
    options: str = ""
    """Options of this row, a struct; what is null is not given."""

    def rows_of(self, table: Any) -> "list[Row]":
        """Of an Arrow table. Raises `InvalidConfig` for a column that it lacks, or has and must not have, or that holds
        something else, and for a row without a source."""
        if taken := [name for name in ANSWERS if name in table.column_names]:
            raise InvalidConfig(f"the dataset has a column {taken[0]!r} already: drop or rename it")
        names = [name for name in (self.source, self.content, self.options) if name]
        if missing := [name for name in names if name not in table.column_names]:
            raise InvalidConfig(f"the dataset has no column {missing[0]!r}; it has {', '.join(table.column_names)}")
        rows = table.select(names).to_pylist()
        if any(said[self.source] is None for said in rows):
            raise InvalidConfig(f"{self.source!r} is null in a row of the dataset: leave such rows out")
        for name, kind, wanted in ((self.content, bytes, "the videos' bytes"), (self.options, dict, "structs")):
            others = (said[name] for said in rows if name and not isinstance(said[name], kind | None))
            if (other := next(others, None)) is not None:
                raise InvalidConfig(f"{name!r} must hold {wanted}, and has {type(other).__name__}: {str(other)[:40]!r}")
        return [
            Row(
                source=str(said[self.source]),
                content=said[self.content] if self.content else None,
                options=_given(said.get(self.options) or {}),
            )
            for said in rows
        ]


def _given(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of a struct that has all that any row has: what is null is not given."""
    given = {name: value for name, value in options.items() if value is not None}
    return given | {name: whole_number(given[name]) for name in WHOLE & given.keys()}


@dataclass(frozen=True)
class Row:
    """One video to caption."""

    source: str
    content: bytes | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)

    def id_with(self, options: OptionValues) -> str:
        """Names the row by its source and all options that were given, whatever order they came in."""
        named = [self.source, {**options, **self.options}]
        return hashlib.sha256(json.dumps(named, sort_keys=True, default=repr).encode()).hexdigest()[:ID_CHARS]

    @property
    def video(self) -> Video:
        """What the captioner is given."""
        if self.content is not None:
            return self.content
        return RemotePath(self.source) if is_url(self.source) else self.source


# -- stage ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What all actors of a stage are told."""

    make_captioner: Callable[[], Captioner]
    parts: str
    known: Callable[[], Mapping[str, str]]
    """Gives the part of each row that was in one when the stage was made."""
    options: OptionValues
    """Of all rows, as given."""
    columns: Columns
    at_once: int
    version: str = __version__


class CaptionRows:
    """An actor: it has a captioner, and answers batches of rows with their captions."""

    def __init__(self, stage: Stage) -> None:
        """Raises `VersionMismatch` where this machine has another release than the driver, and what the captioner
        does, with the name of the machine."""
        here = socket.gethostname()
        if stage.version != __version__:
            raise VersionMismatch(f"{here} has slipstream {__version__}, the driver {stage.version}: install the same")
        try:
            self._captioner = stage.make_captioner()
            self._captioner.info()
        except SlipstreamError as error:
            raise type(error)(f"no captioner on {here}: {error}") from None
        self._stage = stage
        self._parts = RowParts(stage.parts)
        self._known = stage.known()
        self._pool = ThreadPoolExecutor(stage.at_once)
        self._name = uuid.uuid4().hex

    def __call__(self, table: Any) -> Any:
        """The Arrow table with `ANSWERS`. Raises `InvalidConfig` for columns that do not fit, `DamagedRecord`, and what
        the store of parts does."""
        rows = self._stage.columns.rows_of(table)
        ids = [row.id_with(self._stage.options) for row in rows]
        found = self._kept(ids)
        left = {row_id: row for row_id, row in zip(ids, rows, strict=True) if row_id not in found}
        found |= self._made(left)
        return _with_captions(table, [found[row_id] for row_id in ids])

    def _kept(self, ids: Sequence[str]) -> Records:
        """Those of an earlier start."""
        found = Records()
        for name in {self._known[row_id] for row_id in ids if row_id in self._known}:
            records = run_in_background(self._parts.read(name))
            found |= records or {}
        return {row_id: found[row_id] for row_id in ids if row_id in found}

    def _made(self, rows: Mapping[str, Row]) -> Records:
        """All of them, captioned unless their part is there: this very batch was begun before, and what died was only
        the answer."""
        if not rows:
            return {}
        name, given_up = part_name(rows), Records()
        there = run_in_background(self._parts.read(name))
        if there is None:
            made = self._captioned(rows)
            given_up = {row_id: record for row_id, record in made.items() if record.state is JobState.DEAD}
            there = {row_id: record for row_id, record in made.items() if row_id not in given_up}
        if there:
            there = run_in_background(self._parts.write(name, there.values()))
        left = {row_id: row for row_id, row in rows.items() if row_id not in there and row_id not in given_up}
        return given_up | there | self._made(left)  # another may have given up more of them, and written fewer

    def _captioned(self, rows: Mapping[str, Row]) -> Records:
        """All rows. What is done is given up where the gateway has other models behind them than before them: which of
        them made what is not known, and parts are kept for good."""
        before = self._info()
        made = self._pool.map(partial(self._caption, before), rows, rows.values())
        records = dict(zip(rows, made, strict=True))
        changed = _change(before, self._info())
        if changed is None:
            return records
        return {row_id: _given_up(record, changed) for row_id, record in records.items()}

    def _info(self) -> GatewayInfo | SlipstreamError:
        """What the gateway says of itself now, or why it does not."""
        try:
            return self._patiently(self._captioner.info)
        except SlipstreamError as error:
            return error

    def _caption(self, info: GatewayInfo | SlipstreamError, row_id: str, row: Row) -> JobRecord:
        """DONE; FAILED: the row is at fault; DEAD: it is given up, and the next start tries it again, as where its file
        cannot be read on this machine now."""
        began_s, asked, result, error = time.time(), CaptionOptions(), "", None
        try:
            asked = CaptionOptions.from_mapping(row.options).over(CaptionOptions.from_mapping(self._stage.options))
            if isinstance(info, SlipstreamError):
                raise info
            caption = self._patiently(partial(self._captioner.caption, row.video, options=asked))
            result = write_result(caption, _receipt(row.video, caption, info))
        except SlipstreamError as told:
            error = told
        is_file_at_fault = isinstance(error, UnreadableVideo) and row.content is None
        is_at_fault = isinstance(error, InvalidRequest) and not is_file_at_fault
        return JobRecord(
            job_id=row_id,
            batch_id=BATCH,
            custom_id=item_name(row.source),
            state=JobState.DONE if error is None else JobState.FAILED if is_at_fault else JobState.DEAD,
            payload=write_job(JobPayload(row.source, asked.given(), "")),
            result=result,
            error=str(error or ""),
            error_code=error.status if error else "",
            worker=self._name,
            epoch=1,
            attempts=0,
            crashes=0,
            progress="",
            created_s=began_s,
            started_s=began_s,
            ended_s=time.time(),
        )

    def _patiently(self, ask: Callable[[], AnswerT]) -> AnswerT:
        """Asks again while the gateway is full or away."""
        for pause_s in PAUSES_S:
            try:
                return ask()
            except (Overloaded, ServiceUnavailable) as error:
                time.sleep(error.retry_after_s or pause_s)
        return ask()


def _change(before: GatewayInfo | SlipstreamError, after: GatewayInfo | SlipstreamError) -> SlipstreamError | None:
    """Why receipts cannot say by what rows were made between the two; None: they can. A draft may come and go."""
    for told in (before, after):
        if isinstance(told, SlipstreamError):
            return told
    names = [name for name in MAKERS if "" not in (getattr(before, name), getattr(after, name))]
    if all(getattr(before, name) == getattr(after, name) for name in names):
        return None
    return ServiceUnavailable("the gateway was started again with other models, or of another release, meanwhile")


def _given_up(record: JobRecord, reason: SlipstreamError) -> JobRecord:
    """A record that is done, for the next start to try again; any other as it is."""
    if record.state is not JobState.DONE:
        return record
    return replace(record, state=JobState.DEAD, result="", error=str(reason), error_code=reason.status)


def _receipt(video: Video, caption: Caption, info: GatewayInfo) -> Receipt:
    """As far as a caller knows: of an object that the gateway opened no digest."""
    sha256, num_bytes = _digest(video)
    return caller_receipt(caption, info, caption.options, sha256=sha256, num_bytes=num_bytes)


def _digest(video: Video) -> tuple[str, int]:
    """SHA-256 and bytes of what was captioned; none of what this machine cannot read."""
    if isinstance(video, bytes):
        return hashlib.sha256(video).hexdigest(), len(video)
    if not isinstance(video, str):
        return "", 0
    try:
        with open(video, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
    except OSError:
        return "", 0


def _with_captions(table: Any, records: Sequence[JobRecord]) -> Any:
    jobs = [job_of(record) for record in records]
    texts = [job.caption.text if job.caption else None for job in jobs]
    values = texts, [str(job.state) for job in jobs], [job.error or None for job in jobs], [job.job_id for job in jobs]
    import pyarrow

    for name, column in zip(ANSWERS, values, strict=True):
        table = table.append_column(name, pyarrow.array(column, pyarrow.string()))
    return table


def caption(
    dataset: Any,
    *,
    parts: str,
    captioner: Callable[[], Captioner] = Captioner,
    options: CaptionOptions | None = None,
    columns: Columns | None = None,
    actors: int = 1,
    at_once: int = 2,
    rows_per_part: int = 32,
    **remote: Any,
) -> Any:
    """A `ray.data.Dataset` of the same rows with their captions, made when it is read.

        rows = ray.data.from_items([{"source": "/videos/a.mp4"}, {"source": "/videos/b.mp4"}])
        connect = functools.partial(slipstream.connect, "host:50050")
        slipstream.ray.caption(rows, parts="s3://films/parts", captioner=connect).write_parquet("captions")

    Each row gets `caption`, `caption_state` (done; failed: the row is at fault; dead: given up, and tried again by the
    next start), `caption_error`, and `caption_id`, its `job_id` in the parts. Those that are done or failed are in
    exactly one part, whatever dies meanwhile. Started again with the same `parts`, it captions only what is in none.

    Args:
        dataset: a `ray.data.Dataset` of videos.
        parts: folder of objects for the parts: `s3://BUCKET/PREFIX`, `gs://`, `az://`, or `file:///FOLDER` that all
            machines share. Credentials are those of each machine's environment.
        captioner: makes the captioner of an actor, on its machine: `functools.partial` of `Captioner`, for a private
            stack with models of that machine, or of `slipstream.connect`, for a gateway.
        options: what to ask of every row; those of the row itself go before.
        columns: which columns say what; by default `source` is a path, or an address that the gateway opens.
        actors: how many, each with a captioner of its own.
        at_once: captions of one actor at a time.
        rows_per_part: what an actor is given at a time, and loses when it dies.
        remote: what Ray reserves for an actor, as of `map_batches`: `num_gpus=1`, `num_cpus`, `resources`.

    Raises:
        InvalidConfig: parts that cannot be written, or a library that is missing.
        DamagedRecord: something in the folder has a part's name and is none.
    """
    try:
        import ray.data
    except ImportError:
        raise InvalidConfig("a stage of Ray Data needs Ray: pip install 'slipstream[ray]'") from None
    known = ray.put(run_in_background(RowParts(parts).known()))
    given = (options or CaptionOptions()).given()
    stage = Stage(captioner, parts, partial(ray.get, known), given, columns or Columns(), at_once)
    rows = dataset.repartition(target_num_rows_per_block=rows_per_part).map_batches(
        CaptionRows,
        batch_size=rows_per_part,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=actors),
        fn_constructor_args=[stage],
        **remote,
    )
    rows.context.execution_options.preserve_order = True  # the same rows are the same batches, also at another start
    return rows
