"""Every family in the engine against plain transformers: the prompt as upstream's processor writes it, the answer as
upstream's `generate` gives it."""

import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from slipstream.engine import DecodeState, PromptPlan, VideoLM, load_model
from slipstream.errors import LimitExceeded
from slipstream.session_messages import Chat
from slipstream.video.messages import SampledVideo
from tests.engine.test_qwen2_5_vl import greedy
from tests.support import tiny_checkpoint, tiny_families, tiny_glm4v, tiny_mistral3, tiny_qwen3_5
from tests.support.clips import make_colour_clip, sample_clip
from tests.support.reference import Reference
from tests.support.variants import one_in

FAMILIES = {
    "glm4v": tiny_glm4v.write_tiny_glm4v,
    "glm4v, GLM-4.6V-Flash": partial(tiny_glm4v.write_tiny_glm4v, processor="Glm46VProcessor"),
    "glm46v": partial(tiny_glm4v.write_tiny_glm4v, model_type="glm46v"),
    "glm4v_moe": partial(tiny_glm4v.write_tiny_glm4v, model_type="glm4v_moe"),
    "internvl 3": partial(tiny_families.write_tiny_internvl, text="qwen2"),
    "internvl 3.5": tiny_families.write_tiny_internvl,
    "internvl 3.5, a mixture": partial(tiny_families.write_tiny_internvl, text="qwen3_moe"),
    "llava_interleave": tiny_families.write_tiny_llava_interleave,
    "llava_interleave, a line a picture": partial(
        tiny_families.write_tiny_llava_interleave,
        template=tiny_families.LLAVA_INTERLEAVE_CHAT_TEMPLATE.replace("'<image>'", "'<image>\\n'"),
    ),
    "llava_next_video": tiny_families.write_tiny_llava_next_video,
    "llava_onevision": tiny_checkpoint.write_tiny_llava,
    "mistral3": tiny_mistral3.write_tiny_mistral3,
    "mistral3, Ministral 3": partial(tiny_mistral3.write_tiny_mistral3, text="ministral3"),
    "qwen2_5_vl": tiny_checkpoint.write_tiny_qwen,
    "qwen2_vl": tiny_checkpoint.write_tiny_qwen2,
    "qwen3_5": tiny_qwen3_5.write_tiny_qwen3_5,
    "qwen3_5_moe": partial(tiny_qwen3_5.write_tiny_qwen3_5, num_experts=4),
    "qwen3_vl": tiny_families.write_tiny_qwen3,
    "qwen3_vl_moe": partial(tiny_families.write_tiny_qwen3, num_experts=4),
    "smolvlm": tiny_families.write_tiny_smolvlm,
    "video_llama_3": tiny_families.write_tiny_video_llama_3,
}
PROMPT = "Describe the video, Décris, 🎬\nthen stop."
NUM_TOKENS = 16
CLIPS = [sample_clip(make_colour_clip(seed), num_frames) for seed, num_frames in ((1, 1), (2, 5), (3, 12))]


@dataclass
class Family:
    """One checkpoint, twice."""

    ours: VideoLM
    theirs: Reference

    def plan(self, video: SampledVideo, prompt: Chat | str = PROMPT) -> PromptPlan:
        return self.ours.plan_prompt(
            prompt,
            len(video.frames),
            frame_size=video.frames.shape[1:3],
            seconds_per_frame=video.duration_s / len(video.frames),
            times_s=video.timestamps_s,
        )

    def prefill(
        self, video: SampledVideo, prompt: Chat | str = PROMPT, **options: Any
    ) -> tuple[DecodeState, torch.Tensor]:
        plan, features = self.plan(video, prompt), self.ours.encode_frames(video.frames)
        return self.ours.start_prefill(plan, features, **options).finish()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    path = FAMILIES[request.param](tmp_path_factory.mktemp(request.param), seed=5, max_context=2048)
    family = Family(load_model(str(path)), Reference(path))
    family.theirs.model.generation_config.eos_token_id = None
    return family


@pytest.mark.parametrize("video", CLIPS, ids=lambda video: f"{len(video.frames)} frames")
@one_in(3, "family", "video")
def test_prompt_and_answer_are_those_of_transformers(family: Family, video: SampledVideo) -> None:
    assert list(family.plan(video).token_ids) == family.theirs.prompt_ids(video, PROMPT)
    assert greedy(family.ours, *family.prefill(video), NUM_TOKENS) == family.theirs.answer(video, PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("system", ["", "Answer briefly, s'il te plaît."])
@pytest.mark.parametrize("turns", [(), ("What is it?", "A red square."), (PROMPT, "Stop.\n", "", " And? ")])
@one_in(3, "family", "system", "turns")
def test_a_chat_and_its_answer_are_those_of_transformers(family: Family, system: str, turns: tuple[str, ...]) -> None:
    video, chat = CLIPS[1], Chat(PROMPT, system, turns)
    assert list(family.plan(video, chat).token_ids) == family.theirs.prompt_ids(video, chat)
    answer = greedy(family.ours, *family.prefill(video, chat), NUM_TOKENS)
    assert answer == family.theirs.answer(video, chat, NUM_TOKENS)


def test_two_videos_interleaved_do_not_touch_each_other(family: Family) -> None:
    references = [family.theirs.answer(video, PROMPT, NUM_TOKENS) for video in CLIPS[1:]]
    sessions = [family.prefill(video) for video in CLIPS[1:]]
    answers = [[int(logits.argmax())] for _, logits in sessions]
    for _ in range(NUM_TOKENS - 1):
        steps = family.ours.step([(state, answer[-1:]) for (state, _), answer in zip(sessions, answers, strict=True)])
        for logits, answer in zip(steps, answers, strict=True):
            answer.append(int(logits[-1].argmax()))
    assert answers == references


@pytest.mark.parametrize("scheme", ["original", "compact"])
def test_what_is_pruned_is_not_there(family: Family, scheme: str) -> None:
    """Upstream's text model with those rows left out."""
    video = CLIPS[1]
    plan, features = family.plan(video), family.ours.encode_frames(video.frames)
    keep = torch.arange(0, plan.num_video_tokens, 3)
    _, logits = family.prefill(video, keep=keep, positions=scheme)
    is_kept = torch.ones(plan.num_tokens, dtype=torch.bool)
    is_kept[plan.video_rows] = False
    is_kept[plan.video_rows[keep]] = True
    adapter, hidden_size = family.ours._adapter, family.ours.info.hidden_size
    rows = is_kept.nonzero().squeeze(1)
    with torch.inference_mode():
        hidden = adapter.embed_prompt(plan, features[:, :hidden_size])[is_kept]
        more: dict[str, Any] = {}
        if features.shape[1] > hidden_size:
            more["visual_pos_masks"] = torch.isin(rows, plan.video_rows)[None]
            more["deepstack_visual_embeds"] = list(features[keep, hidden_size:].split(hidden_size, dim=1))
        positions, _ = adapter.positions(plan, rows, scheme)
        text_model = getattr(family.theirs.model.model, "language_model", None) or family.theirs.model.model.text_model
        states = text_model(inputs_embeds=hidden[None], position_ids=positions[..., None, :], **more)
        expected = family.theirs.model.lm_head(states.last_hidden_state)[0, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_streamed_text_is_upstreams(family: Family) -> None:
    """Also where the random answer is made of bytes that are no text."""
    answer = family.theirs.answer(CLIPS[1], PROMPT, 48)
    stream = family.ours.text_stream()
    assert "".join(stream.push(answer)) + stream.flush() == family.theirs.text(answer)


def test_as_many_frames_as_a_model_says_have_room(family: Family) -> None:
    """With all that stands beside their tokens: the number of a frame, its time, its marks."""
    model, most = family.ours, family.ours.info.max_frames
    assert model.plan_prompt("?", most).num_tokens < model.info.max_context
    with pytest.raises(LimitExceeded, match=f"at most {most}"):
        model.plan_prompt("?", most + model._adapter.frames_per_step)


IMPORT_EACH_FIRST = """
import importlib, os, pkgutil, sys
import torch, transformers.modeling_utils  # what takes long
import slipstream.families as families

for module in pkgutil.iter_modules(families.__path__, "slipstream.families."):
    if not (child := os.fork()):
        importlib.import_module(module.name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module.name
"""


def test_each_family_may_be_what_is_imported_first() -> None:
    """As by who writes another one; the engine imports them, and they parts of it."""
    done = subprocess.run([sys.executable, "-c", IMPORT_EACH_FIRST], capture_output=True, text=True)
    assert not done.returncode, done.stderr
