"""What one caption by one method should take, from its measured parts: the simulator, or a closed form. Pure.

A chain with a draft is played by the event simulator. Trees and self-drafting are rounds in turns, with paper 000's
lemma 1 for the tokens that one yields; so is plain decoding, whose rounds yield one token.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace

from bench.pass_costs import round_overhead_s
from bench.samples import Sample, WindowCost
from bench.simulate import SimulationInput, pass_cost_table, simulate
from bench.tasks import Agreement
from slipstream.speculation.methods import SPARSE_GAMMA, Drafter, Method, Shape
from slipstream.speculation.pacing import DEFAULT_GAMMA, get_policy

REPEATS = 8
"""The recorded text is simulated so many times in a row: the policy's estimates, which a service has from its
earlier captions, then hardly count their first guesses."""


@dataclass(frozen=True)
class TimeSplit:
    """Seconds that one token takes, by what they go to."""

    plain_passes: float = 0.0
    window_passes: float = 0.0
    round_overhead: float = 0.0
    """Beside the passes of the target's rounds: messages, the event loop."""
    held: float = 0.0
    """The target waits for the draft."""
    other: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))


@dataclass(frozen=True)
class CaptionPrediction:
    """One caption, measured and predicted, as seconds a token."""

    measured: TimeSplit
    ideal: TimeSplit
    """Rounds cost their passes alone."""
    predicted_s: float
    """With what its rounds were measured to take beside their passes."""


def predict_caption(
    method: Method, sample: Sample, pass_table: Mapping[int, float], agreement: Agreement | None, max_window: int
) -> CaptionPrediction:
    """From seconds of a target pass by window, and where the draft agrees; without that, from the sample's tau.

    `sample` must have tokens to time, and, where a draft takes part, T_q.
    """
    if method.drafter is Drafter.DRAFT and method.shape is Shape.CHAIN:
        ideal, predicted_s = _simulated(method, sample, pass_table, agreement, max_window)
    else:
        ideal, predicted_s = _in_turns(method, sample, pass_table)
    return CaptionPrediction(_measured(method, sample), ideal, predicted_s)


def _simulated(
    method: Method, sample: Sample, pass_table: Mapping[int, float], agreement: Agreement | None, max_window: int
) -> tuple[TimeSplit, float]:
    agrees = agreement.agrees if agreement is not None else ()
    setup = SimulationInput(
        pass_cost_table(pass_table),
        sample.figures["draft_pass_s"],
        get_policy(method.policy, method.gamma),
        tau=sample.figures.get("tau", 0.0),
        agreement=agrees,
        max_window=max_window,
        num_tokens=REPEATS * len(sample.token_ids),
    )
    ideal = simulate(setup)
    with_messages = simulate(replace(setup, message_s=round_overhead_s(sample.costs) / 2, gate=method.gate))
    num_tokens = setup.num_tokens - 1
    passes = {window: count * setup.target_pass_s(window) for window, count in ideal.passes_by_window.items()}
    plain_s = passes.pop(0, 0.0)
    split = TimeSplit(plain_s / num_tokens, sum(passes.values()) / num_tokens, held=ideal.held_s / num_tokens)
    return split, 1 / with_messages.tokens_per_s


def _in_turns(method: Method, sample: Sample, pass_table: Mapping[int, float]) -> tuple[TimeSplit, float]:
    """A round drafts, then judges; it yields the accepted tokens (lemma 1) and the target's own."""
    levels, window = _levels(method), _usual_window(sample.costs) if method.drafter is not Drafter.NONE else 0
    pass_s = pass_cost_table(pass_table)(window)
    if not levels:
        return TimeSplit(plain_passes=pass_s), pass_s + round_overhead_s(sample.costs)
    num_tokens = expected_accepted(sample.figures.get("tau", 0.0), levels) + 1
    drafting_s = levels * sample.figures["draft_pass_s"]
    if method.drafter is Drafter.SELF:
        overhead_s = round_overhead_s(sample.costs, sample.figures["draft_pass_s"])
    else:
        overhead_s = 2 * round_overhead_s(sample.costs)  # the draft's messages take as long as the target's
    ideal = TimeSplit(window_passes=pass_s / num_tokens, held=drafting_s / num_tokens)
    return ideal, ideal.total + overhead_s / num_tokens


def expected_accepted(tau: float, num_tokens: int) -> float:
    """Of so many draft tokens in a row, those before the first that is rejected (paper 000, lemma 1)."""
    return sum(tau**length for length in range(1, num_tokens + 1))


def _levels(method: Method) -> int:
    """Draft passes of a round."""
    match method.drafter:
        case Drafter.NONE:
            return 0
        case Drafter.SELF:
            return method.gamma or SPARSE_GAMMA
        case Drafter.DRAFT:
            return method.gamma or DEFAULT_GAMMA


def _usual_window(costs: Mapping[int, WindowCost]) -> int:
    return max(costs, key=lambda window: costs[window].count)


def _measured(method: Method, sample: Sample) -> TimeSplit:
    num_tokens = len(sample.token_ids) - 1
    drafts_itself = method.drafter is Drafter.SELF
    overhead_s = drafting_s = 0.0
    for window, cost in sample.costs.items():
        window_drafting_s = window * sample.figures["draft_pass_s"] if drafts_itself else 0.0
        drafting_s += cost.count * window_drafting_s
        overhead_s += cost.count * (cost.round_s - cost.pass_s - window_drafting_s)
    passes = {window: cost.count * cost.pass_s for window, cost in sample.costs.items()}
    plain_s = passes.pop(0, 0.0)
    token_s = 1 / sample.tokens_per_s
    held_s = sample.figures.get("held_share", 0.0) * token_s if not drafts_itself else drafting_s / num_tokens
    split = TimeSplit(plain_s / num_tokens, sum(passes.values()) / num_tokens, overhead_s / num_tokens, held_s)
    return replace(split, other=token_s - split.total)
