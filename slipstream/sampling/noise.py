"""Random numbers as a pure function of (seed, stream, output position, token id), with the same bits on every device.

A counter-based generator: the key of a (seed, stream, position) is a chain of splitmix64 finalisers over Python
integers, and a token's 64 bits are the splitmix64 sequence of that key at index token id + 1 (Steele, Lea, Flood,
"Fast splittable pseudorandom number generators", 2014). On tensors this is wrapping int64 arithmetic. What follows is
float64 in separate eager multiplications and additions, each correctly rounded by IEEE 754 on CPU and CUDA alike; there
is no call into a maths library, whose last bits differ between devices.
"""

import enum
import functools
from collections import OrderedDict
from collections.abc import Iterable
from decimal import Decimal, localcontext

import torch
from torch import Tensor

from slipstream.device_copy import to_device

# -- noise ------------------------------------------------------------------------------------------------------------

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
    return to_device(torch.tensor([_signed(key) for key in keys], dtype=torch.int64), device)


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


# -- race -------------------------------------------------------------------------------------------------------------

# Draws tokens by a race: token i arrives after E_i / weight_i, with E_i exponential noise, and the first one wins.
#
# It is token i with probability weight_i / sum(weights): the Gumbel-max trick without its second logarithm. A token
# of weight 0 never arrives. The weights need not add up to 1.

TABLE_NUMBERS = 2**16
"""Noise of a small vocabulary is computed for several positions at once: at most this many numbers,"""
TABLE_ROWS = 16
"""and this many positions."""
MAX_TABLES = 4


class Races:
    """The races of one seed. Keeps noise that it has computed, which changes no result."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._rows_per_table = min(TABLE_NUMBERS // vocab_size, TABLE_ROWS)
        self._tables: OrderedDict[tuple[int, torch.device], Tensor] = OrderedDict()

    def choose(self, weights: Tensor, position: int) -> list[int]:
        """The winner among all tokens at `position`, `position + 1`, ..., one for each row of `weights` [n, vocab].

        The numbers are those of stream CHOICE. Every row must be finite and have a positive weight.
        """
        if self._rows_per_table:
            rows = [self._table_row(position + row, weights.device) for row in range(len(weights))]
            return _first_to_arrive(weights, torch.stack(rows))
        keys = self._keys(Stream.CHOICE, position, weights)
        if weights.device.type == "cpu" and not bool(weights.all()):
            return [_run_by_entrants(row, key) for row, key in zip(weights, keys, strict=True)]
        token_ids = torch.arange(weights.shape[-1], device=weights.device)
        return _first_to_arrive(weights, exponentials(random_bits(keys[:, None], token_ids)))

    def choose_among(self, token_ids: Tensor, weights: Tensor, position: int) -> int:
        """The winner's index among `token_ids`, int64 [m], with `weights` [m]; with the same numbers as `choose`."""
        if self._rows_per_table:
            noise = self._table_row(position, weights.device)[token_ids]
        else:
            noise = exponentials(random_bits(self._keys(Stream.CHOICE, position, weights[None]), token_ids))
        return _first_to_arrive(weights[None], noise[None])[0]

    def ranked(self, weights: Tensor, position: int, count: int) -> Tensor:
        """The first `count` tokens to arrive at `position`, int64, with `weights` [vocab]; the first of them is
        `choose`'s, and those that never arrive are the last."""
        return (weights / self.arrivals(position, weights.device)).topk(min(count, len(weights))).indices

    def arrivals(self, position: int, device: torch.device) -> Tensor:
        """The exponential numbers [vocab] of the race at `position`, each to be divided by its token's weight."""
        if self._rows_per_table:
            return self._table_row(position, device)
        keys = key_tensor([position_key(self._seed, Stream.CHOICE, position)], device)
        return exponentials(random_bits(keys, torch.arange(self._vocab_size, device=device)))

    def replace(self, weights: Tensor, position: int) -> int:
        """The token, drawn by `weights` [vocab], that takes the place of a rejected one: stream RESIDUAL."""
        key = self._keys(Stream.RESIDUAL, position, weights[None])
        token_ids = torch.arange(len(weights), device=weights.device)
        return _first_to_arrive(weights[None], exponentials(random_bits(key, token_ids))[None])[0]

    def _keys(self, stream: Stream, position: int, rows: Tensor) -> Tensor:
        keys = [position_key(self._seed, stream, position + row) for row in range(len(rows))]
        return key_tensor(keys, rows.device)

    def _table_row(self, position: int, device: torch.device) -> Tensor:
        """Noise [vocab] of stream CHOICE at `position`."""
        number, row = divmod(position, self._rows_per_table)
        table = self._tables.get((number, device))
        if table is None:
            table = self._tables[number, device] = self._make_table(number * self._rows_per_table, device)
            if len(self._tables) > MAX_TABLES:
                self._tables.popitem(last=False)
        return table[row]

    def _make_table(self, first: int, device: torch.device) -> Tensor:
        keys = [position_key(self._seed, Stream.CHOICE, first + row) for row in range(self._rows_per_table)]
        token_ids = torch.arange(self._vocab_size, device=device)
        return exponentials(random_bits(key_tensor(keys, device)[:, None], token_ids))


def _run_by_entrants(weights: Tensor, key: Tensor) -> int:
    """The winner of one race, whose noise is computed for those alone that may win: most tokens, after top-k or top-p,
    may not. On a CPU that is sooner done; a GPU would have to be waited for, to learn which they are."""
    entrants = weights.nonzero()[:, 0]
    (winner,) = _first_to_arrive(weights[None, entrants], exponentials(random_bits(key, entrants))[None])
    return int(entrants[winner])


def _first_to_arrive(weights: Tensor, noise: Tensor) -> list[int]:
    winners: list[int] = (weights / noise).argmax(dim=-1).tolist()
    return winners
