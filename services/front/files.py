"""`/v1/files`: uploads, lists, contents."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.bodies import body_chunks
from slipstream.services.front.call import Call
from slipstream.services.front.file_store import PURPOSES, FileStore, new_file_id
from slipstream.services.front.forms import Form

FORM_BYTES = 64 * 1024
"""Of an upload beside its file."""
BLOCK_BYTES = 256 * 1024
LEAST_LIFE_S, MOST_LIFE_S = 3600, 30 * 86_400
MOST_LISTED = 10_000
ShownT = TypeVar("ShownT")


def store_of(call: Call) -> FileStore:
    """Raises `ApiError` where none is kept."""
    if call.front.files is None:
        raise ApiError("this server keeps no files; start the front with --data FOLDER", status=400, code="not_served")
    return call.front.files


async def create_file(call: Call) -> None:
    """POST /v1/files."""
    store, config = store_of(call), call.front.config
    with await asyncio.to_thread(store.new, call.owner) as file:
        form = Form(call.header("content-type"), file)
        await form.read(body_chunks(call.scope, call.receive, config, config.max_file_bytes + FORM_BYTES))
        fields = form.fields
        purpose = fields.pop("purpose", "")
        if purpose not in PURPOSES:
            raise ApiError(f"purpose must be one of {', '.join(PURPOSES)}", param="purpose")
        expires_s = _expiry(fields)
        if fields:
            name = next(iter(fields))[:64]
            raise ApiError(f"{name!r} is not supported; leave it out", param=name, code="unsupported_parameter")
        if not file.num_bytes:
            raise ApiError("the file is empty", param="file")
        kept = await asyncio.to_thread(file.keep, new_file_id(), form.filename or "file", purpose, expires_s)
    await call.answer(kept.shown())


def _expiry(fields: dict[str, str]) -> int | None:
    anchor, seconds = fields.pop("expires_after[anchor]", ""), fields.pop("expires_after[seconds]", "")
    if not anchor and not seconds:
        return None
    return int(time.time()) + life_s(anchor, int(seconds) if seconds.isascii() and seconds.isdecimal() else None)


def life_s(anchor: Any, seconds: Any, param: str = "expires_after") -> int:
    """How long a file is to be kept. Raises `ApiError`."""
    if anchor != "created_at":
        raise ApiError(f'{param}.anchor must be "created_at"', param=f"{param}.anchor")
    if type(seconds) is not int or not LEAST_LIFE_S <= seconds <= MOST_LIFE_S:
        limits = f"between {LEAST_LIFE_S} and {MOST_LIFE_S}"
        raise ApiError(f"{param}.seconds must be a whole number {limits}", param=f"{param}.seconds")
    return seconds


async def list_files(call: Call) -> None:
    """GET /v1/files."""
    purpose = call.query.get("purpose", "")
    kept = await asyncio.to_thread(store_of(call).list, call.owner, purpose)
    if call.query.get("order", "desc") == "asc":
        kept.reverse()
    page, has_more = listed(call, [file.file_id for file in kept], kept, MOST_LISTED)
    await call.answer(list_of([file.shown() for file in page], has_more))


def listed(call: Call, ids: Sequence[str], items: Sequence[ShownT], most: int) -> tuple[Sequence[ShownT], bool]:
    """The part of a list that the query asks for, and whether there is more. Raises `ApiError`."""
    if call.query.get("order", "desc") not in ("asc", "desc"):
        raise ApiError("order must be asc or desc", param="order")
    text = call.query.get("limit", str(min(most, 10_000)))
    if not (len(text) < 10 and text.isascii() and text.isdecimal() and 1 <= int(text) <= most):
        raise ApiError(f"limit must be between 1 and {most}", param="limit")
    after, start = call.query.get("after"), 0
    if after is not None:
        if after not in ids:
            raise ApiError(f"after: there is no {after[:64]!r} in this list", param="after")
        start = ids.index(after) + 1
    end = start + int(text)
    return items[start:end], end < len(items)


def list_of(shown: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """In OpenAI's form."""
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": has_more}


async def get_file(call: Call) -> None:
    """GET /v1/files/{file_id}."""
    kept = await asyncio.to_thread(store_of(call).get, call.owner, call.params["file_id"])
    await call.answer(kept.shown())


async def delete_file(call: Call) -> None:
    """DELETE /v1/files/{file_id}."""
    await asyncio.to_thread(store_of(call).delete, call.owner, call.params["file_id"])
    await call.answer({"id": call.params["file_id"], "object": "file", "deleted": True})


async def get_content(call: Call) -> None:
    """GET /v1/files/{file_id}/content."""
    store, file_id = store_of(call), call.params["file_id"]
    kept = await asyncio.to_thread(store.get, call.owner, file_id)
    with await asyncio.to_thread(store.open, call.owner, file_id) as file:
        # Whatever a file holds, no browser is to take it for a page.
        safe = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
        await call.begin(200, "application/octet-stream", safe | {"content-length": str(kept.num_bytes)})
        while data := await asyncio.to_thread(file.read, BLOCK_BYTES):
            await call.body(data)
        await call.body(b"", is_last=True)
