"""What is timed of one geometry at one length of video: passes, prefill, guidance, graphs.

Medians of repeated runs: CUDA events on a GPU, the clock on a CPU. Caches of decoding passes are filled with random
rows; the prefill is a real one. All passes are the engine's, with the choice of the likeliest tokens and their way to
the host, as the services do it.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.random_model import NUM_BEFORE, NUM_TEXT, PAIRS, RandomModel, chain, greedy_tokens, plan_of
from slipstream.engine.attention import Kernel, SdpaKernel
from slipstream.engine.forward import DecodeState, Prefill
from slipstream.engine.kernels import get_kernel
from slipstream.engine.static.step import MAX_AHEAD
from slipstream.engine.target_engine import default_guidance_layer
from slipstream.engine.thread import finish_work
from slipstream.engine.video_lm import PromptPlan, VideoLM
from slipstream.families.preprocess import frames_at_once
from slipstream.pruning import Guidance, Score, num_kept
from slipstream.pruning.guided import make_guidance, scores_of, top_k

Timing = dict[str, float]


@dataclass(frozen=True)
class Clock:
    """How things are timed on one device. Every run ends when the device has nothing left to do."""

    device: torch.device
    repeats: int = 20
    warm_up: int = 3

    def time(self, run: Callable[[], object], *, repeats: int | None = None) -> Timing:
        """The run's median and extremes in seconds, after some runs that do not count."""
        count = repeats or self.repeats
        with torch.inference_mode():
            for _ in range(min(self.warm_up, max(1, count // 3))):
                run()
            seconds = [self._once(run) for _ in range(count)]
        return {"s": statistics.median(seconds), "low_s": min(seconds), "high_s": max(seconds), "n": count}

    def _once(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            run()
            return time.perf_counter() - started
        self.finish()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_bytes(self, run: Callable[[], object]) -> int | None:
        """The most memory that tensors took while `run()` ran; None where the device does not tell."""
        if self.device.type != "cuda":
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        with torch.inference_mode():
            run()
        self.finish()
        return int(torch.cuda.max_memory_allocated(self.device))


def attempt(measure: Callable[[], Any]) -> Any:
    """What it returns, or {"error": why}: one kernel that does not work here must not end the whole run."""
    try:
        return measure()
    except Exception as error:
        if torch.cuda.is_available():
            with suppress(RuntimeError):  # most likely it was memory; behind an assert that failed this fails, too
                torch.cuda.empty_cache()
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"}


def free(device: torch.device) -> None:
    """Gives back to the device what nobody holds any more: an engine's pool knows its steps, and they it, so that both
    stay until they are looked for."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


WINDOWS = (1, 2, 4, 8, 16, 32)
"""Rows of a target pass: a window and the token before it."""
ALPHAS = (0.0, 0.5, 0.9, 0.95, 1.0)
COMPARED_TOKENS = 16
POOL_ROOM = 4096
"""Tokens that a pool holds beside those of the state that is measured."""


@dataclass(frozen=True)
class Job:
    """One model at one length of video."""

    model: RandomModel
    clock: Clock
    num_video_tokens: int
    attention: str = "auto"

    @property
    def kernel(self) -> Kernel:
        """What the services would take."""
        return get_kernel(self.attention, self.model.device, self.model.dtype)

    @property
    def num_tokens(self) -> int:
        return NUM_BEFORE + self.num_video_tokens + NUM_TEXT

    @property
    def is_draft(self) -> bool:
        """In a pair of those that are compared."""
        return self.model.geometry.name in {pair.draft for pair in PAIRS}

    @property
    def is_target(self) -> bool:
        """In such a pair, or in none."""
        return not self.is_draft or self.model.geometry.name in {pair.target for pair in PAIRS}


Row = dict[str, Any]


def measure_all(job: Job, row: Row) -> None:
    """Everything at this length goes to `row` as it comes; what does not work here is an {"error": ...} in its place.
    What a model is for decides what is measured of it: `static_passes` of targets, `draft` of drafts."""
    row["video_tokens"] = job.num_video_tokens
    parts: dict[str, Callable[[Job, Row], None]] = {"prefill": measure_prefill, "passes": measure_passes}
    parts |= {"static_passes": measure_static_passes} if job.is_target else {}
    parts |= {"draft": measure_draft} if job.is_draft else {}
    for name, measure in {**parts, "memory": measure_memory}.items():
        row[name] = Row()
        failure = attempt(partial(measure, job, row[name]))
        if failure is not None:
            row[name] = failure
        free(job.model.device)


def measure_passes(job: Job, found: Row, windows: Sequence[int] = WINDOWS) -> None:
    """T_p(k): seconds of a target pass by its rows."""
    engine = job.model.engine(job.kernel)
    state = job.model.filled_state(job.model.runner(job.kernel), job.num_tokens)
    for rows in windows:
        found[str(rows)] = job.clock.time(partial(judge, engine, state, rows))


def measure_static_passes(job: Job, found: Row, windows: Sequence[int] = WINDOWS) -> None:
    """The same by static steps, as targets are served on CUDA; elsewhere these run as they are, marked by
    `captured`."""
    engine = job.model.engine(job.kernel, static_tokens=job.num_tokens + POOL_ROOM)
    state = job.model.filled_state(engine.runner, job.num_tokens)
    found |= {"captured": job.model.device.type == "cuda", "attention": engine.static and engine.static.attention}
    passes = found["passes"] = Row()
    for rows in windows:
        require_step(engine, state, rows)
        passes[str(rows)] = job.clock.time(partial(judge, engine, state, rows))


def measure_draft(job: Job, found: Row, alphas: Sequence[float] = ALPHAS) -> None:
    """T_q(alpha): seconds of a draft token by the pruned share, eager and by static steps, and the pruned prefill's."""
    for alpha in alphas:
        found[str(alpha)] = _draft_at(job, alpha)
        free(job.model.device)


def _draft_at(job: Job, alpha: float) -> Row:
    num_video = num_kept(job.num_video_tokens, alpha)
    num_tokens = NUM_BEFORE + num_video + NUM_TEXT
    row: Row = {"kept": num_video, "pass_bytes": job.model.pass_bytes(num_tokens)}
    row["eager"], expected, logits = _eager_draft(job, num_tokens)
    row["static"] = attempt(partial(measure_static, job, num_tokens, expected, logits))
    row["prefill"] = attempt(partial(_pruned_prefill, job, num_video))
    return row


def _eager_draft(job: Job, num_tokens: int) -> tuple[Timing, Sequence[int], Tensor]:
    """Seconds of a token, and the first tokens and logits, whose cache is gone before a pool is made beside it."""
    engine = job.model.engine(job.kernel)
    state = job.model.filled_state(job.model.runner(job.kernel), num_tokens)
    timing = job.clock.time(partial(judge, engine, state, 1))
    expected = greedy_tokens(engine, state, 1, COMPARED_TOKENS)
    (logits,) = engine.step([(state, chain(1))])
    return timing, expected, logits


def measure_static(job: Job, num_tokens: int, expected: Sequence[int], logits: Tensor) -> dict[str, Any]:
    """Seconds of a token by the engine's static steps, each read by the host, and of one of those that are written
    ahead. On CUDA they are graphs; elsewhere the same steps run as they are, marked by `captured`.

    The eager engine's `expected` tokens and first `logits` are compared with theirs. Random weights leave the best
    tokens close together, so that in 16 bits texts part for no fault; the difference of the logits tells more.
    """
    engine = job.model.engine(job.kernel, static_tokens=num_tokens + POOL_ROOM)
    state = job.model.filled_state(engine.runner, num_tokens)
    require_step(engine, state, 1)
    (ours,) = engine.step([(state, chain(1))])
    state.rollback(num_tokens)
    written = greedy_tokens(engine, state, 1, len(expected))

    return {
        "captured": job.model.device.type == "cuda",
        "attention": engine.static and engine.static.attention,
        "largest_difference": float((ours - logits).abs().max()),
        "same_tokens": sum(ours == theirs for ours, theirs in zip(written, expected, strict=True)) / len(expected),
        **job.clock.time(partial(judge, engine, state, 1)),
        "ahead_s": job.clock.time(partial(write_ahead, engine, state))["s"] / MAX_AHEAD,
    }


def _pruned_prefill(job: Job, num_video: int) -> dict[str, Any]:
    engine, plan = job.model.engine(job.kernel), plan_of(job.num_video_tokens)
    embeddings = job.model.video_embeddings(job.num_video_tokens)
    keep = torch.arange(num_video) * max(job.num_video_tokens, 1) // max(num_video, 1)

    def prefill() -> None:
        state, _ = engine.start_prefill(plan, embeddings, keep=keep).finish()
        state.close()

    return job.clock.time(prefill, repeats=3)


def measure_prefill(job: Job, timed: Row) -> None:
    """The target's prefill in its two parts, before and after layer L, and the guidance between them."""
    engine = job.model.engine(job.kernel)
    split = default_guidance_layer(engine.info.num_layers)
    plan, embeddings = plan_of(job.num_video_tokens), job.model.video_embeddings(job.num_video_tokens)
    held: dict[str, Any] = {}

    def until_layer() -> None:
        prefill = engine.start_prefill(plan, embeddings)
        first = prefill.video_states().to(torch.bfloat16, copy=True), prefill.text_states()
        prefill.run_layers(split)
        held.update(prefill=prefill, first=first)

    until = job.clock.time(until_layer, repeats=3)
    prefill: Prefill = held["prefill"]
    video_0, text_0 = held["first"]

    def guidance(kind: str) -> Guidance:
        return make_guidance(video_0, text_0, prefill.video_states(), prefill.text_states(), kind)

    def select() -> None:
        top_k(scores_of(states, Score.SIMILARITY_VARIATION), num_kept(job.num_video_tokens, 0.9))

    states, scores = guidance("hidden_states"), guidance("scores")
    timed |= {
        "layer": split,
        "until_layer": until,
        "guidance": {
            "make_states_s": job.clock.time(lambda: guidance("hidden_states"))["s"],
            "make_scores_s": job.clock.time(lambda: guidance("scores"))["s"],
            "states_to_host_s": job.clock.time(lambda: _to_host(states))["s"],
            "states_bytes": _num_bytes(states),
            "scores_bytes": _num_bytes(scores),
            "select_s": job.clock.time(select)["s"],
        },
    }
    prefill.cache.clear()
    held.clear()
    after = job.clock.time(lambda: _run_on(engine, plan, embeddings, split), repeats=3)
    timed["whole"] = after
    timed["after_layer_s"] = max(after["s"] - until["s"], 0.0)


def _run_on(engine: VideoLM, plan: PromptPlan, embeddings: Tensor, split: int) -> None:
    prefill = engine.start_prefill(plan, embeddings)
    prefill.run_layers(split)
    state, logits = prefill.finish()
    int(logits.argmax())
    state.close()


def _to_host(guidance: Guidance) -> None:
    for pair in (guidance.video_states, guidance.text_sums):
        for tensor in pair or ():
            tensor.cpu()


def _num_bytes(guidance: Guidance) -> int:
    if guidance.scores is not None:
        return guidance.scores.nbytes
    return sum(tensor.nbytes for pair in (guidance.video_states, guidance.text_sums) for tensor in pair or ())


def measure_memory(job: Job, held: Row) -> None:
    """Bytes of weights and cache, and the peak of a prefill with the passes behind it."""
    engine, plan = job.model.engine(job.kernel), plan_of(job.num_video_tokens)
    embeddings = job.model.video_embeddings(job.num_video_tokens)

    def caption() -> None:
        state, _ = engine.start_prefill(plan, embeddings).finish()
        judge(engine, state, max(WINDOWS))
        held["kv_bytes"] = state.kv_bytes
        state.close()

    peak = job.clock.peak_bytes(caption)
    if peak is None:
        caption()
    held |= {"weight_bytes": job.model.weight_bytes, "peak_bytes": peak}


def measure_encoding(model: RandomModel, clock: Clock, side: int = 448) -> dict[str, Any]:
    """Seconds of the vision tower for as many grey frames as the services hand it at once, pixels made included."""
    engine = model.engine(SdpaKernel())
    frames = np.full((frames_at_once(str(clock.device), (side, side)), side, side, 3), 127, dtype=np.uint8)
    timing = clock.time(lambda: engine.encode_frames(frames), repeats=5)
    return {"frames": len(frames), **timing}


def measure_bandwidth(clock: Clock, num_bytes: int) -> float:
    """Bytes a second that a copy on the device moves, read and written."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=clock.device)
    copy = torch.empty_like(source)
    return 2 * num_bytes / clock.time(lambda: copy.copy_(source))["s"]


def write_ahead(engine: VideoLM, state: DecodeState) -> None:
    """`MAX_AHEAD` tokens as a draft writes them, read by the host together; they are taken back."""
    if engine.write_ahead([(state, 1)], MAX_AHEAD) is None:
        raise RuntimeError("no static step could be had; the log says why")
    state.rollback(state.num_prompt_tokens)


def require_step(engine: VideoLM, state: DecodeState, num_rows: int) -> None:
    """Raises `RuntimeError` where an engine with static steps has none for so many rows of the state: what is timed and
    compared then would be an ordinary pass."""
    if engine.static is None:
        return
    found = engine.static.run([(state, chain(num_rows))])
    finish_work(torch.device(engine.info.device))
    state.rollback(state.num_prompt_tokens)
    if found is None:
        raise RuntimeError(f"no static step of {num_rows} rows could be had; the log says why")


def judge(engine: VideoLM, state: DecodeState, num_rows: int) -> None:
    """A pass as the services make it, with the choice of tokens and their way to the host; it is taken back."""
    engine.step_and_choose([(state, chain(num_rows))])
    state.rollback(state.num_prompt_tokens)
