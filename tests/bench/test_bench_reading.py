"""Pages read by a model that has learned nothing: the parts about pages are whole at their smallest."""

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.documents import program, reader_faults, reading, stages, whole
from bench.documents.program import HOLDS
from bench.documents.reader_faults import FAULTS, measure_faults
from bench.documents.reading import METHODS, is_kept, measure_reading, missed
from bench.documents.shown_pages import document_of, flat, shown_pages
from bench.documents.stages import WAYS, measure_stages
from bench.documents.whole import measure_live
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
@pytest.mark.long
def test_every_method_at_one_page(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "NOISE_DPI", (75,))
    monkeypatch.setattr(reading, "MAX_TOKENS", 40)
    found = asyncio.run(measure_reading(model, 1, 1))
    assert found["shown"] and is_kept(found) and HOLDS["reading"](found)
    assert [row["method"] for row in found["rows"]] == list(METHODS)
    plain = found["rows"][0]
    assert (plain["tokens_a_pass"], plain["rows_a_pass"], plain["decoding_speedup"]) == (1, 0, 1)
    assert [row["ocr_dpi"] for row in found["noise"]] == [75]


@needs_documents
@pytest.mark.parametrize(("fault", "pages", "strikes"), [("killed", 3, 2), ("frozen", 1, 1), ("lying", 1, 0)])
@pytest.mark.long
def test_a_reader_that_fails_behind_a_gateway(
    model: Path, monkeypatch: pytest.MonkeyPatch, fault: str, pages: int, strikes: int
) -> None:
    """Of three pages the first and the third are struck. A lie must come before its page has ended, however busy the
    machine is."""
    monkeypatch.setattr(reader_faults, "MAX_TOKENS", 400 if fault == "lying" else 40)
    monkeypatch.setattr(reader_faults, "LOSSLESS", ("hints",))
    monkeypatch.setattr(reader_faults, "FAULTS", {fault: FAULTS[fault]})
    found = asyncio.run(measure_faults(model, pages))
    [row] = found["rows"]
    assert found["shown"] and HOLDS["faults"](found)
    assert (row["fault"], row["method"], row["identical"]) == (fault, "hints", f"{pages}/{pages}")
    assert row["strikes"] == strikes and (row["without_draft"] > 0 or fault == "lying")


def test_faults_that_did_not_happen_show_nothing() -> None:
    row = {"fault": "killed", "method": "hsd", "hinted": 0, "strikes": 2, "without_draft": 1, "identical": "3/3"}

    def holds(**changed: Any) -> bool:
        return HOLDS["faults"]({"shown": True, "rows": [row | changed]})

    unhurt = {"strikes": 0, "without_draft": 0}
    assert holds() and holds(fault="lying", hinted=1, **unhurt) and HOLDS["faults"]({"shown": False})
    assert not holds(fault="lying", **unhurt) and holds(fault="lying", method="autoregressive", **unhurt)
    assert holds(fault="slow", **unhurt), "its hints may all be late"
    assert not holds(identical="2/3") and not holds(strikes=0) and not holds(without_draft=0)


@pytest.mark.long
@needs_documents
def test_documents_from_end_to_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "MAX_TOKENS", 40)
    found = asyncio.run(measure_live(model, 1, 1))
    [row] = found["rows"]
    assert found["shown"] and HOLDS["live"](found)
    assert (row["kind"], row["pages"], row["identical"]) == ("lines", 1, "4/4")
    assert row["reader_s_a_page"] > 0 and 0 <= row["hidden"] <= 1


@needs_documents
@pytest.mark.long
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
    alone = [row for row in found["rows"] if row["way"].endswith(", region")]
    assert len(alone) == 4 and all(row["lossy"] and "tokens_a_pass" not in row for row in alone)
    assert all({"region_tokens_a_pass", "region_aal_eq14"} <= row.keys() for row in alone)
    assert [row["way"] for row in found["kinds"]] == list(WAYS)
    assert all(row.keys() == {"way", "lines", "prose"} for row in found["kinds"])
    rows = [row | {"identical": "1/2"} for row in found["rows"]]
    assert not HOLDS["stages"](found | {"rows": rows}) and HOLDS["stages"]({"shown": False})


@needs_documents
def test_a_document_shows_the_pages_as_they_are(model: Path) -> None:
    pages = flat(shown_pages(model, 8))
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
    found = {"shown": True, "rows": rows, "noise": [{"ratio": 1.8}, {"ratio": 2.0}]}
    assert is_kept(found) and not missed(found)
    assert not is_kept(found | {"rows": [rows[0] | {"identical": "1/2"}]})
    assert missed(found | {"rows": [rows[0] | {"decoding_speedup": 0.9}]}) == ["0.97 of decoding on every kind"]
    assert missed(found | {"noise": [{"ratio": 1.79}, {"ratio": 2.0}]}) == ["1.8 times the tokens a pass of hsd"]
    slow = {"kind": "prose", "paying_speedup": 0.9, "hidden": 0.5}
    assert len(whole._missed([slow])) == 3
    assert not whole._missed([slow | {"paying_speedup": 2.6, "hidden": 0.95}])


def test_a_part_that_fails_ends_no_other_and_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(given: Namespace) -> dict[str, Any]:
        raise OSError("no place")

    sound = {"identical": "3/3"}
    monkeypatch.setattr(program, "PARTS", {"reading": fail, "identity": lambda given: sound})
    document = {name: program._measured(name, Namespace()) for name in program.PARTS}
    assert document["reading"] == {"failed": "OSError: no place", "part_s": 0}
    assert program.verdict(document) == {"broken": ["reading"], "not_shown": {}, "missed": {}}
    told = {"identity": sound | {"identical": "2/3"}, "scans": {"shown": False, "why": "no folder"}}
    told |= {"live": {"shown": True, "rows": [], "missed": ["x"]}}
    assert program.verdict(told) == {
        "broken": ["identity"],
        "not_shown": {"scans": "no folder"},
        "missed": {"live": ["x"]},
    }
