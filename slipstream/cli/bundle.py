"""Command-line options that several commands share, written once. Knows no command."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def bundled(**bundles: Callable[..., Any]) -> Callable[[Callable[..., ResultT]], Callable[..., ResultT]]:
    """Gives a command the options of `bundles` too, for typer to see.

    Each bundle is a function whose parameters are options; the command takes what it returns under the bundle's name.
    """

    def decorate(command: Callable[..., ResultT]) -> Callable[..., ResultT]:
        parameters = {name: inspect.signature(bundle).parameters for name, bundle in bundles.items()}
        own = [item for name, item in inspect.signature(command).parameters.items() if name not in bundles]
        every = [*own, *(item for shared in parameters.values() for item in shared.values())]

        @functools.wraps(command)
        def run(**values: Any) -> ResultT:
            for name, bundle in bundles.items():
                values[name] = bundle(**{option: values.pop(option) for option in parameters[name]})
            return command(**values)

        keyword_only = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in every]
        run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in every}
        return run

    return decorate
