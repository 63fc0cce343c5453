"""The engine from Debian's packages: bookworm's Docker has no compose v2, so it is taken from trixie, and nothing else
of the system is upgraded. Knows no mirror: the machine's own sources say where packages come from."""

import re
import shutil
from pathlib import Path

from bench.compose_check.steps import CheckFailed, run

SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
RELEASE = "bookworm"
NEWER = "trixie"
PACKAGES = ("docker.io", "docker-cli", "containerd", "docker-compose", "docker-buildx")
TOOLS = ("debootstrap", "iptables", "iproute2")
PINS = f"Package: *\nPin: release n={NEWER}\nPin-Priority: 50\n"


def install_engine(work: Path) -> None:
    """Installs dockerd, compose, buildx and debootstrap. Raises `CheckFailed` on systems other than Debian 12."""
    stanza = main_stanza(SOURCES.read_text()) if SOURCES.exists() else None
    if stanza is None or shutil.which("apt-get") is None:
        raise CheckFailed(
            "no Docker engine with compose v2 is installed, and it can be installed for you on Debian 12 only; "
            "install Docker and run this again"
        )
    options = _apt_options(work / "apt", stanza)
    environ = {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", *options, "update"], timeout_s=300, environ=environ)
    newer = [f"{package}/{NEWER}" for package in PACKAGES]
    words = ["apt-get", *options, "install", "-y", "--no-install-recommends", "--no-upgrade", *newer, *TOOLS]
    run(words, timeout_s=600, environ=environ, log=work / "apt.log")


def main_stanza(sources: str) -> str | None:
    """The stanza of a deb822 file that names this release's main archive."""
    for stanza in re.split(r"\n\s*\n", sources):
        suites = re.search(r"^Suites:(.*)$", stanza, re.MULTILINE)
        if suites and RELEASE in suites[1].split():
            return stanza.strip()
    return None


def newer_stanza(stanza: str) -> str:
    """The same archive, one release later."""
    return re.sub(r"^Suites:.*$", f"Suites: {NEWER}", stanza, flags=re.MULTILINE)


def mirror() -> str:
    """Where this machine takes Debian's packages from."""
    stanza = main_stanza(SOURCES.read_text()) if SOURCES.exists() else None
    found = re.search(r"^URIs:\s*(\S+)", stanza or "", re.MULTILINE)
    if found is None:
        raise CheckFailed(f"{SOURCES} names no archive of {RELEASE}; base images cannot be built without one")
    return found[1]


def _apt_options(folder: Path, stanza: str) -> list[str]:
    """Lists of our own beside the system's, whose index is left as it is."""
    for name in ("parts", "lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "parts/engine.sources").write_text(f"{stanza}\n\n{newer_stanza(stanza)}\n")
    (folder / "preferences").write_text(PINS)
    settings = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": folder / "parts",
        "Dir::Etc::Preferences": folder / "preferences",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
