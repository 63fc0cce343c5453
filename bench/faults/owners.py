"""One tenant hands in hundreds of jobs, another one and then forty: they take turns."""

import tempfile
from pathlib import Path
from typing import Any

from bench.common import say
from bench.faults.batches import list_jobs, submit, wait_ended
from slipstream import AsyncCaptioner, connect_async
from slipstream.rpc.security import new_token
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.workload import make_workload

NUM_MANY, NUM_FEW = 400, 40
NUM_TOKENS = 8
WARM = 6
"""Jobs of the first tenant that are done before the second one comes."""
TIMEOUT_S = 300.0
MOST_BEFORE_THE_FIRST = 6
"""Jobs of others that a first job may wait for: one turn, and what runs already."""
FAIR = (0.8, 1.25)


async def run_owners() -> dict[str, Any]:
    """`owners_share`: jobs of the second tenant for each one of the first, while both have work."""
    tokens = {owner: new_token(owner) for owner in ("many", "few")}
    with tempfile.TemporaryDirectory(prefix="slipstream-faults-") as folder:
        workload = make_workload(Path(folder) / "work", NUM_MANY + 1 + NUM_FEW, num_tokens=NUM_TOKENS)
        accepted = Path(folder) / "tokens"
        accepted.write_text("".join(f"{line}\n" for _, line in tokens.values()))
        flags = {"gateway": ("--tokens", str(accepted))}
        options = ClusterOptions(
            workload.pair.target, workload.pair.draft, workload.video_root, gateways=1, slots=2, flags=flags
        )
        async with Cluster(options, say) as cluster:
            address = cluster.processes["gateway-0"].address
            async with (
                connect_async(address, token=tokens["many"][0]) as many,
                connect_async(address, token=tokens["few"][0]) as few,
            ):
                items = workload.items
                await submit(many, "many", items[:NUM_MANY])
                await _wait_done(many, WARM)
                waited_for = []
                for key, own in (("one", items[NUM_MANY : NUM_MANY + 1]), ("forty", items[NUM_MANY + 1 :])):
                    await submit(few, key, own)
                    batch = await wait_ended([few], key, TIMEOUT_S)
                    ends = [job.ended_s for job in await list_jobs(many, "many")]
                    waited_for.append(sum(batch.created_s <= ended <= batch.ended_s for ended in ends))
                    say(f"owners: {key}: {waited_for[-1]} of the other tenant's jobs were done meanwhile")
    share = NUM_FEW / max(waited_for[1], 1)
    return {
        "passed": waited_for[0] <= MOST_BEFORE_THE_FIRST and FAIR[0] <= share <= FAIR[1],
        "owners_share": round(share, 3),
        "before_the_first": waited_for[0],
    }


async def _wait_done(captioner: AsyncCaptioner, number: int) -> None:
    async for batch in captioner.archive.batch("many").watch():
        if batch.counts.done >= number:
            return
