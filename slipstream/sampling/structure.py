"""Keeps a text to a JSON schema, a regular expression or a choice: which tokens may come next.

llguidance's parser says so of every position. Tokens with which no such text goes on are left out of the target's own
choice, and of the draft's; what remains is chosen as ever. So the text is that of plain decoding under the same
structure (`transformers.generate` with `prefix_allowed_tokens_fn`), whatever was drafted, and a draft that knows the
structure, too, writes what can be accepted.
"""

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from slipstream.errors import InvalidConfig, InvalidRequest
from slipstream.sampling.grammar import make_parser, refusal, try_out
from slipstream.sampling.params import STRUCTURES, SamplingParams
from slipstream.speculation.protocol import num_common

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

IS_INSTALLED = find_spec("llguidance") is not None
MOST_KNOWN = 10_000
"""Structures that were tried, by their digests."""
TRIALS_AT_ONCE = 2
"""Of one model: each may keep a core busy for two seconds, and its thread for twenty."""
MOST_BEGUN = 5
"""Parsers of one text. What a parser has looked at counts, and most of that was drafted and never became text: it is
not to end a text that could go on. Each may take a second to find that it cannot."""


_UNSPELLED = "\ufdd0"
"""Never a character, by Unicode."""


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
        self._known: set[bytes] = set()
        self._trials = ThreadPoolExecutor(TRIALS_AT_ONCE, thread_name_prefix="trial")
        self._lock = threading.Lock()

    async def opened(self, params: SamplingParams) -> "Structure":
        """Like `open`, on other threads. New structures wait for each other's trials, and nothing else does, such as
        the prompts of other texts; but all threads wait for the first one, as llguidance keeps Python's lock while it
        reads the tokens."""
        if _digest(params) not in self._known:
            await asyncio.get_running_loop().run_in_executor(self._trials, self._check, params)
        return await asyncio.to_thread(self.open, params)

    def open(self, params: SamplingParams) -> "Structure":
        """For one text, of which checked parameters ask for a structure. On any thread; the first text takes a second,
        and the first of a structure a tenth of one, up to three where it is too much. Raises `InvalidRequest` for such,
        and for what is no structure; `InvalidConfig` where llguidance is not installed."""
        self._check(params)
        with self._lock:
            tokens = self._tokens
        structure = Structure(partial(make_parser, tokens, params), params, self._eos_token_ids)
        structure.allowed((), ())  # some are found to be too much where the first tokens are asked for
        return structure

    def _check(self, params: SamplingParams) -> None:
        """Each is tried once. Raises as `open`."""
        if not IS_INSTALLED:
            raise InvalidConfig("texts are kept to a structure by llguidance: pip install 'slipstream[structured]'")
        digest = _digest(params)
        if digest in self._known:
            return
        try_out(params)
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known.add(digest)

    @cached_property
    def _tokens(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        if not self._eos_token_ids:  # the parser would take one of its own choice, with which no text ends
            raise InvalidRequest("texts of this model can be kept to no structure: it has no token that ends a text")
        num_tokens = max(self._vocab_size, self._tokenizer.get_vocab_size())
        try:
            return LLTokenizer(_unspelled(self._tokenizer), n_vocab=num_tokens, eos_token=self._eos_token_ids)
        except ValueError as error:
            raise InvalidRequest(f"texts of this model's tokenizer can be kept to no structure: {error}") from None


def _unspelled(tokenizer: Tokenizer) -> str:
    """A tokenizer whose special tokens, and what llguidance takes for such, have names that no text has. Where a
    structure leaves one text alone it allows the tokens that the tokenizer makes of that, and then refuses those."""
    written = json.loads(tokenizer.to_str())
    vocab = written["model"].get("vocab")
    for token in written["added_tokens"]:
        content = token["content"]
        is_special = token["special"] or (content.startswith("<") and content.endswith(">"))
        if is_special and content != written["model"].get("unk_token"):
            token["content"] = f"{_UNSPELLED}{token['id']}{_UNSPELLED}"
            if isinstance(vocab, dict) and content in vocab:
                vocab[token["content"]] = vocab.pop(content)
    return json.dumps(written)


def _digest(params: SamplingParams) -> bytes:
    """Of the structure that is asked for."""
    return hashlib.sha256(repr([getattr(params, name) for name in STRUCTURES]).encode()).digest()


class Structure:
    """What one text may go on with. Not for several threads at once. It goes along with the text that it is asked
    about, back and forth, and answers by that text alone."""

    def __init__(self, begin: "Callable[[], LLMatcher]", params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        self._begin = begin
        self._params = params
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
            raise refusal(self._params, "none of the model's tokens goes on with it")
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
                raise refusal(self._params, "its parser refuses what it allowed")
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
            raise refusal(self._params, self._matcher.get_error())
