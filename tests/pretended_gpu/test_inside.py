"""The tests of `inside`, in a process of their own that has the device."""

import subprocess
import sys

import pytest
import torch

from tests.pretended_gpu.__main__ import FOLDER, environment

OPTIONS = ("-n0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""The device imports the engine, and what that needs, before pytest begins."""
TIMEOUT_S = 280
"""Less than a test may take, so that what was said is told."""


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="the pretended GPU takes torch's CPU build")
@pytest.mark.parametrize("marks", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_passes_on_the_device(marks: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, "-m", marks, FOLDER / "inside"],
        env={name: value for name, value in environment().items() if not name.startswith("PYTEST_")}
        | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert found.returncode == 0 and " passed" in found.stdout, found.stdout[-8000:] + found.stderr[-2000:]
