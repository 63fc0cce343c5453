"""What the pocket pairs of both families share, and what each family supplies."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast

Role = Literal["target", "draft"]
ROLES: tuple[Role, ...] = ("target", "draft")

IMAGE_SIZE = 112
STORED_DTYPE = torch.bfloat16
PIXELS: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""What the processors of both families do to pixels; the frames' size is theirs."""
_MODELS_DIR = Path(__file__).resolve().parent.parent / "models"


class Family(Protocol):
    """One architecture in which a pocket pair is trained."""

    name: str
    """Its `model_type`."""
    folder: Path
    """Where the pair is kept."""
    model_class: Any
    frames_per_step: int
    """Frames that share their tokens."""
    tokens_per_step: int

    def train_tokenizer(self) -> PreTrainedTokenizerFast:
        """The pair's tokenizer, with the family's chat template and placeholders."""
        ...

    def build(self, role: Role, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Any:
        """A freshly initialised model of the role's size."""
        ...

    def video_features(self, model: Any, pixel_values: Tensor) -> Tensor:
        """Tokens of frames [steps * frames_per_step, 3, 112, 112] as [steps, tokens_per_step, hidden]."""
        ...

    def closing(self, model: Any) -> Tensor:
        """Embeddings [k, hidden] that follow the video's tokens; k may be 0."""
        ...

    def closing_parameters(self, model: Any) -> list[nn.Parameter]:
        """What of `closing` is learned."""
        ...

    def prompt_positions(
        self, model: Any, before_ids: list[int], num_frames: int, after_ids: list[int], seconds_per_frame: float
    ) -> tuple[Tensor, int]:
        """Positions [n] or [axes, n] of the whole prompt with all its video tokens, and that of the answer's start."""
        ...

    def vision_parameters(self, model: Any) -> list[nn.Parameter]:
        """What the first stage trains: everything from pixels to video tokens."""
        ...

    def prepare(self, model: Any) -> None:
        """Makes training fast, by other kernels or by compiling layers; changes no result."""
        ...

    def processor_files(self) -> dict[str, dict[str, Any]]:
        """What the family's processor and its parts read; written by hand because they need torchvision to exist."""
        ...


def family_folder(name: str) -> Path:
    return _MODELS_DIR / name


def generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=320,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def sharpen_edge_filters(filters: Tensor) -> None:
    """Three of four filters [out, channels, ..., height, width] begin as edge filters: without mean, and stronger."""
    edges = torch.arange(len(filters)) % 4 != 0
    filters[edges] -= filters[edges].mean((-2, -1), keepdim=True)
    filters[edges] *= 3.0


def begin_as_identity(layers: Sequence[Any]) -> None:
    """Layers that add nothing until they have learned something."""
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def save_model(family: Family, model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes every file of a checkpoint, see `write_checkpoint`."""
    write_checkpoint(family.model_class(model.config), model, tokenizer, family.processor_files(), folder)


def write_checkpoint(
    rounded: Any, model: Any, tokenizer: PreTrainedTokenizerFast, files: Mapping[str, Any], folder: Path
) -> None:
    """Writes every file of a checkpoint, each replaced at once, weights rounded to the stored type.

    Args:
        rounded: another model of the same config, which takes the weights.
        files: of the processor, JSON by name.
    """
    scratch = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    rounded.to(STORED_DTYPE)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = model.generation_config
    rounded.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    for name, content in files.items():
        (scratch / name).write_text(json.dumps(content, indent=2) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for path in scratch.iterdir():
        path.chmod(0o644)
        os.replace(path, folder / path.name)
    scratch.rmdir()


def text_config(model: Any) -> Any:
    return model.config.text_config


def normalise(frames: Tensor) -> Tensor:
    """uint8 frames [..., height, width, 3] as the pixel values [..., 3, height, width] the vision towers take."""
    return (frames.float() / 127.5 - 1.0).movedim(-1, -3).contiguous()
