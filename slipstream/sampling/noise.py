"""Random numbers as a pure function of (seed, stream, output position, token id), with the same bits on every device.

A counter-based generator: the key of a (seed, stream, position) is a chain of splitmix64 finalisers over Python
integers, and a token's 64 bits are the splitmix64 sequence of that key at index token id + 1 (Steele, Lea, Flood,
"Fast splittable pseudorandom number generators", 2014). On tensors this is wrapping int64 arithmetic. What follows is
float64 in separate eager multiplications and additions, each correctly rounded by IEEE 754 on CPU and CUDA alike; there
is no call into a maths library, whose last bits differ between devices.
"""

import enum
import functools
from collections.abc import Iterable
from decimal import Decimal, localcontext

import torch
from torch import Tensor

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_UNIFORM_BITS = 52
_MANTISSA_MASK = 2**52 - 1
_HALF_EXPONENT = 1022 << 52
"""Exponent bits of a float64 in [0.5, 1)."""
_TABLE_BITS = 7
_LOG1P = tuple((-1.0) ** (n + 1) / n for n in range(1, 8))
"""ln(1 + r) = r - r^2/2 + ...; for |r| <= 1/129 the first term left out is below 2^-52 of the sum."""


class Stream(enum.IntEnum):
    """What a random number is for. Numbers of different streams are independent of each other."""

    CHOICE = 1
    """Draws a token from a model's distribution: the target's own choice and the draft's draw. See `sampler`."""
    ACCEPT = 2
    """The accept test of rule "rejection"."""
    RESIDUAL = 3
    """Draws the token that replaces a rejected one."""


def position_key(seed: int, stream: Stream, position: int) -> int:
    """The key, in [0, 2^64), that the numbers of one decision come from."""
    return _mix(_stream_key(seed, stream) + (position + 1) * _GOLDEN)


def key_tensor(keys: Iterable[int], device: torch.device) -> Tensor:
    """Keys as int64 [n]: the same bits, read as signed."""
    return torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=device)


def uniform(key: int) -> float:
    """One number in (0, 1) from the key: that of token 0."""
    bits = _mix(key + _GOLDEN)
    return ((bits >> (64 - _UNIFORM_BITS)) + 0.5) * 2.0**-_UNIFORM_BITS


def random_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """64 random bits for each pair of key and token id, both int64, broadcast against each other."""
    bits = token_ids + 1
    bits = bits.mul_(_signed(_GOLDEN)) + keys
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        bits ^= _shift_right(bits, shift)
        bits *= _signed(multiplier)
    bits ^= _shift_right(bits, _SHIFTS[-1])
    return bits


def uniforms(bits: Tensor) -> Tensor:
    """Random bits, int64, to numbers in (0, 1): float64 multiples of 2^-53, never 0 and never 1."""
    return _shift_right(bits, 64 - _UNIFORM_BITS).to(torch.float64).add_(0.5).mul_(2.0**-_UNIFORM_BITS)


def exponentials(bits: Tensor) -> Tensor:
    """Random bits, int64, to exponential variates -ln(u), float64 > 0.

    u = m 2^e, and m in [0.5, 1) lies in one of 128 bins with right edge c: ln(u) = e ln(2) + ln(c) + ln(1 + (m - c)/c).
    The last edge is 1, so the logarithm of a u close to 1 loses no digits.
    """
    float_bits = uniforms(bits).view(torch.int64)
    exponents = (float_bits >> 52).sub_(1022).to(torch.float64)
    bins = (float_bits >> (52 - _TABLE_BITS)).bitwise_and_(2**_TABLE_BITS - 1)
    mantissas = float_bits.bitwise_and_(_MANTISSA_MASK).bitwise_or_(_HALF_EXPONENT).view(torch.float64)
    edges, inverse_edges, edge_logs = _tables(bits.device)
    ratios = mantissas.sub_(edges[bins]).mul_(inverse_edges[bins])
    logs = ratios * _LOG1P[-1]
    for coefficient in reversed(_LOG1P[:-1]):
        logs = logs.add_(coefficient).mul_(ratios)
    logs += edge_logs[bins]
    logs += exponents.mul_(_LN_2)
    return logs.neg_()


@functools.lru_cache(maxsize=1024)
def _stream_key(seed: int, stream: Stream) -> int:
    return _mix(_mix(seed + _GOLDEN) + int(stream) * _GOLDEN)


def _mix(value: int) -> int:
    value &= _MASK64
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        value = (value ^ (value >> shift)) * multiplier & _MASK64
    return value ^ (value >> _SHIFTS[-1])


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK64
    return value - 2**64 if value >= 2**63 else value


def _shift_right(bits: Tensor, shift: int) -> Tensor:
    """Logical shift; torch's own repeats the sign."""
    return (bits >> shift).bitwise_and_(2 ** (64 - shift) - 1)


def _natural_log(numerator: int, denominator: int) -> float:
    """ln of a fraction, correctly rounded whatever the platform's maths library."""
    with localcontext() as context:
        context.prec = 50
        return float((Decimal(numerator) / Decimal(denominator)).ln())


_LN_2 = _natural_log(2, 1)


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Right edges of the bins, their reciprocals and their logarithms, float64 [128]."""
    count = 2**_TABLE_BITS
    edges = [(count + 1 + index) / (2 * count) for index in range(count)]
    logs = [_natural_log(count + 1 + index, 2 * count) for index in range(count)]
    columns = (edges, [1.0 / edge for edge in edges], logs)
    first, second, third = (torch.tensor(column, dtype=torch.float64, device=device) for column in columns)
    return first, second, third
