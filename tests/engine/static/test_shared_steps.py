"""Static steps of a model that several processes share: the text of one process without any, whoever asks what; the
same places at every rank; and what one rank cannot do, none does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine import DecodeState, VideoLM
from slipstream.engine.parallel.mirror import MirroredPooledCache
from slipstream.engine.parallel.steps import MirroredSteps
from slipstream.engine.sparse_drafter import SparseState
from slipstream.engine.startup import try_static_steps
from slipstream.engine.static import steps, trials
from slipstream.engine.static.accord import Accord
from slipstream.engine.static.pool import PooledCache
from slipstream.engine.static.step import MAX_AHEAD, StaticStep
from slipstream.engine.static.trials import fastest
from slipstream.engine.static.windows import StepShape
from slipstream.engine.text_attention import TextAttention
from slipstream.errors import ModelNotUsable
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import TargetSampler
from slipstream.speculation.protocol import TokenTree
from tests.engine.static.test_static_steps import close
from tests.engine.test_ranks import FRAMES, PROMPT, Spread, greedy, prefilled, start
from tests.support.tiny_checkpoint import write_tiny_llava

POOL_TOKENS = 5000
GONE_S = 5.0


def open_steps(spread: VideoLM, num_tokens: int = POOL_TOKENS) -> MirroredSteps:
    try_static_steps(spread, num_tokens * spread.runner.kv_bytes_per_token)
    assert isinstance(spread.static, MirroredSteps)
    return spread.static


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llava(tmp_path_factory.mktemp("shared") / "model", seed=1, layers=3, heads=8, kv_heads=4)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def opened(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Spread]:
    found = start(checkpoint, request.param)
    open_steps(found.spread)
    yield found
    assert not found.losses
    found.leader.close()


@pytest.fixture
def spread(opened: Spread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spread]:
    """Whose shared model takes static steps, or the test fails."""
    found, taken = opened.spread.static, []
    assert found is not None
    run, write = found.run, found.write_ahead

    def spy(outcome: Any) -> Any:
        taken.append(outcome is not None)
        return outcome

    monkeypatch.setattr(found, "run", lambda *args: spy(run(*args)))
    monkeypatch.setattr(found, "write_ahead", lambda *args: spy(write(*args)))
    yield opened
    assert taken and all(taken)


def test_greedy_text_is_that_of_one_process(spread: Spread) -> None:
    expected, found = (greedy(model, *prefilled(model), 40) for model in spread.both())
    assert found == expected


def test_sampled_text_is_that_of_one_process(spread: Spread) -> None:
    texts = []
    for model in spread.both():
        state, logits = prefilled(model)
        sampler = TargetSampler(SamplingParams(temperature=0.9, top_p=0.95, seed=7), (), model.info.vocab_size)
        tokens: list[int] = []
        logits = logits[None]
        for _ in range(24):
            tokens.append(sampler.judge(logits, tokens, ())[1])
            (logits,) = model.step([(state, tokens[-1:])])
        texts.append(tokens)
    assert texts[0] == texts[1]


def test_windows_of_every_width_and_their_rollbacks(spread: Spread) -> None:
    rows = []
    for model in spread.both():
        state, _ = prefilled(model)
        found = []
        for width in range(1, 17):
            (logits,) = model.step([(state, list(range(3, 3 + width)))])
            found.append(logits)
            state.rollback(state.num_tokens - width // 2)
        rows.append(torch.cat(found))
    close(*rows)
    assert rows[0].argmax(-1).equal(rows[1].argmax(-1))


def test_trees_and_the_paths_that_are_kept(spread: Spread) -> None:
    rows = []
    for model in spread.both():
        state, _ = prefilled(model)
        before = state.num_tokens
        (logits,) = model.step([(state, TokenTree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 2)))])
        state.keep_path(before, [0, 2, 4])
        rows.append(torch.cat([logits, *model.step([(state, [11, 12])])]))
    close(*rows)


def test_several_sessions_in_one_pass(spread: Spread) -> None:
    """Chains and a tree, a pruned prompt among them."""
    rows = []
    for model in spread.both():
        keep = torch.arange(0, model.plan_prompt(PROMPT, len(FRAMES)).num_video_tokens, 3)
        states = [prefilled(model)[0], prefilled(model, keep=keep)[0], prefilled(model)[0]]
        windows: list[Any] = [[3, 4], [5], TokenTree((6, 7, 8), (-1, 0, 0))]
        for _ in range(2):
            rows.append(torch.cat(model.step(list(zip(states, windows, strict=True)))))
            for state in states:
                state.rollback(state.num_prompt_tokens)
    close(torch.cat(rows[:2]), torch.cat(rows[2:]))


def test_a_kept_prefix_is_gone_on_from(spread: Spread) -> None:
    """As the target keeps and reuses prefills: trimmed in its place, copied for each who comes."""
    rows = []
    for model in spread.both():
        state, _ = prefilled(model)
        plan = model.plan_prompt("What else?", len(FRAMES))
        kept = state.cache.trimmed(plan.text_start)
        for _ in range(2):
            cache = kept.fork(plan.text_start, plan.num_tokens + 8)
            again, logits = model.resume_prefill(plan, cache).finish()
            rows.append(torch.cat([logits[None], *model.step([(again, [1, 2, 3])])]))
        kept.clear()
    close(torch.cat(rows[:2]), torch.cat(rows[2:]))


def test_tokens_ahead_are_those_of_single_steps(spread: Spread) -> None:
    alone, shared = spread.both()
    (one, first), (other, second) = prefilled(alone), prefilled(shared)
    token = int(first.argmax())
    assert token == int(second.argmax())
    expected = [token]
    for _ in range(MAX_AHEAD):
        (logits,) = alone.step([(one, expected[-1:])])
        expected.append(int(logits.argmax()))
    told: list[torch.Tensor] = []
    assert shared.write_ahead([(other, token)], 9, lambda logits: told.append(logits.clone())) == [expected[1:]]
    assert [int(logits.argmax()) for logits in told] == expected[1:]
    assert other.num_tokens == one.num_tokens
    close(*(model.step([(state, [3])])[0] for model, state in ((alone, one), (shared, other))))


def test_a_draft_from_the_own_model(spread: Spread) -> None:
    """Sparse caches do not lie whole in the pool: their steps are ordinary ones, the dense state's are static."""
    drafted = []
    for model in spread.both():
        attention = TextAttention(model.plan_prompt(PROMPT, len(FRAMES)))
        state, _ = prefilled(model, observer=attention)
        sparse = SparseState(state, attention, 5)
        rows = model.step([(state, [7, 8, 9])])[0]
        static, model.static = model.static, None
        sparse.sync(state)
        rows = torch.cat([rows, model.step([(sparse, [7])])[0]])
        model.static = static
        drafted.append(rows)
    close(*drafted)


def histories(model: VideoLM) -> list[torch.Tensor]:
    """Sessions that come and go in turns, with prompts of several lengths, some forgotten without a word."""
    rows, states = [], list[DecodeState]()
    for turn in range(24):
        plan = model.plan_prompt("word " * (1 + 5 * turn % 17), len(FRAMES))
        with torch.inference_mode():
            prefill = model.start_prefill(plan, model.encode_frames(FRAMES), headroom=1 + 13 * turn % 90)
            states.append(prefill.finish()[0])
        windows = [[3 + turn % 50] * (1 + (turn + index) % 4) for index in range(min(4, len(states)))]
        rows += model.step(list(zip(states[-4:], windows, strict=False)))
        if turn % 3 == 0:
            states.pop(0).close()
        if turn % 4 == 1:
            states.pop(turn % len(states))
    return rows


def test_places_are_the_same_at_every_rank(spread: Spread) -> None:
    """Through gaps, growth and moves; a follower refuses a step whose place is another one there."""
    close(*(torch.cat(histories(model)) for model in spread.both()))


def test_steps_of_other_shapes_are_made_when_they_are_needed(spread: Spread) -> None:
    taken, shape = spread.spread.static, StepShape(2, 32, 4096)
    assert taken is not None and shape not in taken._steps
    states = [prefilled(spread.spread)[0] for _ in range(2)]
    spread.spread.step([(state, [5] * 20) for state in states])
    assert taken._steps[shape] is not None


@pytest.fixture
def fresh(opened: Spread) -> Iterator[Spread]:
    """Whose steps a test opens anew."""
    opened.spread.static = None
    yield opened
    assert not opened.losses


def same_bits_alone(model: VideoLM, width: int) -> torch.Tensor:
    """Of a window's rows, which are those of its tokens in smaller windows bit by bit."""
    token_ids = [5 + 7 * index % 200 for index in range(width)]
    (state, _), (other, _) = prefilled(model), prefilled(model)
    (whole,) = model.step([(state, token_ids)])
    parts = [model.step([(other, token_ids[at : at + 4])])[0] for at in range(0, width, 4)]
    assert torch.equal(whole, torch.cat(parts))
    return whole


def test_a_fixed_width_is_the_one_that_rank_0_has_timed(fresh: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, which find it too dear on a CPU, have no say."""
    opened = open_steps(fresh.spread, 2000)
    monkeypatch.setattr(steps, "choose_width", lambda times: 16)
    opened.fix_widths()
    assert opened.fixed_widths == {4096: 16}
    same_bits_alone(fresh.spread, 16)


def test_a_way_to_attend_is_the_one_that_rank_0_has_chosen(fresh: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "fastest", lambda timed: "copy" if all(map(len, timed)) else "whole")
    assert open_steps(fresh.spread).attention == "copy"
    close(*(model.step([(prefilled(model)[0], [5, 6, 7])])[0] for model in fresh.both()))


def test_a_strict_width(fresh: Spread) -> None:
    """A token has the same bits in a window and alone, and is that of one process."""
    model = fresh.spread
    model.strict_width = 16
    try:
        model.open_static_steps(POOL_TOKENS * model.runner.kv_bytes_per_token)
        whole = same_bits_alone(model, 16)
    finally:
        model.strict_width = 0
    token_ids = [5 + 7 * index % 200 for index in range(16)]
    close(whole, fresh.alone.step([(prefilled(fresh.alone)[0], token_ids)])[0])


def test_a_pool_that_is_full_stops_nobody(fresh: Spread) -> None:
    open_steps(fresh.spread, 64 * 18)
    states = [prefilled(fresh.spread)[0] for _ in range(3)]
    assert [isinstance(state.cache, PooledCache) and state.cache.extent is not None for state in states][-1] is False
    expected = fresh.alone.step([(prefilled(fresh.alone)[0], [5, 6])])[0]
    for state in states:
        close(fresh.spread.step([(state, [5, 6])])[0], expected)
    for state in states:
        state.close()


def test_a_cache_outgrows_its_place_and_then_the_pool(fresh: Spread) -> None:
    fresh.spread.open_static_steps(64 * 6 * fresh.spread.runner.kv_bytes_per_token)
    assert fresh.spread.static is not None
    pool = fresh.spread.static.pool
    rows, extents = [], list[int]()
    for model in fresh.both():
        first, second = (prefilled(model, headroom=1)[0] for _ in range(2))
        found = []
        for turn in range(20):
            found += model.step([(first, range(5 + turn, 21 + turn))])
            if isinstance(first.cache, MirroredPooledCache):
                extents.append(0 if first.cache.extent is None else first.cache.extent.start)
        rows.append(torch.cat([*found, *model.step([(second, [5, 6])])]))
    close(*rows)
    assert len(set(extents)) > 2 and extents[-1] == 0 and pool.num_free > 0


def test_a_step_that_one_rank_cannot_record_is_taken_by_none(fresh: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = open_steps(fresh.spread)
    state, other = prefilled(fresh.spread)[0], prefilled(fresh.alone)[0]
    begin, shape = StaticStep.__init__, StepShape(1, 4, 16384)

    def fail(self: StaticStep, parts: Any, shape: StepShape) -> None:
        begin(self, parts, shape)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with monkeypatch.context() as patch:
        patch.setattr(StaticStep, "__init__", fail)
        assert taken.step(shape) is None
    assert taken._steps[shape] is None
    close(fresh.spread.step([(state, [5, 6])])[0], fresh.alone.step([(other, [5, 6])])[0])


def test_a_pool_for_which_a_rank_has_no_room_is_refused_at_all(fresh: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    accord = type(open_steps(fresh.spread)._accord)
    monkeypatch.setattr(accord, "pool_type", full)
    with pytest.raises(ModelNotUsable, match=r"do not fit on cpu, where .* are free"):
        fresh.spread.open_static_steps(2**20)


def test_what_all_ranks_can_do_is_taken_and_the_slowest_counts() -> None:
    timed = [{"whole": 3.0, "copy": 1.0, "varlen": 0.5}, {"whole": 3.5, "copy": 9.0}]
    assert fastest(timed) == "whole" and fastest(timed[:1]) == "varlen" and fastest([{}, {"copy": 1.0}]) == "whole"
    assert Accord().agree(3, max) == 3
