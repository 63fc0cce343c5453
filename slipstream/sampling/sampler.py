"""Chooses tokens from logits, at the draft and at the target, and judges windows so that the target's law is kept.

Why the text has the target's distribution. Call position n the n-th output token, and let F(n) be all random numbers of
positions below n. The numbers of different positions are independent (`noise`), and the sampler uses those of position
n for position n only. It is enough that, given the committed prefix, the token committed at n has the target's
distribution whatever F(n) is; the joint distribution follows by the chain rule. Exactly one of two things decides it:

- *The target's own choice*: the race over p with the CHOICE numbers of n. Rule "coupled" always does this, and so does
  "rejection" wherever no draft token is judged: after an accepted window, with no draft, in debt. The committed token
  is that choice. It is compared with a draft token to see whether the line lives, but the comparison changes nothing.
- *The accept test* (rule "rejection", n inside a window): the draft's d was drawn from q with the CHOICE numbers of n.
  It is accepted with probability min(1, p(d) / q(d)), by the ACCEPT number of n, and otherwise replaced by a draw from
  norm(max(0, p - q)) with the RESIDUAL numbers of n. These three are independent of each other, so that the result
  has distribution p (Leviathan et al. 2023, theorem 1).

Draws and own choices share CHOICE because no position needs both, and for the same reason as in "coupled": the
target's own token then equals the draft's with probability >= (1 - TV) / (1 + TV) instead of sum(p q), and more lines
live on (in the toy world of the tests, self-clocked at temperature 1, 86% of draft tokens are accepted, not 42%).

Restarts and debts. A verdict looks at draft tokens up to the first rejected one, and commits at every position that it
looks at. So a draft token at an uncommitted position has influenced no decision when its line dies: drawing at that
position again, on another prefix, with the same numbers is as good as drawing with fresh ones. At committed positions
nothing is ever drawn again: a line restarts behind the committed text, and a draft token that comes late for a
committed position (debt) is only compared. A draft that dies, or one that joins late, is the same case.

What the rules assume of a draft. "coupled": nothing; the text is a function of the target and the seed. "rejection":
that the draft draws from the q it sends, and that *when* a token arrives does not depend on *which* one it is, as that
decides how its position is judged. A proposal that cannot be what a token was drawn from is left aside, and the
position is judged by the target's own choice: a broken draft costs speed, not correctness.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.device_copy import to_device
from slipstream.errors import SlipstreamError
from slipstream.sampling.noise import Races, Stream, position_key, uniform
from slipstream.sampling.params import Proposal, SamplingParams
from slipstream.sampling.penalties import for_counts, for_length, for_repetition
from slipstream.sampling.structure import Structure
from slipstream.speculation.hints.tolerance import Rating
from slipstream.speculation.protocol import accept_greedy

# -- warp -------------------------------------------------------------------------------------------------------------

# From logits to the distribution that a request asks for: penalties, structure, temperature, top-k, top-p, min-p.
#
# The order and the meaning of the steps are those of transformers' logits processors. The penalty is computed in the
# logits' own fp32, so that a greedy choice rounds as theirs does; probabilities are float64.


class Warp:
    """One request's sampling parameters applied to logits. Nothing follows from what was asked before: penalty and
    structure are those behind the given prefix.

    Args:
        prompt_ids: the prompt as `transformers.generate` would be given it, placeholders of video tokens included.
        vocab_size: width of the logits.
        structure: what the text is kept to, where the parameters ask for one.
        ends: tokens that end a text.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        structure: Structure | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self._structure = structure
        self._ends = ends
        self._prompt_ids = frozenset(token for token in prompt_ids if 0 <= token < vocab_size)

    def adjusted(self, logits: Tensor, output: Sequence[int], window: Sequence[int] = ()) -> Tensor:
        """Logits [n, vocab] after the penalties, and -inf for ends that come too soon and for tokens with which no text
        of the structure goes on; the given ones themselves when nothing of that is asked.

        Row j follows prompt, `output` and `window[:j]`: a token counts as seen in the rows behind it only. The window
        may be longer than n - 1. Rows behind a token that cannot come there are as they were.
        """
        params = self.params
        if params.repetition_penalty != 1.0:
            logits = for_repetition(logits, params.repetition_penalty, self._prompt_ids, output, window)
        if params.counts:
            logits = for_counts(logits, params.presence_penalty, params.frequency_penalty, output, window)
        if (missing := params.min_new_tokens - len(output)) > 0:
            logits = for_length(logits, self._ends, missing)
        if self._structure is None:
            return logits
        excluded = torch.zeros(logits.shape, dtype=torch.bool)
        for row, allowed in enumerate(self._structure.allowed(output, window[: len(logits) - 1])):
            excluded[row] = torch.from_numpy(~allowed[: logits.shape[-1]])
        return logits.masked_fill(to_device(excluded, logits.device), -torch.inf)

    def likeliest(self, logits: Tensor, output: Sequence[int], window: Sequence[int] = ()) -> list[int]:
        """The greedy choice of each row, so adjusted; `NO_TOKEN` where there is none."""
        choices: list[int] = largest_of(self.adjusted(logits, output, window)).tolist()  # one wait for a GPU
        return choices

    def probabilities(self, logits: Tensor, output: Sequence[int], window: Sequence[int] = ()) -> Tensor:
        """Float64 [m, vocab], each row summing to 1; tokens that top-k, top-p and min-p leave out have exactly 0.

        Tokens as likely as the last one that is kept are kept too, so that ties do not depend on the order of a sort.
        They are the rows up to the first whose logits hold NaN or no finite maximum. Raises `SlipstreamError` where
        that is the first of all.
        """
        scores = self.adjusted(logits, output, window).to(torch.float64)
        best = scores.amax(dim=-1, keepdim=True)  # a NaN anywhere in a row is its best
        num_sound = int(best.isfinite().cumprod(dim=0).sum())  # one wait for a GPU
        _check_finite(num_sound > 0)
        scores = (scores[:num_sound] - best[:num_sound]).div_(self.params.temperature)
        if 0 < self.params.top_k < self.vocab_size:
            floor = scores.topk(self.params.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill_(scores < floor, -torch.inf)
        probabilities = scores.softmax(dim=-1)
        if self.params.top_p < 1.0:
            probabilities = self._nucleus(probabilities)
        if self.params.min_p > 0.0:
            probabilities = _at_least(self.params.min_p * probabilities.amax(dim=-1, keepdim=True), probabilities)
        return probabilities

    def _nucleus(self, probabilities: Tensor) -> Tensor:
        """Keeps the likeliest tokens up to and including the one that makes their sum reach top_p."""
        likeliest = _descending(probabilities)
        num_kept = (likeliest.cumsum(dim=-1) < self.params.top_p).sum(dim=-1, keepdim=True) + 1
        floor = likeliest.gather(-1, num_kept.clamp_(max=self.vocab_size) - 1)
        return _at_least(floor, probabilities)


def _at_least(floor: Tensor, probabilities: Tensor) -> Tensor:
    kept = probabilities.masked_fill(probabilities < floor, 0.0)
    return kept.div_(kept.sum(dim=-1, keepdim=True))


NO_TOKEN = -1


def largest_of(logits: Tensor) -> Tensor:
    """The likeliest token of each row, int64 [n], on the logits' device; `NO_TOKEN` where that is no finite number."""
    choice = logits.argmax(dim=-1, keepdim=True)
    return torch.where(logits.gather(-1, choice).isfinite(), choice, NO_TOKEN)[:, 0]


def _check_finite(is_finite: bool) -> None:
    if not is_finite:
        raise SlipstreamError("the model's logits are not finite numbers; try another dtype (--dtype)")


def _descending(rows: Tensor) -> Tensor:
    """Sorts each row. On a CPU numpy does: 1.5 ms for 152,064 numbers, where torch takes 27 ms."""
    if rows.device.type == "cpu":
        return torch.from_numpy(np.sort(rows.numpy(), axis=-1)).flip(-1)
    return rows.sort(dim=-1, descending=True).values


# -- sampler ----------------------------------------------------------------------------------------------------------

BLOCK_ROWS = 8
"""Rows of a window that are worked on at once: those behind a rejection are in vain."""
MAX_PROPOSAL_TOKENS = 1024
"""Most tokens of a proposal. Any q keeps the target's distribution, so the draft leaves out what is least likely."""
MAX_SUM_ERROR = 1e-3
"""How far the probabilities of a proposal may be from adding up to 1; fp32 rounding alone stays below 1e-4."""


class _Sampler:
    """Holds no state that a window could change, so that a line may go back to any position.

    Args:
        params: checked ones.
        prompt_ids: the whole prompt, whatever was pruned, for the repetition penalty.
        vocab_size: width of the target's logits.
        structure, ends: as of `Warp`.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        structure: Structure | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self._warp = Warp(params, prompt_ids, vocab_size, structure, ends)
        self._races = Races(params.seed, vocab_size)

    @property
    def takes_largest(self) -> bool:
        """Whether the largest of a row's logits is chosen, whatever was written before."""
        return self.params.takes_largest


class TargetSampler(_Sampler):
    """Judges the windows of one caption."""

    def judge(
        self,
        logits: Tensor,
        committed: Sequence[int],
        window: Sequence[int],
        proposals: Sequence[Proposal] = (),
        largest: Sequence[int] = (),
    ) -> tuple[int, int]:
        """Length of the accepted prefix of the window, and the target's own next token. What comes behind a token that
        is not accepted may be anything: plain decoding would never see those rows.

        Args:
            logits: fp32 [len(window) + 1, vocab], those after the committed text, after `window[:1]`, and so on.
            committed: all output tokens before the window.
            proposals: under rule "rejection", what each token of the window was drawn from; else not looked at.
            largest: where it `takes_largest`, the likeliest token of each row if the host knows it: below 0 where the
                logits are not finite. Then nothing is read from the device.

        Raises:
            SlipstreamError: logits that are not finite, in a row that the text rests on.
        """
        if len(logits) != len(window) + 1:
            raise ValueError(f"a window of {len(window)} needs {len(window) + 1} rows of logits, not {len(logits)}")
        assert not largest or self.takes_largest, "others choose by more than the largest"
        if self.params.greedy:
            accepted, own = accept_greedy(window, largest or self._warp.likeliest(logits, committed, window))
            _check_finite(own > NO_TOKEN)
            return accepted, own
        for index, token in enumerate(self._decide(logits, committed, window, proposals)):
            if index == len(window) or token != window[index]:
                return index, token
        raise AssertionError("the row behind the window always ends it")

    def rate(self, logits: Tensor, committed: Sequence[int], candidates: Sequence[int]) -> Rating:
        """The greedy choice behind `committed`, and how likely it and the candidates are, from logits [1, vocab].
        Raises like `judge`."""
        (own_token,) = self._warp.likeliest(logits, committed)
        _check_finite(own_token > NO_TOKEN)
        log_ps = self._warp.adjusted(logits, committed)[0].to(torch.float64).log_softmax(dim=-1)
        own, *others = log_ps[to_device(torch.tensor([own_token, *candidates]), log_ps.device)].tolist()
        return Rating(own_token, own, others)

    def _decide(
        self, logits: Tensor, committed: Sequence[int], window: Sequence[int], proposals: Sequence[Proposal]
    ) -> Iterator[int]:
        """The token to commit at each position, as long as the window goes on like that."""
        for first in range(0, len(logits), BLOCK_ROWS):
            block, block_window = logits[first : first + BLOCK_ROWS], window[first : first + BLOCK_ROWS]
            target = self._warp.probabilities(block, (*committed, *window[:first]), block_window)
            position = len(committed) + first
            if self.params.sends_proposals:
                block_proposals = proposals[first : first + BLOCK_ROWS]
                yield from self._test(target, position, block_window, block_proposals)
            else:
                yield from self._races.choose(target, position)
            _check_finite(len(target) == len(block))

    def _test(
        self, target: Tensor, position: int, window: Sequence[int], proposals: Sequence[Proposal]
    ) -> Iterator[int]:
        """Accept tests of ParallelVLM, section 2.2. A token that is not accepted is never yielded in its own place."""
        drawn = to_device(torch.tensor(window[: len(target)], dtype=torch.int64), target.device)
        drawn_p = target[: len(drawn)].gather(1, drawn[:, None]).flatten().tolist()  # one wait for a GPU
        for row, row_probabilities in enumerate(target):
            proposal = proposals[row] if row < min(len(window), len(proposals)) else None
            draft = None if proposal is None else read_proposal(proposal, window[row], target.shape[-1])
            if draft is None:
                yield from self._races.choose(row_probabilities[None], position + row)
                continue
            token, key = window[row], position_key(self.params.seed, Stream.ACCEPT, position + row)
            if uniform(key) * float(draft[token]) < drawn_p[row]:
                yield token
            else:
                yield self._races.replace(residual(row_probabilities, draft), position + row)


class DraftSampler(_Sampler):
    """Chooses the draft's tokens. Logits may be wider than `vocab_size`: no token beyond it is chosen."""

    def choose(self, logits: Tensor, output: Sequence[int]) -> tuple[int, Proposal | None]:
        """The token that follows `output`, and under rule "rejection" what it was drawn from.

        Args:
            logits: fp32 [vocab], those after the whole `output`.

        Raises:
            SlipstreamError: logits that are not finite.
        """
        rows = logits[None, : self.vocab_size]
        if self.params.greedy:
            (token,) = self._warp.likeliest(rows, output)
            _check_finite(token > NO_TOKEN)
            return token, None
        if self.params.draws_from_all:
            return self._race_of_all(rows, output), None
        draft = self._warp.probabilities(rows, output)
        if not self.params.sends_proposals:
            return self._races.choose(draft, len(output))[0], None
        weights, token_ids = draft[0].topk(min(MAX_PROPOSAL_TOKENS, draft.shape[-1]))
        sent = (weights / weights.sum()).to(torch.float32)
        winner = self._races.choose_among(token_ids, sent.to(torch.float64), len(output))
        ids, probabilities = token_ids.tolist(), tuple(filter(None, sent.tolist()))  # what rounds to 0 comes last
        return ids[winner], Proposal(tuple(ids[: len(probabilities)]), probabilities)

    def _race_of_all(self, rows: Tensor, output: Sequence[int]) -> int:
        """The winner of the race of all tokens by logarithms, which need no sum: the largest of ln(weight) - ln(E).
        Nearly always `Races.choose`'s, as far as they round alike, and the draft's choice changes no text."""
        scores = self._warp.adjusted(rows, output)[0].to(torch.float64)
        best = scores.max()
        _check_finite(math.isfinite(best))
        logs = (scores - best).div_(self.params.temperature)
        return int(logs.sub_(self._races.arrivals(len(output), logs.device).log()).argmax())

    def rank(self, logits: Tensor, output: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that most likely follow `output` in the target's text, the best first.

        When sampling, in the order in which they arrive in the race whose winner `choose` takes: the target's own
        choice comes from the same numbers.

        Args:
            logits: fp32 [vocab], those after the whole `output`.

        Raises:
            SlipstreamError: logits that are not finite.
        """
        rows = logits[None, : self.vocab_size]
        if not self.params.greedy:
            draft = self._warp.probabilities(rows, output)[0]
            arrived: list[int] = self._races.ranked(draft, len(output), count).tolist()
            return arrived
        largest, best = self._warp.adjusted(rows, output)[0].topk(min(count, rows.shape[-1]))
        _check_finite(math.isfinite(largest[0]))  # a NaN comes first
        return [token for token, score in zip(best.tolist(), largest.tolist(), strict=True) if score > -math.inf]

    def candidates(self, logits: Tensor, output: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """`rank`, without tokens that cannot follow, and how sure the draft is of each of them.

        That is its own probability of the token. Under rule "rejection" it is the largest q, the second largest, and so
        on: never that of the token drawn, since how a position is judged must not depend on what was drawn there.

        Args and raises: as of `rank`.
        """
        rows = logits[None, : self.vocab_size]
        count = min(count, rows.shape[-1])
        if self.params.greedy:
            best, token_ids = self._warp.adjusted(rows, output)[0].softmax(dim=-1).topk(count)
            sure = best.tolist()
            _check_finite(all(map(math.isfinite, sure)))
            num_possible = sum(chance > 0 for chance in sure)
            return token_ids.tolist()[:num_possible], sure[:num_possible]
        draft = self._warp.probabilities(rows, output)[0]
        ranked = self._races.ranked(draft, len(output), count)
        own = [chance for chance in draft[ranked].tolist() if chance > 0]
        held = draft.topk(len(own)).values.tolist() if self.params.sends_proposals else own
        return ranked.tolist()[: len(own)], held


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Weights [vocab] of the token that replaces a rejected one: max(0, p - q), float64.

    Where rounding leaves nothing, p and q are equal, and p itself is returned.
    """
    rest = (target - to_device(draft, target.device)).clamp_(min=0.0)
    return rest if bool((rest > 0).any()) else target


def read_proposal(proposal: Proposal, token: int, vocab_size: int) -> Tensor | None:
    """q as float64 [vocab] on the CPU, adding up to 1; None when `token` cannot have been drawn from the proposal:

    ids that repeat or leave the vocabulary, probabilities that are not positive numbers or do not add up to 1, lists of
    different lengths, or a token that is not among them.
    """
    if not 0 < len(proposal.token_ids) == len(proposal.probabilities) <= vocab_size or token not in proposal.token_ids:
        return None
    token_ids = np.array(proposal.token_ids, dtype=np.int64)
    probabilities = np.array(proposal.probabilities, dtype=np.float64)
    if token_ids.min() < 0 or token_ids.max() >= vocab_size or len(np.unique(token_ids)) < len(token_ids):
        return None
    total = probabilities.sum()
    if not (probabilities > 0).all() or not abs(total - 1.0) <= MAX_SUM_ERROR:
        return None
    draft = np.zeros(vocab_size)
    draft[token_ids] = probabilities / total
    return torch.from_numpy(draft)
