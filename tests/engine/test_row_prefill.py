"""A prompt whose rows ride along passes, of any sizes, is the prompt that runs by itself; and its company stays as it
was."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.engine import DecodeState, PromptPlan, VideoLM, load_model
from slipstream.engine.ride_plan import RideCounts
from slipstream.engine.row_prefill import Ride, RowPrefill
from slipstream.engine.segments import Window
from slipstream.speculation.protocol import ROOT, TokenTree
from slipstream.video.messages import SampledVideo
from tests.engine.test_qwen2_5_vl import greedy
from tests.support import tiny_checkpoint, tiny_families, tiny_glm4v
from tests.support.clips import make_colour_clip, sample_clip
from tests.support.reference import Reference

FAMILIES = {
    "glm4v": partial(tiny_glm4v.write_tiny_glm4v, layers=5),
    "llava_onevision": tiny_checkpoint.write_tiny_llava,
    "qwen2_5_vl": tiny_checkpoint.write_tiny_qwen,
    "qwen3_vl": partial(tiny_families.write_tiny_qwen3, layers=5),
}
PROMPT, NUM_TOKENS, GUIDANCE_LAYER = "Describe the video.", 16, 2
RIDER, HOST = (sample_clip(make_colour_clip(seed), num_frames) for seed, num_frames in ((3, 12), (2, 5)))
TREE = TokenTree((7, 8, 9, 10), (ROOT, 0, 0, 2))


@dataclass
class Family:
    ours: VideoLM
    theirs: Reference

    def rider(self) -> RowPrefill:
        embeddings = self.ours.encode_frames(RIDER.frames)
        return self.ours.start_row_prefill(self._plan(RIDER), embeddings, guidance_layer=GUIDANCE_LAYER)

    def prefilled(self, video: SampledVideo) -> tuple[DecodeState, torch.Tensor]:
        return self.ours.start_prefill(self._plan(video), self.ours.encode_frames(video.frames)).finish()

    def guidance(self) -> list[torch.Tensor]:
        """States of video and text before the first layer and behind layer L, of a prompt that runs by itself."""
        prefill = self.ours.start_prefill(self._plan(RIDER), self.ours.encode_frames(RIDER.frames))
        before = [prefill.video_states(), prefill.text_states()]
        prefill.run_layers(GUIDANCE_LAYER)
        return [*before, prefill.video_states(), prefill.text_states()]

    def _plan(self, video: SampledVideo) -> PromptPlan:
        return self.ours.plan_prompt(
            PROMPT,
            len(video.frames),
            frame_size=video.frames.shape[1:3],
            seconds_per_frame=video.duration_s / len(video.frames),
            times_s=video.timestamps_s,
        )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    path = FAMILIES[request.param](tmp_path_factory.mktemp(request.param), seed=5, max_context=2048)  # type: ignore[operator]
    family = Family(load_model(str(path)), Reference(path))
    family.theirs.model.generation_config.eos_token_id = None
    return family


def within(prefill: RowPrefill, first: int, second: int) -> RideCounts:
    """As many of these rows as there are."""
    done, num_rows = prefill.num_done, prefill.num_rows
    first = min(first, num_rows - done.first)
    return RideCounts(first, min(second, done.first + first - done.second))


SIZES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 3)), max_size=6)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, rest=st.integers(1, 200))
def test_rides_of_any_size_change_no_text(family: Family, sizes: list[tuple[int, int, int]], rest: int) -> None:
    """`sizes`: rows in each stage, and what decodes beside them: nobody, a token, a window, a tree."""
    prefill = family.rider()
    state, first = family.prefilled(HOST)
    reference, _ = family.prefilled(HOST)
    tokens = [int(first.argmax())]
    for first_rows, second_rows, beside in sizes:
        counts = within(prefill, first_rows, second_rows)
        if not beside:
            prefill.run_alone(counts)
            continue
        window: Window = ([tokens[-1]], [tokens[-1], 5, 6], TREE)[beside - 1]
        before = state.num_tokens
        (logits,) = family.ours.step([(state, window)], Ride(prefill, counts))
        (expected,) = family.ours.step([(reference, window)])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        for each in (state, reference):
            assert each.num_tokens == before + len(logits)
            each.rollback(before) if beside > 1 else None
        if beside == 1:
            tokens.append(int(logits[-1].argmax()))
    while not prefill.is_done:
        prefill.run_alone(within(prefill, rest, rest))
    answer, logits = prefill.finish()
    whole, expected = family.prefilled(RIDER)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    ours = greedy(family.ours, answer, logits, NUM_TOKENS)
    assert ours == greedy(family.ours, whole, expected, NUM_TOKENS)
    for each in (state, reference, answer, whole):
        each.close()


def test_what_rode_along_writes_what_upstream_generates(family: Family) -> None:
    prefill = family.rider()
    state, _ = family.prefilled(HOST)
    while not prefill.is_done:
        family.ours.step([(state, [5])], Ride(prefill, within(prefill, 7, 5)))
    ours = greedy(family.ours, *prefill.finish(), NUM_TOKENS)
    assert ours == family.theirs.answer(RIDER, PROMPT, NUM_TOKENS)


def test_guidance_is_there_when_the_first_layers_are_done(family: Family) -> None:
    prefill, expected = family.rider(), family.guidance()
    while prefill.num_done.first < prefill.num_rows:
        prefill.run_alone(within(prefill, 11, 3))
    assert not prefill.is_done and 0 < prefill.share_done < 1
    found = [prefill.video_states(0), prefill.text_states(0), prefill.video_states(1), prefill.text_states(1)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_pass_that_fails_keeps_what_rode_and_changes_nobody(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = family.rider()
    state, _ = family.prefilled(HOST)
    reference, _ = family.prefilled(HOST)
    logits = family.ours.runner.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(family.ours.runner, "logits", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        family.ours.step([(state, [5])], Ride(prefill, within(prefill, 9, 4)))
    monkeypatch.setattr(family.ours.runner, "logits", logits)
    assert prefill.num_done == RideCounts(9, 4)
    torch.testing.assert_close(family.ours.step([(state, [5])]), family.ours.step([(reference, [5])]))
    while not prefill.is_done:
        prefill.run_alone(within(prefill, 50, 50))
    assert greedy(family.ours, *prefill.finish(), NUM_TOKENS) == family.theirs.answer(RIDER, PROMPT, NUM_TOKENS)
