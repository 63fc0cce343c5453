"""`/v1/batches`: in OpenAI's form, on the archive's queue."""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from slipstream.archive.messages import Batch
from slipstream.archive.queue import BatchState
from slipstream.errors import SlipstreamError
from slipstream.services.front.api_errors import ApiError, about
from slipstream.services.front.batch_forms import ENDPOINTS
from slipstream.services.front.batch_records import Ending, HttpBatch, Stage
from slipstream.services.front.batches import Batches
from slipstream.services.front.bodies import json_body, read_json
from slipstream.services.front.call import Call
from slipstream.services.front.chat_request import read_metadata
from slipstream.services.front.files import life_s, list_of, listed, store_of

MOST_LISTED = 100
MAX_WINDOW_S = 7 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_KNOWN = {"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"}


def batches_of(call: Call) -> Batches:
    """Raises `ApiError` where there are none."""
    store_of(call)
    assert call.front.batches is not None
    return call.front.batches


async def create_batch(call: Call) -> None:
    """POST /v1/batches."""
    batches, store, config = batches_of(call), store_of(call), call.front.config
    with json_body(config) as body, call.front.spooled.held(0) as take:
        said = await read_json(call.scope, call.receive, config, body, take)
    if body.media:
        raise ApiError("a batch is opened without media, and something here is a data: URL in base64")
    async with call.while_there():
        batch = read_batch(said, call.header("idempotency-key"), call.owner)
        with about("input_file_id"):
            kept = await asyncio.to_thread(store.get, call.owner, batch.input_file_id)
        if kept.purpose != "batch":
            raise ApiError('the file was uploaded with another purpose than "batch"', param="input_file_id")
        batch = await batches.open(call.owner, call.token, batch)
    await call.answer(shown(batch, None, ("", 0)))


def read_batch(said: Any, idempotency_key: str, owner: str) -> HttpBatch:
    """The batch that is asked for. Raises `ApiError`."""
    if not isinstance(said, dict):
        raise ApiError("the body must be an object")
    for name, value in said.items():
        if name not in _KNOWN and value is not None:
            raise ApiError(
                f"{name[:64]!r} is not supported; leave it out", param=name[:64], code="unsupported_parameter"
            )
    endpoint = said.get("endpoint")
    if not isinstance(endpoint, str) or endpoint not in ENDPOINTS:
        raise ApiError(f"endpoint must be {' or '.join(ENDPOINTS)}", param="endpoint")
    file_id, window = said.get("input_file_id"), said.get("completion_window")
    if not isinstance(file_id, str):
        raise ApiError("input_file_id must be the id of a file", param="input_file_id")
    found = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    window_s = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < window_s <= MAX_WINDOW_S:
        raise ApiError('completion_window must be such as "24h", at most "7d"', param="completion_window")
    life = said.get("output_expires_after")
    if life is not None and not (isinstance(life, dict) and set(life) <= {"anchor", "seconds"}):
        raise ApiError("output_expires_after must have anchor and seconds", param="output_expires_after")
    now = int(time.time())
    return HttpBatch(
        batch_id=f"batch_{_new_id(idempotency_key, owner, said)}",
        input_file_id=file_id,
        completion_window=str(window),
        created_s=now,
        expires_s=now + window_s,
        metadata=read_metadata(said.get("metadata")),
        endpoint=endpoint,
        output_life_s=life_s(life.get("anchor"), life.get("seconds"), "output_expires_after") if life else None,
    )


def _new_id(idempotency_key: str, owner: str, said: Mapping[str, Any]) -> str:
    """The same for the same request that is made again with the same key."""
    if not idempotency_key:
        return secrets.token_hex(16)
    text = repr((idempotency_key, owner, sorted(said.items(), key=str)))
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:32]


async def get_batch(call: Call) -> None:
    """GET /v1/batches/{batch_id}."""
    async with call.while_there():
        shown_now = await _shown_now(call, call.params["batch_id"])
    await call.answer(shown_now)


async def cancel_batch(call: Call) -> None:
    """POST /v1/batches/{batch_id}/cancel."""
    async with call.while_there():
        await batches_of(call).end(call.owner, call.params["batch_id"])
        shown_now = await _shown_now(call, call.params["batch_id"])
    await call.answer(shown_now)


async def list_batches(call: Call) -> None:
    """GET /v1/batches."""
    found = await asyncio.to_thread(batches_of(call).records.list, call.owner)
    page, has_more = listed(call, [batch.batch_id for batch in found], found, MOST_LISTED)
    async with call.while_there():
        shown_now = await asyncio.gather(*(_shown_in_list(call, batch) for batch in page))
    await call.answer(list_of(shown_now, has_more))


async def _shown_in_list(call: Call, batch: HttpBatch) -> dict[str, Any]:
    """What is on record of one that cannot be looked up: the others are shown all the same."""
    try:
        return await _shown_now(call, batch.batch_id)
    except (ApiError, SlipstreamError):
        ending = await asyncio.to_thread(batches_of(call).records.ending, call.owner, batch.batch_id)
        return shown(batch, None, ending)


async def _shown_now(call: Call, batch_id: str) -> dict[str, Any]:
    batches = batches_of(call)
    batch, jobs = await batches.state(call.owner, call.token, batch_id)
    ending = await asyncio.to_thread(batches.records.ending, call.owner, batch_id)
    return shown(batch, jobs, ending)


def shown(batch: HttpBatch, jobs: Batch | None, ending: tuple[str, int]) -> dict[str, Any]:
    """In OpenAI's form."""
    status = _status(batch, jobs, ending[0])
    ended = batch.ended_s if status in ("completed", "failed", "expired", "cancelled") else None
    counts = {"total": batch.num_lines, "completed": batch.num_done, "failed": batch.num_failed}
    if batch.stage is Stage.HANDED_IN:
        counts |= {"failed": batch.num_refused}
        if jobs is not None:
            counts |= {
                "completed": jobs.counts.done,
                "failed": batch.num_refused + jobs.counts.failed + jobs.counts.dead,
            }
    is_cancelled = (batch.ending or ending[0]) == Ending.CANCELLED and status in ("cancelling", "cancelled")
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": list(batch.errors)} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": status,
        "output_file_id": batch.file_id("output") if batch.has_output else None,
        "error_file_id": batch.file_id("errors") if batch.has_errors else None,
        "created_at": batch.created_s,
        "in_progress_at": batch.handed_in_s,
        "expires_at": batch.expires_s,
        "finalizing_at": (jobs and int(jobs.ended_s)) or ended if status in ("finalizing", "completed") else None,
        "completed_at": ended if status == "completed" else None,
        "failed_at": ended if status == "failed" else None,
        "expired_at": ended if status == "expired" else None,
        "cancelling_at": ending[1] if is_cancelled else None,
        "cancelled_at": ended if status == "cancelled" else None,
        "request_counts": counts,
        "metadata": dict(batch.metadata) or None,
    }


def _status(batch: HttpBatch, jobs: Batch | None, ending: str) -> str:
    if batch.stage is Stage.FAILED:
        return "failed"
    if batch.stage is Stage.ENDED:
        return batch.ending or "completed"
    if ending == Ending.CANCELLED:
        return "cancelling"
    if batch.stage is Stage.VALIDATING:
        return "validating"
    is_over = jobs.state in (BatchState.COMPLETED, BatchState.CANCELLED) if jobs else False
    return "finalizing" if is_over or ending else "in_progress"
