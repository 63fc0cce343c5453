"""What a model that was loaded says of itself: to those who ask it, and who choose among several."""

import json
from bisect import bisect_left
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slipstream.documents.surfaces import CONFIG_KEY, SURFACES
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.video_lm import Adapter
from slipstream.errors import InvalidRequest, ModelNotUsable
from slipstream.families.adapter import FrameFacts
from slipstream.families.checkpoints import tokenizer_digest
from slipstream.sampling import structure
from slipstream.sampling.params import CAME_LATER, SamplingDefaults, SamplingParams
from slipstream.service_info import ModelInfo
from slipstream.session_messages import Chat

_MOST_STEPS = 4096
"""No gateway samples more frames."""


def describe(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    adapter: Adapter,
    tokenizer: PreTrainedTokenizerBase,
    revision: str,
) -> ModelInfo:
    """What others are told of a model. Raises `ModelNotUsable` where its files say what cannot be."""
    text = model.config.get_text_config()
    max_context = _context(text)
    return ModelInfo(
        model_id=checkpoint.ref,
        model_type=checkpoint.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        tokenizer_digest=tokenizer_digest(json.loads(tokenizer.backend_tokenizer.to_str())),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        eos_token_ids=_eos_token_ids(checkpoint, model, tokenizer),
        max_context=max_context,
        tokens_per_frame=-(-adapter.tokens_per_step // adapter.frames_per_step),
        max_frames=_most_steps(adapter, max_context) * adapter.frames_per_step,
        revision=revision,
        frame_size=adapter.frame_size,
        sampling_defaults=_sampling_defaults(checkpoint, model),
        surface=_surface(checkpoint, adapter),
        keeps_structure=structure.IS_INSTALLED,
        tells_logprobs=True,
        honours=(*CAME_LATER, "thinking"),
    )


def _context(text: Any) -> int:
    """Positions of a text model. Where they are scaled linearly, as LLaVA-NeXT-Video's, its configuration names those
    from before that."""
    rotary = getattr(text, "rope_parameters", None) or {}
    is_scaled = rotary.get("rope_type") == "linear" and "original_max_position_embeddings" not in rotary
    factor = rotary["factor"] if is_scaled else 1
    return int(factor * text.max_position_embeddings)


def _most_steps(adapter: Adapter, max_context: int) -> int:
    """Steps of usual size that leave room for a token behind an empty prompt. Those of some families have words beside
    them, such as their times, and more of them the more there are; some are the smaller the more there are."""

    def num_tokens(steps: int) -> int:
        return adapter.plan_prompt(Chat("?"), FrameFacts(steps * adapter.frames_per_step)).num_tokens

    return bisect_left(range(1, min(max_context, _MOST_STEPS) + 1), max_context, key=num_tokens)


def _surface(checkpoint: Checkpoint, adapter: Adapter) -> str:
    """What the checkpoint names, else its family's."""
    named = checkpoint.config.get(CONFIG_KEY)
    if named is None:
        return adapter.surface
    if not isinstance(named, str) or named not in SURFACES:
        raise ModelNotUsable(f"{checkpoint.ref}: config.json has {CONFIG_KEY} {named!r}; known: {', '.join(SURFACES)}")
    return named


def _sampling_defaults(checkpoint: Checkpoint, model: PreTrainedModel) -> SamplingDefaults:
    """Raises `ModelNotUsable` for what no request could ask for."""
    defaults = SamplingDefaults.of(model.generation_config)
    try:
        SamplingParams(**defaults.given()).check()
    except InvalidRequest as error:
        raise ModelNotUsable(f"{checkpoint.ref}: generation_config.json: {error}; correct or remove it") from None
    return defaults


def _eos_token_ids(
    checkpoint: Checkpoint, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Ids that end an answer: the generation config's, else the model config's, else the tokenizer's. One that is no
    token's, such as -1, ends none. Raises `ModelNotUsable` for what is no id."""
    generation: Any = model.generation_config
    text = model.config.get_text_config()
    candidates = (generation.eos_token_id, text.eos_token_id, tokenizer.eos_token_id)
    eos = next((candidate for candidate in candidates if candidate is not None), ())
    ids = eos if isinstance(eos, list | tuple) else (eos,)
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise ModelNotUsable(f"{checkpoint.ref}: eos_token_id must be a token's number, or a list of them, not {eos!r}")
    return tuple(token for token in ids if 0 <= token < text.vocab_size)
