"""Which browsers' requests are carried out: what they tell of the page that asks, and by which name it found us. Pure.

A page of any site can have its visitor's browser send requests to the visitor's own machine. It cannot read what
another origin answers, but a POST has been carried out by then; and where a site suddenly gives its own name this
server's address (DNS rebinding), that is no other origin to the browser.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from slipstream.services.front.api_errors import ApiError

_READING = ("GET", "HEAD")
_LOCAL_ENDINGS = (".localhost", ".local", ".internal", ".home.arpa")
"""Of names that no public server gives out."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_ORIGIN = re.compile(r"\*|null|(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://[^\s/?#@*A-Z]+")
"""As browsers tell it: nothing behind the host but a port that is not the usual one, and all of it in small letters."""


def listed(names: str) -> list[str]:
    """What an option names, separated by `,`."""
    return [name.strip() for name in names.split(",") if name.strip()]


def check_names(value: str) -> str | None:
    """What is wrong with a list of names by which a server is reached; or None."""
    for name in listed(value):
        if not (_NAME.fullmatch(name) or _is_address(name)):
            return f"has {name!r}, which is no name: leave scheme, port and path out, and write bücher as xn--bcher-kva"
    return None


def check_origins(value: str) -> str | None:
    """What is wrong with a list of origins; or None."""
    for origin in listed(value):
        if not _ORIGIN.fullmatch(origin):
            return (
                f"has {origin!r}, which no browser says: an origin is such as https://studio.example or"
                " http://localhost:3000, in small letters, without a usual port and with nothing behind"
            )
    return None


@dataclass(frozen=True)
class Browsers:
    """Whose pages may call, and by which names."""

    origins: frozenset[str]
    """Beside our own; `*` for all."""
    names: frozenset[str] | None
    """Beside addresses and local names; None: any, as callers must know a token, and no page of another site does."""

    def check(self, method: str, header: Callable[[str], str]) -> None:
        """Raises `ApiError` (403) for what a page of another site has sent, or may have. `header` gives a request's
        header by its name, '' without one."""
        name = _parts(header("host"))[1]
        if self.names is not None and name not in self.names and not _is_local(name):
            raise _refused(
                f"this server is not known as {name[:256]!r}: ask by its address, or start it with --hosts that has it",
                "unknown_host",
            )
        origin = header("origin")
        if method not in _READING and not {origin, "*"} & self.origins and _is_foreign(origin, header):
            raise _refused(
                f"a page of {origin[:256] or 'another site'} asks, which is not among --cors-origins", "unknown_origin"
            )


def _is_foreign(origin: str, header: Callable[[str], str]) -> bool:
    """As the browser says; where it does not, on a plaintext wire beyond loopback, by the host of the origin."""
    if site := header("sec-fetch-site"):
        return site not in ("same-origin", "none")
    return bool(origin) and _parts(origin.partition("://")[2])[0] != _parts(header("host"))[0]


def _parts(host: str) -> tuple[str, str]:
    """HOST:PORT and the name in it, both in small letters; of what is neither, as it is."""
    try:
        split = urlsplit(f"//{host}")
        return split.netloc.lower(), (split.hostname or "").rstrip(".")
    except ValueError:
        return host, host


def _is_local(name: str) -> bool:
    """Whether a page of another site cannot have this name: an address, or none that is given out to strangers."""
    return _is_address(name) or "." not in name or name.endswith(_LOCAL_ENDINGS)


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name.partition("%")[0]))
    except ValueError:
        return False


def _refused(why: str, code: str) -> ApiError:
    return ApiError(why, status=403, kind="permission_error", code=code)
