"""Scores the pocket reader on held-out pages, read greedily by plain `transformers.generate`.

`python -m training.evaluate_reader`; the last line is JSON: characters wrong by kind of page, and pages without a
mistake.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from training.pages import HELD_OUT_SEEDS, KINDS, sample_page
from training.reader import MAX_TEXT, PROMPT, READER_FACES, reader_folder


class PlainReader:
    """The model, its picture processor and its tokenizer, as transformers loads them from a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        self.processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def read(self, picture: Any) -> str:
        """The text of a page, given as a PIL picture or uint8 [height, width, 3]."""
        inputs = self._inputs(picture)
        with torch.inference_mode():
            made = self.model.generate(**inputs)
        return str(self.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    def logits(self, picture: Any, text: str) -> Tensor:
        """Of every token of the text and of the one behind it, [tokens + 1, vocab]."""
        ids = self.tokenizer.encode(text)
        inputs = self._inputs(picture, ids)
        with torch.inference_mode():
            logits: Tensor = self.model(**inputs).logits[0, -len(ids) - 1 :]
            return logits

    def _inputs(self, picture: Any, answer: list[int] | None = None) -> dict[str, Any]:
        seen = self.processor(images=[picture], return_tensors="pt")
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROMPT}]}
        chat = self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        image = self.tokenizer.image_token
        text = chat.replace(image, image * (int(seen["image_grid_thw"].prod()) // self.processor.merge_size**2))
        ids = torch.tensor([[*self.tokenizer.encode(text), *(answer or [])]])
        types = (ids == self.model.config.image_token_id).int()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types, **seen}


def edit_distance(one: str, other: str) -> int:
    """Characters to insert, delete or replace to make `other` of `one`."""
    costs = list(range(len(other) + 1))
    for number, character in enumerate(one, 1):
        diagonal, costs[0] = costs[0], number
        for place, wanted in enumerate(other, 1):
            diagonal, costs[place] = (
                costs[place],
                min(costs[place] + 1, costs[place - 1] + 1, diagonal + (character != wanted)),
            )
    return costs[-1]


def score(reader: PlainReader, kinds: list[str], pages: int, show: bool = False) -> dict[str, Any]:
    """Share of wrong characters of `pages` held-out pages of each kind, and of all."""
    wrong: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    perfect = 0
    for kind in kinds:
        for page in held_out_pages(reader.tokenizer, kind, pages):
            said = reader.read(page.pixels)
            distance = edit_distance(page.text, said)
            wrong[kind] += distance
            total[kind] += len(page.text)
            perfect += not distance
            if show:
                print(f"{kind}: {distance} of {len(page.text)}\n{page.text!r}\n{said!r}", flush=True)
    rates = {kind: round(wrong[kind] / total[kind], 4) for kind in kinds}
    return {
        "pages": pages * len(kinds),
        "characters": sum(total.values()),
        "cer": round(sum(wrong.values()) / sum(total.values()), 4),
        "cer_by_kind": rates,
        "pages_without_mistake": perfect,
    }


def held_out_pages(tokenizer: PreTrainedTokenizerFast, kind: str, count: int) -> list[Any]:
    """The first held-out pages of a kind, in the faces that the reader learns and no longer than any it was shown."""
    pages: list[Any] = []
    seeds = iter(HELD_OUT_SEEDS)
    while len(pages) < count:
        seed = next(seeds)
        page = sample_page(seed, kind, READER_FACES[seed % len(READER_FACES)])
        if len(tokenizer.encode(page.text)) <= MAX_TEXT:
            pages.append(page)
    return pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=reader_folder())
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--pages", type=int, default=20, help="of each kind")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print what stands on each page and what was read")
    options = parser.parse_args()
    if not options.model.is_dir():
        parser.error(f"--model: there is no folder {options.model}")
    torch.set_num_threads(options.threads)
    print(json.dumps(score(PlainReader(options.model), options.kinds, options.pages, options.show)))


if __name__ == "__main__":
    main()
