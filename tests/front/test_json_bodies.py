"""JSON in pieces: the same value wherever it is cut, media on disk, and no more memory than was allowed."""

import base64
import json
import string
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.services.front.anthropic_request import BARE_MEDIA
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.json_body import MAX_DEPTH, MAX_HEAD_BYTES, MAX_VALUES, NO_BASE64, JsonBody
from tests.support.front import data_url

MIB = 1024**2


def fed(text: bytes, size: int, body: JsonBody) -> Any:
    for start in range(0, len(text), size):
        body.feed(text[start : start + size])
    return body.value()


ESCAPES = ("", "/", "/+=", string.ascii_letters)
"""Characters that are escaped though they need not be: PHP does so with a slash, .NET with a plus."""


@given(st.binary(min_size=1, max_size=600), st.text(max_size=300), st.integers(1, 700), st.sampled_from(ESCAPES))
def test_cuts_change_nothing(data: bytes, words: str, size: int, escaped: str) -> None:
    url = "".join(f"\\u{ord(it):04X}" if it in escaped else it for it in data_url(data))
    url = url.replace("\\u002F", "\\/" if escaped == "/" else "\\u002f")
    text = json.dumps({"a": [words, 'data:"\\'], "z": {words: 1.5}})[:-1] + f', "url": "{url}"}}'
    with JsonBody(MIB, MIB) as body:
        value = fed(text.encode(), size, body)
        assert value["a"] == [words, 'data:"\\'] and value["z"] == {words: 1.5}
        media = body.media[value["url"]]
        assert body.window(media.start, media.end).read() == data
        assert (media.media_type, media.error) == ("video/mp4", "")


@given(st.binary(min_size=1, max_size=2000), st.integers(1, 3000), st.sampled_from([None, 2]))
def test_media_without_a_head_are_known_by_where_they_stand(data: bytes, size: int, indent: int | None) -> None:
    text = base64.b64encode(data).decode()
    said = [{"source": {"type": "base64", "data": text}}, {"data": text}, {"source": "x", "data": text}]
    with JsonBody(MIB, MIB, BARE_MEDIA) as body:
        value = fed(json.dumps(said, indent=indent).encode(), size, body)
        assert value[1:] == said[1:]
        (media,) = body.media.values()
        assert body.media == {value[0]["source"]["data"]: media} and not media.error
        assert body.window(media.start, media.end).read() == data


@pytest.mark.parametrize(
    "content",
    [
        base64.encodebytes(bytes(99)),
        base64.b64encode(b"1234") + b"\n",
        base64.urlsafe_b64encode(b"\xff" * 9),
        base64.b64encode(b"1234").rstrip(b"="),
    ],
)
def test_what_is_no_base64_says_how_it_should_be(content: bytes) -> None:
    """As encoders for mails, shells, addresses and tokens write it."""
    with JsonBody(MIB, MIB) as body:
        media = body.media[fed(json.dumps(f"data:video/mp4;base64,{content.decode()}").encode(), MIB, body)]
        assert media.error == NO_BASE64


HEADS = (
    ("video/webm", ";codecs=vp8,opus"),
    ("video/webm", '; codecs="vp8, opus"'),
    ("video/webm", ";name=my%20clip%20(1).webm"),
    ("video/mp4", f";name={'%E6%98%A0' * 83}.mp4"),
    ("video/*", ""),
    ("application/x_clip", ";charset=utf-8"),
)
"""As recorders of Chromium and Firefox have them, forms of web pages, and programs that know no exact type."""


@pytest.mark.parametrize(("kind", "told"), HEADS)
@pytest.mark.parametrize("write", [str, str.upper])
@pytest.mark.parametrize("size", [1, 100, MIB])
def test_between_type_and_content_may_be_what_browsers_tell_of_both(
    kind: str, told: str, write: Callable[[str], str], size: int
) -> None:
    content = base64.b64encode(data := bytes(range(256))).decode()
    with JsonBody(MIB, MIB) as body:
        media = body.media[fed(json.dumps(write(f"data:{kind}{told};base64,") + content).encode(), size, body)]
        assert (media.media_type, media.error) == (kind, "")
        assert body.window(media.start, media.end).read() == data
    with JsonBody(MIB, MIB) as body:
        fed(json.dumps(f"data:{kind}{told};{'x' * MAX_HEAD_BYTES};base64,{content}").encode(), size, body)
        assert not body.media, "wherever it is cut, what is that long is no head"


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5), st.integers(1, 90))
def test_frames_in_one_string(frames: list[bytes], size: int) -> None:
    text = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    with JsonBody(MIB, MIB) as body:
        media = body.media[fed(json.dumps(text).encode(), size, body)]
        bounds = [media.start, *media.ends]
        parts = [body.window(*pair).read() for pair in pairwise(bounds)]
        assert parts == frames and not media.error


@pytest.mark.parametrize(
    ("text", "value"), [("256.0", 256), ("1e3", 1000), ("-0.0", 0), ("-1.0", -1), ("0.5", 0.5), ("1e308", int(1e308))]
)
def test_a_number_is_whole_however_it_is_written(text: str, value: float) -> None:
    """JSON does not tell 256.0 from 256: where tokens are counted it was refused."""
    with JsonBody(MIB, MIB) as body:
        read = fed(text.encode(), 4096, body)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a": 1,}',
        "[" * 100_000,
        "NaN",
        '{"a": 1, "a": 2}',
        '"\x01"',
        "1" * 5000,
        "1e400",
        "-1e400",
        '"\udcff"',
        '"\\ud800"',
        "[1] 2",
    ],
)
def test_what_is_no_json(text: str) -> None:
    with JsonBody(MIB, MIB) as body, pytest.raises(ApiError) as refused:
        fed(text.encode(errors="surrogatepass"), 4096, body)
    assert refused.value.status in (400, 413)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('"' + "a" * MIB + '"', 413),
        ("[" + "[]," * MAX_VALUES + "[]]", 413),
        (json.dumps(data_url(bytes(MIB + 1))), 413),
        ('"data:video/jpeg;base64,' + "AA==," * MAX_VALUES + 'AA=="', 413),
    ],
)
def test_too_much(text: str, status: int) -> None:
    with JsonBody(MIB, MIB) as body, pytest.raises(ApiError) as refused:
        fed(text.encode(), 4096, body)
    assert refused.value.status == status


def read_below(frames: int, body: JsonBody) -> Any:
    """By who was called by so many."""
    return read_below(frames - 1, body) if frames else body.value()


@pytest.mark.parametrize("frames", [0, 99])
@pytest.mark.parametrize("kind", ["[]", "{}"])
def test_how_deep_a_body_may_be_is_the_same_wherever_it_is_read(frames: int, kind: str) -> None:
    """A batch's lines are read twice, from different places: what passes once must pass again."""
    begin, end = (kind[0] + ('"a":' if kind == "{}" else "")).encode(), kind[1].encode()
    for depth in (MAX_DEPTH, MAX_DEPTH + 1, 700):
        with JsonBody(MIB, MIB) as body:
            body.feed(begin * (depth - 1) + kind.encode() + end * (depth - 1))
            if depth == MAX_DEPTH:
                assert json.dumps(read_below(frames, body))
                continue
            with pytest.raises(ApiError, match=f"more than {MAX_DEPTH} deep"):
                read_below(frames, body)


def num_calls(num_media: int) -> int:
    """How many functions are called to read a body with so many small media in it."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    text = json.dumps([data_url(b"abc")] * num_media).encode()
    with JsonBody(MIB, MIB) as body:
        sys.setprofile(count)
        try:
            body.feed(text)
        finally:
            sys.setprofile(None)
        assert (len(body.media), body.media_bytes) == (num_media, 3 * num_media)
    return calls


def test_many_media_are_no_more_work_each_than_few() -> None:
    assert num_calls(400) < 2.1 * num_calls(200)


def test_media_are_not_held_in_memory() -> None:
    block = base64.b64encode(bytes(3 * 64 * 1024))
    with JsonBody(MIB, 2**30) as body:
        body.feed(b'{"url": "data:video/mp4;base64,')
        tracemalloc.start()
        for _ in range(400):
            body.feed(block)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        body.feed(b'"}')
        assert body.media_bytes == 400 * 3 * 64 * 1024
    assert peak < 8 * MIB
