"""`python -m bench.guarantees.coupled`: same seed, same text, whatever the draft does; 100 runs through the stack.

Every clip has its own sampling settings and its own seed. It is captioned plainly once, then under pruners, policies,
windows 1 to 16 and with the draft killed midway; every text must be the plain one, token by token.
"""

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bench.captions import Captioned, run_caption
from bench.clips import SHORT_SCENES, held_out_clips
from bench.identity_plan import Setting, coverage, plan_settings
from bench.running import run_to_end, say
from slipstream.rpc.channels import open_channel
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions
from slipstream.stack.local import Stack, StackOptions

KILL_EVERY = 5
"""In every so many runs the draft is killed at a random token."""
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "repetition_penalty": 1.1},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.05},
)


@dataclass
class Killer:
    """Kills the draft once the caption has a draft and as many tokens as it says."""

    pid: int
    at_token: int
    struck: bool = field(default=False, init=False)

    def __call__(self, num_tokens: int, has_draft: bool) -> None:
        if not self.struck and has_draft and num_tokens >= self.at_token:
            self.struck = True
            os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Outcome:
    """One speculative run beside the plain one."""

    setting: Setting
    identical: bool
    killed: bool
    tau: float


class CoupledRuns:
    """Runs of one clip after another on one stack."""

    def __init__(self, stack: Stack, channel: grpc.aio.Channel, num_frames: int, max_new_tokens: int) -> None:
        self._stack = stack
        self._channel = channel
        self._base: dict[str, Any] = {"num_frames": num_frames, "max_new_tokens": max_new_tokens, "gate": False}

    async def run_clip(self, clip: Path, number: int, settings: Sequence[Setting]) -> list[Outcome]:
        """The plain caption of the clip, then one for every setting."""
        rng = random.Random(number)
        sampling = SAMPLINGS[number % len(SAMPLINGS)] | {"seed": rng.randrange(2**63)}
        plain = await self._caption(clip, sampling | {"method": "autoregressive"})
        outcomes = []
        for index, setting in enumerate(settings):
            kill_at = rng.randint(1, len(plain.token_ids) // 2) if index % KILL_EVERY == KILL_EVERY - 1 else None
            outcomes.append(await self._run(clip, sampling, setting, kill_at, plain))
        return outcomes

    async def _run(
        self, clip: Path, sampling: dict[str, Any], setting: Setting, kill_at: int | None, plain: Captioned
    ) -> Outcome:
        draft = self._stack.processes["draft"]
        starts = draft.starts
        killer = Killer(draft.pid, kill_at if kill_at is not None else sys.maxsize)
        options = sampling | {
            "method": "parallel",
            "pruner": setting.pruner,
            "alpha": setting.alpha,
            "policy": setting.policy,
            "max_window": setting.max_window,
            "guidance": setting.guidance,
            "positions": setting.positions,
        }
        captioned = await self._caption(clip, options, killer)
        if killer.struck:
            await self._stack.wait_started("draft", starts + 1)
        identical = captioned.token_ids == plain.token_ids
        return Outcome(setting, identical, killer.struck, captioned.summary.speculation.tau)

    async def _caption(self, clip: Path, options: dict[str, Any], killer: Killer | None = None) -> Captioned:
        message = CaptionOptions(**self._base, **options)
        return await run_caption(self._channel, clip, message, killer or (lambda num_tokens, has_draft: None))


async def measure_coupled(num_clips: int = 10, runs_per_clip: int = 10, num_frames: int = 16) -> dict[str, Any]:
    """How many runs gave the plain text of their seed."""
    plans = plan_settings([runs_per_clip] * num_clips, seed=0)
    outcomes: list[Outcome] = []
    say("coupled sampling: starting the stack")
    async with Stack(StackOptions(threads=1), report=say) as stack, open_channel(stack.gateway_address) as channel:
        runs = CoupledRuns(stack, channel, num_frames, max_new_tokens=160)
        for number, clip in enumerate(held_out_clips(num_clips, SHORT_SCENES)):
            outcomes += await runs.run_clip(clip, number, plans[number][1:])
            same = sum(outcome.identical for outcome in outcomes)
            say(f"coupled sampling: clip {number + 1} of {num_clips}: {same} of {len(outcomes)} identical")
    counts = coverage(outcome.setting for outcome in outcomes)
    return {
        "coupled_identical": f"{sum(outcome.identical for outcome in outcomes)}/{len(outcomes)}",
        "drafts_killed": sum(outcome.killed for outcome in outcomes),
        "coverage": {name: counts[name] for name in ("pruner", "alpha", "max_window", "policy", "positions")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.guarantees.coupled", description=__doc__)
    parser.add_argument("--clips", type=int, default=10)
    parser.add_argument("--runs", type=int, default=10, help="speculative runs of every clip")
    parser.add_argument("--frames", type=int, default=16)
    given = parser.parse_args()
    document = run_to_end(measure_coupled(given.clips, given.runs, given.frames))
    print(json.dumps(document))
    same, total = document["coupled_identical"].split("/")
    sys.exit(0 if same == total else 1)


if __name__ == "__main__":
    main()
