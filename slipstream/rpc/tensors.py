"""Guidance on the wire: tensors as raw bytes in chunks. Apart from the codec, because it needs torch."""

import sys
from collections.abc import AsyncIterator, Iterator

import torch
from torch import Tensor

from slipstream.errors import ProtocolViolation
from slipstream.pruning.base import Guidance
from slipstream.rpc.session_codec import chunked
from slipstream.rpc.v1 import target_pb2

MAX_GUIDANCE_BYTES = 4 * 1024**3
_KINDS = (target_pb2.GUIDANCE_KIND_HIDDEN_STATES, target_pb2.GUIDANCE_KIND_SCORES)

if sys.byteorder != "little":  # the wire is little-endian, and tensors are sent as they lie in memory
    raise ImportError("slipstream needs a little-endian machine")


def guidance_chunks(guidance: Guidance, layer: int) -> Iterator[target_pb2.GuidanceChunk]:
    """Header and payload, as `GuidanceHeader` describes them."""
    if guidance.scores is not None:
        kind, payload = target_pb2.GUIDANCE_KIND_SCORES, [guidance.scores]
        video_tokens, hidden_size = len(guidance.scores), 0
    else:
        assert guidance.video_states is not None and guidance.text_sums is not None
        kind, payload = target_pb2.GUIDANCE_KIND_HIDDEN_STATES, [*guidance.video_states, *guidance.text_sums]
        video_tokens, hidden_size = guidance.video_states[0].shape
    header = target_pb2.GuidanceHeader(kind=kind, video_tokens=video_tokens, hidden_size=hidden_size, layer=layer)
    yield target_pb2.GuidanceChunk(header=header)
    for data in chunked(_as_bytes(tensor) for tensor in payload):
        yield target_pb2.GuidanceChunk(data=data)


async def read_guidance(chunks: AsyncIterator[target_pb2.GuidanceChunk]) -> tuple[Guidance, int]:
    """The guidance, and the bytes of its payload. Raises `ProtocolViolation` on anything but header and payload."""
    first = await anext(chunks, None)
    if first is None or first.WhichOneof("message") != "header":
        raise ProtocolViolation("guidance must begin with its header")
    header = first.header
    if header.kind not in _KINDS:
        raise ProtocolViolation(f"guidance is of no known kind: {header.kind}")
    scores_only = header.kind == target_pb2.GUIDANCE_KIND_SCORES
    state_bytes = 2 * header.video_tokens * header.hidden_size
    num_bytes = 4 * header.video_tokens if scores_only else 2 * state_bytes + 8 * header.hidden_size
    if not 0 < num_bytes <= MAX_GUIDANCE_BYTES:
        raise ProtocolViolation(f"guidance of {num_bytes} bytes is not accepted")
    payload = bytearray(num_bytes)
    received = 0
    async for chunk in chunks:
        data = chunk.data
        if received + len(data) > num_bytes:
            raise ProtocolViolation("guidance is longer than its header says")
        payload[received : received + len(data)] = data
        received += len(data)
    if received < num_bytes:
        raise ProtocolViolation("guidance is shorter than its header says")
    if scores_only:
        return Guidance(scores=torch.frombuffer(payload, dtype=torch.float32)), num_bytes
    states = torch.frombuffer(payload, dtype=torch.bfloat16, count=state_bytes)
    states = states.view(2, header.video_tokens, header.hidden_size)
    sums = torch.frombuffer(payload, dtype=torch.float32, offset=2 * state_bytes).view(2, header.hidden_size)
    return Guidance(video_states=(states[0], states[1]), text_sums=(sums[0], sums[1])), num_bytes


def _as_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
