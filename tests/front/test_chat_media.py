"""The medium of a chat request, as other servers' clients give it, and what is said of its frames."""

from typing import Any

import pytest

from slipstream.errors import LimitExceeded
from slipstream.services.front.api_errors import as_api_error
from slipstream.services.front.chat_messages import MediumKind, StoredFile
from tests.front.test_chat_requests import URL, read, refused, request, with_part
from tests.support.front import data_url

ONE_STRING = {"type": "video_url", "video_url": {"url": data_url(b"abc", "video/jpeg")}}
LIST = {"type": "video", "video": [data_url(b"a")] * 3}
PICTURE = {"type": "image_url", "image_url": {"url": URL}}


def test_files_and_frames() -> None:
    stored = read(with_part({"type": "file", "file": {"file_id": "file-1", "filename": "x"}}))
    assert (stored.medium.kind, stored.medium.source) == (MediumKind.FILE, StoredFile("file-1"))
    frames = read(with_part({"type": "video", "video": [data_url(b"a"), data_url(b"bc")], "fps": 4}))
    assert frames.medium.kind is MediumKind.FRAMES and frames.options.num_frames == 2
    assert [frame.num_bytes for frame in frames.medium.frames] == [1, 2] and frames.medium.frames_per_second == 4


def test_frames_of_each_second_of_a_video_at_an_address() -> None:
    chat = read(with_part({"type": "video", "video": URL, "fps": 0.5}))
    assert (chat.medium.kind, chat.options.fps) == (MediumKind.VIDEO, 0.5)
    neutral = read(request(media_io_kwargs={"video": {"num_frames": 8, "fps": -1}}))
    assert "fps" not in neutral.options.given(), "vLLM's default"


@pytest.mark.parametrize("beside", [{"detail": "low"}, {"detail": "high"}, {"detail": "auto", "format": "image/jpeg"}])
def test_what_clients_say_of_a_picture_beside_its_address_is_tolerated(beside: dict[str, str]) -> None:
    """LangChain4j always says a detail, and Strands a format."""
    plain, told = ({"type": "image_url", "image_url": {"url": URL} | more} for more in ({}, beside))
    assert read(with_part(told)) == read(with_part(plain))


@pytest.mark.parametrize(
    ("part", "more"),
    [
        ({"type": "video_url", "video_url": {"url": URL}}, {"uuid": "clip-1"}),
        ({"type": "video_url", "video_url": {"url": URL}}, {"video_url": {"url": URL, "detail": "low"}}),
        ({"type": "image_url", "image_url": {"url": URL}}, {"uuid": "picture-1", "modalities": "image"}),
        ({"type": "file", "file": {"file_id": "file-1"}}, {"uuid": "file-1"}),
    ],
)
def test_what_other_servers_take_of_a_medium_and_changes_none_is_tolerated(
    part: dict[str, Any], more: dict[str, Any]
) -> None:
    """vLLM's key of a cache, litellm's detail of a video, and what SGLang takes a picture for."""
    assert read(with_part(part | more)) == read(with_part(part))


@pytest.mark.parametrize(("part", "num_frames"), [(ONE_STRING, 1), (LIST, 3), (PICTURE, 1)])
def test_pictures_may_be_told_to_be_no_more_sampled(part: dict[str, Any], num_frames: int) -> None:
    """As by the tools of Qwen that have sampled them; what samples them again is refused."""
    said = {"do_sample_frames": False}
    chat = read(with_part(part, mm_processor_kwargs=said))
    assert (chat.options.num_frames, chat.options.fps) == (num_frames, 0)
    assert chat.medium == read(with_part(part)).medium
    error = refused(with_part(part, mm_processor_kwargs=said | {"num_frames": 2}))
    assert "say different things" in str(error)


@pytest.mark.parametrize("part", [{"type": "video_url", "video_url": {"url": URL}}, {"type": "video", "video": URL}])
def test_a_video_is_sampled_all_the_same(part: dict[str, Any]) -> None:
    error = refused(with_part(part, mm_processor_kwargs={"do_sample_frames": False}))
    assert (error.param, error.code) == ("mm_processor_kwargs.do_sample_frames", "unsupported_value")


@pytest.mark.parametrize("rate", [1.5, [1.5]])
@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
def test_frames_in_one_string_have_the_rate_that_is_said_beside_them(field: str, rate: Any) -> None:
    """As by Qwen's recipe for vLLM, which gives it as a list: none of them is left out for it."""
    said = {"fps": rate} if field == "mm_processor_kwargs" else {"video": {"fps": rate}}
    chat = read(with_part(ONE_STRING, **{field: said}))
    assert chat.medium.frames_per_second == 1.5
    assert chat.options.given() == {"prompt": "?", "num_frames": 1}
    for other, message in (([1.5, 2], "must be a number"), ([], "must be a number"), (3, "say different things")):
        fields = {"media_io_kwargs": {"video": {"fps": 2}}, "mm_processor_kwargs": {"fps": other}}
        error = refused(with_part(ONE_STRING, **fields))
        assert message in str(error) and error.param == "mm_processor_kwargs.fps"


def test_frames_that_are_too_many_are_named_as_they_were_given() -> None:
    own = {"slipstream": {"num_frames": 2}}
    where = "messages[0].content[1]"
    for said, fields, num_frames, param in (
        (LIST, {}, 3, f"{where}.video"),
        (ONE_STRING, {}, 1, f"{where}.video_url.url"),
        (LIST, own, 2, "slipstream.num_frames"),
    ):
        chat = read(with_part(said, **fields))
        too_many = LimitExceeded(f"num_frames {num_frames} is more than the target's limit of 1")
        assert (chat.options.num_frames, as_api_error(too_many, chat.params).param) == (num_frames, param)
