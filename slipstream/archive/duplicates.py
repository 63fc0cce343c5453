"""Captions of the archive that near-duplicates are looked up among: in the queue's store, for all gateways, and here.

What is in the store is read once and kept; a caption that another gateway has made is found with the next look.
"""

import json
from collections import OrderedDict
from dataclasses import asdict, dataclass
from weakref import WeakValueDictionary

import numpy as np

from slipstream.archive.queue import DamagedRecord, JobQueue, QueueUnavailable
from slipstream.archive.records import content_key
from slipstream.captioning.duplicates import KnownCaption, KnownCaptions, Near, RecentCaptions
from slipstream.captioning.plan import CaptionPlan
from slipstream.errors import SlipstreamError
from slipstream.logs import get_logger
from slipstream.messages import SharedFrom
from slipstream.service_info import ModelInfo
from slipstream.speculation.protocol import FinishReason
from slipstream.video.fingerprint import PICTURE_CELLS, Fingerprint

SETS_KEPT = 4
"""Sets of captions that a gateway keeps at hand, beside those that jobs hold: each of one owner, target and set of
options."""
PAGE = 200


class DuplicateFinder:
    """One per gateway."""

    def __init__(self, queue: JobQueue, most: int) -> None:
        """`most`: captions of a set, of which the latest are kept."""
        self._queue = queue
        self._most = most
        self._sets: WeakValueDictionary[str, StoredCaptions] = WeakValueDictionary()
        """All that somebody holds."""
        self._latest: OrderedDict[str, StoredCaptions] = OrderedDict()

    def among(self, plan: CaptionPlan, target: ModelInfo, draft: ModelInfo | None, owner: str) -> KnownCaptions:
        """The captions that a video of this plan may share: of the same owner, options, models and release. Who asks
        again and again holds them meanwhile: a set that is let go is read anew from its beginning."""
        key = f"{content_key('', plan, target, draft)} {owner}"
        known = self._sets.setdefault(key, StoredCaptions(self._queue, key, self._most))
        self._latest[key] = known
        self._latest.move_to_end(key)
        if len(self._latest) > SETS_KEPT:
            self._latest.popitem(last=False)
        return known


class StoredCaptions:
    """`KnownCaptions` of one set. A store that is away is no reason to stop: then what is at hand is looked at."""

    def __init__(self, queue: JobQueue, key: str, most: int) -> None:
        self._queue = queue
        self._key = key
        self._most = most
        self._read_to = ""
        self._at_hand = RecentCaptions(most)

    async def nearest(self, fingerprint: Fingerprint, within: float) -> Near | None:
        """See `KnownCaptions`."""
        try:
            await self._read()
        except (QueueUnavailable, DamagedRecord) as error:
            get_logger().warning("duplicates.not_read", reason=str(error))
        return await self._at_hand.nearest(fingerprint, within)

    async def add(self, known: KnownCaption) -> None:
        """Puts it into the store, from where it is read like the others."""
        try:
            await self._queue.add_known(self._key, write_known(known), self._most)
        except (QueueUnavailable, DamagedRecord) as error:
            get_logger().warning("duplicates.not_kept", reason=str(error))

    async def _read(self) -> None:
        """What is new. Several may read at once: an entry that was read in the meantime is not taken again."""
        while True:
            began_at = self._read_to
            entries = await self._queue.list_known(self._key, began_at, PAGE)
            if not entries:
                return
            if self._read_to != began_at:
                continue
            self._read_to = entries[-1].place
            for entry in entries:
                try:
                    await self._at_hand.add(read_known(entry.data))
                except BadEntry as error:
                    get_logger().warning("duplicates.damaged", reason=str(error))


# -- entries ----------------------------------------------------------------------------------------------------------


class BadEntry(SlipstreamError):
    """What the store holds is no caption with its fingerprint."""


@dataclass(frozen=True)
class _Header:
    """An entry, without the cells of its pictures."""

    job_id: str
    segment: int
    duration_s: float
    text: str
    num_tokens: int
    finish_reason: str
    stop_string: str


def write_known(known: KnownCaption) -> bytes:
    """An entry to keep: its facts as JSON on a line, then the fingerprint's cells."""
    made_for, reason = known.made_for, known.finish_reason
    header = _Header(
        made_for.job_id,
        made_for.segment,
        known.fingerprint.duration_s,
        known.text,
        known.num_tokens,
        reason.name if reason else "",
        known.stop_string,
    )
    return json.dumps(asdict(header)).encode() + b"\n" + known.fingerprint.pictures.tobytes()


def read_known(data: bytes) -> KnownCaption:
    """The entry that was kept. Raises `BadEntry`."""
    line, _, cells = data.partition(b"\n")
    try:
        header = _Header(**json.loads(line))
        pictures = np.frombuffer(cells, dtype=np.uint8).reshape(-1, PICTURE_CELLS)
        reason = FinishReason[header.finish_reason] if header.finish_reason else None
        return KnownCaption(
            Fingerprint(float(header.duration_s), pictures),
            SharedFrom(str(header.job_id), int(header.segment)),
            str(header.text),
            int(header.num_tokens),
            reason,
            str(header.stop_string),
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadEntry(f"an entry of the duplicates cannot be read: {error}") from error
