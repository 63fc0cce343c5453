"""Captions that need not be made: of a near-duplicate of what has been captioned, and of a video with nothing to see.

A shared text was not made from the video's own frames, and says so wherever it is. As a hint it only saves time: the
text is then the target's own, of the video's own frames.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from slipstream.captioning.plan import CaptionPlan
from slipstream.messages import Caption, SharedFrom, VideoFacts
from slipstream.speculation.protocol import FinishReason
from slipstream.video.fingerprint import Fingerprint, Fingerprints, fingerprint_of
from slipstream.video.marks import is_skipped, marks_of
from slipstream.video.messages import SampledVideo

SHARE, HINT = "share", "hint"
WITHIN = {SHARE: 14.0, HINT: 26.0}
"""Distances up to which a caption is taken, or drafted from; found with `bench archive-scale --only duplicates`."""
FILM_CAPTIONS_KEPT = 4096
"""Of one film that is captioned for a caller."""


@dataclass(frozen=True)
class KnownCaption:
    """A caption that was made of frames with this fingerprint."""

    fingerprint: Fingerprint
    made_for: SharedFrom
    """Its distance is 0."""
    text: str
    num_tokens: int
    finish_reason: FinishReason | None
    stop_string: str = ""


@dataclass(frozen=True)
class Near:
    """A known caption of a near-duplicate."""

    known: KnownCaption
    distance: float

    @property
    def source(self) -> SharedFrom:
        """Whose text it is, and how near."""
        return replace(self.known.made_for, distance=round(self.distance, 2))


class KnownCaptions(Protocol):
    """Captions of one target that were asked for with the same options, to find near-duplicates among."""

    async def nearest(self, fingerprint: Fingerprint, within: float) -> Near | None:
        """The nearest one, no farther than `within`; see `slipstream.video.fingerprint.distance`."""

    async def add(self, known: KnownCaption) -> None:
        """One more."""


class RecentCaptions:
    """`KnownCaptions` of this process: the latest so many."""

    def __init__(self, most: int = FILM_CAPTIONS_KEPT) -> None:
        self._fingerprints = Fingerprints(most)
        self._known: deque[KnownCaption] = deque(maxlen=most)

    async def nearest(self, fingerprint: Fingerprint, within: float) -> Near | None:
        found = self._fingerprints.nearest(fingerprint, within)
        return None if found is None else Near(self._known[found.number], found.distance)

    async def add(self, known: KnownCaption) -> None:
        self._fingerprints.add(known.fingerprint)
        self._known.append(known)


@dataclass(frozen=True)
class Sparing:
    """What became of a video: its caption, and the plan that this was made by."""

    caption: Caption
    plan: CaptionPlan


async def caption_sparingly(
    plan: CaptionPlan,
    video: SampledVideo,
    known: KnownCaptions,
    made_for: SharedFrom,
    make: Callable[[CaptionPlan], Awaitable[Caption]],
) -> Sparing:
    """The caption of a video, which `make` makes unless the plan's options spare it. Raises what `make` raises.

    Args:
        made_for: what to call this video where others take its caption.
    """
    marks = marks_of(video)
    facts = _facts(video, marks)
    if mark := is_skipped(marks, plan.options.get("skip_marked", "none")):
        return Sparing(Caption("", 0, None, request_id=plan.request_id, video=facts, skipped=mark), plan)
    how = plan.options.get("duplicates", "off")
    if how not in WITHIN:
        return Sparing(_marked(await make(plan), marks), plan)
    fingerprint = fingerprint_of(video)
    near = await known.nearest(fingerprint, WITHIN[how])
    # A run of the same job that was lost before its result was kept leaves its caption all the same.
    is_own = near is not None and near.known.made_for == made_for
    if near is not None and how == SHARE and not is_own:
        return Sparing(_shared(plan, near, facts), plan)
    if near is not None and how == HINT and not plan.is_tolerant:
        plan = plan.hinted([near.known.text])
    caption = _marked(await make(plan), marks)
    said = caption.text, caption.num_tokens, caption.finish_reason, caption.stop_string
    await known.add(KnownCaption(fingerprint, made_for, *said))
    return Sparing(caption, plan)


def _shared(plan: CaptionPlan, near: Near, facts: VideoFacts) -> Caption:
    known = near.known
    return Caption(
        known.text,
        known.num_tokens,
        known.finish_reason,
        known.stop_string,
        request_id=plan.request_id,
        options=plan.options.given(),
        video=facts,
        shared=near.source,
    )


def _marked(caption: Caption, marks: tuple[str, ...]) -> Caption:
    return replace(caption, video=replace(caption.video, marks=marks))


def _facts(video: SampledVideo, marks: tuple[str, ...]) -> VideoFacts:
    """Of a video that no model has seen."""
    num_frames, height, width, _ = video.frames.shape
    times_s, warnings = video.timestamps_s, video.warnings
    return VideoFacts(num_frames, width, height, video.duration_s, times_s, warnings, marks=marks)
