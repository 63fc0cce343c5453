"""A session's own model as its draft: a copy of its cache with a few of the video's rows (Sparse-to-Dense, 3.2)."""

from collections.abc import Sequence

from slipstream.engine.forward import DecodeState
from slipstream.engine.local_drafter import Drafting, DraftingSession, LocalDrafter
from slipstream.engine.text_attention import TextAttention
from slipstream.families.adapter import PromptPlan


class SparseDrafter(LocalDrafter):
    """Drafts token by token from the sparse cache, by the session's own sampling rule."""

    needs_attention = True

    @staticmethod
    def max_cached_tokens(plan: PromptPlan, num_kept: int, max_new_tokens: int) -> int:
        return plan.num_tokens - plan.num_video_tokens + min(num_kept, plan.num_video_tokens) + max_new_tokens

    def __init__(self, session: DraftingSession) -> None:
        assert session.attention is not None, "recorded while the prompt ran"
        self._dense = session.state
        self._sampler = session.sampler
        self.state = SparseState(session.state, session.attention, session.num_kept, headroom=session.headroom)

    def draft(self, committed: Sequence[int], num_tokens: int) -> Drafting:
        drafted: list[int] = []
        while len(drafted) < num_tokens:
            last_token = drafted[-1] if drafted else committed[-1]
            logits = yield self.state, (last_token,)
            _, token = self._sampler.judge(logits, [*committed, *drafted], ())
            drafted.append(token)
        return drafted

    def on_commit(self) -> None:
        self.state.sync(self._dense)

    def close(self) -> None:
        self.state.close()


# Keys are rotated before they are cached, so chosen rows need only be copied.


class SparseState(DecodeState):
    """Steps like any state, at the same positions, over fewer keys: each KV head of each layer sees the video tokens
    that the text attended to most there, and everything that is no video.

    What it drafts is rolled back by `sync`, which takes the rows of newly committed tokens from the dense state: they
    are the model's own. A round copies those alone. Either state may be closed before the other.

    Args:
        dense: a prefilled state with all its rows; what it holds is taken as committed.
        attention: recorded in every layer of its prefill.
        num_kept: video tokens for each KV head of each layer, at most as many as there are.
        headroom: tokens that the answer may take before the cache is reallocated.

    Raises:
        ValueError: a number below 0, or a layer whose attention was not recorded for the rows that it holds.
    """

    def __init__(self, dense: DecodeState, attention: TextAttention, num_kept: int, *, headroom: int = 512) -> None:
        video = attention.video
        num_video = len(video)
        if num_kept < 0:
            raise ValueError(f"a sparse cache keeps 0 or more video tokens, not {num_kept}")
        num_kept = min(num_kept, num_video)
        kept = []
        for layer in range(dense.cache.num_layers):
            scores = attention.by_layer.get(layer)
            if scores is None or scores.shape[1] != num_video or dense.cache.num_missing(layer):
                raise ValueError(f"layer {layer} has no record of the attention to all {num_video} video tokens")
            kept.append(scores.topk(num_kept).indices.sort().values)
        cache = dense.cache.empty_like(dense.num_tokens + headroom)
        cache.copy_chosen(dense.cache, video, kept)
        super().__init__(
            cache,
            num_prompt_tokens=dense.num_prompt_tokens,
            position_offset=dense.next_position - dense.num_tokens,
        )
        self._num_synced = dense.num_tokens
        """Tokens that are the dense state's, too: where drafting began."""

    def sync(self, dense: DecodeState) -> None:
        """Forget what was drafted and copy the tokens that `dense` has committed since; it holds no others now."""
        assert dense.num_tokens >= self._num_synced, "what is committed stays"
        self.rollback(self._num_synced)
        if dense.num_tokens > self._num_synced:
            self.cache.copy_from(dense.cache, dense.num_tokens)
        self._num_synced = dense.num_tokens
