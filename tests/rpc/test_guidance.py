"""Guidance over the wire: the same tensors arrive, bit for bit, and a stream that lies about itself is refused."""

from collections.abc import AsyncIterator, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ProtocolViolation
from slipstream.pruning import Guidance
from slipstream.rpc.grpc_options import CHUNK_BYTES
from slipstream.rpc.v1 import target_pb2
from slipstream.services.draft.servicer import read_guidance
from slipstream.services.target.servicer import guidance_chunks

STATES, SCORES = target_pb2.GUIDANCE_KIND_HIDDEN_STATES, target_pb2.GUIDANCE_KIND_SCORES


async def read(chunks: Iterable[target_pb2.GuidanceChunk]) -> tuple[Guidance, int]:
    async def stream() -> AsyncIterator[target_pb2.GuidanceChunk]:
        for chunk in chunks:
            yield target_pb2.GuidanceChunk.FromString(chunk.SerializeToString())

    return await read_guidance(stream())


def header(kind: target_pb2.GuidanceKind, video_tokens: int = 2, hidden_size: int = 3) -> target_pb2.GuidanceChunk:
    fields = target_pb2.GuidanceHeader(kind=kind, video_tokens=video_tokens, hidden_size=hidden_size, layer=1)
    return target_pb2.GuidanceChunk(header=fields)


def data(num_bytes: int) -> target_pb2.GuidanceChunk:
    return target_pb2.GuidanceChunk(data=bytes(num_bytes))


@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**32 - 1))
async def test_states(video_tokens: int, hidden_size: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    first, last = (torch.randn(video_tokens, hidden_size, generator=noise).bfloat16() for _ in range(2))
    sums = (torch.randn(hidden_size, generator=noise), torch.randn(hidden_size, generator=noise))
    sent = Guidance(video_states=(first, last), text_sums=sums)
    received, num_bytes = await read(guidance_chunks(sent, 4))
    assert num_bytes == 4 * video_tokens * hidden_size + 8 * hidden_size
    assert received.video_states is not None and received.text_sums is not None
    for ours, theirs in zip((first, last, *sums), (*received.video_states, *received.text_sums), strict=True):
        assert torch.equal(ours, theirs)


@given(st.lists(st.floats(width=32), min_size=1, max_size=200))
async def test_scores(numbers: list[float]) -> None:
    scores = torch.tensor(numbers, dtype=torch.float32)
    received, num_bytes = await read(guidance_chunks(Guidance(scores=scores), 4))
    assert num_bytes == 4 * len(numbers) and received.video_states is None
    assert received.scores is not None and torch.equal(received.scores.view(torch.int32), scores.view(torch.int32))


async def test_large_states_travel_in_chunks() -> None:
    states = torch.arange(600 * 900).reshape(600, 900).bfloat16()
    sent = Guidance(video_states=(states, -states), text_sums=(torch.zeros(900), torch.ones(900)))
    chunks = list(guidance_chunks(sent, 4))
    assert max(len(chunk.data) for chunk in chunks) == CHUNK_BYTES
    received, _ = await read(chunks)
    assert received.video_states is not None and torch.equal(received.video_states[1], -states)


async def test_transposed_states_arrive_as_they_look() -> None:
    states = torch.arange(12).reshape(3, 4).T.bfloat16()
    sums = torch.arange(8).float()[::2][:3]
    received, _ = await read(guidance_chunks(Guidance(video_states=(states, states), text_sums=(sums, sums)), 1))
    assert received.video_states is not None and torch.equal(received.video_states[0], states)
    assert received.text_sums is not None and torch.equal(received.text_sums[1], sums)


@pytest.mark.parametrize(
    ("chunks", "complaint"),
    [
        ([], "must begin with its header"),
        ([data(4)], "must begin with its header"),
        ([header(SCORES)], "shorter than its header says"),
        ([header(SCORES), data(7)], "shorter than its header says"),
        ([header(SCORES), data(9)], "longer than its header says"),
        ([header(STATES), data(48), data(1)], "longer than its header says"),
        ([header(SCORES, video_tokens=0)], "0 bytes is not accepted"),
        ([header(STATES, 2**32 - 1, 2**32 - 1)], "bytes is not accepted"),
        ([header(target_pb2.GUIDANCE_KIND_UNSPECIFIED), data(48)], "of no known kind"),
    ],
)
async def test_streams_that_lie(chunks: list[target_pb2.GuidanceChunk], complaint: str) -> None:
    with pytest.raises(ProtocolViolation, match=complaint):
        await read(chunks)
