"""The lines that one reads to add something are as many as `docs/extending.md` says, and its family is the one here."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
COMMANDS = dict(re.findall(r"^    wc -l (.+?) +# (.+)$", PAGE, re.MULTILINE))
ROW = re.compile(r"^\| \[(.+?)\]\(#.+\| ([\d,]+) \(.+\) \|$", re.MULTILINE)


def num_lines(files: str) -> int:
    """Of files as a shell would expand them: one group of braces in a word at most."""
    words = []
    for word in files.split():
        before, _, group = word.partition("{")
        inner, _, after = group.partition("}")
        words += [f"{before}{name}{after}" for name in inner.split(",")] if group else [word]
    return sum(len((ROOT / word).read_text().splitlines()) for word in words)


def test_the_table() -> None:
    counted = {name: num_lines(files) for files, name in COMMANDS.items()}
    said = {name: int(lines.replace(",", "")) for name, lines in ROW.findall(PAGE)}
    assert len(counted) == 5
    assert said == counted


def test_the_family() -> None:
    name = "families/qwen2_vl.py"
    (text,) = re.findall(rf"`slipstream/{name}`.*?:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert text == (ROOT / "slipstream" / name).read_text()
