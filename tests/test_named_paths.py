"""Every file that a page, a docstring or a comment names exists; every picture is on a page, and all are small."""

import re
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("", "slipstream", "slipstream/archive", "proto")
"""What a name may be relative to, beside the folder of the file that names it."""
NAMED = re.compile(r"(?<![\w/.~<>{}*$-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|proto|lua|yaml|toml|json|sh|txt))(?![\w/{*<])")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
PICTURE = re.compile(r"!\[[^]]+\]\(([^)]+)\)")
MAX_PICTURES_BYTES = 400_000
PAGES = sorted(path for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md"))
SOURCES = sorted(
    path
    for folder in ("slipstream", "services", "bench", "tests", "training", "examples", "proto", "deploy")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".proto", ".lua", ".yaml"} and "_pb2" not in path.name
)
SOURCE_NAMES = {path.name for path in SOURCES}
MADE_BY_READERS = {
    ".cache/bench/results/NAME.json",
    *(f"slipstream/{name}.py" for name in ("engine/lookup_drafter", "pruning/by_frame")),
}
"""Files that a page tells how to write, or that a run writes."""


def named_paths(path: Path) -> set[str]:
    """What a page says, or a source in words: its docstrings and comments."""
    text = path.read_text()
    if path.suffix == ".py":
        text = "\n".join(re.findall(r'"""(.*?)"""', text, re.DOTALL) + re.findall(r"#\s(.*)", text))
    return {name for name in NAMED.findall(text) if "/" in name or name.endswith(".py")} - MADE_BY_READERS


def exists(name: str, named_in: Path) -> bool:
    if "/" not in name:
        return name in SOURCE_NAMES
    bases = [named_in.parent, named_in.parents[1], *(ROOT / folder for folder in FOLDERS)]
    return any((base / name).exists() for base in bases)


def test_what_is_named_exists() -> None:
    missing = {
        str(path.relative_to(ROOT)): names
        for path in (*PAGES, *SOURCES)
        if (names := [name for name in sorted(named_paths(path)) if not exists(name, path)])
    }
    assert missing == {}


def test_a_name_of_nothing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("See `slipstream/errors.py`, [there](docs/nowhere.md), `gone.py` and https://a.example/x/y.md.")
    assert [name for name in sorted(named_paths(page)) if not exists(name, page)] == ["docs/nowhere.md", "gone.py"]


def places_in(page: Path) -> set[str]:
    """What a link into the page may name: its headings, as GitHub writes them, and marks of its own."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    ]
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)">', text))


def lost_links(pages: list[Path]) -> list[str]:
    return [
        f"{page.name}: {name}#{place}"
        for page in pages
        for name, place in LINK.findall(page.read_text())
        if not (there := page.parent / name if name else page).exists() or place not in places_in(there)
    ]


def test_a_link_leads_to_its_place(tmp_path: Path) -> None:
    assert lost_links(PAGES) == []
    page = tmp_path / "page.md"
    page.write_text(
        "## The `one` place\n[a](#the-one-place), [b](#gone), [c](none.md#here), [d](https://a.example/b#c)"
    )
    assert lost_links([page]) == ["page.md: #gone", "page.md: none.md#here"]


def test_drawings_are_whole() -> None:
    """A browser shows none that is not well formed."""
    drawings = sorted((ROOT / "docs").rglob("*.svg"))
    assert drawings
    for drawing in drawings:
        assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


def test_pictures_are_shown_and_small() -> None:
    shown = {(page.parent / name).resolve() for page in PAGES for name in PICTURE.findall(page.read_text())}
    there = {path for path in (ROOT / "docs").rglob("*") if path.suffix in {".svg", ".png", ".jpg", ".gif"}}
    assert shown == there
    assert 0 < sum(path.stat().st_size for path in there) <= MAX_PICTURES_BYTES
