"""A draft service that is bad in one way, for benchmarks: `python -m bench.guarantees.bad_draft --vice nonsense ...`.

The service is the real one, with the real model; only what the model answers, or when, is tampered with.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
import torch

from slipstream.config import between, one_of, option
from slipstream.engine.forward import Begun, Note
from slipstream.engine.row_prefill import Ride
from slipstream.engine.segments import Window
from slipstream.engine.video_lm import DecodeState, VideoLM
from slipstream.rpc.server import Lifecycle, run_service
from slipstream.services.draft.__main__ import SERVES, DraftConfig
from slipstream.services.draft.__main__ import setup as set_up_draft

VICES = ("none", "nonsense", "slow", "turns bad", "weak", "weak and slow")
RIGHT_OF_TEN = 3
"""Tokens of a weak draft that are its own choice."""


@dataclass(frozen=True, kw_only=True)
class BadDraftConfig(DraftConfig):
    vice: str = option("what is wrong with it", check=one_of(*VICES))
    turns_at: int = option("output tokens after which a draft that turns bad does", default=80, check=between(0, 10**6))
    slow_pass_ms: float = option("what a pass of a slow draft takes on top", default=40.0, check=between(0, 10**5))


class BadModel(VideoLM):
    """A model that answers as another one does, whose parts it shares, but for its passes."""

    def __init__(self, model: VideoLM, config: BadDraftConfig) -> None:
        vars(self).update(vars(model))
        self._config = config

    def step(self, batch: Sequence[tuple[DecodeState, Window]], ride: Ride | None = None) -> list[torch.Tensor]:
        """Logits of every session; the likeliest token becomes the one after it where the draft is bad."""
        if "slow" in self._config.vice:
            time.sleep(self._config.slow_pass_ms / 1000)  # on the model's thread, as a slow model would take it
        logits = super().step(batch, ride)
        return [
            rows.roll(1, dims=-1) if self._is_bad(state) else rows
            for (state, _), rows in zip(batch, logits, strict=True)
        ]

    def write_ahead(self, batch: Begun, num_tokens: int, note: Note | None = None) -> None:
        """Nothing is written past `step`, which is what is bad."""

    @property
    def most_nodes(self) -> int:
        """Nor is anything read otherwise."""
        return 0

    def _is_bad(self, state: DecodeState) -> bool:
        num_output = state.num_tokens - state.num_prompt_tokens
        match self._config.vice:
            case "turns bad":
                return num_output > self._config.turns_at
            case "weak" | "weak and slow":
                return num_output * 7 % 10 >= RIGHT_OF_TEN
            case vice:
                return vice == "nonsense"


async def setup(server: grpc.aio.Server, config: BadDraftConfig, lifecycle: Lifecycle) -> Callable[[], Awaitable[None]]:
    return await set_up_draft(server, config, lifecycle, lambda model: BadModel(model, config))


if __name__ == "__main__":
    run_service("draft", BadDraftConfig, setup, SERVES)
