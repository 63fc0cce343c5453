"""Captions kept for near-duplicates, over both queues: who finds them, how many stay, what is damaged or away."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive.duplicates import BadEntry, DuplicateFinder, StoredCaptions, read_known, write_known
from slipstream.archive.queue import JobQueue, QueueUnavailable
from slipstream.archive.redis_queue import RedisQueue
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.duplicates import KnownCaption, caption_sparingly
from slipstream.captioning.plan import CaptionPlan, make_plan
from slipstream.messages import Caption, SharedFrom
from slipstream.options import CaptionOptions
from slipstream.service_info import ModelInfo
from slipstream.speculation.protocol import FinishReason
from slipstream.stack.redis_server import EmbeddedServer
from slipstream.video.fingerprint import NUM_PICTURES, PICTURE_CELLS, Fingerprint
from slipstream.video.messages import SampledVideo
from tests.support.memory_queue import MemoryQueue

CONFIG = GatewayConfig(listen="", target="t:1")
TARGET = ModelInfo(model_id="big", revision="r1")
ANY = 255.0


def known(seed: int, text: str = "a cat") -> KnownCaption:
    """Far from that of any other seed."""
    pictures = np.full((NUM_PICTURES, PICTURE_CELLS), 128, dtype=np.uint8)
    pictures[:, :256] = np.random.default_rng(seed).integers(0, 2, 16).repeat(16) * 255
    return KnownCaption(Fingerprint(10.0, pictures), SharedFrom(f"job-{seed}", seed), text, 2, FinishReason.STOP)


@pytest_asyncio.fixture(params=["memory", "redis"])
async def queue(request: pytest.FixtureRequest, tmp_path: Any) -> AsyncIterator[JobQueue]:
    if request.param == "memory":
        yield MemoryQueue()
        return
    async with EmbeddedServer(tmp_path) as server:
        made = RedisQueue(server.url)
        yield made
        await made.close()


async def test_what_one_gateway_keeps_another_finds(queue: JobQueue) -> None:
    one, other = StoredCaptions(queue, "set", 3), StoredCaptions(queue, "set", 3)
    assert await one.nearest(known(0).fingerprint, ANY) is None
    await one.add(known(1, "ein Käfer \n"))
    for reader in (one, other, one):
        near = await reader.nearest(known(1).fingerprint, 0.0)
        assert near is not None and near.known.text == "ein Käfer \n" and near.known.finish_reason is FinishReason.STOP
        assert near.source == SharedFrom("job-1", 1, 0.0)
    assert await StoredCaptions(queue, "another", 3).nearest(known(1).fingerprint, ANY) is None


async def test_of_a_set_the_latest_stay(queue: JobQueue) -> None:
    captions = StoredCaptions(queue, "set", 3)
    for seed in range(1, 6):
        await captions.add(known(seed))
    found = [await StoredCaptions(queue, "set", 3).nearest(known(seed).fingerprint, 0.0) for seed in range(1, 6)]
    assert [near is not None for near in found] == [False, False, True, True, True]
    assert len(await queue.list_known("set", "", 100)) == 3


async def test_pages_are_read_to_the_end(queue: JobQueue) -> None:
    captions = StoredCaptions(queue, "set", 1000)
    for seed in range(1, 6):
        await captions.add(known(seed))
    places: list[str] = []
    while entries := await queue.list_known("set", places[-1] if places else "", 2):
        places += [entry.place for entry in entries]
    assert len(places) == len(set(places)) == 5


async def test_what_was_damaged_in_the_store_is_never_shared(queue: JobQueue) -> None:
    if not isinstance(queue, RedisQueue):
        pytest.skip("memory is not damaged")
    await StoredCaptions(queue, "set", 9).add(known(1))
    client: Any = queue._store._clients[""]
    (key,) = [key async for key in client.scan_iter(match="*:k:*")]
    ((place, fields),) = await client.xrange(key)
    await client.xdel(key, place)
    await client.xadd(key, {b"e": fields[b"e"].replace(b"a cat", b"a dog")})
    await StoredCaptions(queue, "set", 9).add(known(2))
    reader = StoredCaptions(queue, "set", 9)
    assert await reader.nearest(known(1).fingerprint, 0.0) is None
    assert await reader.nearest(known(2).fingerprint, 0.0) is not None


async def test_a_store_that_is_away_stops_nobody() -> None:
    queue = MemoryQueue()
    captions = StoredCaptions(queue, "set", 9)
    await captions.add(known(1))
    assert await captions.nearest(known(1).fingerprint, 0.0) is not None

    async def away(*_: Any) -> Any:
        raise QueueUnavailable("away")

    queue.add_known = queue.list_known = away  # type: ignore[method-assign]
    await captions.add(known(2))
    assert await captions.nearest(known(1).fingerprint, 0.0) is not None, "it is at hand"
    assert await captions.nearest(known(2).fingerprint, 0.0) is None


@pytest.mark.parametrize("how", ["share", "hint"])
async def test_what_a_lost_run_said_of_the_same_segment_is_no_near_duplicate(queue: JobQueue, how: str) -> None:
    """It is made again, and says that it was made of its own frames: nobody has the first."""
    plan, made = make_plan(CaptionOptions(duplicates=how), CONFIG), list[tuple[str, ...]]()

    async def make(asked: CaptionPlan) -> Caption:
        made.append(asked.options.prediction)
        return Caption("a cat", 2, FinishReason.STOP)

    async def captioned(segment: int) -> Caption:
        captions, frames = StoredCaptions(queue, "set", 9), np.zeros((1, 16, 16, 3), dtype=np.uint8)
        video = SampledVideo(frames, (0.0,), 1.0, 16, 16, "h264", 0, ())
        return (await caption_sparingly(plan, video, captions, SharedFrom("job", segment), make)).caption

    lost, again, other = [await captioned(segment) for segment in (3, 3, 4)]
    assert lost.shared is None and again.shared is None
    assert made == ([(), ()] if how == "share" else [(), ("a cat",), ("a cat",)])
    assert other.shared == (SharedFrom("job", 3, 0.0) if how == "share" else None)


async def test_only_the_same_owner_options_and_models_share() -> None:
    finder = DuplicateFinder(MemoryQueue(), 9)
    plan = make_plan(CaptionOptions(duplicates="share"), CONFIG)
    mine = finder.among(plan, TARGET, None, "alice")
    assert finder.among(make_plan(CaptionOptions(duplicates="share"), CONFIG), TARGET, None, "alice") is mine
    others = [
        finder.among(plan, TARGET, None, "bob"),
        finder.among(plan, replace(TARGET, revision="r2"), None, "alice"),
        finder.among(make_plan(CaptionOptions(duplicates="share", seed=1), CONFIG), TARGET, None, "alice"),
    ]
    await mine.add(known(1))
    assert await mine.nearest(known(1).fingerprint, 0.0) is not None
    assert [await one.nearest(known(1).fingerprint, ANY) for one in others] == [None] * 3


@given(st.binary())
def test_bytes_that_are_no_entry_are_told_from_one(data: bytes) -> None:
    with pytest.raises(BadEntry):
        read_known(data)


@given(st.integers(1, 99), st.text(st.characters(exclude_categories=["Cs"])), st.binary(min_size=1, max_size=9))
def test_an_entry_is_read_as_it_was_written(seed: int, text: str, torn: bytes) -> None:
    data = write_known(known(seed, text))
    again = read_known(data)
    assert np.array_equal(again.fingerprint.pictures, known(seed).fingerprint.pictures)
    assert replace(again, fingerprint=known(0).fingerprint) == replace(
        known(seed, text), fingerprint=again.fingerprint
    ) or (again.text, again.made_for, again.num_tokens) == (text, SharedFrom(f"job-{seed}", seed), 2)
    with pytest.raises(BadEntry):
        read_known(data + torn)
