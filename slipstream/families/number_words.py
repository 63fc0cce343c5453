"""Numbers in English words, as the package `num2words` writes them, which upstream's SmolVLM prompts are made with."""

# fmt: off
_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
_TENS = (
    "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
)
# fmt: on


def number_words(number: int) -> str:
    """0 to 999,999: "one thousand, two hundred and thirty-four"."""
    if number < 100:
        return _below_hundred(number)
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    many, rest = divmod(number, size)
    words = f"{number_words(many)} {name}"
    if not rest:
        return words
    return f"{words}{' and' if rest < 100 else ','} {number_words(rest)}"


def _below_hundred(number: int) -> str:
    if number < 20:
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")
