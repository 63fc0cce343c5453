"""What to hand in: folders, patterns, files and manifests become items, one at a time."""

import glob
import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from slipstream.archive.messages import DOCUMENT_EXTENSIONS, BatchItem
from slipstream.cli.archive.manifests import READERS, BadRow, check_manifest, read_manifest
from slipstream.client.batch_handles import is_url, item_name
from slipstream.config import is_sendable
from slipstream.errors import InvalidConfig, InvalidRequest, VideoNotFound
from slipstream.objects.blocking import objects_below, open_file, real_path
from slipstream.objects.store import ObjectUrl, check_scheme, is_remote_object
from slipstream.options import CaptionOptions

# -- sources ----------------------------------------------------------------------------------------------------------

VIDEO_EXTENSIONS = (
    *(".3g2", ".3gp", ".3gpp", ".amv", ".asf", ".avi", ".divx", ".dv", ".f4v", ".flv", ".gxf", ".ivf", ".m2p", ".m2t"),
    *(".m2ts", ".m4v", ".mkv", ".mod", ".mov", ".mp4", ".mpe", ".mpeg", ".mpg", ".mts", ".mxf", ".nut", ".ogm"),
    *(".ogv", ".qt", ".rm", ".rmvb", ".tod", ".trp", ".ts", ".vob", ".vro", ".webm", ".wm", ".wmv", ".wtv"),
)
"""Of the containers that are decoded unless an operator says otherwise. `.mod` and `.tod` are of camcorders."""
STDIN = "-"
COPY_BYTES = 1024 * 1024

KEY_DIGITS = 40
NAMED_SUFFIXES = 5
"""Of files that are left out."""
MOST_SUFFIXES = 1000
"""Of them that are counted one by one, as a bucket may have millions."""
OTHERS = "others"

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
    """Told of files that cannot be handed in, the first time that all are gone through."""
    documents: bool = False
    skip_bad: bool = False
    """Rows of manifests that are no items are skipped, too, instead of all being refused."""
    num_bad: int = field(default=0, init=False)
    """Such rows, and files and folders that cannot be handed in."""
    _is_told: bool = field(default=False, init=False)
    _left_out: Counter[str] = field(default_factory=Counter, init=False)
    """Files of what is gone through now, by suffix."""
    _stdin: BinaryIO | None = field(default=None, init=False)
    _stdin_digest: str = field(default="", init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._stdin is not None:
            self._stdin.close()

    def check(self) -> None:
        """Raises what is wrong with a word, or with any line of a manifest, before anything is handed in; with
        `skip_bad` lines are judged as they come."""
        for word in self.words:
            if word == STDIN:
                self._keep_stdin()
            if _is_manifest(word) and not self.skip_bad:
                with self._manifest(word) as content:
                    check_manifest(content, self._shown(word), self._folder_of(word))
            elif is_remote_object(word):
                ObjectUrl.parse(word)
            elif word != STDIN and not is_url(word) and not os.path.exists(word):
                check_scheme(word)
                if not _is_pattern(word):
                    raise VideoNotFound(f"{word}: no such file or folder")

    def names(self) -> list[str]:
        """What the words mean, wherever the command runs: for the digest that finds the batch again."""
        names = {
            self._stdin_digest if word == STDIN else word if is_url(word) else _absolute(word) for word in self.words
        }
        return sorted(names | {f"root {real_path(self.root)}"} if self.root else names)

    def __iter__(self) -> Iterator[BatchItem]:
        for word in self.words:
            yield from self._of_word(word)
        self._is_told = True

    def _of_word(self, word: str) -> Iterator[BatchItem]:
        self._left_out.clear()
        yield from self._items_of(word)
        if self._left_out:
            kind = "documents" if self.documents else "videos"
            self._skip(word, f"left out, as no {kind} by their suffixes: {_counted(self._left_out)}")

    def _items_of(self, word: str) -> Iterator[BatchItem]:
        if _is_manifest(word):
            with self._manifest(word) as content:
                on_bad = self._skip_row if self.skip_bad else None
                yield from read_manifest(content, self._shown(word), self._folder_of(word), on_bad)
        elif is_remote_object(word) and _is_folder(word):
            yield from self._objects(word)
        elif is_url(word):
            yield BatchItem(custom_id=item_name(word), source=word)
        else:
            yield from self._files(word)

    @contextmanager
    def _manifest(self, word: str) -> Iterator[BinaryIO]:
        """It, from its beginning."""
        if word == STDIN:
            assert self._stdin is not None, "check() comes first"
            self._stdin.seek(0)
            yield self._stdin
            return
        with open_file(word) as content:
            yield content

    def _skip_row(self, row: BadRow) -> None:
        self._skip_bad(row.where, row.reason, row.num_rows)

    def _skip_bad(self, name: str, reason: str, num_rows: int = 1) -> None:
        if not self._is_told:
            self.num_bad += num_rows
        self._skip(name, f"skipped: {reason}")

    def _skip(self, name: str, reason: str) -> None:
        if not self._is_told:
            self.skip(name, reason)

    def _shown(self, word: str) -> str:
        return "stdin" if word == STDIN else word

    def _folder_of(self, manifest: str) -> Path | ObjectUrl:
        """What its relative paths are below."""
        if self.root is None and is_remote_object(manifest):
            return ObjectUrl.parse(manifest.rpartition("/")[0])
        return real_path(self.root or (Path() if manifest == STDIN else Path(manifest).parent))

    def _objects(self, word: str) -> Iterator[BatchItem]:
        """Those below a folder of a bucket, named relative to it; hidden ones are left out."""
        folder = ObjectUrl.parse(word).key.rstrip("/")
        for facts in objects_below(word):
            name = facts.url.key.removeprefix(folder).lstrip("/")
            if not any(step.startswith(".") for step in name.split("/")) and self._wants(name):
                yield BatchItem(custom_id=item_name(name), source=str(facts.url), num_bytes=facts.num_bytes)

    def _files(self, word: str) -> Iterator[BatchItem]:
        if os.path.isdir(word):
            base = real_path(Path(word))
            yield from self._items(base, _walk(str(base), self._wants, self._skip_bad))
        elif _is_pattern(word):
            base = _fixed_part(word)
            yield from self._items(base, self._matches(word))
        else:
            base = real_path(Path(word).parent)
            yield from self._items(base, iter([str(base / Path(word).name)]))

    def _wants(self, name: str) -> bool:
        """Whether a file of a folder is handed in, by its name; one that is not is counted."""
        suffix = os.path.splitext(name)[1].lower()
        is_wanted = suffix in (DOCUMENT_EXTENSIONS if self.documents else VIDEO_EXTENSIONS)
        if not is_wanted and not name.endswith("/"):  # which names a folder of a bucket
            is_told = suffix in self._left_out or len(self._left_out) < MOST_SUFFIXES
            self._left_out[suffix if is_told else OTHERS] += 1
        return is_wanted

    def _matches(self, pattern: str) -> Iterator[str]:
        for match in sorted(set(_found(pattern))):
            path = str(_fixed_part(pattern) / os.path.relpath(match, _fixed_folder(pattern)))
            if os.path.isdir(match):
                if "**" not in pattern:
                    yield from _walk(path, self._wants, self._skip_bad)
            elif self._wants(match):
                yield path

    def _items(self, base: Path, paths: Iterator[str]) -> Iterator[BatchItem]:
        if self.root is not None:
            base = real_path(self.root)
        for path in paths:
            custom_id = os.path.relpath(path, base)
            if custom_id.startswith(os.pardir + os.sep):
                raise InvalidRequest(f"{path} is not below --root {base}")
            if wrong := _wrong_with(path):
                self._skip_bad(path, wrong)
            else:
                yield BatchItem(custom_id=item_name(custom_id), source=path)

    def _keep_stdin(self) -> None:
        """Reads stdin once, so that it can be gone through twice and has a digest."""
        if self._stdin is not None:
            return
        if sys.stdin is None:  # closed by the shell: <&-
            raise InvalidConfig("`-`: stdin is closed")
        digest = hashlib.sha256()
        try:
            kept = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (closed in __exit__)
            while chunk := sys.stdin.buffer.read(COPY_BYTES):
                digest.update(chunk)
                kept.write(chunk)
            kept.flush()
        except OSError as error:
            reason = f"`-`: stdin cannot be kept until it is read again: {error.strerror}"
            raise InvalidConfig(f"{reason}; set TMPDIR to a folder with room") from None
        self._stdin, self._stdin_digest = kept, digest.hexdigest()


def batch_key(
    options: CaptionOptions, output: Path | str | None, names: Sequence[str], document: Mapping[str, Any] | None = None
) -> str:
    """Names the same batch for the same command: by where its results go (else what it reads) and what it asks.
    `output`: a path, or an object's address."""
    what = (
        ["output", str(real_path(output) if isinstance(output, Path) else output)]
        if output is not None
        else ["sources", *names]
    )
    content = json.dumps([what, options.given(), *([document] if document else [])])
    return f"cli-{hashlib.sha256(content.encode()).hexdigest()[:KEY_DIGITS]}"


def _walk(folder: str, wants: Callable[[str], bool], skip: Skip) -> Iterator[str]:
    """The files below that are wanted by their names, sorted by name folder by folder; hidden ones and links to folders
    are left out."""
    try:
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError as error:
        skip(folder, str(error.strerror))
        return
    for name, is_folder in found:
        path = os.path.join(folder, name)
        if name.startswith("."):
            continue
        if is_folder:
            yield from _walk(path, wants, skip)
        elif not os.path.isdir(path) and wants(name):  # a link to a folder is none of these files
            yield path


def _wrong_with(path: str) -> str:
    """Why a file of this machine cannot be handed in; "" where it can."""
    if not is_sendable(path):
        return "its name is not UTF-8"
    if os.path.isfile(path):
        return ""
    return "it is no regular file" if os.path.exists(path) else "it is a link to what is not there"


def _counted(left_out: Counter[str]) -> str:
    """Which suffixes most of them have, and how many there are."""
    most = left_out.most_common(NAMED_SUFFIXES)
    named = [f"{suffix or 'none'} {count:,}" for suffix, count in most]
    named += [OTHERS] if len(left_out) > len(most) and OTHERS not in dict(most) else []
    return f"{', '.join(named)} ({left_out.total():,} files in all)"


def _is_manifest(word: str) -> bool:
    is_named = os.path.splitext(word)[1].lower() in READERS
    return word == STDIN or (is_named and (is_remote_object(word) or os.path.isfile(word)))


def _is_folder(address: str) -> bool:
    return address.endswith("/") or not ObjectUrl.parse(address).key


def _is_pattern(word: str) -> bool:
    return glob.has_magic(word) and not os.path.lexists(word) and not is_remote_object(word)


def _found(pattern: str) -> Iterator[str]:
    """What matches, some of it more than once. `**` stands for folders and those below, but for no links to folders, as
    one that leads up has no end."""
    steps = pattern.split(os.sep)
    if "**" not in steps:
        yield from glob.iglob(pattern)
        return
    deep = steps.index("**")
    head, tail = os.sep.join(steps[:deep]), os.sep.join(steps[deep + 1 :]) or "*"
    for top in glob.iglob(head) if head else [os.sep if deep else os.curdir]:
        for folder, below, _ in os.walk(top):
            below[:] = [name for name in below if not name.startswith(".")]
            yield from _found(os.path.join(glob.escape(folder), tail))


def _fixed_folder(pattern: str) -> str:
    """The folder before the first wildcard, as written."""
    parts = pattern.split(os.sep)
    wild = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return os.sep.join(parts[:wild]) or (os.sep if pattern.startswith(os.sep) else os.curdir)


def _fixed_part(pattern: str) -> Path:
    return real_path(Path(_fixed_folder(pattern)))


def _absolute(word: str) -> str:
    if _is_pattern(word):
        return str(_fixed_part(word) / os.path.relpath(word, _fixed_folder(word)))
    return str(real_path(Path(word)))
