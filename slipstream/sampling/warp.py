"""From logits to the distribution that a request asks for: repetition penalty, temperature, top-k, top-p.

The order and the meaning of the steps are those of transformers' logits processors. The penalty is computed in the
logits' own fp32, so that a greedy choice rounds as theirs does; probabilities are float64.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.sampling.params import SamplingParams


class Warp:
    """One request's sampling parameters applied to logits. Holds no state: the penalty follows the given prefix only.

    Args:
        prompt_ids: the prompt as `transformers.generate` would be given it, placeholders of video tokens included.
        vocab_size: width of the logits.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self._prompt_ids = frozenset(token for token in prompt_ids if 0 <= token < vocab_size)

    def penalised(self, logits: Tensor, output: Sequence[int], window: Sequence[int] = ()) -> Tensor:
        """Logits [n, vocab] after the repetition penalty; the given ones themselves when there is none.

        Row j follows prompt, `output` and `window[:j]`: a token counts as seen in the rows behind it only. The window
        may be longer than n - 1.
        """
        penalty = self.params.repetition_penalty
        if penalty == 1.0:
            return logits
        seen = self._prompt_ids.union(output)
        first_rows = {token: 0 for token in seen}
        for index, token in enumerate(window[: len(logits) - 1]):
            first_rows.setdefault(token, index + 1)
        columns = torch.tensor(list(first_rows), dtype=torch.int64, device=logits.device)
        since = torch.tensor(list(first_rows.values()), dtype=torch.int64, device=logits.device)
        scores = logits[:, columns]
        rows = torch.arange(len(logits), device=logits.device)[:, None]
        penalties = torch.where(scores < 0, scores * penalty, scores / penalty)
        return logits.index_copy(1, columns, torch.where(rows >= since, penalties, scores))

    def likeliest(self, logits: Tensor, output: Sequence[int], window: Sequence[int] = ()) -> list[int]:
        """The greedy choice of each row, after the penalty. Raises like `probabilities`."""
        scores = self.penalised(logits, output, window)
        token_ids = scores.argmax(dim=-1, keepdim=True)
        _finite(scores.gather(-1, token_ids))
        choices: list[int] = token_ids[:, 0].tolist()
        return choices

    def probabilities(self, logits: Tensor, output: Sequence[int], window: Sequence[int] = ()) -> Tensor:
        """Float64 [n, vocab], each row summing to 1; tokens that top-k and top-p leave out have exactly 0.

        Tokens as likely as the last one that is kept are kept too, so that ties do not depend on the order of a sort.
        Raises `SlipstreamError` when the logits hold NaN or no finite maximum.
        """
        scores = self.penalised(logits, output, window).to(torch.float64)
        best = _finite(scores.amax(dim=-1, keepdim=True))
        scores = (scores - best).div_(self.params.temperature)
        if 0 < self.params.top_k < self.vocab_size:
            floor = scores.topk(self.params.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill_(scores < floor, -torch.inf)
        probabilities = scores.softmax(dim=-1)
        return self._nucleus(probabilities) if self.params.top_p < 1.0 else probabilities

    def _nucleus(self, probabilities: Tensor) -> Tensor:
        """Keeps the likeliest tokens up to and including the one that makes their sum reach top_p."""
        likeliest = _descending(probabilities)
        num_kept = (likeliest.cumsum(dim=-1) < self.params.top_p).sum(dim=-1, keepdim=True) + 1
        floor = likeliest.gather(-1, num_kept.clamp_(max=self.vocab_size) - 1)
        kept = probabilities.masked_fill(probabilities < floor, 0.0)
        return kept.div_(kept.sum(dim=-1, keepdim=True))


def _finite(best: Tensor) -> Tensor:
    """The best score of each row; a NaN anywhere in a row is its best."""
    if not bool(best.isfinite().all()):
        raise SlipstreamError("the model's logits are not finite numbers; try another dtype (--dtype)")
    return best


def _descending(rows: Tensor) -> Tensor:
    """Sorts each row. On a CPU numpy does: 1.5 ms for 152,064 numbers, where torch takes 27 ms."""
    if rows.device.type == "cpu":
        return torch.from_numpy(np.sort(rows.numpy(), axis=-1)).flip(-1)
    return rows.sort(dim=-1, descending=True).values
