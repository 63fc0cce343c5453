"""Tiny checkpoints in the forms that the hub's repositories have: each function changes a written one in place.

Repositories of different years hold the same model as differently named weights, in one file or in shards, with a
nested or a flat configuration, and with the chat template in one of three files.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FLAT_KEYS = ("vision_config", "architectures", "model_type", "dtype", "transformers_version", "text_config")
EXPERT = re.compile(r"(.*\.experts)\.[0-9]\.(.*)\.weight")
VOCABULARY = ("lm_head.weight", "embed_tokens.weight")


def rename_weights(path: Path, rename: Callable[[str], str], dtype: torch.dtype | None = None) -> None:
    """Every weight by another name, and in another precision."""
    weights = load_file(path / "model.safetensors")
    renamed = {rename(name): weight if dtype is None else weight.to(dtype) for name, weight in weights.items()}
    assert len(renamed) == len(weights)
    save_file(renamed, path / "model.safetensors", {"format": "pt"})


def qwen_of_2025(name: str) -> str:
    """As transformers 4.52 and later wrote them."""
    for old, new in (("visual.", "model.visual."), ("model.", "model.language_model.")):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def llava_of_2024(name: str) -> str:
    """As `llava-hf/llava-onevision-qwen2-7b-ov-hf` holds them."""
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        return "vision_tower.vision_model." + name.removeprefix("vision_tower.")
    return name


def llava_of_2025(name: str) -> str:
    """As transformers 4.52 and later wrote them."""
    if name == "language_model.lm_head.weight":
        return "lm_head.weight"
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    return f"model.{name}"


def tie(path: Path) -> None:
    """Head and embeddings are one matrix, which is stored once."""
    weights = load_file(path / "model.safetensors")
    heads = [name for name in weights if name.endswith("lm_head.weight")]
    kept = {name: weight for name, weight in weights.items() if name not in heads}
    save_file(kept, path / "model.safetensors", {"format": "pt"})

    def change(config: dict[str, Any]) -> None:
        config["text_config"]["tie_word_embeddings"] = True
        config["tie_word_embeddings"] = config["model_type"] != "llava_onevision"  # the hub's 0.5B says so in one place

    edit(path / "config.json", change)


def turn_experts(path: Path) -> None:
    """The matrices of experts as those of Qwen3-VL's mixtures lie: [experts, inputs, outputs]."""
    weights = load_file(path / "model.safetensors")
    turned = {name: weight.mT.contiguous() if ".experts." in name else weight for name, weight in weights.items()}
    save_file(turned, path / "model.safetensors", {"format": "pt"})


def join_experts(path: Path) -> None:
    """One matrix for all experts of a layer, as those of Qwen 3.5's mixtures lie: the gate's rows first."""
    weights = load_file(path / "model.safetensors")
    found = {name: EXPERT.fullmatch(name) for name in sorted(weights)}
    made = {name: weight for name, weight in weights.items() if found[name] is None}
    for layer in {match[1] for match in found.values() if match is not None}:
        parts: dict[str, list[Tensor]] = {}
        for name, match in found.items():
            if match is not None and match[1] == layer:
                parts.setdefault(match[2], []).append(weights[name])
        gates, others, outputs = (torch.stack(parts[kind]) for kind in ("gate_proj", "up_proj", "down_proj"))
        made |= {f"{layer}.gate_up_proj": torch.cat([gates, others], dim=1), f"{layer}.down_proj": outputs}
    save_file(made, path / "model.safetensors", {"format": "pt"})


def predict_ahead(path: Path) -> None:
    """Weights of a further layer, which predicts tokens ahead and which transformers' models do not have."""
    weights = load_file(path / "model.safetensors")
    head = next(weight for name, weight in weights.items() if name.endswith("lm_head.weight"))
    save_file(weights | {"mtp.fc.weight": head.clone()}, path / "model.safetensors", {"format": "pt"})


def shard(path: Path, num_shards: int = 3) -> None:
    """Several files and an index."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    parts = [names[start::num_shards] for start in range(num_shards)]
    places: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        save_file({name: weights[name] for name in part}, path / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(map(_size, weights.values()))}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def pad_vocabulary(path: Path, width: int, scale: float = 0.0) -> None:
    """More rows of logits than the tokenizer has tokens, random ones of that scale."""
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(width)
    for name in [name for name in weights if name.endswith(VOCABULARY)]:
        rows, hidden = weights[name].shape
        weights[name] = torch.cat([weights[name], scale * torch.randn(width - rows, hidden, generator=generator)])
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    edit(path / "config.json", lambda config: config["text_config"].update(vocab_size=width))


def cut_vocabulary(path: Path, width: int) -> None:
    """Fewer rows of embeddings and of logits than the tokenizer has tokens, as of InternVL3, whose token for a video is
    its processor's alone."""
    weights = load_file(path / "model.safetensors")
    tables = {name: weights[name][:width].clone() for name in weights if name.endswith(VOCABULARY)}
    save_file(weights | tables, path / "model.safetensors", {"format": "pt"})
    edit(path / "config.json", lambda config: config["text_config"].update(vocab_size=width))


def flatten_config(path: Path) -> None:
    """The text model's settings beside all others, as in Qwen2.5-VL's repositories, with the names of their time."""

    def change(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        text.pop("layer_types", None)
        text.pop("model_type")
        config |= {key: value for key, value in text.items() if key not in config}
        config["rope_theta"] = rope["rope_theta"]
        config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        config["torch_dtype"] = config.pop("dtype", "bfloat16")
        vision = config["vision_config"]
        vision.pop("rope_parameters", None)
        vision["spatial_patch_size"] = vision["patch_size"]

    edit(path / "config.json", change)


def leave_out_what_is_usual(path: Path) -> None:
    """As InternVL3's repositories: nothing says whether the head is the embeddings, which it is not."""

    def change(config: dict[str, Any]) -> None:
        text = config["text_config"]
        del config["tie_word_embeddings"]
        text.pop("tie_word_embeddings", None)
        text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
        text["rope_scaling"] = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}

    edit(path / "config.json", change)


def name_rotation_as_before(path: Path) -> None:
    """As GLM-4.1V's repository has it: in three settings of the text model."""

    def change(config: dict[str, Any]) -> None:
        text = config["text_config"]
        rope = text.pop("rope_parameters")
        text["rope_theta"], text["partial_rotary_factor"] = rope["rope_theta"], rope["partial_rotary_factor"]
        text["rope_scaling"] = {"type": "default", "mrope_section": rope["mrope_section"]}

    edit(path / "config.json", change)


def list_end_tokens(path: Path, *more: int) -> None:
    """Several ids end an answer."""
    edit(path / "generation_config.json", lambda config: config.update(eos_token_id=[config["eos_token_id"], *more]))


def move_template(path: Path, into: str) -> None:
    """The chat template in `chat_template.json` or `tokenizer_config.json`."""
    template = path / "chat_template.jinja"
    words = template.read_text(encoding="utf-8")
    template.unlink()
    if not (path / into).exists():
        (path / into).write_text("{}")
    edit(path / into, lambda config: config.update(chat_template=words))


def have_template_for_text_alone(path: Path) -> None:
    """The tokenizer's own one beside the processor's: that of the text model, as in LLaVA-Interleave's repositories."""
    words = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
    edit(path / "tokenizer_config.json", lambda config: config.update(chat_template=words))


def name_processor_as_before(path: Path) -> None:
    """The video processor's settings where only an image processor's were."""
    (path / "video_preprocessor_config.json").rename(path / "preprocessor_config.json")


def join_merges(path: Path, *, as_pairs: bool) -> None:
    """Merges of the tokenizer as pairs, or as older files have them, "a b"."""

    def change(content: dict[str, Any]) -> None:
        merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in content["model"]["merges"]]
        content["model"]["merges"] = merges if as_pairs else [" ".join(merge) for merge in merges]

    edit(path / "tokenizer.json", change)


def change(name: str, **settings: Any) -> Callable[[Path], None]:
    """What sets these in a file of a checkpoint, which is made where there is none."""

    def set_them(path: Path) -> None:
        if not (path / name).exists():
            (path / name).write_text("{}", encoding="utf-8")
        edit(path / name, lambda content: content.update(settings))

    return set_them


def remove(name: str) -> Callable[[Path], None]:
    """What takes a file of a checkpoint away."""
    return lambda path: (path / name).unlink()


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _size(weight: Tensor) -> int:
    return weight.nbytes


def bound_by_pixels(path: Path) -> None:
    """The least and most pixels of frames by the names that older processors gave them."""

    def change(processor: dict[str, Any]) -> None:
        size = processor.pop("size")
        processor |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"], "size": None}

    edit(path / "video_preprocessor_config.json", change)
