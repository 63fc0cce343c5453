"""The shipped checkpoints load by plain `transformers` and belong together."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlavaOnevisionForConditionalGeneration

from training.llava import TOKENS_PER_FRAME
from training.pocket import IMAGE_SIZE, ROLES
from training.tokenizer import POCKET_DIR, chat_ids, load_tokenizer

MEBIBYTE = 2**20


@pytest.mark.parametrize("role", ROLES)
def test_checkpoint_captions_a_video(role: str) -> None:
    folder = POCKET_DIR / role
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    before, after = chat_ids(load_tokenizer(folder))
    input_ids = torch.tensor([[*before, *[model.config.video_token_id] * (4 * TOKENS_PER_FRAME + 1), *after]])
    pixel_values = torch.zeros(1, 4, 3, IMAGE_SIZE, IMAGE_SIZE)
    output = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        pixel_values_videos=pixel_values,
        max_new_tokens=4,
        do_sample=False,
    )
    assert output.shape[1] > input_ids.shape[1]


def test_both_share_one_tokenizer() -> None:
    target, draft = (AutoTokenizer.from_pretrained(POCKET_DIR / role) for role in ROLES)
    assert target.get_vocab() == draft.get_vocab()
    assert (POCKET_DIR / "target/tokenizer.json").read_bytes() == (POCKET_DIR / "draft/tokenizer.json").read_bytes()


def test_pair_is_small() -> None:
    assert sum(_size(POCKET_DIR / role) for role in ROLES) < 40 * MEBIBYTE


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
