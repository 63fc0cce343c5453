"""What the stream of a call's requests is to be: a message that begins it, and then messages of one kind."""

from collections.abc import AsyncIterator
from typing import TypeVar

from google.protobuf.message import Message

from slipstream.errors import ProtocolViolation

MessageT = TypeVar("MessageT", bound=Message)


async def first_of(requests: AsyncIterator[MessageT], kind: str, what: str) -> MessageT:
    """The message that begins `what`. Raises `ProtocolViolation` where there is none, or one of another kind."""
    first = await anext(aiter(requests), None)
    if first is None or first.WhichOneof("message") != kind:
        raise ProtocolViolation(f"{what} begins with `{kind}`")
    return first


async def chunks_of(requests: AsyncIterator[Message], kind: str, rule: str) -> AsyncIterator[bytes]:
    """What the messages behind the first bring. Raises `ProtocolViolation`, which says the rule, for another kind."""
    async for message in requests:
        if message.WhichOneof("message") != kind:
            raise ProtocolViolation(rule)
        yield getattr(message, kind)
