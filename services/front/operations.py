"""For those who run it: whether it is alive, whether it can do its work, what it counts, which release it is."""

import asyncio
import tempfile

from slipstream import __version__
from slipstream.services.front.call import Call

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def get_health(call: Call) -> None:
    """GET /health: the process answers."""
    await call.answer({"status": "ok"})


async def get_ready(call: Call) -> None:
    """GET /ready: tries what requests need. 503 while no gateway serves, or the folder of files takes no writes."""
    front = call.front
    gateways, writes = await asyncio.gather(front.gateways.health(), asyncio.to_thread(_try_write, front.config.data))
    can_caption = any(answer["gateway"] == "SERVING" for answer in gateways.values())
    can_batch = any(answer["archive"] == "SERVING" for answer in gateways.values()) and writes == "ok"
    is_ready = can_caption and writes in ("ok", "none")
    facts = {"status": "ready" if is_ready else "not ready", "batches": can_batch, "data": writes}
    shown = [answer for _, answer in sorted(gateways.items())]
    headers = {} if is_ready else {"retry-after": "1", "retry-after-ms": "1000"}
    await call.answer(facts | {"gateways": shown}, 200 if is_ready else 503, headers)


async def get_metrics(call: Call) -> None:
    """GET /metrics."""
    await call.begin(200, TEXT_TYPE)
    await call.body(call.front.figures.text(), is_last=True)


async def get_version(call: Call) -> None:
    """GET /version."""
    await call.answer({"version": __version__})


def _try_write(folder: str) -> str:
    if not folder:
        return "none"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"ready")
            file.flush()
    except OSError as error:
        return error.strerror or "not writable"
    return "ok"
