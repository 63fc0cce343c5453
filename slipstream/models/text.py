"""From token ids back to text, all at once or token by token. Knows no model."""

from collections.abc import Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 4
"""Tokens kept before the new ones; every token is at least one byte, and no UTF-8 character has more than four."""


class TextDecoder:
    """Decodes ids of a byte-level tokenizer, leaving out special tokens and ids that the vocabulary does not have."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def has_text(self, token_id: int) -> bool:
        """Whether the token stands for bytes of text."""
        return token_id not in self._special_ids and self._tokenizer.id_to_token(token_id) is not None


class TextStream:
    """Turns tokens into text as they come. All pieces and the flush together equal `TextDecoder.decode` of all tokens.

    A replacement character at the very end may still become a real one when more bytes arrive, so it is held back.
    """

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._num_emitted = 0
        """Characters of the window's text that have left already."""

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """One piece of text per token; "" for a special token or while a character is incomplete."""
        return [self._push(token_id) if self._decoder.has_text(token_id) else "" for token_id in token_ids]

    def flush(self) -> str:
        """What was held back, as the end of the text."""
        piece = self._decoder.decode(self._window)[self._num_emitted :]
        self._window.clear()
        self._num_emitted = 0
        return piece

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        num_stable = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._num_emitted : num_stable]
        del self._window[:-_CONTEXT_TOKENS]
        self._num_emitted = len(self._decoder.decode(self._window)) - (len(text) - num_stable)
        return piece
