"""Reads a manifest: JSON lines that name videos and what differs for each. Knows no queue and no folder walk."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from google.protobuf import json_format

from slipstream.errors import InvalidRequest
from slipstream.rpc.v1.archive_pb2 import BatchItem
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions

LONGEST_LINE = 1024 * 1024
"""Bytes."""
LONGEST_NAME = 256
"""Characters of a custom id; they are printable."""
SOURCE_KEYS = ("source", "path", "url")
OPTION_KEYS = frozenset(CaptionOptions.DESCRIPTOR.fields_by_name) - {"path", "request_id"}
KNOWN_KEYS = OPTION_KEYS | {"custom_id", "sha256", *SOURCE_KEYS}
SHA256_DIGITS = 64


def read_manifest(lines: BinaryIO, name: str, folder: Path) -> Iterator[BatchItem]:
    """One item a line; relative paths are below `folder`. Raises `InvalidRequest` that names the bad line."""
    number = 0
    while line := lines.readline(LONGEST_LINE + 1):
        number += 1
        try:
            if len(line) > LONGEST_LINE:
                raise InvalidRequest(f"longer than {LONGEST_LINE} bytes")
            if line.strip():
                yield parse_line(line, folder)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name} line {number}: {error}") from None


def parse_line(line: bytes, folder: Path) -> BatchItem:
    """The item of one line. Raises `InvalidRequest` that says what is wrong with it."""
    fields = _json_object(line)
    unknown = sorted(fields.keys() - KNOWN_KEYS)
    if unknown:
        raise InvalidRequest(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(KNOWN_KEYS))}")
    sources = [key for key in SOURCE_KEYS if key in fields]
    if len(sources) != 1:
        raise InvalidRequest("give exactly one of source, path and url")
    source = _text(fields, sources[0])
    item = BatchItem(
        custom_id=_custom_id(fields, sources[0]),
        source=source if is_url(source) else str(folder / source),
    )
    if sources[0] == "url" and not is_url(source):
        raise InvalidRequest("url must begin with https://")
    if "sha256" in fields:
        item.sha256 = _sha256(_text(fields, "sha256"))
    options = {key: value for key, value in fields.items() if key in OPTION_KEYS}
    if options:
        item.caption.CopyFrom(_options(options))
    return item


def is_url(source: str) -> bool:
    """Whether it names something to fetch instead of a file."""
    return source.startswith("https://")


def _custom_id(fields: dict[str, Any], source_key: str) -> str:
    key = "custom_id" if "custom_id" in fields else source_key
    text = _text(fields, key)
    if len(text) > LONGEST_NAME or not text.isprintable():
        raise InvalidRequest(f"{key} is no custom_id, which has at most {LONGEST_NAME} printable characters; give one")
    return text


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise InvalidRequest("not a JSON object in UTF-8") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("not a JSON object in UTF-8")
    return fields


def _text(fields: dict[str, Any], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str) or not value or not is_sendable(value):
        raise InvalidRequest(f"{key} must be a text that is not empty")
    return value


def is_sendable(text: str) -> bool:
    """Whether the text is valid Unicode without the null character: file names and JSON may hold neither."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _sha256(text: str) -> str:
    if len(text) != SHA256_DIGITS or not set(text.lower()) <= set("0123456789abcdef"):
        raise InvalidRequest(f"sha256 must be {SHA256_DIGITS} hexadecimal digits")
    return text.lower()


def _options(fields: dict[str, Any]) -> CaptionOptions:
    try:
        options: CaptionOptions = json_format.ParseDict(fields, CaptionOptions())
        options.SerializeToString()
    except (json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(" ".join(str(error).split())) from None
    return options
