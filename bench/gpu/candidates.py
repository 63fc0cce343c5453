"""What the engine does not have (yet), to be measured beside it: decoding by a CUDA graph.

Decoding writes one token at a time with fixed shapes, so that a CUDA graph can replay the pass without the host
launching anything. A graph repeats the same kernels on the same addresses. Therefore the cache has its full room from
the start, rows are written where a tensor says, and a mask hides what is not written yet. All else is the engine's
own: runner, layers, attention call. Without CUDA the same step runs eagerly, for tests.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream.engine.attention import SdpaKernel
from slipstream.engine.forward import DecodeState, Rows, Runner
from slipstream.engine.kv_cache import KVCache, Layout, round_up
from slipstream.engine.segments import Segment

STATIC_ATTENTIONS = ("matmul", "sdpa")


class StaticCache(KVCache):
    """A copy of a cache whose buffers never move. `begin` opens each pass; `advance` moves a number on the device."""

    def __init__(self, source: KVCache, headroom: int) -> None:
        num_tokens = source.length
        capacity = round_up(num_tokens + headroom)
        layout = Layout.HEAD_TOKEN_DIM
        super().__init__(source.num_layers, capacity=capacity, key_layout=layout, value_layout=layout)
        self._length = num_tokens
        self._static = [_roomy(source, layer, capacity) for layer in range(source.num_layers)]
        like = self._static[0][0]
        self.position = torch.tensor([num_tokens], device=like.device)
        self._places = torch.arange(capacity, device=like.device)
        self._hidden = torch.full((capacity,), float("-inf"), dtype=like.dtype, device=like.device)
        self._shown = torch.zeros(capacity, dtype=like.dtype, device=like.device)
        self.mask = self._hidden[None]

    def begin(self) -> None:
        """Makes the mask of the next row, [1, capacity]."""
        self.mask = torch.where(self._places <= self.position, self._shown, self._hidden)[None]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores one row and returns the whole buffers."""
        held_keys, held_values = self._static[layer]
        held_keys.index_copy_(1, self.position, keys)
        held_values.index_copy_(1, self.position, values)
        return held_keys, held_values

    def advance(self, num_tokens: int) -> None:
        """Moves the place of the next row; the length that the host sees stays, as it decides no shape."""
        self.position.add_(num_tokens)


class StaticKernel(SdpaKernel):
    """Attention of one row over all of a `StaticCache`, masked."""

    def __init__(self, attention: str) -> None:
        assert attention in STATIC_ATTENTIONS, "an unknown way to attend"
        self._by_matmul = attention == "matmul"

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, segment: Segment, scale: float) -> Tensor:
        cache = segment.cache
        assert isinstance(cache, StaticCache) and query.shape[1] == 1, "one row over a static cache"
        folded = query.reshape(keys.shape[0], -1, query.shape[-1])
        if self._by_matmul:
            scores = torch.bmm(folded * scale, keys.transpose(1, 2)).float() + cache.mask
            output = torch.bmm(scores.softmax(dim=-1).to(values.dtype), values)
        else:
            mask = cache.mask.expand(folded.shape[1], -1)
            output = scaled_dot_product_attention(folded[None], keys[None], values[None], attn_mask=mask, scale=scale)
        return output.reshape(query.shape)


class StaticDecoder:
    """Writes greedily behind a state, which it copies.

    Args:
        runner: one with a `StaticKernel`.
        state: where to begin; nothing of it changes.
        first_token: what the first pass takes in.
        headroom: most tokens that will be written, those of the warm-up included.
    """

    def __init__(self, runner: Runner, state: DecodeState, first_token: int, headroom: int = 512) -> None:
        self._runner = runner
        with torch.inference_mode():
            self._cache = StaticCache(state.cache, headroom)
            device = self._cache.position.device
            self._first = torch.tensor([first_token], device=device)
            self._token = self._first.clone()
            self._position_id = torch.tensor([state.next_position], device=device)
        self._start = state.num_tokens, state.next_position
        self._graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0)
        """Those behind the last step's token, [1, vocab]; a graph writes all of them to the same place."""

    def rewind(self) -> None:
        num_tokens, next_position = self._start
        with torch.inference_mode():
            self._cache.position.fill_(num_tokens)
            self._position_id.fill_(next_position)
            self._token.copy_(self._first)

    def capture(self) -> None:
        """Records the pass. On CUDA only."""
        device = self._token.device
        with torch.inference_mode(), torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._pass()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._pass()
        self._graph = graph
        self.rewind()

    def step(self) -> None:
        """Writes one token; the host need not wait for it."""
        if self._graph is not None:
            self._graph.replay()
            return
        with torch.inference_mode():
            self._pass()

    def read(self) -> int:
        """The last token. Waits for it."""
        return int(self._token)

    def _pass(self) -> None:
        self._cache.begin()
        hidden = self._runner.embed(self._token)
        (self.logits,) = self._runner.start([Rows(self._cache, hidden, self._position_id)]).finish()
        self._token.copy_(self.logits.argmax(dim=-1))
        self._position_id.add_(1)


def _roomy(source: KVCache, layer: int, capacity: int) -> tuple[Tensor, Tensor]:
    """A layer's keys and values in buffers of [kv_heads, capacity, head_dim], zeros behind them."""
    roomy = []
    for rows in source.read(layer):
        kv_heads, num_rows, head_dim = rows.shape
        buffer = torch.zeros(kv_heads, capacity, head_dim, dtype=rows.dtype, device=rows.device)
        buffer[:, :num_rows] = rows
        roomy.append(buffer)
    return roomy[0], roomy[1]
