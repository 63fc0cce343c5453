"""Toy target and draft over a few tokens, the real samplers, and the real pipeline under random interleavings.

The toy text is a sequence of independent blocks of three tokens, so that one caption yields many samples of the joint
distribution of three consecutive tokens, at every offset from the windows' bounds. The schedule is drawn from random
numbers of its own: who acts next, how far the draft is ahead, when it dies and comes back.
"""

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from slipstream.sampling.params import Proposal, SamplingParams
from slipstream.sampling.sampler import DraftSampler, TargetSampler, Warp
from slipstream.speculation.pacing import Fixed, Policy, SelfClocked
from slipstream.speculation.pipeline import Pipeline
from slipstream.speculation.protocol import Action, JudgeWindow, StopRule, end_verdict
from tests.sampling.statistics import chi_square_tail, fit
from tests.speculation.toys import Always, Stage, measured_costs

VOCAB = 5
BLOCK = 3
LENGTH = 10 * BLOCK
RULES = ("coupled", "rejection")
TEMPERATURES = (0.5, 1.0, 1.5)
Text = tuple[int, ...]
COSTS = measured_costs(3.0, 0.6)


class ToyLM:
    """A model of independent blocks. `table` [1 + V + V^2, V] holds the logits after 0, 1 or 2 tokens of a block."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def logits(self, output: Sequence[int], window: Sequence[int] = ()) -> Tensor:
        """Logits [len(window) + 1, V] after the output, after one token of the window, and so on."""
        text = [*output, *window]
        return self.table[[self._row(text[:end]) for end in range(len(output), len(text) + 1)]]

    @staticmethod
    def _row(text: Sequence[int]) -> int:
        row = 0
        for token in text[len(text) - len(text) % BLOCK :]:
            row = row * VOCAB + token + 1
        return row


def toy_target(seed: int = 0) -> ToyLM:
    """Logits of spread 1."""
    return ToyLM(torch.randn(1 + VOCAB + VOCAB**2, VOCAB, generator=torch.Generator().manual_seed(seed)))


def toy_drafts(target: ToyLM) -> dict[str, ToyLM]:
    """A good draft and three adversaries."""
    noise = torch.randn(target.table.shape, generator=torch.Generator().manual_seed(1))
    nothing = torch.full_like(target.table, -torch.inf)
    return {
        "good": ToyLM(target.table + 0.5 * noise),
        "uniform": ToyLM(torch.zeros_like(target.table)),
        "reversed": ToyLM(-target.table),
        "point": ToyLM(nothing.scatter(-1, target.table.argmin(dim=-1, keepdim=True), 0.0)),
    }


def coin_toss() -> tuple[ToyLM, ToyLM]:
    """A target that mostly tosses a coin between tokens 0 and 1, and a draft that always bets on 0.

    An accept test is the toss itself: tests that share a number show as tokens that go together.
    """
    shape = (1 + VOCAB + VOCAB**2, 1)
    target = torch.tensor([0.0, 0.0, -2.0, -2.0, -2.0]).repeat(shape)
    return ToyLM(target), ToyLM(target.masked_fill(torch.arange(VOCAB) > 0, -torch.inf))


def exact_block(target: ToyLM, params: SamplingParams) -> dict[Text, float]:
    """Probability of every block."""
    warp = Warp(params, (), VOCAB)
    joint: dict[Text, float] = {(): 1.0}
    for _ in range(BLOCK):
        rows = {text: warp.probabilities(target.logits(text), text)[0].tolist() for text in joint}
        joint = {(*text, token): joint[text] * rows[text][token] for text in joint for token in range(VOCAB)}
    return joint


def exact_run(block: dict[Text, float], offset: int, count: int) -> dict[Hashable, float]:
    """Probability of `count` consecutive tokens of which the first has that offset in its block; at most one boundary
    lies between them."""
    within = min(count, BLOCK - offset)
    first, second = _marginal(block, offset, within), _marginal(block, 0, count - within)
    return {(*a, *b): first[a] * second[b] for a, b in product(first, second)}


def runs_of(text: Sequence[int], offset: int, count: int, step: int = BLOCK) -> list[Text]:
    """Every `step`-th run of `count` tokens, from `offset` on."""
    starts = range(offset, len(text) - count + 1, step)
    return [tuple(text[start : start + count]) for start in starts]


def _marginal(block: dict[Text, float], first: int, count: int) -> dict[Text, float]:
    cells = dict.fromkeys(product(range(VOCAB), repeat=count), 0.0)
    for text, probability in block.items():
        cells[text[first : first + count]] += probability
    return cells


@dataclass(frozen=True)
class Interleaving:
    """How a run goes: what the pipeline waits for and how probable each event is."""

    policy: Policy
    max_window: int
    haste: float
    """Probability that the target answers before the draft does anything."""
    num_ahead: int
    """Tokens that the draft writes at once."""
    loss: float
    """Probability of losing the draft before it does anything."""


FULL_WINDOWS = (Interleaving(Always(4, 4), 4, 0.3, 4, 0.0), Interleaving(Always(2, 2), 4, 0.3, 1, 0.0))
"""Nearly every token is judged in a window."""
INTERLEAVINGS = (
    *FULL_WINDOWS,
    Interleaving(Always(2, 3), 8, 0.1, 2, 0.05),
    Interleaving(Always(0, 2), 2, 0.05, 1, 0.02),
    Interleaving(Fixed(), 4, 0.3, 2, 0.0),
    Interleaving(SelfClocked(), 8, 0.1, 3, 0.02),
)


class SampledStage(Stage):
    """A stage whose target and draft sample; proposals travel with the windows as the gateway sends them."""

    def __init__(self, pipeline: Pipeline, models: tuple[ToyLM, ToyLM | None], params: SamplingParams) -> None:
        super().__init__(pipeline, lambda output: 0, StopRule((), LENGTH))
        self.target, self.toy_draft = models
        self.target_sampler = TargetSampler(params, (), VOCAB)
        self.draft_sampler = DraftSampler(params, (), VOCAB)
        self.written: dict[int, Proposal | None] = {}
        self.in_flight: list[Proposal] = []

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, JudgeWindow):
                first = len(self.pipeline.committed)
                drawn_from = [self.written[first + index] for index in range(len(action.window))]
                self.in_flight = [proposal for proposal in drawn_from if proposal is not None]
        super().carry_out(actions)

    def judge(self, round_s: float = 1.0, held_s: float = 0.0) -> None:
        window = self.passes.popleft()
        logits = self.target.logits(self.output, window)
        decided = self.target_sampler.judge(logits, self.output, window, self.in_flight)
        self.in_flight = []
        verdict = end_verdict(window, *decided, len(self.output), self.rule)
        if verdict.finish_reason is not None:
            self.passes.clear()
        self.carry_out(self.pipeline.on_verdict(verdict, round_s, held_s))

    def write(self, *, agree: bool = True) -> None:
        assert self.draft is not None and self.toy_draft is not None
        output = self.draft.output
        token, self.written[len(output)] = self.draft_sampler.choose(self.toy_draft.logits(output)[0], output)
        self.draft.write(token)

    def play_on(self, schedule: random.Random, plan: Interleaving, stop_at: int = LENGTH) -> "SampledStage":
        """Goes on until `stop_at` tokens are committed."""
        while len(self.output) < stop_at:
            self.act(schedule, plan)
        return self

    def act(self, schedule: random.Random, plan: Interleaving) -> None:
        """One event out of those that may happen now."""
        if (self.passes and schedule.random() < (0.3 if self.draft else 0.5)) or self.toy_draft is None:
            self.judge()
        elif self.draft is None:
            self.join()
        elif schedule.random() < plan.loss:
            self.lose()
        elif not self._draft_acts(schedule, plan.num_ahead):
            self.judge()

    def _draft_acts(self, schedule: random.Random, num_ahead: int) -> bool:
        """Lets the draft do something; False when it may not."""
        draft = self.draft
        assert draft is not None
        if not draft.ready:
            self.ready()
        elif draft.inbox:
            draft.obey()
        elif draft.outbox and (schedule.random() < 0.7 or not draft.can_write):
            self.deliver()
        else:
            num_written = len(draft.output)
            while draft.can_write and len(draft.output) < num_written + num_ahead:
                self.write()
            return len(draft.output) > num_written
        return True


def play(
    target: ToyLM,
    draft: ToyLM | None,
    params: SamplingParams,
    plan: Interleaving,
    schedule: random.Random,
    stop_at: int = LENGTH,
) -> SampledStage:
    """One caption from beginning to end, or until `stop_at` tokens are committed."""
    pipeline = Pipeline(plan.policy, COSTS.fork(), max_window=plan.max_window, vocab_size=VOCAB)
    return SampledStage(pipeline, (target, draft), params).play_on(schedule, plan, stop_at)


def play_many(
    models: tuple[ToyLM, ToyLM],
    rule: str,
    temperature: float,
    num_runs: int,
    plans: Sequence[Interleaving] = INTERLEAVINGS,
) -> list[Text]:
    """Texts of target and draft with seeds from 0 on, the plans in turn."""
    texts = []
    for seed in range(num_runs):
        params = SamplingParams(temperature, seed=seed, rule=rule)
        texts.append(tuple(play(*models, params, plans[seed % len(plans)], random.Random(seed)).output))
    return texts


def p_values(target: ToyLM, texts: Sequence[Text], temperature: float) -> dict[str, float]:
    """p-value of every run of 2 and of 3 consecutive tokens, by the offset of its first token in a block."""
    block = exact_block(target, SamplingParams(temperature))
    found = {}
    for count, offset in product((2, 3), range(BLOCK)):
        samples = [run for text in texts for run in runs_of(text, offset, count)]
        found[f"{count} tokens from {offset}"] = chi_square_tail(*fit(samples, exact_run(block, offset, count)))
    return found
