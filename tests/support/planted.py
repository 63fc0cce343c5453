"""Results of an archive that somebody has altered, as who may write to its store or to an export could."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from slipstream.archive.records import read_result, write_result


@asynccontextmanager
async def planted_text(redis_url: str, job_id: str, text: str, *, with_receipt: bool = True) -> AsyncIterator[None]:
    """Within, the store has this text for a job that is done, with a digest of the result that fits; and unless it is
    told otherwise, with the text's own in the receipt. Then it is as before."""
    async with Redis.from_url(redis_url, decode_responses=True) as redis:
        (key,) = [key async for key in redis.scan_iter(f"*{job_id}*") if await redis.type(key) == "hash"]
        before: dict[Any, Any] = await redis.hgetall(key)
        caption, receipt = read_result(before["result"])
        if with_receipt:
            receipt = replace(receipt, text_sha256=_sha256(text))
        result = write_result(replace(caption, text=text), receipt)
        await redis.hset(key, mapping={"result": result, "result_sha256": _sha256(result)})
        try:
            yield
        finally:
            await redis.hset(key, mapping=before)


def forge(holder: dict[str, Any], text: str) -> None:
    """The same for a line of an export, or a segment in one."""
    holder["text"] = text
    holder["receipt"]["text_sha256"] = _sha256(text)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
