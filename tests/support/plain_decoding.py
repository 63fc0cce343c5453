"""The plain sequential loop that every other path must equal."""

from collections.abc import Callable, Sequence

from slipstream.speculation.protocol import FinishReason, StopRule, judge_window

NextToken = Callable[[Sequence[int]], int]
"""A greedy model: the output so far in, the next token out."""


def decode_plain(next_token: NextToken, rule: StopRule) -> tuple[list[int], FinishReason]:
    """One token a pass until the text ends."""
    output: list[int] = []
    while True:
        verdict = judge_window((), (next_token(output),), len(output), rule)
        output.extend(verdict.committed(()))
        if verdict.finish_reason is not None:
            return output, verdict.finish_reason
