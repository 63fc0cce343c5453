"""The check of very long manifests hears of every line that is told wrongly."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bench import archive_manifest
from bench.archive_manifest import AGAIN, KINDS, LONG, OTHER, Reader, differing, read, write_manifest

LINES, SEED = 3000, 1


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Counter[str]]:
    monkeypatch.setattr(archive_manifest, "LONG_BYTES", 1_100_000)
    path = tmp_path / "list.jsonl"
    return path, write_manifest(path, LINES, SEED)


def found(path: Path) -> dict[str, object]:
    return read(Reader(path, LINES, SEED))


def test_what_is_planted_is_what_is_told(manifest: tuple[Path, Counter[str]]) -> None:
    path, planted = manifest
    assert set(planted) == {"", LONG, *KINDS} and planted.total() == LINES
    said = found(path)
    assert said["items"] == planted[""] + planted[AGAIN] + planted[OTHER]
    assert differing(planted, said) == 0


@pytest.mark.parametrize("good", [True, False])
def test_a_line_that_is_told_wrongly_or_not_at_all_is_noticed(manifest: tuple[Path, Counter[str]], good: bool) -> None:
    path, planted = manifest
    lines = path.read_bytes().split(b"\n")
    at = next(
        at
        for at, line in enumerate(lines)
        if line.startswith(b'{"source": "videos/0') != good and line[:9] == b'{"source"'
    )
    lines[at] = json.dumps({"source": "a"}).encode() if good else b"bad"
    path.write_bytes(b"\n".join(lines))
    assert differing(planted, found(path)) > 0
