"""Finding a checkpoint by path or hub id, and judging it before any weight is read."""

import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

from slipstream.errors import ModelNotUsable
from slipstream.families.checkpoints import is_hub_id

_HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.safetensors"]
_HUB_TIMEOUT_S = 10.0
_SHA256_NAME = re.compile("[0-9a-f]{64}")
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r".*-\d+-of-\d+\.safetensors")
_PROCESSOR_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
_CODES = ("F8", "F6", "F4", "I8", "U8", "I4", "U4")
"""How kinds of numbers begin, as safetensors names them, that stand for weights and are none."""
_MAX_HEADER_BYTES = 100_000_000
"""Of a file of safetensors, as its own library has it."""
_UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError)
"""What reading a header raises that is none."""
_SAMPLE_BYTES = 64
"""Of a weight, which another training has left no two of alike."""
_BLOCK_BYTES = 1024**2
"""Of a file that is digested, before it is asked whether that is still wanted."""
_POINTER = b"version https://git-lfs"
"""How a file begins that Git LFS has not fetched yet."""
_FETCH = "fetch what is missing with `hf download`, or check the network and HF_HUB_OFFLINE"


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

    @property
    def stored_dtype(self) -> str:
        """What config.json says that its weights are, such as "bfloat16"; "" where it says nothing."""
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "")

    @classmethod
    def open(cls, ref: str) -> "Checkpoint":
        """Find `ref` on disk, or on the hub if it has the form of a hub id.

        Raises:
            ModelNotUsable: nothing is there, the config is broken, or the weights are not whole or not served.
        """
        path = _locate(ref)
        if (path / "adapter_config.json").is_file():
            raise ModelNotUsable(
                f"{ref}: {path} has an adapter, as of LoRA, which would be left out: merge it into its model"
                " (merge_and_unload of peft), save that with its processor, and give the new folder"
            )
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
        _read_object(ref, path / "generation_config.json")  # transformers goes on without one that is damaged
        _check_weights(ref, path)
        _check_quantisation(ref, config)
        return cls(ref, path, config)

    def read_json(self, name: str) -> dict[str, Any]:
        """Content of an optional JSON file; empty if it is not there."""
        return _read_object(self.ref, self.path / name) or {}

    def chat_template(self) -> str | None:
        """The processor's chat template, in transformers' order; None leaves it to the tokenizer's own."""
        for name in ("processor_config.json", "chat_template.json"):
            template = self.read_json(name).get("chat_template")
            if isinstance(template, str):
                return template
        jinja = self.path / "chat_template.jinja"
        return jinja.read_text(encoding="utf-8") if jinja.is_file() else None

    def video_processor_config(self) -> dict[str, Any]:
        """Settings of the video processor, looked up where transformers looks, in its order. Raises `ModelNotUsable`
        where there are none: a family's usual ones would be other pictures than the model was made with."""
        return self._processor_config("video_processor", _PROCESSOR_FILES)

    def image_processor_config(self) -> dict[str, Any]:
        """The same of the image processor, of a model that takes frames as pictures. Raises `ModelNotUsable`."""
        return self._processor_config("image_processor", _PROCESSOR_FILES[-1:])

    def _processor_config(self, part: str, files: Sequence[str]) -> dict[str, Any]:
        nested = self.read_json("processor_config.json").get(part)
        if isinstance(nested, dict):
            return nested
        for name in files:
            if (self.path / name).is_file():
                return self.read_json(name)
        raise ModelNotUsable(
            f"{self.ref}: {self.path} says nothing of how frames become its input; {_named(list(files))} (or"
            f" processor_config.json) belongs there; {_FETCH}"
        )

    def check_tokenizer(self) -> None:
        """Raises `ModelNotUsable` where there is none: transformers would make an empty one, or advise to install what
        is of no help."""
        if not _has_one_of(self.path, _TOKENIZER_FILES):
            raise ModelNotUsable(
                f"{self.ref}: cannot be loaded: {self.path} has no tokenizer.json; where a model is trained its"
                f" processor must be saved beside it; {_FETCH}"
            )

    def num_weights(self) -> int:
        """Numbers in all files of weights, by their headers. Raises `ModelNotUsable` for a file that is cut off, and
        for numbers that are codes of others, whatever the configuration says or does not."""
        return sum(_num_weights(self.ref, file) for file in self.path.glob("*.safetensors"))

    def sample(self) -> str:
        """SHA-256 over the configuration and a few bytes of each weight: what tells checkpoints apart without reading
        them, however the weights are spread over files."""
        found = sorted(line for file in self.path.glob("*.safetensors") for line in _sampled(file))
        return hashlib.sha256(json.dumps([self.config, found], sort_keys=True).encode()).hexdigest()

    def revision(self, given_up: threading.Event | None = None) -> str:
        """SHA-256 over the names and digests of all files that the model is made from.

        Reads the weights, except in the hub's cache, whose files are named by their digests: a shard a core, so that
        it takes no longer than loading them does. Raises `CancelledError` soon after it was given up.
        """
        paths = sorted({path for pattern in _HUB_FILES for path in self.path.glob(pattern) if path.is_file()})
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="digest") as threads:
            lines = [
                f"{path.name} {digest}\n"
                for path, digest in zip(paths, threads.map(partial(_file_digest, given_up), paths), strict=True)
            ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def _num_weights(ref: str, file: Path) -> int:
    """Raises `ModelNotUsable` for a file that is not all there: of many shards loading would not say which it is."""
    damaged = f"{ref}: cannot be loaded: {file.name} is cut off or damaged"
    try:
        with file.open("rb") as opened:
            entries, start = _read_entries(opened).values(), opened.tell()
        kinds = {str(entry["dtype"]) for entry in entries}
        num_weights = sum(int(math.prod(entry["shape"])) for entry in entries)
        num_bytes = start + max((int(entry["data_offsets"][1]) for entry in entries), default=0)
    except _UNREADABLE:
        raise ModelNotUsable(f"{damaged}: it has no header of safetensors; fetch it again") from None
    if (found := file.stat().st_size) != num_bytes:
        raise ModelNotUsable(f"{damaged}: it has {found} bytes, and {num_bytes} by its header; fetch it again")
    if codes := sorted(kind for kind in kinds if kind.startswith(_CODES)):
        raise _quantised(ref, ", ".join(codes))
    return num_weights


def _sampled(file: Path) -> list[str]:
    """A line for each weight of a file. None where they cannot be found, as then loading says why."""
    try:
        with file.open("rb") as opened:
            entries = _read_entries(opened)
            start = opened.tell()
            return [_sample_of(name, entry, opened, start) for name, entry in entries.items()]
    except _UNREADABLE:
        return []


def _sample_of(name: str, entry: Mapping[str, Any], opened: BinaryIO, start: int) -> str:
    first, end = entry["data_offsets"]
    middle = (first + end) // 2
    opened.seek(start + middle)
    return f"{name} {entry['dtype']} {entry['shape']} {opened.read(min(_SAMPLE_BYTES, end - middle)).hex()}"


def _read_entries(opened: BinaryIO) -> dict[str, Any]:
    """What a file tells of its weights, by name; the weights themselves follow where it has been read to."""
    size = int.from_bytes(opened.read(8), "little")
    header = json.loads(opened.read(min(size, _MAX_HEADER_BYTES)))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _file_digest(given_up: threading.Event | None, path: Path) -> str:
    real = path.resolve()
    if path.is_symlink() and real.parent.name == "blobs" and _SHA256_NAME.fullmatch(real.name):
        return real.name
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            if given_up is not None and given_up.is_set():
                raise CancelledError
            digest.update(block)
    return digest.hexdigest()


# -- where it is ------------------------------------------------------------------------------------------------------


def _locate(ref: str) -> Path:
    path = Path(os.path.expanduser(ref))  # as it is where nobody has that name
    if ref and path.is_dir():
        return path
    if ref and path.exists():
        raise ModelNotUsable(f"{ref}: a model is a directory, not a file")
    if not is_hub_id(ref):
        raise ModelNotUsable(f"{ref!r}: no such directory, and not of the form 'owner/name' of a model on the hub")
    return _download(ref)


def _download(ref: str) -> Path:
    """The hub's snapshot of `ref`: from the local cache where it is whole, else what it lacks is fetched."""
    cached = _cached(ref)
    if cached is not None and not missing_weights(ref, cached) and _has_what_stands_beside(cached):
        return cached
    try:
        # Without network this gives what is cached, whole or not: `_check_weights` sees to that.
        return Path(snapshot_download(ref, allow_patterns=_HUB_FILES, etag_timeout=_HUB_TIMEOUT_S))
    except GatedRepoError as error:
        raise ModelNotUsable(
            f"{ref}: its owner wants to know who takes it: accept the terms on its page on the hub, then give your"
            " token by `hf auth login` or HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotUsable(
            f"{ref}: no such directory, and the hub has no such model, or shows it only to some: check the name, or"
            " give your token by `hf auth login` or HF_TOKEN"
        ) from error
    except Exception as error:  # offline, disk full, ...
        lacks = "" if cached is None else f" what its cache lacks ({_named(missing_weights(ref, cached))})"
        raise ModelNotUsable(
            f"{ref}: no such directory, and it could not be fetched from the hub{lacks}; give a local path, or check"
            f" the name, the network and HF_HUB_OFFLINE ({type(error).__name__})"
        ) from error


def _has_what_stands_beside(path: Path) -> bool:
    """Who loaded weights and tokenizer only has none of its files in the cache, or weights alone no tokenizer's."""
    is_there = _has_one_of(path, ("processor_config.json", *_PROCESSOR_FILES))
    return is_there and _has_one_of(path, _TOKENIZER_FILES)


def _has_one_of(path: Path, names: Sequence[str]) -> bool:
    return any((path / name).is_file() for name in names)


def _cached(ref: str) -> Path | None:
    try:
        return Path(snapshot_download(ref, allow_patterns=_HUB_FILES, local_files_only=True))
    except (OSError, HFValidationError):
        return None


# -- whether it is whole ----------------------------------------------------------------------------------------------


def missing_weights(ref: str, path: Path) -> list[str]:
    """Names of the files of weights that should be in the folder and are not."""
    index = _read_object(ref, path / _INDEX)
    if index is not None:
        files = index.get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise ModelNotUsable(f"{ref}: {_INDEX} has no weight_map of file names")
        return sorted(name for name in set(files.values()) if not (path / name).is_file())
    found = [file.name for file in path.glob("*.safetensors")]
    if not found:
        return ["model.safetensors"]
    return [_INDEX] if all(_SHARD.fullmatch(name) for name in found) else []


def _check_weights(ref: str, path: Path) -> None:
    if missing := missing_weights(ref, path):
        raise ModelNotUsable(f"{ref}: {path} is not whole, it lacks {_named(missing)}; {_FETCH}")
    pointers = sorted(file.name for file in path.glob("*.safetensors") if _is_pointer(file))
    if pointers:
        raise ModelNotUsable(f"{ref}: {_named(pointers)} is a pointer of Git LFS, no weights; run `git lfs pull` there")


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(_POINTER)) == _POINTER


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


def _check_quantisation(ref: str, config: Mapping[str, Any]) -> None:
    text = config.get("text_config")
    settings = config.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config"))
    if settings:
        raise _quantised(ref, settings.get("quant_method", "unknown") if isinstance(settings, dict) else "unknown")


def _quantised(ref: str, method: str) -> ModelNotUsable:
    return ModelNotUsable(
        f"{ref}: its weights are quantised ({method}), and their kernels round by the number of rows, so that a window"
        " would not be judged as plain decoding chooses; give the checkpoint that is not quantised"
    )


def _read_object(ref: str, path: Path) -> dict[str, Any] | None:
    """None where there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotUsable(f"{ref}: {path.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotUsable(f"{ref}: {path.name} must hold a JSON object")
    return content
