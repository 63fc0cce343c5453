"""Fails when the committed protobuf code is not what the .proto files generate: `make gen` mends it."""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def stale_files() -> list[str]:
    """Generated files under slipstream/rpc/v1 that differ from a fresh generation."""
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        flags = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto"), *flags, *map(str, protos)],
            check=True,
        )
        fresh = {path.relative_to(scratch): path.read_bytes() for path in Path(scratch).rglob("*.py*")}
    return [str(path) for path, content in fresh.items() if _committed(path) != content]


def _committed(path: Path) -> bytes:
    file = ROOT / path
    return file.read_bytes() if file.exists() else b""


if __name__ == "__main__":
    if stale := stale_files():
        sys.exit(f"generated code is not current: {', '.join(stale)}; run `make gen`")
