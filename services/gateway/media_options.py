"""What a gateway can be told at start about videos: where they may come from and what decoding one may cost."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.config import between, option


def _check_hosts(value: str) -> str | None:
    """What is wrong with a list of URL hosts, or None."""
    for entry in filter(None, value.split(",")):
        host, _, port = entry.partition(":")
        if not host or any(char.isspace() or char in "/@*[]?#" for char in entry):
            return f"names {entry!r}, which is no HOST or HOST:PORT"
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            return f"names {entry!r}, whose port is none"
    return None


@dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """Options of receiving and decoding videos."""

    video_roots: str = option("directories that request paths may lie below, separated by ':'", default="")
    url_hosts: str = option(
        "hosts that archive videos may be fetched from over https, as HOST or HOST:PORT, separated by ','; empty: none",
        default="",
        check=_check_hosts,
    )
    url_timeout_s: float = option("longest time for fetching one video", default=600.0, check=between(0.1, 86400))
    max_video_bytes: int = option("largest video file", default=2 * 1024**3, check=between(1, 2**50))
    decode_workers: int = option("videos decoded at once, each in a process", default=2, check=between(1, 256))
    decode_timeout_s: float = option("longest time for decoding one video", default=120.0, check=between(0.1, 86400))
    decode_memory_mb: int = option(
        "most memory of one decoder in MiB, sampled frames apart", default=2048, check=between(64, 2**20)
    )

    @property
    def roots(self) -> tuple[Path, ...]:
        """Directories that request paths may lie below."""
        return tuple(Path(root) for root in self.video_roots.split(":") if root)

    @property
    def allowed_hosts(self) -> frozenset[tuple[str, int]]:
        """(host in lower case, port) of the https servers that videos may be fetched from."""
        pairs = (entry.partition(":") for entry in self.url_hosts.split(",") if entry)
        return frozenset((host.lower(), int(port or 443)) for host, _, port in pairs)
