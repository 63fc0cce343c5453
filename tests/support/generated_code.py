"""Fails when the committed protobuf code is not what the .proto files generate, which `make gen` mends, or when
`pyproject.toml` takes packages that are too old for it: `python -m tests.support.generated_code PYTHON`, one that
has grpcio-tools."""

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]


def stale_files(generator: str) -> list[str]:
    """Generated files under slipstream/rpc/v1 that differ from a fresh generation."""
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        flags = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        subprocess.run(
            [generator, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto"), *flags, *map(str, protos)],
            check=True,
        )
        fresh = {path.relative_to(scratch): path.read_bytes() for path in Path(scratch).rglob("*.py*")}
    return [str(path) for path, content in fresh.items() if _committed(path) != content]


def _committed(path: Path) -> bytes:
    file = ROOT / path
    return file.read_bytes() if file.exists() else b""


def too_old() -> list[str]:
    """What this project is installed with, though the generated code refuses the oldest release that would do."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    return [
        f"{package} {specifier}, but {needed} is needed"
        for package, needed in _needed().items()
        for specifier in asked[package]
        if specifier.operator == ">=" and Version(specifier.version) < needed
    ]


def _needed() -> dict[str, Version]:
    """Oldest runtimes that the generated code takes."""
    generated = ROOT / "slipstream" / "rpc" / "v1"
    services = [path.read_text() for path in generated.glob("*_pb2_grpc.py")]
    messages = [path.read_text() for path in generated.glob("*_pb2.py")]
    return {
        "grpcio": max(Version(version) for text in services for version in re.findall(r"VERSION = '([\d.]+)'", text)),
        "protobuf": max(Version(version) for text in messages for version in re.findall(r"Version: ([\d.]+)", text)),
    }


if __name__ == "__main__":
    if packages := too_old():
        sys.exit(f"pyproject.toml takes {'; '.join(packages)}")
    if stale := stale_files(sys.argv[1]):
        sys.exit(f"generated code is not current: {', '.join(stale)}; run `make gen`")
