"""Takes from a decoder process what decoding does not need. Linux; knows nothing of videos.

What the kernel must grant (limits, no new privileges, death with the parent) is an error when refused. What depends on
the machine (an empty network namespace, denied system calls) is best effort and named in the result.
"""

import ctypes
import errno
import gc
import hashlib
import importlib
import io
import math
import mmap
import os
import pkgutil
import platform
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

import av
import numpy as np
from av.video.stream import VideoStream
from numpy.typing import NDArray

from slipstream.errors import InvalidRequest, LimitExceeded, UnreadableVideo
from slipstream.video.container import LACKED_MEMORY
from slipstream.video.decode import sample_video
from slipstream.video.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    DecodeLimits,
    DecodeRequest,
    Progress,
    Ready,
    Refused,
    Sampled,
    SampledVideo,
    Started,
    encode_answer,
)

# -- confinement ------------------------------------------------------------------------------------------------------

# -- seccomp ----------------------------------------------------------------------------------------------------------

# Denies this process system calls that decoding never makes: opening files, sockets, programs, other processes.
#
# A short list of what is forbidden, on x86-64 only; elsewhere nothing is done and the caller is told. Forbidden calls
# fail with EPERM, so a library that merely tries goes on without.

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


# -- confine ----------------------------------------------------------------------------------------------------------

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


# -- child ------------------------------------------------------------------------------------------------------------

# A decoder process: `python -m slipstream.video.child DESCRIPTOR MEMORY_BYTES CPU_S PARENT_PID`.
#
# It reads hostile files, so it is given open descriptors and never a path, and has nothing worth taking. It imports
# neither gRPC nor torch. What it answers is in `slipstream.video.messages`; the parent is `slipstream.video.pool`.

# -- preloading -------------------------------------------------------------------------------------------------------

# Makes a process load, before it is confined, whatever decoding loads only when it comes to it.

_NOT_FOR_DECODING = ("av.__main__", "av.datasets")
_NUM_FRAMES = 4


def preload() -> None:
    """Decodes a small clip and refuses a file that is none. Takes some milliseconds."""
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.startswith(_NOT_FOR_DECODING):
            importlib.import_module(module.name)
    sample_video(io.BytesIO(_small_clip()), _NUM_FRAMES - 1, DecodeLimits(max_frame_pixels=64))
    with suppress(UnreadableVideo):
        sample_video(io.BytesIO(b"no video"), 1, DecodeLimits())


def _small_clip() -> bytes:
    clip = io.BytesIO()
    with av.open(clip, "w", format="matroska") as output:
        stream = output.add_stream("mjpeg", rate=25)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuvj420p"
        for index in range(_NUM_FRAMES):
            frame = av.VideoFrame(16, 16, "yuvj420p")
            frame.pts = index
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return clip.getvalue()


# -- child ------------------------------------------------------------------------------------------------------------

CPU_SLACK_S = 2


def main(descriptor: int, memory_bytes: int, cpu_s: int, parent_pid: int) -> None:
    """Serves until the parent hangs up."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends its decoders; a terminal or a supervisor does not
        signal.signal(number, signal.SIG_IGN)
    preload()
    with socket.socket(fileno=descriptor) as connection:
        confined = confine(memory_bytes, cpu_s, parent_pid)
        connection.send(encode_answer(Ready(confined)))
        gc.freeze()
        while True:
            message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
            if not message:
                return
            connection.send(encode_answer(Started()))
            answer = _serve(connection, DecodeRequest.decode(message), *descriptors)
            gc.collect()  # a traceback may still hold the memory of the frames
            connection.send(encode_answer(answer))


def _serve(connection: socket.socket, request: DecodeRequest, video_descriptor: int, frames_descriptor: int) -> Answer:
    limit_cpu(math.ceil(request.limits.timeout_s * request.limits.decoder_threads) + CPU_SLACK_S)
    with os.fdopen(video_descriptor, "rb") as source, os.fdopen(frames_descriptor, "r+b") as frames:
        try:
            video = _sample(connection, source, request, frames.fileno())
            sha256, num_bytes = _digest(source) if request.with_digest else ("", 0)
        except (InvalidRequest, LimitExceeded, UnreadableVideo) as error:
            return Refused(_kind(error), str(error))
        except MemoryError:
            return Refused(LimitExceeded.__name__, LACKED_MEMORY)
        return _sampled(video, sha256, num_bytes)


def _kind(error: Exception) -> str:
    kinds = (UnreadableVideo, LimitExceeded, InvalidRequest)
    return next(kind.__name__ for kind in kinds if isinstance(error, kind))


def _sample(connection: socket.socket, source: BufferedReader, request: DecodeRequest, frames: int) -> SampledVideo:
    memory = mmap.mmap(frames, request.frames_bytes)

    def allocate(shape: tuple[int, ...]) -> NDArray[np.uint8]:
        return np.frombuffer(memory, dtype=np.uint8, count=math.prod(shape)).reshape(shape)

    def progress(done: int, total: int) -> None:
        connection.send(encode_answer(Progress(done, total)))

    return sample_video(source, request.num_frames, request.limits, on_progress=progress, allocate=allocate)


def _digest(source: BufferedReader) -> tuple[str, int]:
    """SHA-256 in hexadecimal, and the size in bytes. The parent's clock bounds it, as it does the decoding."""
    source.seek(0)
    return hashlib.file_digest(source, "sha256").hexdigest(), source.tell()


def _sampled(video: SampledVideo, sha256: str, num_bytes: int) -> Sampled:
    n, height, width, _ = video.frames.shape
    return Sampled(
        (n, height, width),
        video.timestamps_s,
        video.duration_s,
        video.source_width,
        video.source_height,
        video.codec,
        video.rotation,
        video.warnings,
        sha256,
        num_bytes,
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
