"""LLaVA-Interleave: which checkpoints of LLaVA's are one, and what of them does not fit."""

from pathlib import Path

import pytest

from slipstream.engine import load_model
from slipstream.errors import ModelNotUsable
from tests.support.tiny_checkpoint import tiny_tokenizer
from tests.support.tiny_families import (
    LLAVA_INTERLEAVE_CHAT_TEMPLATE,
    LLAVA_INTERLEAVE_SPECIAL_TOKENS,
    write_tiny_llava_interleave,
)


@pytest.mark.parametrize("between", ["", "\\n"])
def test_a_plan_names_the_pictures(tmp_path: Path, between: str) -> None:
    """One after the other they are one part of the prompt, else as many as there are."""
    template = LLAVA_INTERLEAVE_CHAT_TEMPLATE.replace("'<image>'", f"'<image>{between}'")
    model = load_model(str(write_tiny_llava_interleave(tmp_path / "model", seed=5, template=template)))
    plan, picture = (
        model.plan_prompt("What?", 3),
        tiny_tokenizer(320, LLAVA_INTERLEAVE_SPECIAL_TOKENS).encode("<image>"),
    )
    assert [row for row, token in enumerate(plan.token_ids) if [token] == picture] == plan.video_rows.tolist()
    assert [len(part) for part in plan.video] == ([16] * 3 if between else [48])
    assert (plan.num_steps, plan.text_start) == (3, plan.video_stop)


def test_other_llavas_are_refused(tmp_path: Path) -> None:
    path = write_tiny_llava_interleave(tmp_path / "model", seed=5, tower="clip_vision_model")
    with pytest.raises(ModelNotUsable, match=r"a tower siglip_vision_model .* not clip_vision_model \(full\)"):
        load_model(str(path))
