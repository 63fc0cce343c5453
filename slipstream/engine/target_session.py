"""One caption at the target: what was asked, what is committed, and what its stages tell."""

import asyncio
from dataclasses import dataclass, field

import torch

from slipstream.budget import Reservation
from slipstream.engine.batcher import SessionWork
from slipstream.engine.local_drafter import LocalDrafter
from slipstream.engine.text_attention import TextAttention
from slipstream.engine.video_lm import PromptPlan
from slipstream.families.adapter import StoppingText
from slipstream.messages import TargetStart
from slipstream.pruning import Guidance
from slipstream.pruning.lossy import Schedule
from slipstream.sampling.sampler import TargetSampler
from slipstream.speculation.protocol import StopRule


@dataclass(eq=False)
class TargetSession:
    """One caption at the target. `committed` ends with the one token that is not in the cache yet."""

    request: TargetStart
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
    place: Reservation
    work: SessionWork
    committed: list[int] = field(default_factory=list)
    """Touched on the model's thread only, once the prefill is done."""
    first_logits: torch.Tensor | None = None
    """[vocab], after the prefill."""
    drafter: LocalDrafter | None = None
    """Made when drafting is first asked for."""
    num_pulls: int = 0
    """How often its guidance was asked for."""

    @property
    def has_place(self) -> bool:
        """It is served, and its frames may come; else it waits."""
        return self.place.admitted_at is not None and self.work.may_have_frames
