"""Counts what a captured decoder can do that it should not: `python -m tests.support.escapes [SEED]`.

Around it lies a world that must stay as it was: its parent, another process of the same user, a file, the settings of
the machine. The last line is JSON.
"""

import asyncio
import json
import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from slipstream.errors import SlipstreamError
from slipstream.video.decoder_process import Decoder, DecoderLost, DecoderSpec, read_sampled
from slipstream.video.messages import DecodeLimits, DecodeRequest
from tests.support.captured_decoder import (
    BEFORE,
    NUM_CALLS,
    PASSED,
    Prey,
    attacks,
    describe,
    listed_numbers,
    number_of,
)

HANG_S, ANSWER_S = 0.5, 20.0
"""For random calls, some of which wait for ever; for what is expected to come back."""
WALLED, BARE = "tests.support.captured_decoder", "tests.support.captured_bare"
UNPRIVILEGED = "tests.support.captured_unprivileged"
"""Modules: decoders with all that this machine gives, with the list of system calls alone, and of a gateway that is not
root."""
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_CPU, resource.RLIMIT_NPROC)


@dataclass(frozen=True)
class Escapes:
    """What a captured decoder managed."""

    attacks: list[str]
    """Known ways out that were open."""
    random_calls: list[str]
    """Random system calls that are not on the list and were not refused."""
    harm: list[str]
    """What was not as before, outside of the captured process."""
    num_attacks: int
    num_random_calls: int
    num_decoders: int
    """Decoders that the random calls took: some of them end their own process."""

    @property
    def sandbox_bypasses(self) -> int:
        return len(self.attacks) + len(self.random_calls) + len(self.harm)

    @property
    def findings(self) -> dict[str, Any]:
        """For a report."""
        bypasses = self.sandbox_bypasses
        return {"sandbox_bypasses": bypasses, "passed": not bypasses, **vars(self)}


class World:
    """What an attacker could harm: this process, another one of the same user, a file, the machine's shared memory."""

    def __init__(self, folder: Path, bystander: int) -> None:
        self.prey = Prey(os.getpid(), bystander, str(folder))
        self._key = folder / "key.pem"
        self._key.write_text("secret")
        with suppress(OSError):  # a file system without such attributes
            os.setxattr(self._key, b"user.canary", b"alive")
        os.utime(self._key, (10**9, 10**9))
        self._before = self._look()

    def harm(self) -> list[str]:
        """What is not as it was."""
        now = self._look()
        return [f"{name}: {now[name]} was {before}" for name, before in self._before.items() if now[name] != before]

    def _look(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, pid in (("parent", self.prey.parent), ("bystander", self.prey.bystander)):
            process = psutil.Process(pid)
            found |= {
                f"{name}'s priority": process.nice(),
                f"{name} is stopped": process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE),
                f"{name}'s cores": tuple(process.cpu_affinity() or ()),
                f"{name}'s i/o class": tuple(process.ionice()),
                f"{name}'s scheduler": os.sched_getscheduler(pid),
                f"{name}'s limits": [resource.prlimit(pid, kind) for kind in LIMITS],
            }
        facts = self._key.stat()
        names = sorted(os.listdir(self.prey.folder))
        kept = (stat.S_IMODE(facts.st_mode), facts.st_uid, facts.st_gid, facts.st_mtime_ns, facts.st_nlink)
        shared = [len(path.read_text().splitlines()) for path in sorted(Path("/proc/sysvipc").glob("*"))]
        return found | {
            "the folder": names,
            "the file": (self._key.read_text(), kept, os.listxattr(self._key)),
            "shared memory": shared,
            "the host's name": socket.gethostname(),
        }


@contextmanager
def world() -> Iterator[World]:
    """A world with a bystander, both gone at the end."""
    with tempfile.TemporaryDirectory(prefix="captured-") as folder:
        bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            yield World(Path(folder), bystander.pid)
        finally:
            bystander.kill()
            bystander.communicate()


async def run_captured(module: str, order: str, limit_s: float = ANSWER_S) -> tuple[str, dict[int, int]]:
    """What the captured decoder said of an order, '' when it ended or hung instead; and what of each random call."""
    said: dict[int, int] = {}
    limits = DecodeLimits(timeout_s=limit_s, max_frames_sampled=NUM_CALLS, max_frame_pixels=64)
    request = DecodeRequest(NUM_CALLS, limits)
    decoder = Decoder(DecoderSpec(256 * 1024**2, 60, module=module), refuse_without_filter)
    with tempfile.TemporaryFile() as file:
        file.write(order.encode())
        file.flush()
        try:
            await decoder.wait_ready()
            await decoder.run(file.fileno(), request, said.__setitem__, read_sampled)
        except DecoderLost:
            return "", said
        except SlipstreamError as error:
            return str(error), said
        finally:
            decoder.kill()
            decoder.reap()
    return "", said


def refuse_without_filter(confined: tuple[str, ...]) -> None:
    """An attacker's calls could harm this machine in earnest."""
    if "system calls" not in confined:
        raise RuntimeError("system calls are not filtered on this machine, so nothing is tried on it")


async def find_escapes(seed: int, num_calls: int = NUM_CALLS, module: str = WALLED) -> Escapes:
    """Lets a captured decoder try all known ways out, and then random system calls.

    Raises RuntimeError on a machine where decoders are not protected enough to try.
    """
    with world() as around:
        prey = f"{around.prey.parent} {around.prey.bystander} {around.prey.folder}"
        answer, _ = await run_captured(module, f"attack {prey}")
        open_ways = json.loads(answer) if answer.startswith("[") else [f"no answer: {answer}"]
        said: dict[int, int] = {}
        first = num_decoders = 0
        while first < num_calls:
            num_decoders += 1
            _, more = await run_captured(module, f"random {seed} {first} {num_calls} {prey}", HANG_S)
            said |= more
            first = max(said, default=first) + 1
        listed = listed_numbers()
        for index in [index for index, what in said.items() if what == BEFORE and number_of(seed, index) not in listed]:
            _, again = await run_captured(module, f"random {seed} {index} {index + 1} {prey}")  # it may only be slow
            said |= again
        passed = [index for index, what in said.items() if what == PASSED]
        passed += [index for index, what in said.items() if what == BEFORE and number_of(seed, index) not in listed]
        return Escapes(
            attacks=open_ways,
            random_calls=[describe(seed, index) for index in passed],
            harm=around.harm(),
            num_attacks=len(attacks(around.prey, 0)),
            num_random_calls=len(said),
            num_decoders=num_decoders,
        )


if __name__ == "__main__":
    escapes = asyncio.run(find_escapes(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
    print(json.dumps(escapes.findings))  # noqa: T201 (this is its output)
