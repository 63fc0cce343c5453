"""What all measurements share: how a run keeps within its time, what is read of processes, and how it ends."""

import json
import os
from pathlib import Path

import pytest

from bench import __main__ as entry
from bench import house
from bench.common import MARGIN, Budget, cpu_s, first_difference, forget_peak, peak_bytes
from bench.output import MAX_LINE_BYTES, finish, kept_document, last_line
from slipstream.errors import ModelNotUsable


def test_a_budget_allows_what_ends_in_time_and_leaves_what_is_reserved() -> None:
    now = [100.0]
    budget = Budget(60.0, clock=lambda: now[0])
    assert budget.allows(60.0 / MARGIN)
    now[0] = 130.0
    assert budget.spent_s == 30.0
    assert budget.allows(20.0)
    assert not budget.allows(20.0, reserved_s=10.0)


def test_the_use_of_a_process_is_read() -> None:
    pid = os.getpid()
    before_s = cpu_s(pid)
    sum(range(3_000_000))
    assert cpu_s(pid) >= before_s
    forget_peak(pid)
    assert peak_bytes(pid) > 1_000_000


@pytest.mark.parametrize(
    ("got", "position"), [((1, 2, 3), None), ((1, 9, 3), 1), ((1, 2), 2), ((1, 2, 3, 4), 3), ((), 0)]
)
def test_texts_differ_first_where_a_token_differs_or_is_missing(got: tuple[int, ...], position: int | None) -> None:
    assert first_difference(got, (1, 2, 3)) == position


def test_the_last_line_is_short_and_names_the_file_with_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {"ok": True, "samples": [1.5] * 5000, "more": "x" * 9000, "series": [1, 2]}
    finish("tried", document, series=("series",), folder=tmp_path)
    line = capsys.readouterr().out.splitlines()[-1]
    assert len(line.encode()) <= MAX_LINE_BYTES
    shown = json.loads(line)
    assert shown["ok"] and sorted(shown["only_in_file"]) == ["more", "samples", "series"]
    assert json.loads(Path(shown["file"]).read_text()) == document
    output = tmp_path / "output.txt"
    output.write_text(f"some table\n{line}\n")
    assert kept_document(output) == document


def test_a_document_that_fits_stays_whole() -> None:
    assert json.loads(last_line({"ok": True, "rows": [1, 2]})) == {"ok": True, "rows": [1, 2]}


def test_every_line_ends_within_its_limit() -> None:
    assert len(last_line({f"key {number}": "é" * 300 for number in range(200)}).encode()) <= MAX_LINE_BYTES


def test_without_a_name_the_programs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    entry.main([])
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in entry.PROGRAMS)


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(["nonsense"])
    assert ended.value.code == 2 and "no benchmark 'nonsense'" in capsys.readouterr().err


def test_what_a_user_may_be_told_ends_a_program_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: list[str]) -> None:
        raise ModelNotUsable(f"no checkpoint at {argv[1]}")

    monkeypatch.setattr(house, "main", main)
    with pytest.raises(SystemExit) as ended:
        entry.main(["house", "--tree", "/nowhere"])
    assert ended.value.code == ModelNotUsable.exit_code
    assert capsys.readouterr().err == "no checkpoint at /nowhere\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("gate --captions 0", "argument --captions: 0 must be at least 1"),
        ("gate --tokens -1", "argument --tokens: -1 must be at least 1"),
        ("gate --seed -1", "argument --seed: -1 must be at least 0"),
        ("gate --tokens many", "argument --tokens: invalid int value: 'many'"),
        ("simulate-trees --seeds 0", "argument --seeds: 0 must be at least 1"),
        ("sessions --clients 4 0", "argument --clients: 0 must be at least 1"),
        ("identity --clips -1", "argument --clips: -1 must be at least 0"),
        ("objects --clip 0 640", "argument --clip: 0 must be at least 1"),
        ("report nothing.json", "nothing.json: No such file or directory"),
        ("report CHANGELOG.md", "CHANGELOG.md is neither a document of `python -m bench methods` nor"),
        ("report none.json", "none.json is neither a document of `python -m bench methods` nor"),
        ("trees nowhere", "nowhere is no checkout of this project"),
        ("trees .", "is no checkout of this project"),
    ],
)
def test_what_a_program_cannot_work_on_is_told(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n")
    (tmp_path / "none.json").write_text('{"texts": "identical"}\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        entry.main(words.split())
    assert ended.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(entry.PROGRAMS))
def test_every_program_tells_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main([name, "--help"])
    assert ended.value.code == 0
    assert f"python -m bench {name}" in capsys.readouterr().out
