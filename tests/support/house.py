"""The product's source as modules that import each other; read, not imported, so older checkouts count as well."""

import ast
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PRODUCT = ("slipstream", "services")
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")
DEFINITION = re.compile(r"^(?:message|enum)\s+(\w+)\s*\{(.*?)^\}", re.MULTILINE | re.DOTALL)
MEMBER = re.compile(r"(\w+)\s*=\s*\d+")

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
        return [found for node, at_run_time in _statements(self.syntax) for found in self._imports(node, at_run_time)]

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


def _statements(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """All statements, and whether they are run or only read by type checkers."""
    left: list[tuple[ast.AST, bool]] = [(tree, True)]
    while left:
        node, at_run_time = left.pop()
        yield node, at_run_time
        is_unrun = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, name, ())
            if isinstance(inner, list):  # of an expression, as of a lambda, `body` is one
                left += [(child, at_run_time and not (is_unrun and name == "body")) for child in inner]


def _addresses(name: str) -> tuple[str, ...]:
    """The services may also be reached as a part of the package."""
    return (name, f"{PRODUCT[0]}.{name}") if name.split(".")[0] == PRODUCT[1] else (name,)


def _touches(pattern: re.Pattern[str], name: str) -> bool:
    return bool(pattern.fullmatch(name) or pattern.fullmatch(name.rpartition(".")[0]))


def _repeated(names: Iterable[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(Counter(names).items()) if count > 1}
