"""`slipstream up` as a process of its own, whose services are known."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slipstream.stack.local import StackOptions

ROOT = Path(__file__).resolve().parents[2]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class Up:
    """`slipstream up` as a process, with services that have no model."""

    SCRIPT = """
import sys
from functools import partial
from slipstream.cli import common, main
from slipstream.stack.local import StackOptions
behaviour, grace_s, root, *arguments = sys.argv[1:]
common.StackOptions = partial(
    StackOptions,
    modules=dict.fromkeys(("target", "draft", "gateway"), "tests.cli.fake_service"),
    env={"PYTHONPATH": root},
    extra_flags={"gateway": ("--behaviour", behaviour)},
    stop_grace_s=float(grace_s),
)
sys.argv[1:] = ["up", "--no-archive", "--no-http", *arguments]
main()
"""

    def __init__(
        self, options: StackOptions, behaviour: str = "serve", grace_s: float = 60, shell: tuple[str, ...] = ()
    ) -> None:
        folders = ("--target", str(options.target_model), "--draft", str(options.draft_model))
        self.process = subprocess.Popen(
            [*shell, sys.executable, "-c", self.SCRIPT, behaviour, str(grace_s), str(ROOT), *folders],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": tempfile.gettempdir(), "PYTHONPATH": str(ROOT)},
        )

    def __enter__(self) -> "Up":
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        if not words:  # it has ended
            _, said = self.process.communicate()
            raise AssertionError(f"`slipstream up` ended with {self.process.returncode}: {said}")
        self.address = words[1]
        self.told("Ctrl-C ends the stack")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        self.services = [int(pid) for pid in children.split()]
        assert len(self.services) == 3
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate()

    def told(self, words: str) -> None:
        """Reads stderr until a line has these words."""
        assert self.process.stderr is not None
        assert any(words in line for line in self.process.stderr)

    def ended(self, status: int) -> None:
        """The process has this exit status, and no service is left."""
        assert self.process.wait(120) == status
        deadline = time.monotonic() + 60
        while any(is_alive(pid) for pid in self.services) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(is_alive(pid) for pid in self.services)
