"""The outside reference: plain `transformers` on the same checkpoint, pixels and prompt, in a child process of its own.

Everything here but `start_reference` runs in that child, which has one torch thread. How time is taken: a streamer
notes when tokens come out of `generate`. The first ones end the time to first token (encoding, prefill and, for
assisted generation, the assistant's part of the first round); decoding is timed from there to the last ones.
"""

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.generation.streamers import BaseStreamer

from bench.common import Task
from slipstream.engine import VideoLM, load_model
from slipstream.engine.checkpoint import Checkpoint
from slipstream.families.preprocess import FramePreprocessor, PatchPreprocessor
from slipstream.messages import Frames
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits, SampledVideo

PROMPT_LOOKUP_TOKENS = 10
"""Of a looked-up window; transformers' documentation uses this number."""


@dataclass(frozen=True)
class Generated:
    token_ids: tuple[int, ...]
    first_token_s: float
    num_timed: int
    """Tokens after those that came out first."""
    decode_s: float
    """Seconds that these took."""
    note: str = ""


def start_reference(core: int | None = None) -> ProcessPoolExecutor:
    """A child process for the functions below, pinned to `core` if one is given."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_set_up, initargs=(core,))


def generate(task: Task) -> Generated:
    return _generate(task)


def generate_assisted(task: Task) -> Generated:
    """The same with the draft as `assistant_model`, as upstream does it. The note says if the draft saw no video."""
    draft = _upstream(task.draft)
    towers_run: list[int] = []
    hook = draft.model.vision_tower.register_forward_hook(lambda *_: towers_run.append(1))
    try:
        answer = _generate(task, assistant_model=draft)
    finally:
        hook.remove()
    if towers_run:
        return answer
    return replace(
        answer, note=f"transformers {transformers.__version__} hands the assistant no video: it drafts blind"
    )


def generate_assisted_with_video(task: Task) -> Generated:
    """Assisted generation whose assistant is handed all of the video, by a hook before its first pass."""
    draft, pixels = _upstream(task.draft), _pixels(task.draft, frames_of(task))

    def show(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        is_prefill = kwargs["past_key_values"].get_seq_length() == 0
        return args, kwargs | ({"pixel_values_videos": pixels} if is_prefill else {})

    hook = draft.register_forward_pre_hook(show, with_kwargs=True)
    try:
        answer = _generate(task, assistant_model=draft)
    finally:
        hook.remove()
    return replace(answer, note="the assistant is handed the video by a hook of this benchmark")


def generate_with_prompt_lookup(task: Task) -> Generated:
    """Windows looked up in the prompt and the text so far, without a draft model."""
    return _generate(task, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS)


def top_two_margin(task: Task, prefix: tuple[int, ...]) -> float:
    """The lead of the best next token over the second best, in logits, after the prompt and `prefix`."""
    inputs = _inputs(task)
    written = torch.tensor([prefix], dtype=torch.int64)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], written], dim=1)
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(written)], dim=1)
    with torch.inference_mode():
        logits = _upstream(task.target)(**inputs, logits_to_keep=1).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    return float(best - second)


@lru_cache(maxsize=4)
def engine_model(ref: Path) -> VideoLM:
    """A checkpoint in the project's own engine; here it plans prompts."""
    return load_model(str(ref))


def frames_of(task: Task) -> Frames:
    """The frames that the gateway samples of the task's video."""
    return cast(Frames, _sampled(task).frames)


# -- inside ---------------------------------------------------------------------------------------------------------


class _Stopwatch(BaseStreamer):
    """Notes when tokens arrive; `generate` begins with the prompt's."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []

    def put(self, value: Tensor) -> None:
        self.arrivals.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        pass


def _set_up(core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _generate(task: Task, **options: Any) -> Generated:
    inputs, stopwatch = _inputs(task), _Stopwatch()
    model: Any = _upstream(task.target)  # the mixin that has `generate` is untyped for this class
    started = time.perf_counter()
    output: Tensor = model.generate(
        **inputs, max_new_tokens=task.max_new_tokens, do_sample=False, streamer=stopwatch, **options
    )
    first_s, last_s = stopwatch.arrivals[1][0], stopwatch.arrivals[-1][0]
    return Generated(
        token_ids=tuple(output[0, inputs["input_ids"].shape[1] :].tolist()),
        first_token_s=first_s - started,
        num_timed=sum(count for _, count in stopwatch.arrivals[2:]),
        decode_s=last_s - first_s,
    )


def _sampled(task: Task) -> SampledVideo:
    with task.video.open("rb") as source:
        return sample_video(source, task.num_frames, DecodeLimits())


def _inputs(task: Task) -> dict[str, Tensor]:
    """What the family's own processor would hand to `generate`."""
    video, model = _sampled(task), engine_model(task.target)
    seconds_per_frame = video.duration_s / len(video.frames)
    size = video.frames.shape[1:3]
    plan = model.plan_prompt(
        task.prompt, len(video.frames), frame_size=(size[0], size[1]), seconds_per_frame=seconds_per_frame
    )
    input_ids = torch.tensor([plan.token_ids])
    if plan.grid is None:
        return {"input_ids": input_ids, "pixel_values_videos": _pixels(task.target, cast(Frames, video.frames))}
    preprocess = PatchPreprocessor.from_config(Checkpoint.open(str(task.target)).video_processor_config())
    return {
        "input_ids": input_ids,
        "mm_token_type_ids": 2 * (input_ids == _upstream(task.target).config.video_token_id).int(),
        "pixel_values_videos": preprocess(video.frames),
        "video_grid_thw": torch.tensor([preprocess.grid(len(video.frames), *size)]),
        "second_per_grid_ts": torch.tensor([plan.grid.seconds_per_step]),
    }


def _pixels(ref: Path, frames: Frames) -> Tensor:
    return FramePreprocessor.from_config(Checkpoint.open(str(ref)).video_processor_config())(frames)[None]


@lru_cache(maxsize=4)
def _upstream(ref: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(ref, dtype=torch.float32).eval()
