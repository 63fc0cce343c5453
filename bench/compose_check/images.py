"""The images of the check: base images, pulled or built from Debian's packages, and the project's own.

A stand-in has what the Dockerfile and compose.yaml use of the image that it is named after. It also has this machine's
certificates, so it stays in the private engine and is never to be published.
"""

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.compose_check.packages import RELEASE, mirror
from bench.compose_check.steps import CheckFailed, Steps, run, works

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = ("Dockerfile", ".dockerignore", "LICENSE", "constraints.txt", "pyproject.toml", "README.md")
CONTEXT_FOLDERS = ("models", "services", "slipstream", "training")
PYTHON_BASE = "python:3.11-slim"
REDIS_BASE = "redis:7-bookworm"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
REDIS_STAND_IN = f"""\
FROM {PYTHON_BASE}
RUN groupadd --system --gid 999 redis && useradd --system --uid 999 --gid redis redis \\
    && apt-get update && apt-get install -y --no-install-recommends redis-server \\
    && mkdir -p /data && chown redis:redis /data
VOLUME /data
WORKDIR /data
CMD ["redis-server"]
"""


def provide_bases(steps: Steps, work: Path, environ: Mapping[str, str], *, may_build: bool) -> bool:
    """Pulls the base images, or builds stand-ins where no registry is to be had; returns whether it did the latter."""
    with steps.step("pull the base images") as row:
        missing = [name for name in (PYTHON_BASE, REDIS_BASE) if not _pulled(name, environ)]
        row["pulled"] = not missing
    if not missing:
        return False
    if not may_build:
        raise CheckFailed(f"this Docker daemon cannot pull {', '.join(missing)}; pull or load these images first")
    with steps.step("build the stand-in for Python"):
        _build_python(work, environ)
    with steps.step("build the stand-in for Redis"):
        folder = work / "redis"
        folder.mkdir()
        (folder / "Dockerfile").write_text(REDIS_STAND_IN)
        run(["docker", "build", "-t", REDIS_BASE, folder], timeout_s=300, environ=environ, log=work / "redis.log")
    return True


def build_context(steps: Steps, folder: Path) -> None:
    """Copies what the image is made of, and puts a CPU build of torch into wheels/ where pip has one."""
    with steps.step("lay out the build context") as row:
        folder.mkdir()
        for name in (*CONTEXT, *(path.name for path in ROOT.glob("compose*.yaml"))):
            shutil.copy(ROOT / name, folder / name)
        for name in CONTEXT_FOLDERS:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        wheels = folder / "wheels"
        words: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            wheels,
            _pinned("torch"),
        ]
        run(words, timeout_s=900)
        row["wheels"] = sorted(path.name for path in wheels.iterdir())


def build_image(steps: Steps, work: Path, context: Path, environ: Mapping[str, str]) -> None:
    """The project's own image, by compose."""
    with steps.step("build the image"):
        words = ["docker", "compose", "--progress", "plain", "build"]
        run(words, timeout_s=1800, environ=environ, folder=context, log=work / "build.log")


def image_sizes(names: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, int]:
    """MB of each image."""
    words = ["docker", "image", "inspect", "--format", "{{.Size}}"]
    return {name: int(run([*words, name], timeout_s=30, environ=environ)) // 1_000_000 for name in names}


def _pulled(name: str, environ: Mapping[str, str]) -> bool:
    if works(["docker", "image", "inspect", name], timeout_s=30, environ=environ):
        return True
    return works(["docker", "pull", "--quiet", name], timeout_s=300, environ=environ)


def _build_python(work: Path, environ: Mapping[str, str]) -> None:
    root, archive = work / "base", work / "base.tar"
    include = "--include=ca-certificates,python3,python3-pip,python3-venv"
    words: list[str | Path] = ["debootstrap", "--variant=minbase", include, RELEASE, root, mirror()]
    run(words, timeout_s=600, log=work / "debootstrap.log")
    for path in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        path.unlink()
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    run(["tar", "-C", root, "-cf", archive, "."], timeout_s=300)
    settings = [f"ENV PATH={PATH}", f"ENV PIP_CERT={CERTIFICATES}", 'CMD ["python3"]']
    changes = [word for setting in settings for word in ("--change", setting)]
    run(["docker", "import", *changes, archive, PYTHON_BASE], timeout_s=300, environ=environ)
    archive.unlink()
    shutil.rmtree(root)


def _pinned(package: str) -> str:
    found = re.search(rf"^{package}==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if found is None:
        raise CheckFailed(f"constraints.txt does not name {package}")
    return found[0]
