"""A captured decoder: code of an attacker in a confined process, run instead of `slipstream.video.child`.

It reads what to do from the video's bytes: `attack PARENT BYSTANDER FOLDER` tries known ways out one by one, and
`random SEED FIRST LAST PARENT BYSTANDER FOLDER` makes system calls with random numbers and arguments. What comes of it
is judged outside, by `tests.support.escapes`.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import random
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slipstream.video import child
from slipstream.video.confine import ALLOWED, AUDIT_NUMBERS, CLONE3
from slipstream.video.messages import DecodeRequest, Progress, Refused, encode_answer

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
REFUSED = {errno.EPERM, errno.ENOSYS, errno.EACCES}
NUM_CALLS, HIGHEST_CALL = 200, 470
BEFORE, WAS_REFUSED, WAS_LISTED, PASSED = 0, 1, 2, 3
"""What is said of a random call, as a number of progress: that it comes; that it was refused; that it is one which
decoding needs, whatever came of it; that the filter let it through."""
UNFILTERED = {"x86_64": {335, 336}}.get(platform.machine(), set())
"""Calls that Linux lets pass every filter since 6.14: `uretprobe` and `uprobe`, with which probes return."""
F_SETSIG, F_SETOWN_EX, F_OWNER_PID, FIOSETOWN, SIOCSPGRP = 10, 15, 1, 0x8901, 0x8902
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME = 1, 4, 15
NUMBERS = {
    "x86_64": {
        **{"ioprio_set": 251, "memfd_secret": 447, "inotify_init1": 294, "landlock_create_ruleset": 444, "utime": 132},
        **{"statx": 332, "newfstatat": 262, "io_uring_setup": 425, "pidfd_open": 434, "userfaultfd": 323, "clone": 56},
        **{"process_madvise": 440, "kcmp": 312, "fanotify_init": 300, "set_mempolicy": 238, "mbind": 237},
        **{"msgget": 68, "semget": 64, "mq_open": 240, "timer_create": 222, "setitimer": 38, "personality": 135},
    },
    "aarch64": {
        **{"ioprio_set": 30, "memfd_secret": 447, "inotify_init1": 26, "landlock_create_ruleset": 444},
        **{"statx": 291, "newfstatat": 79, "io_uring_setup": 425, "pidfd_open": 434, "userfaultfd": 282, "clone": 220},
        **{"process_madvise": 440, "kcmp": 272, "fanotify_init": 262, "set_mempolicy": 237, "mbind": 235},
        **{"msgget": 186, "semget": 190, "mq_open": 180, "timer_create": 107, "setitimer": 103, "personality": 92},
    },
}.get(platform.machine(), {})


def checked(result: int) -> int:
    """What libc gave. Raises OSError."""
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def libc(name: str, *arguments: object) -> int:
    """One function of libc, which sets errno."""
    return checked(getattr(LIBC, name)(*arguments))


def call(name: str, *arguments: object) -> int:
    """One system call that libc has no function for, or one that hides what is asked."""
    longs = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return checked(LIBC.syscall(NUMBERS[name], *longs))


@dataclass(frozen=True)
class Prey:
    """What an attacker may want to reach. The process ids mean nothing in the captured process's own namespace."""

    parent: int
    bystander: int
    folder: str

    @property
    def file(self) -> bytes:
        """A file of the parent's user."""
        return f"{self.folder}/key.pem".encode()


def attacks(prey: Prey, video: int) -> dict[str, Callable[[], object]]:
    """Known ways out, each of which succeeds if it raises nothing."""
    return {**on_processes(prey), **on_files(prey, video), **on_the_machine(video)}


def on_process(pid: int) -> dict[str, Callable[[], object]]:
    owner = struct.pack("=ii", F_OWNER_PID, pid)
    return {
        f"F_SETOWN {pid}": lambda: fcntl.fcntl(1, fcntl.F_SETOWN, pid),
        f"F_SETOWN_EX {pid}": lambda: fcntl.fcntl(1, F_SETOWN_EX, owner),
        f"FIOSETOWN {pid}": lambda: libc("ioctl", 1, FIOSETOWN, ctypes.byref(ctypes.c_int(pid))),
        f"SIOCSPGRP {pid}": lambda: libc("ioctl", 1, SIOCSPGRP, ctypes.byref(ctypes.c_int(pid))),
        f"kill {pid}": lambda: os.kill(pid, signal.SIGSTOP),
        f"tgkill {pid}": lambda: libc("tgkill", pid, pid, signal.SIGSTOP),
        f"pidfd_open {pid}": lambda: call("pidfd_open", pid, 0),
        f"ptrace {pid}": lambda: libc("ptrace", 16, pid, 0, 0),
        f"process_vm_readv {pid}": lambda: libc("process_vm_readv", pid, None, 0, None, 0, 0),
        f"process_madvise {pid}": lambda: call("process_madvise", pid, 0, 0, 0, 0),
        f"kcmp {pid}": lambda: call("kcmp", pid, pid, 0, 0, 0),
        f"prlimit {pid}": lambda: resource.prlimit(pid, resource.RLIMIT_CORE),
        f"setpriority {pid}": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        f"ioprio_set {pid}": lambda: call("ioprio_set", 1, pid, 3 << 13),
        f"sched_setscheduler {pid}": lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
        f"sched_setaffinity {pid}": lambda: os.sched_setaffinity(pid, {0}),
    }


def on_processes(prey: Prey) -> dict[str, Callable[[], object]]:
    return (
        on_process(prey.parent)
        | on_process(prey.bystander)
        | {
            "F_SETSIG": lambda: fcntl.fcntl(1, F_SETSIG, signal.SIGKILL),
            "O_ASYNC": lambda: fcntl.fcntl(1, fcntl.F_SETFL, os.O_ASYNC),
            "F_NOTIFY": lambda: fcntl.fcntl(0, fcntl.F_NOTIFY, 1),
            "setpriority of the user": lambda: os.setpriority(os.PRIO_USER, 0, 19),
            "fork": os.fork,
            "vfork by clone": lambda: call("clone", 0x4111, 0, 0, 0, 0),
            "thread by clone": lambda: call("clone", 0x3D0F00, 0, 0, 0, 0),
            "clone into a user namespace": lambda: call("clone", 0x10000011, 0, 0, 0, 0),
            "run a program": lambda: os.execv("/bin/true", ["true"]),
            "outlive the parent": lambda: libc("prctl", PR_SET_PDEATHSIG, 0, 0, 0, 0),
            "be dumped": lambda: libc("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0),
            "change its name": lambda: libc("prctl", PR_SET_NAME, b"gateway", 0, 0, 0),
            "setsid": os.setsid,
            "setuid": lambda: os.setuid(0),
            "timer_create": lambda: call("timer_create", 1, None, ctypes.byref(ctypes.c_int())),
            "setitimer": lambda: signal.setitimer(signal.ITIMER_REAL, 60),
        }
    )


def on_files(prey: Prey, video: int) -> dict[str, Callable[[], object]]:
    room = ctypes.create_string_buffer(512)
    file, here = prey.file, -100
    return {
        "read a file": lambda: os.open(file, os.O_RDONLY),
        "write a file": lambda: os.open(prey.folder + "/new", os.O_WRONLY | os.O_CREAT),
        "remove a file": lambda: os.unlink(file),
        "rename a file": lambda: os.rename(file, file + b".old"),
        "truncate a file": lambda: os.truncate(file, 0),
        "link a file": lambda: os.link(file, file + b".link"),
        "chmod": lambda: os.chmod(file, 0o777),
        "chown": lambda: os.chown(file, 1, 1),
        "mkfifo": lambda: os.mkfifo(prey.folder + "/pipe"),
        "setxattr": lambda: os.setxattr(file, b"user.by", b"captured"),
        "getxattr": lambda: os.getxattr(file, b"user.canary"),
        "removexattr": lambda: os.removexattr(file, b"user.canary"),
        "utimensat": lambda: os.utime(file, (1, 1)),
        "utime": lambda: call("utime", file, None),
        "utime of the video": lambda: libc("futimens", video, None),
        "chmod of the video": lambda: os.fchmod(video, 0o777),
        "setxattr of the video": lambda: os.setxattr(video, b"user.by", b"captured"),
        "write the video": lambda: os.pwrite(video, b"x", 0),
        "stat": lambda: os.stat(file),
        "newfstatat": lambda: call("newfstatat", here, file, room, 0),
        "newfstatat, as of a descriptor": lambda: call("newfstatat", here, file, room, 0x1000),
        "statx": lambda: call("statx", here, file, 0, 0x7FF, room),
        "statfs": lambda: os.statvfs(prey.folder),
        "access": lambda: os.access(file, os.F_OK) or checked(-1),
        "readlink": lambda: os.readlink("/proc/self/exe"),
        "chdir": lambda: os.chdir(prey.folder),
        "list a folder": lambda: os.listdir(prey.folder),
        "chroot": lambda: os.chroot(prey.folder),
        "inotify": lambda: call("inotify_init1", 0),
        "fanotify": lambda: call("fanotify_init", 0, 0),
        "flock of the video": lambda: fcntl.flock(video, fcntl.LOCK_EX | fcntl.LOCK_NB),
        "lease on the video": lambda: fcntl.fcntl(video, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    }


def on_the_machine(video: int) -> dict[str, Callable[[], object]]:
    return {
        "shmget": lambda: libc("shmget", 0, 1 << 20, 0o1600),
        "msgget": lambda: call("msgget", 0, 0o1600),
        "semget": lambda: call("semget", 0, 1, 0o1600),
        "mq_open": lambda: call("mq_open", b"q", os.O_CREAT | os.O_RDWR, 0o600, None),
        "memfd_create": lambda: os.memfd_create("more"),
        "memfd_secret": lambda: call("memfd_secret", 0),
        "userfaultfd": lambda: call("userfaultfd", 1),
        "io_uring": lambda: call("io_uring_setup", 1, ctypes.create_string_buffer(120)),
        "landlock": lambda: call("landlock_create_ruleset", None, 0, 1),
        "epoll": lambda: select.epoll(),
        "pipe": os.pipe,
        "eventfd": lambda: os.eventfd(0),
        "socket": lambda: socket.socket(),
        "socketpair": socket.socketpair,
        "connect": lambda: libc("connect", 0, None, 0),
        "unshare": lambda: libc("unshare", 0x10000000),
        "setns": lambda: libc("setns", 0, 0),
        "mount": lambda: libc("mount", b"none", b"/tmp", b"tmpfs", 0, None),
        "sethostname": lambda: socket.sethostname("captured"),
        "personality": lambda: call("personality", 0x0040000),
        "mlock": lambda: libc("mlockall", 1),
        "set_mempolicy": lambda: call("set_mempolicy", 0, None, 0),
        "executable memory": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
        "raise a limit": lambda: raise_limit(),
        "sync": lambda: libc("syncfs", video),
        "sendmsg": lambda: libc("sendmsg", video, None, 0),
        "syslog": lambda: libc("klogctl", 10, None, 0),
    }


def raise_limit() -> None:
    with suppress(ValueError):  # the hard limit, which the kernel holds for everybody
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return
    checked(-1)


def attempt(name: str, attack: Callable[[], object]) -> str | None:
    """The name, if the attack got through."""
    ctypes.set_errno(errno.EPERM)  # libc's own wrappers may find nothing to call
    try:
        attack()
    except KeyError:  # no such call on this architecture
        return None
    except (OSError, AttributeError, ValueError) as failure:
        number = getattr(failure, "errno", errno.EPERM)
        return None if number in REFUSED | {errno.EBADF} else f"{name}: {errno.errorcode.get(number, number)}"
    return name


def attack_all(prey: Prey, video: int) -> list[str]:
    """Names of the attacks that got through."""
    return [found for item in attacks(prey, video).items() if (found := attempt(*item)) is not None]


def random_calls(seed: int, first: int, last: int, prey: Prey, report: Callable[[int, int], None]) -> None:
    """Makes them, one after the other; a call is the same whether or not those before it were made here."""
    listed = listed_numbers()
    memory = ctypes.create_string_buffer(prey.file + b"\0" * 8192)
    for index in range(first, last):
        chance = random.Random(f"{seed} {index}")
        number = chance.randrange(HIGHEST_CALL)
        arguments = [random_argument(chance, prey, ctypes.addressof(memory)) for _ in range(6)]
        report(index, BEFORE)
        result = LIBC.syscall(number, *map(ctypes.c_long, arguments))
        was_refused = result == -1 and ctypes.get_errno() in REFUSED
        report(index, WAS_LISTED if number in listed else WAS_REFUSED if was_refused else PASSED)


def random_argument(chance: random.Random, prey: Prey, memory: int) -> int:
    choices: list[Callable[[], int]] = [
        lambda: chance.randrange(-1, 17),
        lambda: chance.choice([prey.parent, prey.bystander, -prey.parent]),
        lambda: memory,
        lambda: memory + 4096,
        lambda: 1 << chance.randrange(63),
        lambda: chance.getrandbits(63),
    ]
    return chance.choice(choices)()


def listed_numbers() -> set[int]:
    """Calls that decoding needs, on this machine, and those that no filter sees."""
    column = list(AUDIT_NUMBERS).index(platform.machine())
    return {numbers[column] for numbers in ALLOWED.values()} | {CLONE3} | UNFILTERED


sound_serve = child._serve


def serve(connection: socket.socket, request: DecodeRequest, video_descriptor: int, frames_descriptor: int) -> Any:
    """Stands in for the decoder's own function."""
    verb, *words = os.pread(video_descriptor, 4096, 0).decode(errors="replace").split()
    if verb == "attack":
        message = json.dumps(attack_all(Prey(int(words[0]), int(words[1]), words[2]), video_descriptor))
    elif verb == "random":
        seed, first, last = map(int, words[:3])
        random_calls(
            seed,
            first,
            last,
            Prey(int(words[3]), int(words[4]), words[5]),
            lambda index, what: print_progress(connection, index, what),
        )
        message = "[]"
    else:
        return sound_serve(connection, request, video_descriptor, frames_descriptor)
    os.close(video_descriptor)
    os.close(frames_descriptor)
    return Refused("UnreadableVideo", message)


def print_progress(connection: socket.socket, index: int, what: int) -> None:
    connection.send(encode_answer(Progress(index, what)))


def number_of(seed: int, index: int) -> int:
    """Of the system call at this place."""
    return random.Random(f"{seed} {index}").randrange(HIGHEST_CALL)


def describe(seed: int, index: int) -> str:
    return f"call {number_of(seed, index)} (seed {seed}, index {index})"


if __name__ == "__main__":
    child._serve = serve
    child.main(*map(int, sys.argv[1:]))
