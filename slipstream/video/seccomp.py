"""Denies this process system calls that decoding never makes: opening files, sockets, programs, other processes.

A short list of what is forbidden, on x86-64 only; elsewhere nothing is done and the caller is told. Forbidden calls
fail with EPERM, so a library that merely tries goes on without.
"""

import ctypes
import errno
import os
import platform
import struct

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT = 0, 4, 16
_X86_64, _X32_BIT = 0xC000003E, 0x40000000
_FILES = {"open": 2, "creat": 85, "openat": 257, "openat2": 437, "open_by_handle_at": 304, "truncate": 76}
_NAMES = {
    **{"rename": 82, "mkdir": 83, "rmdir": 84, "link": 86, "unlink": 87, "symlink": 88, "chmod": 90, "chown": 92},
    **{"mknod": 133, "mkdirat": 258, "mknodat": 259, "fchownat": 260, "unlinkat": 263, "renameat": 264, "linkat": 265},
    **{"symlinkat": 266, "fchmodat": 268, "renameat2": 316, "fchmodat2": 452, "memfd_create": 319},
}
_NETWORK = {"socket": 41, "connect": 42, "bind": 49, "listen": 50, "accept": 43, "accept4": 288, "socketpair": 53}
_PROCESSES = {
    **{"fork": 57, "vfork": 58, "execve": 59, "kill": 62, "ptrace": 101, "rt_sigqueueinfo": 129, "tkill": 200},
    **{"rt_tgsigqueueinfo": 297, "process_vm_readv": 310, "process_vm_writev": 311, "execveat": 322},
    **{"pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438},
}
_KERNEL = {
    **{"pivot_root": 155, "chroot": 161, "mount": 165, "umount2": 166, "init_module": 175, "kexec_load": 246},
    **{"add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "setns": 308},
    **{"finit_module": 313, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "open_tree": 428, "fsopen": 430},
}
_ON_ITSELF = {"tgkill": (234, os.getpid), "prlimit64": (302, lambda: 0)}
"""Allowed when the first argument names this process: `abort` and limits of its own need them."""


_CLONE, _CLONE3, _CLONE_THREAD = 56, 435, 0x10000
"""Threads may be started, processes not. The filter cannot see the flags of clone3; libraries fall back to clone."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def deny_system_calls(libc: ctypes.CDLL) -> bool:
    """Filters this thread's system calls and those of threads it starts, for good; needs no_new_privs.

    False where this machine or kernel is none that the list is for.
    """
    if platform.machine() != "x86_64":
        return False
    program = _program()
    filled = _Program(len(program) // 8, program)
    return bool(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filled), 0, 0) == 0)


def _program() -> bytes:
    """The filter; its last three instructions allow, deny, and say that there is no such call."""
    denied = [number for group in (_FILES, _NAMES, _NETWORK, _PROCESSES, _KERNEL) for number in group.values()]
    own = [(number, value()) for number, value in _ON_ITSELF.values()]
    length = 4 + len(denied) + 3 * len(own) + 3 + 1 + 3
    allow, deny, absent = length - 3, length - 2, length - 1
    code: list[tuple[int, int, int, int]] = []

    def jump(kind: int, value: int, then: int | None, otherwise: int | None) -> None:
        here = len(code) + 1
        code.append((kind, 0 if then is None else then - here, 0 if otherwise is None else otherwise - here, value))

    code.append((_LOAD, 0, 0, _AT_ARCHITECTURE))
    jump(_EQUAL, _X86_64, None, deny)
    code.append((_LOAD, 0, 0, _AT_NUMBER))
    jump(_AT_LEAST, _X32_BIT, deny, None)
    for number in denied:
        jump(_EQUAL, number, deny, None)
    for number, argument in own:
        jump(_EQUAL, number, None, len(code) + 3)
        code.append((_LOAD, 0, 0, _AT_FIRST_ARGUMENT))
        jump(_EQUAL, argument, allow, deny)
    jump(_EQUAL, _CLONE3, absent, None)
    jump(_EQUAL, _CLONE, None, allow)
    code.append((_LOAD, 0, 0, _AT_FIRST_ARGUMENT))
    jump(_ANY_BIT, _CLONE_THREAD, allow, deny)
    code.extend((_RETURN, 0, 0, value) for value in (_ALLOW, _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS))
    assert len(code) == length
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
