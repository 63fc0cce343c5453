"""What is told of a checkpoint without loading it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from slipstream.engine.loading import load_model
from slipstream.families.checkpoints import folders_tokenizer_digest, is_hub_id, tokenizer_digest
from tests.support.tiny_checkpoint import write_tiny_llava


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    path = write_tiny_llava(tmp_path / "model", seed=1, layers=1, hidden=16)
    loaded: dict[str, Any] = json.loads((path / "tokenizer.json").read_text())
    return loaded


def test_the_form_of_merges_does_not_count(content: dict[str, Any]) -> None:
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in content["model"]["merges"]]
    assert pairs
    digests = {
        tokenizer_digest(content | {"model": content["model"] | {"merges": merges}})
        for merges in (pairs, [" ".join(pair) for pair in pairs])
    }
    assert digests == {tokenizer_digest(content)}
    assert tokenizer_digest(content | {"model": content["model"] | {"merges": pairs[::-1]}}) not in digests


def test_settings_of_a_run_and_options_that_are_off_do_not_count(content: dict[str, Any]) -> None:
    digest = tokenizer_digest(content)
    assert tokenizer_digest(content | {"truncation": {"max_length": 8}, "padding": {"length": 8}}) == digest
    older = {key: value for key, value in content["model"].items() if key != "ignore_merges"}
    assert tokenizer_digest(content | {"model": older}) == digest
    assert tokenizer_digest(content | {"model": older | {"ignore_merges": True}}) != digest


@pytest.mark.parametrize("part", ["model", "pre_tokenizer", "added_tokens"])
def test_what_decides_ids_counts(content: dict[str, Any], part: str) -> None:
    assert tokenizer_digest(content | {part: None}) != tokenizer_digest(content)


def test_a_loaded_model_has_the_digest_of_its_file_whatever_the_form(tmp_path: Path) -> None:
    digests = set()
    for form in ("pairs", "strings"):
        path = write_tiny_llava(tmp_path / form, seed=1, layers=1, hidden=16)
        file = path / "tokenizer.json"
        content = json.loads(file.read_text())
        if form == "strings":
            content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
            file.write_text(json.dumps(content))
        digests |= {load_model(str(path)).info.tokenizer_digest, tokenizer_digest(content)}
    assert len(digests) == 1


def test_a_tokenizer_that_transformers_has_saved_again_is_the_hubs(tmp_path: Path) -> None:
    """Its class writes offsets otherwise than the hub's file of Qwen, and takes them so from either."""
    hub, again = tmp_path / "hub", tmp_path / "again"
    made = Qwen2Tokenizer(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")], eos_token="<|im_end|>")
    for folder in (hub, again):
        made.save_pretrained(folder)
    content = json.loads((hub / "tokenizer.json").read_text())
    step = content["pre_tokenizer"]["pretokenizers"][1]
    assert step["type"] == "ByteLevel" and step["trim_offsets"]
    step["trim_offsets"] = False
    (hub / "tokenizer.json").write_text(json.dumps(content))
    digests = {folders_tokenizer_digest(folder) for folder in (hub, again)}
    for tokenizer in (Qwen2Tokenizer.from_pretrained(hub), PreTrainedTokenizerFast.from_pretrained(hub)):
        digests.add(tokenizer_digest(json.loads(tokenizer.backend_tokenizer.to_str())))
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("ref", "expected"),
    [("owner/name", True), ("llava-hf/llava-onevision-qwen2-7b-ov-hf", True)]
    + [(ref, False) for ref in ("", "name", "/name", "owner/", "a/b/c", "./name", "../name", "~/name")],
)
def test_hub_ids(ref: str, expected: bool) -> None:
    assert is_hub_id(ref) == expected
