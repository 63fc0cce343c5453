"""The page: its figures at their place, pictures written, and what is written by hand left alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.report.page import BEGIN, END, PICTURES, make_page, slim, speedup_quartiles, write
from bench.report.pictures import kept_in_frame, latency_stages, token_parts, veiled


def method(name: str, rate: float, **figures: Any) -> dict[str, Any]:
    return {
        "name": name,
        "family": "parallel",
        "lossy": False,
        "n": 2,
        "tokens_per_s": {"median": rate, "low": rate * 0.9, "high": rate * 1.1},
        "tokens_per_s_per_device": rate / 2,
        "speedup_engine": rate / 50,
        "identical": 1.0,
        "first_token_s": 5.0,
        "T_p": 0.03,
        "T_p0": 0.02,
        "mean_tokens_per_pass": 4.0,
        "round_overhead_s": 0.002,
        "latency": {"decode_s": 0.5, "target_encode_s": 1.0, "target_prefill_s": 3.0, "first_token_s": 5.0}
        | {"generate_s": 100 / rate, "draft_prefill_s": 0.1},
        **figures,
    }


def document() -> dict[str, Any]:
    trace = [
        {"t_s": 0.03, "kind": "draft", "tokens": 4, "pass_s": 0.002, "stale": False},
        {"t_s": 0.05, "kind": "pass", "start_s": 0.01, "pass_s": 0.03, "window": 4, "accepted": 2},
        {"t_s": 0.05, "kind": "restart"},
        {"t_s": 9.0, "kind": "pass", "start_s": 8.9, "pass_s": 0.03, "window": 4, "accepted": 2},
    ]
    return {
        "command": "python -m bench methods --clips 2",
        "machine": {"processor": "a slow one", "usable_cores": 2, "load_average": 1.0},
        "setup": {"clips": 2, "frames": 4, "video_tokens": 196, "lossy_keep": 0.5, "alpha": 0.9},
        "methods": [
            method("autoregressive", 50.0, family="plain", tokens_per_s_per_device=50.0),
            method("sd", 160.123, family="sequential", identical=0.5),
            method("slipstream", 150.0, first_token_s=6.0, peak_bytes={"target": 9e8, "draft": 1e8}),
            method("fastv", 155.0, family="lossy", lossy=True, A=0.876, identical=0.0),
            method("transformers", 40.0, family="outside", note="drafts blind"),
        ],
        "prediction_error": 0.2,
        "samples": [
            {"method": name, "clip": clip, "tokens_per_s": rate, "figures": {"tau": 0.9}}
            for name, rate in (("autoregressive", 50.0), ("slipstream", 150.0))
            for clip in "ab"
        ],
        "timelines": {"slipstream": {"clip": "a", "events": [], "trace": trace}, "onsd": {"clip": "a", "events": []}},
        "kept": {
            "clip": "/nowhere/clip.mp4",
            "frames": 4,
            "grid": [7, 7],
            "alpha": 0.9,
            "pruners": {"uv": [50, 60, 99, 120], "attention": [0, 1, 2, 195], "uniform": [0]},
        },
        "notes": ["one method was left out"],
    }


def test_the_page_its_pictures_and_the_document_are_written(tmp_path: Path) -> None:
    page = write(document(), tmp_path).read_text()
    drawn = {path.name for path in (tmp_path / "results").iterdir()}
    assert drawn == set(PICTURES) - {"kept.png"}  # its clip is not there
    assert all(f"results/{name}" in page for name in drawn)
    assert all(path.stat().st_size < 100_000 for path in (tmp_path / "results").iterdir())
    for figure in ("bench methods --clips 2", "a slow one", "160.1 (144.1-176.1)", "87.6%", "drafts blind"):
        assert figure in page
    assert "one method was left out" in page
    kept = json.loads((tmp_path / "results.json").read_text())
    assert "samples" not in kept
    assert make_page(kept, [name for name in PICTURES if name in drawn]) in page  # it says all that the page needs


def test_a_picture_shows_figures_as_they_are(tmp_path: Path) -> None:
    write(document(), tmp_path)
    drawn = (tmp_path / "results" / "speedup.svg").read_text()
    assert ">3.20<" in drawn and ">1.00<" in drawn


def test_what_is_written_by_hand_stays(tmp_path: Path) -> None:
    (tmp_path / "results.md").write_text(f"# Mine\n\nbefore\n\n{BEGIN}\nold figures\n{END}\n\nafter\n")
    first = write(document(), tmp_path).read_text()
    assert first.startswith("# Mine\n\nbefore\n\n") and first.endswith(f"{END}\n\nafter\n")
    assert "old figures" not in first
    assert write(document(), tmp_path).read_text() == first


def test_a_poor_document_makes_a_short_page(tmp_path: Path) -> None:
    page = write({"methods": [{"name": "autoregressive"}]}, tmp_path).read_text()
    assert "# Results" in page
    assert "svg" not in page


def test_a_picture_that_is_no_longer_measured_goes(tmp_path: Path) -> None:
    write(document(), tmp_path)
    write({"methods": []}, tmp_path)
    assert not list((tmp_path / "results").iterdir())


def test_tokens_of_a_frame() -> None:
    mask = kept_in_frame([3, 4, 7, 8], 1, (2, 2))
    assert mask.tolist() == [[True, False], [False, True]]


def test_frames_fade_where_nothing_is_kept() -> None:
    frame = np.zeros((4, 4, 3), dtype=np.uint8)
    veil = veiled(frame, np.array([[True, False], [False, False]]))
    assert veil[:2, :2].max() == 0
    assert veil[2:].min() > 200


def test_the_time_to_the_first_token_is_accounted_for() -> None:
    stages = latency_stages({"decode_s": 1.0, "target_prefill_s": 3.0, "first_token_s": 5.0, "generate_s": 2.0})
    assert stages["other_s"] == pytest.approx(1.0)
    assert sum(stages.values()) == pytest.approx(7.0)


def test_quartiles_are_clip_by_clip() -> None:
    assert speedup_quartiles(document(), "slipstream") == (3.0, 3.0)
    assert speedup_quartiles(document(), "sd") is None


def test_a_kept_document_is_small() -> None:
    small = slim(document())
    assert small["methods"][1]["tokens_per_s"]["median"] == 160.1
    assert small["kept"]["clip"] == "clip.mp4"
    assert set(small["kept"]["pruners"]) == {"uv", "attention"}
    assert len(small["timelines"]["slipstream"]["trace"]) == 3


def test_parts_of_a_token_add_up_to_the_time_between_two() -> None:
    parts = token_parts(method("slipstream", 100.0))
    assert parts == pytest.approx({"one_row": 5.0, "rows": 2.5, "round": 0.5, "rest": 2.0})
