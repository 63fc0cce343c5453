"""What a checkpoint's name and its tokenizer.json tell before any model is loaded."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import ModelNotUsable

_DECISIVE = ("model", "normalizer", "pre_tokenizer", "added_tokens")


def is_hub_id(ref: str) -> bool:
    """Whether `ref` has the form OWNER/NAME of a model on the hub. So may a relative folder: look for that first."""
    return ref.count("/") == 1 and all(ref.split("/")) and not ref.startswith((".", "~"))


def tokenizer_digest(content: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of what decides token ids in a parsed tokenizer.json: the same for two files that differ only in
    how they are written, or in settings of a run such as truncation and padding."""
    decisive = {key: content.get(key) for key in _DECISIVE}
    if isinstance(model := decisive["model"], dict):
        decisive["model"] = _canonical_model(model)
    decisive["pre_tokenizer"] = _canonical_step(decisive["pre_tokenizer"])
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def folders_tokenizer_digest(folder: Path) -> str | None:
    """As `tokenizer_digest`; None of a folder without a tokenizer.json. Raises `ModelNotUsable` for a damaged one."""
    try:
        return tokenizer_digest(json.loads((folder / "tokenizer.json").read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError):
        raise ModelNotUsable(f"{folder / 'tokenizer.json'} is damaged: no JSON object") from None


def _canonical_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Merges as pairs, which older files write as "a b"; and without options that are off, which older files lack."""
    given = {key: value for key, value in model.items() if value is not None and value is not False and value != ""}
    if "merges" in given:
        given["merges"] = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in given["merges"]]
    return given


def _canonical_step(step: Any) -> Any:
    """A pre-tokenizer with offsets as transformers' own classes trim them: files on the hub say otherwise, and no id
    depends on that."""
    if isinstance(step, list):
        return [_canonical_step(each) for each in step]
    if not isinstance(step, dict):
        return step
    return {key: True if key == "trim_offsets" else _canonical_step(value) for key, value in step.items()}
