"""Which containers and codecs may be decoded, in three tiers. Pure: no libav; the names are those of its demuxers and
decoders.

In no tier, whatever is asked: what opens other files or addresses (playlists, manifests, image sequences), devices,
text drawn as pictures, single pictures, and decoders on hardware.
"""

from dataclasses import dataclass

from slipstream.errors import UnreadableVideo


@dataclass(frozen=True)
class Tier:
    """What a tier has beyond the one before it."""

    containers: tuple[str, ...]
    codecs: tuple[str, ...]


def _tier(containers: str, codecs: str) -> Tier:
    return Tier(tuple(containers.split()), tuple(codecs.split()))


TIERS = {
    "modern": _tier(
        """
            mov,mp4,m4a,3gp,3g2,mj2 matroska,webm avi mpegts
            """,
        """
            h264 hevc vp8 vp9 av1 libdav1d mpeg4 mpeg2video mpeg1video h263 mjpeg prores ffv1
            """,
    ),
    "archive": _tier(
        """
            asf flv ogg rm mpeg dv mxf gxf wtv ivf nut
            """,
        """
            wmv1 wmv2 wmv3 vc1 mss1 mss2 msmpeg4v1 msmpeg4v2 msmpeg4 msvideo1 msrle flv flashsv flashsv2 vp6 vp6a
            vp6f vp3 theora dirac rv10 rv20 rv30 rv40 cinepak indeo2 indeo3 indeo4 indeo5 svq1 svq3 rpza smc qtrle
            mjpegb h261 h263i h263p dvvideo dnxhd cfhd huffyuv ffvhuff utvideo lagarith rawvideo v210 jpeg2000 png
            aic hap snow vvc
            """,
    ),
    "all": _tier(
        """
            4xm apng bethsoftvid bfi bink c93 cdxl cine dhav dsicin dxa ea film_cpk flic gdv gif hnm idcin ipmovie
            iv8 jv kux lmlm4 lxf mjpeg mlv mm moflex msnwctcp mtv mv mvi mxg nsv nuv paf pmp psxstr pva rl2 roq rpl
            siff smjpeg smk smush swf thp tiertexseq tmv ty usm vc1test vividas vivo vmd wc3movie wsvqa xmv yop
            yuv4mpegpipe
            """,
        """
            012v 4xm 8bps aasc agm amv anm apng arbc argo asv1 asv2 aura aura2 avrn avrp avs avui bethsoftvid bfi
            binkvideo bitpacked bmp bmv_video c93 camstudio camtasia cavs cdxl clearvideo cljr cllc cpia cyuv dfa
            dsicinvideo dxa dxtory dxv eacmv eamad eatgq eatgv eatqi escape124 escape130 fic flic fmvc fraps frwu
            g2m gdv gif hnm4video hq_hqa hqx hymt idcinvideo imm4 imm5 interplayvideo jpegls jv kgv1 kmvc loco lscr
            m101 magicyuv mdec media100 mimic mmvideo mobiclip motionpixels mpegvideo msa1 mscc msp2 mszh mts2 mv30
            mvc1 mvc2 mvdv mvha mwsc mxpeg notchlc nuv paf_video pdv pixlet prosumer qpeg r10k r210 rasc rl2
            roqvideo rscc rtv1 rv60 sanm scpr screenpresso sga sheervideo simbiosis_imx smackvid sp5x speedhq srgc
            targa targa_y216 tdsc thp tiertexseqvideo tmv truemotion1 truemotion2 truemotion2rt tscc2 ultimotion
            v210x v308 v408 v410 vb vble vcr1 vmdvideo vmnc vp4 vp5 vp7 vqavideo wcmv wnv1 xan_wc3 xan_wc4 xl y41p
            ylc yop yuv4 zerocodec zlib zmbv
            """,
    ),
}
"""The three, from the fewest formats to the most; `modern` is the least that a stranger's file can reach."""
DEFAULT_TIER = "archive"
CONVERT_TO = "h264, hevc, vp9 or av1"


def containers_of(tier: str) -> tuple[str, ...]:
    """Demuxers of a tier and of those before it; a demuxer of several formats has all their names in one."""
    return tuple(name for each in _up_to(tier) for name in TIERS[each].containers)


def codecs_of(tier: str) -> frozenset[str]:
    """Decoders of a tier and of those before it."""
    return frozenset(name for each in _up_to(tier) for name in TIERS[each].codecs)


def _up_to(tier: str) -> list[str]:
    return list(TIERS)[: list(TIERS).index(tier) + 1]


def refused(what: str, name: str, tier: str) -> UnreadableVideo:
    """What to raise for a format that this tier lacks. `what`: container or codec."""
    kinds = {"container": containers_of, "codec": codecs_of}
    taken_by = next((each for each in TIERS if name in kinds[what](each)), None)
    if taken_by is None:
        return UnreadableVideo(f"{what} {name!r} is not served; convert to {CONVERT_TO}")
    return UnreadableVideo(
        f"{what} {name!r} is not served at --formats {tier}; --formats {taken_by} takes it, or convert to {CONVERT_TO}"
    )


CONTAINERS = {tier: containers_of(tier) for tier in TIERS}
CODECS = {tier: codecs_of(tier) for tier in TIERS}
"""Both by tier, made once."""
