"""Size and shape of the code, counted; with `--walk` also the files that one caption crosses.

Reads source, and imports nothing of the checkout that it counts; so the same program measures an older one.
"""

import ast
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import quantiles
from typing import Any

from bench.common import ROOT as TREE
from bench.common import make_parser
from bench.output import last_line

PRODUCT = ("slipstream", "services")
AREAS = {"product": PRODUCT, "bench": ("bench",), "tests": ("tests",), "training": ("training",)}
LONG_FILE, LONG_FUNCTION = 400, 60
"""Lines; longer ones are named."""
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
WIRE_TYPE = re.compile(r"(.*\.)?\w+_pb2(_grpc)?")
GRPC = re.compile(r"grpc\w*(\..*)?")
DEFINITION = re.compile(r"^(?:message|enum)\s+(\w+)\s*\{(.*?)^\}", re.MULTILINE | re.DOTALL)
MEMBER = re.compile(r"(\w+)\s*=\s*\d+")
MANY = 12
"""Names that are printed of a long list."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported name: a module, or something in one."""

    name: str
    at_run_time: bool
    """Not for type checkers alone."""


@dataclass(frozen=True)
class Module:
    path: Path
    """Relative to the checkout."""
    source: str

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def num_lines(self) -> int:
        return len(self.source.splitlines())

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def name(self) -> str:
        """Dotted, as the folders say."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if self.is_package else parts)

    @cached_property
    def functions(self) -> Mapping[str, int]:
        found = [node for node in ast.walk(self.syntax) if isinstance(node, Function)]
        return {f"{self.path}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1 for node in found}

    @property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in ast.walk(self.syntax) if isinstance(node, ast.ClassDef)]

    @cached_property
    def imports(self) -> list[Import]:
        """All of them, those inside functions included."""
        return [found for node, at_run_time in _nodes(self.syntax) for found in self._imports(node, at_run_time)]

    def _imports(self, node: ast.AST, at_run_time: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, at_run_time) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = self._base(node)
            yield from (Import(f"{base}.{alias.name}", at_run_time) for alias in node.names)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        parts = package[: len(package) - node.level + 1]
        return ".".join([*parts, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class House:
    """The product's modules by file, and what is asked of them."""

    modules: Sequence[Module]
    messages: Mapping[str, frozenset[str]]
    """What the `.proto` files define, and the names of its fields or values."""

    @cached_property
    def graph(self) -> dict[Path, set[Path]]:
        """What each file imports at run time of the others."""
        known = {name: module.path for module in self.modules for name in _addresses(module.name)}
        graph: dict[Path, set[Path]] = {module.path: set() for module in self.modules}
        for module in self.modules:
            names = (found.name for found in module.imports if found.at_run_time)
            targets = {known.get(name) or known.get(name.rpartition(".")[0]) for name in names}
            graph[module.path] = {path for path in targets if path is not None and path != module.path}
        return graph

    @property
    def cycle(self) -> list[str]:
        """Some files that import each other in a circle, from one of them to itself; empty where there are none."""
        try:
            TopologicalSorter(self.graph).prepare()
        except CycleError as error:
            return list(map(str, error.args[1]))
        return []

    @property
    def repeated_files(self) -> dict[str, int]:
        return _repeated(module.path.name for module in self.modules if not module.path.name.startswith("__"))

    @property
    def ambiguous_classes(self) -> list[str]:
        """Names of two classes, or of a class and of a definition in a `.proto` file whose plain form it is not."""
        classes = [found for module in self.modules for found in module.classes]
        alike = {found.name for found in classes if found.name in self.messages and not self._is_plain_form(found)}
        return sorted({*_repeated(found.name for found in classes), *alike})

    def _is_plain_form(self, found: ast.ClassDef) -> bool:
        """Whether most of the class's members are the definition's: the same thing, on this side of the wire."""
        targets: list[ast.expr] = [node.target for node in found.body if isinstance(node, ast.AnnAssign)]
        targets += [node.targets[0] for node in found.body if isinstance(node, ast.Assign)]
        own = {target.id for target in targets if isinstance(target, ast.Name)}
        theirs = self.messages[found.name]
        shared = {name for name in own if any(member == name or member.endswith(f"_{name}") for member in theirs)}
        return 2 * len(shared) > len(own)

    def importing(self, pattern: re.Pattern[str]) -> list[str]:
        """Files that import something, for type checkers or not, whose name or module matches."""
        return [str(module.path) for module in self.modules if any(_touches(pattern, f.name) for f in module.imports)]


def read_modules(tree: Path, folders: Sequence[str]) -> list[Module]:
    """The files below these folders, each once, whatever links lead there; nothing that a tool generated."""
    paths: dict[Path, Path] = {}
    for folder in folders:
        for parent, _, names in os.walk(tree / folder):
            for name in names:
                if name.endswith(".py") and not GENERATED.search(name):
                    path = Path(parent, name)
                    paths[path.resolve()] = path.relative_to(tree)
    return [Module(path, (tree / path).read_text()) for path in sorted(paths.values())]


def read_house(tree: Path) -> House:
    texts = [path.read_text() for path in (tree / "proto").rglob("*.proto")]
    found = [definition for text in texts for definition in DEFINITION.findall(text)]
    return House(read_modules(tree, PRODUCT), {name: frozenset(MEMBER.findall(body)) for name, body in found})


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


def _nodes(tree: ast.AST, at_run_time: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes, and whether they are run or only read by type checkers."""
    yield tree, at_run_time
    for name, value in ast.iter_fields(tree):
        is_unrun = name == "body" and isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child, at_run_time and not is_unrun)


def _addresses(name: str) -> tuple[str, ...]:
    """The services may also be reached as a part of the package."""
    return (name, f"{PRODUCT[0]}.{name}") if name.split(".")[0] == PRODUCT[1] else (name,)


def _touches(pattern: re.Pattern[str], name: str) -> bool:
    return bool(pattern.fullmatch(name) or pattern.fullmatch(name.rpartition(".")[0]))


def _repeated(names: Iterable[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(Counter(names).items()) if count > 1}


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
    from tests.support.walk import measure

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
