"""What a row of the table of caption options says: who is told, which values there are, where a default comes from."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from slipstream.errors import InvalidRequest

UINT32_MAX = 2**32 - 1
Group = Literal["common", "sampling", "speculation", "baselines"]
Receiver = Literal["target", "draft"]


class _Unset:
    """The value of an option that was not given: the gateway's default stands for it."""

    def __repr__(self) -> str:
        return "<default>"

    def __reduce__(self) -> str:
        """There is one, also where options are copied, or come from another process."""
        return "UNSET"


UNSET: Final = _Unset()


@dataclass(frozen=True)
class OptionSpec:
    """One row of the table."""

    name: str
    kind: type
    """str, int, float or bool; of a repeated option that of one value."""
    repeated: bool
    help: str
    group: Group
    default: str
    """Where the value comes from when none is given, for people."""
    to: tuple[Receiver, ...]
    """The model services that are told, beside the gateway; sampling options go to both as one."""
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    flag: str
    """Of the command line, without dashes; empty: none."""
    is_file: bool
    """The command line takes files that hold the values."""
    fallback: Any
    """The value where neither the request, the method nor the gateway says one; `UNSET`: there is none."""
    gateway_default: str
    """The field of the gateway's configuration that says one; empty: none."""
    gateway_limit: str
    """The field of the gateway's configuration that bounds it; empty: none."""
    of: str
    """The option without which this one would change nothing; empty: none."""

    @property
    def description(self) -> str:
        """The help, with the names to choose from."""
        return f"{self.help} One of: {', '.join(self.choices)}." if self.choices else self.help

    @property
    def is_checked_alone(self) -> bool:
        """Sampling options are checked by `SamplingParams`, and lists by what they are of."""
        return self.group != "sampling" and not self.repeated

    def check(self, value: Any) -> None:
        """Raises `InvalidRequest` for a value that no gateway would take; limits of a server are the server's."""
        allowed = (int, float) if self.kind is float else (self.kind,)
        if isinstance(value, bool) != (self.kind is bool) or not isinstance(value, allowed):
            kinds = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
            raise InvalidRequest(f"{self.name} must be {kinds[self.kind]}, not {value!r}")
        if self.choices and value not in self.choices:
            raise InvalidRequest(f"{self.name} {value!r} is unknown; choose one of {', '.join(self.choices)}")
        if self.low is not None or self.high is not None:
            self._check_range(value)

    def _check_range(self, value: Any) -> None:
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        if low <= value <= high and math.isfinite(value):
            return
        if self.low is None or self.high is None:
            wanted = f"at least {low:g}" if self.high is None else f"at most {high:g}"
        else:
            wanted = f"at least {low:g}" if high >= UINT32_MAX and value < low else f"between {low:g} and {high:g}"
        raise InvalidRequest(f"{self.name} must be {wanted}, not {value}")


def option(
    help_text: str,
    group: Group = "speculation",
    *,
    default: str = "the method's",
    to: tuple[Receiver, ...] = (),
    choices: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
    flag: str | None = None,
    is_file: bool = False,
    fallback: Any = UNSET,
    gateway_default: str = "",
    gateway_limit: str = "",
    of: str = "",
    kw_only: bool = True,
) -> Any:
    """One row, see `OptionSpec`. `flag`: where it is not the option's name."""
    row: dict[str, Any] = {"help": help_text, "group": group, "default": default, "to": to, "choices": tuple(choices)}
    row |= {"low": low, "high": high, "flag": flag, "is_file": is_file, "fallback": fallback}
    row |= {"gateway_default": gateway_default, "gateway_limit": gateway_limit, "of": of}
    return dataclasses.field(default=UNSET, metadata=row, kw_only=kw_only)
