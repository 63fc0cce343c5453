"""Runs a program, and all Python processes that it starts, with the device.

python -m tests.pretended_gpu -m bench gpu-fault --device cuda:0 --tiny
"""

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def environment() -> dict[str, str]:
    """Of processes that have the device."""
    folders = [str(FOLDER / "site"), str(FOLDER.parent.parent)]
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *([given] if given else [])])}


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
