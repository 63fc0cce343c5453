"""Schedules of hints against a toy target: what comes when, how much of it is true, and the text that must come out.

A schedule is played through the same functions that a target's judge uses: `accept_tree` or, when sampling, the real
sampler's own draw at every node, and `end_verdict`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import TargetSampler
from slipstream.speculation.hints.draft_tree import TreeLimits
from slipstream.speculation.hints.strategies import HintStrategy, Lookup, Resynchronising, Windowed
from slipstream.speculation.protocol import FinishReason, StopRule, TokenTree, accept_tree, end_verdict

EOS = 0
NUM_ROWS = 101
STRATEGIES: dict[str, Callable[[int], HintStrategy]] = {
    "hsd": Windowed,
    "hints": Resynchronising,
    "prompt_lookup": Lookup,
}
LIES = ("true", "noisy", "shifted", "shuffled", "random", "outside", "repeated", "empty")
"""What a hint has to do with the text."""


@dataclass(frozen=True)
class Arrival:
    """A hint, and the pass before which it comes."""

    at_pass: int
    lie: str
    seed: int


@dataclass(frozen=True)
class HintSchedule:
    """One caption with hints."""

    strategy: str
    vocab_size: int
    salt: int
    temperature: float
    max_new_tokens: int
    max_depth: int
    max_rows: int
    slope: float
    """Of T_p(k), in plain passes a row."""
    as_chain: bool = False
    arrivals: tuple[Arrival, ...] = ()


@dataclass(frozen=True)
class Played:
    """What came of a schedule."""

    text: list[int]
    finish_reason: FinishReason
    plain_text: list[int]
    plain_reason: FinishReason
    num_passes: int
    num_rows: int
    num_from_hints: int

    @property
    def is_plain(self) -> bool:
        """The one thing that must hold."""
        return (self.text, self.finish_reason) == (self.plain_text, self.plain_reason)


class ToyText:
    """A model over few tokens: its choice depends on the length and the last three tokens, and on the seed's noise."""

    def __init__(self, schedule: HintSchedule) -> None:
        noise = torch.Generator().manual_seed(schedule.salt)
        self._logits = 2 * torch.randn(NUM_ROWS, schedule.vocab_size, generator=noise)
        self._logits[:, EOS] -= 2
        params = SamplingParams(temperature=schedule.temperature, seed=schedule.salt)
        self._sampler = TargetSampler(params.check(), (), schedule.vocab_size)

    def choose(self, text: Sequence[int]) -> int:
        """The target's own token behind a text."""
        state = len(text) // 7
        for token in text[-3:]:
            state = (state * 31 + token * 97 + 11) % 1_000_003
        return self._sampler.judge(self._logits[state % NUM_ROWS][None], text, ())[1]


def random_schedule(order: random.Random) -> HintSchedule:
    """Any schedule, for a bench that plays thousands; tests draw theirs from Hypothesis."""
    tokens = order.randint(1, 60)
    arrivals = tuple(
        Arrival(order.choice((0, 0, order.randint(0, tokens))), order.choice(LIES), order.randrange(2**30))
        for _ in range(order.randint(0, 4))
    )
    return HintSchedule(
        strategy=order.choice(tuple(STRATEGIES)),
        vocab_size=order.choice((2, 3, 8, 40)),
        salt=order.randrange(2**30),
        temperature=order.choice((0.0, 0.0, 0.7, 1.3)),
        max_new_tokens=tokens,
        max_depth=order.choice((1, 2, 5, 16, 40)),
        max_rows=order.choice((1, 3, 12, 48)),
        slope=order.choice((0.0, 0.0, 0.02, 0.3)),
        as_chain=order.random() < 0.2,
        arrivals=arrivals,
    )


def play(schedule: HintSchedule) -> Played:
    """The schedule's text and plain decoding's. Asserts that every tree is within its limits."""
    model = ToyText(schedule)
    rule = StopRule((EOS,), schedule.max_new_tokens)
    plain, plain_reason = _plain(model, rule)
    limits = TreeLimits(
        schedule.max_depth, schedule.max_rows, lambda rows: 1.0 + schedule.slope * rows, schedule.as_chain
    )
    strategy = STRATEGIES[schedule.strategy](schedule.vocab_size)
    text: list[int] = []
    reason, num_passes, num_rows, num_from_hints = None, 0, 0, 0
    while reason is None:
        for arrival in schedule.arrivals:
            if arrival.at_pass == num_passes and schedule.strategy != "prompt_lookup":
                strategy.add(make_hint(arrival, plain, schedule.vocab_size))
        tree = strategy.propose(limits)
        window: tuple[int, ...] = ()
        path: tuple[int, ...] = ()
        own_token = model.choose(text)
        if tree is not None:
            _check_tree(tree, schedule)
            window = tree.token_ids
            path, own_token = accept_tree(tree, partial(_choose, model, text, window))
        verdict = end_verdict(window, len(path), own_token, len(text), rule, path)
        committed = verdict.committed(window)
        assert committed, "every pass commits a token"
        strategy.commit(committed)
        text.extend(committed)
        reason = verdict.finish_reason
        num_passes, num_rows = num_passes + 1, num_rows + len(window)
        num_from_hints += verdict.num_accepted
    return Played(text, reason, plain, plain_reason, num_passes, num_rows, num_from_hints)


def make_hint(arrival: Arrival, plain: Sequence[int], vocab_size: int) -> list[int]:
    """A hint about the text `plain`."""
    order = random.Random(arrival.seed)
    match arrival.lie:
        case "true":
            return list(plain)
        case "noisy":
            return _noisy(plain, vocab_size, order)
        case "shifted":
            return list(plain)[order.randint(0, len(plain)) :]
        case "shuffled":
            return order.sample(list(plain), len(plain))
        case "outside":
            return [order.choice((token, token, -1, vocab_size, 2**40)) for token in plain]
        case "repeated":
            return [order.randrange(vocab_size)] * order.randint(1, 500)
        case "random":
            return [order.randrange(vocab_size) for _ in range(order.randint(1, 200))]
    return []


def _noisy(plain: Sequence[int], vocab_size: int, order: random.Random) -> list[int]:
    hint: list[int] = []
    for token in plain:
        event = order.random()
        if event > 0.15:
            hint.append(token)
        elif event > 0.1:
            hint.append(order.randrange(vocab_size))
        elif event > 0.05:
            hint += [token, order.randrange(vocab_size)]
    return hint


def _plain(model: ToyText, rule: StopRule) -> tuple[list[int], FinishReason]:
    text: list[int] = []
    while True:
        verdict = end_verdict((), 0, model.choose(text), len(text), rule)
        text.extend(verdict.committed(()))
        if verdict.finish_reason is not None:
            return text, verdict.finish_reason


def _choose(model: ToyText, text: Sequence[int], window: Sequence[int], row: int, nodes: tuple[int, ...]) -> int:
    return model.choose([*text, *(window[node] for node in nodes)])


def _check_tree(tree: TokenTree, schedule: HintSchedule) -> None:
    token_ids, parents = tree.token_ids, tree.parents
    assert len(token_ids) <= schedule.max_rows
    assert max(tree.depths) < schedule.max_depth
    assert all(0 <= token < schedule.vocab_size for token in token_ids)
    assert len({(parent, token) for parent, token in zip(parents, token_ids, strict=True)}) == len(token_ids)
    if schedule.as_chain:
        assert parents == tuple(range(-1, len(parents) - 1))
