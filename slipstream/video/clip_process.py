"""Clips of films, cut by a confined process: what it is given, and what of its answer is believed."""

import asyncio
import json
import math
import mmap
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from slipstream.errors import InvalidConfig, LimitExceeded, ServiceUnavailable, SlipstreamError, UnreadableVideo
from slipstream.logs import get_logger
from slipstream.video.decoder_process import KILL_SLACK_S, START_S, ConfinedProcess, OnReady, sealed_memory
from slipstream.video.formats import TIERS
from slipstream.video.messages import MAX_MESSAGE_BYTES, BadAnswer, DecodeLimits, printable
from slipstream.video.ranged_film import RangedFilm, served

MODULE = "slipstream.video.clip_child"
MOST_BYTES = 1024**3
"""Of a clip; untouched memory costs nothing."""
MEMORY_BYTES = 1024**3
"""Address space of the process beyond that."""
MOST_CLIPS = 1000
_LATEST_S = 2.0**63
ALL = tuple(TIERS)[-1]
_ERRORS: dict[str, type[SlipstreamError]] = {kind.__name__: kind for kind in (LimitExceeded, UnreadableVideo)}


@dataclass(frozen=True)
class Clip:
    """A clip that was written."""

    path: Path
    num_bytes: int
    begins_s: float
    """By the film's clock; before the start that was asked for, as far as its pictures need others."""


class ClipCutter(ConfinedProcess):
    """A process that cuts one clip after the other, for one user. An async context manager. After any error that is not
    about a film it is of no use any more."""

    def __init__(
        self,
        formats: str = ALL,
        timeout_s: float = DecodeLimits.timeout_s,
        on_ready: OnReady = lambda confined: None,
    ) -> None:
        """See `ConfinedProcess`; `formats` is the tier of containers and codecs that are cut."""
        self._limits = DecodeLimits(formats=formats, timeout_s=timeout_s, max_bytes=2**62, max_ranged_bytes=2**62)
        cpu_s = math.ceil(timeout_s + 2) * MOST_CLIPS
        super().__init__("cutter", MODULE, (MEMORY_BYTES + MOST_BYTES, cpu_s), on_ready)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        await asyncio.to_thread(self.reap)

    async def cut(self, film: BinaryIO | RangedFilm, start_s: float, end_s: float, path: Path) -> Clip:
        """Writes what `film`, an open regular file or one that is elsewhere, has from `start_s` to `end_s`, by its
        container's clock, to `path` (Matroska), whole or not at all.

        Raises UnreadableVideo or LimitExceeded about the film, what reading it raises, InvalidConfig about `path`, and
        ServiceUnavailable where the process cannot be started, or was lost.
        """
        await self.wait_ready()
        if not isinstance(film, RangedFilm):
            return await self._cut(film.fileno(), False, start_s, end_s, path)
        async with served(film, self._limits.timeout_s) as descriptor:
            return await self._cut(descriptor, True, start_s, end_s, path)

    async def _cut(self, film: int, is_ranged: bool, start_s: float, end_s: float, path: Path) -> Clip:
        memory = sealed_memory(MOST_BYTES)
        try:
            request = {"start_s": start_s, "end_s": end_s, "most_bytes": MOST_BYTES, "limits": asdict(self._limits)}
            request["is_ranged"] = is_ranged
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], [film, memory])
            except OSError:
                raise await self._lost() from None
            try:
                async with asyncio.timeout(self._limits.timeout_s + KILL_SLACK_S):
                    answer = await self._answer()
            except TimeoutError:
                self.kill()
                raise LimitExceeded(f"cutting took longer than {self._limits.timeout_s:g} s") from None
            try:
                num_bytes, begins_s = read_cut(answer)
            except BadAnswer:
                raise self._nonsense() from None
            await asyncio.to_thread(_write, memory, num_bytes, path)
        finally:
            os.close(memory)
        return Clip(path, num_bytes, begins_s)

    async def _start(self, on_ready: OnReady) -> None:
        try:
            async with asyncio.timeout(START_S):
                answer = await self._answer()
        except (TimeoutError, SlipstreamError) as failure:
            self.process.kill()
            get_logger().error("cutter.not_started", cutter=self.process.pid, reason=repr(failure))
            raise ServiceUnavailable("the process that cuts clips does not start") from None
        confined = answer.get("confined")
        on_ready(tuple(map(str, confined)) if isinstance(confined, list) else ())

    async def _answer(self) -> dict[str, Any]:
        message = await self._receive(MAX_MESSAGE_BYTES)
        if not message:
            raise await self._lost()
        try:
            answer = json.loads(message)
        except (ValueError, RecursionError):
            raise self._nonsense() from None
        return answer if isinstance(answer, dict) else {}

    async def _lost(self) -> SlipstreamError:
        _, cause = await self._end()
        self.kill()
        return UnreadableVideo(f"cutting this film broke off ({cause}); it is damaged or made to do harm")

    def _nonsense(self) -> SlipstreamError:
        self.kill()
        return UnreadableVideo("cutting this film broke; it is damaged or made to do harm")


def read_cut(answer: Mapping[str, Any]) -> tuple[int, float]:
    """How long a clip is and when it begins, by an answer that may be an attacker's. Raises BadAnswer, and what the
    process refused the film with."""
    if (kind := _ERRORS.get(str(answer.get("error")))) is not None:
        raise kind(printable(str(answer.get("message"))))
    num_bytes, begins_s = answer.get("num_bytes"), answer.get("begins_s")
    if type(num_bytes) is not int or not 0 < num_bytes <= MOST_BYTES:
        raise BadAnswer("a clip has an impossible size")
    if not isinstance(begins_s, int | float) or not abs(begins_s) < _LATEST_S:
        raise BadAnswer("a clip begins at no time")
    return num_bytes, float(begins_s)


def _write(memory: int, num_bytes: int, path: Path) -> None:
    """The clip's bytes as a file, which appears whole."""
    part = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"cannot write {path}: {error.strerror or error}") from error
    try:
        with mmap.mmap(memory, num_bytes, prot=mmap.PROT_READ) as content, part.open("wb") as file:
            file.write(content)
        part.replace(path)
    except OSError as error:
        raise InvalidConfig(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
