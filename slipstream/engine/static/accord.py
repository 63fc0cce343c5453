"""What the ranks that share a model settle together about its static steps; a model in one process settles it alone.

Such a step has sums over all ranks inside, so every rank has to make the same steps in the same way and to take them in
the same order. What a rank has timed, or found out about itself, decides nothing before all have been heard.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, TypeVar, cast

from torch import Tensor, nn

from slipstream.engine.static.pool import KVPool

SaidT = TypeVar("SaidT")
AgreedT = TypeVar("AgreedT")


class Accord:
    """Of a model in one process. Over several see `parallel.steps`."""

    pool_type: ClassVar[type[KVPool]] = KVPool
    """What keys and values lie in."""

    def agree(self, said: SaidT, decide: Callable[[Sequence[SaidT]], AgreedT]) -> AgreedT:
        """What rank 0 makes of the words of all ranks, by rank. They call this at the same point. All of it is JSON."""
        return decide([said])

    def together(self) -> AbstractContextManager[None]:
        """Around what needs the other ranks: there an error of one leaves the others waiting, so it ends all."""
        return nullcontext()

    def embed(self, table: nn.Embedding, token_ids: Tensor) -> Tensor:
        """Rank 0's embeddings of its tokens, [rows, hidden], at every rank."""
        return cast(Tensor, table(token_ids))


def rank_0s(said: Sequence[SaidT]) -> SaidT:
    """For `Accord.agree`: what one rank alone can say, as a clock does."""
    return said[0]


def first_complaint(said: Sequence[str]) -> str:
    """For `Accord.agree`: empty when nobody has one."""
    return next(filter(None, said), "")
