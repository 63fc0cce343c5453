"""What models of full size need: weights, keys and values, the peak of a prefill.

Computed from the published sizes on torch's device `meta`, which runs every operation and stores nothing; no figure of
this page was measured on a GPU. `--report docs` writes the table into docs/models.md.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from bench.gpu.random_model import GEOMETRIES, Geometry, count_parameters, make_upstream, plan_of, read_geometries
from bench.output import finish
from slipstream.engine.attention import SdpaKernel
from slipstream.engine.forward import Decoder, Runner
from slipstream.engine.parallel.shards import even_sizes
from slipstream.engine.segments import Rows
from tests.support.live_memory import LiveBytes

NUM_VIDEO_TOKENS = 25_088
"""128 frames of LLaVA-OneVision; the papers' long videos."""
META = torch.device("meta")
DTYPE = torch.bfloat16
GB = 1e9
GPUS = {"24 GB": 24e9, "48 GB": 48e9, "80 GB": 80e9, "141 GB": 141e9}
MOST_GPUS = 8
"""Of one machine."""
ASIDE_GB = 2.0
"""For the device's own context, the vision tower's work and what the allocator cannot use: a guess, to be replaced by a
measurement."""
SIZES = GEOMETRIES | read_geometries(Path(__file__).with_name("more_geometries.json"))
"""Of the models in the table: those that the checks of a GPU time, and others."""
BEGIN, END = "<!-- computed: begin -->", "<!-- computed: end -->"


@dataclass(frozen=True)
class ModelMemory:
    """In GB (10^9 bytes), at bf16."""

    name: str
    weights_gb: float
    kv_gb_per_1000_tokens: float
    kv_gb: float
    """Of `NUM_VIDEO_TOKENS` and a prompt."""
    prefill_gb: float
    """Most that a prefill of so many tokens needs at once, keys and values apart."""

    shares: tuple[int, ...] = ()
    """Over how many GPUs it can be spread."""
    kv_heads: int = 1
    first_gb: float = 0.0
    """Of the weights those that the first of several has alone: embeddings and the vision tower."""

    def caption_gb(self, num_gpus: int) -> float:
        """On the first of so many GPUs, with one such caption at a time."""
        weights_gb = self.first_gb + (self.weights_gb - self.first_gb) / num_gpus
        return weights_gb + self.kv_gb / min(num_gpus, self.kv_heads) + self.prefill_gb + ASIDE_GB

    @property
    def fits(self) -> str:
        """The smallest GPU that serves it, or the fewest of a kind."""
        alone = [name for name, size in GPUS.items() if self.caption_gb(1) * GB <= size]
        if alone:
            return alone[0]
        spread = []
        for name, size in GPUS.items():
            fewest = next((n for n in self.shares if n <= MOST_GPUS and self.caption_gb(n) * GB <= size), 0)
            spread += [f"{fewest} of {name}"] if fewest else []
        return ", ".join(spread) or "more"


def runner_of(geometry: Geometry, num_layers: int) -> Runner:
    """The text model with so few layers, as the engine runs it, on `meta`."""
    upstream: Any = make_upstream(
        replace(geometry, text={**geometry.text, "num_hidden_layers": num_layers}), META, DTYPE
    )
    decoder = cast(Decoder, upstream.model.language_model)
    return Runner(decoder, upstream.lm_head, SdpaKernel())


def prefill_bytes(geometry: Geometry, num_video_tokens: int = NUM_VIDEO_TOKENS) -> int:
    """Most bytes alive at once in a prefill's first two layers, keys and values apart. Later layers are the same."""
    runner, plan = runner_of(geometry, num_layers=2), plan_of(num_video_tokens)
    positions = torch.arange(plan.num_tokens, device=META)
    if geometry.family != "llava_onevision":
        positions = positions.expand(3, -1)
    with LiveBytes() as live:
        live.ignore(*cast(torch.nn.Module, runner.decoder).parameters())
        cache = runner.new_cache(plan.num_tokens)
        hidden = torch.empty(plan.num_tokens, runner.decoder.config.hidden_size, dtype=DTYPE, device=META)
        forward = runner.start([Rows(cache, hidden, positions)])
        del hidden  # as when the engine begins a prefill: the pass has a copy
        forward.run_layers(2)
    return int(live.peak - cache.num_bytes)


def memory_of(geometry: Geometry) -> ModelMemory:
    a_layer = (runner := runner_of(geometry, num_layers=1)).kv_bytes_per_token
    kv_per_token = a_layer * geometry.text["num_hidden_layers"]
    return ModelMemory(
        geometry.name,
        weights_gb=count_parameters(geometry) * DTYPE.itemsize / GB,
        kv_gb_per_1000_tokens=1000 * kv_per_token / GB,
        kv_gb=kv_per_token * plan_of(NUM_VIDEO_TOKENS).num_tokens / GB,
        prefill_gb=prefill_bytes(geometry) / GB,
        shares=tuple(even_sizes(runner.decoder.config)),
        kv_heads=geometry.text["num_key_value_heads"],
        first_gb=_num_of_first(geometry) * DTYPE.itemsize / GB,
    )


def _num_of_first(geometry: Geometry) -> int:
    """Weights that are in no layer of the text model, nor in a head of their own."""
    upstream: Any = make_upstream(geometry, META, DTYPE)
    shared = {*upstream.model.language_model.layers.parameters(), upstream.lm_head.weight}
    return sum(weight.numel() for weight in {*upstream.parameters()} - shared)


def table(rows: Sequence[ModelMemory]) -> str:
    """Markdown."""
    lines = [
        f"| model | weights | keys and values of 1,000 tokens | of {NUM_VIDEO_TOKENS:,} | prefill | fits |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name} | {row.weights_gb:.1f} GB | {1000 * row.kv_gb_per_1000_tokens:.0f} MB | {row.kv_gb:.2f} GB"
            f" | {row.prefill_gb:.2f} GB | {row.fits} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench models", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write the table into models.md there")
    given = parser.parse_args(argv)
    rows = [memory_of(geometry) for geometry in SIZES.values()]
    print(table(rows))
    if given.report is not None:
        page = given.report / "models.md"
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")
    finish("models", {"models": [asdict(row) | {"fits": row.fits} for row in rows]})
