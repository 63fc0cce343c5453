"""Damages protobuf messages and streams of them: bits, fields, order, counts. Randomness comes in, bytes go out."""

import copy
import pickle
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

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


class _Canary:
    """What a server that unpickles would do: create a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (self.path, "w")


def pickle_bomb(path: str) -> bytes:
    """A pickle that creates `path` when it is loaded."""
    return pickle.dumps(_Canary(path))


class Mutator:
    """Mutates what it is given, in ways that its seed decides."""

    def __init__(self, chance: random.Random, payloads: Sequence[bytes]) -> None:
        self._chance = chance
        self._payloads = tuple(payloads)

    def message(self, message: Message) -> bytes:
        """One damaged message: some of its fields, or the bytes it is made of."""
        if self._chance.random() < 0.6:
            message = copy.deepcopy(message)
            for _ in range(self._chance.randint(1, 3)):
                self._field(message)
            return message.SerializeToString()
        return self.raw(message.SerializeToString())

    def raw(self, data: bytes) -> bytes:
        """Damaged bytes."""
        chance = self._chance
        kind = chance.randrange(7)
        if kind == 0 and data:
            flipped = bytearray(data)
            for _ in range(chance.randint(1, 16)):
                flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
            return bytes(flipped)
        if kind == 1:
            return data[: chance.randrange(len(data) + 1)]
        if kind == 2:
            return chance.randbytes(chance.choice((0, 1, 10, 1000, 100_000)))
        if kind == 3:
            return data * chance.randint(2, 20)
        if kind == 4:
            return data + chance.choice(self._payloads)
        if kind == 5:  # a message within a message, very deep
            nested = b""
            for _ in range(chance.choice((10, 101, 300))):
                nested = b"\x0a" + _varint(len(nested)) + nested
            return nested
        return b"\x0a" + _varint(chance.choice((2**31, 2**32, 2**63))) + data  # claims a length

    def stream(self, messages: Sequence[bytes]) -> list[bytes]:
        """The same messages in a wrong order, number or company."""
        chance, out = self._chance, list(messages)
        kind = chance.randrange(7)
        if kind == 0:
            chance.shuffle(out)
        elif kind == 1:
            out.reverse()
        elif kind == 2:
            out = out[: chance.randrange(len(out) + 1)]
        elif kind == 3 and out:
            del out[chance.randrange(len(out))]
        elif kind == 4 and out:
            out += [chance.choice(out)] * chance.choice((1, 3, 100))
        elif kind == 5 and out:
            out[0:0] = [out[0]] * chance.choice((1, 10))
        elif kind == 6:
            out.insert(chance.randrange(len(out) + 1), chance.choice((b"", *self._payloads)))
        return out

    def _field(self, message: Message) -> None:
        if not message.DESCRIPTOR.fields:
            return
        fields: list[Any] = list(message.DESCRIPTOR.fields)
        field = self._chance.choice(fields)
        if self._chance.random() < 0.1:
            message.ClearField(field.name)
        elif field.is_repeated:
            self._repeated(message, field)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            inner = getattr(message, field.name)
            inner.SetInParent()
            self._field(inner)
        else:
            setattr(message, field.name, self._value(field))

    def _repeated(self, message: Message, field: FieldDescriptor) -> None:
        values, count = getattr(message, field.name), self._chance.choice((1, 2, 17, MAX_REPEATS))
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for number in range(min(count, 100)):
                values[f"key {number}"] = self._chance.choice(HOSTILE_TEXT)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for _ in range(min(count, 17)):
                self._field(values.add())
        else:
            value = self._value(field)
            values.extend([value] * (1 if isinstance(value, str | bytes) and len(value) > 1000 else count))

    def _value(self, field: FieldDescriptor) -> Any:
        chance, kind = self._chance, field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        if kind in _REAL_TYPES:
            return chance.choice(REALS)
        if kind in _RANGES:
            low, high = _RANGES[kind]
            return min(max(chance.choice((*NUMBERS, chance.randint(0, 300))), low), high)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return chance.choice((b"", chance.randbytes(chance.choice((1, 100, 60_000))), *self._payloads))
        return chance.choice(HOSTILE_TEXT)


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += struct.pack("B", number & 127 | 128)
        number >>= 7
    return out + struct.pack("B", number)
