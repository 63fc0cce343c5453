"""What the part `ray` of scale-check says of a driver of another Python. Programs that answer as Ray stand in."""

import importlib.metadata
import platform
import stat
from pathlib import Path

import pytest

from bench.ray_check import other_python

RAY = "2.60.0"
HERE = platform.python_version()
REFUSAL = f"""RuntimeError: Version mismatch: The cluster was started with:
    Ray: {RAY}
    Python: {HERE}
This process on node 10.0.0.1 was started with:
    Ray: {RAY}
    Python: 3.99.1"""


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: RAY)


def driver(folder: Path, said: str, code: int) -> str:
    """An interpreter that prints this, whatever it is to run."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {code}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


@pytest.mark.parametrize(
    ("said", "code", "verdict"),
    [
        (f"python 3.99.1 ray {RAY}\n{REFUSAL}", 1, "refused"),
        (f"python 3.99.1 ray {RAY}\nconnected", 0, "taken"),
        (f"python 3.99.1 ray {RAY}\nSegmentation fault", 1, "failed"),
        (f"python {HERE} ray {RAY}", 0, f"is Python {HERE} and Ray {RAY}, and the cluster is"),
        ("python 3.99.1 ray 2.50.0", 1, "is Python 3.99.1 and Ray 2.50.0, and the cluster is"),
        ("ModuleNotFoundError: No module named 'ray'", 1, "has no Ray: ModuleNotFoundError"),
    ],
)
async def test_a_refusal_must_name_both_and_what_shows_nothing_is_skipped_by_name(
    said: str, code: int, verdict: str, tmp_path: Path
) -> None:
    interpreter = driver(tmp_path, said, code)
    found = (await other_python(interpreter, "127.0.0.1:1"))["other_python"]
    if verdict in ("refused", "taken", "failed"):
        assert found == verdict
    else:
        assert found.startswith(f"skipped: {interpreter}") and verdict in found


async def test_without_a_second_python_it_is_skipped_by_name() -> None:
    found = await other_python("", "127.0.0.1:1")
    assert found["other_python"].startswith("skipped: --other-python names none") and HERE in found["other_python"]
