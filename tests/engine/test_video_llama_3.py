"""What VideoLLaMA 3 has and no other family: frames that share a bound, each behind its time, and all their tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils.import_utils import is_torchvision_available

from slipstream.engine import load_model
from slipstream.errors import InvalidRequest, ModelNotUsable
from tests.engine.conftest import random_frames
from tests.support import hub_forms
from tests.support.tiny_families import write_tiny_video_llama_3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_video_llama_3(tmp_path_factory.mktemp("model"), seed=5)


def test_times_are_told_in_words(folder: Path) -> None:
    """Upstream takes frames whose rate nobody knows for one a second."""
    model = load_model(str(folder))
    for times_s, words in (
        ((0.0, 0.26, 61.04), ("Time 0.0s:", ",Time 0.3s:", ",Time 61.0s:")),
        ((), ("Time 0.0s:", ",Time 1.0s:", ",Time 2.0s:")),
    ):
        plan = model.plan_prompt("What?", 3, frame_size=(48, 64), times_s=times_s)
        assert [len(span) for span in plan.video] == [12, 12, 12] and plan.text_start == plan.video_stop
        assert "".join(words) in model.decode(plan.token_ids)


def test_the_more_frames_the_smaller_they_are(folder: Path) -> None:
    model = load_model(str(folder))
    for num_frames, num_tokens in ((1, 108), (2, 48), (5, 20), (20, 4)):
        plan = model.plan_prompt("What?", num_frames, frame_size=(144, 192))
        assert [len(span) for span in plan.video] == [num_tokens] * num_frames
        frames = random_frames(num_frames, 0, (144, 192))
        assert len(model.encode_frames(frames)) == plan.num_video_tokens


def test_a_template_without_a_video_is_refused(tmp_path: Path) -> None:
    path = write_tiny_video_llama_3(tmp_path / "model", seed=5)
    template = path / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|video_pad|>", ""))
    with pytest.raises(ModelNotUsable, match="must put one video before the user's text"):
        load_model(str(path))


def test_what_the_authors_published_is_refused_by_its_name(tmp_path: Path) -> None:
    """It needs code of its own, which is never run; transformers has another form of it."""
    path = write_tiny_video_llama_3(tmp_path / "model", seed=5)
    hub_forms.edit(path / "config.json", lambda config: config.update(model_type="videollama3_qwen2"))
    with pytest.raises(ModelNotUsable, match=r"unknown architecture 'videollama3_qwen2'; known: .*video_llama_3"):
        load_model(str(path))


def test_the_videos_placeholder_in_a_prompt_is_ordinary_text(folder: Path) -> None:
    model = load_model(str(folder))
    plan = model.plan_prompt("<|video_pad|> and Time 1.0s:<|video_pad|>,", 2, frame_size=(48, 64))
    assert [len(span) for span in plan.video] == [12, 12]
    assert "<|video_pad|> and Time" in model.decode(plan.token_ids)


def test_frames_of_another_size_than_planned_are_refused(folder: Path) -> None:
    model = load_model(str(folder))
    plan = model.plan_prompt("What?", 2, frame_size=(48, 64))
    with pytest.raises(InvalidRequest, match="planned for 24"):
        model.start_prefill(plan, model.encode_frames(random_frames(2, 0, (64, 64))))


@pytest.mark.skipif(not is_torchvision_available(), reason="the upstream processor needs torchvision")
def test_what_upstream_would_leave_out_is_what_hardly_differs(folder: Path) -> None:
    """With its compression on, which nothing here obeys: none of a moving picture's tokens, most of a still one's."""
    from transformers import VideoLlama3VideoProcessor

    upstream = VideoLlama3VideoProcessor.from_pretrained(folder)
    moving = random_frames(3, 0, (48, 64))
    still = np.repeat(moving[:1], 3, axis=0)
    told: dict[str, Any] = {"return_tensors": "pt", "input_data_format": "channels_last"}
    masks = [upstream([list(frames)], **told).video_compression_mask for frames in (moving, still)]
    assert [int(mask.sum()) for mask in masks] == [36, 12 + 1 + 1]
    model = load_model(str(folder))
    assert len(model.encode_frames(still)) == 36 and torch.isfinite(model.encode_frames(still)).all()
