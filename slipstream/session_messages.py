"""What a gateway and its models exchange about one caption, as plain frozen types. `slipstream.rpc` puts them on the
wire."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from slipstream.errors import ProtocolViolation
from slipstream.messages import CommittedToken, KeptTokens, TokenLogprob
from slipstream.sampling.params import GREEDY, Proposal, SamplingParams
from slipstream.speculation.company import ALONE, Company
from slipstream.speculation.hints.tolerance import Hints
from slipstream.speculation.methods import GuidanceKind, Lossy
from slipstream.speculation.protocol import TokenTree, Verdict

MAX_KEPT_BYTES = 32 * 1024
"""Of the map of the tokens that a draft kept; larger ones are not sent."""


@dataclass(frozen=True, slots=True)
class Chat:
    """What a model is told before its answer."""

    question: str
    system: str = ""
    """What it is told beforehand; empty: what its chat template says by itself."""
    turns: tuple[str, ...] = ()
    """Earlier questions and their answers, in turns. The video belongs to the first question."""
    thinking: str = ""
    """on or off: what the chat template is told of it; all else: nothing."""


@dataclass(frozen=True)
class SessionKey:
    """What one caption's sessions are called at the models, and what opens their guidance: random, so that nobody can
    take a name before us, or ask for another caption's guidance."""

    session_id: str = field(default_factory=partial(secrets.token_hex, 16))
    guidance_capability: bytes = field(default_factory=partial(secrets.token_bytes, 16), repr=False)


@dataclass(frozen=True)
class SessionStart:
    """What a caption asks of either model before any token."""

    session_id: str
    """Random: who knows a request's id knows no session's. The same at both."""
    prompt: str
    system: str = field(default="", kw_only=True)
    turns: tuple[str, ...] = field(default=(), kw_only=True)
    thinking: str = field(default="", kw_only=True)
    """These four are a `Chat`."""
    sampling: SamplingParams = field(default=GREEDY, kw_only=True)
    seconds_per_frame: float | None = field(default=None, kw_only=True)
    times_s: tuple[float, ...] = field(default=(), kw_only=True)
    """When each frame is shown. None and none: not known."""
    guidance_capability: bytes = field(default=b"", kw_only=True, repr=False)
    """Who shows it may pull the target's guidance."""
    request_id: str = field(default="", kw_only=True)
    """Names the caption in the logs; travels as metadata."""
    has_video: bool = field(default=True, kw_only=True)
    """False: the prompt is about no video, and no frames come."""
    in_background: bool = field(default=False, kw_only=True)
    """Nobody waits for the text: its prompt may ride along the passes of others, and lets theirs go first."""


@dataclass(frozen=True)
class TargetStart(SessionStart):
    """What a caption asks of the target."""

    max_new_tokens: int
    with_guidance: bool
    with_attention: bool = False
    """Record the attention of the text to the video."""
    lossy: Lossy | None = None
    local_drafter: str = ""
    """The method whose drafter drafts at the target, for this session; empty: none does."""
    self_draft_kept: int = 0
    """Video tokens that this drafter sees in each layer and KV head, where it sees a part of them."""
    hints: Hints | None = None
    """For a drafter that makes trees of texts."""
    logprobs: bool = False
    """Tell how likely each token was."""
    top_logprobs: int = 0
    """And of so many of the likeliest in its place."""


@dataclass(frozen=True)
class JudgeRequest:
    """Passes to run: the first over the window, the others over nothing; and each over tokens drafted for it here."""

    window: tuple[int, ...] = ()
    num_passes: int = 1
    proposals: tuple[Proposal, ...] = ()
    """What each token of the window was drawn from, where the sampling rule needs it."""
    tree: TokenTree | None = None
    """The window, where it branches."""
    self_draft: int = 0


class PrefillStage(StrEnum):
    """Where a session at the target stands before its first token; `Stage` in target.proto."""

    QUEUED = "queued"
    ENCODE = "encode"
    PREFILL = "prefill"


@dataclass(frozen=True)
class StageProgress:
    """A step of the target's work before the text: `done` of `total` units; of "queued", `total` wait ahead."""

    stage: PrefillStage
    done: int
    total: int


@dataclass(frozen=True)
class Prefilled:
    """What the target's prefill was and took, in tokens, seconds and bytes."""

    prompt_tokens: int = 0
    video_tokens: int = 0
    encode_s: float = 0.0
    prefill_until_guidance_s: float = 0.0
    """Layers 1 to L; those after L are in `prefill_after_guidance_s`."""
    prefill_after_guidance_s: float = 0.0
    kv_bytes: int = 0
    reused_tokens: int = 0
    """Prompt tokens whose prefill was at hand."""


@dataclass(frozen=True)
class PassFacts:
    """What a pass was: its seconds, and the tokens that were drafted for it here, with the seconds of that."""

    pass_s: float
    num_drafted: int = 0
    draft_s: float = 0.0
    company: Company = ALONE
    """Whom it served and kept waiting."""
    kept_s: float = 0.0
    """How long it waited while the model's thread did other work, as a block of another session's prompt."""

    def own_s(self, round_s: float) -> float:
        """What a round of so many seconds took but for that wait, which any pass would have had. It is not believed
        where it is longer than the round."""
        return round_s - self.kept_s if 0 < self.kept_s < round_s else round_s


@dataclass(frozen=True)
class Judgement:
    """A verdict, the text of its tokens, and what its pass was."""

    verdict: Verdict
    pieces: tuple[str, ...]
    """One a committed token; "" while a character is incomplete."""
    facts: PassFacts
    logprobs: tuple[float, ...] = ()
    """One a committed token, where they were asked for; as of `CommittedToken.logprob`."""
    top_logprobs: tuple[TokenLogprob, ...] = ()
    """The likeliest in the place of each committed token, the first one's first; of each as many."""

    def tokens(self, token_ids: Sequence[int], num_from_draft: int = 0) -> tuple[CommittedToken, ...]:
        """Those that it commits. Raises `ProtocolViolation` where not each of them has its text and its chance."""
        num_tokens = len(token_ids)
        if len(self.pieces) != num_tokens:
            raise ProtocolViolation("the target sent a verdict without the text of its tokens")
        if len(self.logprobs) not in (0, num_tokens) or len(self.top_logprobs) % max(num_tokens, 1):
            raise ProtocolViolation("the target did not tell of each token of its verdict how likely it was")
        if not all(map(math.isfinite, (*self.logprobs, *(one.logprob for one in self.top_logprobs)))):
            raise ProtocolViolation("the target sent logprobs that are no numbers")
        logprobs = self.logprobs or (None,) * num_tokens
        return tuple(
            CommittedToken(token, piece, index < num_from_draft, logprob, self._top_of(index))
            for index, (token, piece, logprob) in enumerate(zip(token_ids, self.pieces, logprobs, strict=True))
        )

    def _top_of(self, index: int) -> tuple[TokenLogprob, ...]:
        each = len(self.top_logprobs) // len(self.pieces)
        return self.top_logprobs[index * each : (index + 1) * each]

    def behind(self, num_tokens: int, verdict: Verdict) -> "Judgement":
        """What is left of it behind its first tokens, where the verdict on that is this one."""
        first_top = len(self.top_logprobs) // max(len(self.pieces), 1) * num_tokens
        pieces, logprobs = self.pieces[num_tokens:], self.logprobs[num_tokens:]
        return Judgement(verdict, pieces, self.facts, logprobs, self.top_logprobs[first_top:])


TargetEvent = StageProgress | Prefilled | Judgement


@dataclass(frozen=True)
class DraftStart(SessionStart):
    """What a caption asks of the draft."""

    pruner: str
    alpha: float
    positions: str
    guidance: GuidanceKind
    guidance_address: str
    seed: int
    tree: bool = False
    """Every line is one static tree of candidates."""
    width: int = 0
    """Candidates behind every node of a dynamic tree, see `Growth`; 0: lines are of another shape."""
    max_rows: int = 0
    """Most nodes of it that one pass reads."""
    least_chance: float = 0.0
    """Of a node of it that the draft has to read."""
    vocab_size: int = 0
    """Width of the target's logits, beyond which no token may be written; 0: the draft's own."""
    want_kept: bool = False
    """Tell which video tokens were kept."""
    max_new_tokens: int = 0
    """Most tokens of the answer; 0: not told."""


@dataclass(frozen=True)
class DraftReady:
    """The draft is prefilled: what it kept of the video, and what that took, in seconds and bytes."""

    kept_tokens: int = 0
    video_tokens: int = 0
    encode_s: float = 0.0
    """With the frames' digest, where embeddings are kept by it."""
    guidance_s: float = 0.0
    """Waiting for it, once the frames are encoded; 0: it was there by then."""
    prune_s: float = 0.0
    prefill_s: float = 0.0
    guidance_bytes: int = 0
    kept_digest: str = ""
    """SHA-256 over the indices of the kept video tokens."""
    kept: KeptTokens | None = None
    """They themselves, where they were asked for and lie in a grid."""


@dataclass(frozen=True)
class DraftTokens:
    """The next tokens of the draft's line `epoch`, from output position `position` on."""

    epoch: int
    position: int
    token_ids: tuple[int, ...]
    pass_s: float
    """Mean seconds of a draft pass."""
    proposals: tuple[Proposal, ...] = ()
    parents: tuple[int, ...] = ()
    """Of a tree, see `TokenTree`; of a dynamic one they are numbers of nodes, and `position` is that of the first."""
    chances: tuple[float, ...] = ()
    """Of a dynamic tree: how sure the draft is of each node, given the one before it."""
    num_passes: int = 0
    """Of a dynamic tree: passes that these nodes took."""


DraftEvent = DraftReady | DraftTokens
