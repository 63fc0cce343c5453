"""Decodes planned runs of packets into timed frames. Knows nothing of which frames are kept or how they look."""

from collections.abc import Callable, Iterator, Sequence

from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from slipstream.video.container import DamageCount, OpenVideo, check_picture_size
from slipstream.video.limits import DecodeLimits
from slipstream.video.sampling import DecodeRun, PacketTimes

_SKIPS_EXACTLY = {"h264"}
"""Codecs whose unreferenced pictures are certain to be unneeded by any other, so skipping them changes no frame."""


def decode_runs(
    video: OpenVideo, packets: PacketTimes, runs: Sequence[DecodeRun], limits: DecodeLimits, damage: DamageCount
) -> Iterator[tuple[float, VideoFrame]]:
    """(time in seconds, frame) in presentation order. Packets between the runs are read but not decoded.

    Reading past them is cheaper than it looks (5 GB/s from the page cache, 3 microseconds a packet), and unlike a
    seek it lands exactly in every container. Raises what `DamageCount.add` and `check_picture_size` raise.
    """
    time_of = _clock(packets)
    codec = video.stream.codec_context
    codec.thread_count = limits.decoder_threads
    codec.options = {"max_pixels": str(limits.max_pixels_source)}
    remaining = iter(runs)
    run = next(remaining, None)
    for index, packet in enumerate(video.packets(damage)):
        if run is None:
            return
        if index >= run.start:
            _skip_unwanted(codec, run, index)
            yield from _timed(_decode(codec, packet, damage), time_of, limits)
        if index + 1 == run.stop:
            yield from _timed(_decode(codec, None, damage), time_of, limits)
            codec.flush_buffers()
            run = next(remaining, None)
    yield from _timed(_decode(codec, None, damage), time_of, limits)


def _skip_unwanted(codec: VideoCodecContext, run: DecodeRun, index: int) -> None:
    if run.wanted is None or codec.name not in _SKIPS_EXACTLY:
        return
    codec.skip_frame = "DEFAULT" if index in run.wanted else "NONREF"


def _decode(codec: VideoCodecContext, packet: "Packet[VideoStream] | None", damage: DamageCount) -> list[VideoFrame]:
    try:
        return codec.decode(packet)
    except EOFError:  # drained before
        return []
    except Exception as failure:  # a damaged packet raises whatever the decoder trips over
        damage.add(failure)
        return []


def _clock(packets: PacketTimes) -> Callable[[VideoFrame], float | None]:
    """The function that says when a frame is shown, in seconds; None when nothing tells."""
    if packets.in_output_order:
        times_s = iter(packets.shown_s())
        return lambda frame: next(times_s, None)

    def by_timestamp(frame: VideoFrame) -> float | None:
        ticks = frame.pts if frame.pts is not None else frame.dts
        return None if ticks is None else packets.seconds(ticks)

    return by_timestamp


def _timed(
    frames: Sequence[VideoFrame], time_of: Callable[[VideoFrame], float | None], limits: DecodeLimits
) -> Iterator[tuple[float, VideoFrame]]:
    for frame in frames:
        check_picture_size(frame.width, frame.height, limits)
        time_s = time_of(frame)
        if time_s is not None:
            yield time_s, frame
