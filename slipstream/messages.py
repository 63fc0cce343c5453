"""What the parts exchange, as plain frozen types: requests, events, results. `slipstream.rpc` puts them on the wire."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.documents.messages import RegionStage
from slipstream.speculation.protocol import FinishReason

Frames = np.ndarray[tuple[int, int, int, int], np.dtype[np.uint8]]
"""RGB frames [n, height, width, 3]."""


@dataclass(frozen=True)
class StageChange:
    """A step of the work began or moved on, or the draft came or went; gateway.proto has a list of the stages. "resume"
    when target or gateway was lost, "resumed" when the text goes on."""

    stage: str
    done: int = 0
    total: int = 0
    detail: str = ""
    """Why, where that is of interest. The total is 0 where there is nothing to count."""


PREFILLED = "prefilled"
"""The stage that says how many tokens a prompt has."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token that might have come."""

    token_id: int
    piece: str
    """By itself, with the space that it begins with; "" for a special token, and bytes that are no UTF-8 are U+FFFD."""
    logprob: float
    """As of `CommittedToken`."""


@dataclass(frozen=True)
class CommittedToken:
    """A token of the text, for good."""

    token_id: int
    piece: str
    from_draft: bool
    """The draft wrote it and the target accepted it. The piece is "" while a character is incomplete."""
    logprob: float | None = None
    """The natural logarithm of the probability that the target's own logits gave it, before penalty, structure and
    temperature; None: it was not asked for (`logprobs`)."""
    top_logprobs: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens in its place, the likeliest first, as many as were asked for."""


@dataclass(frozen=True)
class CommittedText:
    """Text that will never be taken back. All of a caption's, joined, are its text."""

    tokens: tuple[CommittedToken, ...]

    def __str__(self) -> str:
        return "".join(token.piece for token in self.tokens)


@dataclass(frozen=True)
class Trace:
    """What a model did, or was told, as the gateway heard of it. Precedes the text that it brought."""

    kind: str
    """"pass" (the target judged a window), "draft" (the draft wrote) or "restart" (it was told to begin anew)."""
    at_s: float
    asked_s: float = 0.0
    """Of the gateway's clock: now, and, of a pass, when it could first have begun."""
    pass_s: float = 0.0
    tokens: int = 0
    accepted: int = 0
    stale: bool = False
    """Of the draft: the tokens belong to a line that was given up before they came."""


@dataclass(frozen=True)
class KeptTokens:
    """Which video tokens a draft keeps, for showing them over the frames."""

    bitmap: bytes = b""
    """One bit a video token, the lowest of a byte first; what fills the last byte is 0."""
    num_steps: int = 0
    """Frames, or groups of frames; each has `num_rows * num_columns` tokens, row after row from the top left."""
    num_rows: int = 0
    num_columns: int = 0
    middle_square: bool = False
    """The model sees of each frame the square in the middle."""
    times_s: tuple[float, ...] = ()
    """When the first frame of each step is shown, seconds from the clip's start. A draft leaves it to the gateway."""

    @property
    def num_kept(self) -> int:
        return int.from_bytes(self.bitmap).bit_count()

    @property
    def num_tokens(self) -> int:
        return self.num_steps * self.num_rows * self.num_columns


@dataclass(frozen=True)
class VideoFacts:
    """What was sampled of the video."""

    num_frames: int = 0
    width: int = 0
    height: int = 0
    duration_s: float = 0.0
    timestamps_s: tuple[float, ...] = ()
    """Seconds from the clip's start, one a frame."""
    warnings: tuple[str, ...] = ()
    """What was wrong with the file and was worked around."""
    video_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens whose prefill was at hand from an earlier prompt about the same frames."""
    marks: tuple[str, ...] = ()
    """What there is to see of a segment, or of a video of the archive where it was asked to spare captions, if it is
    little: "black", "frozen" or "static"."""


@dataclass(frozen=True)
class Timings:
    """Seconds. Stages of target and draft overlap."""

    decode_s: float = 0.0
    target_encode_s: float = 0.0
    target_prefill_s: float = 0.0
    draft_encode_s: float = 0.0
    draft_guidance_s: float = 0.0
    """Waiting for guidance, once the draft has encoded the frames."""
    draft_prune_s: float = 0.0
    draft_prefill_s: float = 0.0
    first_token_s: float = 0.0
    """From the moment the frames are sampled to the first committed token."""
    draft_ready_s: float = 0.0
    """From the same moment to the draft's readiness; 0 without a draft."""
    generate_s: float = 0.0
    total_s: float = 0.0
    """To the last token: from the first committed one, and from the request's arrival."""
    longest_gap_s: float = 0.0
    resumptions: int = 0
    """How often the caption lost its target, or its caller the gateway, and went on."""
    resume_s: float = 0.0
    """From the loss of a target to the next committed token, in all."""


@dataclass(frozen=True)
class PassCost:
    """Target passes over windows of one length; 0 is a plain pass."""

    window: int
    count: int
    pass_s: float
    round_s: float
    """Mean seconds of the model pass, and from asking for it to its verdict at the gateway."""


@dataclass(frozen=True)
class Speculation:
    """How speculation went. Zero where nothing was measured (method "autoregressive")."""

    passes: int = 0
    """Target passes after the prefill; `windows` of them judged a window."""
    windows: int = 0
    judged: int = 0
    """Draft tokens that were judged; `accepted` of them became text."""
    accepted: int = 0
    restarts: int = 0
    """Deaths of the draft's line, after each of which it began anew; of windows that the target drafts itself, those
    that were not accepted whole."""
    drafts_lost: int = 0
    tau: float = 0.0
    mean_accepted_length: float = 0.0
    """Mean run of tokens between two deaths of the line: ParallelVLM's M. Not the tokens a pass verifies, which others
    call so: these are `num_tokens / passes`."""
    target_pass_s: float = 0.0
    plain_pass_s: float = 0.0
    draft_pass_s: float = 0.0
    speed_ratio: float = 0.0
    """T_p / T_q: a plain target pass over a draft pass."""
    kept_tokens: int = 0
    guidance_bytes: int = 0
    kept_digest: str = ""
    held_s: float = 0.0
    """Seconds that the target waited for draft tokens, in all."""
    gate_closings: int = 0
    gated_tokens: int = 0
    gate_start: str = ""
    """What captions before this one said: open, trial, rest (no draft) or alone (not asked): `caption_book.Start`."""
    gate_reason: str = ""
    plain_token_s: float = 0.0
    """Seconds of one more token by plain decoding, as this caption or those before it measured it: without a round
    trip, and while no draft was at work."""
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    """Tokens of hints that became text, and those that were judged in vain, as often as they were."""
    pass_costs: tuple[PassCost, ...] = ()
    """By window length, ascending."""


@dataclass(frozen=True)
class SharedFrom:
    """Whose caption was taken: it was made from the frames of a near-duplicate, not from the video's own."""

    job_id: str = ""
    """Of the archive; empty: the same film."""
    segment: int = 0
    """From 0. Of a video that is captioned as a whole 0."""
    distance: float = 0.0
    """Between what they show, see `slipstream.video.fingerprint.distance`; 0 is the same."""


@dataclass(frozen=True)
class Caption:
    """A finished caption: its text, and everything that was measured of it."""

    text: str
    num_tokens: int
    finish_reason: FinishReason | None
    """STOP: the model or a stop string ended the text; LENGTH: `max_new_tokens` did."""
    stop_string: str = ""
    request_id: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """As used, after defaults, by name, as far as the gateway tells; lossy and lossy_keep where the text is such."""
    video: VideoFacts = field(default_factory=VideoFacts)
    timings: Timings = field(default_factory=Timings)
    speculation: Speculation = field(default_factory=Speculation)
    tokens: tuple[CommittedToken, ...] = ()
    """Of a caption that was streamed; empty for one that comes from the archive."""
    regions: RegionStage | None = None  # of a page whose regions were read first
    shared: SharedFrom | None = None
    """The text is that of another video's or segment's frames: nothing was measured, and no model saw these."""
    skipped: str = ""
    """The mark for which there is no text."""
    avg_logprob: float | None = None
    """Mean of the tokens' logprobs: how sure the target was of its text. None: it told none, which it does in the
    archive, and else where `logprobs` asks for them."""

    @property
    def decoding_rate(self) -> float:
        """Tokens a second after the first one; 0 when there is no second one."""
        seconds = self.timings.generate_s
        return (self.num_tokens - 1) / seconds if self.num_tokens > 1 and seconds > 0 else 0.0

    @property
    def had_draft(self) -> bool:
        """Whether a draft took part; not one that was never ready."""
        return bool(self.speculation.kept_digest or self.timings.draft_ready_s)

    @property
    def lossy_facts(self) -> tuple[str, ...]:
        """In which ways the text need not be the target's own, as people are told; none: it is."""
        facts = []
        if 0 < (tau := self.options.get("tolerance", 0)) < 1:
            facts.append(f"lossy: hints within a tolerance of {tau:g} ({self.options['tolerance_rule']})")
        if lossy := self.options.get("lossy"):
            facts.append(f"lossy: {lossy} keeps {self.options['lossy_keep']:.0%}")
        return tuple(facts)

    def __str__(self) -> str:
        return self.text


CaptionEvent = StageChange | CommittedText | Trace | KeptTokens | Caption
"""What a caption says while it is made; the `Caption` itself comes last."""


@dataclass(frozen=True)
class FilmFacts:
    """A video that is captioned in segments."""

    num_segments: int = 0
    start_s: float = 0.0
    """When its first frame is shown, by the container's clock, which does not always begin at 0."""
    duration_s: float = 0.0
    """From the first frame to the end of the last."""
    warnings: tuple[str, ...] = ()
    """What was wrong with the file and was worked around, and whether it is shorter than a segment."""


@dataclass(frozen=True)
class Segment:
    """It begins with a frame of its own and ends where the next one begins."""

    number: int = 0
    """From 0."""
    start_s: float = 0.0
    end_s: float = 0.0
    """Seconds by the container's clock: the timestamps of its first frame and of the next segment's."""
    error: str = ""
    """Why it has no caption."""
    prompt: int = 0
    """Which of several prompts its caption answers, from 0."""
    is_summary: bool = False
    """It is the whole film, numbered behind the last segment; its caption sums up theirs."""


@dataclass(frozen=True)
class SegmentCaption:
    """What became of a segment."""

    segment: Segment
    caption: Caption | None
    """Of its own frames; its `video` counts times from the segment's start. None where the segment has an error."""
    more: tuple[Caption, ...] = ()
    """Of several prompts, the answers to the others."""

    @property
    def text(self) -> str:
        """The caption's; empty without one."""
        return "" if self.caption is None else self.caption.text

    @property
    def captions(self) -> tuple[Caption, ...]:
        """The answers to all prompts, in their order."""
        return () if self.caption is None else (self.caption, *self.more)

    @property
    def texts(self) -> tuple[str, ...]:
        """Those of all prompts."""
        return tuple(caption.text for caption in self.captions)


FilmEvent = FilmFacts | Segment | CaptionEvent
"""The facts once; then for each segment in order what it is, and what its caption says, to the `Caption`: once for each
of several prompts. A summary comes last, like a segment."""
