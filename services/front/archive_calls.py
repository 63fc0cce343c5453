"""`/archive/...`: the archive's batches and jobs as the page shows them. The gateway keeps owners apart: who calls is
sent on, and what it answers is the caller's own."""

import asyncio
from collections import Counter
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from slipstream.archive.messages import Batch, Job, JobPart, Receipt, prompt_of
from slipstream.archive.quality import UNKNOWN_BATCH, BatchNorms, Norms, marks_of
from slipstream.archive.queue import JobState
from slipstream.archive.subtitles import make_cues
from slipstream.messages import Caption
from slipstream.service_info import GatewayInfo
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.batch_records import is_of_http
from slipstream.services.front.call import Call
from slipstream.services.front.completions import Completion, Written
from slipstream.services.front.gateways import short_name

MOST_BATCHES, MOST_READ, MOST_NAMED = 100, 5000, 3
"""Batches that are listed; jobs whose errors are grouped; items that are named of one error."""


async def list_archive_batches(call: Call) -> None:
    """GET /archive/batches: the latest first."""
    async with call.while_there():
        found = await call.front.gateways.archive(call.token).list_batches(MOST_BATCHES)
    await call.answer({"batches": [shown_batch(batch) for batch in found]})


async def get_archive_batch(call: Call) -> None:
    """GET /archive/batches/{batch}."""
    async with call.while_there():
        batch = await call.front.gateways.archive(call.token).get(call.params["batch"])
    await call.answer(shown_batch(batch))


async def list_archive_gateways(call: Call) -> None:
    """GET /archive/gateways: how each gateway stands: its gate, its worker, its store."""
    async with call.while_there():
        found = await call.front.gateways.all_info(call.token)
    await call.answer({"gateways": [shown_gateway(info) for info in found]})


async def list_archive_jobs(call: Call) -> None:
    """GET /archive/batches/{batch}/jobs: a page of them, of `states` or of all."""
    states = [_state(name) for name in call.query.get("states", "").split(",") if name]
    async with call.while_there():
        archive = call.front.gateways.archive(call.token)
        page = await archive.job_page(call.params["batch"], states, call.query.get("page", ""))
        norms = UNKNOWN_BATCH
        if any(job.caption for job in page.jobs):
            norms = await call.front.norms.of(archive, call.owner, call.params["batch"])
        # Loops are looked for in every text: some milliseconds for a long one, beside streams that must go on.
        jobs = await asyncio.to_thread(lambda: [shown_job(job, norms) for job in page.jobs])
    await call.answer({"jobs": jobs, "next_page": page.next_page_token or None})


async def list_archive_parts(call: Call) -> None:
    """GET /archive/batches/{batch}/jobs/{job}/parts: pages of a document or segments of a film, some at a time."""
    batch = call.params["batch"]
    async with call.while_there():
        archive = call.front.gateways.archive(call.token)
        page = await archive.part_page(batch, call.params["job"], call.query.get("page", ""))
        norms = await call.front.norms.of(archive, call.owner, batch)
        parts = await asyncio.to_thread(lambda: [shown_part(part, norms) for part in page.parts])
    await call.answer({"parts": parts, "next_page": page.next_page_token or None})


async def list_archive_errors(call: Call) -> None:
    """GET /archive/batches/{batch}/errors: what failed, by message."""
    counted: Counter[tuple[str, str, str]] = Counter()
    named: dict[tuple[str, str, str], list[str]] = {}
    num_read = 0
    async with call.while_there():
        archive = call.front.gateways.archive(call.token)
        async with aclosing(archive.jobs(call.params["batch"], (JobState.FAILED, JobState.DEAD))) as jobs:
            async for job in jobs:
                what = (job.state.value, job.error_code, job.error)
                counted[what] += 1
                if len(names := named.setdefault(what, [])) < MOST_NAMED:
                    names.append(job.custom_id)
                if (num_read := num_read + 1) >= MOST_READ:
                    break
    groups = [
        {"state": what[0], "code": what[1], "message": what[2], "count": number, "such_as": named[what]}
        for what, number in counted.most_common()
    ]
    await call.answer({"errors": groups, "is_whole": num_read < MOST_READ})


async def cancel_archive_batch(call: Call) -> None:
    """POST /archive/batches/{batch}/cancel."""
    async with call.while_there():
        batch = await call.front.gateways.archive(call.token).cancel(call.params["batch"])
    await call.answer(shown_batch(batch))


async def retry_archive_batch(call: Call) -> None:
    """POST /archive/batches/{batch}/retry: what was given up, and with `failed=true` what failed."""
    wanted = call.query.get("failed", "false")
    if wanted not in ("true", "false"):
        raise ApiError("failed must be true or false", param="failed")
    async with call.while_there():
        archive = call.front.gateways.archive(call.token)
        if not _may_retry(await archive.get(call.params["batch"])):
            why = "the batch has ended, and no line of its files would tell of what runs again"
            raise ApiError(f"{why}: hand those requests in anew", status=409, param="batch", code="batch_ended")
        number = await archive.retry(call.params["batch"], wanted == "true")
    await call.answer({"retried": number})


def _state(name: str) -> JobState:
    try:
        return JobState(name)
    except ValueError:
        raise ApiError(f"states must be of {', '.join(JobState)}", param="states") from None


def shown_gateway(info: GatewayInfo | None) -> dict[str, Any]:
    """A gateway as JSON; where it stands is nobody's business."""
    if info is None:
        return {"answers": False}
    return {
        "answers": True,
        "version": info.version,
        "has_draft": bool(info.draft_model),
        "gates": {"open": info.gates_open, "closed": info.gates_closed},
        "archive": asdict(info.archive) if info.archive else None,
    }


def shown_batch(batch: Batch) -> dict[str, Any]:
    """A batch as JSON."""
    said = {"state": batch.state.value, "is_ended": batch.is_ended, "may_retry": _may_retry(batch)}
    return asdict(batch) | said


def _may_retry(batch: Batch) -> bool:
    """What runs again of a batch of /v1/batches that has ended would be in none of its files."""
    return not (batch.is_ended and is_of_http(batch.key))


def shown_job(job: Job, norms: BatchNorms) -> dict[str, Any]:
    """A job as JSON, with its text, what is odd about it, the cues of its track, and what speculation did."""
    plain = {name: value for name, value in vars(job).items() if isinstance(value, str | int | float)}
    shown: dict[str, Any] = plain | {"state": job.state.value, "kind": job.kind.value}
    if job.caption is not None:
        duration_s = job.caption.video.duration_s
        completion = Completion("", short_name(job.receipt.target.model_id) if job.receipt else "", int(job.ended_s))
        shown |= shown_text(job.caption, norms.to(prompt_of(job))) | {
            "cues": [asdict(cue) for cue in make_cues(job.caption.text, duration_s)] if duration_s else [],
            "figures": completion.whole([Written(job.caption.text, [job.caption])]) | {"choices": []},
            "gate": {"start": job.caption.speculation.gate_start, "reason": job.caption.speculation.gate_reason},
        }
    if job.receipt is not None:
        shown["receipt"] = shown_receipt(job.receipt)
    return shown


def shown_part(part: JobPart, norms: BatchNorms) -> dict[str, Any]:
    """A page or segment as JSON."""
    shown = {"number": part.number, "page": part.page, "error": part.error, "segment": None}
    if part.segment is not None:
        shown |= {"segment": asdict(part.segment), "error": part.error or part.segment.error}
    if part.caption is None:
        return shown
    return shown | shown_text(part.caption, norms.to(prompt_of(part)))


def shown_text(caption: Caption, norms: Norms) -> dict[str, Any]:
    """A text with its marks: `quality`, none where it was taken from elsewhere or left out; `marks` of the pictures."""
    is_own = caption.shared is None and not caption.skipped
    return {
        "text": caption.text,
        "quality": marks_of(caption, norms) if is_own else (),
        "marks": caption.video.marks,
        "shared": asdict(caption.shared) if caption.shared else None,
        "skipped": caption.skipped,
    }


def shown_receipt(receipt: Receipt) -> dict[str, Any]:
    """A receipt as JSON; where models stand is nobody's business."""
    shown = asdict(receipt)
    for model in filter(None, (shown["target"], shown["draft"])):
        model["model_id"] = short_name(model["model_id"])
    return shown
