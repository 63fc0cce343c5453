"""The plan for a hundred million clips on the page about scaling is what follows from its own figures for one clip."""

import re

import pytest

from bench.common import ROOT

PAGE = (ROOT / "docs/scaling.md").read_text()
UNITS = {
    "bytes": 1,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "ms": 1e-3,
    "s": 1,
    "h": 3600,
    "USD": 1,
    "million": 1e6,
    "": 1,
}
PLAN = PAGE.partition("| | a clip | a million | 100 million | origin |")[2].partition("\n\n")[0]
ROWS = {cells[1]: cells[2:5] for line in PLAN.splitlines()[2:] if (cells := [word.strip() for word in line.split("|")])}
"""A clip, a million and a hundred million of them, by what is told."""
GPU, DECODING = "GPU time", "decoding, of a core"
GPU_PRICE, CORE_PRICE, READ_PRICE = "at 2.50 USD an hour", "at 0.04 USD an hour", "at 0.40 USD a million"
READ, REQUESTS = "video read", "requests to a store of objects"


def value(cell: str) -> float:
    """In bytes, seconds, dollars or pieces."""
    number, _, unit = cell.partition(" ")
    return float(number.replace(",", "")) * UNITS[unit]


def of(name: str) -> float:
    return value(ROWS[name][0])


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_of_the_same_clip(name: str) -> None:
    clip, million, hundred_million = map(value, ROWS[name])
    assert million == pytest.approx(1e6 * clip, rel=0.05)
    assert hundred_million == pytest.approx(100 * million, rel=0.02)


def test_prices_are_those_of_what_stands_above_them() -> None:
    for priced, row, price in (
        (GPU_PRICE, GPU, 2.5 / 3600),
        (CORE_PRICE, DECODING, 0.04 / 3600),
        (READ_PRICE, REQUESTS, 4e-7),
    ):
        assert of(priced) == pytest.approx(price * of(row), rel=0.02)
    assert of(GPU) == pytest.approx(1 / 1.02, rel=0.01) and of(READ) == pytest.approx(256 / 24 * 5e6 / 8, rel=0.01)


def said(pattern: str) -> list[float]:
    """The numbers of the one place that reads so."""
    (found,) = re.findall(pattern, PAGE)
    return [float(each.replace(",", "")) for each in (found if isinstance(found, tuple) else (found,))]


def test_what_a_thousand_gpus_need_each_second_follows() -> None:
    clips = 1000 / of(GPU)
    hours, told_clips = said(r"On 1,000 GPUs that is ([\d.]+) hours and ([\d,]+) clips a second")
    assert hours == pytest.approx(1e8 / clips / 3600, rel=0.01) and told_clips == pytest.approx(clips, rel=0.01)
    gigabytes, requests, cores = said(
        r"([\d.]+) GB and ([\d,]+) requests a second from the store, ([\d,]+) cores that decode"
    )
    assert gigabytes == pytest.approx(clips * of(READ) / 1e9, rel=0.01)
    assert requests == pytest.approx(clips * of(REQUESTS), rel=0.01)
    assert cores == pytest.approx(clips * of(DECODING), rel=0.01)


def test_what_breaks_first_follows() -> None:
    a_gpu = 1 / of(GPU)
    prefix, reads = said(r"([\d,]+) reads a second, at")[0], said(r"reads a second, at ([\d,]+) GPUs")[0]
    assert reads == pytest.approx(prefix / of(REQUESTS) / a_gpu, rel=0.01)
    inside, outside = said(r"of the ([\d,]+) jobs a second that one queue was measured to take \(of ([\d,]+) with")
    told_inside, told_outside = said(r"one queue at ([\d,]+) GPUs, at ([\d,]+) with")
    assert told_inside == pytest.approx(inside / a_gpu, rel=0.01)
    assert told_outside == pytest.approx(outside / a_gpu, rel=0.01)
    hours, dollars, days = said(r"minutes are ([\d,]+) GPU hours, ([\d,]+) USD and ([\d.]+) days")
    minutes = 60 / (256 / 24) * 1e8 * of(GPU) / 3600
    assert hours == pytest.approx(minutes, rel=0.01) and dollars == pytest.approx(2.5 * minutes, rel=0.01)
    assert days == pytest.approx(minutes / 1000 / 24, rel=0.01)


def test_our_own_figures_follow_from_videos_an_hour() -> None:
    rows = re.findall(
        r"^\| [^|]+, (?:one|two) workers? \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (\d+) USD \|$", PAGE, re.M
    )
    assert len(rows) == 3
    for row in rows:
        rate, hours, core_hours, dollars = (float(each.replace(",", "")) for each in row)
        assert hours == pytest.approx(1e6 / rate, rel=0.01) and core_hours == pytest.approx(2 * hours, rel=0.01)
        assert dollars == pytest.approx(0.04 * core_hours, rel=0.02)
        assert (
            f"| 1 | {row[0]} |" in (archive := (ROOT / "docs/archive.md").read_text())
            or f"| | 2 | {row[0]} |" in archive
        )
