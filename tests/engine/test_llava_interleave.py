"""LLaVA-Interleave: which checkpoints of LLaVA's are one, and what of them does not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine import load_model
from slipstream.errors import ModelNotUsable
from tests.support import hub_forms
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


def change(name: str, **settings: Any) -> Callable[[Path], None]:
    return lambda path: hub_forms.edit(path / name, lambda content: content.update(settings))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "other features": (
        change("config.json", vision_feature_select_strategy="default"),
        r"only LLaVA-Interleave is served: .* not siglip_vision_model \(default\)",
    ),
    "no settings": (lambda path: (path / "preprocessor_config.json").unlink(), "nothing of how frames become"),
    "settings of a video alone": (
        lambda path: (path / "preprocessor_config.json").rename(path / "video_preprocessor_config.json"),
        "says nothing of how frames become its input; preprocessor_config.json",
    ),
    "another size": (
        change("preprocessor_config.json", size={"height": 64, "width": 64}),
        "takes frames of 32x32, not the 64x64",
    ),
    "no size": (change("preprocessor_config.json", size=None), "takes frames of 32x32, not the 224x224"),
    "the middle": (change("preprocessor_config.json", do_center_crop=True), "do_center_crop is not supported"),
    "another token": (change("config.json", image_token_index=5), "put one image before the user's text"),
    "no template": (lambda path: (path / "chat_template.jinja").unlink(), "chat template is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_is_refused(tmp_path: Path, damage: str) -> None:
    harm, reason = DAMAGES[damage]
    path = write_tiny_llava_interleave(tmp_path / "model", seed=5)
    harm(path)
    with pytest.raises(ModelNotUsable, match=reason):
        load_model(str(path))


def test_other_llavas_are_refused(tmp_path: Path) -> None:
    path = write_tiny_llava_interleave(tmp_path / "model", seed=5, tower="clip_vision_model")
    with pytest.raises(ModelNotUsable, match=r"a tower siglip_vision_model .* not clip_vision_model \(full\)"):
        load_model(str(path))
