"""What a row of the table of caption options says: who is told, which values there are, where a default comes from."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Final, Literal, get_args, get_origin

Group = Literal["common", "sampling", "speculation", "baselines"]
Receiver = Literal["target", "draft"]
BOTH: tuple[Receiver, ...] = ("target", "draft")
THINKING = ("template", "on", "off")
"""What a model's chat template is told of thinking: nothing, yes or no."""


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


def option(
    help_text: str,
    group: Group = "speculation",
    *,
    default: str = "",
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
    """One row, see `OptionSpec`. `flag`: where it is not the option's name; `default`: where it is neither the
    gateway's nor the method's."""
    default = default or ("the gateway's" if gateway_default else "the method's")
    row: dict[str, Any] = {"help": help_text, "group": group, "default": default, "to": to, "choices": tuple(choices)}
    row |= {"low": low, "high": high, "flag": flag, "is_file": is_file, "fallback": fallback}
    row |= {"gateway_default": gateway_default, "gateway_limit": gateway_limit, "of": of}
    return dataclasses.field(default=UNSET, metadata=row, kw_only=kw_only)


def spec_of(field: "dataclasses.Field[Any]", kind: Any) -> OptionSpec:
    """The row of a field that is an `option`, of that type; of several types, the one that is kept comes first."""
    repeated = get_origin(kind) is Sequence
    has_parts = repeated or isinstance(kind, UnionType)
    row = dict(field.metadata)
    row["flag"] = field.name.replace("_", "-") if row["flag"] is None else row["flag"]
    return OptionSpec(name=field.name, kind=get_args(kind)[0] if has_parts else kind, repeated=repeated, **row)


def keywords_help(specs: Iterable[OptionSpec], others: Mapping[str, str]) -> str:
    """What `help` says of methods whose keywords are these options, and others with their help."""
    lines = [
        "Keywords; what is not given is the gateway's default:",
        *(f"    {spec.name}: {spec.description} Default: {spec.default}." for spec in specs),
        "    options: `CaptionOptions` for what the keywords do not say.",
        *(f"    {name}: {told}" for name, told in others.items()),
    ]
    return "\n".join(lines)
