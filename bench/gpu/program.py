"""Full-size models with random weights on a GPU; tables to stderr. On a CPU, `--tiny` shows that all of it runs."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.common import at_least, machine_facts, say
from bench.gpu.checks import RANDOM, TINY, bounded, make_gpu_parser, name_of, parse_device
from bench.gpu.measure import Clock, Job, attempt, free, measure_all, measure_bandwidth, measure_encoding
from bench.gpu.random_model import GEOMETRIES, PAIRS, Geometry, RandomModel, count_parameters, tiny
from bench.gpu.tables import markdown, pair_rows, replay_tables, write_tables
from bench.output import finish

VIDEO_TOKENS, TINY_VIDEO_TOKENS = (8_192, 16_384, 25_000), (96, 192)
COPIED_BYTES, TINY_COPIED_BYTES = 4 << 30, 1 << 20


def measure(plan: Namespace) -> dict[str, Any]:
    copied = TINY_COPIED_BYTES if plan.tiny else COPIED_BYTES
    bandwidth = measure_bandwidth(Clock(plan.device, plan.repeats), copied)
    models: list[dict[str, Any]] = []
    with bounded() as bound:
        for geometry in plan.geometries:
            measure_model(plan, geometry, models)
            keep(plan, {"unfinished": True, "models": models})
    by_name = {model["name"]: model["sizes"] for model in models}
    pairs = [row for pair in PAIRS for row in pair_rows(pair, by_name)]
    document = {
        "labels": [RANDOM, *([TINY] if plan.tiny else [])],
        "device": str(plan.device),
        "device_name": name_of(plan.device),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "tiny": plan.tiny,
        "unfinished": bound.was_reached,
        "machine": machine_facts(),
        "bandwidth_bytes_per_s": bandwidth,
        "models": models,
        "pairs": pairs,
    }
    document["replay_tables"] = replay_tables(document)
    return document


def measure_model(plan: Namespace, geometry: Geometry, models: list[dict[str, Any]]) -> None:
    """Its document goes to `models`, with its sizes as they come."""
    say(f"{geometry.name}: making weights")
    model = RandomModel.make(geometry, plan.device, plan.dtype)
    sizes: list[dict[str, Any]] = []
    facts = {"parameters": count_parameters(geometry), "weight_bytes": model.weight_bytes}
    encoding = attempt(partial(measure_encoding, model, Clock(plan.device, plan.repeats), 56 if plan.tiny else 448))
    named = {"name": geometry.name, "source": geometry.source}
    models.append({**named, **facts, "encoding": encoding, "sizes": sizes})
    for num_video_tokens in plan.video_tokens:
        say(f"{geometry.name}: {num_video_tokens} video tokens")
        sizes.append({})
        measure_all(Job(model, Clock(plan.device, plan.repeats), num_video_tokens, plan.attention), sizes[-1])
    del model
    free(plan.device)


def keep(plan: Namespace, document: dict[str, Any]) -> None:
    """Writes what there is so far, so that a run that is cut off leaves its finished models."""
    if plan.out is not None:
        plan.out.write_text(json.dumps(document) + "\n")


def parse_plan(argv: Sequence[str]) -> Namespace:
    attention = ("auto", "kernel of the engine: auto, sdpa, matmul or flash")
    parser = make_gpu_parser("gpu", __doc__, repeats=20, attention=attention)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    paired = [name for pair in PAIRS for name in (pair.draft, pair.target)]
    parser.add_argument("--models", nargs="+", default=paired, choices=list(GEOMETRIES), metavar="NAME")
    parser.add_argument("--video-tokens", nargs="+", type=at_least(1))
    parser.add_argument("--out", type=Path, help="file for the JSON document, too, as far as it is after each model")
    parser.add_argument("--tables", type=Path, help="folder for replay tables of what was measured")
    plan = parse_device(parser, argv)
    plan.dtype = getattr(torch, plan.dtype)
    plan.geometries = [tiny(GEOMETRIES[name]) if plan.tiny else GEOMETRIES[name] for name in plan.models]
    plan.video_tokens = plan.video_tokens or (TINY_VIDEO_TOKENS if plan.tiny else VIDEO_TOKENS)
    return plan


def main(argv: Sequence[str]) -> None:
    plan = parse_plan(argv)
    document = measure(plan)
    if plan.tables is not None:
        write_tables(document["replay_tables"], plan.tables)
    keep(plan, document)
    print(markdown(document), file=sys.stderr)
    finish("gpu", document, series=("models", "replay_tables"))
