"""Whose video has the next decoder."""

import asyncio

from slipstream.video.pool import DecodePool
from tests.support.processes import eventually
from tests.video.test_pool import CLIP, LIMITS, file_of


async def test_videos_of_people_are_decoded_before_the_archives() -> None:
    pool, done = DecodePool(1, LIMITS), list[str]()

    async def decode(name: str) -> None:
        with file_of(CLIP) as file:
            await pool.sample(file, 4, in_background=name == "archive")
        done.append(name)

    decoder = pool._turns.reserve(0)
    tasks = list[asyncio.Task[None]]()
    for num_waiting, name in enumerate(("archive", "first", "second"), start=1):
        tasks.append(asyncio.create_task(decode(name)))
        await eventually(lambda num=num_waiting: pool._turns.num_queued == num)
    decoder.release()
    await asyncio.gather(*tasks)
    assert done == ["first", "second", "archive"]
    assert (pool._turns.num_admitted, pool._turns.num_queued) == (0, 0)
    pool.close()
