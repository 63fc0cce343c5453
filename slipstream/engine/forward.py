"""The layer loop over upstream decoder layers, and one session's place in it: `Prefill` while the prompt runs,
`DecodeState` afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from slipstream.device_copy import to_device
from slipstream.engine.attention import Attend, Kernel, attend_segments, heads_share_keys
from slipstream.engine.kv_cache import KVCache, round_up
from slipstream.engine.row_chunks import in_chunks, prefill_bytes, whole_rows
from slipstream.engine.segments import Observer, Rows, Segment, additions_of, kept_rows, pack, take
from slipstream.engine.static.pool import KVPool, PooledCache
from slipstream.engine.thread import finish_work
from slipstream.speculation.protocol import TokenTree


class Decoder(Protocol):
    """What the loop needs of an upstream text model: Qwen2, Qwen2.5-VL's and Llama's have it."""

    layers: nn.ModuleList
    config: Any
    norm: nn.Module
    rotary_emb: nn.Module
    embed_tokens: nn.Embedding


Note = Callable[[Tensor], int | None]
"""Is told the logits [sessions, vocab] that a token is chosen by, which the next ones overwrite. It must not wait,
unless it returns the token itself, which it may for one session whose nodes are read one by one (`most_nodes`)."""


class ForwardPass:
    """One packed pass that may stop after any layer and go on later.

    Until `finish`, the caches keep their old length, so an abandoned pass leaves no trace.

    Args:
        first_layer: where the pass begins; `Rows.hidden` are then the states that go into that layer.
    """

    def __init__(self, runner: "Runner", batch: Sequence[Rows], first_layer: int = 0) -> None:
        packed = pack(batch)
        self._runner = runner
        self._hidden, self._position_ids, self._segments = packed.hidden, packed.position_ids, packed.segments
        self._num_tokens = [segment.length for segment in self._segments]
        self._rotary = runner.decoder.rotary_emb(self._hidden, self._position_ids)
        self._additions = [one for one in additions_of(batch) if first_layer < len(one.features)]
        self._next_layer = first_layer

    @property
    def next_layer(self) -> int:
        """Number of the layer that runs next: so many have run of a pass that begins with the first."""
        return self._next_layer

    @property
    def hidden(self) -> Tensor:
        """The rows' current states, [rows, hidden]: the embeddings before any layer."""
        return self._hidden[0]

    def run_layers(self, until_layer: int) -> None:
        """Run layers up to, not including, `until_layer`; does nothing for those already run."""
        attend = self._runner.attention(self._segments)
        with torch.inference_mode():
            for layer in self._runner.layers(self._hidden.shape[1])[self._next_layer : until_layer]:
                self._hidden = call_layer(layer, self._hidden, self._position_ids, self._rotary, attend)
                self._add_features()
                self._next_layer += 1

    def observe(self, index: int, observer: Observer) -> None:
        """Have `observer` see the rows of the session at that place of the batch in the layers that follow."""
        self._segments[index].observer = observer

    def keep_rows(self, keep: Tensor) -> None:
        """Go on with the rows `keep` alone (int64, ascending), at the positions they have.

        The layers that have run keep all of theirs; lengths count the rows that are gone, too. For one session's first
        pass only.
        """
        (segment,) = self._segments
        assert segment.past == 0, "rows are left out of a prompt's first pass only"
        segment.cache.leave_out(segment.length - len(keep), from_layer=self._next_layer)
        self._segments = [replace(segment, length=len(keep))]
        self._additions = [additions.among(keep) for additions in self._additions]
        with torch.inference_mode():
            kept = to_device(keep, self._hidden.device)
            self._hidden = self._hidden.index_select(1, kept)
            self._position_ids = self._position_ids.index_select(-1, kept)
            self._rotary = self._runner.decoder.rotary_emb(self._hidden, self._position_ids)

    def finish(self, *, last_row_only: bool = False) -> list[Tensor]:
        """Run what is left, count the rows as past, and return logits.

        Returns:
            One fp32 tensor per segment: [n, vocab], or [1, vocab] with `last_row_only`.
        """
        self.run_layers(self._runner.num_layers)
        return self._conclude(last_row_only)

    def _conclude(self, last_row_only: bool) -> list[Tensor]:
        """See `finish`; all layers have run."""
        with torch.inference_mode():
            hidden = self.hidden
            if last_row_only:
                hidden = torch.cat([hidden[segment.rows][-1:] for segment in self._segments])
            logits = self._runner.logits(hidden)
        for segment, num_tokens in zip(self._segments, self._num_tokens, strict=True):
            segment.cache.advance(num_tokens)
        lengths = [1 if last_row_only else segment.length for segment in self._segments]
        return list(logits.split(lengths))

    def _add_features(self) -> None:
        """What belongs behind the layer that has just run. Behind the last one the features are let go: of a long video
        they take as much as several layers' states."""
        for additions in self._additions:
            features = additions.features[self._next_layer]
            self._hidden[0].index_add_(0, to_device(additions.rows, features.device), features)
        self._additions = [one for one in self._additions if self._next_layer + 1 < len(one.features)]


class Runner:
    """A text model ready to run packed passes.

    Args:
        decoder: the upstream text model, loaded with our attention implementation.
        lm_head: [hidden] -> [vocab].
        kernel: the attention kernel; also decides the layout of caches.
        fixed_shapes: attention reads caches in whole granules, see `KVCache`.
    """

    recurs = False
    """Some layers have a state of all tokens in place of keys and values, which cannot be cut back anywhere."""

    def __init__(self, decoder: Decoder, lm_head: nn.Module, kernel: Kernel, *, fixed_shapes: bool = False) -> None:
        self.decoder = decoder
        self.lm_head = lm_head
        self.kernel = kernel
        self.fixed_shapes = fixed_shapes
        self.pool: KVPool | None = None
        """Where new caches lie, see `StaticSteps`; None: each in memory of its own."""
        self.num_layers = len(decoder.layers)
        self.whole_rows = whole_rows(decoder.config, decoder.embed_tokens.weight.element_size())
        self._layers = list(decoder.layers)
        self._in_chunks = [in_chunks(layer, self.whole_rows) for layer in self._layers]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        attentions = [cast(Any, layer).self_attn for layer in self.decoder.layers if hasattr(layer, "self_attn")]
        width = sum(attention.k_proj.weight.shape[0] + attention.v_proj.weight.shape[0] for attention in attentions)
        return int(width) * self.decoder.embed_tokens.weight.element_size()

    def attention(self, segments: Sequence[Segment]) -> Attend:
        """What a pass over these does in each layer."""
        return partial(attend_segments, segments, self.kernel)

    def cache_bytes(self, num_tokens: int) -> int:
        """Bytes of a session's cache with room for so many tokens."""
        return self.kv_bytes_per_token * round_up(num_tokens)

    def layers(self, num_rows: int) -> Sequence[nn.Module]:
        """For a pass of so many rows: more than `whole_rows` go through their parts in chunks."""
        return self._layers if num_rows <= self.whole_rows else self._in_chunks

    def room(self, free_bytes: int) -> int:
        """See `VideoLM.room`."""
        return free_bytes

    def prefill_bytes(self, num_tokens: int) -> int:
        """Bytes that the pass over a prompt of so many tokens needs at its peak, keys and values apart."""
        weight = self.decoder.embed_tokens.weight
        share_keys = heads_share_keys(weight.device, weight.dtype)
        of_model = self.decoder.config, self._layers, weight.element_size()
        return prefill_bytes(*of_model, num_tokens, share_keys=share_keys)

    def new_cache(self, capacity: int, num_text: int = 0) -> KVCache:
        """An empty cache for one session, with room for `capacity` tokens. `num_text`: of its prompt, those behind the
        video; a copy of what is before them may be wanted."""
        if self.pool is not None:
            return PooledCache(self.num_layers, capacity=capacity, pool=self.pool, whole_granules=self.fixed_shapes)
        return KVCache(self.num_layers, capacity=capacity, **self.cache_layout)

    @property
    def cache_layout(self) -> dict[str, Any]:
        """How a `KVCache` is laid out for the kernel."""
        layouts = {"key_layout": self.kernel.key_layout, "value_layout": self.kernel.value_layout}
        return layouts | {"whole_granules": self.fixed_shapes}

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """Input embeddings of text tokens, [n, hidden]."""
        table = self.decoder.embed_tokens
        uploaded = to_device(torch.tensor(token_ids, dtype=torch.int64), table.weight.device)
        with torch.inference_mode():
            return cast(Tensor, table(uploaded))

    def start(self, batch: Sequence[Rows]) -> ForwardPass:
        """Make room in every cache and begin a packed pass; no layer has run yet."""
        with torch.inference_mode():
            return ForwardPass(self, batch)

    def run_through(self, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """All layers and the norm behind them, [1, rows, hidden] -> what the head takes, [rows, hidden]."""
        rotary = self.decoder.rotary_emb(hidden, position_ids)
        for layer in self._layers:
            hidden = call_layer(layer, hidden, position_ids, rotary, attend)
        return cast(Tensor, self.decoder.norm(hidden[0]))

    def logits(self, hidden: Tensor) -> Tensor:
        """Behind the last layer: [rows, hidden] -> fp32 [rows, vocab]."""
        return cast(Tensor, self.lm_head(self.decoder.norm(hidden)).float())

    def run(self, batch: Sequence[Rows]) -> list[Tensor]:
        """A packed pass as a whole; see `ForwardPass.finish`."""
        return self.start(batch).finish()

    def write_ahead(
        self, cache: KVCache, token: int, first_position: int, num_tokens: int, note: Note | None
    ) -> list[int] | None:
        """Greedy tokens of a session behind `token`, whose position is given: at least one and at most `num_tokens`, of
        which all but the last are in the cache then, too; the last is -1 where logits are not finite. They are
        proposals: they may round otherwise than a pass does. `note` is told each one's logits, and may choose another.
        None: this takes passes here."""
        return None

    @property
    def most_nodes(self) -> int:
        """Up to so many rows, of one session or of several, are read sooner one by one than in one pass; 0: never."""
        return 0

    def read_nodes(self, cache: KVCache, tree: TokenTree, first_position: int) -> Tensor:
        """The logits [nodes, vocab] behind the new nodes of a tree, whose roots have that position, and which are in
        the cache then. They may round otherwise than a pass does."""
        raise AssertionError("a pass reads nodes here")


def call_layer(layer: nn.Module, hidden: Tensor, position_ids: Tensor, rotary: Any, attend: Attend) -> Tensor:
    """One upstream decoder layer: [1, rows, hidden] -> the same."""
    places = {"position_ids": position_ids, "position_embeddings": rotary}
    return cast(Tensor, layer(hidden, attention_mask=None, **places, attend=attend))


# -- sessions ---------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, eq=False)
class PromptRows:
    """A prompt before any layer has run."""

    rows: Rows
    """All of them, with an empty cache that has room for them."""
    state: DecodeState
    """What decoding goes on from when all has run."""
    video: Tensor
    """The video's rows, int64, ascending."""
    num_text_tokens: int
    """Behind the video."""


Begun = Sequence[tuple[DecodeState, int]]
"""Sessions, and the token that each of them goes on behind."""


class Prefill:
    """The pass over one prompt, run in blocks of layers so that other work fits in between."""

    def __init__(
        self,
        forward: ForwardPass,
        state: DecodeState,
        *,
        video: Tensor,
        num_text_tokens: int,
        observer: Observer | None = None,
    ) -> None:
        self._forward = forward
        self._state = state
        self._video = video
        """The video's rows in this pass, int64, ascending; none where it resumes behind them."""
        self._num_text_tokens = num_text_tokens
        self._observer = observer

    @property
    def next_layer(self) -> int:
        """Number of the layer that runs next: so many have run of a pass that begins with the first."""
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
        return take(self._forward.hidden, self._video)

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
        if len(keep) == len(self._video):  # none of none, too
            return
        if not len(self._video):
            raise ValueError("the pass resumes behind the video, whose tokens are in the cache for good")
        rows, self._video = kept_rows(keep, self._video, self._forward.hidden.shape[0])
        self._forward.keep_rows(rows)
        if self._observer is not None:
            self._observer.place_video(self._video)

    def finish(self) -> tuple[DecodeState, Tensor]:
        """Run the remaining layers.

        Returns:
            The state to decode from, and the fp32 logits of the first answer token, [vocab].
        """
        (logits,) = self._forward.finish(last_row_only=True)
        finish_work(logits.device)
        return self._state, logits[0]
