"""What every gRPC service is told at its start: where it listens, whom it serves, what it shows, and how it ends."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from slipstream.config import between, one_of, option
from slipstream.logs import LEVELS
from slipstream.rpc.tls import WireOptions


def otlp_option() -> Any:
    """An option of all services and of the front."""
    return option(
        "OTLP collector that is told OpenTelemetry's traces over HTTP, such as http://127.0.0.1:4318; empty for none",
        default="",
        check=lambda address: None if re.match(r"https?://[^/]|$", address) else "must begin with http:// or https://",
    )


class Callers(NamedTuple):
    """Who may call a service. By default whoever reaches it, as one that only a gateway calls."""

    tokens: str = ""
    """File of the tokens of which a call must have one; empty: it needs none."""
    share: float = 1.0
    """Of a ceiling, what one caller may have."""


@dataclass(frozen=True, kw_only=True)
class ServiceOptions(WireOptions):
    """Options that every gRPC service has."""

    lame_duck: ClassVar[bool] = False
    """After SIGTERM it still answers health and those who come too late, until its calls have ended."""

    listen: str = option("address to serve on: HOST:PORT, port 0 for any, or unix:/path")
    reflection: bool = option("whether strangers may list the methods: true or false", default=False)
    metrics: str = option("serve metrics at HOST:PORT; a PORT alone is on loopback; empty for none", default="")
    otlp: str = otlp_option()
    log_level: str = option("least severe log event", default="info", check=one_of(*LEVELS))
    log_text: bool = option(
        "whether events of level debug may hold prompts and captions: true or false; for finding faults only",
        default=False,
    )
    stream_timeout_s: float = option("longest time for one streaming call", default=86_400.0, check=between(1, 1e7))
    drain_s: float = option("how long open calls may go on after SIGTERM", default=20.0, check=between(0, 3600))

    @property
    def callers(self) -> Callers:
        """Who may call."""
        return Callers()
