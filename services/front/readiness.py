"""Whether the front can do its work: tried, not guessed, and no oftener than once in a while, whoever asks."""

import asyncio
import tempfile
from dataclasses import dataclass
from typing import Any

from slipstream.services.front.gateways import Gateways

KEPT_S = 1.0
"""How long what was found is told again. Nobody must be known to ask, and each look opens connections and a file."""


@dataclass(frozen=True)
class Found:
    """What a look has found."""

    is_ready: bool
    facts: dict[str, Any]


class Readiness:
    """Looks at the gateways and at the folder of files; those who ask meanwhile share one look."""

    def __init__(self, gateways: Gateways, folder: str) -> None:
        self._gateways, self._folder = gateways, folder
        self._look: asyncio.Task[Found] | None = None
        self._kept_until = 0.0

    async def find(self) -> Found:
        """What there is now, or was within the last second."""
        if self._look is None or (self._look.done() and asyncio.get_running_loop().time() >= self._kept_until):
            self._look = asyncio.create_task(self._found())
        return await asyncio.shield(self._look)  # who goes away takes nobody's answer along

    async def _found(self) -> Found:
        gateways, writes = await asyncio.gather(self._gateways.health(), asyncio.to_thread(_try_write, self._folder))
        can_caption = any(answer["gateway"] == "SERVING" for answer in gateways.values())
        can_batch = any(answer["archive"] == "SERVING" for answer in gateways.values()) and writes == "ok"
        is_ready = can_caption and writes in ("ok", "none")
        self._kept_until = asyncio.get_running_loop().time() + KEPT_S
        return Found(
            is_ready,
            {
                "status": "ready" if is_ready else "not ready",
                "batches": can_batch,
                "data": writes,
                "gateways": [answer for _, answer in sorted(gateways.items())],
            },
        )


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
