"""Scores a pocket pair on held-out video files: right attributes, and how often the draft agrees with the target."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.engine import VideoLM, load_model
from slipstream.errors import SlipstreamError
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits
from training.captions import ALL_ATTRIBUTES, DEFAULT_PROMPT, SCORED_ATTRIBUTES, score_caption
from training.data import render_folder
from training.families import FAMILIES
from training.pocket import ROLES
from training.world import FULL_SCENES, HELD_OUT_SEEDS

MAX_NEW_TOKENS = 288
KEPT_SHARE = 0.1


def load_clip_frames(path: Path, num_frames: int) -> npt.NDArray[np.uint8]:
    """The frames shown at `num_frames` moments spread evenly over the file's time, uint8 [n, h, w, 3]."""
    with path.open("rb") as source:
        return sample_video(source, num_frames, DecodeLimits()).frames


@dataclass(frozen=True)
class Question:
    """A clip as a model sees it, and what it really shows."""

    frames: npt.NDArray[np.uint8]
    seconds_per_frame: float
    truth: list[dict[str, str]]

    @classmethod
    def load(cls, path: Path, num_frames: int) -> "Question":
        facts = json.loads(path.with_suffix(".json").read_text())
        frames = load_clip_frames(path, num_frames)
        return cls(frames, facts["duration_s"] / num_frames, facts["scenes"])


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
    """Captions the same clips with both models, by the engine, and compares what they say."""

    def __init__(self, models: dict[str, VideoLM]) -> None:
        self.models = models

    @torch.inference_mode()
    def evaluate(self, paths: list[Path], num_frames: int) -> dict[str, dict[str, float]]:
        tallies = {name: Tally({}) for name in (*self.models, "agreement")}
        for number, path in enumerate(paths, 1):
            question = Question.load(path, num_frames)
            captions = {role: self.caption(role, question) for role in self.models}
            for role, answer in captions.items():
                self._score(role, tallies[role], answer, question)
            for name, share in (("all tokens", 1.0), ("a tenth of the tokens", KEPT_SHARE)):
                tallies["agreement"].add(name, *self.agreement("draft", captions["target"], question, share))
            shares = {name: tally.shares() for name, tally in tallies.items()}
            if number % 10 == 0 or number == len(paths):
                print(f"{num_frames} frames, {number} clips: {json.dumps(shares)}", flush=True)
        return shares

    def caption(self, role: str, question: Question) -> list[int]:
        """Greedy caption as token ids, up to and with the end token."""
        model = self.models[role]
        state, logits = self._prefill(model, question, 1.0)
        token_ids = [int(logits.argmax())]
        while token_ids[-1] not in model.info.eos_token_ids and len(token_ids) < MAX_NEW_TOKENS:
            token_ids.append(int(model.step([(state, token_ids[-1:])])[0][-1].argmax()))
        return token_ids

    def agreement(self, role: str, answer: list[int], question: Question, kept_share: float) -> tuple[int, int]:
        """Tokens of `answer` that the model would say too, given the words before each, and all of them."""
        model = self.models[role]
        state, first = self._prefill(model, question, kept_share)
        (rows,) = model.step([(state, answer)])
        said = torch.cat([first[None], rows[:-1]]).argmax(-1)
        return int((said == torch.tensor(answer)).sum()), len(answer)

    def _prefill(self, model: VideoLM, question: Question, kept_share: float) -> Any:
        plan = model.plan_prompt(
            DEFAULT_PROMPT,
            len(question.frames),
            frame_size=question.frames.shape[1:3],
            seconds_per_frame=question.seconds_per_frame,
        )
        num_kept = round(kept_share * plan.num_video_tokens)
        keep = torch.randperm(plan.num_video_tokens)[:num_kept].sort().values
        return model.start_prefill(plan, model.encode_frames(question.frames), keep=keep).finish()

    def _score(self, role: str, tally: Tally, caption: list[int], question: Question) -> None:
        text = self.models[role].decode(caption)
        for name in ALL_ATTRIBUTES:
            tally.add(name, *score_caption(text, question.truth, (name,)))
        tally.add("colour, shape, motion", *score_caption(text, question.truth, SCORED_ATTRIBUTES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, default="llava_onevision")
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--scenes", type=int, nargs=2, default=FULL_SCENES, help="fewest and most scenes of a clip")
    parser.add_argument("--frames", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/pocket_eval"), help="where the clips are or go")
    parser.add_argument("--models", type=Path, help="folder of the pair, the family's own if not given")
    parser.add_argument("--out", type=Path, help="scores.json beside the models if not given")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    folder = options.models or FAMILIES[options.family].folder
    try:
        evaluator = Evaluator({role: load_model(str(folder / role)) for role in ROLES})
    except SlipstreamError as error:
        parser.error(f"--models: {error}")
    paths = render_folder(options.folder, HELD_OUT_SEEDS[: options.clips], tuple(options.scenes))
    for num_frames in options.frames:
        scores = evaluator.evaluate(paths, num_frames)
        _record(options.out or folder / "scores.json", f"{num_frames} frames", {"clips": len(paths), **scores})


def _record(path: Path, name: str, scores: dict[str, Any]) -> None:
    """Puts the scores under `name` into the file, next to what other runs have put there."""
    results = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**results, name: scores}, indent=2) + "\n")


if __name__ == "__main__":
    main()
