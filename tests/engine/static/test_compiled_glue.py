"""What a compiler makes of the glue is one model's alone, and what was checked is what serves.

Dynamo runs for all of this; the code that a compiler would write is left out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine import load_model
from slipstream.engine.fused_layers import GlueShape
from slipstream.engine.static import glue
from slipstream.engine.static.glue import choose_glue, compiled_glue
from slipstream.engine.static.steps import StaticSteps
from tests.engine.static.test_static_steps import POOL_BYTES, close, prefill
from tests.support.tiny_checkpoint import write_tiny_qwen

Example = list[Tensor | int]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Example]:
    """What each of a compiler's graphs is written for, in their order."""
    examples: list[Example] = []

    def backend(graph: Any, example: Example) -> Callable[..., Any]:
        examples.append(example)
        forward: Callable[..., Any] = graph.forward
        return forward

    compile_with = torch.compile

    def compile_by_dynamo(function: Callable[..., Any], *, fullgraph: bool, options: object) -> Callable[..., Any]:
        return compile_with(function, fullgraph=fullgraph, backend=backend)

    monkeypatch.setattr(torch, "compile", compile_by_dynamo)
    monkeypatch.setattr(glue, "known_glue", lambda device: {"compiled": compiled_glue})
    return examples


def test_any_number_of_models_have_their_own(written: list[Example]) -> None:
    """Torch keeps eight graphs of a code object, and takes a size in which two of them differ for one that varies."""
    for number in range(1, 11):
        written.clear()
        name, _ = choose_glue(GlueShape(1e-6, 32 * number, 48 * number, 6, 4, 8), torch.empty(0))
        assert name == "compiled" and len(written) == 6
        tensors = [each for example in written for each in example if isinstance(each, Tensor)]
        assert {type(width) for each in tensors for width in each.shape[1:]} == {int}


@pytest.mark.parametrize("_", range(2))
def test_what_was_checked_serves_every_step(_: int, written: list[Example], tmp_path: Path) -> None:
    path = write_tiny_qwen(tmp_path / "model", seed=5)
    model, other = load_model(str(path)), load_model(str(path))
    runner = model.runner.__class__.__mro__[1](model.runner.decoder, model.runner.lm_head, model.runner.kernel)
    model.runner = runner
    model.static = StaticSteps(runner, POOL_BYTES, 3)
    assert model.static.layers == "compiled"
    num_checked = len(written)
    model.static.prepare()
    states, others = ([prefill(each) for _ in range(2)] for each in (model, other))
    for num_rows in (1, 2, 5, 32):
        for num_sessions in (1, 2):
            window = [5 + index for index in range(num_rows)]
            ours, right = (
                each.step([(state, window) for state in of[:num_sessions]])
                for each, of in ((model, states), (other, others))
            )
            close(torch.cat(ours), torch.cat(right))
    assert len(written) == num_checked == 6
