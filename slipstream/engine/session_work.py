"""A session's work on the model's thread, in blocks: its prompt planned, its frames encoded, its memory freed. And the
pulls of its guidance, which end with it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

import torch

from slipstream.budget import MIB, Admission, Reservation, Turns, trim_memory
from slipstream.engine.thread import Lane, ModelThread, Pause
from slipstream.engine.video_lm import DecodeState, PromptPlan, VideoLM
from slipstream.errors import Overloaded, SessionGone
from slipstream.families.adapter import Pixels
from slipstream.families.preprocess import frames_at_once
from slipstream.logs import get_logger, heard
from slipstream.messages import Frames
from slipstream.session_messages import Chat, SessionStart

T = TypeVar("T")
FRAMES_PER_BLOCK = 16
"""Frames are encoded in blocks, and layers run one by one, so that windows of other sessions fit in between."""
LARGE_BYTES = 8 * MIB
"""Sessions with so many bytes of frames leave so much freed memory behind that the system is to have it back."""
PROMPT_BEHIND_PEOPLE_S = 10.0
"""See `Turns`."""
MAX_OPEN_PULLS = 4
"""A draft pulls once. One that is lost may not have been missed yet when the next begins."""
_preprocessing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pixels")


class SessionWork:
    """One session's share of the model, and its memory. After `close`, what is queued is refused and memory is freed.

    Args:
        turns: of all prompts of the model.
        frames_room: where its frames, if it has any, take so many bytes until they are freed; None where nothing bounds
            them.
        in_background: nobody waits for its text.
    """

    def __init__(
        self,
        thread: ModelThread,
        turns: Turns,
        frames_room: Admission | None = None,
        num_frames_bytes: int = 0,
        *,
        in_background: bool = False,
    ) -> None:
        self.in_background = in_background
        self.frames: Frames | None = None
        """Received and not encoded yet. Nobody else keeps them, so their memory ends with this."""
        self._frames_room = frames_room if num_frames_bytes else None
        self._num_frames_bytes = num_frames_bytes
        self._frames_place: Reservation | None = None
        self._released: asyncio.Future[None] | None = None
        self._thread = thread
        self._turns = turns
        self._came_s = time.monotonic()
        self._num_new_tokens, self._prompt_s = 0, 0.0
        """Of the prompt: tokens that are to be run, and what they have taken."""
        self._order = self._turns.turn(self._came_s, 0, in_background=in_background)
        self._state: DecodeState | None = None
        self._releases: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        return self._released is not None

    @property
    def state(self) -> DecodeState:
        """The cache that decoding goes on from; there is one after the prefill."""
        assert self._state is not None, "the prompt is prefilled first"
        return self._state

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = state
        self._turns.observe(self._num_new_tokens, self._prompt_s)

    def take_turn(self, num_new_tokens: int) -> None:
        """Of the prompt so many tokens are to be run, which gives it its place among the others' that wait."""
        self._num_new_tokens = num_new_tokens
        self._order = self._turns.turn(self._came_s, num_new_tokens, in_background=self.in_background)

    @property
    def received_frames(self) -> Frames:
        """The frames, which are not to be kept. Raises `SessionGone` once they are freed."""
        frames = self.frames
        if frames is None:
            raise SessionGone("the session has ended")
        return frames

    @property
    def may_have_frames(self) -> bool:
        """There is room for them."""
        if self._frames_room is None:
            return True
        return self._frames_place is not None and self._frames_place.admitted_at is not None

    def ask_for_frames(self) -> None:
        """Takes room for the frames, or a place among those that wait for some. Only sessions that have all other room
        may ask: two of which each has what the other waits for would wait for ever. Raises `Overloaded`."""
        if self._frames_room is not None and self._frames_place is None:
            self._frames_place = self._frames_room.reserve(self._num_frames_bytes, in_background=self.in_background)

    async def wait_for_frames(self) -> AsyncIterator[int]:
        """Until the frames may be received: how many sessions are ahead, whenever that changes. Raises `Overloaded`."""
        self.ask_for_frames()
        if self._frames_place is not None:
            async for num_ahead in self._frames_place.wait():
                yield num_ahead

    def free_frames(self) -> None:
        """They are not needed any more. On the event loop; a block that reads them now still does."""
        self.frames = None
        if self._frames_place is not None:
            self._frames_place.release()

    def on_release(self, release: Callable[[], None]) -> None:
        """Has `release` called on the model's thread when the session has ended. Call this on that thread."""
        self._releases.append(release)

    async def run(self, work: Callable[[], T], lane: Lane = Lane.PREFILL) -> tuple[T, float]:
        """What `work()` returns on the model's thread, and its seconds. Raises `SessionGone` after `close`.

        Prefills are served session by session, by their turns; decoding comes in turn, or a late session would never
        have its.
        """

        def timed() -> tuple[T, float]:
            self._check_open()
            start = time.perf_counter()
            result = work()
            return result, time.perf_counter() - start

        return await self._thread.run(timed, lane, self._order if lane is Lane.PREFILL else 0)

    def run_blocks(self, blocks: Iterator[T | Pause]) -> AsyncIterator[T]:
        """Runs an iterator block by block on the model's thread. Raises `SessionGone` after `close`."""

        def guarded() -> Iterator[T | Pause]:
            while True:
                self._check_open()
                started = time.perf_counter()
                try:
                    item = next(blocks)
                except StopIteration:
                    return
                finally:
                    self._prompt_s += time.perf_counter() - started
                yield item

        return self._thread.run_blocks(guarded(), self._order)

    def close(self, then: Callable[[], None] = lambda: None) -> asyncio.Future[None]:
        """Ends the session; its memory is freed after the block that may be running, and then `then()` is called.

        Returns a future that is done when all this has happened; it need not be awaited.
        """
        self.free_frames()
        if self._released is None:
            self._released = heard(asyncio.ensure_future(self._thread.run(self._release)))
            self._released.add_done_callback(lambda done: then())
            if self._num_frames_bytes >= LARGE_BYTES:
                self._released.add_done_callback(_trim_memory)
        return self._released

    def _check_open(self) -> None:
        if self.closed:
            raise SessionGone("the session has ended")

    def _release(self) -> None:
        releases, self._releases = self._releases, []
        for release in releases:
            try:
                release()
            except Exception as error:  # the others free what they hold
                self._thread.note(error)
                get_logger().exception("session.release_failed")


class OpenPulls:
    """Of one session. Each may hold a copy of its guidance, hundreds of MB."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._ends: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Surrounds a pull. Raises `Overloaded` where too many are open, and `SessionGone` when the session ends."""
        if len(self._ends) >= MAX_OPEN_PULLS:
            raise Overloaded(
                f"the guidance of this session is being pulled {MAX_OPEN_PULLS} times; try again when one has ended"
            )
        end = asyncio.timeout(None)
        try:
            async with end:
                self._ends.add(end)
                yield
        except TimeoutError:
            if not end.expired():
                raise
            raise SessionGone(f"session {self._session_id!r} has ended") from None
        finally:
            self._ends.discard(end)

    def end(self) -> None:
        """The session has ended, and with it each of them."""
        for end in self._ends:
            if not end.expired():
                end.reschedule(0)


def _trim_memory(released: asyncio.Future[None]) -> None:
    released.get_loop().run_in_executor(None, trim_memory)


async def plan_session(
    model: VideoLM, request: SessionStart, num_frames: int, frame_size: tuple[int, int] | None
) -> PromptPlan:
    """The prompt of a session, planned on another thread: positions of a long video take tens of milliseconds. Raises
    what `VideoLM.plan_prompt` and `plan_text` do."""
    chat = Chat(request.prompt, request.system, request.turns, request.thinking)
    if not request.has_video:
        return await asyncio.to_thread(model.plan_text, chat)
    return await asyncio.to_thread(
        model.plan_prompt,
        chat,
        num_frames,
        frame_size=frame_size,
        seconds_per_frame=request.seconds_per_frame,
        times_s=request.times_s,
    )


def frames_bytes(num_frames: int, frame_size: tuple[int, int] | None) -> int:
    """What frames of this height and width take; 0 of a size that is not known."""
    height, width = frame_size or (0, 0)
    return num_frames * height * width * 3


def encode_blocks(model: VideoLM, work: SessionWork, num_frames: int) -> Iterator[tuple[torch.Tensor, float]]:
    """Video embeddings [tokens, hidden] of one block of the session's frames after another, with the seconds of each.
    The next block's pixels are made on another thread meanwhile. Raises `SessionGone` when the session ends."""
    at_once = frames_at_once(model.info.device, work.received_frames.shape[1:3])
    size = max(FRAMES_PER_BLOCK, at_once)
    blocks = [slice(first, first + size) for first in range(0, num_frames, size)]

    def prepare(block: slice) -> Future[list[Pixels]]:
        return _preprocessing.submit(model.preprocess, work.received_frames[block], num_frames)

    ahead = prepare(blocks[0])
    try:
        for following in (*blocks[1:], None):
            started = time.perf_counter()
            pixels = ahead.result()
            if following is not None:
                ahead = prepare(following)
            embeddings = model.encode(pixels)
            del pixels
            yield embeddings, time.perf_counter() - started
    finally:
        ahead.cancel()  # what waits in that thread's queue knows the frames
