"""Between plain frozen types and wire messages with the same field names. What one side lacks stays out."""

import dataclasses
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

Descriptor = Any
"""`google.protobuf.descriptor.Descriptor`, whatever the runtime calls it."""
MessageT = TypeVar("MessageT", bound=Message)
PlainT = TypeVar("PlainT")


def to_message(value: object, message_type: type[MessageT], **others: Any) -> MessageT:
    """The dataclass `value` as a message. None is left out; `others` are fields that it lacks, or that differ."""
    return cast(MessageT, _message(value, message_type.DESCRIPTOR, others))


def from_message(message: Message, kind: type[PlainT], **others: Any) -> PlainT:
    """The message as a dataclass of type `kind`; `others` are fields that it lacks, or that differ."""
    return cast(PlainT, _plain(message, kind, others))


def _message(value: Any, descriptor: Descriptor, others: dict[str, Any]) -> Message:
    fields = dict(others)
    for name, nested in _shared_fields(cast(Any, type(value)), descriptor).items():
        content = getattr(value, name)
        if name in fields or content is None:
            continue
        if nested is None:
            fields[name] = content
        elif isinstance(content, tuple):
            fields[name] = [_message(item, nested, {}) for item in content]
        else:
            fields[name] = _message(content, nested, {})
    return GetMessageClass(descriptor)(**fields)


@cache
def _shared_fields(kind: Any, descriptor: Descriptor) -> dict[str, Descriptor | None]:
    """The fields that both have, with the type of those that are messages."""
    known = descriptor.fields_by_name
    return {field.name: known[field.name].message_type for field in dataclasses.fields(kind) if field.name in known}


def _plain(message: Message, kind: Any, others: dict[str, Any]) -> Any:
    fields = dict(others)
    for name, (item_kind, is_tuple) in _plain_fields(kind, message.DESCRIPTOR).items():
        if name in fields:
            continue
        content = getattr(message, name)
        if is_tuple:
            fields[name] = (
                tuple(content) if item_kind is None else tuple(_plain(item, item_kind, {}) for item in content)
            )
        else:
            fields[name] = content if item_kind is None else _plain(content, item_kind, {})
    return kind(**fields)


@cache
def _plain_fields(kind: Any, descriptor: Descriptor) -> dict[str, tuple[Any, bool]]:
    """The fields that both have: the dataclass within, if it is one, and whether it is a tuple of them."""
    hints = get_type_hints(kind)
    shared: dict[str, tuple[Any, bool]] = {}
    for name in _shared_fields(kind, descriptor):
        is_tuple = get_origin(hints[name]) is tuple
        inner = get_args(hints[name])[0] if is_tuple else hints[name]
        shared[name] = (inner if dataclasses.is_dataclass(inner) else None, is_tuple)
    return shared
