"""Checkpoints in the forms of the hub's repositories load, and are the model that transformers makes of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from slipstream.engine import load_model
from slipstream.engine.checkpoint import Checkpoint, missing_weights
from slipstream.errors import ModelNotUsable
from tests.engine.conftest import random_frames
from tests.support import hub_forms
from tests.support.tiny_checkpoint import tiny_tokenizer, write_tiny_llava, write_tiny_qwen, write_tiny_qwen2
from tests.support.tiny_families import (
    INTERNVL_SPECIAL_TOKENS,
    write_tiny_internvl,
    write_tiny_llava_interleave,
    write_tiny_video_llama_3,
)
from tests.support.tiny_glm4v import write_tiny_glm4v
from tests.support.tiny_mistral3 import write_tiny_mistral3
from tests.support.tiny_qwen3_5 import write_tiny_qwen3_5

PROMPT = "What is happening here?"
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]


@dataclass(frozen=True)
class Form:
    write: Callable[..., Path]
    changes: tuple[Callable[[Path], None], ...]
    end_tokens: int = 1


def _llava(rename: Callable[[str], str], dtype: torch.dtype | None = None) -> Callable[[Path], None]:
    return lambda path: hub_forms.rename_weights(path, rename, dtype)


FORMS = {
    "GLM-4.1V-9B": Form(
        write_tiny_glm4v,
        (
            hub_forms.name_rotation_as_before,
            hub_forms.shard,
            lambda path: hub_forms.list_end_tokens(path, 0, 3),
            lambda path: hub_forms.edit(
                path / "video_preprocessor_config.json", lambda config: config.update(processor_class="Glm4vProcessor")
            ),
        ),
        end_tokens=3,
    ),
    "InternVL3-8B": Form(
        partial(write_tiny_internvl, text="qwen2"),
        (
            lambda path: hub_forms.cut_vocabulary(path, len(tiny_tokenizer(320, INTERNVL_SPECIAL_TOKENS)) - 1),
            hub_forms.leave_out_what_is_usual,
            hub_forms.shard,
            hub_forms.name_processor_as_before,
        ),
    ),
    "Qwen2-VL-7B": Form(
        write_tiny_qwen2,
        (
            hub_forms.flatten_config,
            hub_forms.shard,
            lambda path: hub_forms.move_template(path, "chat_template.json"),
            hub_forms.name_processor_as_before,
            lambda path: hub_forms.join_merges(path, as_pairs=False),
        ),
    ),
    "Mistral-Small-3.1-24B": Form(
        write_tiny_mistral3, (hub_forms.shard, lambda path: hub_forms.move_template(path, "chat_template.json"))
    ),
    "Ministral-3-3B-BF16": Form(partial(write_tiny_mistral3, text="ministral3"), (hub_forms.tie,)),
    "Qwen2-VL-2B": Form(
        write_tiny_qwen2,
        (
            hub_forms.tie,
            hub_forms.flatten_config,
            lambda path: hub_forms.move_template(path, "tokenizer_config.json"),
        ),
    ),
    "Qwen2.5-VL-7B": Form(
        write_tiny_qwen,
        (
            hub_forms.flatten_config,
            hub_forms.shard,
            lambda path: hub_forms.list_end_tokens(path, 0),
            lambda path: hub_forms.move_template(path, "chat_template.json"),
            hub_forms.name_processor_as_before,
            lambda path: hub_forms.join_merges(path, as_pairs=False),
        ),
        end_tokens=2,
    ),
    "Qwen2.5-VL-3B": Form(
        write_tiny_qwen,
        (
            hub_forms.tie,
            hub_forms.flatten_config,
            lambda path: hub_forms.move_template(path, "tokenizer_config.json"),
        ),
    ),
    "Qwen2.5-VL-32B": Form(
        write_tiny_qwen,
        (
            lambda path: hub_forms.rename_weights(path, hub_forms.qwen_of_2025),
            hub_forms.shard,
            lambda path: hub_forms.join_merges(path, as_pairs=True),
        ),
    ),
    "Qwen3.5-9B": Form(
        write_tiny_qwen3_5,
        (hub_forms.predict_ahead, hub_forms.shard, lambda path: hub_forms.list_end_tokens(path, 0)),
        end_tokens=2,
    ),
    "Qwen3.5-35B-A3B": Form(
        partial(write_tiny_qwen3_5, num_experts=4),
        (
            hub_forms.join_experts,
            hub_forms.predict_ahead,
            hub_forms.shard,
            lambda path: hub_forms.list_end_tokens(path, 0),
        ),
        end_tokens=2,
    ),
    "llava-onevision-qwen2-7b": Form(
        write_tiny_llava,
        (
            _llava(hub_forms.llava_of_2024, torch.float16),
            hub_forms.shard,
            lambda path: hub_forms.move_template(path, "chat_template.json"),
            hub_forms.name_processor_as_before,
        ),
    ),
    "llava-onevision-qwen2-0.5b": Form(
        write_tiny_llava, (_llava(hub_forms.llava_of_2024, torch.float16), hub_forms.tie)
    ),
    "llava-interleave-qwen-7b": Form(
        write_tiny_llava_interleave,
        (
            _llava(hub_forms.llava_of_2024, torch.bfloat16),
            hub_forms.shard,
            lambda path: hub_forms.move_template(path, "chat_template.json"),
            hub_forms.have_template_for_text_alone,
        ),
    ),
    "llava-interleave-qwen-0.5b": Form(
        write_tiny_llava_interleave, (_llava(hub_forms.llava_of_2024, torch.bfloat16), hub_forms.tie)
    ),
    "VideoLLaMA3-2B-Image-HF": Form(write_tiny_video_llama_3, (hub_forms.tie, hub_forms.bound_by_pixels)),
    "VideoLLaMA3-7B-Image-HF": Form(write_tiny_video_llama_3, (hub_forms.shard, hub_forms.bound_by_pixels)),
    "llava of 2025": Form(write_tiny_llava, (_llava(hub_forms.llava_of_2025),)),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_hubs_form_is_upstreams_model(tmp_path: Path, name: str) -> None:
    form = FORMS[name]
    path = form.write(tmp_path / "model", seed=5)
    for change in form.changes:
        change(path)
    ours = load_model(str(path))
    theirs: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    assert len(ours.info.eos_token_ids) == form.end_tokens
    frames = random_frames(4, 1, (32, 32))
    plan = ours.plan_prompt(PROMPT, 4, frame_size=(32, 32))
    state, logits = ours.start_prefill(plan, ours.encode_frames(frames)).finish()
    hidden = ours._adapter.embed_prompt(plan, ours.encode_frames(frames))[None]
    positions, _ = ours._adapter.positions(plan, torch.arange(plan.num_tokens), "original")
    with torch.inference_mode():
        expected = theirs.lm_head(
            theirs.model.language_model(inputs_embeds=hidden, position_ids=positions[..., None, :]).last_hidden_state
        )[0, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    state.close()


def test_every_form_has_the_same_digest_of_its_tokenizer(tmp_path: Path) -> None:
    digests = set()
    for as_pairs in (False, True):
        path = write_tiny_qwen(tmp_path / str(as_pairs), seed=5)
        hub_forms.join_merges(path, as_pairs=as_pairs)
        digests.add(load_model(str(path)).info.tokenizer_digest)
    assert len(digests) == 1


# -- caches of the hub ------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = write_tiny_llava(tmp_path / "whole", seed=5)
    hub_forms.shard(path)
    return path


def hub(monkeypatch: pytest.MonkeyPatch, cached: Path | None, whole: Path) -> list[bool]:
    """A hub whose cache holds `cached` and that has `whole`. Returns what was asked for: whether of the cache alone."""
    asked: list[bool] = []

    def snapshot_download(ref: str, *, local_files_only: bool = False, **_: object) -> str:
        asked.append(local_files_only)
        if not local_files_only:
            return str(whole)
        if cached is None:
            raise FileNotFoundError(ref)
        return str(cached)

    monkeypatch.setattr("slipstream.engine.checkpoint.snapshot_download", snapshot_download)
    return asked


def part_of(whole: Path, folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes((whole / name).read_bytes())
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ("config.json", "tokenizer.json"),
        ("config.json", "model.safetensors.index.json"),
        ("config.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors"),
        ("config.json", "model-00001-of-00003.safetensors"),
        ("config.json", INDEX, *SHARDS),
        ("config.json", INDEX, *SHARDS, "tokenizer.json"),
        ("config.json", INDEX, *SHARDS, "video_preprocessor_config.json"),
    ],
)
def test_a_half_filled_cache_is_filled(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    asked = hub(monkeypatch, part_of(sharded, tmp_path / "cached", *names), sharded)
    assert Checkpoint.open("owner/name").path == sharded
    assert asked == [True, False]


def test_a_whole_cache_needs_no_network(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, sharded, sharded)
    assert Checkpoint.open("owner/name").path == sharded
    assert asked == [True]


def test_offline_a_half_filled_cache_says_what_it_lacks(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without network the hub's library gives what it has."""
    cached = part_of(sharded, tmp_path / "cached", "config.json", "model.safetensors.index.json")
    for name in ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        (cached / name).write_bytes((sharded / name).read_bytes())
    hub(monkeypatch, cached, cached)
    with pytest.raises(ModelNotUsable, match=r"lacks model-00002-of-00003\.safetensors; fetch .*HF_HUB_OFFLINE"):
        Checkpoint.open("owner/name")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("GatedRepoError", "accept the terms"),
        ("RepositoryNotFoundError", "the hub has no such model"),
        ("LocalEntryNotFoundError", "HF_HUB_OFFLINE"),
    ],
)
def test_what_the_hub_refuses_is_told(error: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    kind = getattr(errors, error)

    def refuse(ref: str, **_: object) -> str:
        raise kind.__new__(kind)

    monkeypatch.setattr("slipstream.engine.checkpoint.snapshot_download", refuse)
    with pytest.raises(ModelNotUsable, match=words):
        Checkpoint.open("owner/name")


def test_a_partial_folder_says_what_it_lacks(sharded: Path) -> None:
    (sharded / "model-00001-of-00003.safetensors").unlink()
    (sharded / "model-00003-of-00003.safetensors").unlink()
    assert missing_weights("ref", sharded) == ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"]
    with pytest.raises(ModelNotUsable, match=r"lacks model-00001-of-00003\.safetensors and 1 more"):
        load_model(str(sharded))


def test_a_pointer_of_git_lfs_is_no_weight(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid ...")
    with pytest.raises(ModelNotUsable, match="git lfs pull"):
        load_model(str(sharded))


@pytest.mark.parametrize(
    ("keep", "why"), [(-1000, r"it has \d+ bytes, and \d+ by its header"), (40, "it has no header of safetensors")]
)
def test_a_shard_that_is_cut_off_is_named(sharded: Path, keep: int, why: str) -> None:
    """As by a copy that was broken off: safetensors says what is wrong, and not where."""
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelNotUsable, match=rf"model-00002-of-00003\.safetensors is cut off or damaged: {why}; fetch"):
        load_model(str(sharded))


@pytest.mark.parametrize("index", ["[]", '{"weight_map": 7}', '{"weight_map": {"a": 7}}', "{"])
def test_a_damaged_index_is_named(sharded: Path, index: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelNotUsable, match=r"model\.safetensors\.index\.json"):
        load_model(str(sharded))


@pytest.mark.parametrize("place", ["top", "text"])
def test_quantised_weights_are_refused_with_the_reason(tmp_path: Path, place: str) -> None:
    path = write_tiny_llava(tmp_path / "model", seed=5)
    config = json.loads((path / "config.json").read_text())
    (config if place == "top" else config["text_config"])["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotUsable, match="quantised"):
        load_model(str(path))
