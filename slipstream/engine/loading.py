"""Loading a model by path or hub id: finding and judging the checkpoint, the list of families, reading the weights."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from slipstream.engine.attention import IMPLEMENTATION, get_kernel
from slipstream.engine.forward import Runner
from slipstream.engine.video_lm import Adapter, VideoLM
from slipstream.errors import ModelNotUsable
from slipstream.families.adapter import TextDecoder
from slipstream.families.checkpoints import is_hub_id, tokenizer_digest
from slipstream.messages import ModelInfo

# -- checkpoint -------------------------------------------------------------------------------------------------------

# Finding a checkpoint and judging it before any weight is read.

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


def _locate(ref: str) -> Path:
    path = Path(ref).expanduser()
    if ref and path.is_dir():
        return path
    if ref and path.exists():
        raise ModelNotUsable(f"{ref}: a model is a directory, not a file")
    if not is_hub_id(ref):
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


# -- registry ---------------------------------------------------------------------------------------------------------

AdapterFactory = Callable[[PreTrainedModel, Checkpoint, PreTrainedTokenizerBase], Adapter]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_FAMILIES: Mapping[str, str] = {
    "llava_onevision": "slipstream.families.llava_onevision:LlavaOnevision",
    "qwen2_5_vl": "slipstream.families.qwen2_5_vl:Qwen2_5VL",
}
"""Model type -> its adapter, imported when first used."""


def load_model(
    ref: str, *, dtype: str = "float32", device: str = "cpu", attention: str = "auto", strict_width: int = 0
) -> VideoLM:
    """Load a Video-LLM.

    Args:
        ref: a local directory, or an id on the Hugging Face hub.
        dtype: float32, bfloat16 or float16.
        device: what `torch.device` understands.
        attention: auto, matmul, sdpa or flash.
        strict_width: above 0, the width of every step, see `VideoLM.step`.

    Raises:
        ModelNotUsable: the message says what is wrong and what to do.
    """
    torch_dtype, torch_device = _dtype(dtype), _device(device)
    _hand_over_logs()
    kernel = get_kernel(attention, torch_device, torch_dtype, masked_ends=strict_width > 0)
    checkpoint = Checkpoint.open(ref)
    make_adapter = _family(checkpoint)
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as digesting:
        revision = digesting.submit(checkpoint.revision)
        try:
            tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False)
            model = _load_weights(checkpoint, torch_dtype, torch_device)
            adapter = make_adapter(model, checkpoint, tokenizer)
        except ModelNotUsable:
            raise
        except Exception as error:  # upstream raises dozens of types for a damaged checkpoint
            raise ModelNotUsable(f"{ref}: cannot be loaded: {error}") from error
    _check_attention_layers(checkpoint, model)
    info = _describe(checkpoint, model, adapter, tokenizer, revision.result())
    runner = Runner(adapter.decoder, adapter.lm_head, kernel, fixed_shapes=strict_width > 0)
    return VideoLM(info, adapter, runner, TextDecoder(tokenizer.backend_tokenizer), strict_width=strict_width)


def _hand_over_logs() -> None:
    """Leaves it to the process how transformers' messages look, and draws no progress bars between them."""
    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ModelNotUsable(f"unknown dtype {name!r}; known: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _device(name: str) -> torch.device:
    """The device called `name`, tried out: a name alone says nothing of what this machine has."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelNotUsable(f"device {name!r} is not usable here; use 'cpu', or check the driver: {error}") from error
    return device


def _family(checkpoint: Checkpoint) -> AdapterFactory:
    if checkpoint.model_type not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelNotUsable(f"{checkpoint.ref}: unknown architecture {checkpoint.model_type!r}; known: {known}")
    module_name, _, attribute = _FAMILIES[checkpoint.model_type].partition(":")
    return cast(AdapterFactory, getattr(import_module(module_name), attribute))


def _load_weights(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        checkpoint.path,
        dtype=dtype,
        attn_implementation={"": "sdpa", "vision_config": "sdpa", "text_config": IMPLEMENTATION},
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model, report = loaded  # a pair because of `output_loading_info`
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelNotUsable(f"{checkpoint.ref}: {len(missing)} weights are missing, for example {missing[0]}")
    return cast(PreTrainedModel, model.to(device).eval())


def _check_attention_layers(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelNotUsable(f"{checkpoint.ref}: only full attention is supported, not {', '.join(sorted(kinds))}")


def _describe(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    adapter: Adapter,
    tokenizer: PreTrainedTokenizerBase,
    revision: str,
) -> ModelInfo:
    text = model.config.get_text_config()
    one_step = adapter.plan_prompt("?", adapter.frames_per_step)
    room = text.max_position_embeddings - 1 - (one_step.num_tokens - one_step.num_video_tokens)
    return ModelInfo(
        model_id=checkpoint.ref,
        model_type=checkpoint.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        tokenizer_digest=tokenizer_digest(json.loads(tokenizer.backend_tokenizer.to_str())),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        max_context=text.max_position_embeddings,
        tokens_per_frame=-(-adapter.tokens_per_step // adapter.frames_per_step),
        max_frames=room // adapter.tokens_per_step * adapter.frames_per_step,
        revision=revision,
    )


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end an answer: the generation config's, else the model config's, else the tokenizer's."""
    generation: Any = model.generation_config
    candidates = (generation.eos_token_id, model.config.get_text_config().eos_token_id, tokenizer.eos_token_id)
    eos = next((candidate for candidate in candidates if candidate is not None), ())
    return (eos,) if isinstance(eos, int) else tuple(eos)
