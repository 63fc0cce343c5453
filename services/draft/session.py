"""One caption at the draft: what was asked, its line, and what is sent of it. Knows no model pass."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

import torch

from services.draft.trees import TreeGrowth
from slipstream.models.admission import Reservation
from slipstream.models.base import PromptPlan
from slipstream.models.work import SessionWork
from slipstream.rpc.codec import DraftRequest
from slipstream.sampling.params import Proposal
from slipstream.sampling.sampler import DraftSampler
from slipstream.speculation.pipeline import AdvanceLine, RestartLine


@dataclass(frozen=True)
class Chunk:
    """Tokens of a line, the output position of the first, and the mean seconds of a pass."""

    epoch: int
    position: int
    token_ids: list[int]
    pass_s: float
    proposals: tuple[Proposal, ...] = ()
    """What each token was drawn from, where the sampling rule needs it."""
    parents: tuple[int, ...] = ()
    """Of a tree, see `TokenTree`."""


@dataclass
class Line:
    """Where the draft writes. `output` holds committed tokens and, after them, what it wrote itself."""

    epoch: int
    write_until: int
    first_chunk: int
    output: list[int]


@dataclass(eq=False)
class DraftSession:
    """One caption at the draft. All but `orders` and `chunks` is touched on the model's thread only, once it writes."""

    request: DraftRequest
    plan: PromptPlan
    work: SessionWork
    place: Reservation
    sampler: DraftSampler
    line: Line
    orders: deque[RestartLine | AdvanceLine] = field(default_factory=deque)
    """What the thread has not carried out. All is, in order: each restart builds on the one before."""
    chunks: asyncio.Queue[Chunk | Exception | None] = field(default_factory=asyncio.Queue)
    """What was written; None, or what went wrong, at the end."""
    prompt_logits: torch.Tensor | None = None
    """[vocab], after the prefill."""
    num_sent: int = 0
    """Tokens of the line's output that are in a chunk already, or were committed before the line."""
    proposals: list[Proposal] = field(default_factory=list)
    """Of the tokens that are not sent yet, where the sampling rule needs them."""
    chunk_started_s: float = 0.0
    """When the first pass of the chunk began that is being written."""
    growth: TreeGrowth | None = None
    """The line's tree, where trees are asked for; None until there is room for one."""
