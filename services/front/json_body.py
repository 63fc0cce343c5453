"""JSON that comes in pieces and holds media: every long `data:` string goes to disk, decoded, and a name stays in its
place. So a body of gigabytes takes as much memory as the words in it."""

import binascii
import hashlib
import json
import math
import os
import re
import secrets
import tempfile
import threading
from dataclasses import dataclass, field
from typing import IO, Any

from slipstream.services.front.api_errors import ApiError, too_large

IN_MEMORY_BYTES = 256 * 1024
"""Media beyond this of one body go to disk."""
MAX_VALUES = 100_000
"""Values of one body: a few bytes each on the wire, and some hundred in memory. One string may have so many
frames, too."""
MAX_DEPTH = 500
"""Of lists and objects in each other: half of what Python reads and writes, wherever that is called from."""
MAX_HEAD_BYTES = 1024
"""Of a `data:` string, before its content: room for a file's name of 255 bytes, each as `%XX`."""
MAX_BEFORE_BYTES = 512
"""Before a string, that are looked at for what it is."""
_HEAD = re.compile(rb"data:([\w!#$&^*.+/-]*)(?:;[^;]*)*?;base64,", re.IGNORECASE)
"""Between type and content may be what a browser's recorder tells of both, such as `;codecs=vp8,opus`, or a name. The
type's characters are those of RFC 6838, and the `*` of programs that know no more than `video/*`."""
_QUOTE_OR_ESCAPE = re.compile(rb'["\\]')
_COMMAS = re.compile(rb",")
_ESCAPE = re.compile(rb"\\(?:u[0-9A-Fa-f]{4}|/)")
_HEX_DIGITS = tuple(bytes([digit]) for digit in b"0123456789abcdefABCDEF")
_LONG_ESCAPE = len(rb"\u002B")
NO_BASE64 = "it is no base64 of A-Z, a-z, 0-9, + and /, with its padding and in a single line"
FRAMES_TYPE = "video/jpeg"
"""Frames one after the other in one string, parted by commas."""


@dataclass
class Media:
    """What one `data:` string holds, in the body's spool."""

    media_type: str
    start: int
    end: int = 0
    ends: list[int] = field(default_factory=list)
    """Of each part: one, or as many as there are frames."""
    error: str = ""
    sha256: str = ""

    @property
    def num_bytes(self) -> int:
        """Decoded."""
        return self.end - self.start


class _Decoder:
    """Base64 in pieces that may be cut anywhere, appended to a file."""

    def __init__(self, media: Media, spool: IO[bytes]) -> None:
        self._media, self._spool = media, spool
        self._left = b""
        self._digest = hashlib.sha256()
        self._is_padded = False
        media.end = media.start

    def feed(self, text: bytes) -> None:
        """More of the string, as it stands in the JSON."""
        if self._media.error:
            return
        if self._media.media_type == FRAMES_TYPE:
            *whole, text = _COMMAS.split(text)
            for part in whole:
                self._decode(part)
                self.end_part()
        self._decode(text)

    def end_part(self) -> None:
        """A frame is whole, or the string."""
        if self._left and not self._media.error:
            self._media.error = NO_BASE64
        if not self._media.error and self._media.end == (self._media.ends or [self._media.start])[-1]:
            self._media.error = "it has no bytes"
        if len(self._media.ends) >= MAX_VALUES:
            raise too_large(f"a string of media has more than {MAX_VALUES} frames")
        self._media.ends.append(self._media.end)
        self._left, self._is_padded = b"", False

    def finish(self) -> None:
        """The string ends."""
        self.end_part()
        self._media.sha256 = self._digest.hexdigest()

    def _decode(self, text: bytes) -> None:
        text = self._left + text
        whole = len(text) // 4 * 4
        self._left = text[whole:]
        if not whole or self._media.error:
            return
        try:
            if self._is_padded:
                raise ValueError
            data = binascii.a2b_base64(text[:whole], strict_mode=True)
        except ValueError:
            self._media.error = NO_BASE64
            return
        self._is_padded = text[whole - 1 : whole] == b"="
        self._spool.write(data)
        self._digest.update(data)
        self._media.end += len(data)


class JsonBody:
    """A JSON text that is fed in pieces. A context manager: what it spooled is gone when it is left.

    Args:
        max_json_bytes: of the text without media.
        max_media_bytes: of all media together, decoded.
        bare: what stands before a string, its quote included, that is media in base64 without a head. None: no string
            is.
    """

    def __init__(self, max_json_bytes: int, max_media_bytes: int, bare: re.Pattern[bytes] | None = None) -> None:
        self.media: dict[str, Media] = {}
        """By the name that stands in the JSON."""
        self.spool: IO[bytes] = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115 (closed with this object)
        self._max_json_bytes, self._max_media_bytes, self._bare = max_json_bytes, max_media_bytes, bare
        self._secret = secrets.token_hex(16)
        self._json = bytearray()
        self._num_values = 0
        self._in_string = False
        self._string_start = 0
        """Where the string that is open begins in `_json`, behind its quote; -1 where its head has been looked at."""
        self._escape = b""
        """What was read of one that is not whole; empty: none is open."""
        self._decoder: _Decoder | None = None
        self._last = Media("", 0)
        """Of the media; each begins where the one before it ends."""

    @property
    def media_bytes(self) -> int:
        """Of all media so far, decoded."""
        return self._last.end

    def feed(self, data: bytes) -> None:
        """The next bytes. Raises `ApiError` where there is too much."""
        position = 0
        while position < len(data):
            position = self._in_text(data, position) if self._in_string else self._between(data, position)
        if len(self._json) > self._max_json_bytes:
            raise too_large(
                f"the JSON has more than {self._max_json_bytes} bytes beside its media; give media as base64 in data:"
                " URLs, by https or by path"
            )
        if self.media_bytes > self._max_media_bytes:
            raise too_large(f"the media have more than {self._max_media_bytes} bytes")

    def value(self, encoding: str = "utf-8") -> Any:
        """What the whole text says; by `utf-8-sig` also one that begins with UTF-8's mark. Raises `ApiError`."""
        try:
            value = json.loads(
                self._json.decode(encoding),
                parse_float=_number,
                parse_constant=_refuse_constant,
                object_pairs_hook=_object,
            )
            if b"\\u" in self._json:
                json.dumps(value, ensure_ascii=False).encode()  # half a character cannot be sent on
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, json.JSONDecodeError) else "it is no JSON that can be read"
            raise ApiError(f"the body is no valid JSON: {reason}", code="invalid_json") from None
        if self._json.count(b"[") + self._json.count(b"{") > MAX_DEPTH and _is_deep(value):
            raise ApiError(f"the body is nested more than {MAX_DEPTH} deep", code="invalid_json")
        return value

    def window(self, start: int, end: int) -> "Window":
        """A part of the spool, to be read."""
        return Window(self.spool, start, end)

    def __enter__(self) -> "JsonBody":
        return self

    def __exit__(self, *_: object) -> None:
        self.spool.close()

    def _between(self, data: bytes, start: int) -> int:
        """Outside strings."""
        quote = data.find(b'"', start)
        piece = data[start:] if quote < 0 else data[start : quote + 1]
        self._num_values += piece.count(b",") + piece.count(b"[") + piece.count(b"{")
        if self._num_values > MAX_VALUES:
            raise too_large(f"the JSON has more than {MAX_VALUES} values")
        self._json += piece
        if quote >= 0:
            self._in_string, self._string_start = True, len(self._json)
            if self._bare is not None and self._bare.search(self._json, max(len(self._json) - MAX_BEFORE_BYTES, 0)):
                self._begin_media("")
        return start + len(piece)

    def _in_text(self, data: bytes, start: int) -> int:
        """Inside a string; the position behind what was taken."""
        if self._escape:
            return self._in_escape(data, start)
        found = _QUOTE_OR_ESCAPE.search(data, start)
        end = found.start() if found else len(data)
        self._take(data[start:end])
        if found is None:
            return end
        if found[0] == b'"':
            self._end_string()
        else:
            self._escape = b"\\"
        return end + 1

    def _in_escape(self, data: bytes, start: int) -> int:
        """Behind a backslash. An escape is taken as a whole, wherever the text is cut."""
        character = data[start : start + 1]
        if len(self._escape) == 1 or character in _HEX_DIGITS:
            self._escape += character
            start += 1
            if self._escape.startswith(b"\\u") and len(self._escape) < _LONG_ESCAPE:
                return start
        escape, self._escape = self._escape, b""
        self._take(escape if self._decoder is None else _plain(escape))
        return start

    def _take(self, text: bytes) -> None:
        if self._decoder is not None:
            self._decoder.feed(text)
            return
        self._json += text
        if self._string_start >= 0 and len(self._json) - self._string_start >= MAX_HEAD_BYTES:
            self._look_at_head()

    def _look_at_head(self) -> None:
        """Whether the string is media, once enough of it is there."""
        said = _ESCAPE.sub(lambda found: _plain(found[0]), bytes(self._json[self._string_start :]))
        head = _HEAD.match(said, 0, MAX_HEAD_BYTES)
        if head is None:
            self._string_start = -1
            return
        self._begin_media(head[1].decode().lower()).feed(said[head.end() :])

    def _begin_media(self, media_type: str) -> _Decoder:
        """The string is media: a name stands for it, and what comes is decoded."""
        name = f"media:{self._secret}:{len(self.media)}"
        self._last = self.media[name] = Media(media_type, self._last.end)
        del self._json[self._string_start :]
        self._json += name.encode()
        self._string_start = -1
        self._decoder = _Decoder(self._last, self.spool)
        return self._decoder

    def _end_string(self) -> None:
        if self._string_start >= 0:
            self._look_at_head()
        if self._decoder is not None:
            self._decoder.finish()
            self._decoder = None
        self._json += b'"'
        self._in_string, self._string_start = False, 0


class Window:
    """A part of a file as a file of its own, for one reader at a time; its parts may be read at once."""

    def __init__(self, file: IO[bytes], start: int, end: int, lock: "threading.Lock | None" = None) -> None:
        self._file, self._start, self._end = file, start, end
        self._position = start
        self._lock = threading.Lock() if lock is None else lock

    @classmethod
    def whole(cls, file: IO[bytes]) -> "Window":
        """All of a file."""
        return cls(file, 0, file.seek(0, os.SEEK_END))

    @property
    def num_bytes(self) -> int:
        """From its start to its end."""
        return self._end - self._start

    def part(self, start: int, end: int) -> "Window":
        """Of this window from `start` to `end`, or to its own end."""
        return Window(self._file, self._start + start, min(self._start + end, self._end), self._lock)

    def again(self) -> "Window":
        """The same for one more reader."""
        return self.part(0, self.num_bytes)

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes; none at the end."""
        left = max(self._end - self._position, 0)
        with self._lock:
            self._file.seek(self._position)
            data = self._file.read(left if size < 0 else min(size, left))
        self._position += len(data)
        return data

    def tell(self) -> int:
        """From the window's start."""
        return self._position - self._start

    def seek(self, offset: int, /) -> int:
        """To a place counted from the window's start; there is nothing to read behind its end."""
        self._position = self._start + offset
        return offset

    def seekable(self) -> bool:
        """Yes."""
        return True


def _plain(escape: bytes) -> bytes:
    """What an escape stands for, where that may occur in a `data:` URL: some clients write `\\/`, others `\\u002B` for
    a plus. All else stays as it is, and is no base64."""
    if escape == rb"\/":
        return b"/"
    is_plain = len(escape) == _LONG_ESCAPE and escape.startswith(rb"\u00") and escape[4:5] < b"8"
    return bytes([int(escape[4:], 16)]) if is_plain else escape


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        held = [inner for inner in level if isinstance(inner, dict | list)]
        level = [one for inner in held for one in (inner.values() if isinstance(inner, dict) else inner)]
        if not held:
            return False
    return True


def _number(text: str) -> int | float:
    """JSON does not tell 256.0 from 256, and some serializers write one for the other. What no float can be would be
    answered as `Infinity`, which is no JSON."""
    value = float(text)
    if math.isinf(value):
        raise ApiError(f"the body has a number that is too large: {text[:32]}", code="invalid_json")
    return int(value) if value.is_integer() else value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return fields
