"""Which tokens a text may go on with so that it can match a regular expression: by the partial matching of the library
`regex`, for `prefix_allowed_tokens_fn` of `transformers.generate`. Of ASCII patterns only."""

from collections.abc import Callable, Sequence

import regex
import torch
from tokenizers import Tokenizer

Allowed = Callable[[int, torch.Tensor], list[int]]


class PartialRegex:
    """One expression, with the tokens that spell its texts."""

    def __init__(self, pattern: str, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self._pattern = regex.compile(pattern)
        self._tokenizer = tokenizer
        self._eos = [*eos_token_ids]
        self._spelled = {token: text for token in range(tokenizer.get_vocab_size()) if (text := self.text([token]))}

    def text(self, token_ids: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def follow(self, token_ids: Sequence[int]) -> list[int]:
        """Behind these tokens, of which the last may be the end of the text."""
        if set(self._eos) & set(token_ids):
            return self._eos
        said = self.text(token_ids)
        ends = self._eos if self._pattern.fullmatch(said) else []
        return sorted({*ends, *(token for token, text in self._spelled.items() if self._fits(said + text))})

    def behind(self, num_prompt: int) -> Allowed:
        """The same as `generate` asks for it."""
        return lambda _, input_ids: self.follow(input_ids[num_prompt:].tolist())

    def _fits(self, text: str) -> bool:
        return self._pattern.fullmatch(text, partial=True) is not None
