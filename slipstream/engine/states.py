"""One session's place in a model: `Prefill` while the prompt runs, `DecodeState` afterwards."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from slipstream.engine.forward import ForwardPass
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.thread import finish_work


class DecodeState:
    """The cache of one session and where it stands. Counts are of tokens in the cache: kept video, text and answer."""

    def __init__(self, cache: KVCache, *, num_prompt_tokens: int, position_offset: int) -> None:
        self.cache = cache
        self.num_prompt_tokens = num_prompt_tokens
        self._position_offset = position_offset

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache."""
        return self.cache.length

    @property
    def next_position(self) -> int:
        """Position id of the next token; after pruning it may exceed `num_tokens`."""
        return self.cache.length + self._position_offset

    @property
    def kv_bytes(self) -> int:
        """Bytes held by keys and values."""
        return self.cache.num_bytes

    def rollback(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens in total and forget the rest. O(1).

        Raises:
            ValueError: fewer than the prompt, or more than there are.
        """
        if not self.num_prompt_tokens <= num_tokens <= self.num_tokens:
            raise ValueError(f"can keep {self.num_prompt_tokens} to {self.num_tokens} tokens, not {num_tokens}")
        self.cache.rollback(num_tokens)

    def keep_path(self, num_before: int, rows: Sequence[int]) -> None:
        """Of a tree behind the first `num_before` tokens, keep one path of its rows, as if they had been a chain.

        Costs a copy of those few rows. Keys stay valid, since a row's position is its depth in the tree.

        Args:
            rows: indices of the tree's nodes from a root downwards, ascending; none is as good as a rollback.

        Raises:
            ValueError: a part of the prompt would go, or the rows are no ascending indices of what there is.
        """
        if not self.num_prompt_tokens <= num_before <= self.num_tokens:
            raise ValueError(f"can keep {self.num_prompt_tokens} to {self.num_tokens} tokens, not {num_before}")
        bounded = (-1, *rows, self.num_tokens - num_before)
        if any(row >= following for row, following in pairwise(bounded)):
            raise ValueError(f"{list(rows)} are no ascending rows of the {self.num_tokens - num_before} new ones")
        self.cache.keep(num_before, rows)

    def close(self) -> None:
        """Free the cache; the state is of no use afterwards."""
        self.cache.clear()


class Prefill:
    """The pass over one prompt, run in blocks of layers so that other work fits in between."""

    def __init__(self, forward: ForwardPass, state: DecodeState, *, video: slice, num_text_tokens: int) -> None:
        self._forward = forward
        self._state = state
        self._video = video
        self._num_text_tokens = num_text_tokens

    @property
    def next_layer(self) -> int:
        """Layers run so far."""
        return self._forward.next_layer

    @property
    def cache(self) -> KVCache:
        """Holds the keys and values so far. Clear it when the prefill is abandoned; the rest goes with this object."""
        return self._state.cache

    def run_layers(self, until_layer: int) -> None:
        """Run layers up to, not including, `until_layer`; those already run are skipped.

        Returns when the device is done, so that work of other sessions, handed in meanwhile, does not wait behind all
        of the prompt.
        """
        self._forward.run_layers(until_layer)
        finish_work(self._forward.hidden.device)

    def video_states(self) -> Tensor:
        """Current states of the kept video tokens, [m, hidden]: their embeddings before any layer has run."""
        return self._forward.hidden[self._video]

    def text_states(self) -> Tensor:
        """Current states of the text tokens after the video, [n, hidden]."""
        hidden = self._forward.hidden
        return hidden[hidden.shape[0] - self._num_text_tokens :]

    def keep_video(self, keep: Tensor) -> None:
        """Drop the other video tokens here: the layers that have not run yet never see them (FastV, PyramidDrop).

        What is kept keeps its position. May be called again after later layers. The state still counts the dropped
        tokens, which the first layers hold. It answers less well than the model would: do not share its cache.

        Args:
            keep: indices among the video tokens that are still there, as `video_states` has them; int64, ascending.

        Raises:
            ValueError: the video is not part of this pass, which resumes behind it.
        """
        num_rows, num_video = self._forward.hidden.shape[0], self._video.stop - self._video.start
        if self._video.stop == 0:
            raise ValueError("the pass resumes behind the video, whose tokens are in the cache for good")
        if len(keep) == num_video:
            return
        self._forward.keep_rows(kept_rows(keep, self._video, num_rows))
        self._video = slice(self._video.start, self._video.start + len(keep))

    def finish(self) -> tuple[DecodeState, Tensor]:
        """Run the remaining layers.

        Returns:
            The state to decode from, and the fp32 logits of the first answer token, [vocab].
        """
        (logits,) = self._forward.finish(last_row_only=True)
        finish_work(logits.device)
        return self._state, logits[0]


def kept_rows(keep: Tensor, video: slice, num_rows: int) -> Tensor:
    """The rows of a prompt that survive pruning, int64 ascending.

    Args:
        keep: which rows of `video` survive, ascending from 0; all others of the prompt do.
    """
    keep = keep.to("cpu", torch.int64)
    if len(keep) > 0:
        assert int(keep[0]) >= 0, "keep has negative indices"
        assert int(keep[-1]) < video.stop - video.start, "keep points behind the video"
        assert bool((keep.diff() > 0).all()), "keep must be ascending"
    return torch.cat([torch.arange(video.start), keep + video.start, torch.arange(video.stop, num_rows)])
