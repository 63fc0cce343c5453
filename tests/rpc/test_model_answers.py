"""What a model service says of itself when it is asked, and what a gateway makes of nonsense."""

from typing import Any

import pytest

from slipstream.errors import ServiceUnavailable
from slipstream.rpc.peers import RemoteModel


class Stub:
    """Gives what gRPC gives for bytes that are no message."""

    def __init__(self, channel: object) -> None:
        pass

    async def GetModel(self, *asked: Any, **options: Any) -> None:
        return None


async def test_bytes_that_are_no_message_are_no_answer() -> None:
    remote = RemoteModel("draft", "unix:/somewhere", Stub, object())  # type: ignore[arg-type]
    with pytest.raises(ServiceUnavailable, match="the draft sent bytes that are no message"):
        await remote.ask()
