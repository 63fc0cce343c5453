"""The pocket reader: what it is trained on, that training goes on after a stop, and that the engine serves it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from slipstream.engine import load_model
from training import train_reader
from training.evaluate_reader import PlainReader, edit_distance, held_out_pages, score
from training.pages import KINDS, sample_page
from training.reader import (
    COLUMNS,
    MAX_TEXT,
    PROMPT,
    ROWS,
    build,
    export,
    grey_patches,
    make_example,
    reader_folder,
    train_tokenizer,
)
from training.reader_heads import kept_cells


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PlainReader:
    """One that has learned nothing yet."""
    folder = tmp_path_factory.mktemp("reader") / "untrained"
    tokenizer = train_tokenizer(pages=100)
    export(build(tokenizer), tokenizer, folder)
    return PlainReader(folder)


def test_the_engine_gives_the_logits_of_transformers(reader: PlainReader) -> None:
    """A page is a video of one frame for the engine, and a picture for transformers."""
    (page,) = held_out_pages(reader.tokenizer, "lines", 1)
    model = load_model(str(reader.folder))
    plan = model.plan_prompt(PROMPT, 1, frame_size=page.pixels.shape[:2], seconds_per_frame=1.0)
    state, first = model.start_prefill(plan, model.encode_frames(page.pixels[None])).finish()
    (rest,) = model.step([(state, reader.tokenizer.encode(page.text))])
    torch.testing.assert_close(torch.cat([first[None], rest]), reader.logits(page.pixels, page.text))


def test_the_shipped_reader_reads_held_out_pages() -> None:
    found = score(PlainReader(reader_folder()), list(KINDS), 1)
    assert found["pages"] == len(KINDS) and found["cer"] < 0.05


def test_the_shipped_reader_is_small() -> None:
    assert sum(path.stat().st_size for path in reader_folder().iterdir()) < 6 * 2**20


def test_pages_of_the_right_shape_fill_the_canvas_at_any_resolution(reader: PlainReader) -> None:
    for width, height in ((850, 1100), (1275, 1650), (140, 182)):
        seen: Any = reader.processor(images=[Image.new("RGB", (width, height))], return_tensors="pt")
        assert seen["image_grid_thw"].tolist() == [[1, 2 * ROWS, 2 * COLUMNS]]


def test_training_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_reader, "train_tokenizer", lambda: train_tokenizer(pages=100))
    options = train_reader.parser().parse_args(
        f"--eager --vision-batch 2 --batch 2 --state {tmp_path}/state.pt --out {tmp_path}/out"
        " --vision-minutes 0.001 --reading-minutes 0.001 --joint-minutes 0".split()
    )
    train_reader.train(0, options)
    state = torch.load(tmp_path / "state.pt")
    assert state["done"] == {"vision": 1.0, "reading": 1.0}
    options.joint_minutes = 0.001
    trainer = train_reader.ReaderTrainer(options, 0)
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, state["model"][name]), name
    trainer.run()
    assert trainer.done["joint"] == 1.0 and trainer.seen_pages > state["seen_pages"]
    assert PlainReader(tmp_path / "out").tokenizer.get_vocab() == trainer.tokenizer.get_vocab()


def test_cells_with_text_are_always_kept() -> None:
    written = torch.rand(4, ROWS * COLUMNS) < torch.tensor([[0.0], [0.2], [0.5], [0.9]])
    for blank_share in (0.0, 0.1, 1.0):
        kept = kept_cells(written, blank_share)
        assert (kept.diff(dim=1) > 0).all(), "in order, none twice"
        assert (written.gather(1, kept).sum(1) == written.sum(1)).all()
    assert kept.shape == written.shape


def test_pages_reach_the_tower_as_the_processor_hands_them_over(reader: PlainReader) -> None:
    page = sample_page(1)
    rows, grid = grey_patches(torch.from_numpy(page.pixels)[None])
    seen: Any = reader.processor(images=[page.pixels], return_tensors="pt")
    assert seen["image_grid_thw"].tolist() == grid.tolist()
    for colour_and_frame in seen["pixel_values"].split(rows.shape[1], dim=1):
        torch.testing.assert_close(colour_and_frame, rows, atol=1e-6, rtol=0)


def test_examples_say_where_things_are() -> None:
    tokenizer = train_tokenizer(pages=100)
    page = sample_page(3, "columns")
    example = make_example(page, tokenizer)
    assert example is not None
    assert tokenizer.decode(example.token_ids[:-1]) == page.text
    assert example.token_ids[-1] == tokenizer.eos_token_id
    placed = example.places[example.places[:, 0] >= 0]
    assert (placed < torch.tensor([ROWS, COLUMNS])).all() and len(placed) > 0.8 * len(example.token_ids)
    written = example.lines.view(ROWS, COLUMNS, 2)[placed[:, 0], placed[:, 1]]
    assert (written >= 0).all()


def test_text_that_is_too_long_is_no_example() -> None:
    tokenizer = train_tokenizer(pages=100)
    lengths = {
        len(tokenizer.encode(page.text)): make_example(page, tokenizer) is not None
        for page in (sample_page(seed, "full") for seed in range(60))
    }
    assert lengths == {length: length <= MAX_TEXT for length in lengths}


def test_edit_distance() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3
    assert edit_distance("page", "page") == 0
