"""GLM-4.1V and GLM-4.6V-Flash: how times are written, where the text begins, and what does not fit."""

from pathlib import Path

import pytest

from slipstream.engine import load_model
from slipstream.errors import ModelNotUsable
from tests.support.hub_forms import change
from tests.support.tiny_checkpoint import tiny_tokenizer
from tests.support.tiny_glm4v import CHAT_TEMPLATE, SPECIAL_TOKENS, write_tiny_glm4v

TIMES_S = (0.0, 4.1, 9.96, 12.0, 61.25)
WHOLE, TENTHS = ("0", "9", "61"), ("0.0 seconds", "10.0 seconds", "61.2 seconds")
"""Of every second frame."""


PROCESSORS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "by its type": ("glm4v", {}, WHOLE),
    "GLM-4.6V, by its type": ("glm46v", {}, TENTHS),
    "GLM-4.6V-Flash": ("glm4v", {"preprocessor_config.json": "Glm46VProcessor"}, TENTHS),
    "of the video's alone": ("glm4v", {"video_preprocessor_config.json": "Glm46VProcessor"}, TENTHS),
    "of the tokenizer's": ("glm4v", {"tokenizer_config.json": "Glm46VProcessor"}, TENTHS),
    "of several the first": (
        "glm46v",
        {"processor_config.json": "Glm4vProcessor", "preprocessor_config.json": "Glm46VProcessor"},
        WHOLE,
    ),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_times_are_written_as_the_processor_does(tmp_path: Path, case: str) -> None:
    model_type, named, times = PROCESSORS[case]
    path = write_tiny_glm4v(tmp_path / "model", seed=5, model_type=model_type)
    for name, processor in named.items():
        change(name, processor_class=processor)(path)
    model, tokenizer = load_model(str(path)), tiny_tokenizer(320, SPECIAL_TOKENS, end="<|user|>")
    plan = model.plan_prompt("What?", len(TIMES_S), times_s=TIMES_S)
    token_ids = list(plan.token_ids)
    starts = [span.stop for span in plan.video]
    ends = [*(span.start for span in plan.video[1:]), plan.text_start]
    between = [tokenizer.decode(token_ids[start:end]) for start, end in zip(starts, ends, strict=True)]
    behind = ["<|begin_of_image|>"] * 2 + ["<|end_of_video|>"]
    assert between == [f"<|end_of_image|>{time}{mark}" for time, mark in zip(times, behind, strict=True)]
    assert tokenizer.decode(token_ids[plan.text_start :]) == "What?<|assistant|>\n"


@pytest.mark.parametrize("mark", ["<|begin_of_video|>", "<|end_of_video|>"])
def test_a_template_without_marks_around_the_video_is_refused(tmp_path: Path, mark: str) -> None:
    """Upstream would take its frames for pictures."""
    path = write_tiny_glm4v(tmp_path / "model", seed=5, template=CHAT_TEMPLATE.replace(mark, ""))
    with pytest.raises(ModelNotUsable, match=r"must put <\|begin_of_video\|> before the video and <\|end_of_video"):
        load_model(str(path))
