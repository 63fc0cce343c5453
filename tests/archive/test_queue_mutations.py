"""The guard of the guards: each rule of the scripts, taken out, turns the check red that is named for it."""

from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from slipstream.archive.redis_store import load_scripts
from tests.archive import test_queue_blame as blame
from tests.archive import test_queue_contract as contract
from tests.archive import test_queue_owners as owners
from tests.archive import test_queue_parts as parts
from tests.archive.worlds import World, redis_world

Check = Callable[[World], Awaitable[None]]

MUTATIONS: dict[str, tuple[str, str, Check]] = {
    "no owner check": (
        "local same = h[1] == worker and h[2] == epoch",
        "local same = true",
        contract.test_a_lost_job_runs_again_and_the_stale_holder_is_refused,
    ),
    "no worker in the token": (
        "local same = h[1] == worker and h[2] == epoch",
        "local same = h[2] == epoch",
        contract.test_the_token_is_worker_and_epoch,
    ),
    "no renewal": (
        "redis.call('XCLAIM', stream_key(name), GROUP, CONSUMER, 0, id, 'JUSTID')",
        "",
        contract.test_a_live_lease_is_kept_whatever_the_jobs_length,
    ),
    "no sweep of expired leases": (
        "ipairs(streams_with_leases()) do reclaim(name) end",
        "ipairs({}) do reclaim(name) end",
        contract.test_expired_jobs_come_before_all_others,
    ),
    "no new epoch": (
        "string.format('%d', job.epoch + 1)",
        "job.epoch",
        contract.test_the_same_worker_gets_another_epoch,
    ),
    "a worker counts once a job": (
        "and not seen[job[2]] then",
        "then",
        contract.test_workers_that_have_jobs_are_counted,
    ),
    "no limit of crashes": (
        "if crashes >= MAX_CRASHES then",
        "if false then",
        blame.test_a_poison_job_dies_alone,
    ),
    "suspects run together": (
        "or redis.call('XPENDING', stream, GROUP)[1] > 0",
        "",
        blame.test_one_suspect_at_a_time_and_never_for_who_refuses_them,
    ),
    "no excuse for neighbours": (
        "if suspect and suspect ~= id and",
        "if false and",
        blame.test_beside_a_suspect_only_the_suspect_is_blamed,
    ),
    "who gives a job up has died of it": (
        "if not (is_alive(lost_by) and is_absolved(id)) then",
        "if true then",
        blame.test_what_a_living_worker_gives_up_is_no_death,
    ),
    "a take shows that its worker lived before": (
        "local may_expire = hear()\n",
        "local may_expire = hear()\nshow_alive(worker)\n",
        blame.test_who_takes_its_own_job_back_was_silent,
    ),
    "a death that was none goes unsaid": (
        "h[3] .. CAME_BACK",
        "h[3]",
        partial(blame.test_a_dead_job_whose_worker_comes_back_stays_dead_and_says_so, how="beat", number=0),
    ),
    "a dead job's late result is no sign of life": (
        "if not same or before ~= 'running' then\n    absolve(id, worker, epoch)\n",
        "if not same or before ~= 'running' then\n    if not same then absolve(id, worker, epoch) end\n",
        partial(blame.test_a_dead_job_whose_worker_comes_back_stays_dead_and_says_so, how="finish", number=2),
    ),
    "a job is excused whatever it died of": (
        "h[2] == 'dead' and crashes == MAX_CRASHES",
        "h[2] == 'dead'",
        blame.test_a_job_that_is_dead_of_its_own_failures_says_nothing_of_its_workers,
    ),
    "an old death is taken off the new count": (
        "'excused', 0, 'blamed', '',",
        "'excused', 0,",
        partial(blame.test_who_comes_back_takes_nothing_off_that_is_counted_since, fresh="retry_dead"),
    ),
    "an excuse is worn out for ever": (
        "'blamed', '', 'absolved', 0, ...)",
        "'blamed', '', ...)",
        partial(blame.test_an_excuse_that_wore_out_is_fresh_when_the_counts_are, fresh="retry_dead"),
    ),
    "an entry outlives its job": (
        "local waits = job.state == 'queued' and job.entry == entry",
        "local waits = job.state == 'queued'\n    job.entry = entry",
        contract.test_a_job_waits_in_one_place_only,
    ),
    "no turns": (
        "TURNS[turn % #TURNS + 1]",
        "'high'",
        contract.test_priorities_are_weighted_and_starve_nobody,
    ),
    "no bound of the backlog": (
        ">= MAX_BACKLOG\n",
        "< 0\n",
        contract.test_the_backlog_is_bounded,
    ),
    "no turns of owners": (
        "      to_the_end(priority, owner, 'XX')\n    end\n    if job",
        "    end\n    if job",
        owners.test_the_first_job_of_another_owner_comes_next,
    ),
    "who comes back comes first": (
        "redis.call('HINCRBY', P .. 'clock', 'place', 1), owner",
        "-redis.call('HINCRBY', P .. 'clock', 'place', 1), owner",
        owners.test_who_hands_in_one_by_one_gains_nothing,
    ),
    "nothing is owed": (
        "if cost > 1 then owe",
        "if false then owe",
        owners.test_a_dear_job_takes_several_turns,
    ),
    "debts stand for ever": (
        "if least > 0 then owe(priority, owner, -least) end\n    debts[i] = debts[i] - least",
        "",
        owners.test_what_is_owed_to_nobody_is_forgiven,
    ),
    "no quota": (
        "if will_wait and room <= 0",
        "if false",
        owners.test_an_owner_has_a_quota_over_all_its_batches,
    ),
    "a retry without a quota": (
        "if room <= 0 then",
        "if false then",
        contract.test_a_retry_stops_where_there_is_no_room,
    ),
    "a part without an owner check": (
        "if not same or state ~= 'running' then return 'lost' end",
        "",
        parts.test_a_late_part_of_who_lost_the_lease_is_refused,
    ),
    "parts found without an owner check": (
        "if not same or state ~= 'running' then return false end",
        "",
        parts.test_a_late_part_of_who_lost_the_lease_is_refused,
    ),
    "a part is written again": (
        "number, number)[1] then return 'known' end",
        "number, number)[1] then end",
        parts.test_a_part_is_written_once,
    ),
    "parts of any options": (
        "if meta[1] ~= key then",
        "if not meta[1] then",
        parts.test_parts_of_other_options_are_dropped,
    ),
    "done without its parts": (
        "  return 2\n",
        "",
        parts.test_a_job_is_not_done_while_parts_are_missing,
    ),
    "progress counts for nothing": (
        "count_anew(id)\nreturn 'kept'",
        "return 'kept'",
        parts.test_a_job_that_gets_on_is_no_poison,
    ),
    "a suspect for ever": (
        "if crashes < SUSPECT_AFTER and split(entry) ~= 'suspects' then",
        "if crashes < SUSPECT_AFTER then",
        parts.test_a_suspect_that_got_on_is_none_after_its_run,
    ),
    "no bound of a job's parts": (
        "if tonumber(meta[2]) + more > tonumber(arg(6)) then return 'full' end",
        "",
        parts.test_what_a_job_keeps_is_bounded,
    ),
    "no bound of a job's notes": (
        "if tonumber(meta[1]) + more > tonumber(arg(6)) then return 'full' end",
        "",
        parts.test_notes_count_among_what_a_job_keeps_and_leave_room_for_its_last_part,
    ),
    "a note without an owner check": (
        "if not same or state ~= 'running' then return 'lost' end",
        "",
        parts.test_a_late_note_of_who_lost_the_lease_is_refused,
    ),
    "notes outlive their use": (
        "if is_last then",
        "if false then",
        parts.test_a_note_is_for_later_runs_and_goes_with_the_last_part,
    ),
    "parts outlive their batch": (
        "    drop_parts(id, batch)\n    redis.call('DEL', job_key(id))",
        "  redis.call('DEL', job_key(id))",
        parts.test_parts_go_with_their_batch,
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
async def test_the_named_check_notices(mutation: str, redis_url: str) -> None:
    rule, instead, check = MUTATIONS[mutation]
    scripts = load_scripts()
    assert any(rule in text for text in scripts.values()), "the rule is written otherwise now"
    mutated = {name: text.replace(rule, instead) for name, text in scripts.items()}
    world = redis_world(redis_url, scripts=mutated)
    try:
        with pytest.raises((AssertionError, ValueError)):
            await check(world)
    finally:
        assert world.redis is not None
        await world.redis.aclose()
        await world.queue.close()
