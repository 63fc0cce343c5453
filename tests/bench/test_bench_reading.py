"""Pages read by a model that has learned nothing, with readers that fail: the part is whole at its smallest."""

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.documents import program, reading, stages
from bench.documents.program import HOLDS
from bench.documents.reading import METHODS, is_kept, measure_reading, missed
from bench.documents.shown_pages import FAULTS, document_of, shown_pages
from bench.documents.stages import WAYS, measure_stages
from slipstream.documents.messages import DocumentLimits
from slipstream.documents.render import open_document
from tests.support.documents import needs_documents
from training.reader import build, export, train_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader") / "untrained"
    tokenizer = train_tokenizer(pages=100)
    export(build(tokenizer), tokenizer, folder)
    return folder


@needs_documents
def test_the_whole_part_at_one_page(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "NOISE_DPI", (75,))
    monkeypatch.setattr(reading, "MAX_TOKENS", 40)
    found = asyncio.run(measure_reading(model, 1, 1))
    assert found["shown"] and is_kept(found) and HOLDS["reading"](found)
    assert set(found["identity"]["by_fault"].values()) == {"1/1"}
    assert len(found["identity"]["by_fault"]) == 3 * len(FAULTS)
    empty = found["identity"]["empty_drafts"]
    assert empty == {"well": 0, "killed": 1, "frozen": 1, "slow": 0, "lying": 0}, "the faults did happen"
    assert len(found["rows"]) == len(METHODS)
    plain = [row for row in found["rows"] if row["method"] == "autoregressive"]
    assert all((row["tokens_a_pass"], row["rows_a_pass"], row["decoding_speedup"]) == (1, 0, 1) for row in plain)
    assert [row["ocr_dpi"] for row in found["noise"]] == [75]


@needs_documents
def test_both_stages_and_each_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "STAGE_DPI", (75,))
    monkeypatch.setattr(stages, "MAX_TOKENS", 40)
    found = asyncio.run(measure_stages(model, 2, 1))
    assert found["shown"] and HOLDS["stages"](found)
    assert [row["way"] for row in found["rows"]] == list(WAYS)
    told = {row["way"]: row for row in found["rows"]}
    assert {row["identical"] for row in told.values() if not row["lossy"]} == {"2/2"}
    assert told["autoregressive"]["tokens_a_pass"] == told["autoregressive"]["end_to_end_speedup"] == 1
    waiting = told["hsd, tau 0.75, region+page"]
    assert waiting["read_in_time"] <= waiting["regions"] and waiting["region_s"] <= waiting["page_s"]
    assert [row["kind"] for row in found["kinds"]] == ["lines", "prose"]
    rows = [row | {"identical": "1/2"} for row in found["rows"]]
    assert not HOLDS["stages"](found | {"rows": rows}) and HOLDS["stages"]({"shown": False})


@needs_documents
def test_a_document_shows_the_pages_as_they_are(model: Path) -> None:
    pages = [page for of_kind in shown_pages(model, 8).values() for page in of_kind]
    assert len(pages) == 8 and len({page.kind for page in pages}) == 7
    document = open_document(document_of(pages), DocumentLimits())
    assert document.num_pages == 8
    picture, _ = document.draw(1, 72, 2**24)
    assert picture.shape == (pages[0].picture.height, pages[0].picture.width, 3)


def test_without_a_checkpoint_nothing_is_shown_and_nothing_broken(tmp_path: Path) -> None:
    found = asyncio.run(measure_reading(tmp_path / "none", 50, 3))
    assert not found["shown"] and "--reader-model" in found["why"]
    assert HOLDS["reading"](found)


def test_what_is_called_broken_and_what_missed() -> None:
    rows: list[dict[str, Any]] = [
        {"method": "hints", "lossy": False, "identical": "2/2", "decoding_speedup": 2.0},
        {"method": "hsd, tau 0.75", "lossy": True, "identical": "1/2", "decoding_speedup": 0.5},
    ]
    document = {"kind": "prose", "identical": "6/6", "end_to_end_speedup": 2.6, "hidden": 0.95}
    found = {"shown": True, "identity": {"by_fault": {"hints, well": "2/2"}}, "rows": rows, "documents": [document]}
    found |= {"noise": [{"ratio": 1.8}, {"ratio": 2.0}]}
    assert is_kept(found) and not missed(found)
    assert not is_kept(found | {"identity": {"by_fault": {"hints, killed": "1/2"}}})
    assert not is_kept(found | {"documents": [document | {"identical": "5/6"}]})
    assert not is_kept(found | {"rows": [rows[0] | {"identical": "1/2"}]})
    assert len(missed(found | {"rows": [rows[0] | {"decoding_speedup": 0.9}]})) == 1
    slow = document | {"end_to_end_speedup": 0.9, "hidden": 0.5}
    assert len(missed(found | {"documents": [slow]})) == 3
    assert missed(found | {"noise": [{"ratio": 1.79}, {"ratio": 2.0}]}) == ["1.8 times the tokens a pass of hsd"]


def test_a_part_that_fails_ends_no_other_and_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(given: Namespace) -> dict[str, Any]:
        raise OSError("no place")

    sound = {"identical": "3/3"}
    monkeypatch.setattr(program, "PARTS", {"reading": fail, "identity": lambda given: sound})
    document = {name: program._measured(name, Namespace()) for name in program.PARTS}
    assert document["reading"] == {"failed": "OSError: no place", "part_s": 0}
    assert program.verdict(document) == {"broken": ["reading"], "not_shown": {}, "missed": {}}
    told = {"identity": sound | {"identical": "2/3"}, "scans": {"shown": False, "why": "no folder"}}
    told |= {
        "recaption": {"rows": [], "not_shown": "an older one"},
        "live": {"shown": True, "rows": [], "missed": ["x"]},
    }
    assert program.verdict(told) == {
        "broken": ["identity"],
        "not_shown": {"scans": "no folder", "recaption": "an older one"},
        "missed": {"live": ["x"]},
    }
