"""Text comes out whole: streamed pieces add up to the text, and no piece is ever taken back."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.families.adapter import TextDecoder, TextStream
from tests.engine.conftest import Pair
from tests.support.tiny_checkpoint import tiny_tokenizer
from tests.support.tiny_families import tiny_llama_tokenizer

TOKENIZER = tiny_tokenizer()
DECODER = TextDecoder(TOKENIZER.backend_tokenizer)
SPECIAL_ID = TOKENIZER.get_vocab()["<|im_end|>"]


def ids_of_bytes(data: bytes) -> list[int]:
    """One token per byte: byte-level alphabets give every byte a printable character."""
    alphabet = {token: i for token, i in TOKENIZER.get_vocab().items() if len(token) == 1}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [alphabet[character[byte]] for byte in data]


def stream(token_ids: Sequence[int], cuts: Sequence[int] = (), decoder: TextDecoder = DECODER) -> tuple[list[str], str]:
    text_stream = TextStream(decoder)
    pieces: list[str] = []
    bounds = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    for first, last in pairwise(bounds):
        pieces += text_stream.push(token_ids[first:last])
    return pieces, text_stream.flush()


@given(st.lists(st.integers(0, 330), max_size=40), st.lists(st.integers(0, 40), max_size=4))
@settings(max_examples=300, deadline=None)
def test_pieces_add_up_to_the_text_of_any_tokens(token_ids: list[int], cuts: list[int]) -> None:
    pieces, rest = stream(token_ids, cuts)
    assert len(pieces) == len(token_ids)
    known = [token_id for token_id in token_ids if token_id < len(TOKENIZER)]
    assert "".join(pieces) + rest == TOKENIZER.decode(known, skip_special_tokens=True) == DECODER.decode(token_ids)


@given(st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_pieces_add_up_for_any_bytes(data: bytes) -> None:
    pieces, rest = stream(ids_of_bytes(data))
    assert "".join(pieces) + rest == data.decode(errors="replace")


@given(st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_a_character_comes_with_its_last_byte_and_never_broken(text: str) -> None:
    if "\ufffd" in text:
        return
    pieces, rest = stream(ids_of_bytes(text.encode()))
    assert rest == ""
    ends = [len(character.encode()) for character in text]
    assert [piece for piece in pieces if piece] == list(text)
    assert sum(ends) == len(pieces)


def test_only_what_may_still_change_is_held_back() -> None:
    word, broken = TOKENIZER.backend_tokenizer.encode("Describe").ids, ids_of_bytes("é".encode())[:1]
    pieces, rest = stream([*word, *broken, SPECIAL_ID])
    assert "".join(pieces) == "Describe"
    assert rest == "\ufffd"


def test_special_tokens_have_no_text_and_do_not_split_characters() -> None:
    first, second = ids_of_bytes("é".encode())
    assert stream([first, SPECIAL_ID, second])[0] == ["", "", "é"]


def test_a_stream_starts_afresh_after_flush() -> None:
    text_stream = TextStream(DECODER)
    text_stream.push(ids_of_bytes("é".encode())[:1])
    assert text_stream.flush() == "\ufffd"
    assert text_stream.push(ids_of_bytes(b"ok")) == ["o", "k"]
    assert text_stream.flush() == ""


def test_endless_garbage_streams_in_bounded_windows() -> None:
    pieces, rest = stream(ids_of_bytes(b"\x80" * 500))
    assert "".join(pieces) + rest == "\ufffd" * 500


@pytest.mark.parametrize("text", ["Describe the video.", "描述视频。 🎬", ""])
def test_the_model_hands_out_streams_and_text(pair: Pair, text: str) -> None:
    token_ids = TOKENIZER.backend_tokenizer.encode(text).ids
    text_stream = pair.ours.text_stream()
    assert "".join(text_stream.push(token_ids)) + text_stream.flush() == text == pair.ours.decode(token_ids)


# -- tokenizers that spell byte by byte -------------------------------------------------------------------------------

LLAMA = tiny_llama_tokenizer()
LLAMA_DECODER = TextDecoder(LLAMA.backend_tokenizer)


@given(st.lists(st.integers(0, len(LLAMA) + 9), max_size=40), st.lists(st.integers(0, 40), max_size=4))
@settings(max_examples=300, deadline=None)
def test_pieces_add_up_where_characters_are_spelled(token_ids: list[int], cuts: list[int]) -> None:
    """Such a tokenizer reads a run of bytes as a whole: one that is wrong spoils all of it."""
    pieces, rest = stream(token_ids, cuts, LLAMA_DECODER)
    known = [token_id for token_id in token_ids if token_id < len(LLAMA)]
    assert "".join(pieces) + rest == LLAMA.decode(known, skip_special_tokens=True) == LLAMA_DECODER.decode(token_ids)


@pytest.mark.parametrize("text", ["Describe the video.", "two  spaces", "描述视频。 🎬🟥 then", "é\nü", ""])
def test_spelled_characters_come_whole(text: str) -> None:
    pieces, rest = stream(LLAMA.backend_tokenizer.encode(text).ids, decoder=LLAMA_DECODER)
    assert "".join(pieces) + rest == text
    assert "\ufffd" not in "".join(pieces) + rest


@pytest.mark.parametrize("decoder", [DECODER, LLAMA_DECODER])
def test_a_token_alone_says_what_it_says_in_a_text(decoder: TextDecoder) -> None:
    """Behind others, and as the first: tokenizers of Llama's kind leave out the space that a text would begin with."""
    word = next(token for token in range(300, 400) if decoder.has_text(token) and decoder.decode([token]).isalpha())
    num_spaced = 0
    for token in filter(decoder.has_text, range(decoder.tokenizer.get_vocab_size())):
        (first,), (*_, behind) = TextStream(decoder).push([token]), TextStream(decoder).push([word, token])
        alone = TextStream(decoder).alone(token, begins=False)
        if not decoder.is_byte(token) and "\ufffd" not in alone:  # else more may come of its character
            assert (TextStream(decoder).alone(token, begins=True), alone) == (first, behind)
            num_spaced += behind.startswith(" ")
    assert num_spaced > 5
    assert TextStream(decoder).alone(decoder.tokenizer.token_to_id("<video>"), begins=False) == ""
