"""The guard of the guards, of results that leave Redis: each rule taken out turns the named check red."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from slipstream.archive.redis_store import load_scripts
from tests.archive import test_filed_contents, test_spill_queue
from tests.archive.spilled import Spill

Check = Callable[[Spill, Path], Awaitable[None]]


async def in_place(spill: Spill, folder: Path) -> None:
    await test_spill_queue.test_each_job_is_in_its_place_wherever_it_lies(spill, folder)


async def two_at_once(spill: Spill, folder: Path) -> None:
    await test_spill_queue.test_two_compactors_and_two_feeders_at_once_do_no_harm(spill, folder)


async def late(spill: Spill, folder: Path) -> None:
    await test_spill_queue.test_a_feeder_that_comes_late_feeds_nothing(spill)


async def cancelled(spill: Spill, folder: Path) -> None:
    await test_spill_queue.test_a_cancelled_batch_ends_and_its_jobs_are_told(spill)


async def retained(spill: Spill, folder: Path) -> None:
    await test_spill_queue.test_a_batch_goes_after_its_retention_and_its_files_stay(spill, folder)


async def contents(spill: Spill, folder: Path) -> None:
    await test_filed_contents.test_a_content_goes_with_the_last_batch_that_has_it(spill)


async def emptied(spill: Spill, folder: Path) -> None:
    await test_filed_contents.test_a_bucket_of_entries_of_batches_that_are_gone_is_emptied(spill)


MUTATIONS: dict[str, tuple[str, str, Check]] = {
    "names are forgotten": (
        "if not known then remember(batch, id, h[3], neighbours) end",
        "",
        in_place,
    ),
    "a changed payload is overlooked": (
        "== content and 'known' or 'conflict'",
        "and 'known'",
        in_place,
    ),
    "no bit": (
        "redis.call('SETBIT', outside_key(batch), string.match(entry, '^%d+'), 1)",
        "",
        in_place,
    ),
    "all wait inside": ("if outside then return 'outside' end", "", in_place),
    "what was planned is not fixed": (
        "if redis.call('HGET', batch_key(batch), 'plan') ~= arg(2) .. ' ' .. arg(3) then return 0 end",
        "",
        two_at_once,
    ),
    "the cursor is not looked at": ("or (h[3] or '0') ~= arg(3) then return 0", "then return 0", late),
    "what waits outside is forgotten": (
        "return tonumber(n[1] or 0) + tonumber(n[2] or 0) + tonumber(n[3] or 0)",
        "return tonumber(n[1] or 0) + tonumber(n[2] or 0)",
        cancelled,
    ),
    "jobs outside come to life": ("return { 0, 0, 'outside' }", "", cancelled),
    "results are swept before they are written": (
        "if redis.call('LLEN', ended_key(batch)) > 0 then",
        "if false then",
        retained,
    ),
    "contents are forgotten": ("    file_content(h[2], at)\n", "", contents),
    "the earlier of two equal contents stays": ("if old then entries =", "if false then entries =", contents),
    "contents of batches that are gone are found": ("redis.call('HDEL', P .. 'filed', number)", "", contents),
    "contents of batches that are gone stay": ("== 0 then entries = pruned(entries) end", "== 0 then end", emptied),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
async def test_the_named_check_sees_it(
    mutation: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    rule, instead, check = MUTATIONS[mutation]
    scripts = load_scripts()
    assert any(rule in text for text in scripts.values()), "the rule is written otherwise now"
    mutated = {name: text.replace(rule, instead) for name, text in scripts.items()}
    monkeypatch.setattr("slipstream.archive.redis_queue.load_scripts", lambda: mutated)
    name = request.node.name.translate(str.maketrans("[]", "()"))  # in a pattern for keys brackets mean something
    spill = Spill(redis_url, f"file://{tmp_path}", name)
    try:
        with pytest.raises(Exception):  # noqa: B017, PT011 (an assert, or an error of ours)
            await check(spill, tmp_path)
    finally:
        await spill.queue.close()
