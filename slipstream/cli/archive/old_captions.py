"""Captions of an earlier batch as hints for a new one, matched by the content of the files."""

import hashlib
import json
import os
import stat
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from slipstream.archive.messages import MAX_ITEM_HINT_BYTES, BatchItem
from slipstream.client.batch_handles import is_url
from slipstream.errors import InvalidRequest
from slipstream.objects.blocking import open_file

LONGEST_LINE = 4 * 1024 * 1024
"""Bytes."""
BLOCK_BYTES = 1024 * 1024
"""Of a file that is read for its digest."""
MAX_TEXTS = 4
"""Of one file: the latest that were written."""


@dataclass
class OldCaptions:
    """What was said of which content."""

    name: str
    """Of the file by its content: the same captions are the same batch."""
    texts: dict[str, list[str]]
    """By the SHA-256 of the video file, the latest first."""
    num_items: int = 0
    num_hinted: int = 0
    num_cut: int = 0
    """Of the hinted ones, those with a text that was too long to go along as a whole."""
    num_lines: int = 0
    """Of the file, without blank ones."""
    left_out: Counter[str] = field(default_factory=Counter)
    """How many of them give no hints, by the reason."""
    _digests: dict[str, str] = field(default_factory=dict)
    """Of files that were read, as items are gone through more than once."""

    @classmethod
    def read(cls, export: str) -> "OldCaptions":
        """From JSON lines as `slipstream archive export` writes them, in a file or an object. Lines without a text or a
        digest are left out, as those of jobs that failed are, and counted.

        Raises:
            InvalidRequest: a file that cannot be read, that is not UTF-8, or in which no line has a caption.
            ObjectNotFound, PermissionDenied, ObjectUnavailable: what a store says.
        """
        texts: defaultdict[str, list[str]] = defaultdict(list)
        digest, num_lines, left_out = hashlib.sha256(), 0, Counter[str]()
        try:
            with open_file(export) as file:
                for line in _lines(file, digest.update):
                    num_lines += 1
                    try:
                        sha256, text = _caption(line)
                    except _LeftOutError as reason:
                        left_out[str(reason)] += 1
                        continue
                    found = [text, *(other for other in texts[sha256] if other != text)]
                    left_out[_OLDER] += len(found) > MAX_TEXTS
                    texts[sha256] = found[:MAX_TEXTS]
        except InvalidRequest as error:
            raise InvalidRequest(f"--hints-from: {error}") from None
        except OSError as error:
            raise InvalidRequest(f"--hints-from: cannot read {export!r}: {error.strerror}") from None
        if not texts:
            raise InvalidRequest(
                f"--hints-from: {export!r} holds no captions ({_reasons(left_out) or 'it is empty'}); give JSON"
                " lines of `slipstream archive export`"
            )
        return cls(f"hints {digest.hexdigest()}", dict(texts), num_lines=num_lines, left_out=+left_out)

    def hinted(self, items: Iterable[BatchItem], is_left: threading.Event) -> Iterator[BatchItem]:
        """The items, with hints where their file is known. Files are read once, unless the item says its digest; none
        is read any further when `is_left`, as its item is not wanted any more."""
        self.num_items = self.num_hinted = self.num_cut = 0
        for item in items:
            self.num_items += 1
            texts, is_cut = ((), False) if "prediction" in item.caption else self._texts_of(item, is_left)
            if texts:
                self.num_hinted += 1
                self.num_cut += is_cut
                item = replace(item, caption={**item.caption, "prediction": texts})
            yield item

    def told_of_lines(self) -> str:
        """How many lines of the file give no hints, and why; '' where all do."""
        if not self.left_out:
            return ""
        left_out = f"{self.left_out.total():,} of {self.num_lines:,} lines were left out"
        return f"--hints-from: {left_out}: {_reasons(self.left_out)}"

    def told_of_items(self) -> str:
        """How many of the items that were gone through have hints."""
        cut = f", {self.num_cut:,} of them cut to {MAX_ITEM_HINT_BYTES:,} bytes" if self.num_cut else ""
        return f"{self.num_hinted:,} of {self.num_items:,} items have hints{cut}"

    def _texts_of(self, item: BatchItem, is_left: threading.Event) -> tuple[tuple[str, ...], bool]:
        """As many texts as an item may have, the latest first, and whether the last of them is a beginning only."""
        texts: list[str] = []
        room = MAX_ITEM_HINT_BYTES
        for text in self.texts.get(item.sha256 or self._digest(item.source, is_left), ()):
            content = text.encode()
            if len(content) > room:
                beginning = content[:room].decode(errors="ignore")  # without a character that would be cut itself
                return (*texts, *([beginning] if beginning.strip() else [])), True
            room -= len(content)
            texts.append(text)
        return tuple(texts), False

    def _digest(self, source: str, is_left: threading.Event) -> str:
        """Of a file that can be read here; '' of any other."""
        if is_url(source):
            return ""
        if source not in self._digests:
            self._digests[source] = _digest_of(source, is_left)
        return self._digests[source]


def _digest_of(source: str, is_left: threading.Event) -> str:
    digest = hashlib.sha256()
    try:
        if not stat.S_ISREG(os.stat(source).st_mode):
            return ""
        with open(source, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                if is_left.is_set():
                    return ""
                digest.update(block)
    except (OSError, ValueError):
        return ""
    return digest.hexdigest()


_OLDER = f"older than the latest {MAX_TEXTS} of the same file"
_TOO_LONG = f"longer than {LONGEST_LINE // 1024**2} MiB"


def _reasons(left_out: Counter[str]) -> str:
    return ", ".join(f"{number:,} {reason}" for reason, number in left_out.most_common())


class _LeftOutError(ValueError):
    """A line gives no hint; the message says why, behind a number of lines."""


def _lines(file: BinaryIO, heard: Callable[[bytes], None]) -> Iterator[bytes]:
    """Those that are not blank; of a line that is too long as much as shows that. `heard` gets all bytes."""
    while line := file.readline(LONGEST_LINE + 1):
        heard(line)
        if line.strip():
            yield line
        while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
            line = file.readline(LONGEST_LINE + 1)
            heard(line)


def _caption(line: bytes) -> tuple[str, str]:
    """The digest and the text of a line. Raises `_LeftOutError`."""
    if len(line) > LONGEST_LINE:
        raise _LeftOutError(_TOO_LONG)
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise _LeftOutError("no JSON") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise _LeftOutError("without a text")
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate is no text that can be sent
        raise _LeftOutError("whose text is not valid Unicode") from None
    receipt = record.get("receipt")
    sha256 = receipt.get("video_sha256") if isinstance(receipt, dict) else None
    if not isinstance(sha256, str) or not sha256:
        raise _LeftOutError("without a receipt that names the file")
    return sha256.lower(), text
