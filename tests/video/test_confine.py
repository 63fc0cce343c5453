"""A captured decoder can harm nothing but its own answer; and the filter does what its table says, on each machine."""

import asyncio
import contextlib
import errno
import mmap
import os
import platform
import re
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.video.confine import ALLOWED, AUDIT_NUMBERS, CLONE3, PROTECTIONS, system_call_filter
from slipstream.video.decoder_process import Decoder, DecoderSpec
from tests.support.escapes import BARE, UNPRIVILEGED, WALLED, Escapes, find_escapes

ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
MACHINES = sorted(AUDIT_NUMBERS)
OWN_PID = 4711
HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+) (\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
}
THREAD_FLAGS = 0x3D0F00
CHECKED = {
    "fcntl": (1, [1, 3, 1030], [0, 2, 4, 8, 10, 15, 1024, 1033]),
    "clone": (0, [THREAD_FLAGS], [17, 0, 0x4111, THREAD_FLAGS | 0x10000000, 0x10000011]),
    "tgkill": (0, [OWN_PID], [0, 1, 2**32 - 1, OWN_PID + 1]),
    "prlimit64": (0, [0], [1, OWN_PID]),
    "sendto": (5, [0], [16, 110]),
    "mmap": (2, [0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE], [mmap.PROT_EXEC, 7]),
    "mprotect": (2, [0, mmap.PROT_READ], [mmap.PROT_EXEC | mmap.PROT_READ, 7]),
}
"""Number of the argument, values that pass, values that do not."""


def decide(program: bytes, machine: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Runs a filter as the kernel does."""
    padded = [argument & (2**64 - 1) for argument in (*arguments, *([0] * 6))[:6]]
    data = struct.pack("=IIQ6Q", number & (2**32 - 1), machine, 0, *padded)
    code = list(struct.iter_unpack("=HBBI", program))
    place = loaded = 0
    while True:
        kind, then, otherwise, value = code[place]
        place += 1
        if kind == 0x20:
            (loaded,) = struct.unpack_from("=I", data, value)
        elif kind == 0x06:
            return int(value)
        else:
            is_so = {0x15: loaded == value, 0x45: bool(loaded & value)}[kind]
            place += then if is_so else otherwise


@pytest.fixture(scope="module", params=[WALLED, BARE, UNPRIVILEGED])
def escapes(request: pytest.FixtureRequest) -> Escapes:
    if platform.machine() not in AUDIT_NUMBERS:
        pytest.skip("system calls are not filtered on this machine")
    return asyncio.run(find_escapes(seed=10, module=request.param))


def test_no_known_way_out_is_open(escapes: Escapes) -> None:
    assert escapes.attacks == []
    assert escapes.num_attacks >= 100


def test_random_system_calls_reach_nothing(escapes: Escapes) -> None:
    assert escapes.random_calls == []
    assert escapes.num_random_calls == 200


def test_nothing_around_a_captured_decoder_was_harmed(escapes: Escapes) -> None:
    assert escapes.harm == []
    assert escapes.sandbox_bypasses == 0


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[tuple[Decoder, set[str]]]:
    """A decoder that waits for work, and what was taken from it."""
    told: set[str] = set()
    decoder = Decoder(DecoderSpec(2**30, 60), told.update)
    try:
        await decoder.wait_ready()
        yield decoder, told
    finally:
        decoder.kill()
        decoder.reap()


async def test_this_machine_gives_what_it_can() -> None:
    """The limits and the list of system calls are what may not be missing; the others depend on the kernel."""
    async with running() as (_, confined):
        assert {"memory", "cpu", "files", "privileges"} <= confined <= set(PROTECTIONS)
        assert platform.machine() not in AUDIT_NUMBERS or {"system calls", "threads"} <= confined


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
async def test_no_two_decoders_are_one_user() -> None:
    async with running() as (one, confined), running() as (other, _):
        if "processes" not in confined:
            pytest.skip("there are no namespaces here")
        users = {
            process.uids().real
            for decoder in (one, other)
            for process in psutil.Process(decoder.process.pid).children(recursive=True)
        }
        assert len(users - {0}) == 2


async def test_a_decoder_leaves_no_process_behind() -> None:
    async with running() as (decoder, _):
        processes = [psutil.Process(decoder.process.pid)]
        processes += processes[0].children(recursive=True)
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=60)
    assert not alive


@pytest.mark.parametrize("machine", MACHINES)
def test_the_table_has_the_kernels_numbers(machine: str) -> None:
    path, form = HEADERS[machine]
    if not path.exists():
        pytest.skip("this machine has no headers of the kernel")
    numbers = {name: int(number) for name, number in re.findall(form, path.read_text())}
    column = list(AUDIT_NUMBERS).index(machine)
    assert {name: both[column] for name, both in ALLOWED.items()} == {name: numbers[name] for name in ALLOWED}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_not_on_the_list_is_denied(machine: str) -> None:
    program, audit = system_call_filter(machine, 4, OWN_PID), AUDIT_NUMBERS[machine]
    column = list(AUDIT_NUMBERS).index(machine)
    listed = {numbers[column]: name for name, numbers in ALLOWED.items()}
    for number in range(1024):
        name = listed.get(number)
        if number == CLONE3:
            assert decide(program, audit, number) == ENOSYS
        elif name is None:
            assert decide(program, audit, number) == EPERM
        elif name not in CHECKED:
            assert decide(program, audit, number) == ALLOW
    for number in (0x40000000, 0x40000001, 2**32 - 1):
        assert decide(program, audit, number) == EPERM
    for other in {*AUDIT_NUMBERS.values(), 0x40000003} - {audit}:
        assert decide(program, other, ALLOWED["read"][column]) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", CHECKED)
def test_arguments_are_looked_at(machine: str, name: str) -> None:
    place, good, bad = CHECKED[name]
    program = system_call_filter(machine, 4, OWN_PID)
    number = ALLOWED[name][list(AUDIT_NUMBERS).index(machine)]
    for values, expected in ((good, ALLOW), (bad, EPERM)):
        for value in values:
            arguments = (*([1] * place), value)
            assert decide(program, AUDIT_NUMBERS[machine], number, arguments) == expected, (name, value)


@pytest.mark.parametrize("machine", MACHINES)
def test_with_one_thread_no_other_can_be_started(machine: str) -> None:
    program = system_call_filter(machine, 1, OWN_PID)
    number = ALLOWED["clone"][list(AUDIT_NUMBERS).index(machine)]
    assert decide(program, AUDIT_NUMBERS[machine], number, (THREAD_FLAGS,)) == EPERM


@given(
    st.sampled_from(MACHINES),
    st.integers(1, 64),
    st.integers(0, 2**32 - 1),
    st.tuples(*([st.integers(0, 2**64 - 1)] * 6)),
)
def test_every_call_is_decided(machine: str, threads: int, number: int, arguments: tuple[int, ...]) -> None:
    """The kernel itself checks jumps and the end of a program when it takes it; this holds on the other machine too."""
    program = system_call_filter(machine, threads, OWN_PID)
    assert decide(program, AUDIT_NUMBERS[machine], number, arguments) in (ALLOW, EPERM, ENOSYS)
