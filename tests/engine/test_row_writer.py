"""Tokens that are written row by row are those of passes, and whatever cannot be written so takes passes."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.engine import DecodeState, VideoLM, fused_runner, load_model
from slipstream.engine.compiled import blocked_attention, decoder_row
from slipstream.engine.compiled.code import Vectors, vectors_for
from slipstream.engine.compiled.decoder_row import CompiledRow
from slipstream.engine.fused_runner import MOST_AHEAD, Row, RowWriter, TorchRow
from slipstream.errors import LimitExceeded
from slipstream.sampling.sampler import NO_TOKEN
from slipstream.speculation.protocol import TokenTree
from tests.engine.conftest import Pair
from tests.engine.static.test_static_steps import FRAMES, close, prefill
from tests.engine.test_tree_rows import trees
from tests.support.tiny_checkpoint import write_tiny_llava, write_tiny_qwen
from tests.support.tiny_families import write_tiny_qwen3

FOREVER_S = 1e9


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_runner, "AHEAD_S", FOREVER_S)


def wide_llava(path: Path) -> VideoLM:
    """Of rows, and halves of heads, that are whole vectors, and a vocabulary that is not."""
    return load_model(str(write_tiny_llava(path, seed=3, vocab=325, hidden=128)))


def wide_llava_in_halves(path: Path) -> VideoLM:
    """Of weights that bfloat16 holds."""
    model = wide_llava(path)
    with torch.inference_mode():
        for weight in (*model.runner.decoder.parameters(), *model.runner.lm_head.parameters()):
            weight.copy_(weight.bfloat16())
    return model


MODELS: dict[str, tuple[Callable[[Path], VideoLM], type[Row]]] = {
    "llava": (lambda path: load_model(str(write_tiny_llava(path, seed=3))), TorchRow),
    "qwen": (lambda path: load_model(str(write_tiny_qwen(path, seed=3))), TorchRow),
    "wide llava": (wide_llava, CompiledRow),
    "wide llava in halves": (wide_llava_in_halves, CompiledRow),
    "wide qwen": (lambda path: load_model(str(write_tiny_qwen(path, seed=3, hidden=128))), CompiledRow),
}
"""Each with what writes its rows."""


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    make, row = MODELS[request.param]
    model = make(tmp_path_factory.mktemp("rows"))
    if row is CompiledRow and vectors_for(torch.float32) is None:
        pytest.skip("this processor has no vectors that pay")
    with pytest.MonkeyPatch.context() as patch:
        if row is CompiledRow:
            patch.setattr(fused_runner, "TorchRow", Never)
        model.write_ahead([(prefill(model), 5)], 1)
    return model


class Never:
    """Stands where a row of torch's would, which must not be needed."""

    def __init__(self, *_: object) -> None:
        pass

    def begin(self, *_: object) -> bool:
        raise AssertionError("a compiled row was left to torch")


def by_passes(model: VideoLM, state: DecodeState, token: int, num_tokens: int) -> list[int]:
    chosen = []
    for _ in range(num_tokens):
        token = int(model.step([(state, [token])])[0].argmax())
        chosen.append(token)
    return chosen


@given(st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_is_that_of_passes(model: VideoLM, data: st.DataObject) -> None:
    """Also of a cache that grows meanwhile: what its layers hold is the same in the end."""
    state, other = prefill(model), prefill(model)
    for _ in range(data.draw(st.integers(1, 4), label="lines")):
        window = data.draw(st.lists(st.integers(3, 250), max_size=3), label="window")
        for each in (state, other):
            if window:
                model.step([(each, window)])
        token, num_tokens = data.draw(st.integers(3, 250), label="token"), data.draw(st.integers(1, 9), label="ahead")
        written = model.write_ahead([(state, token)], num_tokens)
        assert written == [by_passes(model, other, token, min(num_tokens, MOST_AHEAD))]
        assert state.num_tokens == other.num_tokens
        kept = data.draw(st.integers(other.num_prompt_tokens, other.num_tokens), label="kept")
        for each in (state, other):
            each.rollback(kept)
    close(model.step([(state, [5, 6])])[0], model.step([(other, [5, 6])])[0])


@given(st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nodes_of_any_tree_are_those_of_passes(model: VideoLM, data: st.DataObject) -> None:
    """Read in two goes, and kept as a path."""
    tree = data.draw(trees(9), label="tree")
    state, other = prefill(model), prefill(model)
    num_text = state.num_tokens
    first = data.draw(st.integers(1, len(tree)), label="first")
    for begun, end in ((0, first), (first, len(tree))):
        if begun < end:
            part = TokenTree(tree.token_ids[:end], tree.parents[:end], num_cached=begun)
            (expected,) = model.step([(other, part)])
            close(model.runner.read_nodes(state.cache, part, state.next_position - begun), expected)
    assert state.num_tokens == other.num_tokens
    for each in (state, other):
        each.keep_path(num_text, tree.path(len(tree) - 1))
    close(model.step([(state, [5, 6])])[0], model.step([(other, [5, 6])])[0])


def test_how_many_nodes_are_read_row_by_row(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    state, heard = prefill(model), list[int]()
    monkeypatch.setattr(model, "on_pass", lambda num_states, seconds: heard.append(num_states))
    row = model.runner._writer._rows[0]  # type: ignore[attr-defined]
    for num_threads, expected in ((2, 1), (1, 4)):
        monkeypatch.setattr(torch, "get_num_threads", lambda num_threads=num_threads: num_threads)
        is_small = isinstance(row, CompiledRow) and row._is_cached
        assert model.most_nodes == (8 if is_small else expected if isinstance(row, CompiledRow) else 1)
    most = model.most_nodes
    many, few = (TokenTree((5,) * num, tuple(range(-1, num - 1))) for num in (most + 1, most))
    assert model.read_nodes(state, many) is None and not heard
    logits = model.read_nodes(state, few)
    assert logits is not None and logits.shape == (most, model.info.vocab_size) and heard == [1]


def with_little_room(model: VideoLM) -> DecodeState:
    size = FRAMES.shape[1:3]
    plan = model.plan_prompt("?", len(FRAMES), frame_size=size)
    return model.start_prefill(plan, model.encode_frames(FRAMES), headroom=1).finish()[0]


def test_a_full_cache_grows(model: VideoLM) -> None:
    state, other = with_little_room(model), prefill(model)
    capacity, token = state.cache.capacity, 7
    while state.num_tokens <= capacity:
        written = model.write_ahead([(state, token)], MOST_AHEAD)
        assert written == [by_passes(model, other, token, MOST_AHEAD)]
        token = written[0][-1]
    assert state.cache.capacity > capacity
    close(model.step([(state, [5])])[0], model.step([(other, [5])])[0])


def test_orders_are_looked_at_after_a_while(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_runner, "AHEAD_S", 0.0)
    state = prefill(model)
    before = state.num_tokens
    (written,) = model.write_ahead([(state, 5)], MOST_AHEAD) or []
    assert len(written) == 1 and state.num_tokens == before + 1


def test_the_context_ends(model: VideoLM) -> None:
    state = prefill(model)
    with pytest.raises(LimitExceeded, match="end of the context"):
        model.write_ahead([(state, 5)], model.info.max_context - state.next_position + 1)


def test_passes_are_counted(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    monkeypatch.setattr(model, "on_pass", lambda num_states, seconds: heard.append(num_states))
    model.write_ahead([(prefill(model), 5)], 3)
    assert heard == [1]


@pytest.fixture
def own(tmp_path: Path) -> VideoLM:
    return load_model(str(write_tiny_llava(tmp_path / "own", seed=3)))


def test_logits_that_are_no_numbers_are_told(own: VideoLM) -> None:
    state = prefill(own)
    with torch.inference_mode():
        own.runner.decoder.norm.weight.mul_(torch.nan)  # type: ignore[operator]
    assert own.write_ahead([(state, 5)], 2) == [[NO_TOKEN]]


def with_a_bias_behind_attention(model: Any) -> None:
    """As Llama's layers may have one."""
    part = model.runner.fused.layers[0].output
    object.__setattr__(part, "bias", torch.zeros(len(part.weight)))


def with_a_bias_of_the_head(model: Any) -> None:
    model.runner.lm_head.bias = torch.nn.Parameter(torch.zeros(1))


def with_scaled_embeddings(model: Any) -> None:
    embeddings = model.runner.decoder.embed_tokens
    model.runner.decoder.embed_tokens = type("Scaled", (torch.nn.Embedding,), {})(*embeddings.weight.shape)


@pytest.mark.parametrize("change", [with_a_bias_behind_attention, with_a_bias_of_the_head, with_scaled_embeddings])
def test_what_is_not_plain_takes_passes(own: VideoLM, change: Callable[[Any], None]) -> None:
    state = prefill(own)
    before = state.num_tokens
    change(own)
    assert own.write_ahead([(state, 5)], 2) is None and state.num_tokens == before


def test_sixteen_bits_a_strict_width_another_family_and_company_take_passes(pair: Pair, tmp_path: Path) -> None:
    path = str(pair.path)
    other = write_tiny_qwen3(tmp_path / "model", seed=2)
    for model in (load_model(path, dtype="bfloat16"), load_model(path, strict_width=4), load_model(str(other))):
        assert model.write_ahead([(prefill(model), 5)], 2) is None
    assert pair.ours.write_ahead([(prefill(pair.ours), 5), (prefill(pair.ours, 2), 5)], 2) is None


def test_logits_are_told_token_by_token(model: VideoLM) -> None:
    state, other, told = prefill(model), prefill(model), list[torch.Tensor]()
    written = model.write_ahead([(state, 5)], 3, lambda logits: told.append(logits.clone()))
    assert written is not None and len(told) == len(written[0])
    for logits, token in zip(told, [5, *written[0]], strict=False):
        close(logits, model.step([(other, [token])])[0])


def test_nothing_of_a_session_is_held_behind_its_rows(model: VideoLM) -> None:
    state = prefill(model)
    model.write_ahead([(state, 5)], 2)
    left = weakref.ref(state.cache)
    buffers = [weakref.ref(held.keys) for held in map(state.cache.opened, range(state.cache.num_layers))]
    state.close()
    del state
    assert left() is None and not any(buffer() is not None for buffer in buffers)


def test_sessions_in_turns_make_no_rotation_twice(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """At places of which one has been before, and others in between."""
    made: list[int] = []
    make = RowWriter._make_angles

    def spy(writer: RowWriter, first_position: int) -> Any:
        made.append(first_position)
        return make(writer, first_position)

    monkeypatch.setattr(RowWriter, "_make_angles", spy)
    monkeypatch.setattr(fused_runner, "MOST_ANGLES", 3)
    writer = model.runner._row_writer()  # type: ignore[attr-defined]
    monkeypatch.setattr(writer, "_angles", {})
    for _ in range(3):
        for position in (70, 130, 71, 200):
            writer._angles_of(position)
    assert made == [64, 128, 192]
    writer._angles_of(0)
    assert made[3:] == [0] and list(writer._angles) == [2, 3, 0]


def test_what_is_not_of_one_type_is_not_read_by_place(tmp_path: Path) -> None:
    model = wide_llava(tmp_path / "model")
    layers = model.runner.fused  # type: ignore[attr-defined]
    layers.norms[1] = layers.norms[1].double()
    head = model.runner.lm_head.weight
    assert decoder_row.compiled_row(layers, model.runner.decoder.embed_tokens.weight, head) is None  # type: ignore[arg-type]


def test_halves_are_what_is_read(model: VideoLM, request: pytest.FixtureRequest) -> None:
    """Weights that bfloat16 holds exactly, and no others: no number changes."""
    rows = model.runner._writer._rows  # type: ignore[attr-defined]
    read = {tensor.dtype for row in rows if isinstance(row, CompiledRow) for tensor in row._read}
    assert (torch.bfloat16 in read) == ("in halves" in request.node.callspec.id)


def test_processors_with_narrower_vectors_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As AVX2 has them."""
    narrow = Vectors(vectors_for(torch.float32).number, 8, 2)  # type: ignore[union-attr]
    for module in (decoder_row, blocked_attention):
        monkeypatch.setattr(module, "vectors_for", lambda dtype: narrow)
    monkeypatch.setattr(decoder_row, "attention_for", blocked_attention.attention_for.__wrapped__)
    monkeypatch.setattr(fused_runner, "TorchRow", Never)
    model = wide_llava_in_halves(tmp_path / "model")
    assert model.write_ahead([(prefill(model), 5)], 9) == [by_passes(model, prefill(model), 5, 9)]


def test_a_large_model_and_one_whose_attention_is_torchs_are_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled for them, as a system may forbid."""
    path = str(write_tiny_llava(tmp_path / "model", seed=3, hidden=128))
    models = [load_model(path, attention="matmul"), load_model(path, attention="sdpa"), load_model(path)]
    monkeypatch.setattr(decoder_row, "MOST_WEIGHTS", 1000)
    monkeypatch.setattr(decoder_row, "_compile", None)
    for model in models:
        assert model.most_nodes == 1
        written = model.write_ahead([(prefill(model), 5)], 3)
        assert written == [by_passes(models[0], prefill(models[0]), 5, 3)]


def test_what_is_small_enough_is_compiled_for_compiled_attention_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = str(write_tiny_llava(tmp_path / "model", seed=3, hidden=128)), list[str]()

    def note(*_: object) -> None:
        asked.append(name)

    monkeypatch.setattr(decoder_row, "compiled_row", note)
    for name in ("matmul", "sdpa", "compiled"):
        assert load_model(path, attention=name).most_nodes == 1
    assert asked == ["compiled"]
