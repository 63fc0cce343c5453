"""The bench of hints counts what it says: noise, passes, identity, and what it calls broken."""

import asyncio
import random
from pathlib import Path

import pytest

from bench.common import MODELS, PROMPT, held_out_clips
from bench.documents import resubmitted
from bench.documents.alignment import Count, add_noise, measure_identity, read
from bench.documents.program import HOLDS
from bench.documents.recaption import PROMISED, VARIANTS
from bench.documents.resubmitted import WAYS, measure_resubmitted
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
    archive = [{"way": way, "identical": "2/2", "decoding_speedup": 2.5, "hinted": "2/2"} for way in WAYS]
    found = {"rows": rows, "archive": archive}
    assert HOLDS["recaption"](found)
    for name in PROMISED:
        slow = [*rows, {"hints": name, "identical": "2/2", "decoding_speedup": 1.9}]
        assert not HOLDS["recaption"](found | {"rows": slow})
    assert not HOLDS["recaption"](found | {"rows": [rows[0] | {"identical": "1/2"}, *rows[1:]]})
    plain, hinted = archive
    for worse in ({"identical": "1/2"}, {"decoding_speedup": 1.9}, {"hinted": "1/2"}):
        assert not HOLDS["recaption"](found | {"archive": [plain, hinted | worse]})
    assert HOLDS["recaption"](found | {"archive": [plain | {"decoding_speedup": 1.0, "hinted": "0/2"}, hinted]})


@pytest.mark.long
def test_the_archive_is_captioned_again_by_its_own_commands() -> None:
    """With the shipped weights in both places: their texts are the same, and so their hints are true."""
    clips = held_out_clips(2)
    words = ("--prompt", PROMPT, "--frames", "8", "--max-new-tokens", "48")
    plain, hinted = asyncio.run(measure_resubmitted(MODELS["target"], MODELS["target"], clips, words, 1))
    assert (plain["way"], plain["identical"], plain["hinted"], plain["decoding_speedup"]) == ("plain", "2/2", "0/2", 1)
    assert (hinted["way"], hinted["identical"], hinted["hinted"]) == ("--hints-from", "2/2", "2/2")
    assert plain["tokens_a_pass"] == 1


def test_a_newer_checkpoint_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resubmitted, "CLIP_FOLDER", tmp_path)
    trained: list[tuple[str, ...]] = []
    monkeypatch.setattr(resubmitted.subprocess, "run", lambda words, **given: trained.append(words))
    (made,) = {resubmitted.newer_checkpoint(), resubmitted.newer_checkpoint()}
    assert len(trained) == 1 and trained[0][-1].endswith(".unfinished")
    assert (made / "model.safetensors").read_bytes() == (MODELS["target"] / "model.safetensors").read_bytes()
