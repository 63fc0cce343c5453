"""One SubmitBatch call: what it must look like, and its items gathered into chunks, each durable before the next."""

import hashlib
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from slipstream.archive.messages import (
    MAX_ITEM_HINT_BYTES,
    BatchItem,
    BatchOptions,
    JobKind,
    OptionValues,
    Submitted,
    document_options,
    kind_of,
)
from slipstream.archive.queue import BacklogFull, BatchSpec, JobQueue, JobSpec, Priority, SubmitOutcome
from slipstream.archive.records import BatchPayload, JobPayload, write_batch, write_job
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.plan import CaptionPlan, make_plan
from slipstream.errors import InvalidRequest, LimitExceeded, PermissionDenied, SlipstreamError
from slipstream.logs import get_logger
from slipstream.options import CaptionOptions
from slipstream.rpc.security import OwnerRights
from slipstream.rpc.tracing import Tracing
from slipstream.service_info import ModelInfo, check_honours

# -- admission --------------------------------------------------------------------------------------------------------

MAX_NAME_CHARS = 256
MAX_SOURCE_CHARS = 4096
MAX_COST = 1000
RETRY_AFTER_S = 10.0
MAX_METADATA, MAX_METADATA_CHARS = 16, 512
_BATCH_ID = re.compile("batch-[0-9a-f]{32}")
_SHA256 = re.compile("[0-9a-fA-F]{64}")


def batch_id_of(owner: str, key: str) -> str:
    """The batch of this key and owner; without a key a new one."""
    if not key:
        return f"batch-{secrets.token_hex(16)}"
    return f"batch-{hashlib.sha256(json.dumps([owner, key]).encode()).hexdigest()[:32]}"


def find_batch_id(owner: str, batch: str) -> str:
    """The id that an id or a key stands for. No key looks like an id."""
    if not _is_name(batch):
        raise InvalidRequest("name a batch by its id or its key")
    return batch if _BATCH_ID.fullmatch(batch) else batch_id_of(owner, batch)


def check_batch(batch: BatchOptions, config: GatewayConfig, target: ModelInfo | None = None) -> None:
    """Raises `InvalidRequest` and what `make_plan` does, and `InvalidConfig` for what the `target` would ignore."""
    if batch.key and not _is_name(batch.key):
        raise InvalidRequest(f"a key must have 1 to {MAX_NAME_CHARS} printable characters")
    if _BATCH_ID.fullmatch(batch.key):
        raise InvalidRequest("a key must not look like a batch id")
    _check_metadata(batch.metadata)
    if batch.document:
        document_options(batch.document)
    _plan(batch.caption, {}, config, target)


def check_rights(batch: BatchOptions, owner: str, rights: OwnerRights, config: GatewayConfig) -> None:
    """Raises `PermissionDenied` for what the owner may not. Without owners there are no rights."""
    may_use_high = config.owner_high if rights.may_use_high is None else rights.may_use_high
    if batch.priority is Priority.HIGH and owner and not may_use_high:
        raise PermissionDenied(
            f"{owner} may not use the priority high; submit with normal, or ask the operator for `high=yes` in the "
            "tokens file or for --owner-high true"
        )


def max_waiting(owner: str, rights: OwnerRights, config: GatewayConfig) -> int:
    """How many jobs of the owner may wait. Where callers are told apart, nobody can fill the backlog alone. Raises
    `PermissionDenied` where none may."""
    if rights.max_waiting == 0:
        raise PermissionDenied(f"{owner} may hand in no jobs here; ask the operator for a higher max-waiting")
    if rights.max_waiting is not None:
        return rights.max_waiting
    of_one = config.max_backlog if not owner else max(config.max_backlog // 2, 1)
    return config.owner_max_waiting or of_one


def backlog_full(stopped_by: SubmitOutcome, max_waiting: int, so_far: str) -> BacklogFull:
    """What to tell the caller of FULL, OVER_QUOTA or OUTSIDE."""
    why = {
        SubmitOutcome.OVER_QUOTA: f"{max_waiting} of your jobs may wait, and do",
        SubmitOutcome.OUTSIDE: "the batch was cancelled, and some of its jobs are yet to be",
    }.get(stopped_by, "the archive's backlog is full")
    return BacklogFull(f"{why}: {so_far}; make the same call again later to go on", retry_after_s=RETRY_AFTER_S)


def cost_of(plan: CaptionPlan, config: GatewayConfig) -> int:
    """Turns that a run of it takes: 1 for what is asked by default, or less; twice the frames or tokens take 2."""
    frames = (plan.options.num_frames or 1) / config.default_frames
    tokens = (plan.options.max_new_tokens or 1) / config.default_new_tokens
    return max(1, min(math.ceil(max(frames, tokens)), MAX_COST))


def read_item(
    item: BatchItem,
    number: int,
    batch: BatchPayload,
    priority: Priority,
    config: GatewayConfig,
    target: ModelInfo | None = None,
) -> JobSpec:
    """A job; one that cannot run has a rejection. Raises `InvalidRequest` for a name that nothing can be filed under,
    naming the item by its `number` in the stream."""
    if not _is_name(item.custom_id):
        raise InvalidRequest(f"item {number}: custom_id must have 1 to {MAX_NAME_CHARS} printable characters")
    source = item.source[:MAX_SOURCE_CHARS]
    kind = item.kind or kind_of(source)
    if kind is not JobKind.DOCUMENT:
        in_segments = {**batch.caption, **item.caption}.get("segments", "none") != "none"
        kind = JobKind.FILM if in_segments else JobKind.VIDEO
    document = item.document if kind is JobKind.DOCUMENT else {}
    job = JobPayload(source, item.caption, item.sha256[:64].lower(), kind, document)
    try:
        if kind is JobKind.DOCUMENT:
            job.merged_document(batch)
        item.check_reading()
        cost = _read_cost(item, batch, config, target)
    except SlipstreamError as error:
        return JobSpec(item.custom_id, write_job(job), priority, str(error), rejection_code=error.status)
    return JobSpec(item.custom_id, write_job(job), priority, cost=cost)


def _read_cost(item: BatchItem, batch: BatchPayload, config: GatewayConfig, target: ModelInfo | None) -> int:
    """Raises `SlipstreamError` for an item that cannot run."""
    if not 1 <= len(item.source) <= MAX_SOURCE_CHARS:
        raise InvalidRequest(f"source must have 1 to {MAX_SOURCE_CHARS} characters")
    if item.sha256 and not _SHA256.fullmatch(item.sha256):
        raise InvalidRequest("sha256 must have 64 hexadecimal digits")
    return cost_of(_plan(item.caption, batch.caption, config, target), config)


def _plan(own: OptionValues, shared: OptionValues, config: GatewayConfig, target: ModelInfo | None) -> CaptionPlan:
    if own.get("path") or own.get("request_id"):
        raise InvalidRequest("path and request_id must be empty in the options of a batch; an item names its source")
    plan = make_plan(CaptionOptions.from_mapping(own).over(CaptionOptions.from_mapping(shared)), config)
    if plan.options.logprobs:
        raise InvalidRequest("logprobs must be left out: the archive keeps texts and no tokens")
    if target is not None:
        check_honours(target, plan.sampling, thinking=plan.options.thinking, logprobs=False)
    if sum(len(text.encode()) for text in plan.options.prediction) > MAX_ITEM_HINT_BYTES:
        raise LimitExceeded(f"the predictions of a job have more than {MAX_ITEM_HINT_BYTES} bytes; give fewer of them")
    return plan


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"metadata has {len(metadata)} entries; at most {MAX_METADATA} are kept")
    if any(len(text) > MAX_METADATA_CHARS for entry in metadata.items() for text in entry):
        raise InvalidRequest(f"keys and values of metadata may have {MAX_METADATA_CHARS} characters")


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= MAX_NAME_CHARS and text.isprintable()


# -- submission -------------------------------------------------------------------------------------------------------

# One SubmitBatch call: items gathered into chunks, each durable before the next, and what became of them all.

CHUNK = 500
MAX_NAMED_CONFLICTS = 100


class Submission:
    """Nothing reaches the queue before the first chunk does. A call that breaks off leaves the batch open, and what
    was accepted of it runs."""

    def __init__(
        self,
        queue: JobQueue,
        config: GatewayConfig,
        owner: str,
        options: BatchOptions,
        max_waiting: int,
        tracing: Tracing | None = None,
        target: ModelInfo | None = None,
    ) -> None:
        """`target`: what this gateway's serves, where that is known; items that it would not honour cannot run."""
        self._queue = queue
        self._target = target
        self._config = config
        self._max_waiting = max_waiting
        self._tracing = tracing
        self._priority = options.priority
        self._more_follows = options.more_follows
        self._batch = BatchPayload(options.key, options.caption, options.document)
        batch_id = batch_id_of(owner, options.key)
        self._spec = BatchSpec(batch_id, owner, dict(options.metadata), write_batch(self._batch))
        self._chunk: list[JobSpec] = []
        self._num_items = 0
        self._is_open = False
        self._submitted = Submitted(batch_id)

    @property
    def batch_id(self) -> str:
        return self._spec.batch_id

    async def add(self, item: BatchItem) -> None:
        """One more item. Raises `InvalidRequest`, `LimitExceeded`, `BacklogFull` or `QueueUnavailable`."""
        self._num_items += 1
        if self._num_items > self._config.max_batch_items:
            raise LimitExceeded(
                f"one call may hand in {self._config.max_batch_items} items: hand in those behind them by another with"
                " the same key, or start the gateways with a higher --max-batch-items"
            )
        self._chunk.append(read_item(item, self._num_items, self._batch, self._priority, self._config, self._target))
        if len(self._chunk) >= CHUNK:
            await self._flush()

    async def end(self) -> Submitted:
        """No more items come with this call."""
        if not self._num_items:
            raise InvalidRequest("a batch needs at least one item")
        await self._flush()
        if not self._more_follows:
            await self._queue.seal_batch(self._spec.batch_id)
        submitted = self._submitted
        get_logger().info(
            "batch.submitted",
            batch_id=submitted.batch_id,
            num_added=submitted.num_added,
            num_known=submitted.num_known,
            num_conflicts=submitted.num_conflicts,
            num_rejected=submitted.num_rejected,
        )
        return submitted

    async def _flush(self) -> None:
        if not self._chunk:
            return
        if not self._is_open:
            await self._queue.open_batch(self._spec)
            self._is_open = True
        answers = await self._submit(self._chunk)
        self._submitted += self._count(answers)
        self._chunk = []
        for outcome in (SubmitOutcome.FULL, SubmitOutcome.OVER_QUOTA):
            if outcome in answers:
                num_added, num_known = self._submitted.num_added, self._submitted.num_known
                so_far = f"{num_added} items of this call were accepted and {num_known} were known"
                raise backlog_full(outcome, self._max_waiting, so_far)

    async def _submit(self, jobs: Sequence[JobSpec]) -> list[SubmitOutcome]:
        if self._tracing is None:
            return await self._queue.submit(self._spec.batch_id, jobs, self._max_waiting)
        traces = [self._tracing.hand_in(self._spec.batch_id) for _ in jobs]
        jobs = [replace(job, traceparent=trace.traceparent) for job, trace in zip(jobs, traces, strict=True)]
        answers = await self._queue.submit(self._spec.batch_id, jobs, self._max_waiting)
        for trace, answer in zip(traces, answers, strict=True):
            if answer is SubmitOutcome.ADDED:
                trace.keep()
        return answers

    def _count(self, answers: Sequence[SubmitOutcome]) -> Submitted:
        """What became of the chunk. Of the conflicts of a whole call, the first are named."""
        by_answer = {
            answer: [job for job, said in zip(self._chunk, answers, strict=True) if said is answer]
            for answer in SubmitOutcome
        }
        added, known, conflicts = (
            by_answer[answer] for answer in (SubmitOutcome.ADDED, SubmitOutcome.KNOWN, SubmitOutcome.CONFLICT)
        )
        room = MAX_NAMED_CONFLICTS - len(self._submitted.conflicts)
        return Submitted(
            self._spec.batch_id,
            num_added=len(added),
            num_known=len(known),
            num_conflicts=len(conflicts),
            conflicts=tuple(job.custom_id for job in conflicts[:room]),
            num_rejected=sum(bool(job.rejection) for job in (*added, *known)),
        )
