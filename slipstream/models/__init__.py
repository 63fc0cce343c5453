"""The engine: a Video-LLM behind one object, `VideoLM`, with our own layer loop, KV cache and attention call."""

from slipstream.models.base import Adapter, DecodeState, ModelInfo, Prefill, PromptPlan, VideoLM
from slipstream.models.registry import load_model

__all__ = ["Adapter", "DecodeState", "ModelInfo", "Prefill", "PromptPlan", "VideoLM", "load_model"]
