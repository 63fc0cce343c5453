"""The bench of hints counts what it says: noise, passes, identity, and what it calls broken."""

import random

from bench.documents.alignment import Count, add_noise, measure_identity, read
from bench.documents.program import HOLDS
from bench.documents.recaption import PROMISED, VARIANTS
from slipstream.speculation.hints.draft_tree import TreeLimits
from slipstream.speculation.hints.strategies import Resynchronising


def test_noise_is_of_the_share_that_was_asked_for() -> None:
    text = "x" * 100_000
    noisy = add_noise(text, 0.02, random.Random(1))
    assert 0.01 < 1 - noisy.count("x") / len(text) < 0.03
    assert add_noise(text, 0.0, random.Random(1)) == text
    assert abs(len(noisy) - len(text)) < 200, "as many are left out as are added"


def test_a_text_is_read_along_to_its_end() -> None:
    text, count = list(range(100)), Count()
    strategy = Resynchronising(1000)
    strategy.add(text)
    read(strategy, text, TreeLimits(9, 9), count)
    assert count.tokens == 99 and count.passes == 10
    lonely = Count()
    read(Resynchronising(1000), text, TreeLimits(9, 9), lonely)
    assert (lonely.tokens, lonely.passes, lonely.rows) == (99, 99, 0)


def test_identity_counts_every_schedule() -> None:
    found = measure_identity(30, seed=2)
    assert found["identical"] == "30/30"
    assert sum(int(share.split("/")[1]) for share in found["by_method"].values()) == 30


def test_what_is_called_broken() -> None:
    assert HOLDS["identity"]({"identical": "10/10"}) and not HOLDS["identity"]({"identical": "9/10"})
    assert not HOLDS["alignment"]({"least_ratio": 1.7})
    rows = [{"hints": name, "identical": "2/2", "decoding_speedup": 2.5} for name in VARIANTS]
    assert HOLDS["recaption"]({"rows": rows})
    for name in PROMISED:
        slow = [*rows, {"hints": name, "identical": "2/2", "decoding_speedup": 1.9}]
        assert not HOLDS["recaption"]({"rows": slow})
    assert not HOLDS["recaption"]({"rows": [rows[0] | {"identical": "1/2"}, *rows[1:]]})
