"""What the tests of whole stacks share: a tiny pair, a few clips, and what plain transformers says of them."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.stack.local import StackOptions
from tests.support.clips import make_colour_clip, sample_clip
from tests.support.reference import Reference
from tests.support.tiny_checkpoint import write_tiny_llava
from tests.support.tiny_pair import TinyPair, WriteCheckpoint, write_tiny_pair

PROMPT = "Describe the video."
NUM_FRAMES = 12
NUM_TOKENS = 96
STOP_AFTER = 30
"""The last clip's answer ends by itself, some time after this many tokens."""
EXTRA_LAYERS = 8
"""Of the target: enough for windows, few enough for hundreds of captions. Fault runs need a slower one."""


@dataclass
class World:
    """Clips 0 and 1 are answered up to any limit; the answer about the last clip ends with an end-of-text token."""

    folder: Path
    pair: TinyPair
    clips: tuple[bytes, ...]
    reference: Reference
    _answers: dict[tuple[int, str, int], list[int]] = field(default_factory=dict)

    def answer(
        self, clip: int = 0, num_tokens: int = NUM_TOKENS, prompt: str = PROMPT, num_frames: int = NUM_FRAMES
    ) -> list[int]:
        """Token ids of plain transformers' greedy answer."""
        key = (clip, prompt, num_frames)
        known = self._answers.get(key, [])
        if len(known) < num_tokens:
            known = self.reference.answer(sample_clip(self.clips[clip], num_frames), prompt, num_tokens)
            self._answers[key] = known
        return known[:num_tokens]

    def forget(self, clip: int) -> None:
        """Lets the reference answer again about this clip."""
        self._answers = {key: answer for key, answer in self._answers.items() if key[0] != clip}

    def endless_target(self) -> Path:
        """The target once more, with an end-of-text token that its logits do not reach."""
        folder = self.folder / "endless"
        if not folder.exists():
            shutil.copytree(self.pair.target, folder)
            path = folder / "generation_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 100_000}))
        return folder

    def stack_options(self, *gateway_flags: str, restart: bool = False) -> StackOptions:
        """A stack of this pair. A busy machine must not make a test fail, so silence is tolerated for long."""
        flags = ("--max-new-tokens", "4000", "--draft-timeout-s", "30", "--drain-s", "30", *gateway_flags)
        return StackOptions(
            target_model=self.pair.target,
            draft_model=self.pair.draft,
            threads=1,
            restart=restart,
            video_roots=(self.folder,),
            extra_flags={"gateway": flags},
        )


def make_endless_world(folder: Path, write: WriteCheckpoint = write_tiny_llava, **pair_options: Any) -> World:
    """Writes a pair and the clips; no answer is sure to end by itself."""
    pair = write_tiny_pair(folder / "pair", seed=1, write=write, **pair_options)
    return World(folder, pair, tuple(make_colour_clip(seed) for seed in range(3)), Reference(pair.target))


def make_world(folder: Path, write: WriteCheckpoint = write_tiny_llava) -> World:
    """Writes the pair and the clips, and picks the end-of-text token."""
    world = make_endless_world(folder, write, extra_layers=EXTRA_LAYERS)
    used = {*world.answer(0), *world.answer(1), *world.answer(2, STOP_AFTER)}
    world.reference.end_at(next(token for token in world.answer(2)[STOP_AFTER:] if token not in used))
    world.forget(2)
    return world
