"""What a text may go on with: by another library's partial matching; by the text alone, whatever was asked before."""

import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PrefixConstrainedLogitsProcessor

from slipstream.errors import InvalidConfig, InvalidRequest, SlipstreamError
from slipstream.families.adapter import TextDecoder
from slipstream.sampling.grammar import refusal, trial_environment
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import DraftSampler, TargetSampler, Warp
from slipstream.sampling.structure import Structure, Structures
from tests.sampling.test_warp import transformers_probabilities
from tests.support.partial_regex import PartialRegex
from tests.support.tiny_checkpoint import tiny_tokenizer
from tests.support.tiny_families import tiny_llama_tokenizer

TOKENIZER = tiny_tokenizer()
BACKEND = TOKENIZER.backend_tokenizer
EOS = TOKENIZER.eos_token_id
WORD = BACKEND.token_to_id("e")
VOCAB = 330
"""Wider than the tokenizer's, as logits may be."""
STRUCTURES = Structures(BACKEND, VOCAB, (EOS,))
PATTERNS = {
    r"(yes|no|maybe)": SamplingParams(choice=("yes", "no", "maybe")),
    r"[a-c]{2,4}(-[0-9]+)*!?": SamplingParams(regex=r"[a-c]{2,4}(-[0-9]+)*!?"),
    r"a\.b \(c\)|a\+": SamplingParams(choice=("a.b (c)", "a+")),
    r"(The [a-z]+ )*ends": SamplingParams(regex=r"(The [a-z]+ )*ends"),
}
WALKS = {pattern: PartialRegex(pattern, BACKEND, [EOS]) for pattern in PATTERNS}
picks = st.lists(st.integers(0, 10**6), max_size=14)


def ids(allowed: np.ndarray[Any, Any]) -> list[int]:
    return [int(token) for token in np.flatnonzero(allowed)]


def walk(pattern: str, chosen: Sequence[int]) -> list[int]:
    """Tokens of a text of the pattern, or of the beginning of one."""
    taken: list[int] = []
    for pick in chosen:
        following = WALKS[pattern].follow(taken)
        if EOS in taken or not following:
            break
        taken.append(following[pick % len(following)])
    return taken


def is_free(possible: Sequence[int]) -> bool:
    """Whether the text may go on in more than one way. Else llguidance leaves the tokens that the tokenizer would spell
    it with, and no others."""
    return len({BACKEND.decode([token])[:1] for token in possible}) > 1


@pytest.fixture(scope="module", params=PATTERNS)
def opened(request: pytest.FixtureRequest) -> tuple[str, Structure]:
    return request.param, STRUCTURES.open(PATTERNS[request.param])


@given(chosen=picks, others=st.lists(picks, max_size=3), cut=st.integers(0, 14))
@settings(max_examples=40)
def test_what_may_follow_is_what_the_text_says_and_nothing_else(
    opened: tuple[str, Structure], chosen: list[int], others: list[list[int]], cut: int
) -> None:
    pattern, structure = opened
    for other in others:  # drafts of other texts, of which none came to be
        structure.allowed(walk(pattern, other), ())
    text = [token for token in walk(pattern, chosen) if token != EOS]
    output, window = text[:cut], text[cut:]
    told = structure.allowed(output, window)
    for number in range(len(told)):
        possible = WALKS[pattern].follow([*output, *window[:number]])
        allowed = ids(told[number])
        if is_free(possible):
            assert allowed == possible
        else:
            assert allowed and set(allowed) <= set(possible)
    assert len(told) == len(window) + 1 or window[len(told) - 1] not in ids(told[-1])


def test_behind_a_token_that_cannot_come_there_nothing_is_said() -> None:
    structure = STRUCTURES.open(SamplingParams(choice=("yes", "no")))
    yes, other = BACKEND.encode("yes").ids, BACKEND.encode("?").ids
    assert len(structure.allowed((), [*yes[:1], *other, *yes])) == 2
    with pytest.raises(InvalidRequest, match="choice: no text can be kept to it: its parser refuses what it allowed"):
        structure.allowed(other, ())
    assert structure.allowed([*yes, EOS, *yes], ()) == []
    assert ids(structure.allowed(yes, ())[0]) == [EOS]


def test_json_is_that_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    structure = STRUCTURES.open(SamplingParams(json_schema=json.dumps(schema)).check())

    def is_sound(text: str) -> bool:
        tokens = BACKEND.encode(text).ids
        rows = structure.allowed((), tokens)
        return len(rows) == len(tokens) + 1 and EOS in ids(rows[-1])

    assert all(map(is_sound, ('{"n": 12}', '{"n":-3}', '{"n": 1, "m": ["x", {}]}', json.dumps({"n": 1}, indent=4))))
    assert not any(map(is_sound, ('{"n": "12"}', "{}", '{"m": 1}', '{"n": 12', '{"n":  12}', '{\n\n"n": 12}')))


SPELLED = (
    SamplingParams(choice=("a star", "caf\u00e9", "\U0001f3ac!", "two\nlines")),
    SamplingParams(choice=("a <video>", "<|im_end|>", "</s>.")),
    SamplingParams(regex="[a-c\u00e9\u4e00-\u4e10\U0001f300-\U0001f3ff ]{2,9}"),
    SamplingParams(
        json_schema='{"type": "array", "items": {"enum": ["caf\u00e9", 1, null]}, "minItems": 1, "maxItems": 3}'
    ),
)


@pytest.mark.parametrize("params", SPELLED, ids=["choice", "special tokens", "regex", "json"])
@pytest.mark.parametrize("kind", ["bytes", "llama"])
def test_whatever_is_taken_of_what_is_allowed_is_a_text_of_the_structure(kind: str, params: SamplingParams) -> None:
    tokenizer = (TOKENIZER if kind == "bytes" else tiny_llama_tokenizer()).backend_tokenizer
    eos, decoder, drawn = 2 if kind == "llama" else EOS, TextDecoder(tokenizer), random.Random(5)
    structure = Structures(tokenizer, VOCAB, (eos,)).open(params.check())
    for _ in range(60):
        taken: list[int] = []
        while not taken or taken[-1] != eos:
            taken.append(drawn.choice(ids(structure.allowed(taken, ())[0])))
        text = decoder.decode(taken)
        if params.json_schema:
            said = json.loads(text)
            assert 1 <= len(said) <= 3 and all(item in ("caf\u00e9", 1, None) for item in said)
        else:
            assert text in params.choice or (params.regex and re.fullmatch(params.regex, text))


@pytest.mark.parametrize("content", ["<think>", "[THINK]", "ending"])
def test_a_text_may_have_what_a_token_is_called_that_was_added(content: str) -> None:
    tokenizer = Tokenizer.from_str(BACKEND.to_str())
    tokenizer.add_tokens([AddedToken(content, special=False, normalized=False)])
    structure = Structures(tokenizer, VOCAB, (EOS,)).open(SamplingParams(choice=(f"e {content}", "no")))
    taken = [WORD]
    while EOS not in (following := ids(structure.allowed(taken, ())[0])):
        taken.append(following[-1])
    assert tokenizer.decode(taken) == f"e {content}"


@pytest.mark.parametrize("eos", [(WORD,), (EOS, WORD)], ids=["alone", "beside another"])
def test_an_end_of_text_that_spells_a_word_is_no_word_of_a_text(eos: tuple[int, ...]) -> None:
    """It would end the text where the structure does not."""
    structures = Structures(BACKEND, VOCAB, eos)
    structure = structures.open(SamplingParams(regex="[a-f]{2}"))
    first, behind, last = structure.allowed((), BACKEND.encode("ab").ids)
    assert {*eos}.isdisjoint(ids(first)) and {*eos}.isdisjoint(ids(behind)) and ids(last) == sorted(eos)
    with pytest.raises(InvalidRequest, match="choice: no text can be kept to it: none of the model's tokens goes on"):
        structures.open(SamplingParams(choice=("e",)))


def test_a_schema_may_say_what_whitespace_there_is() -> None:
    schema = {"x-guidance": {"whitespace_pattern": ""}, "enum": [[1, 2]]}
    for whitespace, sound in (("", "[1,2]"), (r"\n*", "[1,\n\n2]")):
        schema["x-guidance"] = {"whitespace_pattern": whitespace}
        structure = STRUCTURES.open(SamplingParams(json_schema=json.dumps(schema)).check())
        rows = {text: structure.allowed((), BACKEND.encode(text).ids) for text in ("[1,2]", "[1, 2]", "[1,\n\n2]")}
        is_whole = {text: len(rows[text]) == len(BACKEND.encode(text).ids) + 1 for text in rows}
        assert is_whole[sound] and not is_whole["[1, 2]"]


@pytest.mark.parametrize("char", ['"', "\\", "\n", "\x00", "\x7f", "é", "🎬", "{}", "(?i)", "a&b~c", " "])
def test_a_choice_is_taken_literally(char: str) -> None:
    structure = STRUCTURES.open(SamplingParams(choice=(f"x{char}y", "z")).check())
    tokens = BACKEND.encode(f"x{char}y").ids
    rows = structure.allowed((), tokens)
    assert len(rows) == len(tokens) + 1 and ids(rows[-1]) == [EOS]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.4},
        {"temperature": 2.0, "top_p": 0.7},
    ],
)
def test_probabilities_are_those_of_transformers_under_the_same_structure(seed: int, params: dict[str, Any]) -> None:
    pattern = r"[a-c]{2,4}(-[0-9]+)*!?"
    asked = SamplingParams(regex=pattern, **params).check()
    window = walk(pattern, range(seed, seed + 9))
    logits = torch.randn(len(window) + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    ours = Warp(asked, (), VOCAB, STRUCTURES.open(asked)).probabilities(logits, window[:1], window[1:])
    for row in range(len(window)):
        said = window[: row + 1]
        if EOS in said:
            continue
        constrained = PrefixConstrainedLogitsProcessor(lambda _, told: WALKS[pattern].follow(told.tolist()), 1)
        told = torch.tensor([said])
        kept = constrained(told, logits[row][None].clone())[0]
        if asked.repetition_penalty != 1.0:
            kept = torch.where(kept.isfinite(), logits[row], kept)
        expected = transformers_probabilities(kept, said, asked)
        assert torch.allclose(ours[row].float(), expected, atol=1e-6)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_windows_decide_as_plain_decoding_does_and_drafts_write_texts_of_the_structure(rule: str) -> None:
    asked = SamplingParams(regex=r"[a-z]{3,9}( [a-z]{1,5}){3}\.", temperature=1.2, seed=4, rule=rule).check()
    target = TargetSampler(asked, (), VOCAB, STRUCTURES.open(asked))
    draft = DraftSampler(asked, (), VOCAB, STRUCTURES.open(asked))
    rows = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1))
    text: list[int] = []
    while not text or text[-1] != EOS:
        window, proposals = [], []
        for place in range(len(text), len(text) + 4):
            token, proposal = draft.choose(rows[place % 64], [*text, *window])
            window.append(token)
            proposals += [proposal] if proposal else []
            if token == EOS:
                break
        logits = torch.stack([rows[place % 64] for place in range(len(text), len(text) + len(window) + 1)])
        accepted, own = target.judge(logits, text, window, proposals)
        assert accepted == len(window), "both see the same logits"
        text += window if EOS in window else [*window, own]
        assert len(text) < 60
    assert PartialRegex(asked.regex, BACKEND, [EOS]).follow(text[:-1]).count(EOS)


def test_a_draft_has_no_candidates_that_cannot_follow() -> None:
    asked = SamplingParams(choice=("ab", "c"))
    draft = DraftSampler(asked, (), VOCAB, STRUCTURES.open(asked))
    tokens, sure = draft.candidates(torch.randn(VOCAB), (), 8)
    assert sorted(tokens) == WALKS_OF_TWO.follow([]) and len(sure) == len(tokens)
    assert sorted(draft.rank(torch.randn(VOCAB), (), 8)) == WALKS_OF_TWO.follow([])


WALKS_OF_TWO = PartialRegex("ab|c", BACKEND, [EOS])


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"regex": "(?=a)b"}, "regex: no text can be kept to it: .*look-around"),
        ({"regex": r"(a)\1"}, "regex: no text can be kept to it: .*backreferences"),
        ({"json_schema": '{"type": "foo"}'}, "json_schema: no text can be kept to it: Invalid type: foo"),
        ({"json_schema": '{"not": {}}'}, r"json_schema: no text can be kept to it: Unimplemented keys: \[.not.\]"),
        ({"json_schema": '{"$ref": "file:///etc/hosts"}'}, "json_schema: no text can be kept to it: .*not present"),
        ({"json_schema": '{"$ref": "#"}'}, "json_schema: no text can be kept to it: there is no such text$"),
        ({"regex": r"[^\s\S]"}, "regex: no text can be kept to it: there is no such text$"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_name(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{told}"):
        STRUCTURES.open(SamplingParams(**asked).check())


@pytest.mark.parametrize(
    "schema",
    [
        '{"maximum": Infinity}',
        '{"const": 1e999}',
        '{"const": "\\ud800"}',
        '{"items": ' * 130 + "{}" + "}" * 130,
    ],
    ids=["Infinity", "1e999", "surrogate", "deep"],
)
def test_what_is_json_to_python_alone_is_refused(schema: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^json_schema: no text can be kept to it: .* at line 1 column"):
        STRUCTURES.open(SamplingParams(json_schema=schema).check())


@pytest.mark.parametrize(
    "schema",
    [{"const": -(2**63)}, {"enum": ["a", [{"b": -(2**63) + 512}]]}, {"type": "integer", "multipleOf": 2**31}],
    ids=["const", "enum", "multipleOf"],
)
def test_what_would_end_the_process_or_keep_it_busy_is_refused(schema: dict[str, Any]) -> None:
    """llguidance 1.9.1 runs out of its stack over the first two, and the third takes it hours."""
    with pytest.raises(InvalidRequest, match="json_schema: no text can be kept to it: its parser takes too much time"):
        STRUCTURES.open(SamplingParams(json_schema=json.dumps(schema)).check())


def test_a_fault_of_the_parser_is_not_told_in_its_own_words() -> None:
    told = str(refusal(SamplingParams(regex="a"), "panic: end byte index 100 is not a char boundary"))
    assert told == "regex: no text can be kept to it: its parser stumbles over it"


def test_a_structure_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[SamplingParams] = []
    monkeypatch.setattr("slipstream.sampling.structure.try_out", tried.append)
    structures, asked = Structures(BACKEND, VOCAB, (EOS,)), SamplingParams(choice=("a", "b"))
    for params in (asked, asked, replace(asked, seed=3), replace(asked, choice=("ab",))):
        structures.open(params)
    assert [params.choice for params in tried] == [("a", "b"), ("ab",)]


async def test_what_is_tried_keeps_no_other_text_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    structures, known = Structures(BACKEND, VOCAB, (EOS,)), SamplingParams(choice=("a", "b"))
    structures.open(known)
    is_over = threading.Event()
    monkeypatch.setattr("slipstream.sampling.structure.try_out", lambda params: is_over.wait())
    new = [replace(known, choice=(f"a{number}",)) for number in range(40)]
    opening = [asyncio.ensure_future(structures.opened(params)) for params in new]
    try:
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(lambda: "a prompt is read") and await structures.opened(known)
        assert not any(one.done() for one in opening)
    finally:
        is_over.set()
    assert all(await asyncio.gather(*opening))


def test_a_trial_that_cannot_be_made_is_no_fault_of_the_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.sampling.grammar.MODULE", "slipstream.sampling.no_such")
    with pytest.raises(SlipstreamError, match=r"a structure could not be tried: .*no_such") as failed:
        Structures(BACKEND, VOCAB, (EOS,)).open(SamplingParams(regex="a"))
    assert not isinstance(failed.value, InvalidRequest)


def test_a_trial_knows_no_secret_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "secret")
    assert "secret" not in json.dumps(trial_environment())


def test_a_trial_that_nobody_waits_for_is_no_sound_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.sampling.grammar.TRIAL_S", 0.0)
    with pytest.raises(InvalidRequest, match="regex: no text can be kept to it: its parser takes too long"):
        Structures(BACKEND, VOCAB, (EOS,)).open(SamplingParams(regex="a"))


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.sampling.structure.IS_INSTALLED", False)
    with pytest.raises(InvalidConfig, match=r"pip install 'slipstream\[structured\]'"):
        STRUCTURES.open(SamplingParams(choice=("a",)))


def test_a_model_without_an_end_of_text_keeps_to_no_structure() -> None:
    """The parser's own choice of an end is none to the model, which would write on behind it."""
    with pytest.raises(InvalidRequest, match="no token that ends a text"):
        Structures(BACKEND, VOCAB, ()).open(SamplingParams(choice=("a", "b")))


def test_what_other_texts_took_is_nothing_to_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts look at many texts that never come to be, and each has states of its own."""
    monkeypatch.setattr("slipstream.sampling.grammar.MAX_STATES", 200)
    pattern = "(.{0,30}a){0,30}"
    structure, drawn, rounds = STRUCTURES.open(SamplingParams(regex=pattern)), random.Random(3), 40
    monkeypatch.setattr("slipstream.sampling.structure.MOST_BEGUN", 2 * rounds)
    text = BACKEND.encode("bcabca").ids
    alone = ids(STRUCTURES.open(SamplingParams(regex=pattern)).allowed(text, ())[0])
    begun: list[object] = []
    monkeypatch.setattr(structure, "_begin", lambda begin=structure._begin: begun.append(1) or begin())
    for _ in range(rounds):
        with contextlib.suppress(InvalidRequest):
            structure.allowed(BACKEND.encode("".join(drawn.choices("abc", k=30))).ids, ())
        assert ids(structure.allowed(text, ())[0]) == alone
    assert begun, "it never came to that"


def test_what_takes_too_much_ends_its_own_text_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match=r"^regex: no text can be kept to it") as refused:  # noqa: PT012
        structure = STRUCTURES.open(SamplingParams(regex="((a{100}){100}){100}").check())
        text: list[int] = []
        while len(text) < 100:
            text.append(ids(structure.allowed(text, ())[0])[-1])
    assert ids(STRUCTURES.open(SamplingParams(choice=("c",))).allowed((), ())[0]) == BACKEND.encode("c").ids
    assert capfd.readouterr().err == ""
    assert str(refused.value).endswith("too many expressions constructed")


WEIGHED = r"""
import re, sys
from pathlib import Path
from tokenizers import Tokenizer
from slipstream.errors import InvalidRequest
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structure import Structures

def most_mb():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024

structures = Structures(Tokenizer.from_str(sys.stdin.read()), 330, (317,))
structures.open(SamplingParams(choice=("a",)))
before, text = most_mb(), []
try:
    structure = structures.open(SamplingParams(regex="((a{100}){100}){100}"))
    while True:
        text.append(int(structure.allowed(text, ())[0].nonzero()[0][-1]))
except InvalidRequest:
    print(most_mb() - before)
"""


def test_what_takes_too_much_holds_little_memory_until_then() -> None:
    weighed = subprocess.run(
        [sys.executable, "-c", WEIGHED], input=BACKEND.to_str(), capture_output=True, text=True, check=True
    )
    assert 1 < float(weighed.stdout) < 120
