"""`gpu-write`: a geometry of Qwen2.5-VL with random weights, as a folder in the form of the hub's repositories.

bf16 in shards of 5 GB with an index, the names of weights and the flat configuration of 2025, the chat template in a
file of its own, two tokens that end an answer. The tokenizer is pocket-qwen's, and the ids in the configuration are its
own: text means nothing, but prompts and captions go all their way. The weights are made on the device, a shard at a
time, so that neither they nor their file ever need much of the host's memory.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.common import say
from bench.gpu.checks import make_gpu_parser, parse_device
from bench.gpu.random_model import GEOMETRIES, Geometry, make_upstream, tiny
from bench.output import last_line
from slipstream.stack.local import POCKET_DIR
from tests.support import hub_forms

SHARD_BYTES = 5_000_000_000
POCKET_QWEN = POCKET_DIR.parent / "pocket-qwen" / "target"
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "video_preprocessor_config.json")
MOVED = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
FRAME_PIXELS = {"shortest_edge": 128 * 28 * 28, "longest_edge": 16_384 * 28 * 28}
"""That a frame may have; the published configurations allow as many or more."""
ENDING = (2, 0)


def write_folder(geometry: Geometry, folder: Path, device: torch.device, *, seed: int = 0) -> Path:
    """Writes the folder, which is returned. Weights are normal, of the size that keeps a layer's outputs near 1."""
    assert geometry.family == "qwen2_5_vl", "the tokenizer knows the words of this family"
    folder.mkdir(parents=True)
    for name in COPIED:
        shutil.copyfile(POCKET_QWEN / name, folder / name)
    _write_config(geometry, folder)
    hub_forms.move_template(folder, "chat_template.json")
    hub_forms.name_processor_as_before(folder)
    hub_forms.join_merges(folder, as_pairs=False)
    _write_weights(geometry, folder, torch.Generator(device).manual_seed(seed))
    return folder


def _write_config(geometry: Geometry, folder: Path) -> None:
    config = geometry.config()
    ids = json.loads((POCKET_QWEN / "config.json").read_text())
    config.update({name: ids[name] for name in MOVED})
    config.get_text_config().update({"bos_token_id": None, "eos_token_id": ENDING[0], "pad_token_id": ENDING[1]})
    config.update({"architectures": ["Qwen2_5_VLForConditionalGeneration"], "dtype": "bfloat16"})
    config.save_pretrained(folder)
    hub_forms.flatten_config(folder)
    ending = {"do_sample": False, "eos_token_id": list(ENDING), "pad_token_id": ENDING[1]}
    (folder / "generation_config.json").write_text(json.dumps(ending))
    hub_forms.edit(folder / "video_preprocessor_config.json", lambda settings: settings.update(size=FRAME_PIXELS))


def _write_weights(geometry: Geometry, folder: Path, generator: torch.Generator) -> None:
    upstream = make_upstream(geometry, torch.device("meta"), torch.bfloat16)
    skipped = {"lm_head.weight"} if geometry.text.get("tie_word_embeddings") else set()
    shapes = {name: weight for name, weight in upstream.state_dict().items() if name not in skipped}
    shards, places = list(_shards(shapes)), dict[str, str]()
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        say(f"{folder.name}: {file}")
        weights = {_hub_name(name): _make(name, shapes[name], generator).cpu() for name in names}
        save_file(weights, folder / file, {"format": "pt"})
        places |= dict.fromkeys(weights, file)
    index = {"metadata": {"total_size": sum(weight.nbytes for weight in shapes.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shards(shapes: dict[str, Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name, weight in shapes.items():
        if names and num_bytes + weight.nbytes > SHARD_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += weight.nbytes
    yield names


def _make(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Norms do nothing, biases are small. Rows of the tokens that end an answer are zero: no answer ends by itself."""
    if like.dim() == 1:
        bias = name.endswith(".bias")
        return torch.full(like.shape, 0.01 if bias else 1.0, dtype=torch.bfloat16, device=generator.device)
    weight = torch.randn(like.shape, dtype=torch.bfloat16, device=generator.device, generator=generator)
    weight *= like[0].numel() ** -0.5
    if name.endswith(("lm_head.weight", "embed_tokens.weight")):
        weight[list(ENDING)] = 0
    return weight


def _hub_name(name: str) -> str:
    """As the repositories call it."""
    for ours, theirs in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def main(argv: Sequence[str]) -> None:
    parser = make_gpu_parser("gpu-write", "A geometry with random weights, as a folder.", model="Qwen2.5-VL-7B", seed=0)
    parser.add_argument("folder", type=Path, help="which must not be there yet")
    given = parse_device(parser, argv)
    geometry = tiny(GEOMETRIES[given.model]) if given.tiny else GEOMETRIES[given.model]
    folder = write_folder(geometry, given.folder, given.device, seed=given.seed)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    print(last_line({"model": given.model, "folder": str(folder), "bytes": num_bytes}))
