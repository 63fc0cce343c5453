"""From a user's words to token ids through the checkpoint's chat template.

User text is data: "<video>" or "<|im_end|>" inside it must stay ordinary text. So the template is rendered once around
a marker, its special tokens are looked up there and only there, and the user's words are tokenised with special tokens
switched off. For text without special tokens the ids are those of tokenising the rendered prompt as a whole.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from slipstream.engine.checkpoint import Checkpoint
from slipstream.errors import InvalidRequest, ModelNotUsable

_MARKER = "USER-WORDS-GO-HERE"
VIDEO_WORD = -1
"""In the place of a token id: the video, for tokenizers that have no token for it, only templates a word."""

_Piece = str | int
"""Plain text, or the id of an added token."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template for one user message, and a video before it or none, taken apart around the message."""

    before: tuple[_Piece, ...]
    after: tuple[_Piece, ...]
    plain_tokenizer: Tokenizer
    """Matches no special tokens."""
    inner_tokenizer: Tokenizer
    """The same for text behind a special token, before which some tokenizers put no space."""
    first_ids: tuple[int, ...] = ()
    """What the tokenizer begins every text with."""

    @classmethod
    def render(
        cls, tokenizer: PreTrainedTokenizerBase, template: str | None, video_word: str = "", *, has_video: bool = True
    ) -> "ChatTemplate":
        """Take apart `template`, or the tokenizer's own one if that is None.

        Args:
            video_word: that the template writes where the video belongs, if it is no token.

        Raises:
            ModelNotUsable: there is no template, it fails, or it drops the message.
        """
        content: Any = [*([{"type": "video"}] if has_video else []), {"type": "text", "text": _MARKER}]
        try:
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": content}],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ModelNotUsable(f"the checkpoint's chat template is missing or fails: {error}") from error
        before, marker, after = str(rendered).partition(_MARKER)
        if not marker:
            raise ModelNotUsable("the checkpoint's chat template drops the text of the user's message")
        backend: Tokenizer = tokenizer.backend_tokenizer
        added_ids = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
        if video_word:
            added_ids.setdefault(video_word, VIDEO_WORD)
        first_ids = tuple(backend.encode("", add_special_tokens=True).ids)
        pieces = tuple(_split(before, added_ids))
        plain, inner = _without_specials(backend.to_str()), inner_tokenizer(backend)
        return cls(
            pieces,
            tuple(_split(after, added_ids)),
            plain,
            inner,
            () if pieces[: len(first_ids)] == first_ids else first_ids,
        )

    @classmethod
    def for_video(
        cls, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint, video_token_id: int
    ) -> "ChatTemplate":
        """The checkpoint's template, which must put one video before the message. Raises `ModelNotUsable`."""
        template = cls.render(tokenizer, checkpoint.chat_template())
        if template.before.count(video_token_id) != 1:
            raise ModelNotUsable(f"{checkpoint.ref}: the chat template must put one video before the user's text")
        return template

    @classmethod
    def for_text(cls, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint) -> "ChatTemplate | None":
        """The checkpoint's template for a message about no video; None where it has none for that."""
        with contextlib.suppress(ModelNotUsable):
            return cls.render(tokenizer, checkpoint.chat_template(), has_video=False)
        return None

    @classmethod
    def for_word(cls, tokenizer: PreTrainedTokenizerBase, template: str, video_word: str) -> tuple["ChatTemplate", int]:
        """A template that writes a word where the video belongs, which may be a token or none, and what to give
        `encode_with_video` for it."""
        return cls.render(tokenizer, template, video_word), tokenizer.get_vocab().get(video_word, VIDEO_WORD)

    def encode_around_video(self, message: str, video_token_id: int) -> tuple[list[int], list[int]]:
        """Token ids of the prompt before and after its video. Raises `InvalidRequest` for a message with a video."""
        token_ids = self.encode(message)
        if token_ids.count(video_token_id) != 1:
            raise InvalidRequest("the prompt contains the model's video placeholder token")
        video_start = token_ids.index(video_token_id)
        return token_ids[:video_start], token_ids[video_start + 1 :]

    def encode(self, message: str) -> list[int]:
        """Token ids of the whole prompt around the user's `message`."""
        return self._encode([*self.before, message, *self.after])

    def encode_with_video(self, message: str, video_token_id: int, video: Sequence[_Piece]) -> list[int]:
        """The same with other pieces in the place of the video's one token."""
        pieces = list(self.before)
        place = pieces.index(video_token_id)
        pieces[place : place + 1] = video
        return self._encode([*pieces, message, *self.after])

    def _encode(self, pieces: Sequence[_Piece]) -> list[int]:
        token_ids = list(self.first_ids)
        tokenizer = self.plain_tokenizer
        for piece in _join(pieces):
            if isinstance(piece, int):
                token_ids.append(piece)
            else:
                token_ids.extend(tokenizer.encode(piece, add_special_tokens=False).ids)
            tokenizer = self.inner_tokenizer
        return token_ids


def token_id_of(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase, name: str, usual: str) -> int:
    """Of a special token that the tokenizer calls `name`, or of the usual one. Raises `ModelNotUsable`."""
    token = getattr(tokenizer, name, None) or usual
    token_id = tokenizer.get_vocab().get(token)
    if token_id is None:
        raise ModelNotUsable(f"{checkpoint.ref}: the tokenizer has no token {token!r}")
    return token_id


def find_video(token_ids: Sequence[int], placeholder: int, num_expected: int) -> tuple[range, ...]:
    """Where the placeholder stands, once or several times in a row. Raises `InvalidRequest` for a message with it."""
    spans, start = [], 0
    for token_id, run in groupby(token_ids):
        length = len(list(run))
        if token_id == placeholder:
            spans.append(range(start, start + length))
        start += length
    if sum(map(len, spans)) != num_expected:
        raise InvalidRequest("the prompt contains the model's video placeholder token")
    return tuple(spans)


def inner_tokenizer(backend: Tokenizer) -> Tokenizer:
    """For text behind a special token; it matches no special tokens."""
    inner = json.loads(backend.to_str())
    step = inner["pre_tokenizer"] or {}
    if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
        step["prepend_scheme"] = "never"
    return _without_specials(json.dumps(inner))


def _without_specials(written: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(written)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _split(text: str, added_ids: dict[str, int]) -> Iterator[_Piece]:
    """Cut `text` at the added tokens."""
    longest_first = sorted(added_ids, key=len, reverse=True)
    pattern = "|".join(re.escape(content) for content in longest_first)
    for piece in re.split(f"({pattern})", text) if pattern else [text]:
        if piece:
            yield added_ids.get(piece, piece)


def _join(pieces: Sequence[_Piece]) -> Iterator[_Piece]:
    """Merge neighbouring texts: the tokenizer must see them as one."""
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
            continue
        if text:
            yield text
        text = ""
        yield piece
    if text:
        yield text
