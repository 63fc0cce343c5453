"""A draft that lies in every way there is, beside a plain caption: same texts, and nobody waits for it.

Every lie meets a gateway that has not heard of it. Its captions take turns with those of a gateway whose draft is not
there, as the machine's speed drifts; what counts is the median of the ratios.
"""

import asyncio
import contextlib
import math
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import SHORT_SCENES, held_out_clips, run_caption, say
from bench.guarantees.draft_faults import endless_copy
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1 import common_pb2, target_pb2_grpc
from slipstream.stack.local import POCKET_DIR, Stack, StackOptions
from tests.faults.fake_draft import LIES, FakeDraft
from tests.support.processes import running

ROUNDS, MORE_ROUNDS = 5, 15
MAX_SLOWDOWN = 1.1
METHODS = ("slipstream", "autoregressive")
"""The caption that the draft lies to, and the one beside it."""
TIMEOUT_S = 120.0


async def run_rogue() -> dict[str, Any]:
    options = StackOptions(endless_copy(POCKET_DIR / "target"), None, threads=1)
    clip = held_out_clips(1, SHORT_SCENES)[0]
    with tempfile.TemporaryDirectory(prefix="slipstream-rogue-") as name:
        folder = Path(name)
        async with Stack(options, report=say) as stack:
            async with open_channel(stack.processes["target"].address) as channel:
                model = await target_pb2_grpc.TargetStub(channel).GetModel(common_pb2.GetModelRequest())
            async with FakeDraft(folder, model) as draft:
                return await _Rogue(stack.processes["target"].address, draft, folder, clip).run()


class _Rogue:
    def __init__(self, target: str, draft: FakeDraft, folder: Path, clip: Path) -> None:
        self._target = target
        self._draft = draft
        self._folder = folder
        self._clip = clip
        self._texts: set[tuple[int, ...]] = set()

    async def run(self) -> dict[str, Any]:
        slowdowns = {}
        async with self._gateway("alone", f"unix:{self._folder}/nobody.sock") as alone:
            await self._seconds(alone)
            for lie in LIES:
                slowdowns[lie] = await self._measure(alone, lie)
                say(f"rogue-draft: {lie}: {slowdowns[lie]}")
        slowest = max(max(pair.values()) for pair in slowdowns.values())
        return {
            "passed": slowest <= MAX_SLOWDOWN and len(self._texts) == 1,
            "identical": len(self._texts) == 1,
            "max_slowdown": slowest,
            "max_slowdown_beside": max(pair["autoregressive"] for pair in slowdowns.values()),
            "slowdowns": slowdowns,
        }

    async def _measure(self, alone: AsyncCaptioner, lie: str) -> dict[str, float]:
        """How much slower each of the two captions is. A figure above the limit is looked at more closely."""
        self._draft.behaviour = LIES[lie]
        slowdowns, rounds = [math.inf], list[list[float]]()
        async with self._gateway(lie.replace(" ", "-"), self._draft.address) as rogue:
            for limit in (ROUNDS, MORE_ROUNDS):
                while max(slowdowns) > MAX_SLOWDOWN and len(rounds) < limit:
                    pairs = zip(await self._seconds(alone), await self._seconds(rogue), strict=True)
                    rounds.append([lied / well for well, lied in pairs])
                slowdowns = [round(median(ratios), 3) for ratios in zip(*rounds, strict=True)]
        return dict(zip(METHODS, slowdowns, strict=True))

    @contextlib.asynccontextmanager
    async def _gateway(self, name: str, draft: str) -> AsyncIterator[AsyncCaptioner]:
        flags = ("--target", self._target, "--draft", draft)
        async with running("gateway", self._folder / name, *flags) as process, connect_async(process.address) as client:
            yield client

    async def _seconds(self, captioner: AsyncCaptioner) -> list[float]:
        """What each of the two takes from its arrival to its last token, as their gateway saw it."""
        asked = [CaptionOptions(num_frames=16, max_new_tokens=160, method=method) for method in METHODS]
        async with asyncio.timeout(TIMEOUT_S):
            both = await asyncio.gather(*(run_caption(captioner, self._clip, options) for options in asked))
        self._texts.update(one.token_ids for one in both)
        return [one.caption.timings.total_s for one in both]
