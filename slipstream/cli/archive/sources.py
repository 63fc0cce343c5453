"""What to hand in: folders, patterns, files and manifests become items, one at a time."""

import glob
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from slipstream.archive.messages import DOCUMENT_EXTENSIONS, DOCUMENT_OPTIONS, BatchItem, JobKind, document_options
from slipstream.client.batch_handles import LONGEST_NAME, is_sendable, is_url, item_name
from slipstream.errors import InvalidRequest, VideoNotFound
from slipstream.options import OPTIONS_BY_NAME, CaptionOptions

# -- manifest ---------------------------------------------------------------------------------------------------------

# Reads a manifest: JSON lines that name videos and documents, and what differs for each.

LONGEST_LINE = 1024 * 1024
"""Bytes."""
SOURCE_KEYS = ("source", "path", "url")
KNOWN_KEYS = frozenset(OPTIONS_BY_NAME) | {"custom_id", "sha256", "kind", *SOURCE_KEYS, *DOCUMENT_OPTIONS}
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
    if sources[0] == "url" and not is_url(source):
        raise InvalidRequest("url must begin with https://")
    options = CaptionOptions.from_mapping(
        {name: value for name, value in fields.items() if name in OPTIONS_BY_NAME and value is not None}
    )
    _check_texts(options)
    document = {name: fields[name] for name in DOCUMENT_OPTIONS if fields.get(name) is not None}
    if document:
        document_options(document)
    return BatchItem(
        custom_id=_custom_id(fields, sources[0]),
        source=source if is_url(source) else str(folder / source),
        caption=options.given(),
        sha256=_sha256(_text(fields, "sha256")) if "sha256" in fields else "",
        kind=_kind(_text(fields, "kind")) if "kind" in fields else None,
        document=document,
    )


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


def _sha256(text: str) -> str:
    if len(text) != SHA256_DIGITS or not set(text.lower()) <= set("0123456789abcdef"):
        raise InvalidRequest(f"sha256 must be {SHA256_DIGITS} hexadecimal digits")
    return text.lower()


def _check_texts(options: CaptionOptions) -> None:
    try:
        json.dumps(options.given(), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest("a text among the options is not valid Unicode") from None


# -- sources ----------------------------------------------------------------------------------------------------------

VIDEO_EXTENSIONS = (
    *(".3g2", ".3gp", ".asf", ".avi", ".dv", ".f4v", ".flv", ".gxf", ".ivf", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4"),
    *(".mpeg", ".mpg", ".mts", ".mxf", ".nut", ".ogv", ".rm", ".rmvb", ".ts", ".vob", ".webm", ".wmv", ".wtv"),
)
MANIFEST_EXTENSION = ".jsonl"
STDIN = "-"
COPY_BYTES = 1024 * 1024

KEY_DIGITS = 40

Skip = Callable[[str, str], None]


@dataclass
class Sources:
    """The videos and documents that the words of a command line name, as a context manager. Iterating again gives the
    same again.

    `root`: custom ids are relative to it; without it to the folder that was named, or to the pattern's fixed part.
    `documents`: folders and patterns stand for the documents below them, not for the videos.
    """

    words: Sequence[str]
    root: Path | None = None
    skip: Skip = lambda name, reason: None
    """Told of files that cannot be handed in."""
    documents: bool = False
    _stdin: BinaryIO | None = field(default=None, init=False)
    _stdin_digest: str = field(default="", init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._stdin is not None:
            self._stdin.close()

    def check(self) -> None:
        """Raises what is wrong with a word, or with any line of a manifest, before anything is handed in."""
        for word in self.words:
            if word == STDIN:
                self._keep_stdin()
            if _is_manifest(word):
                for _ in self._of_word(word):
                    pass
            elif not _is_pattern(word) and not is_url(word) and not os.path.exists(word):
                raise VideoNotFound(f"{word}: no such file or folder")

    def names(self) -> list[str]:
        """What the words mean, wherever the command runs: for the digest that finds the batch again."""
        names = {
            self._stdin_digest if word == STDIN else word if is_url(word) else _absolute(word) for word in self.words
        }
        return sorted(names | {f"root {self.root.resolve()}"} if self.root else names)

    def __iter__(self) -> Iterator[BatchItem]:
        for word in self.words:
            yield from self._of_word(word)

    def _of_word(self, word: str) -> Iterator[BatchItem]:
        if word == STDIN:
            assert self._stdin is not None, "check() comes first"
            self._stdin.seek(0)
            yield from read_manifest(self._stdin, "stdin", (self.root or Path()).resolve())
        elif _is_manifest(word):
            with open(word, "rb") as lines:
                yield from read_manifest(lines, word, (self.root or Path(word).parent).resolve())
        elif is_url(word):
            yield BatchItem(custom_id=item_name(word), source=word)
        else:
            yield from self._files(word)

    def _files(self, word: str) -> Iterator[BatchItem]:
        if os.path.isdir(word):
            base = Path(word).resolve()
            yield from self._items(base, _walk(str(base), self._extensions, self.skip))
        elif _is_pattern(word):
            base = _fixed_part(word)
            yield from self._items(base, self._matches(word))
        else:
            base = Path(word).parent.resolve()
            yield from self._items(base, iter([str(base / Path(word).name)]))

    @property
    def _extensions(self) -> Sequence[str]:
        return DOCUMENT_EXTENSIONS if self.documents else VIDEO_EXTENSIONS

    def _matches(self, pattern: str) -> Iterator[str]:
        for match in sorted(glob.iglob(pattern, recursive=True)):
            path = str(_fixed_part(pattern) / os.path.relpath(match, _fixed_folder(pattern)))
            if os.path.isdir(match):
                if "**" not in pattern:
                    yield from _walk(path, self._extensions, self.skip)
            elif _has(match, self._extensions):
                yield path

    def _items(self, base: Path, paths: Iterator[str]) -> Iterator[BatchItem]:
        if self.root is not None:
            base = self.root.resolve()
        for path in paths:
            custom_id = os.path.relpath(path, base)
            if custom_id.startswith(os.pardir + os.sep):
                raise InvalidRequest(f"{path} is not below --root {base}")
            if is_sendable(path):
                yield BatchItem(custom_id=item_name(custom_id), source=path)
            else:
                self.skip(path, "skipped: its name is not UTF-8")

    def _keep_stdin(self) -> None:
        """Reads stdin once, so that it can be gone through twice and has a digest."""
        if self._stdin is None:
            self._stdin = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (closed in __exit__)
            digest = hashlib.sha256()
            while chunk := sys.stdin.buffer.read(COPY_BYTES):
                digest.update(chunk)
                self._stdin.write(chunk)
            self._stdin_digest = digest.hexdigest()


def batch_key(
    options: CaptionOptions, output: Path | None, names: Sequence[str], document: Mapping[str, Any] | None = None
) -> str:
    """Names the same batch for the same command: by where its results go (else what it reads) and what it asks."""
    what = ["output", str(output.resolve())] if output is not None else ["sources", *names]
    content = json.dumps([what, options.given(), *([document] if document else [])])
    return f"cli-{hashlib.sha256(content.encode()).hexdigest()[:KEY_DIGITS]}"


def _walk(folder: str, extensions: Sequence[str], skip: Skip) -> Iterator[str]:
    """The files of these extensions below, sorted by name folder by folder; hidden ones and links to folders are left
    out."""
    try:
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError as error:
        skip(folder, f"skipped: {error.strerror}")
        return
    for name, is_folder in found:
        path = os.path.join(folder, name)
        if name.startswith("."):
            continue
        if is_folder:
            yield from _walk(path, extensions, skip)
        elif _has(name, extensions) and os.path.isfile(path):
            yield path


def _has(name: str, extensions: Sequence[str]) -> bool:
    return os.path.splitext(name)[1].lower() in extensions


def _is_manifest(word: str) -> bool:
    return word == STDIN or (word.lower().endswith(MANIFEST_EXTENSION) and os.path.isfile(word))


def _is_pattern(word: str) -> bool:
    return glob.has_magic(word) and not os.path.lexists(word)


def _fixed_folder(pattern: str) -> str:
    """The folder before the first wildcard, as written."""
    parts = pattern.split(os.sep)
    wild = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return os.sep.join(parts[:wild]) or (os.sep if pattern.startswith(os.sep) else os.curdir)


def _fixed_part(pattern: str) -> Path:
    return Path(_fixed_folder(pattern)).resolve()


def _absolute(word: str) -> str:
    if _is_pattern(word):
        return str(_fixed_part(word) / os.path.relpath(word, _fixed_folder(word)))
    return str(Path(word).resolve())
