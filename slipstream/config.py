"""Frozen process configuration from flags and environment, validated once at start.

A configuration is a frozen dataclass whose fields carry `option(...)` metadata. The field `max_sessions` of the
service `target` is the flag `--max-sessions` and the variable `SLIPSTREAM_TARGET_MAX_SESSIONS`; a flag wins.
"""

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast, get_type_hints

from slipstream.errors import InvalidConfig, InvalidRequest

PREFIX = "SLIPSTREAM"
UINT32_MAX = 2**32 - 1
Check = Callable[[Any], str | None]
"""Returns what is wrong with a value, or None."""
ConfigT = TypeVar("ConfigT")
_TRUTH = {"true": True, "false": False}


def option(help_text: str, *, default: Any = dataclasses.MISSING, check: Check | None = None) -> Any:
    """A dataclass field that is a flag and an environment variable. Without a default it must be given."""
    return dataclasses.field(default=default, metadata={"help": help_text, "check": check})


def is_port(text: str) -> bool:
    """Whether it is the number of a port that somebody may listen at."""
    return text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) < 65_536


def is_sendable(text: str) -> bool:
    """Whether the text is valid Unicode without the null character: file names and JSON may hold neither."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def check_unicode(name: str, value: object) -> None:
    """Raises `InvalidRequest` for a text, or one of several in a tuple, that the wire cannot carry."""
    try:
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{name} has a text that is no valid Unicode, such as one that was read from bytes that are no UTF-8"
        ) from None


def check_text(name: str, value: object) -> None:
    """Raises `InvalidRequest` for what is no text, and as `check_unicode` does."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be text, not {value!r}")
    check_unicode(name, value)


def check_kind(name: str, value: object, kind: type) -> None:
    """Raises `InvalidRequest` for a value of another type; a whole number is a number, too."""
    allowed = (int, float) if kind is float else (kind,)
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, allowed):
        kinds = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise InvalidRequest(f"{name} must be {kinds[kind]}, not {value!r}")


def own_number(value: object) -> object:
    """A number or a truth of NumPy's as Python's own, as those of tables and of its random generators are; all else as
    it is."""
    if getattr(value, "dtype", None) == "bool" and getattr(value, "ndim", None) == 0:
        return bool(value)
    if isinstance(value, Real) and not isinstance(value, int | float):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def whole_number(value: Any) -> Any:
    """The whole numbers of a table are floats where one of their column is missing; JSON does not tell 32.0 from 32."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_value(
    name: str, value: Any, kind: type, choices: Sequence[str], low: float | None, high: float | None
) -> None:
    """Raises `InvalidRequest` for a value of another type, that is none of the choices, or beyond the bounds."""
    check_kind(name, value, kind)
    if choices and value not in choices:
        raise InvalidRequest(f"{name} {value!r} is unknown; choose one of {', '.join(choices)}")
    check_range(name, value, low, high)


def check_range(name: str, value: Any, low: float | None, high: float | None) -> None:
    """Raises `InvalidRequest` for a number that is not finite or beyond a limit, where there is one."""
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    if (low is None and high is None) or (least <= value <= most and -math.inf < value < math.inf):
        return
    if low is None or high is None:
        wanted = f"at least {low:.15g}" if high is None else f"at most {high:.15g}"
    else:
        wanted = f"at least {low:.15g}" if high >= UINT32_MAX and value < low else f"between {low:.15g} and {high:.15g}"
    raise InvalidRequest(f"{name} must be {wanted}, not {value}")


def between(low: float, high: float) -> Check:
    """Accepts numbers in [low, high]."""

    def check(value: float) -> str | None:
        return None if low <= value <= high else f"must be between {low:.15g} and {high:.15g}"

    return check


def one_of(*choices: str) -> Check:
    """Accepts the given words."""

    def check(value: str) -> str | None:
        return None if value in choices else f"must be one of {', '.join(choices)}"

    return check


def parse_config(config_type: type[ConfigT], service: str, argv: Sequence[str], environ: Mapping[str, str]) -> ConfigT:
    """Builds the configuration of `service`, or raises `InvalidConfig` naming the option that is wrong."""
    prefix = f"{PREFIX}_{service.upper()}_"
    types = get_type_hints(config_type)
    fields = {field.name: field for field in dataclasses.fields(cast(Any, config_type))}
    raw = {name.removeprefix(prefix).lower(): text for name, text in environ.items() if name.startswith(prefix)}
    for name in raw:
        if name not in fields:
            raise InvalidConfig(f"{prefix}{name.upper()} is no option of {service}; known: {', '.join(sorted(fields))}")
    raw |= _parse_flags(fields, service, argv)
    values = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _convert(name, raw[name], types[name], field.metadata["check"])
        elif field.default is dataclasses.MISSING:
            raise InvalidConfig(f"--{_flag(name)} (or {prefix}{name.upper()}) is needed: {field.metadata['help']}")
    return config_type(**values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidConfig(f"{message}; see --help")


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _parse_flags(fields: Mapping[str, Any], service: str, argv: Sequence[str]) -> dict[str, str]:
    parser = _Parser(prog=f"python -m slipstream.services.{service}", allow_abbrev=False)
    for name, field in fields.items():
        shown = "needed" if field.default is dataclasses.MISSING else f"default: {field.default!r}"
        help_text = f"{field.metadata['help']} ({shown})".replace("%", "%%")
        parser.add_argument(f"--{_flag(name)}", dest=name, help=help_text)
    return {name: text for name, text in vars(parser.parse_args(argv)).items() if text is not None}


def _convert(name: str, text: str, kind: type, check: Check | None) -> Any:
    try:
        value = _TRUTH[text] if kind is bool else kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError
    except (ValueError, KeyError):
        raise InvalidConfig(f"--{_flag(name)}: {text!r} is no {kind.__name__}") from None
    complaint = check(value) if check else None
    if complaint:
        raise InvalidConfig(f"--{_flag(name)}: {text!r} {complaint}")
    return value


def user_folder(environ: Mapping[str, str], variable: str, usual: str) -> Path:
    """Where this user's programs keep what `variable` of the XDG base directories is for; `usual` is below the home
    folder. Raises `InvalidConfig` for a user without one, as containers may have."""
    if os.path.isabs(given := environ.get(variable, "")):
        return Path(given)
    try:
        return Path.home() / usual
    except RuntimeError:
        raise InvalidConfig(f"this user has no home folder: set HOME, or {variable} to a folder") from None
