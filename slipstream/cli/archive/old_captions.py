"""Captions of an earlier batch as hints for a new one, matched by the content of the files."""

import hashlib
import json
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.archive.messages import MAX_ITEM_HINT_BYTES, BatchItem
from slipstream.client.batch_handles import is_url
from slipstream.errors import InvalidRequest
from slipstream.objects.blocking import open_file

LONGEST_LINE = 4 * 1024 * 1024
"""Bytes."""
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
    _digests: dict[str, str] = field(default_factory=dict)
    """Of files that were read, as items are gone through more than once."""

    @classmethod
    def read(cls, export: str) -> "OldCaptions":
        """From JSON lines as `slipstream archive export` writes them, in a file or an object. Lines without a text or a
        digest are left out, as those of jobs that failed are.

        Raises:
            InvalidRequest: a file that cannot be read, that is not UTF-8, or in which no line has a caption.
            ObjectNotFound, PermissionDenied, ObjectUnavailable: what a store says.
        """
        texts: defaultdict[str, list[str]] = defaultdict(list)
        digest = hashlib.sha256()
        try:
            with open_file(export) as lines:
                while line := lines.readline(LONGEST_LINE):
                    digest.update(line)
                    for sha256, text in _caption(line):
                        texts[sha256] = [text, *(other for other in texts[sha256] if other != text)][:MAX_TEXTS]
        except InvalidRequest as error:
            raise InvalidRequest(f"--hints-from: {error}") from None
        except OSError as error:
            raise InvalidRequest(f"--hints-from: cannot read {export!r}: {error.strerror}") from None
        if not texts:
            raise InvalidRequest(
                f"--hints-from: {export!r} holds no captions; give JSON lines of `slipstream archive export`"
            )
        return cls(f"hints {digest.hexdigest()}", dict(texts))

    def hinted(self, items: Iterable[BatchItem]) -> Iterator[BatchItem]:
        """The items, with hints where their file is known. Files are read once, unless the item says its digest."""
        self.num_items = self.num_hinted = 0
        for item in items:
            self.num_items += 1
            texts = self._texts_of(item)
            if texts and "prediction" not in item.caption:
                self.num_hinted += 1
                item = replace(item, caption={**item.caption, "prediction": texts})
            yield item

    def _texts_of(self, item: BatchItem) -> tuple[str, ...]:
        texts, room = [], MAX_ITEM_HINT_BYTES
        for text in self.texts.get(item.sha256 or self._digest(item.source), ()):
            room -= len(text.encode())
            if room < 0:
                break
            texts.append(text)
        return tuple(texts)

    def _digest(self, source: str) -> str:
        """Of a file that can be read here; '' of any other."""
        if is_url(source):
            return ""
        if source not in self._digests:
            self._digests[source] = _digest_of(source)
        return self._digests[source]


def _digest_of(source: str) -> str:
    try:
        if not stat.S_ISREG(os.stat(source).st_mode):
            return ""
        with open(source, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return ""


def _caption(line: bytes) -> Iterator[tuple[str, str]]:
    """The digest and the text of a line, if it has both."""
    try:
        record: Any = json.loads(line)
        sha256, text = record["receipt"]["video_sha256"], record["text"]
        text.encode()  # a lone surrogate is no text that can be sent
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return
    if isinstance(sha256, str) and isinstance(text, str) and sha256 and text.strip():
        yield sha256.lower(), text
