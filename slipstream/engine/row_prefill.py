"""A prompt that runs in chunks of rows, which the passes of other sessions may carry along.

`Prefill` has all rows run through one layer after the other, so a pass that decodes has nothing to share with it. Here
some rows run through many layers: those that a decoding pass reads the weights of anyway (chunked prefills, as in
arXiv 2308.16369 and 2403.02310). Layers 1 to L and those behind L are two stages, each with its own rows done, so that
guidance can leave as soon as all rows have run through the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.engine.forward import DecodeState, ForwardPass, PromptRows, Runner
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.ride_plan import RideCounts
from slipstream.engine.segments import Rows, take
from slipstream.engine.thread import finish_work


class RowPrefill:
    """The pass over one prompt. `guidance_layer` is L."""

    def __init__(self, runner: Runner, prompt: PromptRows, guidance_layer: int) -> None:
        assert prompt.rows.cache.length == 0, "chunks follow one another from the beginning of a cache"
        self._runner = runner
        self._rows = prompt.rows
        self._prompt = prompt
        self._layers = (0, guidance_layer, runner.num_layers)
        self._behind_guidance: Tensor | None = None
        """States behind layer L of the rows that have run so far."""
        self._num_done = [0, 0]
        self._last: Tensor | None = None
        """State of the last row behind all layers, [1, hidden]."""

    @property
    def cache(self) -> KVCache:
        """Holds the keys and values so far. Clear it when the prefill is abandoned; the rest goes with this object."""
        return self._prompt.state.cache

    @property
    def num_rows(self) -> int:
        """Of the prompt."""
        return self._rows.hidden.shape[0]

    @property
    def num_done(self) -> RideCounts:
        """Rows that have run through the layers of each stage."""
        return RideCounts(*self._num_done)

    @property
    def work(self) -> int:
        """Of all its rows, see `work_of`."""
        return self.num_rows * self._runner.num_layers

    @property
    def share_done(self) -> float:
        """Of the work."""
        return sum(self.work_of(self.num_done)) / self.work

    @property
    def is_done(self) -> bool:
        """Every row has run through every layer."""
        return self._num_done[-1] == self.num_rows

    def states(self, stage: int) -> Tensor:
        """What goes into the layers of a stage, [rows, hidden]: the embeddings, or the states behind layer L once all
        rows have run through the first stage."""
        if stage == 0:
            return self._rows.hidden
        assert self._behind_guidance is not None and self._num_done[0] == self.num_rows, "layer L has not run"
        return self._behind_guidance

    def video_states(self, stage: int) -> Tensor:
        """Of `states` those of the video's tokens, [m, hidden]."""
        return take(self.states(stage), self._prompt.video)

    def text_states(self, stage: int) -> Tensor:
        """Of `states` those of the text behind the video, [n, hidden]."""
        return self.states(stage)[self.num_rows - self._prompt.num_text_tokens :]

    def work_of(self, counts: RideCounts) -> tuple[int, int]:
        """Of so many rows in each stage: a row in a layer counts 1."""
        before, behind = (until - first for first, until in pairwise(self._layers))
        return counts.first * before, counts.second * behind

    def run_alone(self, counts: RideCounts) -> None:
        """The next rows without a pass that decodes. Returns when the device is done."""
        self.run_along([], counts)
        finish_work(self._rows.hidden.device)

    def run_along(self, batch: Sequence[Rows], counts: RideCounts) -> list[Tensor]:
        """One pass over the new rows of other sessions, which carries the prompt's next rows.

        What was done stays done when a later part of the pass fails; the other sessions are then as before.

        Args:
            counts: of the prompt's rows; rows that run through the first stage here may run through the second, too.

        Returns:
            Of each session in the batch the fp32 logits of its rows, [n, vocab].
        """
        lengths = [rows.hidden.shape[0] for rows in batch]
        hidden = [rows.hidden for rows in batch]
        with torch.inference_mode():
            for stage, count in enumerate((counts.first, counts.second)):
                hidden = self._run_stage(
                    stage, count, [replace(r, hidden=h) for r, h in zip(batch, hidden, strict=True)]
                )
            if not batch:
                return []
            logits = self._runner.logits(torch.cat(hidden))
        for rows, length in zip(batch, lengths, strict=True):
            rows.cache.advance(length)
        return list(logits.split(lengths))

    def finish(self) -> tuple[DecodeState, Tensor]:
        """See `Prefill.finish`; all rows have run."""
        assert self._last is not None and self.is_done, "rows are left to run"
        with torch.inference_mode():
            logits = self._runner.logits(self._last)
        self.cache.advance(self.num_rows)
        finish_work(logits.device)
        return self._prompt.state, logits[0]

    def _run_stage(self, stage: int, count: int, batch: Sequence[Rows]) -> list[Tensor]:
        """The layers of one stage over the rows of others, whose states are returned, and the prompt's next ones."""
        packed = [*batch, self._chunk(stage, count)] if count else list(batch)
        if not packed:
            return []
        forward = ForwardPass(self._runner, packed, self._layers[stage])
        forward.run_layers(self._layers[stage + 1])
        found = list(forward.hidden.split([rows.hidden.shape[0] for rows in packed]))
        if count:
            self._put(stage, found.pop())
        return found

    def _chunk(self, stage: int, count: int) -> Rows:
        first = self._num_done[stage]
        states = self._rows.hidden if stage == 0 else self._behind_guidance
        assert states is not None and first + count <= (self.num_rows, self._num_done[0])[stage], "rows that are there"
        chunk = slice(first, first + count)
        additions = self._rows.additions
        return replace(
            self._rows,
            hidden=states[chunk],
            positions=self._rows.positions[..., chunk],
            ahead=first,
            additions=additions.among(torch.arange(first, first + count)) if additions is not None else None,
        )

    def _put(self, stage: int, states: Tensor) -> None:
        """The chunk's states behind the stage's layers."""
        first = self._num_done[stage]
        self._num_done[stage] += len(states)
        if stage == 0:
            if self._behind_guidance is None:
                self._behind_guidance = torch.empty_like(self._rows.hidden)
            self._behind_guidance[first : first + len(states)] = states
        elif self.is_done:
            self._last = states[-1:].clone()


@dataclass(frozen=True)
class Ride:
    """What a pass carries along."""

    prompt: RowPrefill
    counts: RideCounts

    def run(self, batch: Sequence[Rows]) -> list[Tensor]:
        """See `RowPrefill.run_along`."""
        return self.prompt.run_along(batch, self.counts)
