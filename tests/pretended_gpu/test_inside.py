"""The tests of `inside`, each file in a process of its own that has the device."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretended_gpu.__main__ import FOLDER, environment

OPTIONS = ("-n0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""The device imports the engine, and what that needs, before pytest begins."""
TIMEOUT_S = 250
"""Less than a test may take, so that what was said is told."""


@pytest.mark.parametrize("file", sorted((FOLDER / "inside").glob("test_*.py")), ids=lambda file: file.stem)
def test_passes_on_the_device(file: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, file],
        env={name: value for name, value in environment().items() if not name.startswith("PYTEST_")}
        | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert found.returncode == 0 and " passed" in found.stdout, found.stdout[-8000:] + found.stderr[-2000:]
