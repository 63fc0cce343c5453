"""The shipped checkpoints load by plain `transformers` and belong together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast

from slipstream.engine import load_model
from training import evaluate, evaluate_reader
from training.families import FAMILIES
from training.pocket import IMAGE_SIZE, ROLES, Family
from training.tokenizer import chat_ids, load_tokenizer

FRAMES = 4
MEBIBYTE = 2**20
MOST_BYTES = {"llava_onevision": 40 * MEBIBYTE, "qwen2_5_vl": 10 * MEBIBYTE}

families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def grey_video(family: Family, model: Any, tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """What the model's processor would hand over for a few grey frames and the default prompt."""
    before, after = chat_ids(tokenizer)
    num_video = FRAMES // family.frames_per_step * family.tokens_per_step + len(family.closing(model))
    input_ids = torch.tensor([[*before, *[model.config.video_token_id] * num_video, *after]])
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if family.name == "llava_onevision":
        return inputs | {"pixel_values_videos": torch.zeros(1, FRAMES, 3, IMAGE_SIZE, IMAGE_SIZE)}
    grid = (FRAMES // 2, IMAGE_SIZE // 14, IMAGE_SIZE // 14)
    return inputs | {
        "pixel_values_videos": torch.zeros(grid[0] * grid[1] * grid[2], 3 * 2 * 14 * 14),
        "video_grid_thw": torch.tensor([grid]),
        "mm_token_type_ids": 2 * (input_ids == model.config.video_token_id).int(),
    }


@families
@pytest.mark.parametrize("role", ROLES)
def test_checkpoint_captions_a_video(family: Family, role: str) -> None:
    folder = family.folder / role
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = grey_video(family, model, load_tokenizer(folder))
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert output.shape[1] > inputs["input_ids"].shape[1]


@families
def test_both_share_one_tokenizer(family: Family) -> None:
    target, draft = (AutoTokenizer.from_pretrained(family.folder / role) for role in ROLES)
    assert target.get_vocab() == draft.get_vocab()
    files = [family.folder / role / "tokenizer.json" for role in ROLES]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_both_families_share_the_vocabulary() -> None:
    llava, qwen = (load_tokenizer(family.folder / "target").get_vocab() for family in FAMILIES.values())
    assert llava.items() <= qwen.items()


@families
def test_pair_is_small(family: Family) -> None:
    assert sum(_size(family.folder / role) for role in ROLES) < MOST_BYTES[family.name]


@pytest.mark.parametrize("size", [(64, 64), (112, 112), (224, 224), (225, 224), (1080, 1080)])
def test_square_frames_of_any_size_have_the_tokens_that_were_trained(size: tuple[int, int]) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model = load_model(str(family.folder / "draft"))
    assert model.plan_prompt("?", 2).num_video_tokens == family.tokens_per_step
    assert model.plan_prompt("?", 2, frame_size=size).num_video_tokens == family.tokens_per_step


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize(
    ("program", "flag", "told"),
    [(evaluate, "--models", "no such directory"), (evaluate_reader, "--model", "no folder")],
)
def test_models_that_are_not_there_are_told(
    program: Any,
    flag: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before a clip is made to try them on."""
    words = ("evaluate", flag, tmp_path / "none", "--threads", torch.get_num_threads())
    monkeypatch.setattr("sys.argv", [str(word) for word in words])
    with pytest.raises(SystemExit) as ended:
        program.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"error: {flag}: " in said and told in said
