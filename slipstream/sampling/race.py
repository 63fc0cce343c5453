"""Draws tokens by a race: token i arrives after E_i / weight_i, with E_i exponential noise, and the first one wins.

It is token i with probability weight_i / sum(weights): the Gumbel-max trick without its second logarithm. A token of
weight 0 never arrives. The weights need not add up to 1.
"""

from collections import OrderedDict

import torch
from torch import Tensor

from slipstream.sampling.noise import Stream, exponentials, key_tensor, position_key, random_bits

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
        token_ids = torch.arange(weights.shape[-1], device=weights.device)
        winners: list[int] = []
        for row, key in zip(weights, keys, strict=True):
            entrants = row.nonzero()[:, 0] if bool((row == 0).any()) else token_ids
            (winner,) = _first_to_arrive(row[None, entrants], exponentials(random_bits(key, entrants))[None])
            winners.append(int(entrants[winner]))
        return winners

    def choose_among(self, token_ids: Tensor, weights: Tensor, position: int) -> int:
        """The winner's index among `token_ids`, int64 [m], with `weights` [m]; with the same numbers as `choose`."""
        if self._rows_per_table:
            noise = self._table_row(position, weights.device)[token_ids]
        else:
            noise = exponentials(random_bits(self._keys(Stream.CHOICE, position, weights[None]), token_ids))
        return _first_to_arrive(weights[None], noise[None])[0]

    def ranked(self, weights: Tensor, position: int, count: int) -> list[int]:
        """The first `count` tokens to arrive at `position`, with `weights` [vocab]; the first of them is `choose`'s."""
        if self._rows_per_table:
            noise = self._table_row(position, weights.device)
        else:
            token_ids = torch.arange(len(weights), device=weights.device)
            noise = exponentials(random_bits(self._keys(Stream.CHOICE, position, weights[None]), token_ids)).view(-1)
        first: list[int] = (weights / noise).topk(min(count, len(weights))).indices.tolist()
        return first

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


def _first_to_arrive(weights: Tensor, noise: Tensor) -> list[int]:
    winners: list[int] = (weights / noise).argmax(dim=-1).tolist()
    return winners
