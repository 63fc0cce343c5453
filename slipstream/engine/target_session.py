"""One caption at the target: what was asked, what is committed, and what its stages tell. Knows no model pass."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from slipstream.engine.local_drafter import LocalDrafter
from slipstream.engine.memory import Reservation
from slipstream.engine.text_attention import TextAttention
from slipstream.engine.video_lm import PromptPlan
from slipstream.engine.work import SessionWork
from slipstream.families.text import StoppingText
from slipstream.pruning import Guidance
from slipstream.pruning.lossy import Schedule
from slipstream.rpc.codec import TargetRequest
from slipstream.rpc.windows import PassFacts
from slipstream.sampling.sampler import TargetSampler
from slipstream.speculation.acceptance import StopRule, Verdict


class PrefillStage(StrEnum):
    """Where a session stands before its first token; `Stage` in `target.proto`."""

    QUEUED = "queued"
    ENCODE = "encode"
    PREFILL = "prefill"


@dataclass(frozen=True)
class StageProgress:
    """Units of work done of a stage; of QUEUED, how many wait before this one as `total`."""

    stage: PrefillStage
    done: int
    total: int


@dataclass(frozen=True)
class PrefillFacts:
    """What the prefill was and took. `until_guidance_s` and `after_guidance_s` are the layers before and after L."""

    prompt_tokens: int
    video_tokens: int
    encode_s: float
    until_guidance_s: float
    after_guidance_s: float
    kv_bytes: int
    reused_tokens: int


@dataclass(frozen=True)
class Judgement:
    """A verdict, the text of its tokens, and what its pass was."""

    verdict: Verdict
    pieces: list[str]
    facts: PassFacts


@dataclass(eq=False)
class TargetSession:
    """One caption at the target. `committed` ends with the one token that is not in the cache yet."""

    request: TargetRequest
    plan: PromptPlan
    rule: StopRule
    sampler: TargetSampler
    text: StoppingText
    guidance: asyncio.Future[Guidance]
    """Done when layer L has run."""
    attention: TextAttention | None
    """The text's to the video, where somebody asked for it."""
    drafter_type: type[LocalDrafter] | None
    """Of a session that may draft for itself."""
    lossy: Schedule | None
    """What the prefill drops of the video, where the session is a lossy baseline."""
    prefilled: asyncio.Future[None]
    work: SessionWork
    place: Reservation
    committed: list[int] = field(default_factory=list)
    """Touched on the model's thread only, once the prefill is done."""
    first_logits: torch.Tensor | None = None
    """[vocab], after the prefill."""
    drafter: LocalDrafter | None = None
    """Made when drafting is first asked for."""
