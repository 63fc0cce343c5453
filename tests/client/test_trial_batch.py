"""Batches that are cancelled when whoever wants them leaves."""

import asyncio
from contextlib import aclosing

import grpc
import pytest

from slipstream.archive.messages import BatchItem, BatchOptions
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.connection import GatewayAddress
from slipstream.client.trial_batch import run_trial
from slipstream.errors import InvalidRequest
from tests.cli.fake_archive import FakeArchive
from tests.support.processes import eventually

ITEMS = [BatchItem("a", "stuck.mp4"), BatchItem("b", "b.mp4")]


async def leave(archive: FakeArchive) -> None:
    """Somebody who goes while not all of it is handed in."""
    async with GatewayAddress(archive.address).open() as connection:
        trial = run_trial(ArchiveClient(connection), "try", BatchOptions(), ITEMS)
        async with aclosing(trial):
            waiting = asyncio.ensure_future(anext(trial))
            await eventually(lambda: archive.batches and not archive.refusals)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting


async def test_what_was_handed_in_does_not_run_on() -> None:
    with FakeArchive() as archive:
        archive.refusals, archive.hint_ms = [grpc.StatusCode.RESOURCE_EXHAUSTED], 60_000
        await leave(archive)
        (batch,) = archive.batches.values()
        assert list(batch.jobs) == ["a"] and batch.cancelled


async def test_a_batch_that_never_came_is_not_cancelled() -> None:
    with FakeArchive() as archive:
        archive.room, archive.refusals = 0, [grpc.StatusCode.INVALID_ARGUMENT]
        async with GatewayAddress(archive.address).open() as connection:
            with pytest.raises(InvalidRequest):
                await anext(run_trial(ArchiveClient(connection), "try", BatchOptions(), ITEMS))
