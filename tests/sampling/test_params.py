"""What may be asked of sampling, and that every refusal names the option."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidRequest
from slipstream.sampling.params import RULES, SamplingParams

GOOD = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.001, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    min_new_tokens=st.integers(0, 2**31),
    seed=st.integers(0, 2**63 - 1),
    rule=st.sampled_from(RULES),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=16).map(tuple),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(GOOD)
def test_whatever_is_in_range_is_taken(params: SamplingParams) -> None:
    assert params.check() is params


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"temperature": float("nan")}, "temperature must be a finite number, not nan"),
        ({"temperature": float("inf")}, "temperature must be a finite number, not inf"),
        ({"temperature": -0.1}, "temperature must be between 0 and 100, not -0.1"),
        ({"temperature": 1e9}, "temperature must be between 0 and 100"),
        ({"temperature": "hot"}, "temperature must be a finite number, not 'hot'"),
        ({"temperature": True}, "temperature must be a finite number, not True"),
        ({"top_k": -1}, "top_k must be between 0 (all tokens) and 2^31, not -1"),
        ({"top_k": 2**31 + 1}, "top_k must be between 0 (all tokens) and 2^31"),
        ({"top_k": 1.5}, "top_k must be a whole number, not 1.5"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p must be a finite number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be between 0.001 and 100, not 0.0"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty must be between 0.001 and 100, not 1e-40"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be between 0.001 and 100"),
        ({"repetition_penalty": 101.0}, "repetition_penalty must be between 0.001 and 100"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be a finite number"),
        ({"temperature": 10**400}, "temperature must be between 0 and 100, not 1000"),
        ({"presence_penalty": -(10**400)}, "presence_penalty must be between -2 and 2, not -1000"),
        ({"min_p": -0.1}, "min_p must be between 0 and 1, not -0.1"),
        ({"min_p": 1.1}, "min_p must be between 0 and 1, not 1.1"),
        ({"min_p": "few"}, "min_p must be a finite number, not 'few'"),
        ({"presence_penalty": -2.1}, "presence_penalty must be between -2 and 2, not -2.1"),
        ({"frequency_penalty": 3}, "frequency_penalty must be between -2 and 2, not 3"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be a finite number"),
        ({"min_new_tokens": -1}, "min_new_tokens must be between 0 and 2^31, not -1"),
        ({"min_new_tokens": 1.5}, "min_new_tokens must be a whole number, not 1.5"),
        ({"min_new_tokens": 2, "regex": "a"}, "min_new_tokens cannot be asked for together with regex, which ends it"),
        ({"seed": -1}, "seed -1 is out of range; give one from 0 to below 2^63"),
        ({"seed": 2**63}, "is out of range; give one from 0 to below 2^63"),
        ({"rule": "greedy"}, "sampling_rule 'greedy' is unknown; choose one of coupled, rejection"),
        ({"stop": "end"}, "stop must be a list of strings"),
        ({"stop": (7,)}, "stop must be a list of strings"),
        ({"stop": ("",)}, "stop strings must have 1 to 256 characters; one has 0"),
        ({"stop": ("x" * 257,)}, "stop strings must have 1 to 256 characters; one has 257"),
        ({"stop": tuple("abcdefghijklmnopq")}, "stop has 17 strings; at most 16 are allowed"),
    ],
)
def test_refusals_name_the_option(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**changes).check()
    assert complaint in str(error.value)


def test_proposals_are_sent_for_random_draws_only() -> None:
    assert SamplingParams(temperature=1.0, rule="rejection").sends_proposals
    assert not SamplingParams(temperature=1.0).sends_proposals
    assert not SamplingParams(rule="rejection").sends_proposals
    assert SamplingParams().greedy
