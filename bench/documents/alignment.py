"""Hints in the pure core, without any model: is the text always plain decoding's, and how many tokens does a pass give?

Traces are made of the pages in docs/: what a big model would read, and the same region by region with the noise of an
OCR (70% of the errors substitute a character, 15% leave one out, 15% add one), in the order of the page. A pass commits
what it accepts of a tree and one token more, as at a target.
"""

import random
import string
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from bench.common import ROOT, say
from slipstream.speculation.hints.draft_tree import TreeLimits
from slipstream.speculation.hints.strategies import HintStrategy, Resynchronising, Windowed
from slipstream.speculation.protocol import ROOT as NO_NODE
from tests.support.hint_schedules import STRATEGIES, random_schedule
from tests.support.hint_schedules import play as play_schedule

VOCAB_SIZE = 6000
REGIONS_A_PAGE = 40
"""Of some 50 tokens each."""
NOISE = (0.0035, 0.01, 0.02, 0.05)
"""Shares of the characters that are wrong."""
BUDGETS = (12, 32, 48)
DEPTH = 32
LEAST_RATIO, RATIO_BUDGET, RATIO_NOISE = 1.8, 32, (0.01, 0.02)
"""What `hints` is to give of the tokens of a pass that `hsd` gives, at so many rows and this noise."""
SLOPES = (0.02, 0.05, 0.1)
"""T_p(k) = 1 + slope k: what a row costs in plain passes."""

# -- identity ---------------------------------------------------------------------------------------------------------


def measure_identity(count: int, seed: int) -> dict[str, Any]:
    """Plays schedules of hints: any number of them, true, noisy, lying or broken ones, at any time, under all limits,
    greedy and sampled."""
    order = random.Random(seed)
    same = dict.fromkeys(STRATEGIES, 0)
    total = dict.fromkeys(STRATEGIES, 0)
    tokens = passes = 0
    for number in range(count):
        schedule = random_schedule(order)
        played = play_schedule(schedule)
        total[schedule.strategy] += 1
        same[schedule.strategy] += played.is_plain
        tokens, passes = tokens + len(played.text), passes + played.num_passes
        if number % 2000 == 1999:
            say(f"identity: {sum(same.values())} of {number + 1} schedules give plain decoding's text")
    shares = {name: f"{same[name]}/{total[name]}" for name in STRATEGIES}
    return {"identical": f"{sum(same.values())}/{count}", "by_method": shares, "tokens_a_pass": tokens / passes}


# -- traces -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Page:
    """What a target reads, and what it is told of it before, as token ids."""

    text: list[int]
    regions: list[list[int]]


class Traces:
    """Pages of the repository's own documents, in a word-piece vocabulary that is made from them."""

    def __init__(self, num_pages: int) -> None:
        documents = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
        self._tokenizer = Tokenizer(models.BPE())
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, show_progress=False, initial_alphabet=alphabet)
        self._tokenizer.train_from_iterator(documents, trainer)
        regions = [region for document in documents for region in document.split("\n\n") if region.strip()]
        pages = [regions[first : first + REGIONS_A_PAGE] for first in range(0, len(regions), REGIONS_A_PAGE)]
        self._pages = pages[:num_pages]

    def pages(self, noise: float) -> Iterator[Page]:
        """All pages, with so many of their characters wrong in the drafts."""
        order = random.Random(1)
        for page in self._pages:
            drafts = [
                ("\n\n" if number else "") + add_noise(region, noise, order) for number, region in enumerate(page)
            ]
            yield Page(self._encode("\n\n".join(page)), [self._encode(draft) for draft in drafts])

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text).ids
        return token_ids


def add_noise(text: str, share: float, order: random.Random) -> str:
    """The text with this share of its characters wrong."""
    noisy: list[str] = []
    for character in text:
        if order.random() >= share:
            noisy.append(character)
            continue
        kind = order.random()
        if kind < 0.7:
            noisy.append(order.choice(string.ascii_lowercase))
        elif kind >= 0.85:
            noisy += [character, order.choice(string.ascii_lowercase)]
    return "".join(noisy)


# -- tokens a pass ----------------------------------------------------------------------------------------------------


@dataclass
class Count:
    """Passes over some pages."""

    tokens: int = 0
    passes: int = 0
    rows: int = 0

    def row(self) -> dict[str, float]:
        return {"tokens_a_pass": round(self.tokens / self.passes, 2), "rows_a_pass": round(self.rows / self.passes, 1)}


def read(strategy: HintStrategy, text: Sequence[int], limits: TreeLimits, count: Count) -> None:
    """Reads a text along, as a target that has its first token writes it."""
    strategy.commit(text[:1])
    position = 1
    while position < len(text):
        tree = strategy.propose(limits)
        end, node = position, NO_NODE
        while tree is not None and end < len(text) - 1 and (child := tree.child(node, text[end])) is not None:
            end, node = end + 1, child
        strategy.commit(text[position : end + 1])
        count.tokens += end + 1 - position
        count.passes += 1
        count.rows += len(tree) if tree is not None else 0
        position = end + 1


def read_pages(
    pages: Sequence[Page], make: Callable[[int], HintStrategy], limits: TreeLimits, *, others: bool = False
) -> Count:
    """`others`: each page is told the regions of the next one, which are no help."""
    count = Count()
    for number, page in enumerate(pages):
        strategy = make(VOCAB_SIZE)
        for region in pages[(number + others) % len(pages)].regions:
            strategy.add(region)
        read(strategy, page.text, limits, count)
    return count


def measure_alignment(num_pages: int) -> dict[str, Any]:
    """Tokens and rows of a pass by noise, method and row budget; what hints of another page cost; seconds of a tree."""
    traces = Traces(num_pages)
    rows: list[dict[str, Any]] = []
    for noise in NOISE:
        pages = list(traces.pages(noise))
        for budget in BUDGETS:
            limits = TreeLimits(DEPTH, budget)
            paper, ours = (read_pages(pages, make, limits) for make in (Windowed, Resynchronising))
            found = {"cer": noise, "budget": budget, "hsd": paper.row(), "hints": ours.row()}
            found["ratio"] = round(ours.tokens / ours.passes / (paper.tokens / paper.passes), 2)
            rows.append(found)
            say(f"noise {noise:.2%}, {budget} rows: {found}")
    least = min(row["ratio"] for row in rows if row["cer"] in RATIO_NOISE and row["budget"] == RATIO_BUDGET)
    return {"rows": rows, "least_ratio": least, "of_no_use": _of_no_use(list(traces.pages(0.0)))} | _tree_s(pages)


def _of_no_use(pages: Sequence[Page]) -> list[dict[str, Any]]:
    """Speed against plain decoding where every hint is of another page, computed from T_p(k)."""
    found = []
    for slope in SLOPES:
        limits = TreeLimits(DEPTH, max(BUDGETS), lambda rows, slope=slope: 1.0 + slope * rows)  # type: ignore[misc]
        row: dict[str, Any] = {"row_cost": slope}
        for name, make in (("hsd", Windowed), ("hints", Resynchronising)):
            flat = TreeLimits(DEPTH, max(BUDGETS)) if name == "hsd" else limits
            count = read_pages(pages, make, flat, others=True)
            row[name] = round(count.tokens / (count.passes + slope * count.rows), 3)
        found.append(row)
    return found


def _tree_s(pages: Sequence[Page]) -> dict[str, float]:
    """Seconds of alignment a pass, in this process."""
    found = {}
    for name, make in (("hsd", Windowed), ("hints", Resynchronising)):
        started = time.perf_counter()
        count = read_pages(pages[:2], make, TreeLimits(DEPTH, max(BUDGETS)))
        found[f"{name}_align_s"] = round((time.perf_counter() - started) / count.passes, 6)
    return found
