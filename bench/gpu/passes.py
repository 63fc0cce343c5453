"""`gpu-graph` and `gpu-vision`: seconds, launches and waits of decoding passes and vision towers, as they are served.

Launches and waits are the calls into CUDA that torch's profiler sees. Where the engine has static steps (CUDA graphs),
they are judged, and must write what the same steps write unrecorded; where not, eager ones are.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from bench.common import at_least, say
from bench.gpu.checks import Report, bounded, make_gpu_parser, parse_device
from bench.gpu.measure import WINDOWS, Clock, attempt, free, judge, measure_bandwidth, require_step, write_ahead
from bench.gpu.random_model import GEOMETRIES, NUM_BEFORE, NUM_TEXT, RandomModel, greedy_tokens, tiny
from slipstream.engine.attention import SdpaKernel
from slipstream.engine.forward import DecodeState
from slipstream.engine.kernels import get_kernel
from slipstream.engine.static.step import MAX_AHEAD, Recorder
from slipstream.engine.video_lm import VideoLM
from slipstream.pruning import num_kept

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
"""How calls begin that launch something, and that wait for the device."""


Calls = dict[str, int | None]


def count_calls(runs: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, Calls]:
    """What each run asks of the device: `launches`, `waits`, `kernels` that it ran; and torch's own `operations`.

    The first three are None where no kernel was seen: on a CPU, and where torch's profiler does not get at the GPU, of
    which it only warns. One session of the profiler counts all runs, behind all that is timed: a second one of a
    process may see nothing of the GPU, and what follows one may be slower.
    """
    on_cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.inference_mode():
        for run in runs.values():
            run()
        with profile(activities=[ProfilerActivity.CPU, *on_cuda], acc_events=True) as profiled:
            for name, run in runs.items():
                with record_function(name):
                    run()
                    Clock(device).finish()  # so that its kernels end within its time
    events = list(profiled.events())
    counted = {name: _calls_within(name, events) for name in runs}
    if on_cuda and not any(calls["kernels"] for calls in counted.values()):
        say("torch's profiler sees no kernels: is CUPTI there, and LD_LIBRARY_PATH free of another one?")
    return counted


def _calls_within(name: str, events: Sequence[FunctionEvent]) -> Calls:
    """Of what ran while the run of that name did; its own mark is no call, and not a kernel either."""
    (time,) = (event.time_range for event in events if event.name == name and event.device_type.name == "CPU")
    within = [event for event in events if time.start <= event.time_range.start <= time.end and event.name != name]
    calls = [event.name for event in within if event.device_type.name == "CPU"]
    num_kernels = sum(event.device_type.name == "CUDA" for event in within)
    return {
        "launches": sum(name.startswith(LAUNCHES) for name in calls) if num_kernels else None,
        "waits": sum(name.startswith(WAITS) for name in calls) if num_kernels else None,
        "kernels": num_kernels or None,
        "operations": sum(name.startswith("aten::") for name in calls),
    }


# -- gpu-graph --------------------------------------------------------------------------------------------------------

DRAFTS = ("Qwen2.5-VL-7B", "llava-onevision-qwen2-0.5b")
TARGETS = ("Qwen2.5-VL-7B", "Qwen2.5-VL-32B")
ALPHA, STRICT_WIDTH = 0.9, 16
MODES = {"eager": 0, "static": 4096}
"""Tokens that a pool has beside those of the longest video; 0: no static steps."""
MOST_OVER_FLOOR, MOST_GROWTH, MOST_LAUNCHES, MOST_WAITS = 1.5, 1.15, 2, 1
COUNTED_TOKENS = 8


def measure_graphs(given: Namespace, report: Report) -> dict[str, Any]:
    bandwidth = measure_bandwidth(Clock(given.device, given.repeats), (1 << 20) if given.tiny else (4 << 30))
    found: dict[str, dict[str, Any]] = {}
    with bounded() as bound:
        for name in given.models:
            say(f"gpu-graph: {name}")
            of_model = found[name] = dict[str, Any]()
            model = RandomModel.make(_geometry(name, given), given.device, given.dtype)
            for mode, extra in reversed(MODES.items()):
                of_model[mode] = attempt(partial(_measure_steps, model, given, bandwidth, extra=extra))
                free(given.device)
            of_model["ids"] = attempt(partial(_same_ids, model, given))
            _judge_steps(report, name, of_model, given)
            del model
            free(given.device)
        drafts = [name for name in given.models if name in DRAFTS and "error" not in found[name][_served(found[name])]]
        counted = attempt(partial(_count_tokens, drafts, given, found))
        for name in drafts:
            calls = found[name]["a_token"] = counted.get(name, counted)
            for what, most in (("launches", MOST_LAUNCHES), ("waits", MOST_WAITS)):
                report.at_most(f"{name}, {_served(found[name])}: {what} a token", calls.get(what, calls), most)
    report.in_time(bound)
    return {"bandwidth_bytes_per_s": bandwidth, "measured": found}


def _measure_steps(model: RandomModel, given: Namespace, bandwidth: float, *, extra: int) -> dict[str, Any]:
    static_tokens = extra and extra + max(given.video_tokens)
    engine = model.engine(get_kernel("auto", model.device, model.dtype), static_tokens=static_tokens)
    sizes = {str(size): _measure_size(model, engine, given, size, bandwidth) for size in given.video_tokens}
    return {"attention": engine.static.attention if engine.static is not None else "auto", "sizes": sizes}


def _count_tokens(drafts: Sequence[str], given: Namespace, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a token of each draft asks of the device, as it is served: made anew, as nothing is timed behind this."""
    runs: dict[str, Callable[[], object]] = {}
    for name in drafts:
        say(f"gpu-graph: {name}, its calls")
        model = RandomModel.make(_geometry(name, given), given.device, given.dtype)
        extra = MODES[_served(found[name])]
        kernel = get_kernel("auto", model.device, model.dtype)
        engine = model.engine(kernel, static_tokens=extra and extra + max(given.video_tokens))
        state = model.filled_state(engine.runner, NUM_BEFORE + num_kept(given.video_tokens[0], ALPHA) + NUM_TEXT)
        runs[name] = partial(greedy_tokens, engine, state, 1, COUNTED_TOKENS)
    return {
        name: {what: count and count / COUNTED_TOKENS for what, count in calls.items()}
        for name, calls in count_calls(runs, given.device).items()
    }


def _served(found: Mapping[str, Any]) -> str:
    """How a service would step."""
    return "static" if "error" not in found["static"] else "eager"


def _measure_size(model: RandomModel, engine: VideoLM, given: Namespace, size: int, bandwidth: float) -> dict[str, Any]:
    """T_q as of a draft that keeps a share of the video, which writes ahead where it can, and alone, if the host reads
    each token; T_p(k) as of a target that has all of the video; in seconds."""
    clock, name = Clock(given.device, given.repeats), model.geometry.name
    row: dict[str, Any] = {}
    if name in DRAFTS:
        num_tokens = NUM_BEFORE + num_kept(size, ALPHA) + NUM_TEXT
        state = model.filled_state(engine.runner, num_tokens)
        alone_s = _pass_s(clock, engine, state, 1)
        ahead_s = clock.time(partial(write_ahead, engine, state))["s"] / MAX_AHEAD if engine.static else alone_s
        row |= {"T_q": ahead_s, "T_q_alone": alone_s}
        row["T_q_over_floor"] = ahead_s * bandwidth / model.pass_bytes(num_tokens)
    if name in TARGETS:
        state = model.filled_state(engine.runner, NUM_BEFORE + size + NUM_TEXT)
        row["T_p"] = {str(rows): _pass_s(clock, engine, state, rows) for rows in WINDOWS}
        row["T_p_growth"] = row["T_p"]["8"] / row["T_p"]["1"]
    return row


def _pass_s(clock: Clock, engine: VideoLM, state: DecodeState, num_rows: int) -> float:
    require_step(engine, state, num_rows)
    return clock.time(partial(judge, engine, state, num_rows))["s"]


def _same_ids(model: RandomModel, given: Namespace) -> bool:
    """Whether graphs of a strict width write what the same steps write unrecorded, over one cache's content.

    Ordinary passes round otherwise in 16 bits: they run upstream's layers, not the fused ones. What that makes of
    logits is told at a service's start.
    """
    kernel = get_kernel("auto", model.device, model.dtype, masked_ends=True)
    static_tokens = MODES["static"] + max(given.video_tokens)
    engine = model.engine(kernel, strict_width=STRICT_WIDTH, static_tokens=static_tokens)
    state = model.filled_state(engine.runner, NUM_BEFORE + given.video_tokens[0] + NUM_TEXT, headroom=1024)
    require_step(engine, state, 1)
    replayed = greedy_tokens(engine, state, 1, given.tokens)
    steps = engine.static
    assert steps is not None, "they were asked for"
    steps._steps.clear()
    steps._parts = replace(steps._parts, recorder=Recorder(torch.device("cpu")))  # which records nothing
    require_step(engine, state, 1)
    return greedy_tokens(engine, state, 1, given.tokens) == replayed


def _judge_steps(report: Report, name: str, found: dict[str, Any], given: Namespace) -> None:
    mode = _served(found)
    report.equals(f"{name}: static steps", found["static"].get("error", "measured"), "measured")
    served, what = found[mode], f"{name}, {mode}"
    if "error" in served:
        return report.equals(f"{what}: measured", served, "without an error")
    for size, row in served["sizes"].items():
        if name == "Qwen2.5-VL-7B":
            report.at_most(f"{what}, {size}: T_q over bytes/bandwidth", row["T_q_over_floor"], MOST_OVER_FLOOR)
        if "T_p_growth" in row:
            report.at_most(f"{what}, {size}: T_p(8) over T_p(1)", row["T_p_growth"], MOST_GROWTH)
    report.equals(f"{name}: ids of graphs are those of the same steps unrecorded", found["ids"], True)


def main_graph(argv: Sequence[str]) -> None:
    parser = make_gpu_parser("gpu-graph", "Decoding passes as they are served.", repeats=20)
    parser.add_argument("--models", nargs="+", default=[*DRAFTS, TARGETS[1]], choices=list(GEOMETRIES), metavar="NAME")
    parser.add_argument("--video-tokens", nargs="+", type=at_least(1), help="8,192 and 25,000")
    parser.add_argument("--tokens", type=at_least(1), help="whose ids are compared; 512")
    given = parse_device(parser, argv)
    given.dtype = torch.float32 if given.tiny else torch.bfloat16
    given.video_tokens = given.video_tokens or ((96, 192) if given.tiny else (8_192, 25_000))
    given.tokens = given.tokens or (16 if given.tiny else 512)
    report = Report(given)
    report.finish(series=("measured",), **measure_graphs(given, report))


# -- gpu-vision -------------------------------------------------------------------------------------------------------

TOWERS = {
    "Qwen ViT": ("Qwen2.5-VL-7B", (336, 588), 0.6),
    "SigLIP": ("llava-onevision-qwen2-0.5b", (384, 384), 0.4),
}
"""By name: whose it is, height and width of the frames, most seconds for all of them."""
NUM_FRAMES, TINY_FRAMES, TINY_SIDES = 128, 16, (56, 84)
MOST_KERNELS = 15_000
IN_A_CHUNK = ", in a chunk"


def measure_towers(given: Namespace, report: Report) -> dict[str, Any]:
    found, about = dict[str, dict[str, Any]](), dict[str, str]()
    runs: dict[str, Callable[[], object]] = {}
    with bounded() as bound:
        for tower, (name, sides, most_s) in TOWERS.items():
            say(f"gpu-vision: {tower}")
            model = RandomModel.make(_geometry(name, given), given.device, given.dtype)
            count, (height, width) = (TINY_FRAMES, TINY_SIDES) if given.tiny else (NUM_FRAMES, sides)
            about[tower] = f"{tower}, {count} frames {width}x{height}"
            found[tower] = attempt(partial(_measure_tower, tower, model, given, (count, height, width, 3), runs))
            report.at_most(f"{about[tower]}: seconds", found[tower].get("s", found[tower]), most_s)
        calls = attempt(partial(count_calls, runs, given.device))
        for tower, of_tower in found.items():
            if tower in runs:
                of_tower |= {"calls": calls.get(tower, calls), "calls_in_a_chunk": calls.get(tower + IN_A_CHUNK, calls)}
        qwens = found["Qwen ViT"]
        of_all, of_chunk = (qwens.get(name, qwens) for name in ("calls", "calls_in_a_chunk"))
        report.at_most(f"{about['Qwen ViT']}: kernels", of_all.get("kernels", of_all), MOST_KERNELS)
        report.at_most(f"Qwen ViT{IN_A_CHUNK}: waits", of_chunk.get("waits", of_chunk), 0)
    report.in_time(bound)
    return {"towers": found}


def _measure_tower(
    tower: str, model: RandomModel, given: Namespace, shape: tuple[int, ...], runs: dict[str, Callable[[], object]]
) -> dict[str, Any]:
    """Of frames that are noise; making pixels of them, which other threads do, is a time of its own, `pixels_s`. Leaves
    in `runs` what is to be counted."""
    engine = model.engine(SdpaKernel())
    frames = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    began = time.perf_counter()
    chunks = engine.preprocess(frames, shape[0])
    pixels_s = time.perf_counter() - began
    runs[tower] = partial(engine.encode, chunks)
    runs[tower + IN_A_CHUNK] = partial(engine._adapter.encode, chunks[0])
    return {**Clock(given.device, given.repeats).time(runs[tower]), "chunks": len(chunks), "pixels_s": pixels_s}


def main_vision(argv: Sequence[str]) -> None:
    given = parse_device(make_gpu_parser("gpu-vision", "Vision towers as they are served.", repeats=5), argv)
    given.dtype = torch.float32 if given.tiny else torch.bfloat16
    report = Report(given)
    report.finish(**measure_towers(given, report))


def _geometry(name: str, given: Namespace) -> Any:
    return tiny(GEOMETRIES[name]) if given.tiny else GEOMETRIES[name]
