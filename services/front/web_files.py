"""The page at `/`: its files, as they stand in the package, under a policy that has a browser load nothing else."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePath

from slipstream.services.front.api_errors import not_found
from slipstream.services.front.call import Call

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'self'; media-src 'self' blob:; img-src 'self' blob:; object-src 'none'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
"""Media and pictures that the user chose are `blob:`; all else comes from this server, and no script or style stands
within the page."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class WebFile:
    """One file of the page."""

    kind: str
    data: bytes


@cache
def web_files() -> dict[str, WebFile]:
    """All of them, by name."""
    found = (path for path in files(__package__).joinpath("web").iterdir() if PurePath(path.name).suffix in TYPES)
    return {path.name: WebFile(TYPES[PurePath(path.name).suffix], path.read_bytes()) for path in found}


async def get_page(call: Call) -> None:
    """GET /."""
    await _send(call, "index.html")


async def get_web_file(call: Call) -> None:
    """GET /web/{name}."""
    await _send(call, call.params["name"])


async def _send(call: Call, name: str) -> None:
    file = web_files().get(name)
    if file is None:
        raise not_found(f"the page has no file {name[:64]!r}", code="unknown_url")
    await call.begin(200, file.kind, HEADERS | {"content-length": str(len(file.data))})
    await call.body(file.data, is_last=True)
