"""The engine: a Video-LLM behind one object, `VideoLM`, with our own layer loop, KV cache and attention call."""

from slipstream.engine.loading import load_model
from slipstream.engine.video_lm import Adapter, DecodeState, Prefill, PromptPlan, VideoLM

__all__ = ["Adapter", "DecodeState", "Prefill", "PromptPlan", "VideoLM", "load_model"]
