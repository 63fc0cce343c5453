"""Subtitles: sentences, their times, both formats, and file names that stay where they belong."""

import posixpath
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive.subtitles import make_cues, safe_name, split_sentences, to_srt, to_vtt

TEXTS = st.text(st.sampled_from("ab é。.!?\n\t<>&-'\")\0\x1b") | st.characters(codec="utf-8"), max_size=60)
NAMES = st.text(st.sampled_from("ab./~ \\:é\0\n") | st.characters(codec="utf-8"), max_size=30)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        ("  \n ", []),
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("It is 3.5 m long. Fine", ["It is 3.5 m long.", "Fine"]),
        ('He says "stop." Then goes.', ['He says "stop."', "Then goes."]),
        ("- a\n- b\n\n- c", ["- a", "- b", "- c"]),
        ("他走。她跑。", ["他走。", "她跑。"]),
        ("At 00:05 a red circle\tappears.", ["At 00:05 a red circle appears."]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@given(TEXTS)
def test_no_word_is_lost(text: str) -> None:
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


@given(TEXTS, st.floats(0, 1e6))
def test_cues_share_out_the_whole_duration(text: str, duration_s: float) -> None:
    cues = make_cues(text, duration_s)
    assert [cue.text for cue in cues] == split_sentences(text)
    if cues:
        assert cues[0].start_ms == 0
        assert cues[-1].end_ms == max(round(duration_s * 1000), len(cues))
    assert all(cue.start_ms < cue.end_ms for cue in cues)
    assert all(before.end_ms == after.start_ms for before, after in pairwise(cues))


def test_times_follow_length() -> None:
    first, second = make_cues("aaaa. bbbbbbbbbbbbbb.", 20.0)
    assert (first.end_ms, second.end_ms) == (5000, 20_000)


def test_vtt() -> None:
    shown = to_vtt("A <b>&c</b> --> d.\nBye\x1b.", 3723.5, 8)
    head, note, first, second = shown.removesuffix("\n").split("\n\n")
    assert head == "WEBVTT"
    assert note.startswith("NOTE One caption of 8 frames")
    assert "approximate" in note
    assert first.splitlines()[1] == "A &lt;b&gt;&amp;c&lt;/b&gt; --&gt; d."
    assert second.splitlines() == [f"{first.splitlines()[0].split(' --> ')[1]} --> 01:02:03.500", "Bye."]


def test_srt() -> None:
    assert to_srt("One --> two. Four.", 2.0) == (
        "1\n00:00:00,000 --> 00:00:01,411\nOne -> two.\n\n2\n00:00:01,411 --> 00:00:02,000\nFour.\n"
    )
    assert to_srt("", 2.0) == ""


@given(TEXTS, st.floats(0, 1e5))
def test_files_are_well_formed(text: str, duration_s: float) -> None:
    count = len(split_sentences(text))
    vtt = to_vtt(text, duration_s, 8)
    assert len(re.findall(r"^\d\d+:\d\d:\d\d\.\d{3} --> \d\d+:\d\d:\d\d\.\d{3}$", vtt, re.MULTILINE)) == count
    assert vtt.count("-->") == count
    assert to_srt(text, duration_s).count("-->") == count


@pytest.mark.parametrize("name", ["a.mp4", "deep/er/b c.mkv", "été/1 (2).mp4"])
def test_harmless_names_stay(name: str) -> None:
    assert safe_name(name, ".vtt") == f"{name}.vtt"


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../../etc/passwd", "/etc/passwd", "a/../../b", "a\0b", "-\n", "x" * 5000, "d/" * 500, "a//b"],
)
def test_no_name_leads_out(name: str) -> None:
    path = safe_name(name, ".srt")
    assert posixpath.normpath(path) == path
    assert not path.startswith(("/", "../", "."))
    assert max(len(part.encode()) for part in path.split("/")) < 256
    assert len(path.encode()) < 2500
    assert path.isprintable()


@given(st.sets(NAMES, max_size=20))
def test_no_two_names_share_a_file_and_none_is_anothers_folder(names: set[str]) -> None:
    paths = {safe_name(name, ".vtt") for name in names}
    assert len(paths) == len(names)
    folders = {folder for path in paths for folder in _folders(path)}
    assert not paths & folders
    assert all(posixpath.normpath(path) == path and not path.startswith(("/", "..")) for path in paths)


def test_a_folder_named_like_a_file() -> None:
    assert _folders(safe_name("a.vtt/b", ".vtt")) == ["a.vtt_"]


def _folders(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: number + 1]) for number in range(len(parts))]
