"""Keeps a text to a JSON schema, a regular expression or a choice: which tokens may come next.

llguidance's parser says so of every position. Tokens with which no such text goes on are left out of the target's own
choice, and of the draft's; what remains is chosen as ever. So the text is that of plain decoding under the same
structure (`transformers.generate` with `prefix_allowed_tokens_fn`), whatever was drafted, and a draft that knows the
structure, too, writes what can be accepted.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from slipstream.errors import InvalidConfig, InvalidRequest
from slipstream.sampling.params import SamplingParams
from slipstream.speculation.protocol import num_common

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

IS_INSTALLED = find_spec("llguidance") is not None
MAX_STATES = 50_000
"""Of llguidance's lexer, of one text: 1 to 2 kB each. What a position takes is bounded by its own limits: 14 ms, seldom
100 ms, for which the model's thread waits."""
FIRST_FUEL = 300_000
"""Of a parser's first step, in llguidance's units. With its usual million one text of 20 characters holds 200 MB, with
this 60, and no schema of our length but those of thousands of alternatives needs more."""
MOST_BEGUN = 5
"""Parsers of one text. What a parser has looked at counts, and most of that was drafted and never became text: it is
not to end a text that could go on. Each may take a second to find that it cannot."""
MAX_REASON_CHARS = 300
NOT_TOLD = "<non-verbose/>"
"""Stands in llguidance's errors for the state of its parser."""
NO_SUCH_TEXT = ("NoExtensionBias", "there is no such text")
"""llguidance's words where nothing at all may come next, and ours."""
WHITESPACE = r" |\n[ \t]{0,24}"
"""Between the signs of JSON, at most once: as it is usually written, on one line or indented. Small models would go on
with blanks and new lines for ever. A schema may say another: `{"x-guidance": {"whitespace_pattern": ""}}`."""


class Structures:
    """What texts of one model can be kept to. Its tokens are read when the first structure is asked for.

    Args:
        vocab_size: width of the logits; ids that the tokenizer does not have are never allowed.
        eos_token_ids: allowed where the text may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()

    def open(self, params: SamplingParams) -> "Structure":
        """For one text, of which checked parameters ask for a structure. On any thread; the first time it takes a
        second, and up to three for structures that turn out to be too much. Raises `InvalidRequest` for those, and for
        what is no structure; `InvalidConfig` where llguidance is not installed."""
        if not IS_INSTALLED:
            raise InvalidConfig("texts are kept to a structure by llguidance: pip install 'slipstream[structured]'")
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            tokens = self._tokens
        limits = LLParserLimits(initial_lexer_fuel=FIRST_FUEL, max_lexer_states=MAX_STATES, verbose_errors=False)
        try:
            grammar = _grammar(params)
        except ValueError as error:  # Python takes more for JSON: NaN, 1e999, half of a pair of surrogates, 128 levels
            raise _refusal(_name(params), str(error)) from None
        begin = partial(LLMatcher, tokens, grammar, log_level=0, limits=limits)
        structure = Structure(begin, _name(params), self._eos_token_ids)
        structure.allowed((), ())  # some are found to be too much where the first tokens are asked for
        return structure

    @cached_property
    def _tokens(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        num_tokens = max(self._vocab_size, self._tokenizer.get_vocab_size())
        try:
            return LLTokenizer(self._tokenizer.to_str(), n_vocab=num_tokens, eos_token=self._eos_token_ids or None)
        except ValueError as error:
            raise InvalidRequest(f"texts of this model's tokenizer can be kept to no structure: {error}") from None


class Structure:
    """What one text may go on with. Not for several threads at once. It goes along with the text that it is asked
    about, back and forth, and answers by that text alone."""

    def __init__(self, begin: "Callable[[], LLMatcher]", name: str, eos_token_ids: Sequence[int]) -> None:
        self._begin = begin
        self._name = name
        self._eos_token_ids = eos_token_ids
        self._matcher = begin()
        self._num_begun = 1
        self._text: list[int] = []
        """The tokens that the matcher has taken."""

    def allowed(self, output: Sequence[int], window: Sequence[int]) -> list[NDArray[np.bool_]]:
        """Which tokens may follow `output`, `window[:1]`, and so on, [tokens] each, at most a row more than the window
        has tokens: there are none behind the end of the text, or behind a token of the window that cannot come there.

        Raises:
            InvalidRequest: following the structure takes more than this server gives it.
        """
        try:
            return self._rows(output, window)
        except InvalidRequest:
            if self._num_begun == MOST_BEGUN:
                raise
            self._num_begun += 1
            self._matcher, self._text = self._begin(), []
            return self._rows(output, window)

    def _rows(self, output: Sequence[int], window: Sequence[int]) -> list[NDArray[np.bool_]]:
        if not self._go_to(output):
            return []
        rows = [self._next()]
        if not rows[0].any():
            raise _refusal(self._name, "none of the model's tokens goes on with it")
        for token in window:
            if not self._take(token):
                break
            rows.append(self._next())
        return rows

    def _go_to(self, output: Sequence[int]) -> bool:
        """False: the text has ended. It was chosen from what was allowed, so it is a beginning of the structure."""
        text, taken = list(output), len(self._text)
        kept = taken if text[:taken] == self._text else num_common(self._text, text)
        if taken > kept:
            self._matcher.rollback(taken - kept)
            del self._text[kept:]
        for token in text[kept:]:
            if not self._take(token):
                if self._matcher.is_stopped():
                    return False
                raise _refusal(self._name, "its parser refuses what it allowed")
        return True

    def _take(self, token: int) -> bool:
        is_taken = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        if is_taken:
            self._text.append(token)
        return is_taken

    def _next(self) -> NDArray[np.bool_]:
        bits = self._matcher.compute_bitmask()
        self._check()
        row = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little").view(np.bool_)
        row[self._eos_token_ids] = self._matcher.is_accepting()  # one that spells a word is allowed as that, too
        return row

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._name, self._matcher.get_error().removesuffix(NOT_TOLD).replace(*NO_SUCH_TEXT))


def _grammar(params: SamplingParams) -> str:
    """As llguidance is told of it."""
    from llguidance import LLMatcher

    if params.json_schema:
        return LLMatcher.grammar_from_json_schema(params.json_schema, {"whitespace_pattern": WHITESPACE})
    return LLMatcher.grammar_from_regex(params.regex or "|".join(map(_literally, params.choice)))


def _name(params: SamplingParams) -> str:
    return "json_schema" if params.json_schema else "regex" if params.regex else "choice"


def _refusal(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: no text can be kept to it: {' '.join(reason.split())[:MAX_REASON_CHARS]}")


def _literally(text: str) -> str:
    """A regular expression that matches this text only."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text)
