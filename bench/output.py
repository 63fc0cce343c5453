"""How every program ends: its findings in a file, and what fits of them as JSON on the last line. Knows no program."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import ROOT

FOLDER = ROOT / ".cache" / "bench" / "results"
MAX_LINE_BYTES = 8 * 1024


def finish(name: str, document: Mapping[str, Any], series: Sequence[str] = (), folder: Path = FOLDER) -> None:
    """Writes the document to `<folder>/<name>.json` and prints it, without its series, as the last line.

    Args:
        series: keys of the document that are in the file alone.

    The line is `last_line`'s; "file" in it is where all of the document lies.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document) + "\n")
    short = {key: value for key, value in document.items() if key not in series}
    print(last_line(short | {"file": str(path)}, in_file=series))


def last_line(document: Mapping[str, Any], in_file: Sequence[str] = ()) -> str:
    """One JSON document of at most `MAX_LINE_BYTES`: what is too large goes, the largest value first, and is named by
    "only_in_file"."""
    kept, gone = dict(document), list(in_file)
    while True:
        line = json.dumps(kept | ({"only_in_file": gone} if gone else {}))
        if len(line.encode()) <= MAX_LINE_BYTES:
            return line
        largest = max(kept, key=lambda name: len(json.dumps(kept[name])))
        del kept[largest]
        gone.append(largest)


def kept_document(path: Path) -> dict[str, Any]:
    """A document as `finish` wrote it, or of the output of a run, whose last line names the file."""
    written = path.read_text().splitlines()
    document: dict[str, Any] = json.loads(written[-1])
    return json.loads(Path(document["file"]).read_text()) if "only_in_file" in document else document
