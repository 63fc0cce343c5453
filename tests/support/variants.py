"""Which variants of a test are left to `make long`: `some` says it of one parameter's values, `one_in` of combinations.

What stays in `make test` is the same in every run, and no variant's id depends on it.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """Values of one parameter, all but those to keep with the mark `long`."""
    listed = list(values)
    assert set(keep) < set(listed), f"{set(keep) - set(listed) or 'all'} cannot be kept"
    return [value if value in keep else pytest.param(value, marks=pytest.mark.long) for value in listed]


def one_in(number: int, *parameters: str) -> pytest.MarkDecorator:
    """Keeps one of so many combinations: those whose places, each among its parameter's values, add up to a multiple.

    Where `number` is the length of one of two lists, each value of the other one stays once; of a single list every
    `number`-th stays. A parameter may be a fixture's; of several that are given together one is named, whose values all
    differ. Places are counted among what is collected, so a variant that is asked for by its id runs without `-m`.
    """
    return pytest.mark.one_in(number, parameters)


def leave_to_long(items: Iterable[pytest.Item]) -> None:
    """Gives the mark `long` to what `one_in` does not keep of these tests, which are all that their files have."""
    places: dict[tuple[Any, str], dict[int, int]] = {}
    for item in items:
        for mark in item.iter_markers("one_in"):
            number, parameters = mark.args
            assert isinstance(item, pytest.Function)
            total = 0
            for parameter in parameters:
                seen = places.setdefault((item.function, parameter), {})
                total += seen.setdefault(id(item.callspec.params[parameter]), len(seen))
            if total % number:
                item.add_marker(pytest.mark.long)
