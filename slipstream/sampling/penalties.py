"""Logits [n, vocab] of rows that follow one text, with some tokens made less likely, or impossible.

Row j follows the prompt, `output` and `window[:j]`: a token counts in the rows behind it only. The window may be longer
than n - 1. What is taken, divided or multiplied is in the logits' own fp32, so that a greedy choice rounds as that of
others does.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.device_copy import to_device


def for_repetition(
    logits: Tensor, penalty: float, prompt_ids: Collection[int], output: Sequence[int], window: Sequence[int]
) -> Tensor:
    """`penalty` divides (multiplies, where negative) the logits of all tokens that occurred, as transformers' does."""
    first_rows = dict.fromkeys([*prompt_ids, *output], 0)
    for index, token in enumerate(window[: len(logits) - 1]):
        first_rows.setdefault(token, index + 1)
    packed = torch.tensor([list(first_rows), list(first_rows.values())], dtype=torch.int64)
    columns, since = to_device(packed, logits.device)
    scores = logits[:, columns]
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    penalties = torch.where(scores < 0, scores * penalty, scores / penalty)
    return logits.index_copy(1, columns, torch.where(rows >= since, penalties, scores))


def for_counts(
    logits: Tensor, presence: float, frequency: float, output: Sequence[int], window: Sequence[int]
) -> Tensor:
    """`presence` less for tokens that occurred, and `frequency` less for each time, without the prompt: the formula of
    OpenAI's protocol."""
    behind = window[: len(logits) - 1]
    columns, places = np.unique(np.array([*output, *behind], dtype=np.int64), return_inverse=True)
    counts = np.zeros((len(logits), len(columns)))
    counts[:] = np.bincount(places[: len(output)], minlength=len(columns))
    for row, place in enumerate(places[len(output) :], 1):
        counts[row:, place] += 1
    taken = torch.from_numpy(frequency * counts + presence * (counts > 0)).to(logits.dtype)
    there = to_device(torch.from_numpy(columns), logits.device)
    return logits.index_add(1, there, to_device(taken, logits.device), alpha=-1)


def for_length(logits: Tensor, ends: Sequence[int], missing: int) -> Tensor:
    """The first `missing` rows without the tokens of `ends`, as transformers' `min_new_tokens` has it."""
    columns = to_device(torch.tensor([end for end in ends if end < logits.shape[-1]], dtype=torch.int64), logits.device)
    return torch.cat((logits[:missing].index_fill(1, columns, -torch.inf), logits[missing:]))
