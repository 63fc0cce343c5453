"""Size and shape of the code, counted; with `--walk` also the files that one caption crosses.

Reads source, and imports nothing of the checkout that it counts; so the same program measures an older one.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from bench.common import ROOT as TREE
from bench.common import make_parser
from bench.output import last_line
from tests.support.house import PRODUCT, Module, read_house, read_modules
from tests.support.walk import measure

AREAS = {"product": PRODUCT, "bench": ("bench",), "tests": ("tests",), "training": ("training",)}
LONG_FILE, LONG_FUNCTION = 400, 60
"""Lines; longer ones are named."""
WIRE_TYPE = re.compile(r"(.*\.)?\w+_pb2(_grpc)?")
GRPC = re.compile(r"grpc\w*(\..*)?")
MANY = 12
"""Names that are printed of a long list."""


def sizes(modules: Sequence[Module]) -> dict[str, Any]:
    """Modules are counted without `__init__`, which only says that a folder is a package; lines with it."""
    files = {str(module.path): module.num_lines for module in modules if not module.is_package}
    functions = {name: lines for module in modules for name, lines in module.functions.items()}
    return {
        "modules": len(files),
        "with_init": len(modules),
        "lines": sum(module.num_lines for module in modules),
        "file_lines": spread(list(files.values())),
        "function_lines": spread(list(functions.values())),
        "long_files": sorted(name for name, lines in files.items() if lines > LONG_FILE),
        "long_functions": sorted(name for name, lines in functions.items() if lines > LONG_FUNCTION),
    }


def spread(values: Sequence[int]) -> dict[str, int]:
    """Median, ninth decile and largest of some numbers."""
    if len(values) < 2:
        return {"p50": sum(values), "p90": sum(values), "max": sum(values)}
    deciles = quantiles(values, n=10, method="inclusive")
    return {"p50": round(deciles[4]), "p90": round(deciles[8]), "max": max(values)}


def make_document(tree: Path) -> dict[str, Any]:
    house = read_house(tree)
    return {
        "areas": {area: sizes(read_modules(tree, folders)) for area, folders in AREAS.items()},
        "imports_pb2": len(house.importing(WIRE_TYPE)),
        "imports_grpc": len(house.importing(GRPC)),
        "imports_wire": len({*house.importing(WIRE_TYPE), *house.importing(GRPC)}),
        "cycle": house.cycle,
        "repeated_files": house.repeated_files,
        "ambiguous_classes": house.ambiguous_classes,
    }


def show(document: Mapping[str, Any]) -> None:
    print(f"{'':10}{'modules':>8}{'+init':>7}{'lines':>8}   {'file p50/p90/max':<18}{'function p50/p90/max':<21}")
    for area, found in document["areas"].items():
        files, functions = ("/".join(map(str, found[key].values())) for key in ("file_lines", "function_lines"))
        print(f"{area:10}{found['modules']:>8}{found['with_init']:>7}{found['lines']:>8}   {files:<18}{functions:<21}")
    for area, found in document["areas"].items():
        for key, limit in (("long_files", LONG_FILE), ("long_functions", LONG_FUNCTION)):
            if found[key]:
                print(f"{area}: {len(found[key])} {key.replace('_', ' ')} (> {limit} lines): {_some(found[key])}")
    print(f"files that import _pb2: {document['imports_pb2']}, grpc: {document['imports_grpc']}")
    print(f"files that import either: {document['imports_wire']}")
    print(f"import cycle: {document['cycle'] or 'none'}")
    for key in ("repeated_files", "ambiguous_classes"):
        print(f"{key.replace('_', ' ')}: {len(document[key])}: {_some(document[key])}")
    for name, files in document.get("walk", {}).get("files", {}).items():
        print("\n  ".join([f"{name.replace('_', ' ')}: {len(files)} files", *files]))


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:MANY]) + (f" and {len(names) - MANY} more" if len(names) > MANY else "")


def walk_document(tree: Path) -> dict[str, Any]:
    """Runs the pocket pair under the tracer of the tests; under a minute."""
    walk = measure(tree)
    return {
        "counts": walk.counts,
        "files": {"caption": walk.caption, "round": walk.round, "archive_extra": walk.archive_extra},
    }


def main(argv: Sequence[str]) -> None:
    walk = (False, "caption a clip and list the files that this crosses")
    tree = (TREE, "checkout to measure")
    parser = make_parser("house", "The code's size and shape, counted.", tree=tree, walk=walk)
    parser.add_argument("--output", type=Path, help="write the document with all lists into this file, too")
    given = parser.parse_args(argv)
    document = make_document(given.tree)
    if given.walk:
        document["walk"] = walk_document(given.tree)
    show(document)
    if given.output is not None:
        given.output.write_text(json.dumps(document, indent=1) + "\n")
    if given.walk:
        document["walk"] = document["walk"]["counts"]  # the lists are too long for one line
    print(last_line(document))
