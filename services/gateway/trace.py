"""Tells who asked for it what the models did and when. Knows no protocol: it is told of messages."""

from collections.abc import Callable

from slipstream.rpc.v1 import draft_pb2, gateway_pb2, target_pb2


class Tracer:
    """Emits a caption's `Trace` events; does nothing for a request without `trace`."""

    def __init__(self, emit: Callable[[gateway_pb2.CaptionEvent], None], *, is_on: bool) -> None:
        self._emit = emit
        self._is_on = is_on

    def passed(self, at_s: float, asked_s: float, num_tokens: int, verdict: target_pb2.Verdict) -> None:
        """A verdict came on a window of `num_tokens`, asked for at `asked_s`."""
        self._tell(
            kind="pass",
            at_s=at_s,
            asked_s=asked_s,
            pass_s=verdict.pass_s,
            tokens=num_tokens,
            accepted=verdict.num_accepted,
        )

    def drafted(self, at_s: float, tokens: draft_pb2.DraftTokens, *, stale: bool) -> None:
        """The draft's tokens came; stale ones belong to a line that was given up."""
        self._tell(kind="draft", at_s=at_s, pass_s=tokens.pass_s, tokens=len(tokens.token_ids), stale=stale)

    def restarted(self, at_s: float) -> None:
        """The draft was told to begin anew."""
        self._tell(kind="restart", at_s=at_s)

    def _tell(self, **figures: object) -> None:
        if self._is_on:
            self._emit(gateway_pb2.CaptionEvent(trace=gateway_pb2.Trace(**figures)))  # type: ignore[arg-type]
