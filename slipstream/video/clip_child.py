"""A process that cuts clips: `python -m slipstream.video.clip_child DESCRIPTOR MEMORY_BYTES CPU_S PARENT_PID`.

It reads hostile files, so it is given open descriptors and never a path, and has nothing worth taking, as a decoder.
Of a film that is elsewhere the descriptor is a socket on which it asks for ranges of that film alone.
Packets are copied as they are, into Matroska: nothing is decoded, and nothing is lost. So a clip begins with the last
key picture at or before its start. The clip lies in memory that the parent sized; the parent is
`slipstream.video.clip_process`.
"""

import gc
import importlib
import io
import json
import math
import mmap
import os
import pkgutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import av
from av.packet import Packet
from av.video.stream import VideoStream

from slipstream.errors import InvalidRequest, LimitExceeded, UnreadableVideo
from slipstream.video.child import small_clip
from slipstream.video.confine import confine, limit_cpu
from slipstream.video.container import OpenVideo, Source, Watch, open_video
from slipstream.video.damage import DamageCount
from slipstream.video.messages import MAX_MESSAGE_BYTES, DecodeLimits
from slipstream.video.ranged_reader import RangedReader

CPU_SLACK_S = 2
NICENESS = 5
_MICROSECONDS = 1_000_000
_NOT_FOR_CUTTING = ("av.__main__", "av.datasets")

# -- cutting ----------------------------------------------------------------------------------------------------------


class FixedMemory:
    """A file of a fixed most size, for libav to write."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.num_bytes = 0
        self.is_full = False
        self._memory = memory
        self._place = 0

    def write(self, data: bytes) -> int:
        """Raises OSError where there is no room."""
        end = self._place + len(data)
        if end > len(self._memory):
            self.is_full = True
            raise OSError("the clip is longer than allowed")
        self._memory[self._place : end] = data
        self._place = end
        self.num_bytes = max(self.num_bytes, end)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As files have it."""
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.num_bytes}[whence]
        return self._place

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._place


@dataclass(frozen=True)
class Cut:
    """A clip that was written."""

    num_bytes: int
    begins_s: float
    """The key picture that it begins with, by the film's clock."""


def cut_clip(source: Source, start_s: float, end_s: float, output: FixedMemory, limits: DecodeLimits) -> Cut:
    """Copies the pictures from `start_s` to before `end_s`, by the container's clock, and those that they need.

    Raises UnreadableVideo or LimitExceeded, also for a clip that is too long for `output`.
    """
    watch, damage = Watch(limits.timeout_s, None), DamageCount(limits.max_corrupt_packets)
    with open_video(source, limits, watch) as video:
        with suppress(av.FFmpegError):  # what cannot be searched is read from its beginning
            video.container.seek(math.floor(start_s * _MICROSECONDS), backward=True)
        begin = _begin(video, start_s, damage)
        if begin is None or begin.seconds > start_s:  # the index is no good
            with suppress(av.FFmpegError):
                video.container.seek(0, backward=True)
            begin = _begin(video, start_s, damage)
        if begin is None:
            raise UnreadableVideo(f"the film has no picture at {start_s:.3f} s")
        try:
            _copy(video, begin, end_s, output)
        except (av.FFmpegError, ValueError, OSError) as failure:
            if output.is_full:
                raise LimitExceeded("the clip is longer than one may be; ask for shorter segments") from None
            codec = video.stream.codec_context.name
            raise UnreadableVideo(f"{codec} cannot be copied from this film as it is ({failure})") from failure
    return Cut(output.num_bytes, begin.seconds)


@dataclass
class _Begin:
    """What comes first: the key picture, all up to the start, and what follows."""

    seconds: float
    packets: "list[Packet[VideoStream]]"
    others: "Iterator[Packet[VideoStream]]"


def _begin(video: OpenVideo, start_s: float, damage: DamageCount) -> _Begin | None:
    """The pictures from the last key picture at or before `start_s`, or from the first there is."""
    held: list[Packet[VideoStream]] = []
    packets = video.packets(damage)
    for packet in packets:
        if packet.is_keyframe and (not held or _seconds(packet) <= start_s):
            held = []
        held.append(packet)
        if held[0].is_keyframe and _seconds(packet) >= start_s:
            break
    held = held if held and held[0].is_keyframe else []
    return _Begin(_seconds(held[0]), held, packets) if held else None


def _seconds(packet: "Packet[VideoStream]") -> float:
    ticks = packet.pts if packet.pts is not None else packet.dts
    return float((ticks or 0) * (packet.time_base or 0))


def _copy(video: OpenVideo, begin: _Begin, end_s: float, output: FixedMemory) -> None:
    with av.open(output, "w", format="matroska") as clip:
        stream = clip.add_stream_from_template(video.stream, opaque=True)  # of a codec that cannot be encoded, too
        first: int | None = None
        for packet in chain(begin.packets, begin.others):
            ticks = packet.pts if packet.pts is not None else packet.dts
            if ticks is None:
                continue
            decoded_at = ticks if packet.dts is None else packet.dts
            if float(decoded_at * (packet.time_base or 0)) >= end_s:
                break
            first = ticks if first is None else first
            if ticks < first:  # decoded behind the first picture and shown before it: it needs the group before
                continue
            # The muxer orders packets itself: behind a search demuxers do not know when they are decoded.
            packet.pts, packet.dts = ticks - first, None
            packet.stream = stream
            clip.mux(packet)


# -- child ------------------------------------------------------------------------------------------------------------


def preload() -> None:
    """Loads before the process is confined whatever cutting loads only when it comes to it."""
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if not module.name.startswith(_NOT_FOR_CUTTING):
            importlib.import_module(module.name)
    memory = FixedMemory(mmap.mmap(-1, 1024**2))
    cut_clip(io.BytesIO(small_clip()), 0.0, 1.0, memory, DecodeLimits())
    with suppress(UnreadableVideo):
        cut_clip(io.BytesIO(b"no video"), 0.0, 1.0, memory, DecodeLimits())


def main(descriptor: int, memory_bytes: int, cpu_s: int, parent_pid: int) -> None:
    """Serves until the parent hangs up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    preload()
    with socket.socket(fileno=descriptor) as connection:
        confined = confine(memory_bytes, cpu_s, 1, parent_pid)
        _say(connection, confined=confined)
        gc.freeze()
        while True:
            message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
            if not message:
                return
            _say(connection, **_answer(json.loads(message), *descriptors))
            gc.collect()


def _answer(request: dict[str, Any], film: int, clip: int) -> dict[str, Any]:
    limits = DecodeLimits(**request["limits"])
    limit_cpu(math.ceil(limits.timeout_s) + CPU_SLACK_S)
    opened = RangedReader(film) if request["is_ranged"] else os.fdopen(film, "rb")
    with opened as source, os.fdopen(clip, "r+b") as memory:
        output = FixedMemory(mmap.mmap(memory.fileno(), request["most_bytes"]))
        try:
            cut = cut_clip(source, request["start_s"], request["end_s"], output, limits)
        except (InvalidRequest, LimitExceeded) as error:
            kind = LimitExceeded if isinstance(error, LimitExceeded) else UnreadableVideo
            return {"error": kind.__name__, "message": str(error)}
        except MemoryError:
            return {"error": LimitExceeded.__name__, "message": "cutting needs more memory than is allowed"}
    return {"num_bytes": cut.num_bytes, "begins_s": cut.begins_s}


def _say(connection: socket.socket, **fields: Any) -> None:
    connection.send(json.dumps(fields).encode()[:MAX_MESSAGE_BYTES])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
