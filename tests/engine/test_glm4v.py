"""GLM-4.1V and GLM-4.6V-Flash: how times are written, where the text begins, and what does not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine import load_model
from slipstream.errors import ModelNotUsable
from tests.support import hub_forms
from tests.support.tiny_checkpoint import tiny_tokenizer
from tests.support.tiny_glm4v import CHAT_TEMPLATE, SPECIAL_TOKENS, write_tiny_glm4v

TIMES_S = (0.0, 4.1, 9.96, 12.0, 61.25)
WHOLE, TENTHS = ("0", "9", "61"), ("0.0 seconds", "10.0 seconds", "61.2 seconds")
"""Of every second frame."""


def change(name: str, **settings: Any) -> Callable[[Path], None]:
    def add(path: Path) -> None:
        if not (path / name).exists():
            (path / name).write_text("{}")
        hub_forms.edit(path / name, lambda content: content.update(settings))

    return add


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


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another processor": (
        change("preprocessor_config.json", processor_class="Glm4Processor"),
        "a processor 'Glm4Processor' is not known, only Glm4vProcessor, Glm46VProcessor",
    ),
    "no settings": (lambda path: (path / "video_preprocessor_config.json").unlink(), "nothing of how frames become"),
    "other patches": (change("video_preprocessor_config.json", patch_size=14), r"\(8, 2, 2\) in the model's config"),
    "one size": (
        change("video_preprocessor_config.json", size={"height": 32, "width": 32}),
        "must have shortest_edge and longest_edge",
    ),
    "another picture": (change("config.json", image_token_id=5), "image_token_id is 5 in the model's config but"),
    "another video": (change("config.json", video_token_id=5), "put one video before the user's text"),
    "no template": (lambda path: (path / "chat_template.jinja").unlink(), "chat template is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_is_refused(tmp_path: Path, damage: str) -> None:
    harm, reason = DAMAGES[damage]
    path = write_tiny_glm4v(tmp_path / "model", seed=5)
    harm(path)
    with pytest.raises(ModelNotUsable, match=reason):
        load_model(str(path))


@pytest.mark.parametrize("mark", ["<|begin_of_video|>", "<|end_of_video|>"])
def test_a_template_without_marks_around_the_video_is_refused(tmp_path: Path, mark: str) -> None:
    """Upstream would take its frames for pictures."""
    path = write_tiny_glm4v(tmp_path / "model", seed=5, template=CHAT_TEMPLATE.replace(mark, ""))
    with pytest.raises(ModelNotUsable, match=r"must put <\|begin_of_video\|> before the video and <\|end_of_video"):
        load_model(str(path))
