"""What a draft's tokens were drawn from, kept until the window that judges them leaves (rule "rejection")."""

from collections.abc import Sequence

import numpy as np

from slipstream.errors import DraftFault
from slipstream.rpc.v1 import common_pb2, draft_pb2

SUM_TOLERANCE = 1e-3


class Proposals:
    """The proposals of the current line by absolute output position.

    Where they are required, each is checked here: what the target could not judge must not reach it, as a draft may
    cost a caption speed only.
    """

    def __init__(self, *, required: bool, vocab_size: int) -> None:
        self._required = required
        self._vocab_size = vocab_size
        self._by_position: dict[int, common_pb2.Proposal] = {}

    def check(self, message: draft_pb2.DraftTokens) -> None:
        """Raises `DraftFault` for proposals that do not fit their tokens."""
        tokens, proposals = message.token_ids, message.proposals
        if len(proposals) != len(tokens) and (proposals or self._required):
            raise DraftFault(f"the draft sent {len(tokens)} tokens with {len(proposals)} proposals")
        if self._required:
            for token, proposal in zip(tokens, proposals, strict=True):
                self._check(token, proposal)

    def remember(self, message: draft_pb2.DraftTokens) -> None:
        """These tokens, which were checked, are the line's next."""
        if self._required:
            self._by_position.update(enumerate(message.proposals, message.position))

    def forget(self) -> None:
        """The line ended."""
        self._by_position.clear()

    def take(self, position: int, window: Sequence[int]) -> list[common_pb2.Proposal]:
        """Those of a window that begins at `position`; empty where none are required. What lies before is forgotten."""
        if not self._required:
            return []
        end = position + len(window)
        taken = [self._by_position[index] for index in range(position, end)]
        self._by_position = {index: proposal for index, proposal in self._by_position.items() if index >= end}
        return taken

    def _check(self, token: int, proposal: common_pb2.Proposal) -> None:
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
