"""What a row of a manifest means: the video or document that it names, and what differs for it."""

import json
import os
from pathlib import Path
from typing import Any

from slipstream.archive.messages import DOCUMENT_OPTIONS, BatchItem, JobKind, document_options
from slipstream.client.batch_handles import LONGEST_NAME, is_url
from slipstream.config import is_sendable, whole_number
from slipstream.errors import InvalidRequest
from slipstream.objects.store import ObjectUrl, check_scheme
from slipstream.options import OPTIONS_BY_NAME, CaptionOptions

SOURCE_KEYS = ("source", "path", "url")
SIZE_KEY = "size"
KNOWN_KEYS = frozenset(OPTIONS_BY_NAME) | {"custom_id", "sha256", "kind", SIZE_KEY, *SOURCE_KEYS, *DOCUMENT_OPTIONS}
SHA256_DIGITS = 64
MOST_BYTES = 2**63 - 1

Row = dict[str, Any]
Folder = Path | ObjectUrl
"""What relative paths of a manifest are below."""


def item_of(fields: Row, folder: Folder) -> BatchItem:
    """The item of one row, in which null says nothing. Raises `InvalidRequest` that says what is wrong with it."""
    fields = {name: whole_number(value) for name, value in fields.items() if value is not None}
    unknown = sorted(fields.keys() - KNOWN_KEYS)
    if unknown:
        raise InvalidRequest(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(KNOWN_KEYS))}")
    sources = [key for key in SOURCE_KEYS if key in fields]
    if len(sources) != 1:
        raise InvalidRequest("give exactly one of source, path and url")
    source = _text(fields, sources[0])
    if sources[0] == "url" and not is_url(source):
        raise InvalidRequest("url must begin with https://, s3://, gs:// or az://")
    check_scheme(source)
    options = CaptionOptions.from_mapping({name: value for name, value in fields.items() if name in OPTIONS_BY_NAME})
    _check_texts(options)
    document = {name: fields[name] for name in DOCUMENT_OPTIONS if name in fields}
    if document:
        document_options(document)
    item = BatchItem(
        custom_id=_custom_id(fields, sources[0]),
        source=source if is_url(source) else _below(folder, source),
        caption=options.given(),
        sha256=_sha256(_text(fields, "sha256")) if "sha256" in fields else "",
        kind=_kind(_text(fields, "kind")) if "kind" in fields else None,
        document=document,
        num_bytes=_num_bytes(fields[SIZE_KEY]) if SIZE_KEY in fields else None,
    )
    item.check_reading()
    return item


def _num_bytes(size: Any) -> int:
    if type(size) is not int or not 0 <= size <= MOST_BYTES:
        raise InvalidRequest(f"{SIZE_KEY} must be a number of bytes")
    return size


def _below(folder: Folder, source: str) -> str:
    """Without steps `.` and `..`: a gateway takes no path and no key that has one."""
    if isinstance(folder, Path) or source.startswith("/"):
        return os.path.normpath(os.path.join(str(folder), source))
    return str(ObjectUrl(folder.root, os.path.normpath(f"/{folder.key}/{source}").lstrip("/")))


def _kind(text: str) -> JobKind:
    if text not in list(JobKind):
        raise InvalidRequest(f"kind {text!r} is unknown; choose one of {', '.join(JobKind)}")
    return JobKind(text)


def _custom_id(fields: dict[str, Any], source_key: str) -> str:
    key = "custom_id" if "custom_id" in fields else source_key
    text = _text(fields, key)
    if len(text) > LONGEST_NAME or not text.isprintable():
        raise InvalidRequest(f"{key} is no custom_id, which has at most {LONGEST_NAME} printable characters; give one")
    return text


def _text(fields: dict[str, Any], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str) or not value or not is_sendable(value):
        raise InvalidRequest(f"{key} must be a text that is not empty")
    return value


def _sha256(text: str) -> str:
    if len(text) != SHA256_DIGITS or not set(text.lower()) <= set("0123456789abcdef"):
        raise InvalidRequest(f"sha256 must be {SHA256_DIGITS} hexadecimal digits")
    return text.lower()


def _check_texts(options: CaptionOptions) -> None:
    try:
        json.dumps(options.given(), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest("a text among the options is not valid Unicode") from None
