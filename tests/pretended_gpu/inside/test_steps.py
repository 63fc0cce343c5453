"""A model's steps on the device, which are recorded there, beside the same model's on the CPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from slipstream.engine import DecodeState, VideoLM, load_model
from slipstream.engine.startup import try_static_steps
from slipstream.engine.static import steps, trials
from slipstream.engine.static.step import MAX_AHEAD
from slipstream.engine.static.windows import known_windows
from slipstream.families.qwen2_5_vl import multiply_patches
from slipstream.speculation.protocol import TokenTree
from tests.engine.conftest import random_frames
from tests.engine.test_tree_rows import trees
from tests.pretended_gpu import queue
from tests.support.tiny_checkpoint import write_tiny_llava, write_tiny_qwen
from tests.support.tiny_families import write_tiny_video_llama_3

FRAMES = random_frames(4, 2)
POOL_BYTES = 2**22
DTYPES = {"whole": "float32", "copy": "float32", "varlen": "bfloat16"}
"""By way to attend: flash attention knows 16 bits alone."""
MOST_ERROR = {"float32": 1e-4, "bfloat16": 0.3}
"""Of logits beside their norm. In bfloat16 the CPU's own differ by up to 0.1 from those in float32."""


@dataclass
class Twins:
    """One checkpoint at both places."""

    here: VideoLM
    there: VideoLM
    most_error: float

    def prefill(self, num_frames: int = 4) -> tuple[DecodeState, DecodeState]:
        return _prefill(self.there, num_frames), _prefill(self.here, num_frames)

    def close(self, there: torch.Tensor, here: torch.Tensor) -> None:
        here = here.float()
        assert (there.float().cpu() - here).norm() <= self.most_error * here.norm()


def _prefill(model: VideoLM, num_frames: int) -> DecodeState:
    frames = FRAMES[:num_frames]
    plan = model.plan_prompt("?", num_frames, frame_size=frames.shape[1:3])
    return model.start_prefill(plan, model.encode_frames(frames)).finish()[0]


@pytest.fixture(scope="module", params=list(DTYPES))
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    """That on the device takes steps that are recorded, or the test fails."""
    path, dtype = tmp_path_factory.mktemp("model"), DTYPES[request.param]
    write_tiny_llava(path, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "CAPACITIES", (1024,))
        patch.setattr(steps, "NUM_SESSIONS", (1, 2))
        patch.setattr(steps, "NUM_ROWS", (1, 4, 16))
        patch.setattr(trials, "MOST_TOKENS", {"cuda": 1024})
        patch.setattr(
            trials, "known_windows", lambda *given: [way for way in known_windows(*given) if way[0] == request.param]
        )
        there = load_model(str(path), device="cuda:0", dtype=dtype)
        try_static_steps(there, POOL_BYTES)
        assert there.static is not None and there.static.attention == request.param
        assert there.static.layers == "torch" and not there.static.missing
        yield Twins(load_model(str(path), dtype=dtype), there, MOST_ERROR[dtype])


@given(st.data())
@settings(
    max_examples=15,
    derandomize=True,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_history_is_that_of_the_cpu(twins: Twins, data: st.DataObject) -> None:
    pairs = [twins.prefill(1 + index % 3) for index in range(data.draw(st.integers(1, 2), label="sessions"))]
    for _ in range(data.draw(st.integers(1, 3), label="passes")):
        among = data.draw(st.lists(st.sampled_from(pairs), min_size=1, unique_by=id), label="sessions of the pass")
        windows = [data.draw(st.lists(st.integers(3, 290), min_size=1, max_size=16) | trees()) for _ in among]
        replays = queue.CALLS["replay"]
        found = twins.there.step([(state, window) for (state, _), window in zip(among, windows, strict=True)])
        assert queue.CALLS["replay"] > replays
        for (state, other), window, logits in zip(among, windows, found, strict=True):
            num_before = other.num_tokens
            twins.close(logits, twins.here.step([(other, window)])[0])
            kept = data.draw(st.integers(0, len(logits) - 1), label="kept")
            for each in (state, other):
                if isinstance(window, TokenTree):
                    each.keep_path(num_before, window.path(kept))
                else:
                    each.rollback(num_before + kept)
    for pair in pairs:
        for state in pair:
            state.close()


def test_tokens_are_written_ahead_with_one_wait(twins: Twins) -> None:
    (state, other), (alone, _) = twins.prefill(), twins.prefill()
    queue.CALLS.clear()
    written = twins.there.write_ahead([(state, 5)], MAX_AHEAD)
    found = queue.waits(), queue.CALLS["replay"], queue.CALLS["launch"], queue.CALLS["copy"]
    assert found == (1, MAX_AHEAD, 0, 1)
    assert written is not None
    token, one_by_one = 5, []
    for _ in range(MAX_AHEAD):
        token = twins.there.step_and_choose([(alone, [token])])[0].largest[0]
        one_by_one.append(token)
    assert written[0] == one_by_one
    twins.close(twins.there.step([(state, [3])])[0], _after(twins.here, other, [5, *one_by_one[:-1]], 3))
    state.close()
    alone.close()


def _after(model: VideoLM, state: DecodeState, token_ids: list[int], token: int) -> torch.Tensor:
    model.step([(state, token_ids)])
    return model.step([(state, [token])])[0]


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_a_verdict_takes_one_wait(twins: Twins, num_rows: int) -> None:
    (state, _) = twins.prefill()
    queue.CALLS.clear()
    twins.there.step_and_choose([(state, [5] * num_rows)])
    assert (queue.waits(), queue.CALLS["replay"], queue.CALLS["copy"]) == (1, 1, 1)
    assert queue.CALLS["launch"] <= 2
    state.close()


@pytest.mark.parametrize("write", [write_tiny_llava, write_tiny_qwen, write_tiny_video_llama_3])
def test_videos_and_prompts_are_those_of_the_cpu(write: Any, tmp_path: Path) -> None:
    write(tmp_path, seed=3)
    models = [load_model(str(tmp_path), device=device, dtype="float32") for device in ("cpu", "cuda:0")]
    upstreams = cast(Any, models[0]._adapter)._model.model  # on a GPU its patches are multiplied, which rounds so
    if write is write_tiny_qwen:
        multiply_patches(upstreams.visual.patch_embed.proj)
    elif write is write_tiny_video_llama_3:
        multiply_patches(upstreams.vision_model.embeddings.patch_embedding)
    frames = random_frames(6, 5, (56, 84))
    encoded = [model.encode_frames(frames).cpu() for model in models]
    torch.testing.assert_close(*encoded)
    plans = [model.plan_prompt("What is it?", 6, frame_size=(56, 84)) for model in models]
    logits = [
        model.start_prefill(plan, model.encode_frames(frames)).finish()[1].cpu()
        for model, plan in zip(models, plans, strict=True)
    ]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_nobody_waits_between_two_steps(twins: Twins) -> None:
    state, other = twins.prefill()
    token_ids = [7, 91, 18, 203]
    assert twins.there.static is not None
    found = [twins.there.static.run([(state, [token_id])]) for token_id in token_ids]
    for token_id, rows in zip(token_ids, found, strict=True):
        assert rows is not None
        twins.close(rows[0].logits, twins.here.step([(other, [token_id])])[0])
    state.close()
