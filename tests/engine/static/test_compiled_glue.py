"""What a compiler makes of the glue is one model's alone, and what was checked is what serves.

Dynamo runs for all of this; the code that a compiler would write is left out.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from slipstream.engine import load_model
from slipstream.engine.attention import join_window
from slipstream.engine.fused_layers import GlueShape
from slipstream.engine.static import glue, trials
from slipstream.engine.static.accord import Accord
from slipstream.engine.static.glue import choose_glue, compiled, compiled_glue
from slipstream.engine.static.pool import KVPool
from slipstream.engine.static.step import Recorder
from slipstream.engine.static.steps import StaticSteps
from slipstream.engine.static.windows import JoinedWindows, StepShape, past_by_varlen
from tests.engine.static.test_static_steps import POOL_BYTES, close, prefill
from tests.engine.static.test_static_windows import varlen
from tests.support.tiny_checkpoint import write_tiny_qwen

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
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


@pytest.mark.long
def test_any_number_of_models_have_their_own(written: list[Example]) -> None:
    """Torch keeps eight graphs of a code object, and takes a size in which two of them differ for one that varies."""
    for number in range(1, 11):
        written.clear()
        name, _ = choose_glue(GlueShape(1e-6, 32 * number, 48 * number, 6, 4, 8), torch.empty(0), Accord())
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


@torch.inference_mode()
def test_a_join_that_was_checked_serves_every_window(written: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "known_joins", lambda device: {"compiled": lambda: compiled(join_window)})
    monkeypatch.setattr(trials, "_join_s", lambda join, *_: float(join is join_window))  # what compiles nothing is slow
    pool = KVPool(2, 3000, KV_HEADS, HEAD_DIM, torch.empty(0))
    join = trials.choose_join(pool, HEADS, Recorder(torch.device("cpu")), Accord())
    assert join is not join_window and len(written) == 2
    extents = [extent for _ in range(4) if (extent := pool.take(500, pool)) is not None]
    past = 100
    for sessions in (1, 2, 4):
        for rows in (2, 4, 8, 16, 32):
            shape = StepShape(sessions, rows, 512)
            places = trials._places(shape, extents[:sessions], [past] * sessions, torch.device("cpu"))
            query, key, value = trials.fused_rows(torch.randn, shape.num_all_rows, HEADS, KV_HEADS, HEAD_DIM)
            outputs = []
            for each in (join, join_window):
                windows = JoinedWindows(pool, places, partial(past_by_varlen, varlen), each)
                windows.begin()
                outputs.append(windows(0, query, key, value, HEAD_DIM**-0.5))
            torch.testing.assert_close(*outputs)
    assert len(written) == 2


@pytest.mark.parametrize("fault", ["fails", "wrong", "slow"])
def test_a_join_that_is_of_no_use_is_not_taken(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Any:
        if fault == "fails":
            raise FailOnRecompileLimitHit("no compiler")
        return lambda *given: join_window(*given) * (1.1 if fault == "wrong" else 1.0)

    monkeypatch.setattr(trials, "known_joins", lambda device: {"other": make})
    monkeypatch.setattr(trials, "_join_s", lambda join, *_: float((join is join_window) == (fault != "slow")))
    pool = KVPool(2, 300, KV_HEADS, HEAD_DIM, torch.empty(0))
    assert trials.choose_join(pool, HEADS, Recorder(torch.device("cpu")), Accord()) is join_window
