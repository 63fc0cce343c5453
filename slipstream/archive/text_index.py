"""An index of texts in one SQLite file (FTS5), and what is asked of it.

A question is words, all of which a passage must have; "several words" in a row; a beginning*; and -word for one that it
must not have. Nothing else of FTS5's language reaches it: whatever is typed is a question or a clear error. Words are
compared without case and accents, and a word by itself finds its plural, too, and the other way around. In scripts
whose words no space parts each character is a word, and a question is about characters in a row.

The time of a question is bounded: of more than `RANKED` passages that have all words the first ones in the index's
order are ranked, and the answer says so.
"""

import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from slipstream.archive.passages import Passage
from slipstream.archive.quality import CHARACTER, WORD
from slipstream.errors import InvalidConfig, InvalidRequest

FORMAT = 3
"""Of the file; another one is built anew."""
RANKED = 500
PIECE = 10_000
"""Passages that are written at once."""
MOST_WORDS, LONGEST_QUESTION, LEAST_BEGINNING = 32, 1000, 3
CACHE_KIB = 64 * 1024
_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, said TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE files (number INTEGER PRIMARY KEY, custom_id TEXT NOT NULL, source TEXT NOT NULL);
CREATE TABLE passages (
  number INTEGER PRIMARY KEY, file INTEGER NOT NULL, start_s REAL, end_s REAL, page INTEGER, is_segment INTEGER,
  said TEXT NOT NULL
);
CREATE VIRTUAL TABLE texts USING fts5(
  said, content='passages', content_rowid='number', tokenize='unicode61 remove_diacritics 2', prefix='3'
);
"""
_FIND = """
SELECT texts.rowid, passages.said FROM texts JOIN passages ON passages.number = texts.rowid
WHERE texts MATCH ? ORDER BY texts.rowid LIMIT ?
"""
_READ = """
SELECT custom_id, source, said, start_s, end_s, page, is_segment FROM passages
JOIN files ON files.number = passages.file WHERE passages.number = ?
"""

# -- questions --------------------------------------------------------------------------------------------------------

_PIECES = re.compile(r'(?P<no>-?)(?:"(?P<phrase>[^"]*)"|(?P<word>[^\s"]+))')


@dataclass(frozen=True)
class Question:
    """What was asked, as FTS5 is told it."""

    match: str
    words: tuple[str, ...]
    """Those that are looked for, each once."""
    pattern: re.Pattern[str]
    """Where they are in a text, endings aside."""


def parse_question(text: str) -> Question:
    """Raises `InvalidRequest` that says what is wrong with it."""
    if len(text) > LONGEST_QUESTION or "\0" in text:
        raise InvalidRequest(f"a question has at most {LONGEST_QUESTION} characters, and no NUL")
    if text.count('"') % 2:
        raise InvalidRequest(f"{text!r}: a quotation is not closed; give two quotation marks, or none")
    wanted: list[str] = []
    unwanted: list[str] = []
    words: list[str] = []
    for piece in _PIECES.finditer(text):
        said = piece["phrase"] if piece["phrase"] is not None else piece["word"]
        tokens = WORD.findall(said)
        if not tokens:  # punctuation alone
            continue
        (unwanted if piece["no"] else wanted).append(_match(tokens, said, is_phrase=piece["phrase"] is not None))
        words += [] if piece["no"] else [token.casefold() for token in tokens]
    if not wanted:
        said = "only words that must not be there" if unwanted else "no word"
        raise InvalidRequest(f"{text!r} has {said}; name what is to be found")
    if len(words) + len(unwanted) > MOST_WORDS:
        raise InvalidRequest(f"a question has at most {MOST_WORDS} words")
    match = " AND ".join(wanted)
    beginnings = "|".join(_beginning(word) for word in words)
    return Question(
        f"({match}) NOT ({' OR '.join(unwanted)})" if unwanted else match,
        tuple(dict.fromkeys(words)),
        re.compile(beginnings, re.IGNORECASE),
    )


def _beginning(word: str) -> str:
    """Where the word begins in a text, as a regular expression."""
    return word if CHARACTER.match(word) else rf"\b{re.escape(word.rstrip('s') or word)}"


def _match(tokens: Sequence[str], said: str, *, is_phrase: bool) -> str:
    """For one piece of a question. A word with signs in it, such as "half-open", is its parts in a row, as in texts."""
    in_a_row = '"' + " ".join(tokens) + '"'
    is_character = CHARACTER.match(tokens[-1]) is not None  # which has neither beginning nor plural
    if is_phrase or is_character or (len(tokens) > 1 and not said.endswith("*")):
        return in_a_row
    if said.endswith("*"):
        if len(tokens[-1]) < LEAST_BEGINNING:
            raise InvalidRequest(f"{said!r}: give at least {LEAST_BEGINNING} letters of a word before its *")
        return f"{in_a_row}*"
    (word,) = tokens
    others = [word[:-1]] if len(word) > LEAST_BEGINNING and word.endswith(("s", "S")) else [f"{word}s", f"{word}es"]
    return "(" + " OR ".join(f'"{form}"' for form in (word, *others)) + ")"


# -- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The best passages first."""

    passages: tuple[Passage, ...]
    num_ranked: int
    """That have all the words; of more than `RANKED` the first ones."""

    @property
    def is_all(self) -> bool:
        """Every passage that has the words was ranked."""
        return self.num_ranked <= RANKED


def _rank(question: Question, text: str) -> tuple[float, float]:
    """Smaller is better: the words near each other, then much of the text. Equal ones stay in the index's order."""
    hits = [hit.start() for hit in question.pattern.finditer(text)]
    spans = [late - early for early, late in zip(hits, hits[len(question.words) - 1 :], strict=False)]
    return min(spans, default=len(text)), -len(hits) / len(text)


# -- index ------------------------------------------------------------------------------------------------------------


class TextIndex:
    """An index that is there, to be asked. A context manager."""

    def __init__(self, path: Path) -> None:
        """Raises `InvalidConfig` for a file that is no index of this format."""
        try:
            self._base = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            self._base.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            self._base.execute("PRAGMA trusted_schema = OFF")  # it may be somebody else's file
            self.facts: dict[str, str] = dict(self._base.execute("SELECT name, said FROM facts"))
        except sqlite3.Error as error:
            raise InvalidConfig(f"{path} is no index ({error}); build it by `slipstream archive index`") from None
        if self.facts.get("format") != str(FORMAT):
            self._base.close()
            raise InvalidConfig(f"{path} is an index of another release; build it anew by `slipstream archive index`")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Asks no more."""
        self._base.close()

    def __len__(self) -> int:
        return int(self.facts["passages"])

    @property
    def num_damaged(self) -> int:
        """Lines of what it was made of that could not be read."""
        said = str(self.facts.get("damaged", ""))  # of an index of an earlier release nothing, of a stranger's anything
        return int(said) if said.isdecimal() and len(said) < 20 else 0

    def search(self, question: Question, limit: int) -> Found:
        """At most `limit` passages. Raises `InvalidConfig` where the file turns out to be damaged."""
        try:
            rows = self._base.execute(_FIND, (question.match, RANKED + 1)).fetchall()
        except sqlite3.Error as error:
            raise InvalidConfig(f"the index cannot be read ({error}); build it anew") from None
        best = sorted(rows[:RANKED], key=lambda row: _rank(question, row[1]))[:limit]
        return Found(tuple(_passage_of(self._base.execute(_READ, row[:1]).fetchone()) for row in best), len(rows))


def _passage_of(row: tuple[str, str, str, float, float, int, int]) -> Passage:
    custom_id, source, said, start_s, end_s, page, is_segment = row
    return Passage(custom_id, source, said, start_s, end_s, page, bool(is_segment))


def build_index(
    path: Path, passages: Iterable[Passage], made_of: str = "", num_damaged: Callable[[], int] = lambda: 0
) -> int:
    """Writes an index in the place of `path`, which is whole or as it was before; how many passages it has. `made_of`
    is kept with it, to know later whether it is still true, and so is what `num_damaged` says behind the last passage.

    Raises `InvalidConfig` where it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)
        with closing(sqlite3.connect(part)) as base, _fast_writes(base):
            total = _fill(base, iter(passages))
            facts = {"format": str(FORMAT), "passages": str(total), "made_of": made_of, "damaged": str(num_damaged())}
            base.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
        part.replace(path)
    except (sqlite3.Error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidConfig(f"cannot write the index {path}: {reason}") from None
    finally:
        part.unlink(missing_ok=True)
    return total


@contextmanager
def _fast_writes(base: sqlite3.Connection) -> Iterator[None]:
    """For a file that nobody sees before it is whole: without a journal, and one transaction."""
    base.execute("PRAGMA journal_mode = OFF")
    base.execute("PRAGMA synchronous = OFF")
    base.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    base.executescript(_TABLES)
    with base:
        yield


def _fill(base: sqlite3.Connection, passages: Iterator[Passage]) -> int:
    total, file = 0, 0
    last: tuple[str, str] | None = None
    while piece := list(islice(passages, PIECE)):
        rows = []
        for passage in piece:
            total += 1
            if (named := (passage.custom_id, passage.source)) != last:
                last, file = named, file + 1
                base.execute("INSERT INTO files VALUES (?, ?, ?)", (file, *named))
            times = passage.start_s, passage.end_s, passage.page, passage.is_segment
            rows.append((total, file, *times, passage.text))
        base.executemany("INSERT INTO passages VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        words = ((row[0], CHARACTER.sub(r" \g<0> ", row[-1])) for row in rows)
        base.executemany("INSERT INTO texts (rowid, said) VALUES (?, ?)", words)
    base.execute("INSERT INTO texts (texts) VALUES ('optimize')")
    return total
