"""The outside reference: greedy answers of plain `transformers.generate`. Only the pixels are made by our own code."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, LlavaOnevisionForConditionalGeneration

from slipstream.engine.checkpoint import Checkpoint
from slipstream.families.preprocess import FramePreprocessor

_VIDEO = "<video>"


class Reference:
    """One checkpoint in fp32 as transformers runs it, its own chat template and generation config included."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._folder = folder
        self._model = LlavaOnevisionForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._pixels = FramePreprocessor.from_config(Checkpoint.open(str(folder)).video_processor_config())

    def answer(self, frames: NDArray[np.uint8], prompt: str, num_tokens: int, **more: Any) -> list[int]:
        """Token ids of the answer; an end-of-text token is the last one. `more` goes to `generate`."""
        pixels = self._pixels(frames)[None]
        token_ids = self._prompt(prompt, self._num_placeholders(pixels))
        output = self._model.generate(
            input_ids=torch.tensor([token_ids]),
            pixel_values_videos=pixels,
            max_new_tokens=num_tokens,
            do_sample=False,
            **more,
        )
        answer: list[int] = output[0, len(token_ids) :].tolist()
        return answer

    def text(self, token_ids: list[int]) -> str:
        """The answer as text."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def end_at(self, token_id: int) -> None:
        """Makes `token_id` the end-of-text token, of the checkpoint on disk as well."""
        self._model.generation_config.eos_token_id = token_id
        path = self._folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": token_id}))

    def _num_placeholders(self, pixels: torch.Tensor) -> int:
        with torch.inference_mode():
            return int(self._model.get_video_features(pixels).pooler_output.shape[1])

    def _prompt(self, prompt: str, num_placeholders: int) -> list[int]:
        content: Any = [{"type": "video"}, {"type": "text", "text": prompt}]
        template = (self._folder / "chat_template.jinja").read_text(encoding="utf-8")
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], chat_template=template, tokenize=False, add_generation_prompt=True
        )
        token_ids: list[int] = self._tokenizer(str(rendered).replace(_VIDEO, _VIDEO * num_placeholders))["input_ids"]
        return token_ids
