"""What lies between the products of fused layers, by device: on CUDA kernels of a compiler, where there is one."""

import itertools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from slipstream.engine.fused_layers import Glue, GlueShape, MakeGlue, exact_glue, glue_with
from slipstream.engine.static.accord import Accord
from slipstream.engine.trial import MAX_ERROR, relative_error, tried
from slipstream.logs import get_logger

MANY_ROWS = 5
"""Of a sample that stands for any number of rows."""


def torch_glue(shape: GlueShape) -> Glue:
    """With torch's own norm, which is one kernel on CUDA."""
    return glue_with(shape, lambda hidden, weight: rms_norm(hidden, weight.shape, weight, shape.eps))


def compiled_glue(shape: GlueShape) -> Glue:
    """Each function is one kernel that inductor writes, which takes a C compiler, and Triton on CUDA. The norm that
    stands alone, before the first layer, is not worth it."""
    plain = exact_glue(shape)
    return Glue(plain.norm, compiled(plain.add_norm), compiled(plain.rotate), compiled(plain.gate))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for whoever asks, apart from what is compiled of the same function for others. Torch keeps what it has
    compiled by the code object, at most eight of them, and takes a size in which two differ for one that varies; and
    the code of a closure is the same for all models of a process. So this one has code and name of its own."""
    written = cast(FunctionType, function)
    code = written.__code__.replace(co_name=f"{written.__name__}_{next(_NUMBERS)}")
    own = FunctionType(code, written.__globals__, code.co_name, written.__defaults__, written.__closure__)
    return torch.compile(own, fullgraph=True, options={"compile_threads": 1})  # no processes beside this one


_NUMBERS = itertools.count()


def known_glue(device: torch.device) -> Mapping[str, MakeGlue]:
    """By name, the best first; the last one always works."""
    on_cuda = {"compiled": compiled_glue, "torch": torch_glue} if device.type == "cuda" else {}
    return {**on_cuda, "exact": exact_glue}


def choose_glue(shape: GlueShape, like: Tensor, accord: Accord) -> tuple[str, Glue]:
    """The best that works and is right, here and at all ranks."""
    for name, make in known_glue(like.device).items():
        glue = _right(name, make, shape, like)
        if accord.agree(glue is not None, all) and glue is not None:
            return name, glue
    raise AssertionError("upstream's operations work everywhere")


def _right(name: str, make: MakeGlue, shape: GlueShape, like: Tensor) -> Glue | None:
    """None where it does not work or is not right."""

    def measured() -> tuple[Glue, float]:
        glue = make(shape)
        return glue, _largest_error(glue, shape, like)

    glue, error = tried("static_glue", name, measured) or (None, 0.0)
    if error <= MAX_ERROR:
        return glue
    get_logger().warning("static_glue.differs", name=name, error=error)
    return None


def _largest_error(glue: Glue, shape: GlueShape, like: Tensor) -> float:
    """Beside upstream's operations in fp32 at least, of random rows. A compiler has written all afterwards that steps
    will need: what serves one row, and what serves any number of them."""
    exact, wide = exact_glue(shape), torch.promote_types(like.dtype, torch.float32)
    generator, errors = torch.Generator(like.device).manual_seed(0), []

    def random(*size: int) -> Tensor:
        made = torch.randn(size, dtype=like.dtype, device=like.device, generator=generator)
        if size[0] == MANY_ROWS:
            torch._dynamo.maybe_mark_dynamic(made, 0)
        return made

    with torch.inference_mode():
        with torch.inference_mode(like.is_inference()):  # compiled code tells weights made there from others
            weight = random(shape.hidden_size)
        for rows in (MANY_ROWS, 1):
            hidden, update = random(rows, shape.hidden_size), random(rows, shape.hidden_size)
            packed, inner = random(rows, shape.num_heads * shape.head_dim), random(rows, 2 * shape.inner_size)
            angles = random(rows, shape.head_dim), random(rows, shape.head_dim)
            for ours, right, inputs in (
                (glue.norm, exact.norm, (hidden, weight)),
                (glue.add_norm, exact.add_norm, (hidden, update, weight)),
                (glue.rotate, exact.rotate, (packed, *angles)),
                (glue.gate, exact.gate, (inner,)),
            ):
                found, expected = _flat(ours(*inputs)).to(wide), _flat(right(*(each.to(wide) for each in inputs)))
                errors.append(relative_error(found, expected))
    return float(np.max(errors))  # NaN where one is


def _flat(found: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return found.flatten() if isinstance(found, Tensor) else torch.cat([part.flatten() for part in found])
