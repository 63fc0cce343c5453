"""Trains the pocket reader from nothing to a checkpoint: `python -m training.train_reader`.

Reading is learned in two stages. First the vision tower alone: linear heads on its tokens name the character in every
strip of four pixels. Then the whole model learns to write the page's text, while heads on its inner layers must say
where on the page the next token begins, and which line of which column a cell of the page belongs to. The heads are
thrown away; without them a decoder this small takes hours to find out that text goes from left to right.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import Qwen2_5_VLForConditionalGeneration

from slipstream.engine.vision_attention import IMPLEMENTATION as WINDOWED
from training.budget import Budget, Pace
from training.pages import FACES, KINDS
from training.parallel import average_among_processes, run_processes
from training.pocket import text_config
from training.reader import (
    COLUMNS,
    IGNORED,
    PROMPT,
    READER_FACES,
    ROWS,
    PageExample,
    PageExamples,
    build,
    export,
    grey_patches,
    reader_folder,
    reader_tokenizer,
    train_tokenizer,
)
from training.reader_heads import Heads, kept_cells, naming_loss
from training.tokenizer import chat_ids

STAGES = ("vision", "reading", "joint")
WHOLE_PAGES_FROM = 0.65
"""Of the last stage."""
TRAINING_SEEDS = 10_000_000
SEEDS_PER_PROCESS = 100_000_000
LINES_LAYER, PLACES_LAYER = 1, 2
"""Decoder layers behind which the heads read."""
LOG_EVERY, SAVE_EVERY = 20, 50


@dataclass(frozen=True)
class EncodedPage:
    """An example behind the vision tower: `cells` [rows * columns, hidden]."""

    cells: Tensor
    example: PageExample

    @property
    def token_ids(self) -> Tensor:
        return self.example.token_ids


class ReaderTrainer:
    """One process' part in training; state is kept in a file, from which a run that was stopped goes on."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.rank = options, rank
        self.rng = random.Random(options.seed + rank)
        self.tokenizer = reader_tokenizer(options.out) if options.state.exists() else train_tokenizer()
        self.device = torch.device(options.device)
        model: Any = build(self.tokenizer, options.seed)
        make_fast(model, compiled=not options.eager)
        self.model = model.to(self.device)
        self.heads = Heads(text_config(self.model).hidden_size).to(self.device)
        self.before, self.after = chat_ids(self.tokenizer, PROMPT)
        self.positions, self.answer_position = prompt_positions(self.model, self.before, self.after)
        self.positions = self.positions.to(self.device)
        self.inner: dict[int, Tensor] = {}
        for layer in (LINES_LAYER, PLACES_LAYER):
            self.model.model.language_model.layers[layer].register_forward_hook(self._keeper(layer))
        self.done: dict[str, float] = {}
        self.seen_pages = 0
        self.blank_share = 1.0
        if options.state.exists():
            self._load()

    def run(self) -> None:
        for name in STAGES:
            progress = self.done.get(name, 0.0)
            minutes = getattr(self.options, f"{name}_minutes")
            if progress < 1 and minutes > 0:
                self._stage(name, minutes, progress)
        self._save()

    def _stage(self, name: str, minutes: float, progress: float) -> None:
        optimizers = make_optimizers(self.model, self.heads, name)
        peak = self.options.rate if name != "joint" else self.options.joint_rate
        pace = Pace(peak, self.options.last_rate, 30)
        budget = Budget(minutes, progress=progress)
        budget._started_s -= progress * minutes * 60
        losses: dict[str, Any] = {"vision": self.vision_loss, "reading": self.reading_loss, "joint": self.joint_loss}
        logs: list[list[float]] = []
        for batch in self._batches(name):
            self.blank_share = 1.0 if name == "joint" and budget.progress > WHOLE_PAGES_FROM else self.options.blank
            with self.device, torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss, scores = losses[name](batch)
            self._update(optimizers, loss, pace, budget)
            self.done[name] = budget.progress
            self.seen_pages += len(batch)
            logs.append([loss.item(), *scores])
            if len(logs) == LOG_EVERY:
                means = " ".join(f"{sum(column) / len(column):.4f}" for column in zip(*logs, strict=True))
                if not self.rank:
                    print(
                        f"{name} {budget.done_steps} {budget.progress:.1%} pages {self.seen_pages} {means}", flush=True
                    )
                logs.clear()
            if budget.done_steps % SAVE_EVERY == 0:
                self._save()
            if budget.progress >= 1:
                return

    def vision_loss(self, batch: list[PageExample]) -> tuple[Tensor, list[float]]:
        cells = self._cells(batch)
        loss, right = self.heads.strips_loss(cells.float(), *_stacked(batch, "strips", "starts"))
        return loss, [right]

    def reading_loss(self, batch: list[EncodedPage]) -> tuple[Tensor, list[float]]:
        """Of pages that the vision tower has seen already, and the scores of `_text_loss`."""
        return self._text_loss(torch.stack([page.cells for page in batch]), [page.example for page in batch])

    def joint_loss(self, batch: list[PageExample]) -> tuple[Tensor, list[float]]:
        cells = self._cells(batch)
        strips_loss, right = self.heads.strips_loss(cells.float(), *_stacked(batch, "strips", "starts"))
        loss, scores = self._text_loss(cells, batch)
        return loss + self.options.heads * strips_loss, [right, *scores]

    def _text_loss(self, cells: Tensor, batch: list[PageExample]) -> tuple[Tensor, list[float]]:
        """The text's loss with the inner heads'; and apart, with the shares of words, places and tokens that are
        right."""
        token_ids, places = (_padded(batch, name) for name in ("token_ids", "places"))
        (lines,) = _stacked(batch, "lines")
        kept = kept_cells(lines[..., 0] >= 0, self.blank_share)
        logits = self._text_logits(cells, kept, token_ids.clamp_min(0))
        seen = self.inner[LINES_LAYER][:, len(self.before) : len(self.before) + kept.shape[1]]
        lines_loss = self.heads.lines_loss(seen.float(), lines.gather(1, kept[..., None].expand(-1, -1, 2)))
        text = self.inner[PLACES_LAYER][:, -token_ids.shape[1] :]
        places_loss, places_right = self.heads.places_loss(text.float(), places)
        words_loss, words_right = self._words_loss(seen, kept, token_ids, places)
        text_loss = naming_loss(logits.flatten(0, 1), token_ids)
        right = (logits.argmax(-1) == token_ids)[token_ids >= 0].float().mean().item()
        loss = text_loss + self.options.heads * (0.3 * lines_loss + places_loss + words_loss)
        return loss, [text_loss.item(), words_right, places_right, right]

    def _words_loss(self, seen: Tensor, kept: Tensor, token_ids: Tensor, places: Tensor) -> tuple[Tensor, float]:
        """An inner state of a cell must already be like the tokens that begin there, by the model's own last layer:
        then to read is to copy, which attention learns soon."""
        page, token = (places[..., 0] >= 0).nonzero(as_tuple=True)
        row, column = places[page, token].T
        slots = torch.zeros(len(kept), ROWS * COLUMNS, dtype=torch.long)
        slots.scatter_(1, kept, torch.arange(kept.shape[1]).expand(len(kept), -1))
        wanted = token_ids[page, token]
        states = seen[page, slots[page, row * COLUMNS + column]]
        logits = self.model.lm_head(self.model.model.language_model.norm(states))
        return naming_loss(logits, wanted), (logits.argmax(-1) == wanted).float().mean().item()

    def _cells(self, batch: list[PageExample]) -> Tensor:
        features = self.model.model.visual(
            *grey_patches(torch.stack([example.pixels for example in batch]))
        ).pooler_output
        cells: Tensor = features.view(len(batch), ROWS * COLUMNS, -1)
        return cells

    def _text_logits(self, cells: Tensor, kept: Tensor, token_ids: Tensor) -> Tensor:
        """Logits [n, text, vocab] of each token of the text, given the kept cells of the page and those before it."""
        embed = self.model.get_input_embeddings()
        count, length = token_ids.shape
        before, after = (embed(torch.tensor([ids])).expand(count, -1, -1) for ids in (self.before, self.after))
        cells = cells.gather(1, kept[..., None].expand(-1, -1, cells.shape[-1]))
        embeds = torch.cat([before, cells.to(before.dtype), after, embed(token_ids[:, :-1])], 1)
        first, end = len(self.before), len(self.before) + ROWS * COLUMNS
        prompt = self.positions[:, None].expand(-1, count, -1)
        answer = (self.answer_position + torch.arange(length - 1)).expand(3, count, -1)
        shown = prompt[..., first:end].gather(2, kept.expand(3, -1, -1))
        hidden = self.model.model.language_model(
            inputs_embeds=embeds,
            position_ids=torch.cat([prompt[..., :first], shown, prompt[..., end:], answer], 2),
            attention_mask=torch.ones(embeds.shape[:2], dtype=torch.long),
            use_cache=False,
        ).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden[:, -length:])
        return logits

    def _keeper(self, layer: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self.inner[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    def _update(self, optimizers: list[torch.optim.Optimizer], loss: Tensor, pace: Pace, budget: Budget) -> None:
        rate = pace.rate(budget)
        loss.backward()
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        progress = torch.tensor([budget.spent()], device=self.device)
        average_among_processes([*(p.grad for p in parameters), progress])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in groups:
            group["lr"] = rate * group["share"]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        budget.step(progress.item())

    def _batches(self, stage: str) -> Iterator[list[Any]]:
        """Pages of like length together, so that little is padded; each page is shown `--repeats` times."""
        size = self.options.vision_batch if stage == "vision" else self.options.batch
        first = TRAINING_SEEDS + self.options.seed_offset + self.rank * SEEDS_PER_PROCESS + self.seen_pages
        kinds = self.options.vision_kinds if stage == "vision" else self.options.kinds
        dataset = PageExamples(self.tokenizer, first, tuple(kinds), tuple(self.options.faces))
        examples = iter(DataLoader(dataset, batch_size=None, num_workers=self.options.workers, prefetch_factor=64))
        while True:
            several = [[next(examples).to(self.device) for _ in range(size)] for _ in range(8)]
            pages: list[Any] = [page for few in several for page in (self._encoded(few) if stage == "reading" else few)]
            for _ in range(self.options.repeats):
                self.rng.shuffle(pages)
                pages.sort(key=lambda page: len(page.token_ids) // 16)
                batches = [pages[n : n + size] for n in range(0, len(pages), size)]
                self.rng.shuffle(batches)
                yield from batches

    @torch.no_grad()
    def _encoded(self, examples: list[PageExample]) -> list[EncodedPage]:
        with self.device, torch.autocast(self.device.type, dtype=torch.bfloat16):
            cells = self._cells(examples).bfloat16()
        return [EncodedPage(one, example) for one, example in zip(cells, examples, strict=True)]

    def _save(self) -> None:
        if self.rank:
            return
        scratch = self.options.state.with_suffix(".new")
        parts = {"model": self.model.state_dict(), "heads": self.heads.state_dict()}
        torch.save({**parts, "done": self.done, "seen_pages": self.seen_pages}, scratch)
        scratch.replace(self.options.state)
        export(self.model, self.tokenizer, self.options.out)

    def _load(self) -> None:
        state = torch.load(self.options.state, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.done, self.seen_pages = state["done"], state["seen_pages"]


def prompt_positions(
    model: Qwen2_5_VLForConditionalGeneration, before: list[int], after: list[int]
) -> tuple[Tensor, int]:
    """Positions [3, n] of the prompt around one page, and that of the answer's first token."""
    count = ROWS * COLUMNS
    positions, _ = model.model.get_rope_index(
        torch.tensor([[*before, *[model.config.video_token_id] * count, *after]]),
        torch.tensor([[0] * len(before) + [2] * count + [0] * len(after)]),
        video_grid_thw=torch.tensor([[1, ROWS * 2, COLUMNS * 2]]),
        second_per_grid_ts=torch.tensor([1.0]),
    )
    return positions[:, 0], int(positions[0, 0, -1]) + 1


def make_fast(model: Any, compiled: bool) -> None:
    """Windows of one length in one call, patches of one colour of one frame, and fewer passes over memory. The pages
    are grey and a page fills both frames of its step, so the results stay the same."""
    model.model.visual.config._attn_implementation = WINDOWED
    filters = model.model.visual.patch_embed.proj
    model.model.visual.patch_embed.forward = lambda rows: functional.linear(rows, filters.weight.sum((1, 2)).flatten(1))
    if not compiled:
        return
    for block in model.model.visual.blocks:
        for part in (block.mlp, block.norm1, block.norm2):
            part.compile(dynamic=False)
    for layer in model.model.language_model.layers:
        for part in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
            part.compile(dynamic=True)


def make_optimizers(model: Any, heads: Heads, stage: str) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of all blocks, AdamW for embeddings, filters, norms, biases and heads."""
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if stage == "joint" or ("visual" in name) == (stage == "vision")
    ]
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for _, p in named if id(p) not in chosen] + list(heads.parameters())
    muon = torch.optim.Muon(
        [{"params": matrices, "share": 1.0}], lr=0.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW([{"params": others, "share": 1.0}], lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adamw]


def _stacked(batch: list[PageExample], *names: str) -> list[Tensor]:
    return [torch.stack([getattr(example, name) for example in batch]) for name in names]


def _padded(batch: list[PageExample], name: str) -> Tensor:
    rows = [getattr(example, name) for example in batch]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)


def train(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    ReaderTrainer(options, rank).run()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vision-minutes", type=float, default=12.0)
    parser.add_argument("--reading-minutes", type=float, default=20.0)
    parser.add_argument("--joint-minutes", type=float, default=115.0)
    parser.add_argument("--vision-batch", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16, help="pages of an update, in each process")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--last-rate", type=float, default=3e-5)
    parser.add_argument("--joint-rate", type=float, default=1.5e-3)
    parser.add_argument("--blank", type=float, default=0.1, help="least share of blank cells that is shown")
    parser.add_argument("--heads", type=float, default=0.3, help="weight of the heads' losses")
    parser.add_argument("--repeats", type=int, default=2, help="times that a page is shown")
    parser.add_argument("--vision-kinds", nargs="*", default=["full", "full", *KINDS])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--faces", nargs="*", choices=FACES, default=list(READER_FACES))
    parser.add_argument("--seed-offset", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workers", type=int, default=1, help="processes that draw pages, of each process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="compile nothing: slower, and starts at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=Path("/tmp/pocket_reader.pt"), help="where a run goes on from")
    parser.add_argument("--out", type=Path, default=reader_folder())
    return parser


def main() -> None:
    options = parser().parse_args()
    run_processes(train, options.processes, options)


if __name__ == "__main__":
    main()
