"""Hypothesis strategies that damage protobuf messages and streams of them: bits, fields, order, counts."""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

MessageT = TypeVar("MessageT", bound=Message)
MAX_REPEATS = 5000
HOSTILE_TEXT = (
    "",
    "\0",
    "../../../../etc/passwd",
    "file:///etc/passwd",
    "http://169.254.169.254/latest/",
    "https://localhost:1/x.mp4",
    "{{7*7}} $(id) `id` '; DROP TABLE jobs; --",
    "\u202e\u0000\uffff\U0010ffff",
    "é" * 100_000,
    " " * 9000,
    "batch-" + "0" * 32,
    "-1",
    "nan",
    "9" * 40,
    "a\nb\r\nc",
)
NUMBERS = (0, 1, -1, 2, 255, 256, 2**15, 2**31 - 1, -(2**31), 2**32 - 1, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
REALS = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"), 0.5, 1.0000001)
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_REAL_TYPES = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
RAW_WAYS = ("flip", "cut", "other", "again", "append", "nest", "lengthen")
STREAM_WAYS = ("shuffle", "reverse", "cut", "drop", "repeat", "restart", "insert")


@st.composite
def any_messages(draw: st.DrawFn, kind: type[MessageT]) -> MessageT:
    """A message of the kind in which anything may stand."""
    message = kind()
    for _ in range(draw(st.integers(0, 10))):
        _damage_field(draw, message, (b"x",))
    return kind.FromString(message.SerializeToString())


def damaged_message(draw: st.DrawFn, message: Message, payloads: Sequence[bytes]) -> bytes:
    """One damaged message: some of its fields, or the bytes it is made of."""
    if draw(st.integers(0, 9)) < 6:
        message = copy.deepcopy(message)
        for _ in range(draw(st.integers(1, 3))):
            _damage_field(draw, message, payloads)
        return message.SerializeToString()
    return damaged_bytes(draw, message.SerializeToString(), payloads)


def damaged_bytes(draw: st.DrawFn, data: bytes, payloads: Sequence[bytes]) -> bytes:
    """The bytes, or others, damaged in one way."""
    match draw(st.sampled_from(RAW_WAYS)):
        case "flip":
            flipped = bytearray(data or b"\0")
            places = st.tuples(st.integers(0, len(flipped) - 1), st.integers(0, 7))
            for at, bit in draw(st.lists(places, min_size=1, max_size=16)):
                flipped[at] ^= 1 << bit
            return bytes(flipped)
        case "cut":
            return data[: draw(st.integers(0, len(data)))]
        case "other":
            return draw(st.binary(max_size=64)) * draw(st.sampled_from((1, 20, 2000)))
        case "again":
            return data * draw(st.integers(2, 20))
        case "append":
            return data + draw(st.sampled_from(payloads))
        case "nest":
            return _nested(draw(st.sampled_from((10, 101, 300))))
        case _:  # claims a length that it does not have
            return b"\x0a" + _varint(draw(st.sampled_from((2**31, 2**32, 2**63)))) + data


def damaged_stream(draw: st.DrawFn, messages: Sequence[bytes], payloads: Sequence[bytes]) -> list[bytes]:
    """The same messages in a wrong order, number or company."""
    out = list(messages)
    at = draw(st.integers(0, max(len(out) - 1, 0)))
    match draw(st.sampled_from(STREAM_WAYS)):
        case "shuffle":
            return draw(st.permutations(out))
        case "reverse":
            out.reverse()
        case "cut":
            del out[at:]
        case "drop":
            del out[at : at + 1]
        case "repeat":
            out += out[at : at + 1] * draw(st.sampled_from((1, 3, 100)))
        case "restart":
            out[0:0] = out[:1] * draw(st.sampled_from((1, 10)))
        case _:
            out.insert(at, draw(st.sampled_from((b"", *payloads))))
    return out


def _damage_field(draw: st.DrawFn, message: Message, payloads: Sequence[bytes]) -> None:
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = draw(st.sampled_from(fields))
    if draw(st.integers(0, 9)) == 0:
        message.ClearField(field.name)
    elif field.is_repeated:
        _damage_repeated(draw, message, field, payloads)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        inner = getattr(message, field.name)
        inner.SetInParent()
        _damage_field(draw, inner, payloads)
    else:
        setattr(message, field.name, draw(_values(field, payloads)))


def _damage_repeated(draw: st.DrawFn, message: Message, field: FieldDescriptor, payloads: Sequence[bytes]) -> None:
    values, count = getattr(message, field.name), draw(st.sampled_from((1, 2, 17, MAX_REPEATS)))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for number in range(min(count, 100)):
            values[f"key {number}"] = HOSTILE_TEXT[number % len(HOSTILE_TEXT)]
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        for _ in range(min(count, 17)):
            _damage_field(draw, values.add(), payloads)
    else:
        value = draw(_values(field, payloads))
        values.extend([value] * (1 if isinstance(value, str | bytes) and len(value) > 1000 else count))


def _values(field: FieldDescriptor, payloads: Sequence[bytes]) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind in _REAL_TYPES:
        return st.sampled_from(REALS)
    if kind in _RANGES:
        low, high = _RANGES[kind]
        return st.sampled_from(NUMBERS).map(lambda number: min(max(number, low), high)) | st.integers(0, 300)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.sampled_from((b"", b"\x9c", b"\x9c\0" * 50, b"\x9c\0" * 30_000, *payloads))
    return st.sampled_from(HOSTILE_TEXT)


def _nested(depth: int) -> bytes:
    """A message within a message, very deep."""
    nested = b""
    for _ in range(depth):
        nested = b"\x0a" + _varint(len(nested)) + nested
    return nested


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])
