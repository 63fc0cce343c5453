"""Lists when the packets of an open video are shown. Decodes nothing."""

from array import array
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import LimitExceeded, UnreadableVideo
from slipstream.video.container import OpenVideo
from slipstream.video.damage import DamageCount
from slipstream.video.frame_times import PacketTimes
from slipstream.video.messages import DecodeLimits
from slipstream.video.ranged_reader import RangedReader


def read_packet_times(video: OpenVideo, limits: DecodeLimits, damage: DamageCount) -> PacketTimes:
    """Read every packet once, without decoding: container headers lie about duration, frame count and rate.

    Packets before the first key packet cannot be decoded and do not count as shown, nor do those that an edit list
    hides. Raises UnreadableVideo when nothing is shown or it is encrypted, LimitExceeded when the clip is too long.
    """
    pts, keys, shown = array("q"), bytearray(), bytearray()
    last_duration, is_timed = 0, False
    num_indexed = len(video.stream.index_entries)  # before reading, which adds to it
    packets, source = video.packets(damage), video.reader.source
    for packet in source.listed(packets) if isinstance(source, RangedReader) else packets:
        damage.at(len(pts))
        if len(pts) == limits.max_packets:
            raise LimitExceeded(f"the video has more than {limits.max_packets} packets; cut it into shorter pieces")
        if packet.has_sidedata("encryption_info"):  # behind a beginning that is free, too
            raise UnreadableVideo("the video is encrypted, as copy-protected ones (DRM) are; send one that is not")
        ticks = packet.pts if packet.pts is not None else packet.dts
        pts.append(ticks or 0)
        keys.append(packet.is_keyframe)
        shown.append(ticks is not None and not packet.is_discard)
        last_duration, is_timed = packet.duration or 0, is_timed or ticks is not None
    ticks_of = np.frombuffer(pts, dtype=np.int64)
    is_key = np.frombuffer(keys, dtype=np.bool_)
    if is_key.all() and _are_keys_doubtful(video, num_indexed < len(pts)):
        is_key = np.arange(len(is_key)) == 0
    is_shown = _from_first_key(ticks_of, is_key, np.frombuffer(shown, dtype=np.bool_))
    if len(pts) and not is_timed:
        raise UnreadableVideo("no frame of this file says when it is shown; write it anew with timestamps")
    if not is_shown.any():
        raise UnreadableVideo("the video stream contains no frame; the file was probably cut off while it was written")
    tick_s = float(video.stream.time_base or 0)
    origin, last = int(ticks_of[is_shown].min()), int(ticks_of[is_shown].max())
    _check_duration((last - origin) * tick_s, limits)
    time_s = (ticks_of.astype(np.float64) - origin) * tick_s
    lone_frame_s = last_duration * tick_s
    if lone_frame_s > limits.max_duration_s:
        lone_frame_s = 0.0
    times = PacketTimes(time_s, is_key, is_shown, origin, tick_s, lone_frame_s, _times_only_decoding(video))
    return replace(times, num_restarts=video.clock.num_restarts, num_behind=video.clock.num_behind)


def _times_only_decoding(video: OpenVideo) -> bool:
    """AVI and ASF number packets in decode order, as MXF does without an index. libav repairs that for MPEG-4, not for
    reordered H.264 and HEVC."""
    codec = video.stream.codec_context
    name = video.container.format.name
    return name in {"avi", "asf", "mxf"} and codec.name in {"h264", "hevc"} and bool(codec.has_b_frames)


_DOUBTFUL_KEYS = {"h261", "h263", "h263p", "h263i"}
"""Codecs all of whose packets libav calls key packets, in containers that do not say it themselves."""


def _are_keys_doubtful(video: OpenVideo, lacks_index: bool) -> bool:
    """Whether libav calls each packet a key packet without knowing it: in an AVI the index at its end tells."""
    codec = video.stream.codec_context
    is_unknown = lacks_index and video.container.format.name == "avi" and not codec.codec.intra_only
    return is_unknown or codec.name in _DOUBTFUL_KEYS


def _from_first_key(
    ticks: NDArray[np.int64], is_key: NDArray[np.bool_], is_shown: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """[num_packets] `is_shown` without what is decoded or shown before the first key packet (if there is any)."""
    if not is_key.any():
        return is_shown
    first_key = int(is_key.argmax())
    follows_key: NDArray[np.bool_] = (np.arange(len(ticks)) >= first_key) & (ticks >= ticks[first_key])
    return is_shown & follows_key


def _check_duration(duration_s: float, limits: DecodeLimits) -> None:
    if duration_s > limits.max_duration_s:
        raise LimitExceeded(
            f"the video lasts {duration_s:.0f} s, more than the {limits.max_duration_s:.0f} s served; cut it"
        )
