"""Keeps one caption supplied with a draft: finds it, joins it, listens to it, and starts over when it is lost.

Nothing that happens here can end the caption or change its text.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np

from slipstream.errors import DraftFault, FaultKind, SlipstreamError
from slipstream.logs import get_logger
from slipstream.messages import KeptTokens
from slipstream.rpc.peers import DraftCall, Peers, RemoteDraft
from slipstream.sampling.params import Proposal
from slipstream.session_messages import MAX_KEPT_BYTES, DraftReady, DraftStart, DraftTokens
from slipstream.speculation.protocol import JoinPoint, LineAction
from slipstream.video.messages import SampledVideo

# -- proposals --------------------------------------------------------------------------------------------------------

# What a draft's tokens were drawn from, kept until the window that judges them leaves (rule "rejection").

SUM_TOLERANCE = 1e-3


class Proposals:
    """The proposals of the current line by absolute output position.

    Where they are required, each is checked here: what the target could not judge must not reach it, as a draft may
    cost a caption speed only.
    """

    def __init__(self, *, required: bool, vocab_size: int) -> None:
        self._required = required
        self._vocab_size = vocab_size
        self._by_position: dict[int, Proposal] = {}

    def check(self, message: DraftTokens) -> None:
        """Raises `DraftFault` for proposals that do not fit their tokens."""
        tokens, proposals = message.token_ids, message.proposals
        if len(proposals) != len(tokens) and (proposals or self._required):
            raise DraftFault(f"the draft sent {len(tokens)} tokens with {len(proposals)} proposals")
        if self._required:
            for token, proposal in zip(tokens, proposals, strict=True):
                self._check(token, proposal)

    def remember(self, message: DraftTokens) -> None:
        """These tokens, which were checked, are the line's next."""
        if self._required:
            self._by_position.update(enumerate(message.proposals, message.position))

    def forget(self) -> None:
        """The line ended."""
        self._by_position.clear()

    def take(self, position: int, window: Sequence[int]) -> list[Proposal]:
        """Those of a window that begins at `position`; empty where none are required. What lies before is forgotten."""
        if not self._required:
            return []
        end = position + len(window)
        taken = [self._by_position[index] for index in range(position, end)]
        self._by_position = {index: proposal for index, proposal in self._by_position.items() if index >= end}
        return taken

    def _check(self, token: int, proposal: Proposal) -> None:
        token_ids = np.array(proposal.token_ids, dtype=np.int64)
        probabilities = np.array(proposal.probabilities, dtype=np.float64)
        if len(token_ids) != len(probabilities):
            raise DraftFault(f"a proposal has {len(token_ids)} tokens and {len(probabilities)} probabilities")
        if token not in token_ids:
            raise DraftFault("the draft wrote a token that its own proposal does not have")
        if token_ids.max() >= self._vocab_size or len(np.unique(token_ids)) != len(token_ids):
            raise DraftFault("a proposal names a token twice, or one outside the vocabulary")
        # Written so that NaN fails, too.
        if not (np.all(probabilities > 0) and abs(probabilities.sum() - 1) <= SUM_TOLERANCE):
            raise DraftFault("the probabilities of a proposal are not positive numbers that add up to 1")


# -- what a draft says of itself --------------------------------------------------------------------------------------

CLOCK_SLACK_S = 1.0
"""How much more time a draft may claim than has passed here: messages of two machines arrive unevenly."""
SHORTEST_PASS_S = 1e-6
"""What a draft may claim of its speed: pacing divides by it."""
MAX_GUIDANCE_BYTES = 2**50
MAX_REASON_CHARS = 200


def check_pass_s(pass_s: float, since_joining_s: float) -> None:
    """Raises `DraftFault` for a pass that cannot have taken so long: less than nothing, or more than there was."""
    if not SHORTEST_PASS_S <= pass_s <= since_joining_s + CLOCK_SLACK_S:  # so that NaN fails, too
        raise DraftFault(f"the draft says that a pass took {pass_s} s")


def check_ready(ready: DraftReady, since_joining_s: float) -> None:
    """Raises `DraftFault` for figures that cannot be; they go into the summary, and into averages."""
    seconds = (ready.encode_s, ready.guidance_s, ready.prune_s, ready.prefill_s)
    if not all(0 <= each <= since_joining_s + CLOCK_SLACK_S for each in seconds):
        raise DraftFault(f"the draft says that its prefill took {' + '.join(f'{each:g}' for each in seconds)} s")
    if ready.kept_tokens > ready.video_tokens or ready.guidance_bytes > MAX_GUIDANCE_BYTES:
        share = f"{ready.kept_tokens} of {ready.video_tokens} tokens"
        raise DraftFault(f"the draft says that it kept {share}, by {ready.guidance_bytes} bytes of guidance")
    if not re.fullmatch("[0-9a-f]{0,64}", ready.kept_digest):
        raise DraftFault("the digest of the draft's tokens is none")
    if ready.kept is not None:
        _check_kept(ready.kept, ready)


def _check_kept(kept: KeptTokens, ready: DraftReady) -> None:
    is_whole = 0 < kept.num_tokens == ready.video_tokens and len(kept.bitmap) == -(-kept.num_tokens // 8)
    if not is_whole or kept.num_kept != ready.kept_tokens or kept.times_s or len(kept.bitmap) > MAX_KEPT_BYTES:
        raise DraftFault("the draft names other tokens than it says that it kept")


def plain_words(error: SlipstreamError) -> str:
    """What the client and the log are told of a draft, whose own words it may be: short and printable."""
    words = str(error)
    kept = "".join(char if char.isprintable() else "?" for char in words[:MAX_REASON_CHARS])
    return kept if len(words) <= MAX_REASON_CHARS else f"{kept} ..."


# -- draft link -------------------------------------------------------------------------------------------------------

FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.1, 5.0
STEADY_S = 10.0
"""After so long with a draft its loss counts as the first one."""
_INTERNAL = "internal error; the gateway's log has the details"


class DraftListener(Protocol):
    """What the caption does with what the draft says. None of these may block."""

    def draft_joining(self) -> JoinPoint: ...

    def draft_ready(self, num_known: int, ready: DraftReady) -> None: ...

    def draft_wrote(self, tokens: DraftTokens) -> None: ...

    def draft_lost(self, reason: str) -> None: ...

    def draft_missing(self, reason: str) -> None: ...

    @property
    def draft_owes(self) -> bool: ...


class DraftLink:
    """The draft's side of one caption. `run` it as a task; cancel it when the caption has ended."""

    def __init__(
        self,
        peers: Peers,
        make_start: Callable[[], Awaitable[DraftStart]],
        video: SampledVideo,
        listener: DraftListener,
        *,
        silence_s: float,
        timeout_s: float,
    ) -> None:
        self._peers = peers
        self._make_start = make_start
        self._video = video
        self._listener = listener
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._call: DraftCall | None = None

    def send(self, action: LineAction) -> None:
        """Tells the draft about its line."""
        assert self._call is not None, "only a draft that has joined is told"
        self._call.send(action)

    async def run(self) -> None:
        """Draft after draft, until cancelled. Whatever goes wrong here costs speed only."""
        back_off_s, clock = FIRST_BACK_OFF_S, asyncio.get_running_loop().time
        while True:
            draft, reason = await self._chosen()
            if draft is not None:
                joined_at = clock()
                reason = await self._take_part(draft)
                self._listener.draft_lost(reason)
                if clock() - joined_at > STEADY_S:
                    back_off_s = FIRST_BACK_OFF_S
            elif back_off_s == FIRST_BACK_OFF_S:
                self._listener.draft_missing(reason)
            event = "draft.missing" if draft is None else "draft.lost"
            get_logger().warning(event, reason=reason, retry_s=back_off_s)
            await asyncio.sleep(back_off_s)
            back_off_s = min(2 * back_off_s, MAX_BACK_OFF_S)

    async def _chosen(self) -> tuple[RemoteDraft | None, str]:
        """A draft, or why there is none."""
        try:
            return await self._peers.choose_draft(), ""
        except SlipstreamError as error:
            return None, plain_words(error)
        except Exception:
            get_logger().exception("draft.not_chosen")
            return None, _INTERNAL

    async def _take_part(self, draft: RemoteDraft) -> str:
        """Writes with the draft until it is lost; returns why."""
        call = None
        try:
            start = await self._make_start()
            join = self._listener.draft_joining()
            call = self._call = draft.open(start, join, self._video, timeout_s=self._timeout_s)
            async for event in call.events(self._silence_s, lambda: self._listener.draft_owes):
                if isinstance(event, DraftReady):
                    self._listener.draft_ready(len(join.committed), event)
                else:
                    self._listener.draft_wrote(event)
            raise DraftFault("the draft ended the session", FaultKind.ENDED)
        except DraftFault as fault:
            draft.faulted(fault)
            return plain_words(fault)
        except SlipstreamError as error:
            return plain_words(error)
        except Exception:
            get_logger().exception("draft.failed")
            return _INTERNAL
        finally:
            if call is not None:
                call.cancel()
