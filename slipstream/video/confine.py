"""Takes from a process that reads hostile files what reading does not need. Linux; knows nothing of videos.

What every kernel grants (limits, no new privileges, death with the parent) is an error when refused. What depends on
the machine (namespaces, Landlock, the list of system calls) is left out where it is not to be had: `confine` says what
was done, and whoever started the process says what is missing.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PROTECTIONS = (
    *("memory", "cpu", "files", "threads", "privileges", "user", "network", "ipc", "processes"),
    *("paths", "signals", "system calls"),
)
"""All that `confine` can do, in words for logs and metrics; `docs/security.md` says what each of them takes."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITY_VERSION_3 = 0x20080522
OPEN_FILES = 16
"""Descriptors of a decoder: the standard three, its connection, a video, the frames, and a few to spare."""
SPARE_THREADS = 8
"""Beyond those that decode: in a namespace of its own the decoder's parent counts as well."""


def confine(memory_bytes: int, cpu_s: int, threads: int, parent_pid: int) -> tuple[str, ...]:
    """Confines this process for good, and says in a word each what was done. Raises OSError.

    `memory_bytes` is the address space on top of what is mapped now, `cpu_s` is for the life of the process, and with
    one thread no other can be started. Where the kernel gives a namespace of process ids this returns in a *child*
    of the process that called it, which does no more than wait and end as the child ended.
    """
    if len(os.listdir("/proc/self/task")) != 1:
        raise ChildProcessError("threads that run already cannot be confined")
    libc = ctypes.CDLL(None, use_errno=True)
    _die_with_parent(libc)
    if os.getppid() != parent_pid:
        raise ProcessLookupError("the parent is gone already")
    uid = _FIRST_UID + os.getpid()
    done = {"memory", "cpu", "files", "privileges"} | _leave_namespaces(libc)
    if "processes" in done:
        _go_on_in_child(libc)
        _die_with_parent(libc)
    done |= _become_nobody(libc, uid)
    if "user" in done:  # else the limit counts what others run
        _limit(resource.RLIMIT_NPROC, threads + SPARE_THREADS)
        done.add("threads")
    _set_limits(memory_bytes, cpu_s)
    _drop_capabilities(libc)
    _control(libc, _PR_SET_NO_NEW_PRIVS, 1)
    _control(libc, _PR_SET_DUMPABLE, 0)
    _die_with_parent(libc)  # a change of user had undone it
    done |= _leave_paths(libc)
    if _filter_system_calls(libc, threads):
        done |= {"system calls", "threads"} if threads == 1 else {"system calls"}
    return tuple(name for name in PROTECTIONS if name in done)


# -- limits and privileges --------------------------------------------------------------------------------------------


def limit_cpu(seconds: int) -> None:
    """Ends this process by SIGXCPU after so much more CPU time, if `confine` allows that much."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(int(usage.ru_utime + usage.ru_stime) + seconds, hard), hard))


def _set_limits(memory_bytes: int, cpu_s: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes)
    _limit(resource.RLIMIT_CPU, cpu_s)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_MEMLOCK, 0)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Root without capabilities cannot raise its limits again."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if libc.capset(header, bytes(24)) != 0:
        raise _failure("capset")


def _die_with_parent(libc: ctypes.CDLL) -> None:
    _control(libc, _PR_SET_PDEATHSIG, signal.SIGKILL)


def _control(libc: ctypes.CDLL, what: int, value: int) -> None:
    if libc.prctl(what, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise _failure("prctl")


def _failure(call: str) -> OSError:
    error = ctypes.get_errno()
    return OSError(error, f"{call}: {os.strerror(error)}")


# -- namespaces and user ----------------------------------------------------------------------------------------------

_NAMESPACES = {"network": 0x40000000, "ipc": 0x08000000, "processes": 0x20000000}
_USER_NAMESPACE = 0x10000000
_FIRST_UID = 0x4E000000
"""Beyond what distributions give to people, services and containers. The process id is added, that of before the
namespace, where all decoders have the same: no two are one user."""
_KILL, _SETGID, _SETUID = 5, 6, 7
"""Capabilities. Without the first, root could not end a decoder of another user."""


def _leave_namespaces(libc: ctypes.CDLL) -> set[str]:
    """New, empty namespaces: with the rights of root, or with those that a user namespace gives. Only children of
    this process will live in the one of process ids."""
    done = _unshared(libc, _NAMESPACES)
    missing = set(_NAMESPACES) - done
    if missing and libc.unshare(_USER_NAMESPACE) == 0:
        done |= _unshared(libc, missing) | {"user"}
    return done


def _unshared(libc: ctypes.CDLL, names: Iterable[str]) -> set[str]:
    return {name for name in names if libc.unshare(_NAMESPACES[name]) == 0}


def _become_nobody(libc: ctypes.CDLL, uid: int) -> set[str]:
    """Root becomes a user that owns nothing; then, or for others, a user namespace if there is none yet."""
    done = set()
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = int(next(line.split()[1] for line in lines if line.startswith("CapEff")), 16)
    if os.geteuid() == 0 and all(effective >> bit & 1 for bit in (_KILL, _SETGID, _SETUID)):
        with suppress(OSError):  # a container that maps no such number
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            done.add("user")
    if libc.unshare(_USER_NAMESPACE) == 0:
        done.add("user")
    return done


def _go_on_in_child(libc: ctypes.CDLL) -> None:
    """Returns in a child of this process, in the new namespace of process ids.

    The first process of a namespace ignores signals as init does, SIGXCPU and SIGABRT among them, so that place is
    taken by one that only waits for the end of the others. With it everything in the namespace ends, so it must end
    with its parent even where all of them are stopped. The child cannot: its parent may not kill another user.
    """
    waits, holds = os.pipe()
    if os.fork() == 0:
        _die_with_parent(libc)
        _close_all_but(waits)
        os.read(waits, 1)
        os._exit(0)
    child = os.fork()
    if child:
        _close_all_but(holds)
        _drop_capabilities(libc)
        _limit(resource.RLIMIT_CORE, 0)
        _end_as(os.waitpid(child, 0)[1])
    os.close(waits)
    os.close(holds)


def _close_all_but(kept: int) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor != kept:
            with suppress(OSError):  # the listing's own
                os.close(descriptor)


def _end_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# -- Landlock ---------------------------------------------------------------------------------------------------------

_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
"""Numbers of system calls, the same on every architecture."""
_LANDLOCK_VERSION = 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""How many rights to files a version of Landlock knows; 16 since version 5."""


def _leave_paths(libc: ctypes.CDLL) -> set[str]:
    """No file can be opened, changed or run by its path any more, whatever the filter of system calls lets pass; and
    where the kernel can, no TCP port, no abstract socket and no process outside can be reached."""
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    if version < 1:
        return set()
    files = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    denied = struct.pack("=QQQ", files, network, scopes)
    rules = libc.syscall(_LANDLOCK_CREATE_RULESET, denied, ctypes.c_size_t(len(denied)), 0)
    if rules < 0:
        return set()
    restricted = libc.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    if not restricted:
        return set()
    return {"paths", "signals"} if scopes else {"paths"}


# -- system calls -----------------------------------------------------------------------------------------------------

# What a decode calls once everything is loaded, found by running one under strace for every container and codec of the
# tests. All else fails with EPERM, so that a library which merely tries goes on without.

_PR_SECCOMP_FILTER, _ALL_THREADS = 1, 1
_SECCOMP = {"x86_64": 317, "aarch64": 277}
AUDIT_NUMBERS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""How the kernel names an architecture to a filter."""
_MACHINES = tuple(AUDIT_NUMBERS)

ALLOWED = {
    **{"read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "pread64": (17, 67)},
    **{"mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216)},
    **{"madvise": (28, 233), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139)},
    **{"sigaltstack": (131, 132), "sendto": (44, 206), "recvmsg": (47, 212), "fcntl": (72, 25), "clone": (56, 220)},
    **{"exit": (60, 93), "exit_group": (231, 94), "futex": (202, 98), "set_robust_list": (273, 99)},
    **{"rseq": (334, 293), "sched_yield": (24, 124), "getpid": (39, 172), "gettid": (186, 178)},
    **{"tgkill": (234, 131), "prlimit64": (302, 261), "getrusage": (98, 165), "getrandom": (318, 278)},
    **{"clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101)},
    **{"gettimeofday": (96, 169), "restart_syscall": (219, 128)},
}
"""System calls that are allowed, some only with the arguments of `_checks`: numbers on x86-64 and aarch64.

`stat` by path is not among them, nor is `newfstatat`, by which glibc asks about a descriptor too: a filter cannot see
whether a path comes with it. Python's files do without.
"""
CLONE3 = 435
"""Answered with ENOSYS, since a filter cannot see its flags; libraries fall back to clone."""
_THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
"""Of clone, as glibc and musl start a thread: no process, no namespace."""


@dataclass(frozen=True)
class _Check:
    """What one argument, counted from 0, must be for the call to be allowed; its lower 32 bits are looked at."""

    argument: int
    one_of: tuple[int, ...] = ()
    without: int = 0
    """Bits that must not be set, where no values are given."""


def _checks(threads: int, own_pid: int) -> dict[str, _Check]:
    """`mmap` and `mprotect` make no memory executable; messages go to no address; signals and limits are its own."""
    return {
        "fcntl": _Check(1, (fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_GETFL)),
        "clone": _Check(0, _THREAD_FLAGS if threads > 1 else ()),
        "tgkill": _Check(0, (own_pid,)),
        "prlimit64": _Check(0, (0,)),
        "sendto": _Check(5, (0,)),
        "mmap": _Check(2, without=mmap.PROT_EXEC),
        "mprotect": _Check(2, without=mmap.PROT_EXEC),
    }


_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_RETURN_ALLOW, _RETURN_ERRNO = 0x7FFF0000, 0x00050000
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS = 0, 4, 16


class _Assembler:
    """Instructions of the kernel's packet filter language, with jumps to names instead of distances."""

    def __init__(self) -> None:
        self._code: list[tuple[int, int, str, str]] = []
        self._places: dict[str, int] = {}

    def load(self, offset: int) -> None:
        """Looks at 32 bits of what the kernel says of the call."""
        self._code.append((_LOAD, offset, "", ""))

    def jump(self, test: int, value: int, then: str = "", otherwise: str = "") -> None:
        """Tests what was loaded; without a name the next instruction follows."""
        self._code.append((test, value, then, otherwise))

    def end(self, name: str, value: int) -> None:
        """A place to jump to that decides the call."""
        self.place(name)
        self._code.append((_RETURN, value, "", ""))

    def place(self, name: str) -> None:
        """Names the next instruction."""
        self._places[name] = len(self._code)

    def assembled(self) -> bytes:
        """The program as the kernel takes it."""
        distances = (
            (kind, value, *(self._places[name] - here if name else 0 for name in names))
            for here, (kind, value, *names) in enumerate(self._code, start=1)
        )
        return b"".join(struct.pack("=HBBI", kind, then, other, value) for kind, value, then, other in distances)


def system_call_filter(machine: str, threads: int, own_pid: int) -> bytes:
    """The filter for `platform.machine()`; KeyError for one that the table does not have."""
    checks, code = _checks(threads, own_pid), _Assembler()
    code.load(_AT_ARCHITECTURE)
    code.jump(_EQUAL, AUDIT_NUMBERS[machine], otherwise="deny")
    code.load(_AT_NUMBER)
    code.jump(_EQUAL, CLONE3, then="absent")
    column = _MACHINES.index(machine)
    for name, numbers in ALLOWED.items():
        if name not in checks:
            code.jump(_EQUAL, numbers[column], then="allow")
    for name, check in checks.items():
        code.jump(_EQUAL, ALLOWED[name][column], otherwise=f"not {name}")
        code.load(_AT_ARGUMENTS + 8 * check.argument)
        for value in check.one_of:
            code.jump(_EQUAL, value, then="allow")
        code.jump(_ANY_BIT, check.without, then="deny", otherwise="allow" if check.without else "deny")
        code.place(f"not {name}")
    code.end("deny", _RETURN_ERRNO | errno.EPERM)
    code.end("allow", _RETURN_ALLOW)
    code.end("absent", _RETURN_ERRNO | errno.ENOSYS)
    return code.assembled()


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _filter_system_calls(libc: ctypes.CDLL, threads: int) -> bool:
    """For good; needs no_new_privs. False where this machine or kernel is none that the list is for."""
    machine = platform.machine()
    if machine not in AUDIT_NUMBERS:
        return False
    program = system_call_filter(machine, threads, os.getpid())
    filled = _Program(len(program) // 8, program)
    return bool(libc.syscall(_SECCOMP[machine], _PR_SECCOMP_FILTER, _ALL_THREADS, ctypes.byref(filled)) == 0)
