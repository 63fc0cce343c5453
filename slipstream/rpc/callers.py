"""Who makes the call that is being served, and so many of something at once, of which one caller has a share."""

import asyncio
import contextlib
import contextvars
import ipaddress
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import unquote

import structlog

from slipstream.errors import Overloaded

# -- callers ----------------------------------------------------------------------------------------------------------


def is_local(address: str) -> bool:
    """Whether what is sent to or from the address stays on this machine."""
    if address.startswith("unix:"):
        return True
    host = address.removeprefix("dns:").lstrip("/").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Caller(NamedTuple):
    """Who makes the call that is being served."""

    owner: str = ""
    """As its token or certificate says; '' for one that has neither."""
    host: str = "local"
    """The address it calls from, without the port. Of IPv6 the network: who has one address there has 2^64."""
    is_local: bool = True

    @property
    def name(self) -> str:
        """What its share goes by."""
        return f"owner {self.owner}" if self.owner else self.host

    @property
    def may_have_all(self) -> bool:
        """Somebody on this machine whom nobody asked for a name: its only user, as far as this service can know."""
        return self.is_local and not self.owner


_NOBODY = Caller()
_caller: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller", default=_NOBODY)


def current_caller() -> Caller:
    """Who makes the call that is being served; outside of calls, this process itself."""
    return _caller.get()


def begin_call(peer: str) -> None:
    """A call from this peer is served now, in this task; whose it is, is not known yet."""
    _caller.set(read_peer(peer))


def name_owner(owner: str) -> None:
    """The call that is being served is this owner's; its log lines say so from now on."""
    _caller.set(_caller.get()._replace(owner=owner))
    if owner:
        structlog.contextvars.bind_contextvars(owner=owner)


def read_peer(peer: str) -> Caller:
    """From a peer as gRPC writes it: `ipv4:10.0.0.1:5000`, `ipv6:%5B::1%5D:5000` or `unix:/path`."""
    if peer.startswith("unix"):
        return Caller(host="unix")
    host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return Caller(host="unknown", is_local=False)
    address = getattr(address, "ipv4_mapped", None) or address
    if address.version == 6 and not address.is_loopback:
        host = str(ipaddress.ip_network((address, 64), strict=False))
    else:
        host = str(address)
    return Caller(host=host, is_local=address.is_loopback)


# -- shares -----------------------------------------------------------------------------------------------------------


class Places:
    """A limited number of places, of which one caller may hold a share.

    Args:
        what: names them in metrics; one word.
        limit: of all callers together.
        share: of one caller, from 0 to 1, but never less than `least`.
        are: what they do, for the message to those who get none.
        own_limit: the caller's own, if it has one in place of the share; it holds for those of this machine too.
    """

    def __init__(
        self,
        what: str,
        limit: int,
        share: float = 1.0,
        *,
        least: int = 1,
        are: str = "are open",
        own_limit: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.what, self.limit, self.used = what, limit, 0
        self._own_limit = own_limit
        self._of_one = min(limit, max(least, math.floor(limit * share)))
        self._are = are
        self._held: Counter[str] = Counter()
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self, patience_s: float) -> None:
        """Returns when the caller could have a place, or after so long: `held`, which is to follow at once, says."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while not self._has_room():
                    freed = asyncio.get_running_loop().create_future()
                    self._waiting.append(freed)
                    try:
                        await freed
                    finally:
                        self._waiting.remove(freed)

    def _has_room(self) -> bool:
        try:
            self.check()
        except Overloaded:
            return False
        return True

    def check(self, number: int = 1) -> None:
        """Raises `Overloaded` where the caller could not have so many more now."""
        caller, of_one = current_caller(), self._own_limit()
        if of_one is None:
            of_one = self.limit if caller.may_have_all else self._of_one
        if self.used + number > self.limit:
            raise Overloaded(
                f"{self.used} {self.what} {self._are}, as many as this service takes; try again later",
                ceiling=self.what,
            )
        if self._held[caller.name] + number > of_one:
            raise Overloaded(
                f"{self._held[caller.name]} {self.what} of yours {self._are}, and one caller may have"
                f" {of_one} of {self.limit}; try again when some have ended",
                ceiling=self.what + "_of_one",
            )

    @contextlib.contextmanager
    def held(self, number: int = 1) -> Iterator[Callable[[int], None]]:
        """Takes places for the block; what it yields takes more. Raises `Overloaded`, as `check` does."""
        name, taken = current_caller().name, 0

        def take(more: int) -> None:
            nonlocal taken
            self.check(more)
            taken += more
            self.used += more
            self._held[name] += more

        try:
            take(number)
            yield take
        finally:
            self.used -= taken
            self._held[name] -= taken
            if not self._held[name]:
                del self._held[name]
            for freed in self._waiting:
                if not freed.done():
                    freed.set_result(None)
