"""Takes from a decoder process what decoding does not need. Linux; knows nothing of videos.

What the kernel must grant (limits, no new privileges, death with the parent) is an error when refused. What depends on
the machine (an empty network namespace, denied system calls) is best effort and named in the result.
"""

import ctypes
import os
import resource
import signal
import struct
from pathlib import Path

from slipstream.video.seccomp import deny_system_calls

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CAPABILITY_VERSION_3 = 0x20080522
OPEN_FILES = 16
"""Descriptors of a decoder: the standard three, its connection, a video, the frames, and a few to spare."""


def confine(memory_bytes: int, cpu_s: int, parent_pid: int) -> tuple[str, ...]:
    """Confines this process for good, and says in a word each what was done. Raises OSError.

    `memory_bytes` is the address space on top of what is mapped now; `cpu_s` is for the life of the process.
    """
    address_space = _mapped_bytes() + memory_bytes
    _limit(resource.RLIMIT_AS, address_space)
    _limit(resource.RLIMIT_CPU, cpu_s)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    done = ["memory", "cpu", "files"]
    libc = ctypes.CDLL(None, use_errno=True)
    if _leave_network(libc):
        done.append("network")
    _drop_capabilities(libc)
    _control(libc, _PR_SET_NO_NEW_PRIVS, 1)
    _control(libc, _PR_SET_DUMPABLE, 0)
    _control(libc, _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise ProcessLookupError("the parent is gone already")
    done.append("privileges")
    if deny_system_calls(libc):
        done.append("system calls")
    return tuple(done)


def limit_cpu(seconds: int) -> None:
    """Ends this process by SIGXCPU after so much more CPU time, if `confine` allows that much."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(int(usage.ru_utime + usage.ru_stime) + seconds, hard), hard))


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _mapped_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _leave_network(libc: ctypes.CDLL) -> bool:
    """Moves into a network namespace without any interface: as root, or where unprivileged namespaces are allowed."""
    ways = (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET)
    return any(libc.unshare(flags) == 0 for flags in ways)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Root without capabilities cannot raise its limits again."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if libc.capset(header, bytes(24)) != 0:
        raise _failure("capset")


def _control(libc: ctypes.CDLL, what: int, value: int) -> None:
    if libc.prctl(what, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise _failure("prctl")


def _failure(call: str) -> OSError:
    error = ctypes.get_errno()
    return OSError(error, f"{call}: {os.strerror(error)}")
