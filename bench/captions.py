"""Captions one clip through a running stack and keeps what the client saw. Knows no model and no statistics."""

import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import grpc

from slipstream.client.caption_client import caption
from slipstream.errors import ProtocolViolation
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions, Summary, Trace


@dataclass(frozen=True)
class Event:
    """What the client saw, and when: a stage began or moved on, or a target pass's tokens were committed."""

    at_s: float
    """Of the monotonic clock."""
    stage: str = ""
    num_tokens: int = 0
    num_from_draft: int = 0


@dataclass(frozen=True)
class Traced:
    """What the gateway tells of the models, when a request asks for it; see `Trace` in gateway.proto."""

    kind: str
    at_s: float
    """Of the gateway's clock, as all its times."""
    asked_s: float
    pass_s: float
    num_tokens: int
    num_accepted: int
    stale: bool

    @classmethod
    def read(cls, trace: Trace) -> "Traced":
        return cls(trace.kind, trace.at_s, trace.asked_s, trace.pass_s, trace.tokens, trace.accepted, trace.stale)


@dataclass(frozen=True)
class Captioned:
    """One caption as its client saw it."""

    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]
    """Per token, whether the draft wrote it."""
    ready_at: tuple[int, ...]
    """How many tokens there were at each moment when a draft became ready."""
    lost_at: tuple[int, ...]
    """The same for drafts that were lost."""
    summary: Summary
    events: tuple[Event, ...] = ()
    trace: tuple[Traced, ...] = ()


async def run_caption(
    channel: grpc.aio.Channel,
    video: Path,
    options: CaptionOptions,
    on_tokens: Callable[[int, bool], None] = lambda num_tokens, has_draft: None,
) -> Captioned:
    """Uploads `video` and follows its caption to the end.

    `on_tokens` hears how many tokens there are whenever there are more, and whether a draft has joined.
    """
    token_ids: list[int] = []
    from_draft: list[bool] = []
    moments: dict[str, list[int]] = {"draft_ready": [], "draft_lost": []}
    seen: list[Event] = []
    traced: list[Traced] = []
    async with aclosing(caption(channel, video, options)) as events:
        async for event in events:
            if event.HasField("summary"):
                ready_at, lost_at = (tuple(moments[stage]) for stage in ("draft_ready", "draft_lost"))
                return Captioned(
                    tuple(token_ids), tuple(from_draft), ready_at, lost_at, event.summary, tuple(seen), tuple(traced)
                )
            if event.HasField("trace"):
                traced.append(Traced.read(event.trace))
                continue
            if event.HasField("stage"):
                seen.append(Event(time.monotonic(), event.stage.stage))
                moments.get(event.stage.stage, []).append(len(token_ids))
                continue
            written = [token.from_draft for token in event.text.tokens]
            seen.append(Event(time.monotonic(), "", len(written), sum(written)))
            token_ids += [token.token_id for token in event.text.tokens]
            from_draft += written
            on_tokens(len(token_ids), bool(moments["draft_ready"]))
    raise ProtocolViolation("the gateway ended the caption without a summary")
