"""How far passes of the pair are from what this core can do: reading weights, keys and values once, and the arithmetic.

One thread, fp32, noise for frames; times are the thread's own on a core, whatever else runs. The floor of a pass is the
longer of two times: its bytes at the speed at which this core reads memory, and its multiplications at the speed of a
large matrix product. Both are measured here.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bench.common import MODELS, machine_facts, make_parser, say
from bench.output import finish
from bench.tables import print_rows
from slipstream.engine import DecodeState, VideoLM, load_model
from slipstream.engine.draft_session import ChosenAhead
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import DraftSampler

PROMPT, SIDE = "Describe this video in detail.", 224
KEPT_SHARE = 0.1
"""Of the video tokens, at the draft."""
WINDOWS = {"target": (1, 2, 4, 8, 14, 24), "draft": (1,)}
LINE_TOKENS = 32
READ_NUMBERS, PRODUCT_SIDE = 1 << 26, 1024


def measure_core() -> tuple[float, float]:
    """Bytes read and multiply-adds carried out in a second."""
    numbers, square = torch.ones(READ_NUMBERS), torch.ones(PRODUCT_SIDE, PRODUCT_SIDE)
    read_s, product_s = _thread_s(numbers.sum, 5), _thread_s(lambda: square @ square, 5)
    return numbers.nbytes / read_s, PRODUCT_SIDE**3 / product_s


def _thread_s(run: Callable[[], object], repeats: int) -> float:
    """The run's median, after some runs that do not count."""

    def once() -> float:
        started = time.thread_time()
        run()
        return time.thread_time() - started

    return statistics.median([once() for _ in range(repeats + 3)][3:])


def _prefilled(model: VideoLM, num_frames: int, share: float) -> DecodeState:
    plan = model.plan_prompt(PROMPT, num_frames)
    frames = np.random.default_rng(0).integers(0, 256, (num_frames, SIDE, SIDE, 3), dtype=np.uint8)
    keep = None if share == 1 else torch.arange(0, plan.num_video_tokens, round(1 / share))
    state, _ = model.start_prefill(plan, model.encode_frames(frames), keep=keep).finish()
    return state


def _rows(role: str, given: Namespace, core: tuple[float, float]) -> list[dict[str, Any]]:
    model = load_model(str(MODELS[role]), dtype="float32", attention=given.attention)
    state = _prefilled(model, given.frames, 1 if role == "target" else KEPT_SHARE)
    past = state.num_tokens
    parts = cast(Sequence[nn.Module], (*model.runner.decoder.layers, model.runner.lm_head))
    num_weights = sum(weight.numel() for part in parts for weight in part.parameters())
    config = model.runner.decoder.config
    per_key = 2 * config.num_hidden_layers * config.hidden_size  # multiply-adds: its score, and its share of the output
    read_s = (4 * num_weights + past * model.runner.kv_bytes_per_token) / core[0]

    def step(num_rows: int) -> None:
        model.step([(state, [0] * num_rows)])
        state.rollback(past)

    def write() -> None:
        while (num_left := past + LINE_TOKENS - state.num_tokens) > 0:
            model.write_ahead([(state, 0)], num_left)
        state.rollback(past)

    def draw() -> None:
        sampler = DraftSampler(SamplingParams(temperature=1.0), (), model.info.vocab_size)
        drawing = ChosenAhead(sampler, [0], width=0)
        while (num_left := past + LINE_TOKENS - state.num_tokens) > 0:
            model.write_ahead([(state, drawing.text[-1])], num_left, drawing.note)
        state.rollback(past)

    def row(what: str, num_rows: int, num_passes: int, run: Callable[[], None]) -> dict[str, Any]:
        pass_s = _thread_s(run, given.repeats) / num_passes
        product_s = num_rows * (num_weights + per_key * past) / core[1]
        return {
            "model": what,
            "rows": num_rows,
            "past": past,
            "operations": _num_operations(run) // num_passes,
            "pass_ms": round(1e3 * pass_s, 2),
            "reading_ms": round(1e3 * read_s, 2),
            "arithmetic_ms": round(1e3 * product_s, 2),
            "over_floor": round(pass_s / max(read_s, product_s), 1),
        }

    rows = [row(role, num_rows, 1, partial(step, num_rows)) for num_rows in WINDOWS[role]]
    if role == "target":
        return rows
    lines = {"draft, in a line": write, "draft, in a drawn line": draw}
    return [*rows, *(row(what, 1, LINE_TOKENS, run) for what, run in lines.items())]


def _num_operations(run: Callable[[], None]) -> int:
    """Of torch, those within others too."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    return sum(event.count for event in profiled.key_averages())


def main(argv: Sequence[str]) -> None:
    counts = {"frames": 128, "repeats": (41, "passes of each width; the median counts")}
    kernel = {"attention": ("auto", "kernel, as the services have it")}
    given = make_parser("floors", "How far are passes from what the core can do?", **counts, **kernel).parse_args(argv)
    torch.set_num_threads(1)
    with torch.inference_mode():
        core = measure_core()
        say(f"this core reads {core[0] / 1e9:.1f} GB/s and makes {core[1] / 1e9:.1f} billion multiply-adds a second")
        rows = [row for role in MODELS for row in _rows(role, given, core)]
    print_rows("passes of the pocket pair", rows)
    facts = {
        "read_bytes_per_s": core[0],
        "multiply_adds_per_s": core[1],
        "attention": given.attention,
        "machine": machine_facts(),
    }
    finish("floors", {"rows": rows, **facts})
