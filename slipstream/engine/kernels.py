"""Which attention kernel a model gets, by name, device and dtype."""

import importlib.util
from collections.abc import Callable
from functools import partial

import torch

from slipstream.engine.attention import (
    FlashKernel,
    JoinedKernel,
    Kernel,
    MatmulKernel,
    SdpaKernel,
    by_flash,
    by_matmul,
)
from slipstream.errors import ModelNotUsable
from slipstream.logs import get_logger

ATTENTION_NAMES = ("auto", "matmul", "sdpa", "flash", "joined", "compiled")


def get_kernel(name: str, device: torch.device, dtype: torch.dtype, *, masked_ends: bool = False) -> Kernel:
    """The kernel called `name`; "auto" takes the fastest that works on `device` with `dtype`.

    Args:
        masked_ends: caches show rows that nobody may see, which takes a kernel with a mask.

    Raises:
        ModelNotUsable: an unknown name; flash attention without CUDA, half precision or its package; compiled attention
            without a processor that has it, or its package; flash or joined attention with masked ends.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    flash_works = device.type == "cuda" and half and not masked_ends and _has_flash()
    compiled_works = device.type == "cpu" and _can_compile(dtype)
    if name == "auto":
        on_cpu = "compiled" if compiled_works else "matmul"
        name = "flash" if flash_works else on_cpu if device.type == "cpu" and not half else "sdpa"
    if name == "compiled" and not compiled_works:
        raise ModelNotUsable(
            "attention 'compiled' needs the llvmlite package, fp32 or fp64, and a CPU with AVX2 or AVX-512; use 'auto'"
        )
    if name == "flash" and not flash_works:
        raise ModelNotUsable(
            "attention 'flash' needs a flash-attn package that fits this torch, CUDA, a 16-bit dtype and no strict"
            " width; use 'auto'"
        )
    if name == "joined" and masked_ends:
        raise ModelNotUsable(
            "attention 'joined' cuts keys where the window begins, so it has no strict width; use 'auto'"
        )
    attend_past = by_flash if half or device.type == "cpu" else by_matmul
    kernels: dict[str, Callable[[], Kernel]] = {
        "sdpa": SdpaKernel,
        "matmul": MatmulKernel,
        "compiled": _compiled_kernel,
        "flash": FlashKernel,
        "joined": partial(JoinedKernel, attend_past),
    }
    if name not in kernels:
        raise ModelNotUsable(f"unknown attention {name!r}; known: {', '.join(ATTENTION_NAMES)}")
    return kernels[name]()


def _has_flash() -> bool:
    """Whether the `flash-attn` package is there and can be imported. What was built for another torch cannot, and a
    relative of it (`flash_attn.cute`) has but its name."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    try:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except Exception as error:  # an extension that does not fit raises whatever its loader does
        get_logger().warning("attention.flash_unusable", error=f"{type(error).__name__}: {error}")
        return False
    return True


def _can_compile(dtype: torch.dtype) -> bool:
    if importlib.util.find_spec("llvmlite") is None:
        return False
    from slipstream.engine.compiled.code import vectors_for

    return vectors_for(dtype) is not None


def _compiled_kernel() -> Kernel:
    from slipstream.engine.compiled.blocked_attention import CompiledKernel

    return CompiledKernel()
