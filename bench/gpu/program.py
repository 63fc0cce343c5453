"""Full-size models with random weights on a GPU; tables to stderr. On a CPU, `--tiny` shows that all of it runs."""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.common import machine_facts, say
from bench.gpu.measure import Clock, Job, attempt, measure_all, measure_bandwidth, measure_encoding
from bench.gpu.random_model import GEOMETRIES, PAIRS, Geometry, RandomModel, count_parameters, tiny
from bench.gpu.tables import graph_variant, markdown, measured_pairs, pair_rows, replay_table, write_tables
from bench.output import finish

VIDEO_TOKENS, TINY_VIDEO_TOKENS = (8_192, 16_384, 25_000), (96, 192)
COPIED_BYTES, TINY_COPIED_BYTES = 4 << 30, 1 << 20
RANDOM = "Weights are random: times and memory are those of the real geometries; texts and acceptance are nobody's."
TINY = "TINY geometries: this run shows that everything runs, its figures mean nothing."


@dataclass(frozen=True)
class Plan:
    """What is measured, and where."""

    device: torch.device
    dtype: torch.dtype
    geometries: tuple[Geometry, ...]
    video_tokens: tuple[int, ...]
    is_tiny: bool
    repeats: int
    attention: str
    out: Path | None = None
    tables: Path | None = None

    @property
    def clock(self) -> Clock:
        return Clock(self.device, self.repeats)


def measure(plan: Plan) -> dict[str, Any]:
    """One model after another; only one is in memory at a time."""
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)  # of this thread
    else:
        torch.set_num_threads(1)
    models: list[dict[str, Any]] = []
    for geometry in plan.geometries:
        models.append(measure_model(plan, geometry))
        keep(plan, {"unfinished": True, "models": models})
    by_name = {model["name"]: model["sizes"] for model in models}
    pairs = [row for pair in PAIRS for row in pair_rows(pair, by_name)]
    copied = TINY_COPIED_BYTES if plan.is_tiny else COPIED_BYTES
    document = {
        "labels": [RANDOM, *([TINY] if plan.is_tiny else [])],
        "device": str(plan.device),
        "device_name": torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "cpu",
        "dtype": str(plan.dtype).removeprefix("torch."),
        "tiny": plan.is_tiny,
        "machine": machine_facts(),
        "bandwidth_bytes_per_s": measure_bandwidth(plan.clock, copied),
        "models": models,
        "pairs": pairs,
    }
    document["replay_tables"] = replay_tables(document)
    return document


def measure_model(plan: Plan, geometry: Geometry) -> dict[str, Any]:
    """Everything of one geometry."""
    say(f"{geometry.name}: making weights")
    model = RandomModel.make(geometry, plan.device, plan.dtype)
    encoding = attempt(partial(measure_encoding, model, plan.clock, 56 if plan.is_tiny else 448))
    sizes = []
    for num_video_tokens in plan.video_tokens:
        say(f"{geometry.name}: {num_video_tokens} video tokens")
        sizes.append(measure_all(Job(model, plan.clock, num_video_tokens, plan.attention)))
    found = {
        "name": geometry.name,
        "source": geometry.source,
        "parameters": count_parameters(geometry),
        "weight_bytes": model.weight_bytes,
        "encoding": encoding,
        "sizes": sizes,
    }
    del model
    gc.collect()
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def keep(plan: Plan, document: dict[str, Any]) -> None:
    """Writes what there is so far, so that a run that is cut off leaves its finished models."""
    if plan.out is not None:
        plan.out.write_text(json.dumps(document) + "\n")


def replay_tables(document: dict[str, Any]) -> list[dict[str, Any]]:
    """For every pair and length of video: with the draft as it is, and as CUDA graphs would make it."""
    models = {model["name"]: model for model in document["models"]}
    by_name = {name: model["sizes"] for name, model in models.items()}
    source = f"bench gpu on {document['device_name']}, {document['dtype']}{', TINY' if document['tiny'] else ''}"
    tables: list[dict[str, Any]] = []
    for pair in PAIRS:
        for draft, target in measured_pairs(pair, by_name):
            encoding = models[pair.target]["encoding"]
            frame_s = encoding["s"] / encoding["frames"] if "s" in encoding else None
            table = replay_table(pair, draft, target, frame_s, source)
            graphed = graph_variant(table, draft)
            tables += [table] if graphed is None else [table, graphed]
    return tables


def parse_plan(argv: Sequence[str]) -> Plan:
    """From the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu together with --tiny")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--tiny", action="store_true", help="tiny geometries, to see that everything runs")
    parser.add_argument("--models", nargs="+", default=list(GEOMETRIES), choices=list(GEOMETRIES), metavar="NAME")
    parser.add_argument("--video-tokens", nargs="+", type=int)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--attention", default="auto", help="kernel of the engine: auto, sdpa, matmul or flash")
    parser.add_argument("--out", type=Path, help="file for the JSON document, too")
    parser.add_argument("--tables", type=Path, help="folder for replay tables of what was measured")
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; `--device cpu --tiny` shows that the code runs")
    if device.type != "cuda" and not given.tiny:
        parser.error("full-size models need a GPU; on a CPU add --tiny")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    shapes = tuple(GEOMETRIES[name] for name in given.models)
    return Plan(
        device=device,
        dtype=getattr(torch, given.dtype),
        geometries=tuple(tiny(shape) for shape in shapes) if given.tiny else shapes,
        video_tokens=tuple(given.video_tokens or (TINY_VIDEO_TOKENS if given.tiny else VIDEO_TOKENS)),
        is_tiny=given.tiny,
        repeats=given.repeats,
        attention=given.attention,
        out=given.out,
        tables=given.tables,
    )


def main(argv: Sequence[str]) -> None:
    plan = parse_plan(argv)
    document = measure(plan)
    if plan.tables is not None:
        write_tables(document["replay_tables"], plan.tables)
    keep(plan, document)
    print(markdown(document), file=sys.stderr)
    finish("gpu", document, series=("models", "replay_tables"))
