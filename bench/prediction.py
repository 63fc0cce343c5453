"""What theory says that the measured stack should reach, by method and clip, and where the rest went. Pure.

Theory gets what was measured: the seconds of a target pass by window (of the model pass alone; all captions of a
method together, scaled to the pace of the one at hand), T_q, what a round takes beside its pass, and for every output
position whether the draft agrees. (A measured caption begins with a window that was written under the prefill; a
simulated one does not, which in a short caption is worth up to one plain pass to the measured side.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from bench.pass_costs import pace, pooled_costs, rising, round_overhead_s
from bench.predicted_time import CaptionPrediction, TimeSplit, predict_caption
from bench.samples import Sample, median
from bench.tasks import Agreement
from slipstream.speculation.methods import Drafter, Method

TOLERATED = 0.9
"""A method that is slower than this share of what was predicted gets a cause."""
PARTS = tuple(part.name for part in fields(TimeSplit))


@dataclass(frozen=True)
class _Predicted:
    """One caption of a method."""

    sample: Sample
    seconds: CaptionPrediction
    recorded: bool

    @property
    def ratio(self) -> float:
        """Measured over predicted tokens a second."""
        return self.sample.tokens_per_s * self.seconds.predicted_s

    @property
    def ratio_ideal(self) -> float:
        """The same where rounds cost their passes alone."""
        return self.sample.tokens_per_s * self.seconds.ideal.total


def predictions(
    samples: Sequence[Sample],
    methods: Mapping[str, Method],
    agreements: Mapping[str, Mapping[str, Agreement]],
    *,
    max_window: int,
) -> dict[str, object]:
    """Every caption of every method against theory.

    Args:
        samples: all that was measured; those of rows that are not in `methods` are left out.
        methods: by the name of their row, as the stack ran them.
        agreements: by row and clip. What is missing is predicted from the tau that the caption measured itself.

    Returns:
        `prediction_error`, the median of |measured / predicted - 1| over all captions, or None for no captions;
        `methods`, a row each; `clips`, tokens a second of each caption: measured, predicted, and ideal.
    """
    by_method = {
        name: _predicted(method, [s for s in samples if s.method == name], agreements.get(name, {}), max_window)
        for name, method in methods.items()
    }
    every = [caption for captions in by_method.values() for caption in captions]
    return {
        "prediction_error": median(abs(caption.ratio - 1) for caption in every),
        "methods": [_row(name, captions) for name, captions in by_method.items() if captions],
        "clips": [
            {
                "method": caption.sample.method,
                "clip": caption.sample.clip,
                "measured": caption.sample.tokens_per_s,
                "predicted": 1 / caption.seconds.predicted_s,
                "ideal": 1 / caption.seconds.ideal.total,
            }
            for caption in every
        ],
    }


def _predicted(
    method: Method, samples: Sequence[Sample], agreements: Mapping[str, Agreement], max_window: int
) -> list[_Predicted]:
    """The captions that can be predicted: those with tokens to time, in which the draft wrote if there is one."""
    samples = [
        sample
        for sample in samples
        if len(sample.token_ids) > 1 and sample.tokens_per_s > 0 and any(c.count for c in sample.costs.values())
        if method.drafter is Drafter.NONE or sample.figures.get("draft_pass_s", 0.0) > 0
    ]
    costs = pooled_costs(sample.costs for sample in samples)
    table = rising(costs)
    predicted = []
    for sample in samples:
        own_pace = pace(sample.costs, costs)
        own_table = {window: own_pace * seconds for window, seconds in table.items()}
        agreement = agreements.get(sample.clip)
        seconds = predict_caption(method, sample, own_table, agreement, max_window)
        predicted.append(_Predicted(sample, seconds, agreement is not None))
    return predicted


def _row(name: str, captions: Sequence[_Predicted]) -> dict[str, object]:
    costs = pooled_costs(caption.sample.costs for caption in captions)
    ratio, ratio_ideal = median(c.ratio for c in captions) or 0.0, median(c.ratio_ideal for c in captions) or 0.0
    loss = _loss(captions)
    row: dict[str, object] = {
        "method": name,
        "n": len(captions),
        "agreement_from": "recorded" if all(caption.recorded for caption in captions) else "tau",
        "measured_tokens_per_s": median(c.sample.tokens_per_s for c in captions),
        "predicted_tokens_per_s": median(1 / c.seconds.predicted_s for c in captions),
        "ideal_tokens_per_s": median(1 / c.seconds.ideal.total for c in captions),
        "ratio": ratio,
        "ratio_ideal": ratio_ideal,
        "error": median(abs(c.ratio - 1) for c in captions),
        "round_overhead_s": round_overhead_s(costs),
        "draft_pass_s": median(
            c.sample.figures["draft_pass_s"] for c in captions if "draft_pass_s" in c.sample.figures
        ),
        "tau": median(c.sample.figures["tau"] for c in captions if "tau" in c.sample.figures),
        "loss": loss,
        "first_plain_share": median(_first_plain_share(c.sample) for c in captions),
        "gated_share": median(_gated_share(c.sample) for c in captions),
        "pass_costs": [
            {"window": window, "count": cost.count, "pass_s": cost.pass_s, "round_s": cost.round_s}
            for window, cost in costs.items()
        ],
    }
    return row | {"cause": _cause(row, loss) if min(ratio, ratio_ideal) < TOLERATED else ""}


def _figure(name: str, captions: Sequence[_Predicted]) -> float | None:
    return median(c.sample.figures[name] for c in captions if name in c.sample.figures)


def _loss(captions: Sequence[_Predicted]) -> dict[str, float]:
    """Seconds beyond the ideal's by what they went to, as shares of the ideal's; all captions together."""
    ideal_s = sum(caption.seconds.ideal.total for caption in captions)
    return {
        part: sum(getattr(c.seconds.measured, part) - getattr(c.seconds.ideal, part) for c in captions) / ideal_s
        for part in PARTS
    }


def _first_plain_share(sample: Sample) -> float:
    """Of the decoding time, the part before the draft was ready."""
    late_s = sample.figures.get("draft_ready_s", 0.0) - sample.first_token_s
    return max(late_s, 0.0) * sample.tokens_per_s / (len(sample.token_ids) - 1)


def _gated_share(sample: Sample) -> float:
    """Of the decoding time, what the tokens took that were decoded plainly since drafting did not pay."""
    figures = sample.figures
    gated_s = figures.get("gated_tokens", 0.0) * figures.get("plain_pass_s", 0.0)
    return gated_s * sample.tokens_per_s / (len(sample.token_ids) - 1)


def _cause(row: Mapping[str, object], loss: Mapping[str, float]) -> str:
    """In words, the largest part of the loss."""
    part = max(loss, key=lambda name: loss[name])
    words = {
        "round_overhead": "rounds take time beside their passes: messages and event loops",
        "held": "the target waits for the draft longer than the draft's passes take: restarts and messages",
        "plain_passes": _plain_cause(row),
        "window_passes": "more passes over windows than predicted: fewer tokens came in time or were accepted",
        "other": "time outside rounds and waits",
    }
    return f"{words[part]} (+{loss[part]:.0%} of the ideal time)"


def _plain_cause(row: Mapping[str, object]) -> str:
    reasons = {
        "plain passes before the draft was ready": row["first_plain_share"],
        "plain passes while the gate was closed": row["gated_share"],
    }
    known = {reason: share for reason, share in reasons.items() if isinstance(share, float) and share > 0.02}
    return " and ".join(known) or "more passes without a window than predicted: the draft's tokens came late"
