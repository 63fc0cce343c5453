"""Mistral 3: pictures of any size, and where their rows lie in a prompt."""

from pathlib import Path

import pytest

from slipstream.engine import load_model
from tests.support.tiny_checkpoint import tiny_tokenizer
from tests.support.tiny_mistral3 import CHAT_TEMPLATE, SPECIAL_TOKENS, write_tiny_mistral3


@pytest.mark.parametrize("between", ["", "\\n"])
def test_a_plan_names_the_rows_of_pictures(tmp_path: Path, between: str) -> None:
    """Behind each row stands a token, whatever the template writes between pictures."""
    template = CHAT_TEMPLATE.replace("[IMG]{%", f"[IMG]{between}{{%")
    model = load_model(str(write_tiny_mistral3(tmp_path / "model", seed=5, template=template)))
    plan = model.plan_prompt("What?", 3, frame_size=(64, 96))
    picture, row, end = tiny_tokenizer(320, SPECIAL_TOKENS).encode("[IMG][IMG_BREAK][IMG_END]")
    assert [row for row, token in enumerate(plan.token_ids) if token == picture] == plan.video_rows.tolist()
    assert [len(part) for part in plan.video] == [5] * 12, "no side is longer than 80, and all are multiples of 16"
    behind = [plan.token_ids[part.stop] for part in plan.video]
    assert behind == [row, row, row, end] * 3
    assert (plan.num_steps, plan.text_start) == (3, plan.video_stop)
