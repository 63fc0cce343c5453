"""How long a question takes over very many texts, and whether the answers are right.

The texts are made up: words of a vocabulary with the frequencies of natural language (Zipf), and a sentence of the
pocket world in each, so that there are words in every fifth text and words in one. Each question is asked once, on an
index that was opened before; a part of them is answered by plain Python too.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import say
from bench.tables import print_rows
from slipstream.archive.passages import Passage
from slipstream.archive.text_index import RANKED, TextIndex, build_index, parse_question
from training.world import COLOURS, MOTIONS, SHAPES, SIZES

VOCABULARY = 50_000
SEGMENT_S = 10.0
SEGMENTS_A_FILM = 360
WORDS_A_TEXT = 24
CHECKED = 20_000
"""Of the first texts, those that plain Python looks through."""
SLOWEST = 5


async def run_search(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `search`."""
    with tempfile.TemporaryDirectory(prefix="slipstream-search-") as folder:
        path = Path(folder) / "texts.index"
        began = time.monotonic()
        build_index(path, _passages(given.texts, given.seed))
        built_s = time.monotonic() - began
        say(f"{given.texts:,} texts in {built_s:.0f} s, {path.stat().st_size / 1e6:.0f} MB")
        with TextIndex(path) as index:
            rows = _ask(index, _questions(given.questions, given.seed))
        differing = _check(Path(folder), given.seed)
    times_ms = np.array([row["ms"] for row in rows])
    print_rows("search: the slowest questions", sorted(rows, key=lambda row: -row["ms"])[:SLOWEST])
    p50, p95 = np.percentile(times_ms, [50, 95])
    return {
        "texts": given.texts,
        "questions": len(rows),
        "built_s": round(built_s, 1),
        "p50_ms": round(float(p50), 2),
        "search_p95_ms": round(float(p95), 2),
        "p95_processor_ms": round(float(np.percentile([row["cpu_ms"] for row in rows], 95)), 2),
        "longest_ms": round(float(times_ms.max()), 2),
        "too_many_to_rank": sum(row["found"] > RANKED for row in rows),
        "differing": differing,
    }


def _words() -> tuple[list[str], list[float]]:
    """A vocabulary, and how often its words are, as running sums."""
    syllables = [first + second for first in "bdfgklmnprstv" for second in ("a", "e", "i", "o", "u", "an", "or", "is")]
    number = len(syllables)
    words = [
        syllables[n % number] + syllables[n // number % number] + syllables[n // number**2 % number]
        for n in range(VOCABULARY)
    ]
    return words, list(accumulate(1 / (n + 3) for n in range(VOCABULARY)))


def _passages(num_texts: int, seed: int) -> Iterator[Passage]:
    chance = random.Random(seed)
    words, weights = _words()
    for number in range(num_texts):
        film, segment = divmod(number, SEGMENTS_A_FILM)
        said = " ".join(chance.choices(words, cum_weights=weights, k=WORDS_A_TEXT))
        text = f"A {_subject(chance)} {chance.choice(MOTIONS)} beside a {_subject(chance)}. {said}."
        start_s = segment * SEGMENT_S
        yield Passage(f"film-{film}.mkv", f"/films/{film}.mkv", text, start_s, start_s + SEGMENT_S, is_segment=True)


def _subject(chance: random.Random) -> str:
    return f"{chance.choice(list(SIZES))} {chance.choice(list(COLOURS))} {chance.choice(list(SHAPES))}"


def _questions(number: int, seed: int) -> list[str]:
    """Of all kinds in equal parts: frequent words, rare ones, both, in a row, beginnings, words that must not be."""
    chance = random.Random(seed + 1)
    words, weights = _words()

    def word() -> str:
        return chance.choices(words, cum_weights=weights)[0]

    kinds = (
        lambda: f"{chance.choice(list(COLOURS))} {chance.choice(list(SHAPES))}",
        lambda: word(),
        lambda: chance.choice(words),
        lambda: f"{word()} {word()} {word()}",
        lambda: f'"{_subject(chance)}"',
        lambda: f"{chance.choice(list(COLOURS))} {chance.choice(words)}",
        lambda: f"{word()[:3]}*",
        lambda: f"{chance.choice(list(SHAPES))} -{chance.choice(list(COLOURS))} -{word()}",
        lambda: f"{words[0]} {words[1]} {words[2]} {chance.choice(words)}",
        lambda: f'"{words[0]} {words[1]}"',
    )
    return [kinds[place % len(kinds)]() for place in range(number)]


def _ask(index: TextIndex, questions: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for question in questions:
        began, began_cpu = time.perf_counter(), time.process_time()
        found = index.search(parse_question(question), 20)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        rows.append({"question": question, "found": found.num_ranked, "ms": 1000 * seconds, "cpu_ms": 1000 * cpu_s})
    return rows


def _check(folder: Path, seed: int) -> int:
    """How many questions of two words have other answers than plain Python gives, over a part of the texts."""
    passages = list(_passages(CHECKED, seed))
    build_index(folder / "part.index", passages)
    words, _ = _words()
    chance = random.Random(seed + 2)
    differing = 0
    with TextIndex(folder / "part.index") as index:
        for _ in range(50):
            asked = {chance.choice(words[:300]), chance.choice(words[300:3000])}
            there = [one for one in passages if asked <= set(one.text.lower().replace(".", "").split())]
            found = index.search(parse_question(" ".join(asked)), RANKED)
            # Plurals may be found, too; all that has the words must be.
            differing += not set(there) <= set(found.passages)
    return differing
