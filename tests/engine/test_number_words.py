"""Numbers in words are those of the package that upstream's SmolVLM prompts are made with (num2words 0.5.14)."""

import pytest

from slipstream.families.smolvlm import number_words

STORED = {
    0: "zero",
    9: "nine",
    12: "twelve",
    21: "twenty-one",
    40: "forty",
    100: "one hundred",
    101: "one hundred and one",
    128: "one hundred and twenty-eight",
    300: "three hundred",
    999: "nine hundred and ninety-nine",
    1000: "one thousand",
    1001: "one thousand and one",
    1100: "one thousand, one hundred",
    1234: "one thousand, two hundred and thirty-four",
    4096: "four thousand and ninety-six",
    20_015: "twenty thousand and fifteen",
    123_456: "one hundred and twenty-three thousand, four hundred and fifty-six",
}


@pytest.mark.parametrize("number", STORED)
def test_the_words_are_the_packages(number: int) -> None:
    assert number_words(number) == STORED[number]


def test_the_words_are_the_packages_where_it_is_there() -> None:
    package = pytest.importorskip("num2words")
    assert [number_words(number) for number in range(4097)] == [package.num2words(number) for number in range(4097)]
