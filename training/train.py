"""Trains one model of a pocket pair from nothing to a checkpoint: `python -m training.train target|draft`."""

import argparse
import itertools
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerFast

from training.budget import Budget, apply_step, make_optimizer
from training.examples import CaptionExample, CaptionExamples
from training.families import FAMILIES
from training.language import CaptionBatch, EncodedClip, caption_logits, caption_loss, encode_clips, make_batch
from training.parallel import run_processes
from training.pocket import ROLES, Family, Role, save_model, text_config
from training.stages import CURRICULA, Curriculum, Stage
from training.vision import pretrain_vision

VISION_SEEDS = 1_000_000
STAGE_SEEDS = 2_000_000
SEEDS_PER_STAGE = 1_000_000
SEEDS_PER_PROCESS = 100_000
LOG_EVERY = 25
SAVE_EVERY = 200


class Trainer:
    """Takes one model through its stages; the vision tower is trained first and then stays as it is."""

    def __init__(self, options: argparse.Namespace, rank: int, curriculum: Curriculum) -> None:
        self.family: Family = FAMILIES[options.family]
        self.role: Role = options.role
        self.curriculum = curriculum
        self.out: Path = options.out
        self.device: str = options.device
        self.rank = rank
        self.rng = random.Random(options.seed)
        self.tokenizer: PreTrainedTokenizerFast = self.family.train_tokenizer()
        model: Any = (
            self.family.model_class.from_pretrained(self.out, dtype=torch.float32)
            if options.only
            else self.family.build(self.role, self.tokenizer, options.seed)
        )
        torch.manual_seed(options.seed + rank)
        self.model = model.to(self.device)
        self.full_depth = text_config(model).num_hidden_layers
        self.family.prepare(self.model)

    def train_vision(self, budget: Budget) -> None:
        pretrain_vision(self.family, self.model, budget, VISION_SEEDS + self.rank * SEEDS_PER_PROCESS, self.device)
        self.save()

    def train_stage(self, stage: Stage, budget: Budget) -> None:
        language_model = self.model.model.language_model
        language_model.config.num_hidden_layers = stage.depth or self.full_depth
        layers = language_model.layers[: stage.depth]
        optimizer = make_optimizer(
            [
                *layers.parameters(),
                *language_model.norm.parameters(),
                *language_model.embed_tokens.parameters(),
                *self.family.closing_parameters(self.model),
            ]
        )
        scores: list[tuple[float, float]] = []
        for clips in self._batches(stage):
            batch = self.batch_of(clips, stage)
            logits = caption_logits(self.family, self.model, batch, self.device)
            loss = caption_loss(logits, batch.labels)
            apply_step(optimizer, loss, stage.pace, budget)
            scores.append((loss.item(), share_right(logits, batch.labels)))
            if len(scores) == LOG_EVERY:
                self._log(stage, budget, scores)
                scores.clear()
            if budget.done_steps % SAVE_EVERY == 0:
                self.save()
            if budget.progress >= 1:
                break
        self.save()

    def examples_of(self, stage: Stage, first_seed: int) -> IterableDataset:
        """An endless stream of the stage's examples."""
        return CaptionExamples(stage.clips, self.family, self.tokenizer, first_seed)

    def batch_of(self, clips: list[EncodedClip], stage: Stage) -> CaptionBatch:
        kept_tokens = self.rng.choice(stage.kept_tokens)
        return make_batch(self.family, clips, kept_tokens, stage.text_len, self.tokenizer.pad_token_id, self.device)

    def save(self) -> None:
        if self.rank:
            return
        depth = text_config(self.model).num_hidden_layers
        text_config(self.model).num_hidden_layers = self.full_depth
        save_model(self.family, self.model, self.tokenizer, self.out)
        text_config(self.model).num_hidden_layers = depth

    def _log(self, stage: Stage, budget: Budget, scores: list[tuple[float, float]]) -> None:
        if self.rank:
            return
        loss, right = (sum(column) / len(scores) for column in zip(*scores, strict=True))
        print(
            f"{self.role} {stage.name} step {budget.done_steps} {budget.progress:.1%}"
            f" loss {loss:.4f} tokens right {right:.4f}",
            flush=True,
        )

    def _batches(self, stage: Stage) -> Iterator[list[EncodedClip]]:
        """Batches drawn from a pool of encoded clips, of which the oldest make room for fresh ones at every step."""
        stage_number = self.curriculum.stages.index(stage)
        first_seed = STAGE_SEEDS + stage_number * SEEDS_PER_STAGE + self.rank * SEEDS_PER_PROCESS
        dataset = self.examples_of(stage, first_seed)
        loader = DataLoader(dataset, stage.fresh_clips, collate_fn=_as_list, num_workers=1, prefetch_factor=4)
        pool: deque[EncodedClip] = deque(maxlen=stage.pool_clips)
        for examples in loader:
            pool.extend(encode_clips(self.family, self.model, examples, self.device))
            if len(pool) >= stage.batch_clips:
                fresh = list(itertools.islice(reversed(pool), stage.fresh_clips))
                yield fresh + self.rng.sample(list(pool), stage.batch_clips - stage.fresh_clips)


def share_right(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of caption tokens that the most likely token is right about."""
    wanted = labels[:, 1:]
    return (logits.argmax(-1) == wanted)[wanted >= 0].float().mean().item()


def _as_list(examples: list[CaptionExample]) -> list[CaptionExample]:
    return examples


def train(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    run_stages(Trainer(options, rank, CURRICULA[options.family][options.role]), options)


def run_stages(trainer: Trainer, options: argparse.Namespace) -> None:
    """The stages that `options` name, all if it names none, each for its share of the time or steps."""
    curriculum = trainer.curriculum
    stages = [stage for stage in curriculum.stages if not options.only or stage.name in options.only]
    with_vision = not options.only or "vision" in options.only
    vision_share = curriculum.vision_share if with_vision else 0.0
    share_sum = vision_share + (1 - curriculum.vision_share) * sum(stage.share for stage in stages)

    def budget(share: float) -> Budget:
        steps = None if options.steps is None else max(1, round(share / share_sum * options.steps))
        return Budget(share / share_sum * options.minutes, steps)

    if with_vision:
        trainer.train_vision(budget(vision_share))
    for stage in stages:
        trainer.train_stage(stage, budget((1 - curriculum.vision_share) * stage.share))


def check_stages(parser: argparse.ArgumentParser, options: argparse.Namespace, curriculum: Curriculum) -> None:
    """Ends with a usage error where `--only` names a stage that there is not: nothing would be trained for it."""
    names = ["vision", *(stage.name for stage in curriculum.stages)]
    for name in options.only or ():
        if name not in names:
            parser.error(f"--only: there is no stage {name!r} of this model; it has {', '.join(names)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--family", choices=FAMILIES, default="llava_onevision")
    parser.add_argument("--minutes", type=float, default=60.0, help="time for all stages together")
    parser.add_argument("--steps", type=int, help="steps for all stages together, instead of minutes")
    parser.add_argument("--only", nargs="*", help="run just these stages on the checkpoint in --out")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--processes", type=int, default=1, help="with one thread each, on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the checkpoint, the family's own if not given")
    options = parser.parse_args()
    check_stages(parser, options, CURRICULA[options.family][options.role])
    options.out = options.out or FAMILIES[options.family].folder / options.role
    run_processes(train, options.processes, options)


if __name__ == "__main__":
    main()
