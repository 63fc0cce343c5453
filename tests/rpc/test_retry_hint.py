"""A refusal for want of room says when to come back, from the service that made it to the caller of its caller."""

from pathlib import Path

import grpc
import pytest

from slipstream.errors import Overloaded, ServiceUnreachable
from slipstream.rpc.calls import as_slipstream_error
from slipstream.rpc.v1 import common_pb2
from tests.rpc.test_server import Troubled, serving


@pytest.mark.parametrize(("hint_s", "sent"), [(2.5, "2500"), (0.0001, "1"), (None, "1000")])
async def test_the_hint_travels_as_trailing_metadata(tmp_path: Path, hint_s: float | None, sent: str | None) -> None:
    servicer = Troubled()

    def trouble() -> None:
        raise Overloaded("no room; try again in about 3 s", retry_after_s=hint_s)

    servicer.trouble = trouble
    async with serving(servicer, tmp_path) as target:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await target.GetModel(common_pb2.GetModelRequest())
    metadata = dict(refused.value.trailing_metadata() or ())
    assert metadata.get("retry-after-ms") == sent
    error = as_slipstream_error(refused.value, "target")
    assert isinstance(error, Overloaded) and str(error) == "no room; try again in about 3 s"
    assert error.retry_after_s == (None if sent is None else int(sent) / 1000)


@pytest.mark.parametrize("value", ["soon", "-5", "1.5", "", "9" * 400, "9" * 5000, "\N{ARABIC-INDIC DIGIT FIVE}"])
def test_a_hint_without_sense_is_no_hint(value: str) -> None:
    trailing = grpc.aio.Metadata(("retry-after-ms", value))
    refused = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailing, "full")
    error = as_slipstream_error(refused, "target")
    assert isinstance(error, Overloaded) and error.retry_after_s is None


@pytest.mark.parametrize("name", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"])
def test_who_does_not_answer_is_not_reachable(name: str) -> None:
    """A server that is just closing ends a new call as cancelled."""
    failed = grpc.aio.AioRpcError(grpc.StatusCode[name], grpc.aio.Metadata(), grpc.aio.Metadata(), "")
    error = as_slipstream_error(failed, "target")
    assert isinstance(error, ServiceUnreachable) and f"not reachable ({name.lower()})" in str(error)
