"""When one caption's stages, passes and tokens were, counted from its first token. Pure."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.captions import Event, Traced
from bench.samples import Sample


def timeline(sample: Sample) -> dict[str, Any]:
    """What its client saw, and, where it asked for a trace, what the gateway saw of the models."""
    first_s = next((event.at_s for event in sample.events if event.num_tokens), 0.0)
    return {
        "clip": Path(sample.clip).stem,
        "first_token_s": sample.first_token_s,
        "generate_s": sample.figures.get("generate_s"),
        "events": [_seen(event, first_s) for event in sample.events],
        **({"trace": list(_trace_rows(sample.trace))} if sample.trace else {}),
    }


def _seen(event: Event, first_s: float) -> dict[str, Any]:
    what = {"stage": event.stage} if event.stage else {"tokens": event.num_tokens, "from_draft": event.num_from_draft}
    return {"t_s": _rounded(event.at_s - first_s)} | what


def _trace_rows(trace: Sequence[Traced]) -> Iterator[dict[str, Any]]:
    """Without the pass that is the prefill's own token. Half of what a round takes beside its pass is the way there,
    and half the way back."""
    prefill = next((entry for entry in trace if entry.kind == "pass"), None)
    first_s = 0.0 if prefill is None else prefill.at_s
    for entry in trace:
        if entry is prefill:
            continue
        row: dict[str, Any] = {"t_s": _rounded(entry.at_s - first_s), "kind": entry.kind}
        if entry.kind == "pass":
            back_s = max(entry.at_s - entry.asked_s - entry.pass_s, 0.0) / 2
            row |= {"start_s": _rounded(entry.at_s - first_s - back_s - entry.pass_s), "pass_s": _rounded(entry.pass_s)}
            row |= {"window": entry.num_tokens, "accepted": entry.num_accepted}
        elif entry.kind == "draft":
            row |= {"tokens": entry.num_tokens, "pass_s": _rounded(entry.pass_s), "stale": entry.stale}
        yield row


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
