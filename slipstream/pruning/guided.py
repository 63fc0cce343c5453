"""UV-Prune: keep the video tokens that grow towards the text through the target's early layers (ParallelVLM, eq. 2-4).
Its relatives, and the function that applies any pruner with the guidance that it needs.

Equation 3 sums S^l - S^(l-1) over the layers l = 1..L, which telescopes to S^L - S^0. The cosine similarities S of one
video token with all text tokens (eq. 2) sum to one dot product with the sum of the normalised text vectors. So

    score_i = v_i(L) . t(L) - v_i(0) . t(0)

with v normalised and t that sum: two states are enough, whatever L is.
"""

from pkgutil import resolve_name

import torch
from torch import Tensor
from torch.nn.functional import normalize

from slipstream.errors import InvalidRequest
from slipstream.pruning.base import Guidance, Pruner, VideoTokens
from slipstream.pruning.unguided import evenly
from slipstream.speculation.methods import PRUNER_SPECS, GuidanceKind, Score

# -- uv ---------------------------------------------------------------------------------------------------------------

_SCORED_AT_ONCE = 16_384
"""Tokens whose states are there in fp32 at a time."""


def make_guidance(video_0: Tensor, text_0: Tensor, video_L: Tensor, text_L: Tensor, kind: str) -> Guidance:
    """Guidance from the target's states before layer 1 and after layer L.

    The video states are rounded to bf16 first for both kinds, so both select the same tokens.

    Args:
        video_0, video_L: [m, hidden].
        text_0, text_L: text tokens after the video, [n, hidden].
        kind: "hidden_states" leaves the scoring to the draft, "scores" does it here.

    Raises:
        InvalidRequest: an unknown kind.
    """
    if kind not in tuple(GuidanceKind):
        raise InvalidRequest(f"unknown guidance {kind!r}; known: {', '.join(GuidanceKind)}")
    with torch.inference_mode():
        states = (video_0.to(torch.bfloat16), video_L.to(torch.bfloat16))
        text_sums = (_text_sum(text_0), _text_sum(text_L))
        if kind == GuidanceKind.SCORES:
            return Guidance(scores=similarity_variation(states, text_sums))
        return Guidance(video_states=states, text_sums=text_sums)


def similarity_variation(video_states: tuple[Tensor, Tensor], text_sums: tuple[Tensor, Tensor]) -> Tensor:
    """Equation 3 in telescoped form: [m, hidden] states and [hidden] sums at layers 0 and L -> fp32 scores [m]."""
    first, last = (_similarity(*pair) for pair in zip(video_states, text_sums, strict=True))
    return last - first


def scores_of(guidance: Guidance | None, score: Score) -> Tensor:
    """The scores [m] of that kind in guidance, made from its states where it brings those.

    Raises:
        InvalidRequest: guidance without scores, and without states to make them from.
    """
    if guidance is not None and guidance.scores is not None:
        return guidance.scores
    if guidance is None or guidance.video_states is None or guidance.text_sums is None or score.is_attention:
        raise InvalidRequest(f"guidance brings neither {score} scores nor what they are made from")
    if score is Score.SIMILARITY:
        return _similarity(guidance.video_states[1], guidance.text_sums[1])
    return similarity_variation(guidance.video_states, guidance.text_sums)


def top_k(scores: Tensor, num_keep: int) -> Tensor:
    """Equation 4: the `num_keep` best of [m] scores, ascending; of equal scores the earlier token, NaN last."""
    ranked = scores.float().nan_to_num(nan=float("-inf")).argsort(descending=True, stable=True)
    return ranked[:num_keep].sort().values.cpu()


def keep_best(video: VideoTokens, num_keep: int, scores: Tensor, seed: int) -> Tensor:
    """The tokens that score highest, whatever is ranked by: UV-Prune, or SpecVLM without its second stage."""
    return top_k(scores, num_keep)


def keep_best_of_stretches(video: VideoTokens, num_keep: int, scores: Tensor, seed: int) -> Tensor:
    """Full coverage: the best token of each of `num_keep` equal stretches of the video.

    Equation 4 ranks all tokens against each other, so one scene whose content scores high can take nearly all places
    and leave the draft blind to the others.
    """
    if num_keep == 0:
        return torch.arange(0)
    num_tokens = video.num_tokens
    scores = scores.float().cpu().nan_to_num(nan=float("-inf"))
    stretches = torch.arange(num_tokens) * num_keep // num_tokens
    best = torch.full((num_keep,), float("-inf")).scatter_reduce(0, stretches, scores, "amax")
    places = torch.arange(num_tokens).masked_fill(scores < best[stretches], num_tokens)
    return torch.full((num_keep,), num_tokens).scatter_reduce(0, stretches, places, "amin")


def _similarity(video_states: Tensor, text_sum: Tensor) -> Tensor:
    """Equation 2, summed over the text: [m, hidden] and [hidden] -> [m]. Some tokens at a time, as fp32 states of all
    tokens of an hour would take gigabytes."""
    text = text_sum.float()
    return torch.cat([normalize(states.float(), dim=-1) @ text for states in video_states.split(_SCORED_AT_ONCE)])


def _text_sum(text_states: Tensor) -> Tensor:
    return normalize(text_states.float(), dim=-1).sum(dim=0)


# -- attention --------------------------------------------------------------------------------------------------------

# What follows the target's text-to-video attention in two stages: SpecVLM (its section 3.2).

TOP_P_SHARE = 0.5
"""Of the places, at most this share goes to stage I. The paper calibrates its threshold lambda_r a model and ratio; in
its figure 5 the best tenth of the tokens has half of the attention, so stage I would otherwise take every place."""
TOP_P = 0.4
"""lambda: stage I ends when its tokens have this share of all attention."""


def keep_best_then_spread(video: VideoTokens, num_keep: int, scores: Tensor, seed: int) -> Tensor:
    """Stage I keeps the most attended tokens up to a share of all attention (Top-P, eq. 6); stage II keeps the others
    at a fixed spatial interval (eq. 7)."""
    scores = scores.float().cpu().nan_to_num(nan=0.0)
    informative = _top_p(scores, TOP_P, int(num_keep * TOP_P_SHARE))
    others = torch.ones(video.num_tokens, dtype=torch.bool)
    others[informative] = False
    rest = others.nonzero().flatten()
    spread = rest[evenly(len(rest), num_keep - len(informative))]
    return torch.cat([informative, spread]).sort().values


def _top_p(scores: Tensor, share: float, most: int) -> Tensor:
    """The fewest best tokens that have `share` of the sum of [m] scores, `most` at most."""
    ranked = scores.argsort(descending=True, stable=True)
    reached = scores[ranked].double().cumsum(0)
    num_needed = int((reached < share * reached[-1]).sum()) + 1
    return ranked[: min(num_needed, most)]


# -- any pruner -------------------------------------------------------------------------------------------------------


def get_pruner(name: str) -> Pruner:
    """The pruner called `name`.

    Raises:
        InvalidRequest: there is none; the message lists those that there are.
    """
    spec = PRUNER_SPECS.get(name)
    if spec is None:
        raise InvalidRequest(f"unknown pruner {name!r}; known: {', '.join(PRUNER_SPECS)}")
    return Pruner(spec.name, spec.score, resolve_name(spec.keep), spec.alpha)


def prune(pruner: Pruner, video: VideoTokens, alpha: float, *, guidance: Guidance | None, seed: int = 0) -> Tensor:
    """Indices of the video tokens to keep when the share `alpha` is pruned: int64, ascending, on the CPU.

    Raises:
        InvalidRequest: alpha out of range, or guidance that is missing or of another number of tokens.
    """
    num_keep = pruner.num_kept(video.num_tokens, alpha)
    if pruner.score is None:
        return pruner.keep(video, num_keep, None, seed)
    num_guided = guidance.num_video_tokens if guidance is not None else 0
    if num_guided != video.num_tokens:
        raise InvalidRequest(
            f"pruner {pruner.name!r} needs guidance on {video.num_tokens} video tokens, got {num_guided}"
        )
    return pruner.keep(video, num_keep, scores_of(guidance, pruner.score), seed)
