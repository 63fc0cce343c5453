"""Text for synthetic pages: listed English words, made-up ones, numbers and punctuation."""

import random
from functools import cache
from itertools import accumulate
from pathlib import Path

_WORDS = Path(__file__).with_name("words.txt")
"""The words of this project's documents and of the language reference that Python carries, the commonest first."""
_ONSETS = "b c d f g h j k l m n p qu r s t v w y z bl br ch cl cr dr fl fr gl gr pl pr sh sl sp st str th tr"
_VOWELS = "a e i o u a e i o ai ea ee ie oa oo ou"
_CODAS = "- - - b ck d f g l ll m n nd ng nt p r rd rn s sh ss st t th x"
"""A dash is none."""
_MONTHS = "January February March April May June July August September October November December"


@cache
def _vocabulary() -> tuple[list[str], list[float]]:
    words = _WORDS.read_text().split()
    return words, list(accumulate((rank + 20) ** -0.7 for rank in range(len(words))))


def _one_of(rng: random.Random, listed: str) -> str:
    return rng.choice(listed.split())


def _made_up(rng: random.Random) -> str:
    return "".join(_syllable(rng) for _ in range(rng.choice((1, 2, 2, 3))))


def _syllable(rng: random.Random) -> str:
    return _one_of(rng, _ONSETS) + _one_of(rng, _VOWELS) + _one_of(rng, _CODAS).strip("-")


def number(rng: random.Random) -> str:
    """A number as documents write one: plain, with a fraction, a share, a sum of money or a year."""
    return rng.choice(
        (
            lambda: str(rng.randint(0, 99)),
            lambda: str(rng.randint(100, 99_999)),
            lambda: f"{rng.uniform(0, 100):.{rng.choice((1, 2))}f}",
            lambda: f"{rng.randint(0, 100)}%",
            lambda: f"${rng.randint(1, 9_999):,}",
            lambda: str(rng.randint(1900, 2030)),
            lambda: f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}",
        )
    )()


def word(rng: random.Random) -> str:
    """A listed word four times of five, else one of syllables; a few are capitalised or in capitals."""
    if rng.random() < 0.8:
        words, weights = _vocabulary()
        chosen = rng.choices(words, cum_weights=weights)[0]
    else:
        chosen = _made_up(rng)
    case = rng.random()
    return chosen.upper() if case < 0.02 else chosen.capitalize() if case < 0.08 else chosen


def words(rng: random.Random, count: int) -> list[str]:
    """`count` words with the punctuation of prose, of which some are numbers or dates; sentences end now and then."""
    made: list[str] = []
    begins = True
    for place in range(count):
        kind = rng.random()
        one = number(rng) if kind < 0.07 else _date(rng) if kind < 0.08 else word(rng)
        one = one[0].upper() + one[1:] if begins else one
        kind = rng.random()
        if kind < 0.03:
            one = f"({one})"
        elif kind < 0.05:
            one = f'"{one}"'
        elif kind < 0.06:
            one = f"{one}'s"
        elif kind < 0.08:
            one = f"{one}-{word(rng)}"
        begins = place == count - 1 or rng.random() < 0.1
        made.append(one + (rng.choice("....?!") if begins else rng.choice(",,,;:") if rng.random() < 0.08 else ""))
    return made


def title(rng: random.Random) -> list[str]:
    """One to four words without punctuation, capitalised alike, perhaps behind a section number."""
    chosen = [word(rng) for _ in range(rng.randint(1, 4))]
    chosen = [one.capitalize() for one in chosen] if rng.random() < 0.5 else [chosen[0].capitalize(), *chosen[1:]]
    return [f"{rng.randint(1, 9)}.{rng.choice(('', rng.randint(1, 9)))}", *chosen] if rng.random() < 0.25 else chosen


def _date(rng: random.Random) -> str:
    return f"{rng.randint(1, 28)} {_one_of(rng, _MONTHS)}"
