"""One session's place in a model: `Prefill` while the prompt runs, `DecodeState` afterwards."""

from torch import Tensor

from slipstream.models.kv_cache import KVCache
from slipstream.models.runner import ForwardPass


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
        """Run layers up to, not including, `until_layer`; those already run are skipped."""
        self._forward.run_layers(until_layer)

    def video_states(self) -> Tensor:
        """Current states of the kept video tokens, [m, hidden]: their embeddings before any layer has run."""
        return self._forward.hidden[self._video]

    def text_states(self) -> Tensor:
        """Current states of the text tokens after the video, [n, hidden]."""
        hidden = self._forward.hidden
        return hidden[hidden.shape[0] - self._num_text_tokens :]

    def finish(self) -> tuple[DecodeState, Tensor]:
        """Run the remaining layers.

        Returns:
            The state to decode from, and the fp32 logits of the first answer token, [vocab].
        """
        (logits,) = self._forward.finish(last_row_only=True)
        return self._state, logits[0]
