"""Old formats: the right frames at the tier that takes them, and a refusal that names that tier below it."""

import io
import re
from dataclasses import replace
from pathlib import Path

import av
import pytest

from slipstream.errors import UnreadableVideo
from slipstream.video.container import Watch, open_video
from slipstream.video.damage import DamageCount
from slipstream.video.decode import sample_video
from slipstream.video.formats import CODECS, CONTAINERS, TIERS, refused
from slipstream.video.messages import DecodeLimits, SampledVideo
from slipstream.video.packet_times import read_packet_times
from tests.support.clip_kinds import CLIPS, DOUBTFUL_KEYS, H263, OLD_CLIPS, THEORA
from tests.support.media import ClipSpec, even_times_ms, expected_indices, make_clip, read_index
from tests.support.written_clips import REPEATING_CLIPS, TIMES_MS, WRITTEN_CLIPS, vc1_asf

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(TIERS)
OPEN_OTHERS = ("hls", "dash", "concat", "image2", "lavfi", "rtsp", "sdp", "rtp", "vobsub", "webm_dash_manifest", "imf")


def sample(data: bytes, num_frames: int, tier: str) -> SampledVideo:
    return sample_video(io.BytesIO(data), num_frames, DecodeLimits(formats=tier))


def check_frames(data: bytes, spec: ClipSpec, num_frames: int, tier: str) -> None:
    video = sample(data, num_frames, tier)
    expected = expected_indices(spec.times_ms, num_frames)
    assert [read_index(frame) for frame in video.frames] == expected
    assert video.timestamps_s == pytest.approx([spec.times_ms[index] / 1000 for index in expected], abs=2e-3)


@pytest.mark.parametrize(("tier", "name"), [(tier, name) for tier in OLD_CLIPS for name in OLD_CLIPS[tier]])
def test_old_formats_give_exactly_the_expected_frames(tier: str, name: str) -> None:
    spec = OLD_CLIPS[tier][name]
    data = make_clip(spec)
    for num_frames in (1, 5):
        check_frames(data, spec, num_frames, tier)
    assert sample(data, 5, NAMES[-1]).timestamps_s == sample(data, 5, tier).timestamps_s
    below = NAMES[NAMES.index(tier) - 1]
    with pytest.raises(UnreadableVideo, match=f"is not served at --formats {below}; --formats {tier} takes it"):
        sample(data, 1, below)


@pytest.mark.parametrize("name", WRITTEN_CLIPS)
def test_formats_that_only_decoders_know_give_the_expected_frames(name: str) -> None:
    data = WRITTEN_CLIPS[name]()
    for num_frames in (1, 5, 12):
        check_frames(data, ClipSpec(TIMES_MS), num_frames, "archive")
    with pytest.raises(UnreadableVideo, match="is not served at --formats modern; --formats archive takes it"):
        sample(data, 1, "modern")


@pytest.mark.parametrize("name", REPEATING_CLIPS)
def test_pictures_that_are_skipped_are_those_before(name: str) -> None:
    video = sample(REPEATING_CLIPS[name](), 12, "archive")
    assert [read_index(frame) for frame in video.frames] == [number - number % 3 for number in range(12)]
    assert video.timestamps_s == pytest.approx([time_ms / 1000 for time_ms in TIMES_MS])


def test_vc1_in_asf_is_right_but_for_its_last_picture() -> None:
    video = sample(vc1_asf(), 12, "archive")
    assert [read_index(frame) for frame in video.frames] == list(range(11))
    assert video.timestamps_s == pytest.approx([time_ms / 1000 for time_ms in TIMES_MS[:11]])


def test_mpeg2_in_gxf_is_right_to_a_field() -> None:
    """libav's writer counts the last picture as half of one."""
    spec = replace(OLD_CLIPS["archive"]["dv gxf"], codec="mpeg2video", times_ms=even_times_ms(12))
    video = sample(make_clip(spec), 12, "archive")
    shown_s = [spec.times_ms[read_index(frame)] / 1000 for frame in video.frames]
    assert len(shown_s) > 10 and video.timestamps_s == pytest.approx(shown_s, abs=0.021)


@pytest.mark.parametrize(("tier", "name"), [("archive", "dv gxf"), ("all", "loki jpeg")])
def test_the_end_of_a_file_is_not_called_damage(tier: str, name: str) -> None:
    video = sample(make_clip(OLD_CLIPS[tier][name]), 2, tier)
    assert len(video.frames) == 2 and not video.warnings


def test_theora_in_ogg() -> None:
    data = THEORA.read_bytes()
    check_frames(data, ClipSpec(even_times_ms(12)), 5, "archive")
    with pytest.raises(UnreadableVideo, match="container 'ogg' is not served at --formats modern"):
        sample(data, 1, "modern")


def test_h263_of_telephones() -> None:
    check_frames(make_clip(H263), H263, 5, "modern")


def test_packets_that_are_wrongly_called_keys_are_decoded_from_the_start() -> None:
    check_frames(make_clip(DOUBTFUL_KEYS), DOUBTFUL_KEYS, 5, "modern")


@pytest.mark.parametrize("codec", ["cinepak", "msmpeg4", "wmv2"])
def test_an_avi_that_is_cut_off_before_its_index_is_decoded_from_the_start(codec: str) -> None:
    """The index alone says which packets are keys."""
    spec = ClipSpec(
        even_times_ms(12), container="avi", codec=codec, pix_fmt="rgb24" if codec == "cinepak" else "yuv420p"
    )
    data = make_clip(spec)
    check_frames(data[: data.rindex(b"idx1")], spec, 5, "archive")


@pytest.mark.parametrize(("cut", "num_keys"), [(False, 12), (True, 1)])
def test_an_avi_all_of_whose_packets_are_keys_is_believed_if_its_index_says_so(cut: bool, num_keys: int) -> None:
    data = WRITTEN_CLIPS["wmv3 avi"]()
    source = io.BytesIO(data[: data.rindex(b"idx1")] if cut else data)
    with open_video(source, DecodeLimits(), Watch(9.0, None)) as video:
        packets = read_packet_times(video, DecodeLimits(), DamageCount(0))
    assert packets.is_key.sum() == num_keys and len(packets) == 12


def test_the_default_is_the_archives_tier() -> None:
    assert DecodeLimits().formats == "archive"


def test_what_no_tier_takes_is_told_apart_from_what_another_takes() -> None:
    with pytest.raises(UnreadableVideo, match="not recognised as one of mov"):
        sample(make_clip(ClipSpec(even_times_ms(3), container="h264")), 1, "all")
    assert str(refused("codec", "tiff", "all")).startswith("codec 'tiff' is not served; convert to h264")
    assert "--formats archive takes it" in str(refused("codec", "wmv3", "modern"))


def test_a_refusal_names_the_same_container_every_time() -> None:
    """libav's log, which names it, leaves out what it has said just before."""
    nut, asf = (make_clip(ClipSpec(even_times_ms(3), container=name, codec="mpeg4")) for name in ("nut", "asf"))
    for _ in range(3):
        for data, name in ((nut, "nut"), (nut, "nut"), (asf, "asf")):
            with pytest.raises(UnreadableVideo, match=f"container '{name}' is not served"):
                sample(data, 1, "modern")


def test_tiers_name_what_libav_has_and_each_thing_once() -> None:
    containers, codecs = CONTAINERS["all"], [codec for tier in TIERS.values() for codec in tier.codecs]
    assert len(set(containers)) == len(containers) and len(set(codecs)) == len(codecs)
    assert CONTAINERS["modern"] < CONTAINERS["archive"] < containers
    assert CODECS["modern"] < CODECS["archive"] < CODECS["all"]
    assert all(av.format.ContainerFormat(name.partition(",")[0]).is_input for name in containers)
    assert [av.Codec(name, "r").name for name in codecs] == codecs
    assert all(av.Codec(name, "r").type == "video" for name in codecs)


def test_nothing_that_opens_other_files_or_hardware_is_in_any_tier() -> None:
    """What cannot be opened from bytes alone libav marks itself; the rest of the list is known by name."""
    names = {name for container in CONTAINERS["all"] for name in container.split(",")}
    assert not names & set(OPEN_OTHERS)
    assert not any(name.endswith("_pipe") for name in names)
    hardware = ("_cuvid", "_qsv", "_amf", "_v4l2m2m", "_videotoolbox", "_vaapi")
    assert not [codec for codec in CODECS["all"] if codec.endswith(hardware)]
    assert all(not av.format.ContainerFormat(name.partition(",")[0]).no_file for name in CONTAINERS["all"])


def _seen() -> tuple[set[str], set[str]]:
    """Containers and codecs that clips of the tests have."""
    specs = [*CLIPS.values(), *(spec for clips in OLD_CLIPS.values() for spec in clips.values()), DOUBTFUL_KEYS, H263]
    clips = [*map(make_clip, specs), THEORA.read_bytes(), *(make() for make in WRITTEN_CLIPS.values())]
    containers, codecs = set[str](), set[str]()
    for clip in clips:
        with av.open(io.BytesIO(clip)) as container:
            containers.add(container.format.name)
            codecs.add(container.streams.video[0].codec_context.name)
    return containers, codecs


def test_the_documents_say_what_was_never_seen() -> None:
    containers, codecs = _seen()
    text = (ROOT / "docs" / "formats.md").read_text()
    never = re.findall(r"`([^`]+)`", text.partition("licence was clear: ")[2].partition(".\n")[0])
    assert never == [codec for codec in TIERS["archive"].codecs if codec not in codecs]
    assert set(TIERS["modern"].codecs) - codecs == {"av1"}, "which is libdav1d"
    assert containers >= {*TIERS["modern"].containers, *TIERS["archive"].containers}
    seen_containers, _, seen_codecs = (
        text.partition("Seen in the tests: ")[2].partition(".")[0].partition("and the codecs")
    )
    assert set(re.findall(r"`([^`]+)`", seen_containers)) == containers & set(TIERS["all"].containers)
    assert set(re.findall(r"`([^`]+)`", seen_codecs)) == codecs & set(TIERS["all"].codecs)


def test_the_documents_lists_are_the_tiers() -> None:
    sections = (ROOT / "docs" / "formats.md").read_text().split("\n## ")
    for name, tier in TIERS.items():
        (section,) = (text for text in sections if text.startswith(f"{name}\n"))
        for kind, words in (("Containers", tier.containers), ("Codecs", tier.codecs)):
            listed = section.partition(f"{kind}: ")[2].partition(".\n")[0]
            assert re.findall(r"`([^`]+)`", listed) == list(words)
