"""What a decoder says is believed only as far as it fits what was asked."""

import json
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.video.messages import (
    MAX_MESSAGE_BYTES,
    BadAnswer,
    DecodeLimits,
    DecodeRequest,
    Progress,
    Ready,
    Refused,
    Sampled,
    Started,
    encode_answer,
    parse_answer,
)
from tests.support.fuzzing import fuzzing

REQUEST = DecodeRequest(4, DecodeLimits(max_frame_pixels=100, max_pixels_source=1000, max_bytes=5000))
SAMPLED = Sampled((2, 5, 20), (0.0, 1.5), 2.0, 40, 25, "h264", 90, ("cut off",))


def test_what_is_said_arrives() -> None:
    assert DecodeRequest.decode(REQUEST.encode()) == REQUEST
    for answer in (Ready(("memory",)), Started(), Progress(1, 4), Refused("LimitExceeded", "too large"), SAMPLED):
        assert parse_answer(encode_answer(answer), REQUEST) == answer


@pytest.mark.parametrize(
    "lie",
    [
        {"shape": [5, 5, 20], "timestamps_s": [0, 1, 2, 3, 4]},
        {"shape": [2, 5, 21]},
        {"shape": [2, 2**31, 2**31]},
        {"shape": [2, -5, -20]},
        {"shape": [2.0, 5, 20]},
        {"shape": [True, 5, 20], "timestamps_s": [0]},
        {"shape": [2, 5, 20, 3]},
        {"shape": "256"},
        {"timestamps_s": [0.0]},
        {"timestamps_s": [1.0, 1.0]},
        {"timestamps_s": [0.0, float("nan")]},
        {"timestamps_s": [0.0, float("inf")]},
        {"timestamps_s": [0, 10**400]},
        {"timestamps_s": {"0": 1}},
        {"duration_s": -1.0},
        {"duration_s": float("nan")},
        {"duration_s": None},
        {"source_width": 0},
        {"source_width": 41},
        {"source_height": 10**30},
        {"codec": "h264; rm"},
        {"codec": "é"},
        {"codec": ["h264"]},
        {"rotation": 45},
        {"rotation": 360},
        {"warnings": "none"},
        {"warnings": [1]},
    ],
)
def test_a_lie_about_the_frames_is_refused(lie: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer):
        parse_answer(json.dumps({"Sampled": asdict(SAMPLED) | lie}).encode(), REQUEST)


def test_what_is_said_of_the_file_besides_is_not_looked_at() -> None:
    """A digest is the key of reused results, so it is none of the decoder's business."""
    more = {"sha256": "0f" * 32, "num_bytes": 5}
    assert parse_answer(json.dumps({"Sampled": asdict(SAMPLED) | more}).encode(), REQUEST) == SAMPLED


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"Sampled": {}}',
        b'{"Sampled": []}',
        b'{"Started": {}, "Ready": {}}',
        b'{"Refused": {"error": "SystemExit", "message": ""}}',
        b'{"Refused": {"error": "LimitExceeded\\n", "message": ""}}',
        b'{"Refused": {"error": "LimitExceeded"}}',
        b'{"Progress": {"done": 1, "total": 5}}',
        b"[" * 100_000,
        b'{"Progress": {"done": ' + b"9" * 5000 + b', "total": 1}}',
    ],
)
def test_nonsense_is_refused(message: bytes) -> None:
    with pytest.raises(BadAnswer):
        parse_answer(message, REQUEST)


def test_before_the_first_request_there_is_nothing_to_answer() -> None:
    for answer in (SAMPLED, Progress(1, 4)):
        with pytest.raises(BadAnswer, match="nothing was asked"):
            parse_answer(encode_answer(answer), None)


def test_texts_are_cut_and_cleaned() -> None:
    refused = parse_answer(encode_answer(Refused("UnreadableVideo", "a\x1b[2J\n" + "b" * 10_000)), REQUEST)
    assert isinstance(refused, Refused)
    assert refused.message == "a?[2J?" + "b" * 594
    sampled = parse_answer(encode_answer(replace(SAMPLED, warnings=("x" * 10_000,) * 100)), REQUEST)
    assert isinstance(sampled, Sampled)
    assert [len(warning) for warning in sampled.warnings] == [600] * 8


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(sorted(asdict(SAMPLED))), JSON)
def test_whatever_a_field_holds_the_answer_is_refused_or_fits(name: str, value: object) -> None:
    message = json.dumps({"Sampled": asdict(SAMPLED) | {name: value}}).encode()
    try:
        answer = parse_answer(message, REQUEST)
    except BadAnswer:
        return
    assert isinstance(answer, Sampled)
    n, height, width = answer.shape
    assert n == len(answer.timestamps_s) <= REQUEST.num_frames
    assert n * height * width * 3 <= REQUEST.frames_bytes


@given(st.sampled_from(["Ready", "Started", "Progress", "Refused", "Sampled", "Other"]), JSON)
def test_whatever_is_said_it_is_refused_or_of_a_known_kind(kind: str, fields: object) -> None:
    try:
        answer = parse_answer(json.dumps({kind: fields}).encode(), REQUEST)
    except BadAnswer:
        return
    if isinstance(answer, Refused):
        assert isinstance(answer.exception(), SlipstreamError)


ANSWERS = [encode_answer(answer) for answer in (Ready(("memory",)), Started(), Progress(1, 4), SAMPLED)]
ANSWERS.append(encode_answer(Refused("LimitExceeded", "too large")))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A sound answer with some bytes cut out and others put in."""
    message = draw(st.sampled_from(ANSWERS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(message)))
        end = draw(st.integers(start, min(start + 16, len(message))))
        put = draw(
            st.binary(max_size=16) | st.sampled_from([b"1e999", b"-1", b"null", b"[]", b'"\\ud800"', b"9" * 400])
        )
        message = message[:start] + put + message[end:]
    return message


@fuzzing(500)
@given(st.binary(max_size=300) | damaged(), st.sampled_from([None, REQUEST]))
@example(b"[" * MAX_MESSAGE_BYTES, REQUEST)
@example(b'{"a":' * (MAX_MESSAGE_BYTES // 5), REQUEST)
@example(b'{"Sampled": ' + b"9" * (MAX_MESSAGE_BYTES - 20) + b"}", REQUEST)
@example(b'{"Refused": {"error": "' + b"a" * (MAX_MESSAGE_BYTES - 60) + b'", "message": ""}}', REQUEST)
def test_a_strangers_bytes_are_refused_in_no_time_or_fit(message: bytes, request: DecodeRequest | None) -> None:
    began_s = time.process_time()
    try:
        answer = parse_answer(message, request)
    except BadAnswer:
        pass
    else:
        assert isinstance(answer, Ready | Started | Progress | Refused | Sampled)
        assert encode_answer(answer)
        if isinstance(answer, Refused):
            assert isinstance(answer.exception(), SlipstreamError)
    assert time.process_time() - began_s < 1
