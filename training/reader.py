"""The pocket reader: a small Qwen2.5-VL that reads synthetic pages, its pixels, its tokenizer and its examples."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from slipstream.documents.surfaces import CONFIG_KEY
from training.pages import KINDS, PAGE_HEIGHT, PAGE_WIDTH, Page, sample_page
from training.pocket import PIXELS, normalise, write_checkpoint
from training.qwen import prepare_tower
from training.tokenizer import QWEN_CHAT_TEMPLATE, QWEN_SPECIAL_TOKENS, chat_tokenizer, learn_merges

PROMPT = "Read this page."
READER_FACES = ("mono",)
"""Faces of `training.pages.FACES` that the reader learns, and is scored on."""
PATCH, MERGE, FRAMES = 14, 2, 2
CELL = PATCH * MERGE
"""Side of the square of pixels that becomes one token."""
ROWS, COLUMNS = PAGE_HEIGHT // CELL, PAGE_WIDTH // CELL
MAX_TEXT = 191
VOCAB_SIZE = 1024
LONGEST_PIECE = 6
"""Characters of a token: some two cells of a page."""
BIN = 4
"""Width in pixels of the strips of a cell whose characters the vision tower learns to name."""
BINS = CELL // BIN
CHARACTERS = "".join(map(chr, range(32, 127))) + "\u2022"
IGNORED = -100
_PIXELS_PER_PAGE = {"shortest_edge": 101_000, "longest_edge": 103_000}
"""Around 280 * 364, so that a page in the shape of a letter becomes 280 x 364 pixels, whatever its resolution."""


def train_tokenizer(pages: int = 4000) -> PreTrainedTokenizerFast:
    """Learns short merges from the text of so many pages; every byte has a token."""
    chat = [PROMPT, "user", "assistant", "system"] * 10
    texts = [*(sample_page(seed, draw=False).text for seed in range(pages)), *chat]
    special_tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *QWEN_SPECIAL_TOKENS]
    tokenizer = learn_merges(texts, VOCAB_SIZE, special_tokens, max_token_length=LONGEST_PIECE)
    return chat_tokenizer(tokenizer, QWEN_CHAT_TEMPLATE, video="<|video_pad|>", image="<|image_pad|>")


def reader_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    ids = tokenizer.get_vocab()
    vision_start, video, vision_end, image = (ids[token] for token in QWEN_SPECIAL_TOKENS)
    hidden_size = 192
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden_size,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            # Time, row and column in turn: each axis has high frequencies, to tell neighbours, and low ones.
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1] * 24},
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "initializer_range": 0.04,
        },
        vision_config={
            "patch_size": PATCH,
            "temporal_patch_size": FRAMES,
            "spatial_merge_size": MERGE,
            "window_size": 5 * CELL,
            "tokens_per_second": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "depth": 2,
            "num_heads": 4,
            "fullatt_block_indexes": [],
            "out_hidden_size": hidden_size,
        },
        vision_start_token_id=vision_start,
        vision_end_token_id=vision_end,
        video_token_id=video,
        image_token_id=image,
        tie_word_embeddings=True,
    )
    setattr(config, CONFIG_KEY, "lines")
    return config


def build(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """A freshly initialised reader."""
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(reader_config(tokenizer))
    prepare_tower(model)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=MAX_TEXT + 1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def processor_files() -> dict[str, dict[str, Any]]:
    """What the processor and its parts read."""
    names = {"processor_class": "Qwen2_5_VLProcessor"}
    pixels = {
        **PIXELS,
        "size": _PIXELS_PER_PAGE,
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
    }
    return {
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen2VLVideoProcessor",
            "do_sample_frames": False,
            **names,
            **pixels,
        },
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **names, **pixels},
        "processor_config.json": names,
    }


# -- examples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PageExample:
    """A page, its text as tokens with the end, and where things are.

    Attributes:
        pixels: uint8 [364, 280, 3].
        token_ids: [n], the end token last.
        places: int [n, 2], row and column of the cell where each token's first drawn character is; -100 if none.
        strips: int [rows * columns, 7], the character in each strip of each cell, the last class if none.
        starts: bool, the same shape: whether a character begins there.
        lines: int [rows * columns, 2], column of the page and number of the line in it; -100 where nothing is.
    """

    pixels: Tensor
    token_ids: Tensor
    places: Tensor
    strips: Tensor
    starts: Tensor
    lines: Tensor

    def to(self, device: torch.device) -> "PageExample":
        return PageExample(*(getattr(self, one.name).to(device) for one in fields(self)))


def make_example(page: Page, tokenizer: PreTrainedTokenizerFast) -> PageExample | None:
    """None if the text is too long."""
    encoding = tokenizer.backend_tokenizer.encode(page.text)
    if len(encoding.ids) > MAX_TEXT:
        return None
    token_places = [_first_place(page, first, end) for first, end in encoding.offsets]
    strips = np.full((ROWS, COLUMNS * BINS), len(CHARACTERS))
    starts = np.zeros((ROWS, COLUMNS * BINS), np.float32)
    lines = np.full((ROWS, COLUMNS, 2), IGNORED)
    number = {0: 0, 1: 0}
    last_middle = {0: -1.0, 1: -1.0}
    for character, (left, right, middle, column) in zip(page.text, page.boxes, strict=True):
        if left < 0:
            continue
        row = min(int(middle // CELL), ROWS - 1)
        if middle != last_middle[column]:
            number[column] += last_middle[column] >= 0
            last_middle[column] = middle
        first, end = round(left / BIN), max(round(left / BIN) + 1, round(right / BIN))
        if character == " ":
            continue
        strips[row, first:end] = CHARACTERS.index(character)
        starts[row, first : first + 1] = 1
        lines[row, int(left) // CELL : int(right - 0.01) // CELL + 1] = column, number[column]
    return PageExample(
        torch.from_numpy(page.pixels),
        torch.tensor([*encoding.ids, tokenizer.eos_token_id]),
        torch.tensor([*token_places, (IGNORED, IGNORED)]),
        torch.from_numpy(strips).view(-1, BINS),
        torch.from_numpy(starts).view(-1, BINS),
        torch.from_numpy(lines).view(-1, 2),
    )


def _first_place(page: Page, first: int, end: int) -> tuple[int, int]:
    for left, _, middle, _ in page.boxes[first:end]:
        if left >= 0:
            return min(int(middle // CELL), ROWS - 1), min(int(left // CELL), COLUMNS - 1)
    return IGNORED, IGNORED


class PageExamples(IterableDataset[PageExample]):
    """An endless stream of the pages after `first_seed`, of these kinds."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        first_seed: int,
        kinds: tuple[str, ...] = KINDS,
        faces: tuple[str, ...] = READER_FACES,
    ) -> None:
        self._tokenizer, self._first_seed, self._kinds, self._faces = tokenizer, first_seed, kinds, faces

    def __iter__(self) -> Iterator[PageExample]:
        seed = self._first_seed
        while True:
            rng = random.Random(f"kind {seed}")
            page = sample_page(seed, rng.choice(self._kinds), rng.choice(self._faces))
            example = make_example(page, self._tokenizer)
            if example is not None:
                yield example
            seed += 1


def grey_patches(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Grey pages uint8 [n, 364, 280, 3] as rows of patches of one colour and one frame, and their grids."""
    blocks = normalise(pixels[..., :1]).view(-1, ROWS, MERGE, PATCH, COLUMNS, MERGE, PATCH).permute(0, 1, 4, 2, 5, 3, 6)
    grid = torch.tensor([[1, ROWS * MERGE, COLUMNS * MERGE]])
    return blocks.reshape(-1, PATCH * PATCH), grid.expand(len(pixels), -1)


def reader_folder() -> Path:
    return Path(__file__).resolve().parent.parent / "models" / "pocket-reader"


def reader_tokenizer(folder: Path | None = None) -> PreTrainedTokenizerFast:
    """That of the reader in the folder, or of the shipped one."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder or reader_folder())
    return tokenizer


def export(model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes every file of a checkpoint, see `write_checkpoint`."""
    rounded = Qwen2_5_VLForConditionalGeneration(reader_config(tokenizer))
    write_checkpoint(rounded, model, tokenizer, processor_files(), folder)
