"""The target, then the gateway, killed again and again in the middle of captions: each must end as if undisturbed."""

import random
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from bench.common import say
from slipstream import AsyncCaptioner, Caption, CaptionOptions, RemotePath
from slipstream.archive.messages import BatchItem
from slipstream.errors import SlipstreamError
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.workload import make_workload

KILLS = {"target": 20, "gateway-0": 10}
NUM_TOKENS, LATEST_KILL = 120, 80
"""Tokens of a caption, and the most of them that come before the blow."""


async def run_resume(seed: int) -> dict[str, Any]:
    """How many captions whose target or gateway was killed were those of an undisturbed stack."""
    order, identical, resume_s = random.Random(seed), Counter[str](), [0.0]
    with tempfile.TemporaryDirectory(prefix="slipstream-faults-") as folder:
        workload = make_workload(Path(folder) / "work", sum(KILLS.values()), num_tokens=NUM_TOKENS)
        options = ClusterOptions(workload.pair.target, workload.pair.draft, workload.video_root, gateways=1, slots=0)
        items = iter(workload.items)
        async with Cluster(options, say) as cluster, cluster.captioner() as captioner:
            for victim, number in KILLS.items():
                for item in islice(items, number):
                    expected = await _caption(captioner, item, cluster)
                    try:
                        caption = await _caption(captioner, item, cluster, victim, order.randint(1, LATEST_KILL))
                    except SlipstreamError as error:
                        say(f"resume: {victim} killed: {error}")
                        continue
                    times, is_same = caption.timings.resumptions, _said(caption) == _said(expected)
                    identical[victim] += times == 1 and is_same
                    resume_s.append(caption.timings.resume_s)
                    if times != 1 or not is_same:
                        text = "the same" if is_same else "ANOTHER"
                        say(f"resume: {victim} killed: resumed {times} times, {text} text")
    return {
        "passed": identical == Counter(KILLS),
        "resumed_identical": identical.total(),
        "killed": sum(KILLS.values()),
        "identical": dict(identical),
        "longest_resume_s": round(max(resume_s), 2),
    }


async def _caption(
    captioner: AsyncCaptioner, item: BatchItem, cluster: Cluster, victim: str = "", kill_at: int = 0
) -> Caption:
    stream = captioner.stream(RemotePath(item.source), options=CaptionOptions.from_mapping(item.caption))
    num_tokens = 0
    async for text in stream:
        num_tokens += len(text.tokens)
        if victim and num_tokens >= kill_at:
            cluster.kill(victim)
            victim = ""
    return stream.caption


def _said(caption: Caption) -> tuple[object, ...]:
    return [token.token_id for token in caption.tokens], caption.text, caption.finish_reason, caption.num_tokens
