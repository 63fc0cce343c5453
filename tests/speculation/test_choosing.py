"""Which of several services takes a caption: the rules, over any figures; and many gateways that see the same ones."""

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from slipstream.service_info import ServiceLoad
from slipstream.speculation.placement import Candidate, choose_draft, choose_target, with_room

MIB = 2**20
IDLE = ServiceLoad(max_sessions=16, kv_budget_bytes=1024 * MIB)
randoms = st.integers(0, 2**32).map(Random)


@st.composite
def loads(draw: st.DrawFn) -> ServiceLoad:
    if draw(st.booleans()) and draw(st.booleans()):
        return ServiceLoad()  # of a release that does not say
    most, budget = draw(st.integers(1, 64)), draw(st.integers(1, 2**40))
    return ServiceLoad(
        draw(st.integers(0, most)), most, draw(st.integers(0, 9)), draw(st.integers(0, budget)), budget
    )  # fmt: skip


candidates = st.lists(st.builds(Candidate, loads(), st.integers(0, 20), st.booleans()), min_size=1, max_size=8)


def free_bytes(one: Candidate) -> int:
    return one.load.kv_budget_bytes - one.load.kv_bytes


@given(candidates, randoms)
def test_one_that_has_room_comes_before_all_that_have_none(those: list[Candidate], random: Random) -> None:
    roomy = with_room(those)
    for choose in (choose_target, choose_draft):
        assert choose(those, random) in (roomy or range(len(those)))
    for index, one in enumerate(those):
        if one.load.max_sessions:
            is_full = one.load.sessions + one.placed >= one.load.max_sessions or one.load.queued > 0
            assert not (is_full and index in roomy)


@given(candidates, randoms)
def test_who_has_the_prefill_is_taken_while_it_has_room(those: list[Candidate], random: Random) -> None:
    holders = [index for index in with_room(those) if those[index].holds_prefill]
    if holders:
        assert choose_target(those, random) in holders


@given(st.lists(st.integers(0, 1023), min_size=2, max_size=8), randoms)
def test_the_most_free_memory_wins(used_mib: list[int], random: Random) -> None:
    """Among targets with places, each caption of one MiB."""
    those = [Candidate(replace(IDLE, sessions=1, kv_bytes=used * MIB)) for used in used_mib]
    chosen = those[choose_target(those, random)]
    a_caption = max(1, sum(used_mib) * MIB // len(those))
    assert free_bytes(chosen) > max(map(free_bytes, those)) - a_caption or not with_room(those)


@given(st.lists(st.integers(0, 15), min_size=1, max_size=8), randoms)
def test_the_least_work_wins_at_drafts(sessions: list[int], random: Random) -> None:
    those = [Candidate(replace(IDLE, sessions=number)) for number in sessions]
    assert sessions[choose_draft(those, random)] == min(sessions)


@given(st.integers(2, 8), st.integers(1, 60), randoms)
def test_what_one_gateway_sends_at_once_is_level(number: int, captions: int, random: Random) -> None:
    """Whatever the figures are: they are of before, and what was sent counts in addition."""
    loads = [replace(IDLE, max_sessions=captions)] * number
    for choose in (choose_target, choose_draft):
        placed = [0] * number
        for _ in range(captions):
            placed[choose([Candidate(*pair) for pair in zip(loads, placed, strict=True)], random)] += 1
        assert max(placed) - min(placed) <= 1


def test_chance_decides_evenly_between_equals() -> None:
    random = Random(5)
    for choose in (choose_target, choose_draft):
        counts = Counter(choose([Candidate(IDLE)] * 4, random) for _ in range(4000))
        assert all(900 < counts[index] < 1100 for index in range(4))


def test_gateways_that_see_the_same_figures_are_no_herd() -> None:
    """One of 16 targets is a little emptier than the others. Who looks at all sends all captions there; of two that are
    drawn at random it is one in an eighth of the cases."""
    busy = Candidate(replace(IDLE, sessions=1, kv_bytes=2 * MIB))
    those, random = [*[busy] * 15, Candidate(IDLE)], Random(7)
    assert {choose_target(those, random) for _ in range(64)} == {15}
    counts: Counter[int] = Counter()
    for _ in range(6400):
        few = random.sample(range(16), 2)
        counts[few[choose_target([those[index] for index in few], random)]] += 1
    assert counts.most_common(1)[0][0] == 15 and 700 < counts[15] < 900
    assert all(250 < counts[index] < 500 for index in range(15))
