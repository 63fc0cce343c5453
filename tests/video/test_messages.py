"""What a decoder says is believed only as far as it fits what was asked."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.video.messages import (
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

REQUEST = DecodeRequest(4, DecodeLimits(max_frame_pixels=100, max_pixels_source=1000, max_bytes=5000))
DIGESTED = replace(REQUEST, with_digest=True)
SAMPLED = Sampled((2, 5, 20), (0.0, 1.5), 2.0, 40, 25, "h264", 90, ("cut off",))


def test_what_is_said_arrives() -> None:
    assert DecodeRequest.decode(DIGESTED.encode()) == DIGESTED
    for answer in (Ready(("memory",)), Started(), Progress(1, 4), Refused("LimitExceeded", "too large"), SAMPLED):
        assert parse_answer(encode_answer(answer), REQUEST) == answer
    digested = replace(SAMPLED, sha256="0f" * 32, num_bytes=5000)
    assert parse_answer(encode_answer(digested), DIGESTED) == digested


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
        {"sha256": "0f" * 32},
        {"num_bytes": 5001},
    ],
)
def test_a_lie_about_the_frames_is_refused(lie: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer):
        parse_answer(json.dumps({"Sampled": asdict(SAMPLED) | lie}).encode(), REQUEST)


def test_a_digest_that_is_none_is_refused() -> None:
    for sha256 in ("", "0F" * 32, "0f" * 31, "0f" * 32 + "\n"):
        with pytest.raises(BadAnswer):
            parse_answer(encode_answer(replace(SAMPLED, sha256=sha256)), DIGESTED)


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
