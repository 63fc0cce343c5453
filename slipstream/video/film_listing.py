"""When the packets of a film are shown, read once for all that is asked of it.

Each group of a film's segments, and each piece in which shots are looked for, is a job of its own that must know this,
and to know it takes a pass over the whole file. So a decoder keeps what it has read of the last film.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.video.container import Source, Watch, open_video
from slipstream.video.damage import FilmDamage
from slipstream.video.frame_times import PacketTimes
from slipstream.video.messages import DecodeLimits
from slipstream.video.packet_times import read_packet_times
from slipstream.video.ranged_reader import PacketExtents, RangedReader


@dataclass(frozen=True)
class Listing:
    """All packets of a film; some 10 bytes for each, and 16 of one that is read by ranges."""

    packets: PacketTimes
    damage: FilmDamage
    """What could not be read."""
    codec: str
    stated_s: float
    """How long the file says that the film is."""
    is_cut: bool
    """Whether the file visibly ends too early."""
    extents: PacketExtents | None
    """Where packets lie, of a film that is read by ranges."""


def list_film(source: Source, limits: DecodeLimits, watch: Watch) -> Listing:
    """One pass over the film, which decodes nothing. Raises UnreadableVideo or LimitExceeded."""
    damage = FilmDamage(limits.max_corrupt_packets)
    with open_video(source, limits, watch) as video:
        packets = read_packet_times(video, limits, damage)
        codec = video.stream.codec_context.codec.canonical_name
        extents = source.packets if isinstance(source, RangedReader) else None
        return Listing(packets, damage, codec, video.stated_s, video.is_cut, extents)


ListFilm = Callable[[Source, DecodeLimits, Watch], Listing]
"""What `list_film` does, or knows already."""


class LastListing:
    """What was listed of the last film, and of no other."""

    def __init__(self) -> None:
        self._of: tuple[str, int, DecodeLimits] | None = None
        self._listing: Listing | None = None

    def of(self, film: str, source: Source, limits: DecodeLimits, watch: Watch) -> Listing:
        """The film's, which is read now if it is not kept. `film` names it for as long as it has this content; without
        a name nothing is kept. Raises what `list_film` does."""
        asked = (film, source.seek(0, os.SEEK_END), limits)
        if film and self._listing is not None and self._of == asked:
            if isinstance(source, RangedReader) and self._listing.extents is not None:
                source.packets = self._listing.extents
            return self._listing
        self._of = self._listing = None
        listing = list_film(source, limits, watch)
        if film:
            self._of, self._listing = asked, listing
        return listing
