"""Trains one model of the pocket pair from nothing to a checkpoint: `python -m training.train target|draft`."""

import argparse
import itertools
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerFast

from training.budget import Budget, apply_step, make_optimizer
from training.examples import CaptionExample, CaptionExamples
from training.language import EncodedClip, caption_logits, caption_loss, encode_clips, make_batch
from training.parallel import run_processes
from training.pocket import ROLES, Role, build_model, load_model, save_model, text_config
from training.stages import STAGES, VISION_SHARE, Stage
from training.tokenizer import POCKET_DIR, train_tokenizer
from training.vision import pretrain_vision

VISION_SEEDS = 1_000_000
STAGE_SEEDS = 2_000_000
SEEDS_PER_STAGE = 1_000_000
SEEDS_PER_PROCESS = 100_000
LOG_EVERY = 25
SAVE_EVERY = 200


class Trainer:
    """Takes one model through its stages; the vision tower is trained first and then stays as it is."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.role: Role = options.role
        self.out: Path = options.out
        self.device: str = options.device
        self.rank = rank
        self.rng = random.Random(options.seed)
        self.tokenizer: PreTrainedTokenizerFast = train_tokenizer()
        model = load_model(self.out) if options.only else build_model(self.role, self.tokenizer, options.seed)
        torch.manual_seed(options.seed + rank)
        self.model: LlavaOnevisionForConditionalGeneration = model.to(self.device)
        self.full_depth = text_config(model).num_hidden_layers
        # Measured on a CPU: plain matmuls beat fused attention on 196 tokens, and compiled layers take 0.6 of the time.
        self.model.model.vision_tower.set_attn_implementation("eager")
        for layer in (*model.model.vision_tower.encoder.layers, *model.model.language_model.layers):
            layer.compile(dynamic=False)

    def train_vision(self, budget: Budget) -> None:
        pretrain_vision(self.model, budget, VISION_SEEDS + self.rank * SEEDS_PER_PROCESS, self.device)
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
                self.model.model.image_newline,
            ]
        )
        scores: list[tuple[float, float]] = []
        for clips in self._batches(stage):
            kept_tokens = self.rng.choice(stage.kept_tokens)
            batch = make_batch(clips, kept_tokens, stage.text_len, self.tokenizer.pad_token_id, self.device)
            logits = caption_logits(self.model, batch, self.device)
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

    def save(self) -> None:
        if self.rank:
            return
        depth = text_config(self.model).num_hidden_layers
        text_config(self.model).num_hidden_layers = self.full_depth
        save_model(self.model, self.tokenizer, self.out)
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
        first_seed = STAGE_SEEDS + STAGES[self.role].index(stage) * SEEDS_PER_STAGE + self.rank * SEEDS_PER_PROCESS
        dataset = CaptionExamples(stage.clips, self.tokenizer, first_seed)
        loader = DataLoader(dataset, stage.fresh_clips, collate_fn=_as_list, num_workers=1, prefetch_factor=4)
        pool: deque[EncodedClip] = deque(maxlen=stage.pool_clips)
        for examples in loader:
            pool.extend(encode_clips(self.model, examples, self.device))
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
    stages = [stage for stage in STAGES[options.role] if not options.only or stage.name in options.only]
    with_vision = not options.only or "vision" in options.only
    vision_share = VISION_SHARE[options.role] if with_vision else 0.0
    share_sum = vision_share + (1 - VISION_SHARE[options.role]) * sum(stage.share for stage in stages)

    def budget(share: float) -> Budget:
        steps = None if options.steps is None else max(1, round(share / share_sum * options.steps))
        return Budget(share / share_sum * options.minutes, steps)

    trainer = Trainer(options, rank)
    if with_vision:
        trainer.train_vision(budget(vision_share))
    for stage in stages:
        trainer.train_stage(stage, budget((1 - VISION_SHARE[options.role]) * stage.share))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--minutes", type=float, default=60.0, help="time for all stages together")
    parser.add_argument("--steps", type=int, help="steps for all stages together, instead of minutes")
    parser.add_argument("--only", nargs="*", help="run just these stages on the checkpoint in --out")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--processes", type=int, default=1, help="with one thread each, on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the checkpoint, models/pocket/ROLE if not given")
    options = parser.parse_args()
    options.out = options.out or POCKET_DIR / options.role
    if options.processes == 1:
        train(0, options)
    else:
        run_processes(train, options.processes, options)


if __name__ == "__main__":
    main()
