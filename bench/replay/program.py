"""REPLAY: the real three processes of the pocket models at the pace of other devices, whose times come from tables.

The pocket models decide the tokens, so tau is theirs; passes last as long as tables of other devices say. `--speed`
divides all of a table's times, which keeps their ratios; what is shown is multiplied again.
"""

import asyncio
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common import MODELS, Task, held_out_clips, machine_facts, make_parser, run_caption, run_to_end, say
from bench.methods.agreement import Agreement, draft_agreements
from bench.methods.comparison import RECORDED_PRUNERS
from bench.methods.prediction import predictions
from bench.methods.samples import Sample, stack_sample
from bench.output import finish
from bench.replay.rows import PLAIN, TABLES, Replay, open_replay, replay_rows, replaying
from bench.tables import print_rows
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
from slipstream.errors import InvalidRequest
from slipstream.speculation.methods import METHODS as ALL_METHODS
from slipstream.speculation.methods import Method, get_method
from slipstream.stack.local import FRESH, Stack, StackOptions

METHODS = {
    PLAIN: get_method(PLAIN),
    "sd": get_method("sd"),
    "parallelvlm": get_method("parallelvlm"),
    "parallelvlm, uv_spread": replace(get_method("parallelvlm"), pruner="uv_spread"),
    "slipstream": get_method("slipstream"),
    **{name: method for name, method in ALL_METHODS.items() if method.growth is not None},
}
"""The fourth prunes as the fifth does: between these two lies pacing alone."""
ALPHA, MAX_WINDOW, WARM_UP_TOKENS, SEED = 0.9, 24, 16, 1
NOTE = "REPLAY: the times are those of the table, not of this machine; tau is the pocket models' own"


async def measure(given: Namespace, folder: Path) -> dict[str, Any]:
    """Every table's stack, one after the other. `folder` is for tables without prefills."""
    clips, tables, agreements = held_out_clips(given.clips), [], Agreements(given.frames)
    for replay in [open_replay(path, given.speed) for path in given.tables]:
        paced = replay if given.prefill else replay.without_prefill(folder)
        tables.append(await _run_table(paced, clips, given, agreements))
    shape = {"clips": len(clips), "frames": given.frames, "max_new_tokens": given.tokens, "alpha": ALPHA}
    return {"replay": True, "note": NOTE, **shape, "tables": tables, "machine": machine_facts()}


class Agreements:
    """What the draft makes of plain decoding's text, asked once a clip: the text is that of every table."""

    def __init__(self, num_frames: int) -> None:
        self._num_frames = num_frames
        self._known: dict[tuple[str, str], Agreement] = {}

    async def of(self, replay: Replay, plain: Sequence[Sample], prompt: str, pruner: str) -> dict[str, Agreement]:
        """By clip, for a draft at the table's pace. None of what is not recorded."""
        if pruner not in RECORDED_PRUNERS:
            return {}
        pass_s, row_share = replay.draft.pass_s(ALPHA) / replay.speed, replay.draft.row_share
        return {s.clip: replace(await self._ask(s, prompt, pruner), pass_s=pass_s, row_share=row_share) for s in plain}

    async def _ask(self, sample: Sample, prompt: str, pruner: str) -> Agreement:
        key = sample.clip, pruner
        if key not in self._known:
            video, most = Path(sample.clip), len(sample.token_ids)
            task = Task(video, self._num_frames, prompt, most, MODELS["target"], MODELS["draft"])
            (self._known[key],) = await asyncio.to_thread(draft_agreements, task, sample.token_ids, [pruner], ALPHA)
        return self._known[key]


async def _run_table(replay: Replay, clips: Sequence[Path], given: Namespace, agreements: Agreements) -> dict[str, Any]:
    say(f"REPLAY of {replay.name} at speed {replay.speed:.2f}")
    samples: list[Sample] = []
    methods = asked_methods(given.methods, given.pruner)
    options = replaying(StackOptions(threads=1, pin=True, extra_flags=FRESH), replay.path, replay.speed)
    async with Stack(options) as stack, connect_async(stack.gateway_address) as captioner:
        prompt = (await captioner.info()).default_prompt
        template = CaptionOptions(prompt=prompt, num_frames=given.frames, alpha=ALPHA, max_window=MAX_WINDOW)
        template = replace(template, temperature=given.temperature, seed=SEED)
        for name, method in methods.items():
            await _caption(captioner, clips[0], name, method, template, WARM_UP_TOKENS)
        names = list(methods)
        for clip_number, clip in enumerate(clips):
            turn = clip_number % len(names)
            for name in names[turn:] + names[:turn]:
                say(f"REPLAY of {replay.name}: {name} on {clip.name}")
                samples.append(await _caption(captioner, clip, name, methods[name], template, given.tokens))
    plain = [sample for sample in samples if sample.method == PLAIN and not given.temperature]
    recorded = {name: await agreements.of(replay, plain, prompt, method.pruner) for name, method in methods.items()}
    return _document(replay, samples, methods, recorded)


def asked_methods(names: Sequence[str], pruner: str) -> dict[str, Method]:
    """Those of these names, and plain decoding to compare with. Raises `InvalidRequest` for another name."""
    unknown = set(names) - set(METHODS)
    if unknown:
        raise InvalidRequest(f"a replay knows no {', '.join(sorted(unknown))}; choose of {', '.join(METHODS)}")
    found = {name: METHODS[name] for name in dict.fromkeys([PLAIN, *names])}
    return {name: replace(m, pruner=pruner) if pruner and m.speculative else m for name, m in found.items()}


async def _caption(
    captioner: AsyncCaptioner, clip: Path, name: str, method: Method, template: CaptionOptions, num_tokens: int
) -> Sample:
    asked = CaptionOptions(method=method.name, pruner=method.pruner, max_new_tokens=num_tokens)
    return stack_sample(name, str(clip), await run_caption(captioner, clip, asked.over(template)))


def _document(
    replay: Replay,
    samples: Sequence[Sample],
    methods: Mapping[str, Method],
    agreements: Mapping[str, Mapping[str, Agreement]],
) -> dict[str, Any]:
    alphas = {name: 0.0 if m.pruner == "none" else ALPHA for name, m in methods.items() if m.speculative}
    most_rows = {name: method.growth.rows for name, method in methods.items() if method.growth is not None}
    predicted = predictions(samples, methods, agreements, max_window=MAX_WINDOW)
    return {
        "table": replay.name,
        "speed": replay.speed,
        "methods": replay_rows(replay, samples, alphas, most_rows),
        "prediction_error": predicted["prediction_error"],
        "predictions": predicted["methods"],
    }


def show(document: dict[str, Any]) -> None:
    for found in document["tables"]:
        speed, error = f"speed {found['speed']:.2f}", found["prediction_error"]
        missed = "" if error is None else f", prediction error {error:.0%}"
        title = f"REPLAY of {found['table']} ({speed}{missed})"
        print_rows(title, found["methods"])
        for row in found["methods"]:
            if row["late"]:
                print(f"{row['method']}: passes took longer than the table says; use a lower --speed")
    print(NOTE)


def main(argv: Sequence[str]) -> None:
    flags: dict[str, Any] = {"tables": sorted(TABLES.glob("*.json"))}
    flags |= {"clips": 2, "frames": 32, "tokens": 96, "prefill": (False, "prefills last as in the table, too")}
    flags["tables"] = (flags["tables"], "files of tables, and folders of such")
    flags["methods"] = (list(METHODS), "of them")
    flags["temperature"] = (0.0, "of all captions")
    flags["pruner"] = ("", "of every draft; empty: the method's own")
    flags["speed"] = (2.0, "divides a table's times, or less, so that its passes stay long enough")
    given = make_parser("replay", "REPLAY: the stack at the pace of other devices.", **flags).parse_args(argv)
    given.tables = [path for asked in given.tables for path in (sorted(asked.glob("*.json")) or [asked])]
    with tempfile.TemporaryDirectory(prefix="slipstream-replay-") as folder:
        document = run_to_end(measure(given, Path(folder)))
    show(document)
    finish("replay", document)
