"""What a draft costs or saves over many short captions, when the gate remembers from one to the next.

In simulated time: the real pipeline, gate, cost model and book of captions, at the times of the pocket pair on a CPU
and of the papers' devices. Every draft captions three times: with no gate, with a gate that forgets after each caption,
and with the book that the gateway keeps. Exit status 1 when a bound did not hold; `broken` names it.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.common import make_parser
from bench.output import finish
from bench.replay.device_times import load_device_times
from bench.replay.rows import TABLES
from bench.simulate import working_points
from bench.simulator import SimulationInput, draw_agreement, play
from slipstream.speculation.caption_book import CaptionBook, Kind, Opening, Start
from slipstream.speculation.gate import Gate
from slipstream.speculation.pacing import CostModel, get_policy

BAD_LIMIT, FIRST_LIMIT = 1.02, 1.05
"""Of plain decoding's time: what a bad draft may take over all captions, and in the first."""
GOOD_LIMIT = 1.01
"""Of the time with a gate that forgets: what a good draft may take with the book."""
NOTICED_WITHIN = {"becomes good": 10, "becomes bad": 8}
"""Captions after which a draft that has changed is taken up again, or left alone."""
MAX_WINDOW, ALPHA, PAPER_MESSAGE_S = 24, 0.9, 0.5e-3
KIND = Kind(size=0, settings=0, load=1, prompt="")

SetupOf = Callable[[int], SimulationInput]
"""The caption of that number."""


# -- drafts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafts:
    """The cases by what is asked of them."""

    bad: dict[str, SetupOf]
    good: dict[str, SetupOf]
    changing: dict[str, SetupOf]


def make_drafts(num_captions: int, num_tokens: int, seed: int) -> Drafts:
    """Five bad drafts, five good ones, and two that change half way through the captions."""
    pocket = replace(working_points()["cpu tau=0.9"], policy=get_policy("self_clocked"))
    pocket = replace(pocket, num_tokens=num_tokens, max_window=MAX_WINDOW)

    def of(setup: SimulationInput, **changes: Any) -> SetupOf:
        return lambda number: replace(setup, **changes, seed=seed + number)

    def papers(name: str) -> SetupOf:
        target, draft = (load_device_times(str(TABLES / f"{name}.json"), role, 1.0) for role in ("target", "draft"))
        times: dict[str, Any] = {"target_pass_s": lambda window_len: target.pass_s(window_len + 1)}
        return of(pocket, tau=0.8, message_s=PAPER_MESSAGE_S, draft_pass_s=draft.pass_s(ALPHA), **times)

    good, nonsense, half = of(pocket, tau=0.93), of(pocket, tau=0.0), num_captions // 2
    return Drafts(
        bad={
            "nonsense": nonsense,
            "slow": of(pocket, tau=0.93, draft_pass_s=0.04),
            "weak": of(pocket, tau=0.3),
            "turns bad": lambda number: _turning(good(number), num_tokens // 8),
            "steep": of(pocket, tau=0.6, draft_pass_s=0.01, target_pass_s=_steep_pass_s),
        },
        good={
            "pocket, tau .93": good,
            "pocket, tau .8": of(pocket, tau=0.8),
            **{f"{name}, tau .8": papers(name) for name in ("7b-72b", "7b-32b", "0.5b-7b")},
        },
        changing={
            "becomes good": lambda number: (nonsense if number < half else good)(number),
            "becomes bad": lambda number: (good if number < half else nonsense)(number),
        },
    )


def _steep_pass_s(window_len: int) -> float:
    """A pair with real language on a CPU: c of 3, and every row of a window costs."""
    return 0.03 * (1 + (0.6 + 0.15 * window_len if window_len else 0))


def _turning(setup: SimulationInput, turns_at: int) -> SimulationInput:
    agreement = draw_agreement(setup)
    return replace(setup, agreement=tuple(agrees and place < turns_at for place, agrees in enumerate(agreement)))


# -- captions in a row ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Captions one after the other, in one process that knows nothing at first."""

    ratios: tuple[float, ...]
    """Seconds of each over plain decoding's."""
    starts: tuple[Start, ...]

    @property
    def mean(self) -> float:
        return sum(self.ratios) / len(self.ratios)


def play_series(setup_of: SetupOf, num_captions: int, *, gate: bool, remembers: bool) -> Series:
    """Captions with the gateway's book; one that does not remember keeps what passes cost, and no more."""
    book, costs = CaptionBook(), CostModel()
    plain_s = play(replace(setup_of(0), policy=None)).seconds
    ratios, starts = [], []
    for number in range(num_captions):
        setup = replace(setup_of(number), gate=gate)
        if remembers:
            opening = book.begin(KIND, CostModel(), gated=gate, max_window=setup.max_window)
        else:
            costs = costs.fork()
            opening = Opening(KIND, Start.ALONE, "", costs, Gate(costs) if gate else None)
        caption = play(replace(setup, policy=None) if opening.start is Start.REST else setup, opening)
        if remembers:
            book.end(opening, setup.num_tokens)
        ratios.append(caption.seconds / plain_s)
        starts.append(opening.start)
    return Series(tuple(ratios), tuple(starts))


def measure(num_captions: int = 100, num_tokens: int = 70, seed: int = 0) -> dict[str, Any]:
    """Rows by draft, and what did not hold."""
    drafts = make_drafts(num_captions, num_tokens, seed)
    bad, good = (
        {name: _row(setup_of, num_captions) for name, setup_of in of.items()} for of in (drafts.bad, drafts.good)
    )
    changing = {name: _changing_row(name, setup_of, num_captions) for name, setup_of in drafts.changing.items()}
    broken = [name for name, row in bad.items() if row["all"] > BAD_LIMIT or row["first"] > FIRST_LIMIT]
    broken += [name for name, row in good.items() if row["all"] > GOOD_LIMIT * row["forgetting"]]
    broken += [name for name, row in changing.items() if row["noticed_after"] > NOTICED_WITHIN[name]]
    shape = {"captions": num_captions, "tokens": num_tokens, "seed": seed}
    return {**shape, "bad": bad, "good": good, "changing": changing, "broken": broken}


def _row(setup_of: SetupOf, num_captions: int) -> dict[str, Any]:
    """`all` and `first` over plain decoding with the book; all of them `forgetting`, and without any gate."""
    book = play_series(setup_of, num_captions, gate=True, remembers=True)
    forgetting = play_series(setup_of, num_captions, gate=True, remembers=False)
    ungated = play_series(setup_of, num_captions, gate=False, remembers=False)
    return {
        "first": round(book.ratios[0], 4),
        "all": round(book.mean, 4),
        "forgetting_first": round(forgetting.ratios[0], 4),
        "forgetting": round(forgetting.mean, 4),
        "ungated": round(ungated.mean, 4),
        "trials": book.starts.count(Start.TRIAL),
        "rests": book.starts.count(Start.REST),
    }


def _changing_row(name: str, setup_of: SetupOf, num_captions: int) -> dict[str, Any]:
    """The same, and how many captions begin after the change before one shows that it was noticed."""
    book, half = play_series(setup_of, num_captions, gate=True, remembers=True), num_captions // 2
    shows = Start.OPEN if name == "becomes good" else Start.REST
    starts = [*book.starts[half:], shows]
    return {"before": book.starts[half - 1], "noticed_after": starts.index(shows)} | _row(setup_of, num_captions)


def main(argv: Sequence[str]) -> None:
    flags: dict[str, Any] = {"captions": 100, "tokens": 70, "seed": 0}
    given = make_parser("gate", "What a draft costs over many short captions.", **flags).parse_args(argv)
    document = measure(given.captions, given.tokens, given.seed)
    columns = ("first", "all", "forgetting_first", "forgetting", "ungated", "trials", "rests", "noticed_after")
    print(f"{'of plain time':20}{''.join(f'{column:>18}' for column in columns)}")
    for sort in ("bad", "good", "changing"):
        for name, row in document[sort].items():
            cells = [str(row.get(column, "-")) for column in columns]
            print(f"{name:20}{''.join(f'{cell:>18}' for cell in cells)}")
    finish("gate", document)
    sys.exit(1 if document["broken"] else 0)
