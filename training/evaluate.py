"""Scores the pocket pair on held-out video files: right attributes, and how often the draft agrees with the target."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerFast

from slipstream.video.decode import DecodeLimits, sample_video
from training.captions import ALL_ATTRIBUTES, SCORED_ATTRIBUTES, score_caption
from training.data import render_folder
from training.pocket import FULL_FRAMES, IMAGE_SIZE, ROLES, TOKENS_PER_FRAME, load_model, normalise, video_features
from training.tokenizer import POCKET_DIR, chat_ids, load_tokenizer
from training.world import HELD_OUT_SEEDS

MAX_NEW_TOKENS = 288
KEPT_SHARE = 0.1


def load_clip_frames(path: Path, num_frames: int) -> npt.NDArray[np.uint8]:
    """The frames shown at `num_frames` moments spread evenly over the file's time, uint8 [n, h, w, 3]."""
    with path.open("rb") as source:
        return sample_video(source, num_frames, DecodeLimits()).frames


@dataclass(frozen=True)
class Question:
    """A batch of clips ready for a model: pixel values [clips, frames, 3, 112, 112] and what the files really show."""

    pixel_values: torch.Tensor
    truths: list[list[dict[str, str]]]


@dataclass
class Tally:
    """Right answers and all answers under each name."""

    counts: dict[str, list[int]]

    def add(self, name: str, right: int, total: int) -> None:
        count = self.counts.setdefault(name, [0, 0])
        count[0] += right
        count[1] += total

    def shares(self) -> dict[str, float]:
        return {name: round(right / max(1, total), 4) for name, (right, total) in self.counts.items()}


class Evaluator:
    """Captions the same clips with both models and compares what they say."""

    def __init__(
        self, models: dict[str, LlavaOnevisionForConditionalGeneration], tokenizer: PreTrainedTokenizerFast
    ) -> None:
        self.models = models
        self.tokenizer = tokenizer
        self.prefix_ids, self.prompt_ids = chat_ids(self.tokenizer)

    @torch.inference_mode()
    def evaluate(self, paths: list[Path], num_frames: int, batch_clips: int) -> dict[str, dict[str, float]]:
        tallies = {name: Tally({}) for name in (*self.models, "agreement")}
        for start in range(0, len(paths), batch_clips):
            question = _ask(paths[start : start + batch_clips], num_frames)
            captions = {role: self.caption(role, question) for role in self.models}
            for role, answer in captions.items():
                self._score(tallies[role], answer, question)
            self._compare(tallies["agreement"], captions["target"], question)
            shares = {name: tally.shares() for name, tally in tallies.items()}
            print(f"{num_frames} frames, {start + len(question.truths)} clips: {json.dumps(shares)}", flush=True)
        return shares

    def caption(self, role: str, question: Question) -> list[list[int]]:
        """Greedy caption of each clip by plain `generate`, as token ids up to and with the end token."""
        model: Any = self.models[role]
        num_video = question.pixel_values.shape[1] * TOKENS_PER_FRAME + 1
        ids = [*self.prefix_ids, *[model.config.video_token_id] * num_video, *self.prompt_ids]
        input_ids = torch.tensor([ids] * len(question.truths))
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            pixel_values_videos=question.pixel_values,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
        return [self._until_end(row) for row in output[:, len(ids) :].tolist()]

    def draft_agreement(self, caption: list[int], pixel_values: torch.Tensor, kept_share: float) -> tuple[int, int]:
        """Tokens of the target's caption that the draft would say too, given the target's words before each."""
        draft = self.models["draft"]
        tokens = video_features(draft, pixel_values).flatten(0, 1)
        kept = torch.randperm(len(tokens))[: round(kept_share * len(tokens))].sort().values
        video = torch.cat([tokens[kept], draft.model.image_newline[None]])
        places = torch.cat([kept, torch.tensor([len(tokens)])]) + len(self.prefix_ids)
        text = [*self.prompt_ids, *caption]
        embed = draft.get_input_embeddings()
        embeds = torch.cat([embed(torch.tensor(self.prefix_ids)), video, embed(torch.tensor(text))])[None]
        text_positions = places[-1] + 1 + torch.arange(len(text))
        positions = torch.cat([torch.arange(len(self.prefix_ids)), places, text_positions])[None]
        mask = torch.ones(embeds.shape[:2], dtype=torch.long)
        hidden = draft.model.language_model(inputs_embeds=embeds, position_ids=positions, attention_mask=mask)[0]
        said = draft.lm_head(hidden[0, -len(caption) - 1 : -1]).argmax(-1)
        return int((said == torch.tensor(caption)).sum()), len(caption)

    def _compare(self, tally: Tally, captions: list[list[int]], question: Question) -> None:
        for caption, pixel_values in zip(captions, question.pixel_values, strict=True):
            tally.add("all tokens", *self.draft_agreement(caption, pixel_values, 1.0))
            tally.add("a tenth of the tokens", *self.draft_agreement(caption, pixel_values, KEPT_SHARE))

    def _score(self, tally: Tally, captions: list[list[int]], question: Question) -> None:
        for caption, truth in zip(captions, question.truths, strict=True):
            text = str(self.tokenizer.decode(caption, skip_special_tokens=True))
            for name in ALL_ATTRIBUTES:
                tally.add(name, *score_caption(text, truth, (name,)))
            tally.add("colour, shape, motion", *score_caption(text, truth, SCORED_ATTRIBUTES))

    def _until_end(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return ids[: ids.index(end) + 1] if end in ids else ids


def _ask(paths: list[Path], num_frames: int) -> Question:
    clips = [normalise(torch.from_numpy(load_clip_frames(path, num_frames))) for path in paths]
    resized = [
        functional.interpolate(clip, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bicubic", antialias=True).clamp(-1, 1)
        for clip in clips
    ]
    truths = [json.loads(path.with_suffix(".json").read_text())["scenes"] for path in paths]
    return Question(torch.stack(resized), truths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--frames", type=int, nargs="*", default=[32, FULL_FRAMES])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/pocket_eval"), help="where the clips are or go")
    parser.add_argument("--models", type=Path, default=POCKET_DIR)
    parser.add_argument("--out", type=Path, default=POCKET_DIR / "scores.json")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    paths = render_folder(options.folder, HELD_OUT_SEEDS[: options.clips])
    models: dict[str, Any] = {role: load_model(options.models / role).eval() for role in ROLES}
    evaluator = Evaluator(models, load_tokenizer(options.models / "target"))
    for num_frames in options.frames:
        scores = evaluator.evaluate(paths, num_frames, options.batch)
        _record(options.out, f"{num_frames} frames", {"clips": len(paths), **scores})


def _record(path: Path, name: str, scores: dict[str, Any]) -> None:
    """Puts the scores under `name` into the file, next to what other runs have put there."""
    results = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**results, name: scores}, indent=2) + "\n")


if __name__ == "__main__":
    main()
