"""One draft for several targets: the real services at the pace of other devices, one caption a target at a time.

Every target has a gateway of its own, and all gateways have the same draft. What is measured: decoding of each target
over its own plain decoding, and what that is a device, beside as many devices with plain targets.
"""

import asyncio
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common import Captioned, held_out_clips, machine_facts, make_parser, run_caption, run_to_end, say
from bench.output import finish
from bench.replay.rows import LATE, TABLES, Replay, open_replay, replaying
from bench.tables import print_rows
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
from slipstream.speculation.pacing import CostModel, DecayedMean
from slipstream.speculation.placement import TARGETS_A_DRAFT, MeasuredCaptions, placements
from slipstream.stack.local import FRESH, Stack, StackOptions

ALPHA, MAX_WINDOW = 0.9, 24
METHODS = ("autoregressive", "slipstream")
NOTE = "REPLAY: the times are those of the table, not of this machine; tau is the pocket models' own"


async def measure(given: Namespace, folder: Path) -> dict[str, Any]:
    """Every table in turn. `folder` is for tables without prefills."""
    clips, tables = held_out_clips(given.clips), []
    for path in given.tables:
        replay = open_replay(path, given.speed).without_prefill(folder)
        rows = [await _run(replay, number, clips, given) for number in given.targets]
        tables.append({"table": replay.name, "speed": replay.speed, "rows": rows})
    return {"replay": True, "note": NOTE, "tokens": given.tokens, "tables": tables, "machine": machine_facts()}


async def _run(replay: Replay, num_targets: int, clips: Sequence[Path], given: Namespace) -> dict[str, Any]:
    say(f"REPLAY of {replay.name} at speed {replay.speed:.3f}: one draft, {num_targets} targets")
    async with AsyncExitStack() as opened:
        captioners = await _open(replay, num_targets, opened)
        asked = CaptionOptions(num_frames=given.frames, alpha=ALPHA, max_window=MAX_WINDOW, gate=False)
        found: dict[str, list[list[Captioned]]] = {}
        for method in METHODS:
            options = replace(asked, method=method, max_new_tokens=given.tokens)
            found[method] = [await _at_once(captioners, clip, options) for clip in clips]
    plain, drafted = ([one for at_once in found[method] for one in at_once] for method in METHODS)
    return _row(replay, num_targets, plain, drafted)


async def _open(replay: Replay, num_targets: int, opened: AsyncExitStack) -> list[AsyncCaptioner]:
    """One captioner a target; all have the first one's draft."""
    options = replaying(StackOptions(threads=1, extra_flags=FRESH), replay.path, replay.speed)
    first = await opened.enter_async_context(Stack(options))
    flags = {**options.extra_flags, "gateway": (*FRESH["gateway"], "--draft", first.processes["draft"].address)}
    other = replace(options, draft_model=None, extra_flags=flags)
    stacks = [first] + [await opened.enter_async_context(Stack(other)) for _ in range(num_targets - 1)]
    return [await opened.enter_async_context(connect_async(stack.gateway_address)) for stack in stacks]


async def _at_once(captioners: Sequence[AsyncCaptioner], clip: Path, options: CaptionOptions) -> list[Captioned]:
    return list(await asyncio.gather(*(run_caption(captioner, clip, options) for captioner in captioners)))


def _row(replay: Replay, num_targets: int, plain: Sequence[Captioned], drafted: Sequence[Captioned]) -> dict[str, Any]:
    pairs = list(zip(plain, drafted, strict=True))
    decoding = statistics.median(ours.caption.decoding_rate / own.caption.decoding_rate for own, ours in pairs)
    told = [ours.caption.speculation for ours in drafted]
    draft_pass_s = replay.speed * statistics.median(each.draft_pass_s for each in told)
    return {
        "targets": num_targets,
        "decoding": round(decoding, 3),
        "foreseen": round(_foreseen(replay, num_targets, statistics.median(each.tau for each in told)), 3),
        "a_device": round(decoding * num_targets / (num_targets + 1), 3),
        "least": round(min(ours.caption.decoding_rate / own.caption.decoding_rate for own, ours in pairs), 3),
        "tau": round(statistics.median(each.tau for each in told), 3),
        "T_q": round(draft_pass_s, 4),
        "late": draft_pass_s > LATE * replay.draft.pass_s(ALPHA, num_targets - 1),
        "identical": f"{sum(own.token_ids == ours.token_ids for own, ours in pairs)}/{len(pairs)}",
    }


def _foreseen(replay: Replay, num_targets: int, tau: float) -> float:
    """Decoding over plain, as `slipstream info --advise` would say from the table's times."""
    costs = CostModel(plain_token_s=DecayedMean(replay.target.pass_s(1)), _accepted=tau, _judged=1.0)
    for window_len in range(MAX_WINDOW + 1):
        costs.target_pass_s.observe(window_len, replay.target.pass_s(window_len + 1))
    measured = MeasuredCaptions(costs, {num_targets: replay.draft.pass_s(ALPHA, num_targets - 1)}, 0.0, 1.0)
    [found] = placements(measured, MAX_WINDOW, [num_targets])
    return found.decoding_at_least


def main(argv: Sequence[str]) -> None:
    flags: dict[str, Any] = {"tables": ([TABLES / "7b-72b.json", TABLES / "0.5b-7b.json"], "files of tables")}
    flags |= {"targets": (list(TARGETS_A_DRAFT), "that share the draft"), "clips": 3, "frames": 16, "tokens": 96}
    flags["speed"] = (1.0, "divides a table's times, or less, so that its passes stay long enough")
    given = make_parser("replay-shares", "REPLAY: one draft for several targets.", **flags).parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="slipstream-shares-") as folder:
        document = run_to_end(measure(given, Path(folder)))
    for found in document["tables"]:
        print_rows(f"REPLAY of {found['table']} (speed {found['speed']:.3f}): one draft", found["rows"])
    print(NOTE)
    finish("replay-shares", document)
