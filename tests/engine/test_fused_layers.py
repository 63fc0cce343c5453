"""Fused layers compute what upstream's do, on the very weights of those; layers that are not plain are left alone."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.engine import VideoLM, load_model
from slipstream.engine.forward import Runner
from slipstream.engine.fused_layers import (
    FusedLayers,
    GlueShape,
    MakeGlue,
    can_fuse,
    exact_glue,
    join_weights,
    on_axes,
)
from slipstream.engine.fused_runner import FusedRunner
from slipstream.engine.parallel.shards import SummedLinear
from slipstream.engine.static import glue, trials
from slipstream.engine.static.accord import Accord
from slipstream.engine.static.glue import choose_glue, compiled_glue, torch_glue
from slipstream.speculation.protocol import TokenTree
from tests.engine.conftest import Pair
from tests.engine.static.test_static_steps import POOL_BYTES, close, prefill
from tests.support.tiny_checkpoint import write_tiny_llava, write_tiny_qwen, write_tiny_qwen2
from tests.support.tiny_families import write_tiny_qwen3
from tests.support.tiny_mistral3 import write_tiny_mistral3

WRITERS: dict[str, Callable[..., Path]] = {
    "llava": write_tiny_llava,
    "mistral": write_tiny_mistral3,
    "qwen": write_tiny_qwen,
    "qwen2": write_tiny_qwen2,
}


@pytest.fixture(params=WRITERS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> VideoLM:
    return load_model(str(WRITERS[request.param](tmp_path / "model", seed=3)))


def num_axes(model: VideoLM) -> int:
    return model._adapter.num_axes


def some_rows(model: VideoLM, num_rows: int) -> tuple[Tensor, Tensor]:
    """Embeddings in fp64, to which the layers are moved, and position ids."""
    decoder: Any = model.runner.decoder
    decoder.to(torch.float64)
    hidden = torch.randn(1, num_rows, model.info.hidden_size, dtype=torch.float64, generator=torch.manual_seed(1))
    return hidden, on_axes(torch.arange(40, 40 + num_rows)[None], num_axes(model))


def among_rows(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Rows that see each other alone, and each layer something else."""
    groups = len(query) // len(key)
    keys, values = (rows.repeat_interleave(groups, 0) for rows in (key, value))
    return ((query @ keys.transpose(1, 2) * scale * (1 + layer)).softmax(-1) @ values).transpose(0, 1)


@torch.inference_mode()
def test_layers_are_upstreams(model: VideoLM) -> None:
    for num_rows in (1, 2, 5, 16):
        hidden, positions = some_rows(model, num_rows)
        expected = model.runner.run_through(hidden, positions, among_rows)
        fused = FusedLayers(model.runner.decoder)
        torch.testing.assert_close(fused(hidden, positions, among_rows), expected, rtol=1e-12, atol=1e-12)
        again = model.runner.run_through(hidden, positions, among_rows)
        torch.testing.assert_close(again, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("default")  # of what a compiler does
@pytest.mark.parametrize("make_glue", [torch_glue, pytest.param(compiled_glue, marks=pytest.mark.long)])
@torch.inference_mode()
def test_trials_are_of_rows_as_layers_hand_them_over(model: VideoLM, make_glue: MakeGlue) -> None:
    """Compiled code that was tried on other strides would be another one in serving."""
    found = list[tuple[int, ...]]()

    def attend(layer: int, *rows: Any) -> Tensor:
        found.extend(each.stride() for each in rows[:3])
        return among_rows(layer, *rows)

    hidden, positions = some_rows(model, 5)
    FusedLayers(model.runner.decoder, make_glue)(hidden, positions, attend)
    attention = decoder_of(model).layers[0].self_attn
    heads, kv_heads = (len(part.weight) // attention.head_dim for part in (attention.q_proj, attention.k_proj))
    tried = [each.stride() for each in trials.fused_rows(torch.empty, 5, heads, kv_heads, attention.head_dim)]
    assert found == tried * len(decoder_of(model).layers)


def decoder_of(model: VideoLM) -> Any:
    return model.runner.decoder


def storage_bytes(model: VideoLM) -> int:
    parts = decoder_of(model)
    return sum(
        {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in parts.parameters()}.values()
    )


def test_no_weight_is_there_twice(model: VideoLM) -> None:
    before, values = storage_bytes(model), [each.clone() for each in decoder_of(model).parameters()]
    fused = FusedLayers(model.runner.decoder)
    assert storage_bytes(model) == before
    assert all(map(torch.equal, decoder_of(model).parameters(), values))
    for layer, ours in zip(decoder_of(model).layers, fused.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        for product, parts in (
            (ours.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (ours.gate_up, (mlp.gate_proj, mlp.up_proj)),
        ):
            lie_at(product.weight, [part.weight for part in parts])
            if product.bias is not None:
                lie_at(product.bias, [part.bias for part in parts])


def test_weights_that_were_joined_before_stay_where_they_are(model: VideoLM) -> None:
    """As the start does before it looks at what memory is free."""
    runner: Any = model.runner
    runner.decoder.layers[0].self_attn.q_proj.weight = nn.Parameter(  # apart from its neighbours again
        runner.decoder.layers[0].self_attn.q_proj.weight.clone(), requires_grad=False
    )
    others = [layer.self_attn.o_proj.weight for layer in runner.decoder.layers]
    join_weights(runner.decoder)
    for layer, loaded in zip(runner.decoder.layers, others, strict=True):
        moved = layer.self_attn.o_proj.weight
        assert moved.data_ptr() != loaded.data_ptr() and torch.equal(moved, loaded), "no gap is left where it was"
    before, addresses = storage_bytes(model), [each.data_ptr() for each in runner.decoder.parameters()]
    fused = FusedLayers(runner.decoder)
    assert storage_bytes(model) == before
    assert [each.data_ptr() for each in runner.decoder.parameters()] == addresses
    for layer, ours in zip(runner.decoder.layers, fused.layers, strict=True):
        attention = layer.self_attn
        lie_at(ours.qkv.weight, [part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
        assert torch.equal(ours.qkv.weight[: len(attention.q_proj.weight)], attention.q_proj.weight)


def lie_at(whole: Tensor, parts: list[Any]) -> None:
    at = whole.data_ptr()
    for part in parts:
        assert part.data_ptr() == at and part.is_contiguous()
        at += part.nbytes
    assert at == whole.data_ptr() + whole.nbytes


def test_a_fused_model_steps_and_prefills_as_before(pair: Pair) -> None:
    model = load_model(str(pair.path))
    model.open_static_steps(POOL_BYTES)
    assert model.static is not None and model.static.layers == "exact"
    state, other = prefill(model), prefill(pair.ours)
    for window in ([5], [6, 7, 8], [9] * 12):
        close(model.step([(state, window)])[0], pair.ours.step([(other, window)])[0])


def test_steps_on_a_cpu_are_fused_and_have_upstreams_logits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chains and of a tree, alone and packed."""
    model = load_model(str(pair.path))
    assert type(model.runner) is FusedRunner
    tree = TokenTree((5, 6, 7, 8), (-1, 0, 0, 2))
    for windows in ([[5]], [[6, 7, 8]], [[9] * 70], [tree], [[5, 6], tree, [7]]):
        batch = [(prefill(model, num_frames), window) for num_frames, window in enumerate(windows, 1)]
        found = model.step(batch)
        for state, window in batch:
            state.rollback(state.num_tokens - len(window))
        with monkeypatch.context() as patched:
            patched.setattr(FusedRunner, "run", Runner.run)
            expected = model.step(batch)
        for ours, theirs in zip(found, expected, strict=True):
            close(ours, theirs)


class Quantised(nn.Linear):
    """Whose weight is not what it multiplies with."""


def quantised(layer: Any) -> None:
    part = layer.self_attn.k_proj
    layer.self_attn.k_proj = Quantised(part.in_features, part.out_features)


def with_own_forward(layer: Any) -> None:
    layer.mlp.up_proj.forward = layer.mlp.up_proj.forward


def of_another_type(layer: Any) -> None:
    layer.mlp.up_proj.to(torch.bfloat16)


def with_one_more_part(layer: Any) -> None:
    layer.self_attn.q_norm = nn.Identity()


@pytest.mark.parametrize("change", [quantised, with_own_forward, of_another_type, with_one_more_part])
def test_layers_that_are_not_plain_are_left_alone(pair: Pair, change: Callable[[Any], None]) -> None:
    model = load_model(str(pair.path))
    assert can_fuse(model.runner.decoder, num_axes(model))
    change(model.runner.decoder.layers[-1])
    assert not can_fuse(model.runner.decoder, num_axes(model))


def test_a_family_with_other_layers_takes_upstreams(tmp_path: Path) -> None:
    path = write_tiny_qwen3(tmp_path / "model", seed=2)
    model, other = load_model(str(path)), load_model(str(path))
    assert type(model.runner) is Runner
    model.open_static_steps(POOL_BYTES)
    assert model.static is not None and model.static.layers == "upstream"
    close(model.step([(prefill(model), [5, 6])])[0], other.step([(prefill(other), [5, 6])])[0])


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@torch.inference_mode()
@pytest.mark.usefixtures("one_rank")
def test_a_share_of_a_model_is_fused_too(model: VideoLM) -> None:
    """As `localise` leaves it: sums behind attention and the MLP."""
    hidden, positions = some_rows(model, 3)
    expected = model.runner.run_through(hidden, positions, among_rows)
    for layer in decoder_of(model).layers:
        layer.self_attn.o_proj = SummedLinear(layer.self_attn.o_proj)
        layer.mlp.down_proj = SummedLinear(layer.mlp.down_proj)
    assert can_fuse(model.runner.decoder, num_axes(model))
    found = FusedLayers(model.runner.decoder)(hidden, positions, among_rows)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# -- glue -------------------------------------------------------------------------------------------------------------

SHAPE = GlueShape(eps=1e-6, hidden_size=64, inner_size=96, num_heads=8, num_rotated=6, head_dim=16)
COMPILES = [pytest.mark.skipif(shutil.which("g++") is None, reason="inductor writes C++ here"), pytest.mark.long]


def right_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden / (hidden.square().mean(-1, keepdim=True) + SHAPE.eps).sqrt() * weight


def right_rotation(packed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of numbers as complex ones, one after another."""
    heads = packed.unflatten(1, (-1, SHAPE.head_dim))[:, : SHAPE.num_rotated]
    half = SHAPE.head_dim // 2
    pairs = torch.complex(heads[..., :half], heads[..., half:])
    turned = pairs * torch.complex(cos[:, None, :half], sin[:, None, :half])
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.filterwarnings("default")  # of what a compiler does
@pytest.mark.parametrize("make", [exact_glue, torch_glue, pytest.param(compiled_glue, marks=COMPILES)])
@torch.inference_mode()
def test_glue_is_its_mathematics(make: MakeGlue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made, random = make(SHAPE), torch.Generator().manual_seed(4)

    def rows(width: int) -> Tensor:
        found = torch.randn(5, width, generator=random)
        torch._dynamo.maybe_mark_dynamic(found, 0)
        return found

    hidden, update, weight = rows(64), rows(64), torch.randn(64, generator=random)
    packed, inner, angles = rows(8 * 16), rows(2 * 96), rows(8)
    cos, sin = (torch.cat((part, part), 1) for part in (angles.cos(), angles.sin()))
    total, normed = made.add_norm(hidden, update, weight)
    torch.testing.assert_close(total, hidden + update)
    torch.testing.assert_close(normed.double(), right_norm(total.double(), weight.double()), rtol=1e-5, atol=1e-5)
    alone = made.norm(total, weight)
    torch.testing.assert_close(alone.double(), right_norm(total.double(), weight.double()), rtol=1e-5, atol=1e-5)
    turned = right_rotation(packed.double(), cos.double(), sin.double())
    torch.testing.assert_close(made.rotate(packed, cos, sin).double(), turned, rtol=1e-5, atol=1e-5)
    first, second = inner.double().chunk(2, -1)
    torch.testing.assert_close(made.gate(inner).double(), first / (1 + (-first).exp()) * second, rtol=1e-5, atol=1e-5)


def test_glue_that_fails_or_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(shape: GlueShape) -> Any:
        raise RuntimeError("no compiler")

    def is_wrong(shape: GlueShape) -> Any:
        return exact_glue(GlueShape(**{**vars(shape), "eps": 1.0}))

    ways: dict[str, MakeGlue] = {"fails": fails, "wrong": is_wrong, "torch": torch_glue, "exact": exact_glue}
    monkeypatch.setattr(glue, "known_glue", lambda device: ways)
    for like in (torch.empty(0), torch.empty(0, dtype=torch.bfloat16)):
        assert choose_glue(SHAPE, like, Accord())[0] == "torch"


def test_on_a_cpu_glue_is_upstreams() -> None:
    name, _ = choose_glue(SHAPE, torch.empty(0), Accord())
    assert name == "exact"
