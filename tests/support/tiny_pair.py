"""Writes a target and a draft with random weights that agree on many tokens, the target several times slower.

The target is the draft with more layers on top, whose contribution is damped: the damping sets the acceptance rate,
the number of layers the speed ratio. So windows, deaths of the line and restarts all happen, as with trained models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.support.tiny_checkpoint import write_tiny_llava

WriteCheckpoint = Callable[..., Path]
"""One of `tiny_checkpoint.write_tiny_*`."""
_NORMS_BEHIND = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
"""GLM's, which such an output goes through before it is added."""
_RESIDUAL_OUTPUTS = (
    "o_proj.weight",
    "linear_attn.out_proj.weight",
    "down_proj.weight",
    "experts.down_proj",
    *_NORMS_BEHIND,
)


@dataclass(frozen=True)
class TinyPair:
    """Two checkpoints that share their tokenizer."""

    target: Path
    draft: Path


def write_tiny_pair(
    folder: Path,
    *,
    seed: int,
    draft_layers: int = 2,
    extra_layers: int = 16,
    damping: float = 0.03,
    write: WriteCheckpoint = write_tiny_llava,
) -> TinyPair:
    """Writes both below `folder`. `damping` 0 makes them agree always, 1 never."""
    draft = write(folder / "draft", seed=seed, layers=draft_layers, max_context=4096)
    target = write(folder / "target", seed=seed, layers=draft_layers + extra_layers, max_context=4096)
    weights = load_file(target / "model.safetensors")
    for name in weights:
        if name.endswith(_RESIDUAL_OUTPUTS):
            weights[name] *= damping
    save_file(weights | load_file(draft / "model.safetensors"), target / "model.safetensors", {"format": "pt"})
    return TinyPair(target, draft)
