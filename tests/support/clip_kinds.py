"""Small clips of containers and codecs that are served."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.media import ClipSpec, even_times_ms

TIMES_MS = even_times_ms(50)
SHORT_GROUPS = {"g": "12", "bf": "3"}
OPEN_GROUPS = {"g": "12", "bf": "3", "x264-params": "open-gop=1:scenecut=0"}
INTRA_REFRESH = {"g": "12", "x264-params": "intra-refresh=1:scenecut=0:keyint=12"}
ALT_REF = {"g": "30", "auto-alt-ref": "1", "lag-in-frames": "16", "cpu-used": "5"}
FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}

CLIPS = {
    "h264": ClipSpec(TIMES_MS, codec_options=SHORT_GROUPS),
    "h264 10 bit": ClipSpec(TIMES_MS, pix_fmt="yuv420p10le", codec_options=SHORT_GROUPS),
    "h264 fragmented": ClipSpec(TIMES_MS, codec_options=SHORT_GROUPS, container_options=FRAGMENTED),
    "h264 open groups mp4": ClipSpec(TIMES_MS, codec_options=OPEN_GROUPS),
    "h264 open groups mkv": ClipSpec(TIMES_MS, container="matroska", codec_options=OPEN_GROUPS),
    "h264 open groups ts": ClipSpec(TIMES_MS, container="mpegts", codec_options=OPEN_GROUPS),
    "h264 intra refresh mkv": ClipSpec(TIMES_MS, container="matroska", codec_options=INTRA_REFRESH),
    "h264 avi": ClipSpec(TIMES_MS, container="avi", codec_options=SHORT_GROUPS),
    "h264 odd size": ClipSpec(TIMES_MS, width=34, height=18),
    "h264 portrait": ClipSpec(TIMES_MS, width=48, height=80),
    "hevc": ClipSpec(TIMES_MS, codec="libx265", codec_options={"x265-params": "keyint=12:bframes=4:log-level=none"}),
    "mpeg4 avi": ClipSpec(TIMES_MS, container="avi", codec="mpeg4", codec_options={"g": "12", "bf": "2", "b": "2M"}),
    "mpeg2 ts": ClipSpec(TIMES_MS, container="mpegts", codec="mpeg2video", codec_options={"g": "12", "bf": "2"}),
    "vp9 webm": ClipSpec(TIMES_MS, container="webm", codec="libvpx-vp9", codec_options=ALT_REF),
    "vp8 webm": ClipSpec(TIMES_MS, container="webm", codec="libvpx", codec_options={**ALT_REF, "b": "300k"}),
    "prores mov": ClipSpec(TIMES_MS, container="mov", codec="prores_ks", pix_fmt="yuv422p10le"),
    "mjpeg mov": ClipSpec(TIMES_MS, container="mov", codec="mjpeg", pix_fmt="yuvj420p"),
    "ffv1 mkv": ClipSpec(TIMES_MS, container="matroska", codec="ffv1"),
    "av1 mp4": ClipSpec(
        TIMES_MS, codec="libsvtav1", codec_options={"g": "12", "preset": "10", "svtav1-params": "lp=1"}
    ),
    "mpeg1 ts": ClipSpec(TIMES_MS, container="mpegts", codec="mpeg1video", codec_options={"g": "12"}),
    "variable rate mkv": ClipSpec([0, 20, 60, 960, 980, 1500, 1900, 2800, 2820], container="matroska"),
    "variable rate mp4": ClipSpec([0, 20, 60, 960, 980, 1500, 1900, 2800, 2820]),
    "late start": ClipSpec([ms + 1480 for ms in TIMES_MS], container="matroska"),
    "two frames": ClipSpec([0, 40]),
    "one frame": ClipSpec([0]),
}

_FEW_MS, _LARGE_MS = even_times_ms(12), even_times_ms(2)
"""The latter of codecs whose frames are large: files of many bytes are slow to damage."""
_REORDERED = {"g": "6", "bf": "2"}


def _old(container: str, codec: str, pix_fmt: str = "yuv420p", **more: Any) -> ClipSpec:
    return ClipSpec(_FEW_MS, container=container, codec=codec, pix_fmt=pix_fmt, **more)


_CIF: dict[str, Any] = {"width": 176, "height": 144}
_PAL: dict[str, Any] = {"width": 720, "height": 576}
_VC2 = {"strict": "-1", "b": "20M"}
_DNXHR: dict[str, Any] = {"width": 256, "height": 144, "codec_options": {"profile": "dnxhr_sq"}}
OLD_CLIPS = {
    "archive": {
        "flv1 flv": _old("flv", "flv"),
        "screen video flv": _old("flv", "flashsv", "bgr24"),
        "screen video 2 flv": _old("flv", "flashsv2", "bgr24"),
        "h264 reordered flv": _old("flv", "libx264", codec_options=_REORDERED),
        "wmv1 asf": _old("asf", "wmv1"),
        "wmv2 asf": _old("asf", "wmv2"),
        "msmpeg4 v3 asf": _old("asf", "msmpeg4"),
        "msmpeg4 v2 avi": _old("avi", "msmpeg4v2"),
        "mpeg4 reordered asf": _old("asf", "mpeg4", codec_options=_REORDERED),
        "h264 reordered asf": _old("asf", "libx264", codec_options=_REORDERED),
        "cinepak avi": _old("avi", "cinepak", "rgb24"),
        "video 1 avi": _old("avi", "msvideo1", "rgb555le"),
        "huffyuv avi": _old("avi", "huffyuv", "yuv422p"),
        "ffvhuff avi": _old("avi", "ffvhuff"),
        "utvideo avi": _old("avi", "utvideo"),
        "uncompressed avi": _old("avi", "rawvideo"),
        "v210 avi": _old("avi", "v210", "yuv422p10le"),
        "h261 avi": _old("avi", "h261", **_CIF),
        "svq1 mov": _old("mov", "svq1", "yuv410p"),
        "animation mov": _old("mov", "qtrle", "rgb24"),
        "qt video mov": _old("mov", "rpza", "rgb555le", codec_options={"skip_frame_thresh": "0"}),
        "graphics mov": _old("mov", "smc", "pal8"),
        "rle avi": _old("avi", "msrle", "pal8"),
        "snow avi": _old("avi", "snow", codec_options={"strict": "-2"}),
        "dirac mov": _old("mov", "vc2", codec_options=_VC2),
        "dirac mkv": _old("matroska", "vc2", codec_options=_VC2),
        "png mov": _old("mov", "png", "rgb24"),
        "jpeg 2000 mov": _old("mov", "jpeg2000", "rgb24"),
        "cineform mov": _old("mov", "cfhd", "yuv422p10le"),
        "dnxhd mov": replace(_old("mov", "dnxhd", "yuv422p", **_DNXHR), times_ms=_LARGE_MS),
        "dnxhd mxf": replace(_old("mxf", "dnxhd", "yuv422p", **_DNXHR), times_ms=_LARGE_MS),
        "h264 reordered mxf": _old("mxf", "libx264", codec_options=_REORDERED),
        "mpeg2 reordered mxf": _old("mxf", "mpeg2video", codec_options=_REORDERED),
        "rv10 rm": _old("rm", "rv10"),
        "rv20 rm": _old("rm", "rv20"),
        "mpeg1 mpg": _old("mpeg", "mpeg1video", codec_options=_REORDERED),
        "mpeg2 vob": _old("vob", "mpeg2video", codec_options=_REORDERED),
        "mpeg2 wtv": _old("wtv", "mpeg2video", codec_options=_REORDERED),
        "vp8 ogg": _old("ogg", "libvpx", codec_options={"b": "300k"}),
        "vp8 ivf": _old("ivf", "libvpx", codec_options={"b": "300k"}),
        "ffv1 nut": _old("nut", "ffv1"),
        "dv": replace(_old("dv", "dvvideo", **_PAL), times_ms=_LARGE_MS),
        "dv gxf": replace(_old("gxf", "dvvideo", **_PAL), times_ms=_LARGE_MS),
        "dv avi": replace(_old("avi", "dvvideo", **_PAL), times_ms=_LARGE_MS),
    },
    "all": {
        "mszh zlib avi": _old("avi", "zlib", "bgr24"),
        "dosbox avi": _old("avi", "zmbv", "bgr0"),
        "magicyuv avi": _old("avi", "magicyuv"),
        "asus avi": _old("avi", "asv1"),
        "asus 2 avi": _old("avi", "asv2"),
        "mtv player avi": _old("avi", "amv", "yuvj420p"),
        "cirrus avi": _old("avi", "cljr", "yuv411p"),
        "y41p avi": _old("avi", "y41p", "yuv411p"),
        "yuv4 mov": _old("mov", "yuv4"),
        "r10k mov": replace(_old("mov", "r10k", "gbrp10le"), times_ms=_LARGE_MS),
        "r210 mov": replace(_old("mov", "r210", "gbrp10le"), times_ms=_LARGE_MS),
        "avid rgb mov": replace(_old("mov", "avrp", "gbrp10le"), times_ms=_LARGE_MS),
        "targa mov": _old("mov", "targa", "bgr24"),
        "loki jpeg": _old("smjpeg", "mjpeg", "yuvj420p"),
        "jpegs": _old("mjpeg", "mjpeg", "yuvj420p"),
        "yuv4mpeg": _old("yuv4mpegpipe", "rawvideo"),
        "speedhq avi": _old("avi", "speedhq"),
        "jpeg-ls avi": _old("avi", "jpegls", "rgb24"),
        "dxv mov": _old("mov", "dxv", "rgba"),
        "cinepak film": _old("film_cpk", "cinepak", "rgb24"),
        "flv1 swf": _old("swf", "flv"),
        "roq": _old("roq", "roqvideo", "yuvj444p", width=64, height=64),
        "gif": _old("gif", "gif", "rgb8"),
        "animated png": _old("apng", "apng", "rgb24"),
    },
}
"""By the first tier that takes them; of what PyAV has an encoder for."""
THEORA = Path(__file__).parents[1] / "video" / "data" / "theora.ogv"
"""Of as many pictures; PyAV cannot write it: `ffmpeg -i INDEX_PICTURES -c:v libtheora -q:v 5 -g 6` has."""
H263 = _old("3gp", "h263", **_CIF)
"""Its pixels are not square."""
DOUBTFUL_KEYS = _old("avi", "h263p")
"""libav calls each of its packets a key packet."""
