"""Batches on the archive's queue: read, handed in, watched and written out by whoever is there. Each step may be
repeated, so a front that is killed in any of them costs time and nothing else."""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from slipstream.archive.messages import Batch, BatchOptions, Submitted
from slipstream.archive.queue import BatchState, UnknownBatch
from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    PermissionDenied,
    ServiceUnavailable,
    SlipstreamError,
    VideoNotFound,
)
from slipstream.logs import get_logger, heard
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.batch_forms import ENDPOINTS, kept_durably
from slipstream.services.front.batch_lines import (
    MAX_TOLD,
    BadLine,
    BatchItems,
    BatchLine,
    ItemMaker,
    LineFault,
    read_lines,
)
from slipstream.services.front.batch_output import copy_refusals, write_jobs, write_left
from slipstream.services.front.batch_records import BatchRecords, Ending, HttpBatch, Stage, written_whole
from slipstream.services.front.config import FrontConfig
from slipstream.services.front.file_store import OUTPUT, FileStore, NewFile, sync
from slipstream.services.front.gateways import Gateways

LOOK_S, SWEEP_S = 5.0, 600.0
"""How often this front looks at the batches that it knows of, and for what may be removed."""
_HOPELESS = (InvalidConfig, InvalidRequest, LimitExceeded, PermissionDenied)
"""What no later try would change: a gateway without an archive, an owner who may hand in nothing."""
_NOTHING_TO_CANCEL = (UnknownBatch, InvalidConfig, PermissionDenied)
"""The archive has none of a batch, or nothing of it that this token may cancel."""
FILE_GONE = "file_not_found"
KEPT_S = 30 * 86_400.0
"""How long the record of a batch is kept that has ended, or whose time was over before its owner came back."""
CHECKS = 2
"""Files that are read at once to see whether they hold requests; each takes a core for its time."""
MAX_FAULTS = 3
"""After so many looks at a batch that this server failed in, the batch has failed."""
PATIENCE_S = 2.0
"""How long who asks waits for a step that is about to end."""


class _ToEnd(Exception):
    """A batch is to end that is still being handed in."""


class Batches:
    """The batches of all owners. Where tokens are asked for, only who calls can be answered for: a batch goes on with
    its owner's next call, and while this process knows the token of the last one."""

    def __init__(self, config: FrontConfig, gateways: Gateways, files: FileStore) -> None:
        self.records = BatchRecords(config.data)
        self._config, self._gateways, self._files = config, gateways, files
        self._media = Path(config.data) / "media"
        self._open: dict[str, tuple[str, str]] = {}
        """Owner and token, by id, of batches that have not ended."""
        self._steps: dict[str, asyncio.Task[None]] = {}
        self._openings: set[asyncio.Task[HttpBatch]] = set()
        self._checking = asyncio.Semaphore(CHECKS)
        self._faults: Counter[str] = Counter()
        """How often this process failed in a batch, by its id."""

    async def run(self) -> None:
        """Goes on with what is open, until cancelled."""
        next_sweep, is_known = 0.0, bool(self._config.tokens)
        while True:
            if not is_known:
                with suppress(Overloaded):  # then they are looked for again
                    found = await asyncio.to_thread(lambda: list(self.records.open_of_nobody()))
                    self._open |= {batch.batch_id: ("", "") for batch in found}
                    is_known = True
            for batch_id, (owner, token) in list(self._open.items()):
                await _tried(self.state(owner, token, batch_id), batch_id=batch_id)
            if time.monotonic() >= next_sweep:
                next_sweep = time.monotonic() + SWEEP_S
                await _tried(asyncio.to_thread(self._sweep))
            await asyncio.sleep(LOOK_S)

    def _sweep(self) -> None:
        self._files.sweep()
        for batch_id in self.records.sweep(KEPT_S, self._open):
            shutil.rmtree(self._media / batch_id, ignore_errors=True)

    async def close(self) -> None:
        """Ends the steps that run here; others go on with them."""
        running = [*self._openings, *self._steps.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def open(self, owner: str, token: str, batch: HttpBatch) -> HttpBatch:
        """A new batch, or the one that has its id already; what was handed in of that is left to the next look. Whoever
        asks may leave meanwhile: a batch that is on record is gone on with."""
        opening = heard(asyncio.create_task(self._opened(owner, token, batch)))
        self._openings.add(opening)
        opening.add_done_callback(self._openings.discard)
        return await asyncio.shield(opening)

    async def _opened(self, owner: str, token: str, batch: HttpBatch) -> HttpBatch:
        try:
            known = await asyncio.to_thread(self.records.get, owner, batch.batch_id)
        except ApiError:
            await asyncio.to_thread(self.records.put, owner, batch)
            known = batch
        if known.stage is Stage.VALIDATING:
            self._begin(owner, token, known)
        else:
            self._open[known.batch_id] = (owner, token)
        return known

    async def state(self, owner: str, token: str, batch_id: str) -> tuple[HttpBatch, Batch | None]:
        """How the batch stands, and what the archive says of it while its jobs are there. Raises `ApiError`, and what
        the gateway says."""
        batch = await asyncio.to_thread(self.records.get, owner, batch_id)
        if batch.stage in (Stage.FAILED, Stage.ENDED):
            self._open.pop(batch_id, None)
            self._faults.pop(batch_id, None)
            return batch, None
        self._open[batch_id] = (owner, token)
        jobs = None
        if batch.stage is Stage.VALIDATING:
            await self._expire(owner, batch)
        else:
            try:
                jobs = await self._jobs(owner, token, batch)
            except UnknownBatch:
                return await self._lost(owner, batch), None
        if jobs is None or jobs.is_ended:
            step = self._begin(owner, token, batch)
            await asyncio.wait({step}, timeout=PATIENCE_S)
            batch = await asyncio.to_thread(self.records.get, owner, batch_id)
        return batch, jobs

    async def end(self, owner: str, batch_id: str) -> None:
        """Cancels it. Raises `ApiError` for one that has ended."""
        batch = await asyncio.to_thread(self.records.get, owner, batch_id)
        if batch.stage in (Stage.FAILED, Stage.ENDED):
            raise ApiError(
                f"the batch is {batch.ending or 'completed' if batch.stage is Stage.ENDED else 'failed'} already",
                status=409, param="batch_id", code="batch_ended",
            )  # fmt: skip
        await asyncio.to_thread(self.records.end, owner, batch_id, Ending.CANCELLED)

    async def _expire(self, owner: str, batch: HttpBatch) -> None:
        """Ends one whose time is over, and of which something is still to be done."""
        if time.time() >= batch.expires_s:
            await asyncio.to_thread(self.records.end, owner, batch.batch_id, Ending.EXPIRED)

    async def _jobs(self, owner: str, token: str, batch: HttpBatch) -> Batch | None:
        """What the archive says; None where there is nothing for it to do. Raises `UnknownBatch`."""
        if batch.num_lines == batch.num_refused:
            return None
        archive = self._gateways.archive(token)
        jobs = await archive.get(batch.key)
        if jobs.state in (BatchState.CANCELLING, BatchState.CANCELLED):  # whoever it was, such as the page
            await asyncio.to_thread(self.records.end, owner, batch.batch_id, Ending.CANCELLED)
        if jobs.is_ended:
            return jobs
        await self._expire(owner, batch)
        ending, _ = await asyncio.to_thread(self.records.ending, owner, batch.batch_id)
        goes_on = not ending or jobs.state is BatchState.CANCELLING
        return jobs if goes_on else await archive.cancel(batch.key)

    async def _lost(self, owner: str, batch: HttpBatch) -> HttpBatch:
        """What was handed in, and the archive does not know: that may pass until the batch's time is over, and then it
        has failed. Raises `ServiceUnavailable`."""
        if time.time() < batch.expires_s:
            raise ServiceUnavailable("the archive does not know this batch's requests; has its store changed?")
        lost = BadLine(0, "the archive has lost this batch's requests; hand them in again", "server_error")
        return await self._fail(owner, batch, [lost])

    def _begin(self, owner: str, token: str, batch: HttpBatch) -> "asyncio.Task[None]":
        """The batch's next step, which one task takes at a time."""
        self._open[batch.batch_id] = (owner, token)
        step = self._steps.get(batch.batch_id)
        if step is None:
            step = self._steps[batch.batch_id] = asyncio.create_task(self._step(owner, token, batch))
            step.add_done_callback(lambda _: self._steps.pop(batch.batch_id, None))
        return step

    async def _step(self, owner: str, token: str, batch: HttpBatch) -> None:
        """One that fails is taken again with the next look, as what stands in its way may pass. A fault of this server
        itself rarely does: the batch fails with it after `MAX_FAULTS` looks."""
        step = self._hand_in if batch.stage is Stage.VALIDATING else self._write_out
        try:
            now = await asyncio.to_thread(self.records.get, owner, batch.batch_id)
            if now.stage is batch.stage:  # else the step was taken since somebody read the record
                await step(owner, token, now)
        except Exception as error:
            _log(error, batch_id=batch.batch_id)
            if _may_pass(error):
                return
            self._faults[batch.batch_id] += 1
            if self._faults[batch.batch_id] >= MAX_FAULTS:
                await _tried(self._give_up(owner, token, batch, _fault(error, batch)), batch_id=batch.batch_id)

    # -- in -----------------------------------------------------------------------------------------------------------

    async def _hand_in(self, owner: str, token: str, batch: HttpBatch) -> None:
        async with self._checking:
            errors, num_lines = await asyncio.to_thread(self._check, owner, batch)
        batch = replace(batch, num_lines=num_lines)
        if errors:
            if errors[0].code == FILE_GONE:  # of which some may have been handed in before
                await self._cancel_jobs(token, batch)
            await self._fail(owner, batch, errors)
            return
        try:
            num_refused = await self._submit(owner, token, batch)
        except _ToEnd as why:
            await self._end_early(owner, token, batch, str(why))
            return
        except _HOPELESS as error:
            await self._give_up(owner, token, batch, BadLine(0, str(error), "not_served"))
            return
        handed_in = replace(batch, stage=Stage.HANDED_IN, num_refused=num_refused, handed_in_s=int(time.time()))
        await asyncio.to_thread(self.records.put, owner, handed_in)
        get_logger().info("batch.handed_in", batch_id=batch.batch_id, num_lines=num_lines, num_refused=num_refused)

    async def _submit(self, owner: str, token: str, batch: HttpBatch) -> int:
        """How many requests were refused; the archive has the others. Raises `_ToEnd` where the batch is to end, as is
        looked up before each wait for room."""

        def tell(_: Submitted, obstacle: str) -> None:
            if obstacle:
                self._look_for_end(owner, batch)

        await asyncio.to_thread(self._look_for_end, owner, batch)
        info = await self._gateways.info(token)
        media = self._media / batch.batch_id if self._config.shared_media else None
        model, endpoint = self._gateways.served_name(info), ENDPOINTS[batch.endpoint]
        # Whole when it has its name: another front may write this batch out, and have it read, by now.
        refusals = written_whole(self.records.refusals(owner, batch.batch_id))
        async with kept_durably(self.records.kept(owner, batch.batch_id)) as kept:
            with refusals as refused, self._lines(owner, batch) as lines:
                maker = ItemMaker(info, model, owner, self._files, media, endpoint, kept.add)
                items = BatchItems(batch.batch_id, lines, maker, refused)
                try:
                    await self._gateways.archive(token).submit_all(BatchOptions(batch.key), items, tell)
                except VideoNotFound:  # there is no item: all were refused
                    if items.num_refused != batch.num_lines:
                        raise
                await asyncio.to_thread(sync, refused)
                return items.num_refused

    def _look_for_end(self, owner: str, batch: HttpBatch) -> None:
        """Raises `_ToEnd`."""
        ending, _ = self.records.ending(owner, batch.batch_id)
        if ending:
            raise _ToEnd(ending)

    async def _end_early(self, owner: str, token: str, batch: HttpBatch, why: str) -> None:
        """It ends before all was handed in. What was done of it by then is written out like that of any other."""
        if await self._cancel_jobs(token, batch):
            await asyncio.to_thread(self.records.put, owner, replace(batch, stage=Stage.HANDED_IN))
        else:
            await self._finish(owner, replace(batch, stage=Stage.ENDED, num_failed=batch.num_lines, ending=why))

    async def _give_up(self, owner: str, token: str, batch: HttpBatch, error: BadLine) -> None:
        """It has failed, and what of it the archive has already is cancelled. Raises what `_cancel_jobs` does."""
        await self._cancel_jobs(token, batch)
        await self._fail(owner, batch, [error])

    async def _cancel_jobs(self, token: str, batch: HttpBatch) -> bool:
        """Those that the archive has of a batch that was not handed in to its end, if it has some. Raises
        `SlipstreamError` while that cannot be done."""
        try:
            await self._gateways.archive(token).cancel(batch.key)
            return True
        except _NOTHING_TO_CANCEL as refused:
            get_logger().info("batch.nothing_cancelled", batch_id=batch.batch_id, reason=str(refused))
            return False

    async def _fail(self, owner: str, batch: HttpBatch, errors: Sequence[BadLine]) -> HttpBatch:
        shown = tuple(error.shown() for error in errors)
        return await self._finish(owner, replace(batch, stage=Stage.FAILED, errors=shown))

    async def _finish(self, owner: str, batch: HttpBatch) -> HttpBatch:
        """Its last record, after which nobody looks for its media."""
        await asyncio.to_thread(shutil.rmtree, self._media / batch.batch_id, True)
        finished = replace(batch, ended_s=int(time.time()))
        await asyncio.to_thread(self.records.put, owner, finished)
        return finished

    def _check(self, owner: str, batch: HttpBatch) -> tuple[list[BadLine], int]:
        """What is wrong with the file as such, and how many requests it holds."""
        errors: list[BadLine] = []
        num_lines = 0
        try:
            with self._lines(owner, batch) as lines:
                for line in lines:
                    num_lines += 1
                    if isinstance(line, BadLine):
                        errors.append(line)
                    if num_lines > self._config.max_batch_lines:
                        errors.append(BadLine(line.number, f"more than {num_lines - 1} requests", "too_many_lines"))
                        break
                    if len(errors) >= MAX_TOLD:
                        break
        except ApiError as error:
            return [BadLine(0, str(error), FILE_GONE)], 0
        if not num_lines:
            errors.append(BadLine(0, "the file holds no request", "empty_file"))
        return errors, num_lines

    @contextmanager
    def _lines(self, owner: str, batch: HttpBatch) -> Iterator[Iterator[BatchLine | BadLine]]:
        """The requests. Raises `ApiError` where their file is gone."""
        limits = self._config.max_json_bytes, self._config.max_body_bytes
        with self._files.open(owner, batch.input_file_id) as file, read_lines(file, batch.endpoint, *limits) as lines:
            yield lines

    # -- out ----------------------------------------------------------------------------------------------------------

    async def _write_out(self, owner: str, token: str, batch: HttpBatch) -> None:
        """Both files, then the record that names them. Whoever does it again writes the same."""
        archive, store = self._gateways.archive(token), self._files
        model = self._gateways.served_name(await self._gateways.info(token))
        ending, _ = await asyncio.to_thread(self.records.ending, owner, batch.batch_id)
        with ExitStack() as files:
            output, errors = [files.enter_context(await asyncio.to_thread(store.new, owner, 2**62)) for _ in range(2)]
            num_done, names = 0, set[str]()
            if batch.num_refused < batch.num_lines:
                said = self.records.kept(owner, batch.batch_id)
                num_done, names = await write_jobs(archive, batch, model, said, output, errors, ending)
            num_told = len(names)
            if batch.num_refused:
                refused = self.records.refusals(owner, batch.batch_id)
                num_told += await asyncio.to_thread(copy_refusals, refused, names, errors)
            if batch.handed_in_s is None:
                await asyncio.to_thread(self._write_left, owner, batch, names, errors, ending)
            elif num_told < batch.num_lines:
                raise ServiceUnavailable(f"the archive has {num_told} of {batch.num_lines} requests")
            for what, file in (("output", output), ("errors", errors)):
                if file.num_bytes:
                    name = f"{batch.batch_id}_{what}.jsonl"
                    expires_s = batch.output_life_s and int(time.time()) + batch.output_life_s
                    await asyncio.to_thread(file.keep, batch.file_id(what), name, OUTPUT, expires_s)
            ended = replace(
                batch,
                stage=Stage.ENDED,
                num_done=num_done,
                num_failed=batch.num_lines - num_done,
                has_output=bool(output.num_bytes),
                has_errors=bool(errors.num_bytes),
                ending=ending if num_done < batch.num_lines else "",
            )
        await self._finish(owner, ended)
        get_logger().info("batch.ended", batch_id=batch.batch_id, num_done=num_done, num_failed=ended.num_failed)

    def _write_left(self, owner: str, batch: HttpBatch, names: set[str], errors: NewFile, ending: str) -> None:
        """The lines of requests that the archive never had, where their file is still there."""
        with suppress(ApiError), self._lines(owner, batch) as lines:
            write_left(lines, batch, names, errors, ending)


async def _tried(work: Awaitable[object], **about: str) -> None:
    """What fails is logged, and ends nothing else: it is tried again with the next look."""
    try:
        await work
    except Exception as error:
        _log(error, **about)


def _log(error: Exception, **about: str) -> None:
    if _may_pass(error):
        get_logger().warning("batch.stands", reason=str(error), **about)
    else:
        get_logger().error("batch.failed", exc_info=error, **about)


def _may_pass(error: Exception) -> bool:
    """Whether a later try may succeed: the gateway is away, a disk is full."""
    if isinstance(error, SlipstreamError):
        return error.status != SlipstreamError.status
    return isinstance(error, ApiError | OSError)


def _fault(error: Exception, batch: HttpBatch) -> BadLine:
    """What is told of an error of this server; what it was stands in the log."""
    line = error.line if isinstance(error, LineFault) else 0
    about = f"request {line}" if line else "the batch"
    return BadLine(line, f"this server failed in {about}; its log tells more under {batch.batch_id}", "server_error")
