"""The options of the table as keywords of methods: what a caller says of one call, for readers, checkers and `help`."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

from slipstream.options import OPTIONS, CaptionOptions

KeywordsP = ParamSpec("KeywordsP")
OwnerT = TypeVar("OwnerT")
SubjectT = TypeVar("SubjectT")
CallT = TypeVar("CallT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class CallOptions(CaptionOptions):
    """What a caller says: the options of the table one by one, or as one."""

    options: CaptionOptions | None = field(default=None, kw_only=True)
    """For what the keywords do not say."""

    def asked(self) -> CaptionOptions:
        """The options, of both."""
        return self.over(self.options or CaptionOptions())


def keywords_of(
    make_call: Callable[KeywordsP, CallT], others: Mapping[str, str]
) -> Callable[
    [Callable[[OwnerT, SubjectT, CallT], ResultT]], Callable[Concatenate[OwnerT, SubjectT, KeywordsP], ResultT]
]:
    """Gives a method that takes one thing and a `CallOptions` the keywords of the latter, for readers, type checkers
    and `help`. `others` are the keywords that are not in the table, with their help."""

    def decorate(
        method: Callable[[OwnerT, SubjectT, CallT], ResultT],
    ) -> Callable[Concatenate[OwnerT, SubjectT, KeywordsP], ResultT]:
        @functools.wraps(method)
        def called(owner: OwnerT, subject: SubjectT, /, *args: KeywordsP.args, **kwargs: KeywordsP.kwargs) -> ResultT:
            return method(owner, subject, make_call(*args, **kwargs))

        plain = inspect.signature(method)
        ours = [one.replace(kind=one.POSITIONAL_ONLY) for one in plain.parameters.values()][:2]
        theirs = inspect.signature(make_call).parameters.values()
        called.__signature__ = plain.replace(parameters=[*ours, *theirs])  # type: ignore[attr-defined]
        called.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\n{_help(others)}"
        return called

    return decorate


def _help(others: Mapping[str, str]) -> str:
    lines = [
        "Keywords; what is not given is the gateway's default:",
        *(f"    {spec.name}: {spec.description} Default: {spec.default}." for spec in OPTIONS),
        "    options: `CaptionOptions` for what the keywords do not say.",
        *(f"    {name}: {told}" for name, told in others.items()),
    ]
    return "\n".join(lines)
