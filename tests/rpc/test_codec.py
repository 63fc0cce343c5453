"""Between messages and dataclasses and back again, for everything that Hypothesis can think of."""

import itertools
import weakref
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import InvalidRequest, LimitExceeded, ProtocolViolation
from slipstream.frame_size import FrameSize
from slipstream.messages import Frames
from slipstream.rpc import session_codec as codec
from slipstream.rpc.codec import (
    model_info_message,
    proposal_messages,
    read_model_info,
    read_proposals,
    read_sampling,
    to_message,
)
from slipstream.rpc.grpc_options import CHUNK_BYTES, MAX_DRAFT_MESSAGE_BYTES
from slipstream.rpc.v1 import common_pb2, draft_pb2, target_pb2
from slipstream.sampling.params import RULES, Proposal, SamplingDefaults, SamplingParams
from slipstream.service_info import ModelInfo
from slipstream.session_messages import DraftStart, DraftTokens, TargetStart
from slipstream.speculation.methods import LOSSY_METHODS, GuidanceKind, Lossy
from slipstream.speculation.protocol import AdvanceLine, JoinPoint, RestartLine

uint32 = st.integers(0, 2**32 - 1)
token_ids = st.lists(uint32, max_size=40).map(tuple)
"""Ids above 65,536 included: some vocabularies need 18 bits."""
text = st.text(st.characters(codec="utf-8"))
structures = st.one_of(
    st.just({}),
    st.builds(dict, json_schema=st.sampled_from(('{"type": "object"}', "{}"))),
    st.builds(dict, regex=text),
    st.builds(dict, choice=st.lists(text.filter(bool), max_size=3).map(tuple)),
)
sampling = st.builds(
    lambda structure, **others: SamplingParams(**others, **structure),
    structure=structures,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.001, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    seed=st.integers(0, 2**63 - 1),
    rule=st.sampled_from(RULES),
    stop=st.lists(text.filter(bool), max_size=3).map(tuple),
)
proposals = st.lists(
    st.builds(
        Proposal,
        token_ids=token_ids,
        probabilities=st.lists(st.floats(width=32, allow_nan=False), max_size=9).map(tuple),
    ),
    max_size=4,
).map(tuple)
join_points = st.builds(JoinPoint, epoch=uint32, committed=token_ids, write_until=uint32, first_chunk=uint32)
spacing = st.none() | st.floats(min_value=0, exclude_min=True)
draft_requests = st.builds(
    DraftStart,
    session_id=text,
    prompt=text,
    pruner=text,
    alpha=st.floats(allow_nan=False),
    positions=text,
    guidance=st.sampled_from(GuidanceKind),
    guidance_address=text,
    seed=st.integers(0, 2**64 - 1),
    sampling=sampling,
    seconds_per_frame=spacing,
    tree=st.booleans(),
    guidance_capability=st.binary(max_size=40),
)


def frames_of(num_frames: int, height: int, width: int) -> Frames:
    size = num_frames * height * width * 3
    return (np.arange(size) % 251).astype(np.uint8).reshape(num_frames, height, width, 3)


@dataclass
class Owner:
    """Of frames that are to be sent."""

    frames: Frames


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


async def read(header: common_pb2.FramesHeader, messages: Iterable[Any], max_frames: int = 1000) -> Frames:
    async def stream() -> AsyncIterator[Any]:
        for message in messages:
            yield message

    return await codec.read_frames(header, stream(), max_frames)


def chunks(*parts: bytes) -> list[target_pb2.TargetRequest]:
    return [target_pb2.TargetRequest(frames=common_pb2.FrameChunk(data=part)) for part in parts]


# -- requests, verdicts, lines ----------------------------------------------------------------------------------------


@given(
    st.builds(
        TargetStart,
        session_id=text.filter(bool),
        prompt=text,
        max_new_tokens=st.integers(1, 2**32 - 1),
        with_guidance=st.booleans(),
        guidance_capability=st.binary(min_size=16, max_size=40),
        sampling=sampling,
        seconds_per_frame=spacing,
        with_attention=st.booleans(),
        lossy=st.none() | st.builds(Lossy, st.sampled_from(LOSSY_METHODS), st.floats(0.01, 1)),
        local_drafter=st.just("std"),
        self_draft_kept=st.integers(0, 2**32 - 1),
        in_background=st.booleans(),
    )
    | st.builds(TargetStart, st.just("s"), text, st.integers(1, 9), st.just(False))
)
def test_target_requests(request: TargetStart) -> None:
    message = over_the_wire(codec.target_start(request, frames_of(2, 3, 4)))
    assert codec.read_target_start(message.start) == request
    assert message.start.frames == codec.frames_header(frames_of(2, 3, 4), request.seconds_per_frame)


@pytest.mark.parametrize("changes", [{"session_id": ""}, {"max_new_tokens": 0}])
def test_target_requests_without_sense(changes: dict[str, Any]) -> None:
    request = replace(TargetStart("s", "?", 1, True), **changes)
    with pytest.raises(InvalidRequest, match="needs an id and at least one token"):
        codec.read_target_start(codec.target_start(request, frames_of(1, 1, 1)).start)


@given(draft_requests, join_points)
def test_draft_requests(request: DraftStart, join: JoinPoint) -> None:
    message = over_the_wire(codec.draft_start(request, join, frames_of(2, 3, 4)))
    assert codec.read_draft_start(message.start) == (request, join)


@given(
    st.builds(
        RestartLine, epoch=uint32, keep=uint32, suffix=token_ids.filter(bool), write_until=uint32, first_chunk=uint32
    )
)
def test_restarts(action: RestartLine) -> None:
    assert codec.read_line(over_the_wire(codec.line_message(action))) == action


def test_a_restart_from_nothing() -> None:
    with pytest.raises(ProtocolViolation, match="at least one token"):
        codec.read_line(draft_pb2.DraftRequest(restart=draft_pb2.Restart(epoch=1)))


@given(st.lists(st.tuples(uint32, st.integers(1, 1024)), min_size=1, max_size=40))
def test_a_drafts_messages_stay_small(sizes: list[tuple[int, int]]) -> None:
    written = DraftTokens(
        epoch=3,
        position=7,
        token_ids=tuple(token for token, _ in sizes),
        pass_s=0.5,
        proposals=tuple(Proposal(tuple(range(2**20, 2**20 + size)), (0.25,) * size) for _, size in sizes),
    )
    messages = [over_the_wire(message) for message in codec.draft_events(written)]
    assert all(message.ByteSize() <= MAX_DRAFT_MESSAGE_BYTES for message in messages)
    parts = [codec.read_draft_event(message) for message in messages]
    ends = itertools.accumulate((len(part.token_ids) for part in parts), initial=7)
    assert [part.position for part in parts] == list(ends)[:-1]
    assert sum((part.token_ids for part in parts), ()) == written.token_ids
    assert sum((part.proposals for part in parts), ()) == written.proposals
    if sum(size + 3 for _, size in sizes) <= codec.MAX_PROPOSED_TOKENS:
        assert parts == [written]


@given(st.builds(AdvanceLine, epoch=uint32, write_until=uint32))
def test_advances(action: AdvanceLine) -> None:
    assert codec.read_line(over_the_wire(codec.line_message(action))) == action


@pytest.mark.parametrize("number", [0, 9])
def test_guidance_of_no_kind(number: int) -> None:
    message = draft_pb2.DraftStart()
    message.guidance = number  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="hidden_states or scores"):
        codec.read_draft_start(message)


def test_what_a_model_service_serves() -> None:
    hints = {name: kind for name, kind in get_type_hints(ModelInfo).items() if name != "eos_token_ids"}
    nested = {kind: kind(**{field.name: 1 for field in fields(kind)}) for kind in (FrameSize, SamplingDefaults)}
    values = {name: nested.get(kind) or kind("7") for name, kind in hints.items()}
    info = ModelInfo(**values, eos_token_ids=(1,))
    message = over_the_wire(model_info_message(info))
    assert {field.name for field, _ in message.ListFields()} == set(hints)
    assert read_model_info(message) == replace(info, eos_token_ids=())


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_no_sampling_is_greedy() -> None:
    assert read_sampling(common_pb2.Sampling()) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": -3.0}, "presence_penalty"),
        ({"min_new_tokens": 2**31 + 1}, "min_new_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"rule": "papers"}, "sampling_rule 'papers' is unknown"),
        ({"stop": [""]}, "stop strings must have 1 to 256 characters"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice cannot be asked for together"),
        ({"choice": ["a", ""]}, "choice has an empty text"),
        ({"regex": "a" * 65_537}, "regex has 65537 characters; at most 65536 are allowed"),
        ({"json_schema": "{"}, "json_schema is no JSON: Expecting property name"),
        ({"json_schema": "[]"}, "json_schema must be a JSON object"),
        ({"json_schema": "[" * 60_000}, "json_schema is no JSON"),
    ],
)
def test_sampling_out_of_range(fields: dict[str, Any], complaint: str) -> None:
    message = common_pb2.Sampling(**fields)
    for read in (
        lambda: read_sampling(message),
        lambda: codec.read_target_start(target_pb2.TargetStart(session_id="s", max_new_tokens=1, sampling=message)),
        lambda: codec.read_draft_start(draft_pb2.DraftStart(guidance=1, sampling=message)),
    ):
        with pytest.raises(InvalidRequest, match=complaint):
            read()


@given(sampling)
def test_sampling(params: SamplingParams) -> None:
    assert read_sampling(over_the_wire(to_message(params, common_pb2.Sampling))) == params


@given(proposals)
def test_what_tokens_were_drawn_from(drawn_from: tuple[Proposal, ...]) -> None:
    tokens = over_the_wire(draft_pb2.DraftTokens(proposals=proposal_messages(drawn_from)))
    assert read_proposals(tokens.proposals) == drawn_from


# -- frames -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.data())
async def test_frames_cut_anywhere(num_frames: int, height: int, width: int, data: st.DataObject) -> None:
    frames = frames_of(num_frames, height, width)
    flat = frames.tobytes()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(flat) - 1), max_size=6)))
    parts = [flat[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(flat)], strict=True)]
    received = await read(codec.frames_header(frames), chunks(*parts))
    assert received.shape == frames.shape and (received == frames).all()


async def test_large_frames_travel_in_chunks() -> None:
    frames = frames_of(3, 700, 500)
    parts = list(codec.frame_chunks(Owner(frames)))
    assert [len(part.data) for part in parts[:-1]] == [CHUNK_BYTES] * (frames.size // CHUNK_BYTES)
    received = await read(codec.frames_header(frames), [target_pb2.TargetRequest(frames=part) for part in parts])
    assert (received == frames).all()


def test_no_message_holds_the_frames_for_the_next() -> None:
    frames = frames_of(3, 700, 500)
    owner, alive = Owner(frames), weakref.ref(frames)
    sending = codec.frame_chunks(owner)
    del frames
    next(sending)
    owner.frames = frames_of(1, 1, 1)[:0]
    assert alive() is None
    assert not next(sending).data


async def test_frames_that_do_not_lie_together_in_memory() -> None:
    frames = frames_of(4, 6, 5)[::2, ::-1, 1:]
    parts = [part.data for part in codec.frame_chunks(Owner(frames))]
    received = await read(codec.frames_header(frames), chunks(*parts))
    assert (received == frames).all()


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "ended before the last frame"),
        (chunks(b"\0" * 23), "ended before the last frame"),
        (chunks(b"\0" * 25), "do not match"),
        (chunks(b"\0" * 20, b"\0" * 5), "do not match"),
        (chunks(b""), "do not match"),
        ([target_pb2.TargetRequest()], "do not match"),
        ([target_pb2.TargetRequest(end=common_pb2.End())], "do not match"),
    ],
)
async def test_frames_unlike_their_header(messages: list[Any], complaint: str) -> None:
    with pytest.raises(ProtocolViolation, match=complaint):
        await read(common_pb2.FramesHeader(num_frames=2, height=2, width=2), messages)


@given(uint32, uint32, uint32)
async def test_headers_are_judged_before_memory_is_taken(num_frames: int, height: int, width: int) -> None:
    header = common_pb2.FramesHeader(num_frames=num_frames, height=height, width=width)
    fits = 0 < num_frames <= 1000 and 0 < height <= 8192 and 0 < width <= 8192
    if fits and num_frames * height * width * 3 <= codec.MAX_FRAMES_BYTES:
        return
    with pytest.raises(LimitExceeded if fits else InvalidRequest):
        await read(header, [])
