"""Small clips of every container and codec that is served."""

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
    "variable rate mkv": ClipSpec([0, 20, 60, 960, 980, 1500, 1900, 2800, 2820], container="matroska"),
    "variable rate mp4": ClipSpec([0, 20, 60, 960, 980, 1500, 1900, 2800, 2820]),
    "late start": ClipSpec([ms + 1480 for ms in TIMES_MS], container="matroska"),
    "two frames": ClipSpec([0, 40]),
    "one frame": ClipSpec([0]),
}
