"""Tiny checkpoints, loaded once by the engine and once by plain transformers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlavaOnevisionForConditionalGeneration

from slipstream.engine import DecodeState, PromptPlan, VideoLM, load_model
from slipstream.engine.checkpoint import Checkpoint
from slipstream.families.preprocess import FramePreprocessor
from tests.support.tiny_checkpoint import write_tiny_llava


@dataclass(frozen=True)
class Pair:
    """One checkpoint, twice."""

    path: Path
    ours: VideoLM
    theirs: LlavaOnevisionForConditionalGeneration

    def pixels(self, frames: NDArray[np.uint8]) -> torch.Tensor:
        config = Checkpoint.open(str(self.path)).video_processor_config()
        return FramePreprocessor.from_config(config)(frames)

    def prefill(self, prompt: str, frames: NDArray[np.uint8]) -> tuple[PromptPlan, DecodeState, torch.Tensor]:
        plan = self.ours.plan_prompt(prompt, len(frames))
        state, logits = self.ours.start_prefill(plan, self.ours.encode_frames(frames)).finish()
        return plan, state, logits

    def generate(self, prompt: str, frames: NDArray[np.uint8], num_tokens: int) -> list[int]:
        """The greedy answer of plain transformers."""
        plan = self.ours.plan_prompt(prompt, len(frames))
        theirs: Any = self.theirs
        output = theirs.generate(
            input_ids=torch.tensor([plan.token_ids]),
            pixel_values_videos=self.pixels(frames)[None],
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        answer: list[int] = output[0, plan.num_tokens :].tolist()
        return answer


def random_frames(num_frames: int, seed: int, size: tuple[int, int] = (24, 40)) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, *size, 3), dtype=np.uint8)


def load_pair(path: Path, attention: str = "auto") -> Pair:
    theirs = LlavaOnevisionForConditionalGeneration.from_pretrained(path).eval()
    theirs.generation_config.eos_token_id = None  # answers of a fixed length
    return Pair(path, load_model(str(path), attention=attention), theirs)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_pair(write_tiny_llava(tmp_path_factory.mktemp("tiny"), seed=7))
