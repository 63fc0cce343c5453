"""Finding a checkpoint and judging it before any weight is read. Knows files; not model families."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer

from slipstream.errors import ModelNotUsable

_HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.safetensors"]
_HUB_TIMEOUT_S = 10.0
_SHA256_NAME = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A local directory that holds a model."""

    ref: str
    """What the operator asked for: a path or a hub id."""
    path: Path
    config: Mapping[str, Any]
    """Content of config.json."""

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @classmethod
    def open(cls, ref: str) -> "Checkpoint":
        """Find `ref` on disk, or on the hub if it has the form of a hub id.

        Raises:
            ModelNotUsable: nothing is there, the config is broken, or the weights are not safetensors.
        """
        path = _locate(ref)
        config = _read_object(ref, path / "config.json")
        if config is None:
            raise ModelNotUsable(f"{ref}: {path} has no config.json; it is no model directory")
        if not isinstance(config.get("model_type"), str):
            raise ModelNotUsable(f"{ref}: config.json has no model_type")
        if not any(path.glob("*.safetensors")):
            raise ModelNotUsable(
                f"{ref}: no *.safetensors in {path}; pickled weights can run code and are never"
                " loaded, convert them first"
            )
        return cls(ref, path, config)

    def read_json(self, name: str) -> dict[str, Any]:
        """Content of an optional JSON file; empty if it is not there."""
        return _read_object(self.ref, self.path / name) or {}

    def chat_template(self) -> str | None:
        """The processor's chat template; None leaves it to the tokenizer's own."""
        jinja = self.path / "chat_template.jinja"
        if jinja.is_file():
            return jinja.read_text(encoding="utf-8")
        for name in ("chat_template.json", "processor_config.json"):
            template = self.read_json(name).get("chat_template")
            if isinstance(template, str):
                return template
        return None

    def video_processor_config(self) -> dict[str, Any]:
        """Settings of the video processor, looked up where transformers looks, in its order."""
        nested = self.read_json("processor_config.json").get("video_processor")
        if isinstance(nested, dict):
            return nested
        return self.read_json("video_preprocessor_config.json") or self.read_json("preprocessor_config.json")

    def revision(self) -> str:
        """SHA-256 over the names and digests of all files that the model is made from. Reads the weights: seconds to
        minutes, except in the hub's cache, whose files are named by their digests."""
        paths = {path for pattern in _HUB_FILES for path in self.path.glob(pattern) if path.is_file()}
        lines = [f"{path.name} {_file_digest(path)}\n" for path in sorted(paths)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    real = path.resolve()
    if path.is_symlink() and real.parent.name == "blobs" and _SHA256_NAME.fullmatch(real.name):
        return real.name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 over what decides token ids: vocabulary, merges, normaliser, pre-tokeniser and added tokens."""
    content = json.loads(tokenizer.to_str())
    decisive = {key: content[key] for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _locate(ref: str) -> Path:
    path = Path(ref).expanduser()
    if ref and path.is_dir():
        return path
    if ref and path.exists():
        raise ModelNotUsable(f"{ref}: a model is a directory, not a file")
    if ref.startswith((".", "/", "~")) or ref.count("/") != 1:
        raise ModelNotUsable(f"{ref!r}: no such directory, and not of the form 'owner/name' of a model on the hub")
    return _download(ref)


def _download(ref: str) -> Path:
    """The hub's snapshot of `ref`, from the local hub cache if it is there."""
    try:
        return Path(snapshot_download(ref, allow_patterns=_HUB_FILES, local_files_only=True))
    except (OSError, HFValidationError):
        pass  # not cached: ask the hub
    try:
        return Path(snapshot_download(ref, allow_patterns=_HUB_FILES, etag_timeout=_HUB_TIMEOUT_S))
    except Exception as error:  # offline, unknown, private, gated, disk full, ...
        raise ModelNotUsable(
            f"{ref}: no such directory, and it could not be fetched from the hub; give a local path, or check the name,"
            f" the network and HF_HUB_OFFLINE ({type(error).__name__})"
        ) from error


def _read_object(ref: str, path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotUsable(f"{ref}: {path.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotUsable(f"{ref}: {path.name} must hold a JSON object")
    return content
