"""What is found by its words: questions of any form, answers that plain Python would give, files that are whole or not
there."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive.passages import ExportedPassages, Passage
from slipstream.archive.text_index import RANKED, TextIndex, build_index, parse_question
from slipstream.errors import InvalidConfig, InvalidRequest

WORDS = ("red", "blue", "car", "boat", "rain", "house")
TEXTS = [f"{one} {two}. {three}" for one in WORDS for two in WORDS for three in WORDS]
QUESTIONS = st.lists(st.tuples(st.booleans(), st.sampled_from(WORDS)), min_size=1, max_size=4)
RECORDS = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["custom_id", "source", "text", "kind", "parts", "segment", "start_s", "end_s", "page", "receipt"]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextIndex]:
    path = tmp_path_factory.mktemp("index") / "texts.index"
    assert build_index(path, (Passage(f"{n}", f"/{n}", text) for n, text in enumerate(TEXTS))) == len(TEXTS)
    with TextIndex(path) as opened:
        yield opened


@given(QUESTIONS)
def test_words_are_found_where_they_are(index: TextIndex, words: list[tuple[bool, str]]) -> None:
    wanted = {word for is_wanted, word in words if is_wanted}
    unwanted = {word for is_wanted, word in words if not is_wanted}
    asked = " ".join(word if is_wanted else f"-{word}" for is_wanted, word in words)
    if not wanted:
        with pytest.raises(InvalidRequest, match="must not be there"):
            parse_question(asked)
        return
    there = {
        n
        for n, text in enumerate(TEXTS)
        if wanted <= (said := set(text.replace(".", "").split())) and not unwanted & said
    }
    found = index.search(parse_question(asked), len(TEXTS))
    assert {int(one.custom_id) for one in found.passages} == there
    assert found.num_ranked == len(there) and found.is_all


@given(st.text(max_size=40) | st.text(alphabet="\"*-()^:+{}aé ANDORTNEUL0\0'", max_size=40))
def test_whatever_is_typed_is_a_question_or_a_clear_error(index: TextIndex, text: str) -> None:
    try:
        question = parse_question(text)
    except InvalidRequest:
        return
    assert len(index.search(question, 5).passages) <= 5


def test_words_in_a_row_beginnings_endings_and_accents(tmp_path: Path) -> None:
    texts = ["The Café was closed", "cars are parked", "a closed half-open door", "the red big car", "a big red car"]
    build_index(tmp_path / "i", (Passage(text, "", text) for text in texts))
    with TextIndex(tmp_path / "i") as index:

        def ask(question: str) -> list[str]:
            return [one.custom_id for one in index.search(parse_question(question), 9).passages]

        assert ask("cafe") == texts[:1]
        assert set(ask("CAR")) == {"cars are parked", "a big red car", "the red big car"}
        assert ask('"red car"') == ["a big red car"]
        assert ask("half-open") == ["a closed half-open door"]
        assert ask("par*") == ["cars are parked"]
        assert ask("red car")[0] == "a big red car", "words that are near each other go before others"


@pytest.mark.parametrize(
    ("question", "found"),
    [
        ("猫", ["一只黑猫在跳舞，then it sleeps。", "白い猫が走る"]),
        ("跳舞", ["一只黑猫在跳舞，then it sleeps。"]),
        ("舞跳", []),
        ("黑猫 sleep -走る", ["一只黑猫在跳舞，then it sleeps。"]),
        ("走る*", ["白い猫が走る"]),
        ("고양이", ["고양이가 달린다"]),
        ("วิ่ง", ["แมวกำลังวิ่ง"]),
    ],
)
def test_what_no_space_parts_is_found_by_its_characters_in_a_row(
    tmp_path: Path, question: str, found: list[str]
) -> None:
    texts = ["一只黑猫在跳舞，then it sleeps。", "白い猫が走る", "고양이가 달린다", "แมวกำลังวิ่ง"]
    build_index(tmp_path / "i", (Passage(text, "", text) for text in texts))
    with TextIndex(tmp_path / "i") as index:
        passages = index.search(parse_question(question), 9).passages
    assert sorted(one.custom_id for one in passages) == sorted(found) and all(one.text in texts for one in passages)


def test_of_very_many_texts_the_first_are_ranked_and_the_answer_says_so(tmp_path: Path) -> None:
    build_index(tmp_path / "i", (Passage(str(n), "", "a red car") for n in range(RANKED + 5)))
    with TextIndex(tmp_path / "i") as index:
        found = index.search(parse_question("car"), 3)
    assert not found.is_all and [one.custom_id for one in found.passages] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ('"red', "not closed"),
        ("...", "no word"),
        ("・", "no word"),
        ("", "no word"),
        ("-red", "must not be there"),
        ("re*", "at least 3 letters"),
        ("x" * 1001, "at most 1000"),
        ("red " * 33, "at most 32 words"),
    ],
)
def test_bad_questions_say_what_is_wrong(question: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        parse_question(question)


def test_a_build_that_breaks_off_leaves_the_old_index(tmp_path: Path) -> None:
    path = tmp_path / "i"
    build_index(path, [Passage("old", "", "a red car")])

    def broken() -> Iterator[Passage]:
        yield Passage("new", "", "a blue car")
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        build_index(path, broken())
    with TextIndex(path) as index:
        assert [one.custom_id for one in index.search(parse_question("car"), 9).passages] == ["old"]
    assert [one.name for one in tmp_path.iterdir()] == ["i"]


def test_what_is_no_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no base")
    sqlite3.connect(tmp_path / "other").executescript("CREATE TABLE facts (name, said);").close()
    for name in ("text", "other"):
        with pytest.raises(InvalidConfig, match="slipstream archive index"):
            TextIndex(tmp_path / name)
    with pytest.raises(InvalidConfig, match="cannot write the index"):
        build_index(tmp_path / "none" / "i", [])


def test_passages_have_their_files_and_times() -> None:
    film = {
        "custom_id": "f",
        "source": "/f",
        "kind": "film",
        "parts": [{"segment": 1, "start_s": 4.5, "end_s": 8.0, "text": "said"}, {"segment": 2, "error": "no frame"}],
    }
    video = {"custom_id": "v", "text": "all", "receipt": {"video": {"duration_s": 3.5}}}
    document = {"custom_id": "d", "kind": "document", "parts": [{"page": 2, "text": "page"}]}
    failed = {"custom_id": "e", "text": None, "error": "bad"}
    lines = [json.dumps(one) for one in (film, video, document, failed)]
    export = ExportedPassages([*lines, "{", "3", b"\xff", "\n"])
    assert list(export) == [
        Passage("f", "/f", "said", 4.5, 8.0, is_segment=True),
        Passage("v", "", "all", 0.0, 3.5),
        Passage("d", "", "page", page=2),
    ]
    assert export.num_damaged == 3


@given(RECORDS)
def test_any_line_gives_passages_that_can_be_kept_or_none(record: object) -> None:
    for passage in ExportedPassages([json.dumps(record)]):
        assert passage.text.strip() and passage.text.encode() is not None
        assert passage.start_s <= passage.end_s or passage.page
