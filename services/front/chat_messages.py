"""The messages of a chat request: what was said, in turns, and exactly one video, picture or document."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import unquote

from slipstream.errors import SlipstreamError
from slipstream.objects.store import scheme_of
from slipstream.options import CaptionOptions
from slipstream.services.front.api_errors import ApiError, as_api_error
from slipstream.services.front.json_body import FRAMES_TYPE, Media

# -- media ------------------------------------------------------------------------------------------------------------


class MediumKind(StrEnum):
    """How a medium was given."""

    VIDEO = "video"
    FRAMES = "frames"
    """JPEG, PNG or WebP pictures, one after the other."""
    IMAGE = "image"
    FILE = "file"
    """A document or a video; its first bytes say which."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of the gateway's, at this path."""

    path: str


@dataclass(frozen=True)
class StoredFile:
    """A file of /v1/files."""

    file_id: str


Source = Media | RemoteFile | StoredFile | str
"""A str is an https address."""


@dataclass(frozen=True)
class Medium:
    """The one video, picture or document of a request."""

    kind: MediumKind
    source: Source
    param: str
    frames: tuple[Media, ...] = ()
    """Of `FRAMES` that were given one by one; `source` is the first."""
    frames_per_second: float = 2.0
    """Of `FRAMES`: what Qwen takes where nobody says."""

    @property
    def num_frames(self) -> int:
        """Of what is pictures by now; 0: a video's are still to be sampled."""
        if self.kind is not MediumKind.FRAMES:
            return int(self.kind is MediumKind.IMAGE)
        assert isinstance(self.source, Media), "frames are given by value"
        return len(self.frames) or len(self.source.ends)


# -- options as they are found ----------------------------------------------------------------------------------------


class Asked:
    """Options as they are found, each checked for itself so that the field that gave it can be named."""

    def __init__(self, media: Mapping[str, Media]) -> None:
        self.media = media
        self.values: dict[str, Any] = {}
        self.params: dict[str, str] = {}

    def give(self, name: str, value: Any, param: str) -> None:
        """None gives nothing."""
        if value is None:
            return
        if any(text in self.media for text in strings_in(value)):
            raise ApiError(f"{param} holds a data: URL in base64, which media alone may be", param=param)
        if name in self.values and self.values[name] != value:
            raise ApiError(f"{param} and {self.params[name]} say different things; give one of them", param=param)
        try:
            CaptionOptions(**{name: value})
        except SlipstreamError as error:
            raise as_api_error(error, {name: param}) from None
        self.values[name], self.params[name] = value, param

    def suggest(self, name: str, value: Any, param: str) -> None:
        """Gives what counts where nothing else was said."""
        if name not in self.values:
            self.give(name, value, param)

    def options(self) -> CaptionOptions:
        """All of them. Raises `ApiError` for those that do not go together."""
        try:
            return CaptionOptions(**self.values)
        except SlipstreamError as error:
            raise as_api_error(error, self.params) from None

    def found(self, text: Any, param: str) -> Source:
        """What an address stands for."""
        if not isinstance(text, str):
            raise ApiError(f"{param} must be text", param=param)
        if text in self.media:
            media = self.media[text]
            if media.error:
                raise ApiError(f"{param} cannot be used: {media.error}", param=param, code="invalid_base64")
            return media
        scheme = scheme_of(text)
        if scheme == "https":
            return text
        if scheme == "file":
            return _file(text, param)
        raise ApiError(
            f"{param} must be an https:// address, a data: URL in base64, or file:// with a path of the gateway's",
            param=param,
        )


# -- messages ---------------------------------------------------------------------------------------------------------

MAX_MESSAGES = 64
ROLES = ("user", "assistant", "system", "developer", "tool")
_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""In a message's other fields, as servers put them into answers that are handed back."""
_DETAILS = (None, "auto", "low", "high")
"""How closely OpenAI's models are to look at a picture, and litellm's at a video. LangChain4j says "low" unless told
otherwise; a target looks as its checkpoint has it."""
_OF_CALLS = {"assistant": {"tool_calls"}, "tool": {"tool_call_id"}}
"""What messages about calls of functions have beside what all have."""
_BESIDE = {"type", "uuid"}
"""What a medium's part may have. By a `uuid` vLLM finds media again; ours are found by their content."""


def list_of_messages(said: Any, most: int = MAX_MESSAGES) -> list[Any]:
    """Raises `ApiError` for what is none, and for a longer one."""
    if not isinstance(said, list) or not 0 < len(said) <= most:
        raise ApiError(f"messages must be a list of 1 to {most}", param="messages")
    return said


def read_messages(messages: Any, asked: Asked, most: int = MAX_MESSAGES) -> Medium:
    """Gives what is said, and returns the one medium."""
    said = _Said()
    for index, message in enumerate(list_of_messages(messages, most)):
        _read_message(object_at(message, f"messages[{index}]"), f"messages[{index}]", asked, said)
    if (number := len(said.media)) != 1:
        cure = "send pictures that belong together as the frames of one video"
        if not number:
            cure = "give it beside the user's text, as a part `video_url`, `video`, `image_url` or `file`"
        raise ApiError(
            f"a request asks about exactly one video, picture or document, and this one holds {number}; {cure}",
            param="messages",
        )
    said.give(asked)
    return said.media[0]


@dataclass
class _Said:
    """What the messages say: neighbours of one side are one turn."""

    system: list[str] = field(default_factory=list)
    system_in: list[str] = field(default_factory=list)
    """The contents that say it."""
    turns: list[list[str]] = field(default_factory=lambda: [[]])
    """The user's and the model's in turns, the user's first: lines of text."""
    media: list[Medium] = field(default_factory=list)

    def lines(self, role: str, param: str) -> list[str]:
        """Where a message's text belongs. Raises `ApiError` for an answer to nothing."""
        if role in ("system", "developer"):
            self.system_in.append(f"{param}.content")
            return self.system
        if role == "assistant" and not (self.media or self.turns[0]):
            raise ApiError(f"{param}.role: an answer needs a question before it", param=f"{param}.role")
        if role == "tool" and len(self.turns) == 1:
            raise ApiError(f"{param}.role: what a function returned needs a call before it", param=f"{param}.role")
        if (role == "assistant") == len(self.turns) % 2:
            self.turns.append([])
        return self.turns[-1]

    def give(self, asked: Asked) -> None:
        """Where the user begins with no words, the first question is the system's, also when there are more. Raises
        `ApiError` for a conversation that does not end with a question."""
        first, *others = ("\n".join(lines) for lines in self.turns)
        if len(others) % 2:
            raise ApiError("the last message must be the user's: an answer is not written on", param="messages")
        if not all(others[1::2]):
            raise ApiError("messages: what is said after an answer has no words", param="messages")
        system, where = "\n".join(self.system), self.system_in[0] if len(self.system_in) == 1 else "messages"
        is_systems = not first
        if is_systems:
            first, system = system, ""
        *earlier, question = first, *others
        asked.give("prompt", question or None, where if is_systems and not others else "messages")
        asked.give("system", system or None, where)
        asked.give("turns", tuple(earlier) or None, "messages")


def _read_message(message: Mapping[str, Any], param: str, asked: Asked, said: _Said) -> None:
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(f"{param}.role must be one of {', '.join(ROLES)}", param=f"{param}.role")
    fields = {name: value for name, value in message.items() if value not in _NOTHING}
    # programs with several agents always name who speaks
    check_names(fields, {"role", "content", "name"} | _OF_CALLS.get(role, set()), param)
    lines, content, is_answer = said.lines(role, param), message.get("content"), role == "assistant"
    if "tool_calls" in fields:
        lines.extend(_calls(fields["tool_calls"], f"{param}.tool_calls", asked))
    if isinstance(content, str) or (is_answer and content is None):
        if content or role == "user":
            lines.append(_words(content, f"{param}.content", asked))
        return
    if not isinstance(content, list):
        raise ApiError(f"{param}.content must be text or a list of parts", param=f"{param}.content")
    is_silent = role == "user" and all(map(_is_empty, content))
    for index, part in enumerate(content):
        where = f"{param}.content[{index}]"
        part = object_at(part, where)
        if part.get("type") != "text":
            said.media.append(_read_medium(part, where, asked, is_users=role == "user"))
            if len(said.turns) > 1:
                raise ApiError(f"{where} must be in the first of the user's messages, before any answer", param=where)
            continue
        check_names(part, {"type", "text"}, where)
        if is_silent or not _is_empty(part):
            lines.append(_words(part.get("text"), f"{where}.text", asked))


def _read_medium(part: Mapping[str, Any], param: str, asked: Asked, is_users: bool) -> Medium:
    kind = part.get("type")
    if not is_users or not isinstance(kind, str) or kind not in _READERS:
        known = ", ".join(["text", *_READERS])
        raise ApiError(f"{param}.type must be one of {known}, and media are the user's", param=f"{param}.type")
    return _READERS[kind](part, param, asked)


def _calls(said: Any, param: str, asked: Asked) -> list[str]:
    """Calls of functions as Hermes and Qwen write them: the model is told what it has called, and with what."""
    if not isinstance(said, list):
        raise ApiError(f"{param} must be a list of calls", param=param)
    lines = []
    for index, call in enumerate(said):
        where = f"{param}[{index}].function"
        function = object_at(object_at(call, f"{param}[{index}]").get("function"), where)
        name = _words(function.get("name"), f"{where}.name", asked)
        arguments = _words(function.get("arguments"), f"{where}.arguments", asked)
        lines.append(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}')
    return lines


def _video_url(part: Mapping[str, Any], param: str, asked: Asked) -> Medium:
    check_names(part, _BESIDE | {"video_url"}, param)
    url = _url(part.get("video_url"), f"{param}.video_url", {"url", "detail"})
    source = asked.found(url, f"{param}.video_url.url")
    is_frames = isinstance(source, Media) and source.media_type == FRAMES_TYPE
    if is_frames:
        assert isinstance(source, Media)
        asked.suggest("num_frames", len(source.ends), f"{param}.video_url.url")
    return Medium(MediumKind.FRAMES if is_frames else MediumKind.VIDEO, source, param)


def _video(part: Mapping[str, Any], param: str, asked: Asked) -> Medium:
    """Qwen's: a list of frames, or an address."""
    check_names(part, _BESIDE | {"video", "fps"}, param)
    said, rate = part.get("video"), part.get("fps", Medium.frames_per_second)
    if isinstance(said, str):
        asked.give("fps", part.get("fps"), f"{param}.fps")
        return Medium(MediumKind.VIDEO, asked.found(said, f"{param}.video"), param)
    if not isinstance(said, list) or not said:
        raise ApiError(f"{param}.video must be a list of frames or an address", param=f"{param}.video")
    rate = frame_rate(rate, f"{param}.fps")
    frames = [asked.found(frame, f"{param}.video[{index}]") for index, frame in enumerate(said)]
    for index, frame in enumerate(frames):
        if not isinstance(frame, Media):
            where = f"{param}.video[{index}]"
            raise ApiError(f"{where} must be a data: URL: frames are given by value", param=where)
    media = tuple(frame for frame in frames if isinstance(frame, Media))
    asked.suggest("num_frames", len(media), f"{param}.video")
    return Medium(MediumKind.FRAMES, media[0], param, media, rate)


def _image_url(part: Mapping[str, Any], param: str, asked: Asked) -> Medium:
    check_names(part, _BESIDE | {"image_url", "modalities"}, param)
    if part.get("modalities") not in (None, "image"):  # SGLang's: what the pictures of a request are together
        where = f"{param}.modalities"
        raise ApiError(f"{where} must be image; send frames of a video as one `video`", param=where)
    url = _url(part.get("image_url"), f"{param}.image_url", {"url", "detail", "format"})
    return Medium(MediumKind.IMAGE, asked.found(url, f"{param}.image_url.url"), param)


_FILES = ("file_id", "file_data", "file_url")
"""How a file is given: one of /v1/files, itself, or where it lies."""


def _file_part(part: Mapping[str, Any], param: str, asked: Asked) -> Medium:
    check_names(part, _BESIDE | {"file"}, param)
    said = object_at(part.get("file"), f"{param}.file")
    check_names(said, {*_FILES, "filename"}, f"{param}.file")
    given = [name for name in _FILES if said.get(name) is not None]
    if len(given) != 1:
        raise ApiError(f"{param}.file must have one of {', '.join(_FILES)}", param=f"{param}.file")
    where, value = f"{param}.file.{given[0]}", said[given[0]]
    if given[0] == "file_id":
        return Medium(MediumKind.FILE, StoredFile(text_at(value, where)), where)
    return Medium(MediumKind.FILE, asked.found(value, where), param)


_READERS = {"video_url": _video_url, "video": _video, "image_url": _image_url, "file": _file_part}


# -- small things -----------------------------------------------------------------------------------------------------


def object_at(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(f"{param} must be an object", param=None if param == "the body" else param)
    return value


def check_names(fields: Mapping[str, Any], known: set[str], param: str) -> None:
    for name, value in fields.items():
        if name not in known and value is not None:
            where = f"{param}.{name[:64]}"
            raise ApiError(f"{where} is not supported; leave it out", param=where, code="unsupported_parameter")


def frame_rate(value: Any, param: str) -> float:
    """Of frames that are given by value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.001 <= value <= 1000:
        raise ApiError(f"{param} must be a number between 0.001 and 1000", param=param)
    return float(value)


def _url(said: Any, param: str, known: set[str]) -> Any:
    """The address of an object with one, or the address itself, as some clients write it."""
    if isinstance(said, str):
        return said
    fields = object_at(said, param)
    check_names(fields, known, param)
    if fields.get("detail") not in _DETAILS:
        raise ApiError(f"{param}.detail must be one of auto, low, high", param=f"{param}.detail")
    return fields.get("url")


def _file(url: str, param: str) -> RemoteFile:
    """A path, as wherever a file is named so: `?` and `#` are of its name."""
    host, root, rest = url.partition("://")[2].partition("/")
    path = unquote(root + rest)
    if host not in ("", "localhost") or not root or "\0" in path:
        raise ApiError(f"{param} must be of the form file:///PATH", param=param)
    return RemoteFile(path)


def strings_in(value: Any) -> Iterator[str]:
    """All strings of JSON, names too, however deep it is."""
    left = [value]
    while left:
        inner = left.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, dict):
            left += [*inner, *inner.values()]
        elif isinstance(inner, list | tuple):
            left += inner


def _is_empty(part: Any) -> bool:
    """A text without a character, as some clients send beside media."""
    return isinstance(part, dict) and part.get("type") == "text" and part.get("text") == ""


def _words(value: Any, param: str, asked: Asked) -> str:
    text = text_at(value, param)
    if text in asked.media:
        raise ApiError(f"{param} holds a data: URL; give media as a part of their own type", param=param)
    return text


def text_at(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise ApiError(f"{param} must be text" if value is not None else f"{param} is missing", param=param)
    if not value:
        raise ApiError(f"{param} is empty", param=param)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ApiError(f"{param} is no valid Unicode", param=param) from None
    return value
