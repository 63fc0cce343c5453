"""A form with one file, `multipart/form-data`: the file goes to disk as it comes, its fields are few and short."""

import asyncio
from collections.abc import AsyncIterator

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.file_store import MAX_NAME_CHARS, NewFile

MAX_PARTS, MAX_FIELD_BYTES, MAX_HEAD_BYTES = 16, 4096, 8192


class Form:
    """Reads a form. `fields` and `filename` are whole when it has been read."""

    def __init__(self, content_type: str, file: NewFile) -> None:
        """Raises `ApiError` for another type of content."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= 128:
            raise ApiError("send multipart/form-data with the fields file and purpose", status=415, code="wrong_type")
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._file = file
        self._num_parts = 0
        self._is_file = self._has_file = self._is_ended = False
        self._head: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._name, self._value, self._field = bytearray(), bytearray(), bytearray()
        self._key = ""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._whole,
            },
        )

    async def read(self, chunks: AsyncIterator[bytes]) -> None:
        """All of it. Raises `ApiError`."""
        try:
            async for chunk in chunks:
                await asyncio.to_thread(self._parser.write, chunk)
            self._parser.finalize()
        except FormParserError:
            raise ApiError("the form is no valid multipart/form-data", code="invalid_form") from None
        if not self._is_ended:
            raise ApiError("the form ends in its middle", code="invalid_form")
        if not self._has_file:
            raise ApiError("the form has no file", param="file")

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ApiError(f"the form has more than {MAX_PARTS} parts", code="invalid_form")
        self._head, self._head_bytes = {}, 0
        self._field.clear()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._grow(self._name, data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._grow(self._value, data[start:end])

    def _grow(self, part: bytearray, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ApiError("a part's head is too long", code="invalid_form")
        part += data

    def _header_end(self) -> None:
        self._head[bytes(self._name).lower()] = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._head.get(b"content-disposition", b""))
        self._key = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._key == "file" or b"filename" in options
        if self._is_file and (self._has_file or self._key != "file"):
            raise ApiError("the form takes one file, named file", param=self._key[:64])
        if self._key in self.fields:
            raise ApiError(f"{self._key[:64]!r} occurs twice", param=self._key[:64])
        if self._is_file:
            self._has_file = True
            self.filename = options.get(b"filename", b"").decode(errors="replace")[:MAX_NAME_CHARS]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._file.write(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > MAX_FIELD_BYTES:
            raise ApiError(f"{self._key[:64]!r} is too long", param=self._key[:64])

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._key] = self._field.decode(errors="replace")

    def _whole(self) -> None:
        self._is_ended = True
