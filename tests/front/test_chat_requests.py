"""What a chat request may say, and that everything else is refused by the name of its field."""

import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.documents.pages import parse_pages
from slipstream.errors import SlipstreamError
from slipstream.sampling.params import MAX_MIN_NEW_TOKENS
from slipstream.services.front.api_errors import ApiError, as_api_error
from slipstream.services.front.chat_messages import MediumKind, RemoteFile
from slipstream.services.front.chat_request import NEUTRAL, TOLERATED, ChatRequest, check_kind, read_chat
from slipstream.services.front.json_body import JsonBody
from tests.support.front import asked, data_url

URL = "file:///videos/a%20b.mp4"
EMPTY: dict[str, Any] = {"type": "text", "text": ""}


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": asked(URL), **fields}


def read(value: Any) -> ChatRequest:
    with JsonBody(10**6, 10**6) as body:
        body.feed(json.dumps(value).encode())
        return read_chat(body.value(), body.media)


def refused(value: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        read(value)
    return error.value


def with_part(part: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return request(messages=[{"role": "user", "content": [{"type": "text", "text": "?"}, part]}], **fields)


def test_a_plain_request() -> None:
    chat = read(request())
    assert chat.options.given() == {"prompt": "Describe this video in detail."}
    assert (chat.medium.kind, chat.medium.source) == (MediumKind.VIDEO, RemoteFile("/videos/a b.mp4"))
    assert not chat.stream and not chat.include_usage


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_path_has_no_query_behind_it(host: str) -> None:
    """What a program makes of a path without quoting it, and of one that it quotes."""
    for url in ("/videos/why?/#1 50%25.mp4", "/videos/why%3F/%231%2050%25.mp4"):
        part = {"type": "video_url", "video_url": {"url": f"file://{host}{url}"}}
        assert read(with_part(part)).medium.source == RemoteFile("/videos/why?/#1 50%.mp4")


@pytest.mark.parametrize(
    ("url", "source"),
    [("FILE:///videos/a.mp4", RemoteFile("/videos/a.mp4")), ("Https://films.example/a", "Https://films.example/a")],
)
def test_a_scheme_may_be_in_capitals(url: str, source: RemoteFile | str) -> None:
    assert read(with_part({"type": "video_url", "video_url": {"url": url}})).medium.source == source


def test_all_that_is_honoured() -> None:
    own = {"method": "hints_draft", "pruner": "uv", "alpha": 0.5, "trace": True, "pages": "1-2", "dpi": 100}
    own |= {"surface": "lines", "stage": "region+page", "ocr": "never"}
    chat = read(
        request(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=0.5,
            seed=3,
            stop="END",
            max_tokens=9,
            max_completion_tokens=9,
            media_io_kwargs={"video": {"num_frames": 8, "fps": 2}},
            mm_processor_kwargs={"num_frames": 8, "fps": 2.0, "do_sample_frames": True},
            prediction={"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            slipstream=own,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    options = chat.options.given()
    assert options.pop("prompt")
    assert options == {
        "num_frames": 8, "fps": 2, "max_new_tokens": 9, "method": "hints_draft", "temperature": 0.5, "top_k": 40,
        "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.5,
        "seed": 3, "stop": ("END",), "pruner": "uv", "alpha": 0.5,
        "trace": True, "prediction": ("ab",),
    }  # fmt: skip
    document = chat.document
    assert (document.request.pages, document.request.dpi) == ("1-2", 100)
    assert (document.surface, document.stage, document.ocr) == ("lines", "region+page", "never")
    assert document.caption == chat.options
    assert chat.stream and chat.include_usage and not chat.continuous_usage


def test_what_asks_for_nothing_is_tolerated() -> None:
    for last in (False, True):
        said = {name: values[-last] for name, values in NEUTRAL.items()} | dict.fromkeys(TOLERATED, "x")
        assert read(request(**said)) == read(request()) == read(request(**dict.fromkeys(NEUTRAL)))
    assert read(request(top_k=-1)).options.top_k == 0


def test_a_text_is_as_long_as_its_limit_where_its_end_is_ignored() -> None:
    """As load generators ask for it, which often say the least, too."""
    assert read(request(min_tokens=5, ignore_eos=False)).options.min_new_tokens == 5
    assert read(request(min_tokens=5, ignore_eos=True)).options.min_new_tokens == MAX_MIN_NEW_TOKENS


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "off"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "on"),
        ({"chat_template_kwargs": {"enable_thinking": None}}, None),
        ({"chat_template_kwargs": {}}, None),
        ({"reasoning_effort": "none"}, "off"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}}, "off"),
        ({"slipstream": {"thinking": "template"}}, "template"),
    ],
)
def test_whether_a_model_thinks(fields: dict[str, Any], thinking: str | None) -> None:
    assert read(request(**fields)).options.get("thinking", None) == thinking


@pytest.mark.parametrize("said", [{}, {"include_usage": False}, {"include_usage": None, "include_obfuscation": False}])
def test_stream_options_may_ask_for_nothing_where_nothing_is_streamed(said: dict[str, Any]) -> None:
    assert read(request(stream_options=said)) == read(request())


@pytest.mark.parametrize("name", ["audio", "reasoning_effort", "function_call", "web_search_options", "pages"])
def test_null_asks_for_nothing_whatever_it_is_the_value_of(name: str) -> None:
    """As clients send it that write out each field they know of, set or not."""
    within = {"media_io_kwargs": {name: None}, "mm_processor_kwargs": {name: None}, "slipstream": {name: None}}
    assert read(request(**{name: None}, **within)) == read(request())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"magic": 1}, "magic"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": "x", "ignore_eos": True}, "min_tokens"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs.documents"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"media_io_kwargs": {"video": {"fps": -2}}}, "media_io_kwargs.video.fps"),
        ({"mm_processor_kwargs": {"fps": [2]}}, "mm_processor_kwargs.fps"),
        ({"media_io_kwargs": {"audio": {}}}, "media_io_kwargs.audio"),
        ({"mm_processor_kwargs": {"max_pixels": 1}}, "mm_processor_kwargs.max_pixels"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
        ({"prediction": {"type": "magic"}}, "prediction.type"),
        ({"slipstream": {"magic": 1}}, "slipstream.magic"),
        ({"slipstream": {"alpha": 2}}, "slipstream.alpha"),
        ({"slipstream": {"prompt": "x"}}, "slipstream.prompt"),
        ({"slipstream": {"num_frames": 4}, "media_io_kwargs": {"video": {"num_frames": 5}}}, "slipstream.num_frames"),
        ({"slipstream": {"dpi": 1}}, "slipstream.dpi"),
        ({"slipstream": {"dpi": "x"}}, "slipstream.dpi"),
        ({"slipstream": {"surface": "magic"}}, "slipstream.surface"),
        ({"slipstream": {"stage": "line"}}, "slipstream.stage"),
        ({"slipstream": {"stage": True}}, "slipstream.stage"),
        ({"slipstream": {"ocr": "sometimes"}}, "slipstream.ocr"),
        ({"slipstream": []}, "slipstream"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
    ],
)
def test_the_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(request(**fields))
    assert (error.status, error.param) == (400, param) and error.kind == "invalid_request_error"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "audio_url"}, "type"),
        ({"type": "video_url", "video_url": {"url": "http://a/b.mp4"}}, "video_url.url"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4,raw"}}, "video_url.url"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,@@@@"}}, "video_url.url"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAAA"}}, "video_url.url"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,"}}, "video_url.url"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA==AAAA"}}, "video_url.url"),
        ({"type": "video_url", "video_url": {"url": "file://host/a"}}, "video_url.url"),
        ({"type": "video_url", "video_url": {"url": "file://localhost"}}, "video_url.url"),
        ({"type": "video_url", "video_url": {"url": "file:///a%00b"}}, "video_url.url"),
        ({"type": "video_url", "video_url": {"url": URL, "fps": 1}}, "video_url.fps"),
        ({"type": "video_url", "video_url": {"url": URL, "detail": "wholly"}}, "video_url.detail"),
        ({"type": "video_url", "video_url": {}, "uuid": "seen-before"}, "video_url.url"),
        ({"type": "video_url", "video_url": 5}, "video_url"),
        ({"type": "video", "video": []}, "video"),
        ({"type": "video", "video": [URL]}, "video[0]"),
        ({"type": "video", "video": URL, "fps": 1001}, "fps"),
        ({"type": "video", "video": [data_url(b"x")], "fps": 0}, "fps"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "wholly"}}, "image_url.detail"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": 1}}, "image_url.detail"),
        ({"type": "image_url", "image_url": {"url": URL}, "modalities": "multi-images"}, "modalities"),
        ({"type": "file", "file": {}}, "file"),
        ({"type": "file", "file": {"file_id": "f", "file_data": URL}}, "file"),
        ({"type": "file", "file": {"file_data": "bare"}}, "file.file_data"),
        ({"type": "text", "text": "more", "cache_control": {}}, "cache_control"),
    ],
)
def test_the_part_is_named(part: dict[str, Any], param: str) -> None:
    assert refused(with_part(part)).param == f"messages[0].content[1].{param}"


def test_exactly_one_medium() -> None:
    none, two = request(messages=[{"role": "user", "content": "hi"}]), request()
    two["messages"] = [*two["messages"], *two["messages"]]
    for wrong, cure in ((none, "beside the user's text"), (two, "as the frames of one video")):
        error = refused(wrong)
        assert "exactly one" in str(error) and cure in str(error) and error.param == "messages"


def test_roles() -> None:
    first, last = {"role": "system", "content": "Be short."}, {"role": "developer", "content": "Be kind."}
    options = read(request(messages=[first, *asked(URL, "What?"), last])).options
    assert options.given() == {"prompt": "What?", "system": "Be short.\nBe kind."}
    silent = {"role": "user", "content": asked(URL)[0]["content"][1:]}
    assert read(request(messages=[first, silent])).options.given() == {"prompt": "Be short."}
    again = [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And?"}]
    options = read(request(messages=[first, silent, *again])).options
    assert options.given() == {"prompt": "And?", "turns": ("Be short.", "A cat.")}, "as it was asked first"
    assert read(request(messages=[silent, *again])).options.turns == ("", "A cat.")
    assert refused(request(messages=[{"role": "assistant", "content": "x"}])).param == "messages[0].role"
    assert refused(request(messages=[{"role": "system", "content": asked(URL)[0]["content"]}])).param


def test_a_conversation() -> None:
    answer = {"role": "assistant", "content": "A cat.", "refusal": None, "tool_calls": None}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "sleeps."}]}
    again = {"role": "user", "content": "Which colour?"}
    options = read(request(messages=[*asked(URL, "What?"), answer, parts, again, again])).options
    assert options.given() == {"prompt": "Which colour?\nWhich colour?", "turns": ("What?", "A cat.\nIt\nsleeps.")}
    for messages, said, param in (
        ([*asked(URL), answer], "the last message must be the user's", "messages"),
        ([again, answer, *asked(URL)], "in the first of the user's messages", "messages[2].content[1]"),
        ([answer, *asked(URL)], "needs a question before it", "messages[0].role"),
        ([*asked(URL), {"role": "function", "content": "x"}], "role must be", "messages[1].role"),
        ([*asked(URL), answer, {"role": "user", "content": ""}], "content is empty", "messages[2].content"),
    ):
        error = refused(request(messages=messages))
        assert said in str(error) and error.param == param


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"slipstream": {"alpha": 2}}, "slipstream.alpha must be between 0 and 1"),
        ({"guided_json": "{"}, "guided_json is no JSON"),
        ({"tools": [], "stop": "x" * 300}, "stop"),
    ],
)
def test_a_message_begins_with_the_field_and_not_with_our_name_of_it(fields: dict[str, Any], words: str) -> None:
    error = refused(request(**fields))
    assert str(error).startswith(words) and str(error).startswith(str(error.param))


def test_who_speaks_may_have_a_name() -> None:
    """As AutoGen's and Semantic Kernel's agents always have: a prompt tells the user and the model apart, no more."""
    said = [{"role": "system", "content": "Be short."}, *asked(URL, "What?")]
    said += [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And?"}]
    named = [message | {"name": f"speaker-{index}"} for index, message in enumerate(said)]
    assert read(request(messages=named)) == read(request(messages=said))


@pytest.mark.parametrize("content", ["", [EMPTY], [EMPTY, EMPTY], []])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_nothing_may_be_said_beforehand(role: str, content: Any) -> None:
    """As programs with a field for it send it where it was left empty."""
    options = read(request(messages=[{"role": role, "content": content}, *asked(URL, "What?")])).options
    assert options.given() == {"prompt": "What?"}


@pytest.mark.parametrize("content", ["", None, [{"type": "text", "text": ""}], []])
def test_an_answer_may_be_empty(content: Any) -> None:
    """As one that a stop text ended at once."""
    said = [*asked(URL, "What?"), {"role": "assistant", "content": content}, {"role": "user", "content": "And?"}]
    options = read(request(messages=said)).options
    assert options.given() == {"prompt": "And?", "turns": ("What?", "")}


def test_what_other_servers_put_into_answers_is_handed_back_while_it_is_empty() -> None:
    answer = {"role": "assistant", "content": "A cat.", "tool_calls": [], "annotations": [], "reasoning_content": ""}
    options = read(request(messages=[*asked(URL, "What?"), answer, {"role": "user", "content": "And?"}])).options
    assert options.turns == ("What?", "A cat.")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({}, "messages"), ({"mm_processor_kwargs": {"fps": 2}}, "mm_processor_kwargs.fps"),
     ({"slipstream": {"segments": "shots"}}, "slipstream.segments")],
)  # fmt: skip
def test_what_no_page_can_have_is_refused_of_a_document(fields: dict[str, Any], param: str) -> None:
    """In a batch, too, where nothing else looks at the options of one request."""
    messages = asked(URL, "What?")
    if not fields:
        messages += [{"role": "assistant", "content": "A page."}, {"role": "user", "content": "And?"}]
    chat = read(request(messages=messages, **fields))
    check_kind(chat, is_document=False)
    with pytest.raises(ApiError, match="must be left out") as refusal:
        check_kind(chat, is_document=True)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("asked_for", "param"),
    [
        ({"slipstream": {"pages": "9"}}, "slipstream.pages"),
        ({"slipstream": {"pages": "nine"}}, "slipstream.pages"),
        ({"slipstream": {"pages": "1-3"}}, "slipstream.pages"),
        ({}, None),
        ({"slipstream": {"num_frames": 2}}, "slipstream.num_frames"),
        ({"mm_processor_kwargs": {"num_frames": 2}}, "mm_processor_kwargs.num_frames"),
        ({"slipstream": {"segments": "shots"}}, "slipstream.segments"),
        ({"slipstream": {"skip_marked": "black"}}, "slipstream.skip_marked"),
    ],
)
def test_what_does_not_fit_the_document_is_named(asked_for: dict[str, Any], param: str | None) -> None:
    chat = read(with_part({"type": "file", "file": {"file_id": "file-1"}}, **asked_for))
    with pytest.raises(SlipstreamError) as error:
        parse_pages(chat.document.check().request.pages, num_pages=3, max_pages=2)
    assert as_api_error(error.value, chat.params).param == param


def test_an_empty_text_beside_others_says_nothing() -> None:
    words, video = asked(URL)[0]["content"]
    for parts, options in (([words, EMPTY, video], {"prompt": words["text"]}), ([EMPTY, video], {})):
        assert read(request(messages=[{"role": "user", "content": parts}])).options.given() == options
    more = EMPTY | {"cache_control": {}}
    assert refused(with_part(more)).param == "messages[0].content[1].cache_control"


@pytest.mark.parametrize(
    ("content", "param"), [("", "content"), ([EMPTY], "content[0].text"), ([EMPTY, EMPTY], "content[0].text")]
)
def test_a_message_without_a_word_is_named(content: Any, param: str) -> None:
    error = refused(request(messages=[{"role": "user", "content": content}, *asked(URL)]))
    assert (str(error), error.param) == (f"messages[0].{param} is empty", f"messages[0].{param}")


def test_text_that_looks_like_media_is_no_text() -> None:
    assert refused(request(messages=asked(URL, data_url(b"x")))).param == "messages[0].content[0].text"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in _paths(inner, (*path, key)))]


RICH = with_part(
    {"type": "video", "video": [data_url(b"a")], "fps": 4},
    prediction={"type": "content", "content": [{"type": "text", "text": "x"}]},
    media_io_kwargs={"video": {"num_frames": 1}},
    slipstream={"method": "slipstream", "dpi": 72, "pages": "1", "stop": None},
    stream=True,
    stream_options={"include_usage": True},
    stop=["a"],
    temperature=0.5,
)
del RICH["slipstream"]["stop"]


@given(st.sampled_from(_paths(RICH)), _JSON)
def test_whatever_stands_anywhere_is_taken_or_refused(path: tuple[Any, ...], value: Any) -> None:
    changed = copy.deepcopy(RICH)
    if not path:
        changed = value
    else:
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
    with contextlib.suppress(ApiError):  # and nothing else
        read(changed)
