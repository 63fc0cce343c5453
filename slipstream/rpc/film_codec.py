"""Films in segments as in gateway.proto, to and from plain types; and the method as a client calls it."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc

from slipstream.errors import ProtocolViolation
from slipstream.messages import FilmEvent, FilmFacts, Segment
from slipstream.rpc.codec import caption_event, from_message, read_caption_event, to_message
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc


def film_event(event: FilmEvent) -> gateway_pb2.FilmEvent:
    """What a film says, for the wire."""
    match event:
        case FilmFacts():
            return gateway_pb2.FilmEvent(film=to_message(event, gateway_pb2.FilmFacts))
        case Segment():
            return gateway_pb2.FilmEvent(segment=to_message(event, gateway_pb2.Segment))
        case _:
            return gateway_pb2.FilmEvent(caption=caption_event(event))


async def read_film_events(messages: AsyncIterator[Any]) -> AsyncGenerator[FilmEvent, None]:
    """What a film says. Raises `ProtocolViolation` for messages that say nothing, or are out of order."""
    is_in_segment = False
    async for message in messages:
        match message.WhichOneof("message"):
            case "film":
                yield from_message(message.film, FilmFacts)
            case "segment":
                is_in_segment = True
                yield from_message(message.segment, Segment)
            case "caption" if is_in_segment:
                yield read_caption_event(message.caption)
            case kind:
                raise ProtocolViolation(f"the gateway sent {kind or 'an empty message'} out of its place")


def film_request(options: gateway_pb2.CaptionOptions) -> gateway_pb2.CaptionRequest:
    """What asks for a film."""
    return gateway_pb2.CaptionRequest(options=options)


def film_chunk_message(data: bytes) -> gateway_pb2.CaptionRequest:
    """The next bytes of a film."""
    return gateway_pb2.CaptionRequest(video=data)


def call_caption_segments(
    channel: grpc.aio.Channel,
    requests: AsyncIterator[gateway_pb2.CaptionRequest],
    *,
    timeout_s: float,
    metadata: grpc.aio.Metadata,
) -> Any:
    """The call, begun."""
    return gateway_pb2_grpc.GatewayStub(channel).CaptionSegments(requests, timeout=timeout_s, metadata=metadata)
