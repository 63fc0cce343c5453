"""Static steps of a whole model: the logits of other steps, the same bits in every window, and what fits no step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.exc import FailOnRecompileLimitHit

from slipstream.engine import DecodeState, VideoLM, load_model
from slipstream.engine.startup import try_static_steps
from slipstream.engine.static import steps, trials
from slipstream.engine.static.pool import PooledCache
from slipstream.engine.static.step import MAX_AHEAD, Recorder, StaticStep, StepParts
from slipstream.engine.static.windows import JoinedWindows, StepShape, WholeWindows, known_windows
from slipstream.errors import LimitExceeded
from slipstream.sampling.sampler import NO_TOKEN
from slipstream.speculation.protocol import TokenTree
from tests.engine.conftest import Pair, random_frames
from tests.engine.test_qwen2_5_vl import load_qwen
from tests.engine.test_tree_rows import trees
from tests.support.tiny_checkpoint import write_tiny_qwen

FRAMES = random_frames(4, 2)
POOL_BYTES = 2**24
WIDTH = 16


def prefill(model: VideoLM, num_frames: int = 4) -> DecodeState:
    frames = FRAMES[:num_frames]
    return model.start_prefill(
        model.plan_prompt("?", num_frames, frame_size=frames.shape[1:3]), model.encode_frames(frames)
    ).finish()[0]


def static_model(pair: Pair, **options: Any) -> VideoLM:
    model = load_model(str(pair.path), **options)
    model.open_static_steps(POOL_BYTES)
    return model


@pytest.fixture(scope="module", params=["whole", "copy"])
def static(request: pytest.FixtureRequest, pair: Pair) -> VideoLM:
    """Takes static steps only: a step that fell back to an ordinary one would fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trials, "known_windows", lambda *given: [w for w in known_windows(*given) if w[0] == request.param]
        )
        model = static_model(pair)
    assert model.static is not None and model.static.attention == request.param
    return model


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_is_that_of_other_steps(pair: Pair, static: VideoLM, data: st.DataObject) -> None:
    num_sessions = data.draw(st.integers(1, 5), label="sessions")
    pairs = [(prefill(static, 1 + index % 3), prefill(pair.ours, 1 + index % 3)) for index in range(num_sessions)]
    for _ in range(data.draw(st.integers(1, 4), label="passes")):
        among = data.draw(st.lists(st.sampled_from(pairs), min_size=1, unique_by=id), label="sessions of the pass")
        windows = [data.draw(st.lists(st.integers(3, 290), min_size=1, max_size=40) | trees()) for _ in among]
        ours = static.step([(state, window) for (state, _), window in zip(among, windows, strict=True)])
        for (state, other), window, logits in zip(among, windows, ours, strict=True):
            num_before = other.num_tokens
            (expected,) = pair.ours.step([(other, window)])
            close(logits, expected)
            tree = window if isinstance(window, TokenTree) else None
            kept = data.draw(st.integers(0, len(logits) - 1), label="kept")
            for each in (state, other):
                if tree is None:
                    each.rollback(num_before + kept)
                else:
                    each.keep_path(num_before, tree.path(kept))
            assert state.num_tokens == other.num_tokens
    for state, _ in pairs:
        state.close()


def test_steps_are_taken_again_whoever_comes(static: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert static.static is not None
    made: list[object] = []
    monkeypatch.setattr(static.static, "_steps", {})
    begin = StaticStep.__init__

    def spy(self: StaticStep, *args: Any) -> None:
        made.append(args[-1])
        begin(self, *args)

    monkeypatch.setattr(StaticStep, "__init__", spy)
    first, second = prefill(static), prefill(static, 2)
    for window in ([5], [6, 7, 8], [9, 10, 11, 12]):
        static.step([(first, window)])
        static.step([(second, window)])
    assert [(shape.num_sessions, shape.num_rows) for shape in made] == [(1, 1), (1, 4)]  # type: ignore[attr-defined]


def test_tokens_are_written_ahead_as_one_by_one(pair: Pair, static: VideoLM) -> None:
    states, others = [prefill(static), prefill(static, 2)], [prefill(pair.ours), prefill(pair.ours, 2)]
    told: list[torch.Tensor] = []
    written = static.write_ahead([(states[0], 5), (states[1], 9)], 9, lambda logits: told.append(logits.clone()))
    assert written is not None and [len(tokens) for tokens in written] == [MAX_AHEAD] * 2
    assert [logits.argmax(-1).tolist() for logits in told] == [list(each) for each in zip(*written, strict=True)]
    for state, other, first, tokens in zip(states, others, (5, 9), written, strict=True):
        expected, token = [], first
        for _ in range(MAX_AHEAD):
            token = int(pair.ours.step([(other, [token])])[0].argmax())
            expected.append(token)
        assert tokens == expected and state.num_tokens == other.num_tokens
        (after,), (right,) = static.step([(state, [3])]), pair.ours.step([(other, [3])])
        close(after, right)


def test_logits_that_are_no_numbers_are_told(pair: Pair) -> None:
    broken = static_model(pair)
    state = prefill(broken)
    with torch.inference_mode():
        broken.runner.decoder.norm.weight.mul_(torch.nan)  # type: ignore[union-attr, operator]
    assert broken.write_ahead([(state, 5)], 2) == [[NO_TOKEN, NO_TOKEN]]


def test_the_context_ends_for_tokens_ahead(static: VideoLM) -> None:
    state = prefill(static)
    room = static.info.max_context - state.next_position
    with pytest.raises(LimitExceeded, match="end of the context"):
        static.write_ahead([(state, 5)], room + 1)


@pytest.mark.parametrize("attention", ["matmul", "sdpa"])
def test_a_window_has_the_same_bits_however_many_rows_are_real(pair: Pair, attention: str) -> None:
    model = static_model(pair, attention=attention, strict_width=WIDTH)
    token_ids = [5 + 7 * index % 200 for index in range(WIDTH)]
    state = prefill(model)
    num_before = state.num_tokens
    (whole,) = model.step([(state, token_ids)])
    for num_real in range(1, WIDTH):
        state.rollback(num_before)
        (part,) = model.step([(state, token_ids[:num_real])])
        assert torch.equal(part, whole[:num_real]) and state.num_tokens == num_before + num_real


@pytest.mark.parametrize("length", [1, 3, 8])
def test_a_token_has_the_same_bits_alone_and_in_a_window(pair: Pair, length: int) -> None:
    """Over places where granules begin, too."""
    model = static_model(pair, strict_width=WIDTH)
    token_ids = [5 + 7 * index % 200 for index in range(96)]
    by_width, by_length = prefill(model), prefill(model)
    rows = {
        width: torch.cat(
            [model.step([(state, token_ids[at : at + width])])[0] for at in range(0, len(token_ids), width)]
        )
        for width, state in ((WIDTH, by_width), (length, by_length))
    }
    assert torch.equal(rows[WIDTH], rows[length])


def test_a_pool_that_is_full_stops_nobody(pair: Pair) -> None:
    model = load_model(str(pair.path))
    model.open_static_steps(model.runner.kv_bytes_per_token * 64 * 9)
    states = [prefill(model) for _ in range(3)]
    assert [isinstance(state.cache, PooledCache) and state.cache.extent is not None for state in states][-1] is False
    other = prefill(pair.ours)
    for state in states:
        (logits,) = model.step([(state, [5, 6])])
        (expected,) = pair.ours.step([(other, [5, 6])])
        close(logits, expected)
        other.rollback(other.num_prompt_tokens)


def failing(error: Exception, note: Callable[[int], None] = lambda num_rows: None) -> Callable[..., None]:
    """A recording that fails; it notes its rows."""

    def fail(self: StaticStep, parts: StepParts, shape: StepShape) -> None:
        note(shape.num_rows)
        raise error

    return fail


CANNOT_RECORD = (
    RuntimeError("CUDA error: operation not permitted when stream is capturing"),
    FailOnRecompileLimitHit("Hard failure due to fullgraph=True"),
)


@pytest.mark.parametrize("error", CANNOT_RECORD, ids=lambda error: type(error).__name__)
def test_a_step_that_cannot_be_recorded_is_done_without(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    model = static_model(pair)
    monkeypatch.setattr(StaticStep, "__init__", failing(error))
    state, other = prefill(model), prefill(pair.ours)
    for _ in range(2):
        close(model.step([(state, [5, 6])])[0], pair.ours.step([(other, [5, 6])])[0])
    assert model.write_ahead([(state, 5)], 3) is None


def test_a_start_without_a_step_says_so(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ordinary passes, which are taken in their place, do not differ from themselves."""
    monkeypatch.setattr(StaticStep, "__init__", failing(RuntimeError("no kernel")))
    model = load_model(str(pair.path))
    try_static_steps(model, POOL_BYTES)
    assert model.static is None
    said = capsys.readouterr().out
    assert "static_steps.none" in said and "static_steps.on" not in said and "num_rows=8" in said


def test_a_start_says_which_steps_are_missing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = StaticStep.__init__

    def fail_at_8(self: StaticStep, parts: StepParts, shape: StepShape) -> None:
        if shape.num_rows == 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        begin(self, parts, shape)

    monkeypatch.setattr(StaticStep, "__init__", fail_at_8)
    model = load_model(str(pair.path))
    try_static_steps(model, POOL_BYTES)
    assert model.static is not None and {shape.num_rows for shape in model.static.missing} == {8}
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "static_steps.on" in line]
    assert "num_rows=8" in said and "num_rows=4" not in said


def test_what_had_no_room_is_not_tried_at_every_pass(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "FIRST_PATIENCE", 3)
    monkeypatch.setattr(steps, "MOST_PATIENCE", 6)
    model, tried, begin = static_model(pair), list[int](), StaticStep.__init__
    monkeypatch.setattr(StaticStep, "__init__", failing(torch.OutOfMemoryError("CUDA out of memory"), tried.append))
    state = prefill(model)

    def step(times: int) -> int:
        before = len(tried)
        for _ in range(times):
            model.step([(state, [5])])
        return len(tried) - before

    assert [step(1), step(3), step(1), step(6), step(1), step(6), step(1)] == [1, 0, 1, 0, 1, 0, 1]
    assert model.static is not None and [shape.num_rows for shape in model.static.missing] == [1]
    assert step(6) == 0
    monkeypatch.setattr(StaticStep, "__init__", begin)
    assert step(1) == 0 and model.static.missing == []


def test_steps_of_one_session_are_recorded_beforehand(pair: Pair) -> None:
    model = load_model(str(pair.path))
    model.open_static_steps(model.runner.kv_bytes_per_token * 5000)
    assert model.static is not None
    model.static.prepare()
    prepared = set(model.static._steps)
    assert {(shape.num_sessions, shape.capacity) for shape in prepared} == {(1, 4096), (1, 8192)}
    for length in (1, 3, 20):
        model.step([(prefill(model), [5] * length)])
    assert set(model.static._steps) == prepared


def test_ways_to_attend_that_are_wrong_or_fail_are_not_taken(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(WholeWindows):
        def _attend(self, *args: Any) -> torch.Tensor:
            return super()._attend(*args) * 1.1

    def fail(*args: Any) -> Any:
        raise RuntimeError("no kernel")

    ways = [("wrong", Wrong), ("fails", fail), ("whole", WholeWindows)]
    monkeypatch.setattr(trials, "known_windows", lambda *_: ways)
    model = static_model(pair)
    assert model.static is not None and model.static.attention == "whole"


@pytest.mark.parametrize("factor", [1.0, torch.nan])
def test_a_model_whose_static_steps_differ_goes_on_without(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    model = load_model(str(pair.path))
    try_static_steps(model, POOL_BYTES)
    assert model.static is not None

    def forgetful(self: JoinedWindows, layer: int, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return query * factor

    monkeypatch.setattr(WholeWindows, "_attend", forgetful)
    monkeypatch.setattr(steps, "choose_windows", lambda *_: ("whole", WholeWindows))
    model = load_model(str(pair.path))
    try_static_steps(model, POOL_BYTES)
    assert model.static is None
    close(model.step([(prefill(model), [5, 6])])[0], pair.ours.step([(prefill(pair.ours), [5, 6])])[0])


def test_positions_of_several_axes(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_tiny_qwen(tmp_path_factory.mktemp("qwen"), seed=5)
    ours, theirs = load_model(str(path)), load_qwen(path).ours
    ours.open_static_steps(POOL_BYTES)
    state, other = prefill(ours), prefill(theirs)
    close(ours.step([(state, [5, 6, 7])])[0], theirs.step([(other, [5, 6, 7])])[0])


def test_what_the_device_has_not_read_yet_is_not_overwritten(pair: Pair) -> None:
    """Runs one after the other, without a wait between them."""
    model = static_model(pair)
    state = prefill(model)
    model.step([(state, [5])])
    assert model.static is not None
    (step,) = model.static._steps.values()
    assert step is not None
    inputs, calls, read = step._inputs, list[str](), list[int]()

    class Event:
        """Of a device that copies when it is waited for."""

        def query(self) -> bool:
            return "record" not in calls or calls[-1] != "record"

        def synchronize(self) -> None:
            calls.append("synchronize")
            read.append(int(inputs._ids[0, 0]))

        def record(self) -> None:
            calls.append("record")

    inputs._copied = Event()  # type: ignore[assignment]
    for token in (6, 7, 8):
        model.step([(state, [token])])
    assert calls == ["record", "synchronize", "record", "synchronize", "record"] and read == [6, 7]


def test_the_way_that_is_fastest_as_it_is_recorded_is_taken(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes to launch a way's kernels, which a recording does once, counts for nothing."""
    replaying: list[bool] = []

    class Wordy(WholeWindows):
        def __call__(self, *args: Any) -> torch.Tensor:
            replaying.append(False)
            return super().__call__(*args)

    class Fast(Recorder):
        def record(self, compute: Any, *_: Any) -> Any:
            compute()
            return lambda: replaying.append(True)

    monkeypatch.setattr(trials, "known_windows", lambda *_: [("wordy", Wordy)])
    monkeypatch.setattr(steps, "Recorder", Fast)
    model = static_model(pair)
    assert model.static is not None and model.static.attention == "wordy"
    assert replaying == [False] * model.info.num_layers + [True] * trials._REPEATS
