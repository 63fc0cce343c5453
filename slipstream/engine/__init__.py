"""The engine: a Video-LLM behind one object, `VideoLM`, with our own layer loop, KV cache and attention call.

What this module offers is loaded when it is first used: the families are made of parts of the engine, and it of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.engine.loading import load_model
    from slipstream.engine.video_lm import Adapter, DecodeState, Prefill, PromptPlan, VideoLM

__all__ = ["Adapter", "DecodeState", "Prefill", "PromptPlan", "VideoLM", "load_model"]

if not TYPE_CHECKING:  # a type checker would believe any name of a module that has `__getattr__`

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = "loading" if name == "load_model" else "video_lm"
        return getattr(importlib.import_module(f"slipstream.engine.{home}"), name)
