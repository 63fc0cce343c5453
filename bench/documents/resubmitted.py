"""The pocket archive handed in again after a change of model, as its users do it: `slipstream archive submit` with and
without `--hints-from`, on a real queue, with no draft process. And the newer model, which is made here."""

import asyncio
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import CLIP_FOLDER, MODELS, ROOT, say
from slipstream.stack.local import FRESH, Stack, StackOptions

NEWER_STEPS = 30
"""Of training, beyond the shipped weights, which have never changed."""
PLAIN, HINTED = "plain", "--hints-from"
WAYS = {PLAIN: "autoregressive", HINTED: "hints"}
"""Method."""
HINTED_ITEMS = re.compile(rb"([\d,]+) of [\d,]+ items have hints")
"""What the command says."""
Records = Mapping[str, Mapping[str, Any]]
"""Lines of results by name."""


def newer_checkpoint() -> Path:
    """The shipped target, trained a little further; made once for these weights, and kept in the cache folder."""
    weights = MODELS["target"] / "model.safetensors"
    folder = CLIP_FOLDER / f"newer-{NEWER_STEPS}-steps-{hashlib.sha256(weights.read_bytes()).hexdigest()[:12]}"
    if not folder.exists():
        began, unfinished = time.monotonic(), folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(MODELS["target"], unfinished)
        train = ("-m", "training.train", "target", "--only", "dense", "--steps", str(NEWER_STEPS))
        subprocess.run((sys.executable, *train, "--out", str(unfinished)), cwd=ROOT, check=True, stdout=sys.stderr)
        unfinished.replace(folder)
        say(f"a newer checkpoint was made in {time.monotonic() - began:.0f} s: {folder}")
    return folder


@dataclass(frozen=True)
class Batch:
    """One command, to its end."""

    command_s: float
    num_hinted: int
    """Items that were handed in with an earlier caption."""
    records: Records

    @property
    def wall_s(self) -> float:
        """From the first job's start to the last one's end."""
        receipts = self._receipts
        return float(max(each["ended_s"] for each in receipts) - min(each["started_s"] for each in receipts))

    @property
    def decoding_s(self) -> float:
        return float(sum(each["timings"]["generate_s"] for each in self._receipts))

    @property
    def num_tokens(self) -> int:
        return sum(each["num_tokens"] for each in self._receipts)

    @property
    def passes(self) -> int:
        return sum(each["speculation"]["passes"] for each in self._receipts)

    @property
    def texts(self) -> dict[str, str]:
        return {name: record["text"] for name, record in self.records.items()}

    @property
    def _receipts(self) -> list[Mapping[str, Any]]:
        return [record["receipt"] for record in self.records.values()]


async def measure_resubmitted(
    older: Path, newer: Path, clips: Sequence[Path], asked: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """A row with hints and one without; no result, prefill or embedding is used twice.

    Args:
        asked: words of the command line, of every caption.
    """
    batches: dict[str, list[Batch]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="slipstream-results-") as folder:
        old = Path(folder) / "old.jsonl"
        async with _stack(older) as stack:
            await _submit(stack, clips, old, *asked, "--method", WAYS[PLAIN])
        async with _stack(newer) as stack:
            for turn in range(rounds):
                for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                    output = Path(folder) / f"{len(batches[way])}-{WAYS[way]}.jsonl"
                    words = [*asked, "--method", WAYS[way], "--seed", str(turn)]
                    hints = ["--hints-from", str(old)] if way == HINTED else []
                    batches[way].append(await _submit(stack, clips, output, *words, *hints))
                    say(f"archive, {way}: {len(clips)} captions in {batches[way][-1].wall_s:.1f} s")
    return [_row(way, batches[way], batches[PLAIN]) for way in WAYS]


def _stack(model: Path) -> Stack:
    options = {"archive": True, "archive_slots": 1, "video_roots": (CLIP_FOLDER,), "extra_flags": FRESH}
    return Stack(StackOptions(target_model=model, draft_model=None, threads=1, **options))  # type: ignore[arg-type]


async def _submit(stack: Stack, clips: Sequence[Path], output: Path, *words: str) -> Batch:
    """Raises OSError where a clip was not captioned."""
    command = (sys.executable, "-m", "slipstream.cli", "archive", "submit", *map(str, clips))
    flags = ("--output", str(output), "--gateway", stack.gateway_address, *words)
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(*command, *flags, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    try:
        _, errors = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        raise
    if process.returncode:
        raise OSError(f"archive submit ended with {process.returncode}: {errors.decode(errors='replace')}")
    command_s, hinted = time.monotonic() - began, HINTED_ITEMS.search(errors)
    written = await asyncio.to_thread(output.read_text)
    records = {line["custom_id"]: line for line in map(json.loads, written.splitlines())}
    batch = Batch(command_s, int(hinted.group(1).replace(b",", b"")) if hinted else 0, records)
    assert len(batch.records) == len(clips), "each clip has a line"
    return batch


def _row(way: str, own: Sequence[Batch], plain: Sequence[Batch]) -> dict[str, Any]:
    """Medians over rounds, and times of plain ones."""
    expected = plain[0].texts
    same = sum(batch.texts[name] == text for batch in own for name, text in expected.items())
    tokens, passes = sum(batch.num_tokens - len(batch.records) for batch in own), sum(batch.passes for batch in own)
    return {
        "way": way,
        "decoding_speedup": round(_median("decoding_s", plain) / _median("decoding_s", own), 2),
        "archive_speedup": round(_median("wall_s", plain) / _median("wall_s", own), 2),
        "videos_per_h": round(3600 * len(expected) / _median("wall_s", own)),
        "command_s": round(_median("command_s", own), 2),
        "tokens_a_pass": round(tokens / passes, 2),
        "hinted": f"{sum(batch.num_hinted for batch in own)}/{len(expected) * len(own)}",
        "identical": f"{same}/{len(expected) * len(own)}",
    }


def _median(name: str, batches: Sequence[Batch]) -> float:
    return float(median(getattr(batch, name) for batch in batches))
