"""For those who run it: whether it is alive, whether it can do its work, what it counts, which release it is."""

from slipstream import __version__
from slipstream.services.front.call import Call

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def get_health(call: Call) -> None:
    """GET /health: the process answers."""
    await call.answer({"status": "ok"})


async def get_ready(call: Call) -> None:
    """GET /ready: tries what requests need. 503 while no gateway serves, or the folder of files takes no writes."""
    found = await call.front.readiness.find()
    headers = {} if found.is_ready else {"retry-after": "1", "retry-after-ms": "1000"}
    await call.answer(found.facts, 200 if found.is_ready else 503, headers)


async def get_metrics(call: Call) -> None:
    """GET /metrics."""
    await call.begin(200, TEXT_TYPE)
    await call.body(call.front.figures.text(), is_last=True)


async def get_version(call: Call) -> None:
    """GET /version."""
    await call.answer({"version": __version__})
