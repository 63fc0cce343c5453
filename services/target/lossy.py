"""Carries out a lossy baseline's schedule in one prefill: ranks the video tokens, and drops them where it says.

What is left of the session is no longer the model's own answer, so nothing of it is shared.
"""

from torch import Tensor

from slipstream.errors import InvalidRequest
from slipstream.models.base import Prefill, PromptPlan
from slipstream.models.observe import TextAttention
from slipstream.pruning import VideoTokens
from slipstream.pruning.lossy import Rank, Schedule, make_schedule, text_raters
from slipstream.pruning.redundancy import DyCokePruner
from slipstream.pruning.uv import top_k
from slipstream.rpc.codec import TargetRequest

_LAST_TOKEN = (-1,)


def schedule_of(request: TargetRequest, plan: PromptPlan, num_layers: int) -> Schedule | None:
    """What the request wants dropped; None of a lossless one.

    Raises:
        InvalidRequest: it wants more of the session than plain decoding, or a share that the method cannot keep.
    """
    if request.lossy is None:
        return None
    if request.with_guidance or request.with_attention or request.self_draft_kept:
        raise InvalidRequest("a lossy session is a baseline of plain decoding: it guides no draft and drafts nothing")
    return make_schedule(request.lossy, num_video=plan.num_video_tokens, num_layers=num_layers)


class LossyPass:
    """An observer of one whole prefill, which also drops its video tokens: call `drop` before the first layer and after
    each."""

    def __init__(self, plan: PromptPlan, schedule: Schedule) -> None:
        self._plan = plan
        self._rank = schedule.rank
        self._num_keep = {stage.after_layer: stage.num_keep for stage in schedule.stages}
        self._attention: TextAttention | None = None

    def observe(self, layer: int, query: Tensor, keys: Tensor, scale: float) -> None:
        """Records the layers that rank, see `Observer`."""
        if self._attention is not None:
            self._attention.observe(layer, query, keys, scale)

    def drop(self, prefill: Prefill) -> None:
        """Keeps what the schedule says at this place, if it says anything."""
        num_run = prefill.next_layer
        if num_run == 0:
            self._prepare(prefill)
        num_keep = self._num_keep.get(num_run)
        if num_keep is None:
            return
        if self._rank is Rank.REDUNDANCY:
            video = VideoTokens(self._plan.num_video_tokens, self._plan.num_steps, prefill.video_states())
            keep = DyCokePruner().keep(video, num_keep, None, 0)
        else:
            assert self._attention is not None, "recorded from the first layer on"
            keep = top_k(self._attention.mean([num_run - 1]), num_keep)
        prefill.keep_video(keep)

    def _prepare(self, prefill: Prefill) -> None:
        if self._rank is Rank.REDUNDANCY:
            return
        raters = self._rank is Rank.RATERS
        rows = text_raters(prefill.video_states(), prefill.text_states()) if raters else _LAST_TOKEN
        self._attention = TextAttention(self._plan, text_rows=rows, layers={place - 1 for place in self._num_keep})
