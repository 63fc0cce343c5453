"""Clips as the language models train on them: some sampled frames, their places among all frames, and the caption."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from training.captions import DEFAULT_PROMPT, PROMPTS, write_caption
from training.pocket import IMAGE_SIZE, Family
from training.render import render_frames
from training.tokenizer import chat_ids
from training.world import frame_times, sample_clip

DEFAULT_PROMPT_SHARE = 0.6


@dataclass(frozen=True)
class ClipRange:
    """What kind of clips a stage draws: scenes (least, most), sampled frames to choose from, steps shown of those.

    A step is the frames that share their tokens: one in LLaVA-OneVision, two in Qwen2.5-VL.
    """

    num_scenes: tuple[int, int]
    frame_counts: tuple[int, ...]
    shown_steps: int


@dataclass(frozen=True)
class CaptionExample:
    """Frames are uint8 [shown * frames a step, 112, 112, 3]; `step_indices` [shown] are places among all steps."""

    frames: torch.Tensor
    step_indices: torch.Tensor
    num_frames: int
    seconds_per_frame: float
    prefix_ids: list[int]
    prompt_ids: list[int]
    caption_ids: list[int]


class CaptionExamples(IterableDataset):
    """An endless stream of examples from the seeds after `first_seed`."""

    def __init__(self, clips: ClipRange, family: Family, tokenizer: PreTrainedTokenizerFast, first_seed: int) -> None:
        self._clips = clips
        self._frames_per_step = family.frames_per_step
        self._tokenizer = tokenizer
        self._first_seed = first_seed
        self._chats = {prompt: chat_ids(tokenizer, prompt) for prompt in PROMPTS}

    def __iter__(self) -> Iterator[CaptionExample]:
        seed = self._first_seed
        while True:
            yield self.example(seed)
            seed += 1

    def example(self, seed: int) -> CaptionExample:
        rng = random.Random(f"example {seed}")
        clip = sample_clip(seed, self._clips.num_scenes)
        num_frames = rng.choice(self._clips.frame_counts)
        steps = spread_indices(rng, num_frames // self._frames_per_step, self._clips.shown_steps)
        indices = [step * self._frames_per_step + offset for step in steps for offset in range(self._frames_per_step)]
        times_s = frame_times(clip.duration_s, num_frames)
        frames = render_frames(clip, [times_s[index] for index in indices], IMAGE_SIZE)
        prompt = DEFAULT_PROMPT if rng.random() < DEFAULT_PROMPT_SHARE else rng.choice(PROMPTS)
        prefix_ids, prompt_ids = self._chats[prompt]
        caption_ids = self._tokenizer.encode(write_caption(clip))
        return CaptionExample(
            frames=torch.from_numpy(frames),
            step_indices=torch.tensor(steps),
            num_frames=num_frames,
            seconds_per_frame=clip.duration_s / num_frames,
            prefix_ids=prefix_ids,
            prompt_ids=prompt_ids,
            caption_ids=[*caption_ids, self._tokenizer.eos_token_id],
        )


def spread_indices(rng: random.Random, num_steps: int, shown_steps: int) -> list[int]:
    """`shown_steps` different numbers below `num_steps`, in order, one at random from each equal stretch."""
    width = num_steps / shown_steps
    return [min(num_steps - 1, int((index + rng.random()) * width)) for index in range(shown_steps)]
