"""The world of needles: what flashes, where its tokens are, and what the caption says of it."""

import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from training import train, train_needles
from training.language import EncodedClip
from training.needles import (
    DECOY_COLOUR,
    GRID,
    NUM_FRAMES,
    TOKENS_PER_FRAME,
    NeedleClip,
    sample_needle_clip,
    write_needle_caption,
)
from training.pocket import IMAGE_SIZE
from training.tokenizer import load_tokenizer
from training.train_needles import CLASSES, TEXT_LEN, NeedleExamples, thin, token_labels
from training.world import HELD_OUT_SEEDS, MAX_SCENES

SEEDS = range(30)
SIDE = IMAGE_SIZE // GRID


def frames_without(clip: NeedleClip, indices: list[int]) -> np.ndarray:
    return NeedleClip(clip.num_frames, clip.backdrop, (), ()).frames(indices, IMAGE_SIZE)


def test_the_same_seed_is_the_same_clip() -> None:
    assert sample_needle_clip(5) == sample_needle_clip(5)
    assert sample_needle_clip(5).needles != sample_needle_clip(6).needles


@pytest.mark.parametrize("num_frames", [56, NUM_FRAMES])
def test_every_scene_has_one_needle_and_flashes_share_no_frame(num_frames: int) -> None:
    for seed in (*SEEDS, *HELD_OUT_SEEDS[:30]):
        clip = sample_needle_clip(seed, num_frames)
        flashes = [*clip.needles, *clip.decoys]
        frames = [frame for flash in flashes for frame in flash.frames]
        assert len(frames) == len(set(frames)) and max(frames) < num_frames
        times_s = [frame * clip.backdrop.duration_s / num_frames for needle in clip.needles for frame in needle.frames]
        assert {clip.backdrop.scene_at(time_s).number for time_s in times_s} == set(range(1, MAX_SCENES + 1))
        assert {decoy.look.colour for decoy in clip.decoys} == {DECOY_COLOUR}


def test_a_flash_changes_the_pixels_of_its_tokens_and_no_others() -> None:
    for seed in SEEDS[:4]:
        clip = sample_needle_clip(seed)
        for flash in (*clip.needles[:2], *clip.decoys[:2]):
            frame = flash.frames[0]
            changed = (clip.frames([frame], IMAGE_SIZE) != frames_without(clip, [frame]))[0].any(axis=-1)
            cells = changed.reshape(GRID, SIDE, GRID, SIDE).any(axis=(1, 3)).flatten()
            assert set(cells.nonzero()[0]) <= set(flash.cells) and len(flash.cells) == 4
            assert cells.sum() >= 2


def test_the_caption_names_every_needle_in_its_place() -> None:
    clip = sample_needle_clip(3)
    sentences = write_needle_caption(clip).split(". ")
    assert len(sentences) == MAX_SCENES
    for sentence, needle in zip(sentences, clip.needles, strict=True):
        assert f"a tiny {needle.look.colour} {needle.look.shape} shows up on the {needle.side}" in sentence
    assert DECOY_COLOUR not in write_needle_caption(clip)


def test_examples_show_every_flash_and_their_text_has_room() -> None:
    examples = NeedleExamples(40, load_tokenizer(), 0)
    for seed in SEEDS[:3]:
        example = examples.example(seed)
        flashing = {frame for flash in (*example.clip.needles, *example.clip.decoys) for frame in flash.frames}
        assert flashing <= set(example.step_indices.tolist()) and len(example.frames) == 40
        assert len(example.prompt_ids) + len(example.caption_ids) <= TEXT_LEN


@pytest.mark.parametrize("needle_share", [0.0, 1.0])
def test_thinning_keeps_all_of_a_needle_where_it_is_to(needle_share: float) -> None:
    example = NeedleExamples(40, load_tokenizer(), 0).example(1)
    places = (example.step_indices[:, None] * TOKENS_PER_FRAME + torch.arange(TOKENS_PER_FRAME)).flatten()
    clip = EncodedClip(places[:, None].float(), places, torch.arange(9000), 9000, example)
    thinned = thin(clip, 160, needle_share, random.Random(0))
    assert thinned.places.tolist() == sorted(thinned.places.tolist()) == thinned.tokens.flatten().tolist()
    assert len(thinned.places) == 160
    needles = {place for needle in example.clip.needles for place in needle.places}
    assert (needles <= set(thinned.places.tolist())) is bool(needle_share)


def test_labels_are_of_the_tokens_that_a_needle_lies_in() -> None:
    clip = sample_needle_clip(4)
    needle = clip.needles[2]
    labels = token_labels(clip, needle.frames[0])
    nothing = torch.tensor([size - 1 for name, size in CLASSES.items() if name != "number"])
    somewhere = (labels[:, :3] != nothing).any(dim=1).nonzero().flatten()
    assert somewhere.tolist() == list(needle.cells)
    assert set(labels[:, 3].tolist()) == {2}
    assert (token_labels(clip, clip.decoys[0].frames[0])[:, :3] == nothing).all()


@pytest.mark.parametrize("program", [train, train_needles])
def test_a_stage_that_there_is_not_is_refused_before_anything_is_done(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["train", "target", "--out", str(folder), "--only", "vision", "nonsense"])
    monkeypatch.setattr(program, "run_processes", lambda *given: pytest.fail("it began"))
    with pytest.raises(SystemExit) as ended:
        program.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "no stage 'nonsense'" in told and "vision, " in told
    assert not folder.exists()
