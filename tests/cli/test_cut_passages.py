"""Clips of what was found: a film that ends the cutter costs no other film its clip, and what is not cut at all."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.archive.passages import Passage
from slipstream.cli.archive import clips
from slipstream.cli.archive.clips import cut_passages
from slipstream.errors import ObjectUnavailable, UnreadableVideo
from slipstream.objects.store import ObjectFacts, ObjectUrl
from slipstream.video.clip_process import Clip


class Cutter(SimpleNamespace):
    """One that films can end."""

    is_alive = True

    async def __aenter__(self) -> "Cutter":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.is_alive = False


async def test_behind_a_film_that_ends_the_cutter_the_others_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cutters: list[Cutter] = []

    def start() -> Cutter:
        cutters.append(Cutter())
        return cutters[-1]

    async def cut(cutter: Cutter, passage: Passage, folder: Path, cache: Any) -> Clip:
        assert cutter.is_alive
        if passage.custom_id == "torn":
            raise UnreadableVideo("it is damaged")
        if passage.custom_id == "slow":
            cutter.is_alive = False
            raise ObjectUnavailable("too slow")
        return Clip(folder / passage.custom_id, 1, passage.start_s)

    monkeypatch.setattr(clips, "ClipCutter", start)
    monkeypatch.setattr(clips, "_cut", cut)
    names = ("a", "torn", "slow", "b", "slow")
    found = await cut_passages([Passage(name, f"{name}.mp4", "a text", 0.0, 1.0) for name in names], tmp_path)
    assert {passage.custom_id for passage in found} == {"a", "b"} and len(cutters) == 2
    told = capsys.readouterr().err
    assert told.count("no clip: ") == 3 and told.count("no clip: too slow") == 2


async def test_an_object_without_an_entity_tag_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No range of it would be known to be of the same film as the one before."""

    async def facts(url: ObjectUrl) -> ObjectFacts:
        return ObjectFacts(url, 9_000_000, "")

    monkeypatch.setattr(clips, "ClipCutter", Cutter)
    monkeypatch.setattr(clips, "blocking_store", lambda root: SimpleNamespace(facts=facts))
    passage = Passage("a", "s3://films/a.mp4", "a text", 0.0, 1.0, is_segment=True)
    assert await cut_passages([passage], tmp_path) == {}
    assert "no clip: s3://films/a.mp4 has no entity tag" in capsys.readouterr().err
