"""From a user's words to token ids through the checkpoint's chat template.

User text is data: "<video>" or "<|im_end|>" inside it must stay ordinary text. So the template is rendered around
markers, its special tokens are looked up there and only there, and what it makes of the texts is tokenised with special
tokens switched off. For text without special tokens the ids are those of tokenising the rendered prompt as a whole.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby, islice
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from slipstream.engine.checkpoint import Checkpoint
from slipstream.errors import InvalidRequest, ModelNotUsable
from slipstream.session_messages import Chat

_MARKER, _MARKED = "WORDS-{}-GO-HERE", re.compile("WORDS-([0-9]+)-GO-HERE")
VIDEO_WORD = -1
"""In the place of a token id: the video, for tokenizers that have no token for it, only templates a word."""

_THINKING = {"on": True, "off": False}
_Piece = str | int
"""Plain text, or the id of an added token."""


@dataclass(frozen=True, slots=True)
class _Form:
    """What decides how a template renders a chat, but for its texts."""

    has_system: bool = False
    num_turns: int = 0
    thinking: str = ""

    @classmethod
    def of(cls, chat: Chat) -> "_Form":
        return cls(bool(chat.system), len(chat.turns), chat.thinking if chat.thinking in _THINKING else "")

    @property
    def roles(self) -> list[str]:
        return [*["system"] * self.has_system, *islice(cycle(("user", "assistant")), self.num_turns + 1)]

    @property
    def variables(self) -> Mapping[str, Any]:
        """What the template is told beside the messages, by the name that Qwen's and others know."""
        return {"enable_thinking": _THINKING[self.thinking]} if self.thinking else {}


@dataclass(frozen=True, slots=True)
class _Words:
    """The place of one of a chat's texts."""

    number: int


class ChatTemplate:
    """A chat template taken apart around what is said in a chat. A video is before the first question.

    Args:
        template: None means the tokenizer's own one.
        video_word: that the template writes where the video belongs, if it is no token.
        medium: what the video is called in a message; "": there is none.

    Raises:
        ModelNotUsable: there is no template, it fails, or it drops the message.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None, video_word: str = "", *, medium: str = "video"
    ) -> None:
        self._tokenizer, self._template, self._medium = tokenizer, template, medium
        backend: Tokenizer = tokenizer.backend_tokenizer
        self._added_ids = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
        if video_word:
            self._added_ids.setdefault(video_word, VIDEO_WORD)
        self._shapes: dict[_Form, list[_Piece | _Words]] = {}
        self._printed: dict[_Form, set[int]] = {}
        """Messages that a template puts out as they are, GLM-4.1V's all but the user's: given as lists of parts these
        would be lists in the prompt, too, so they are given as words."""
        pieces = self._shape(_Form())
        first_ids: list[int] = backend.encode("", add_special_tokens=True).ids
        self._first_ids = [] if pieces[: len(first_ids)] == first_ids else first_ids
        """What the tokenizer begins every text with."""
        self._plain = _without_specials(backend.to_str())
        """Matches no special tokens."""
        self._inner = inner_tokenizer(backend)
        """The same for text behind a special token, before which some tokenizers put no space."""

    @classmethod
    def for_video(
        cls, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint, video_token_id: int
    ) -> "ChatTemplate":
        """The checkpoint's template, which must put one video before the message. Raises `ModelNotUsable`."""
        return cls(tokenizer, checkpoint.chat_template())._checked(checkpoint, video_token_id)

    @classmethod
    def for_pictures(
        cls, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint, picture_token_id: int
    ) -> tuple["ChatTemplate", list[_Piece]]:
        """The checkpoint's template for a model that takes a video as so many pictures, with one of them, and what it
        writes between two. It must put them before the message and write all alike. Raises `ModelNotUsable`."""
        template = cls(tokenizer, checkpoint.chat_template(), medium="image")._checked(checkpoint, picture_token_id)
        one, two, three = (template._take_apart(_Form(), copies) for copies in (1, 2, 3))
        place = one.index(picture_token_id)
        between = [piece for piece in two[place + 1 : place + len(two) - len(one)] if not isinstance(piece, _Words)]
        if three != [*one[:place], *[picture_token_id, *between] * 2, *one[place:]]:
            raise ModelNotUsable(f"{checkpoint.ref}: the chat template must write several pictures of a message alike")
        return template, between

    @classmethod
    def for_text(cls, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint) -> "ChatTemplate | None":
        """The checkpoint's template for a message about no video; None where it has none for that."""
        with contextlib.suppress(ModelNotUsable):
            return cls(tokenizer, checkpoint.chat_template(), medium="")
        return None

    @classmethod
    def for_word(cls, tokenizer: PreTrainedTokenizerBase, template: str, video_word: str) -> tuple["ChatTemplate", int]:
        """A template that writes a word where the video belongs, which may be a token or none, and what to give
        `encode_with_video` for it."""
        return cls(tokenizer, template, video_word), tokenizer.get_vocab().get(video_word, VIDEO_WORD)

    def encode_around_video(self, chat: Chat, video_token_id: int) -> tuple[list[int], list[int]]:
        """Token ids of the prompt before and after its video. Raises `InvalidRequest` for a message with a video."""
        token_ids = self.encode(chat)
        if token_ids.count(video_token_id) != 1:
            raise InvalidRequest("the prompt contains the model's video placeholder token")
        video_start = token_ids.index(video_token_id)
        return token_ids[:video_start], token_ids[video_start + 1 :]

    def encode(self, chat: Chat) -> list[int]:
        """Token ids of the whole prompt. Raises `InvalidRequest` for earlier turns that the template does not take."""
        return self._encode(self._pieces(chat))

    def encode_with_video(self, chat: Chat, video_token_id: int, video: Sequence[_Piece]) -> list[int]:
        """The same with other pieces in the place of the video's one token."""
        pieces = self._pieces(chat)
        place = pieces.index(video_token_id)
        pieces[place : place + 1] = video
        return self._encode(pieces)

    def _checked(self, checkpoint: Checkpoint, token_id: int) -> "ChatTemplate":
        pieces = self._shape(_Form())
        if pieces[: pieces.index(_Words(0))].count(token_id) != 1:
            raise ModelNotUsable(
                f"{checkpoint.ref}: the chat template must put one {self._medium} before the user's text"
            )
        return self

    def _pieces(self, chat: Chat) -> list[_Piece]:
        try:
            shape = self._shape(_Form.of(chat))
        except ModelNotUsable as error:
            if chat.system:
                return self._pieces(_without_system(chat))
            raise InvalidRequest(f"earlier questions and answers cannot be told to this model: {error}") from error
        texts = self._as_told(chat)
        return [texts[piece.number] if isinstance(piece, _Words) else piece for piece in shape]

    def _as_told(self, chat: Chat) -> Sequence[str]:
        """The texts as the template has them: it may trim what is said, or leave the reasoning out of an answer."""
        texts = (*([chat.system] if chat.system else []), *chat.turns, chat.question)
        form, marks = _Form.of(chat), _marks(len(texts))
        marked = self._render(form, marks)
        with contextlib.suppress(ModelNotUsable):  # texts are data, which a template may choke on
            if self._render(form, texts) == _MARKED.sub(lambda mark: texts[int(mark[1])], marked):
                return texts
            return [self._told(form, marks, marked, number, text) for number, text in enumerate(texts)]
        return texts

    def _told(self, form: _Form, marks: Sequence[str], marked: str, number: int, text: str) -> str:
        """What is rendered in the place of one mark. Raises `ModelNotUsable`."""
        before, _, after = marked.partition(marks[number])
        rendered = self._render(form, [*marks[:number], text, *marks[number + 1 :]])
        told = rendered[len(before) : len(rendered) - len(after)]
        return told if before + told + after == rendered else text

    def _shape(self, form: _Form) -> list[_Piece | _Words]:
        """That of all chats of a form. Raises `ModelNotUsable`."""
        if form not in self._shapes:
            self._shapes[form] = self._take_apart(form)
        return self._shapes[form]

    def _take_apart(self, form: _Form, copies: int = 1) -> list[_Piece | _Words]:
        rendered = self._render(form, _marks(len(form.roles)), copies)
        pieces: list[_Piece | _Words] = []
        for index, part in enumerate(_MARKED.split(rendered)):
            pieces += [_Words(int(part))] if index % 2 else _split(part, self._added_ids)
        if {piece.number for piece in pieces if isinstance(piece, _Words)} != set(range(len(form.roles))):
            raise ModelNotUsable("the checkpoint's chat template drops the text of a message")
        return pieces

    def _render(self, form: _Form, texts: Sequence[str], copies: int = 1) -> str:
        """A chat as the template has it, with so many of its medium. Raises `ModelNotUsable`."""
        if form not in self._printed:
            marks = _marks(len(form.roles))
            rendered = self._apply(form, [_parts(mark) for mark in marks])
            self._printed[form] = {number for number, mark in enumerate(marks) if str(_parts(mark)) in rendered}
        contents = [text if number in self._printed[form] else _parts(text) for number, text in enumerate(texts)]
        return self._apply(form, contents, copies)

    def _apply(self, form: _Form, contents: Sequence[Any], copies: int = 1) -> str:
        roles, given = form.roles, list(contents)
        if self._medium:
            first = roles.index("user")
            given[first] = [*[{"type": self._medium}] * copies, *given[first]]
        messages: list[Any] = [{"role": role, "content": said} for role, said in zip(roles, given, strict=True)]
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=True, **form.variables
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ModelNotUsable(f"the checkpoint's chat template is missing or fails: {error}") from error
        return str(rendered)

    def _encode(self, pieces: Sequence[_Piece]) -> list[int]:
        token_ids = list(self._first_ids)
        tokenizer = self._plain
        for piece in _join(pieces):
            if isinstance(piece, int):
                token_ids.append(piece)
            else:
                token_ids.extend(tokenizer.encode(piece, add_special_tokens=False).ids)
            tokenizer = self._inner
        return token_ids


def _without_system(chat: Chat) -> Chat:
    """The same for a template that has no place for it: it stands before the first question."""
    first, *others = (*chat.turns, chat.question)
    *turns, question = (f"{chat.system}\n{first}", *others)
    return replace(chat, question=question, system="", turns=tuple(turns))


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _marks(num_texts: int) -> list[str]:
    return [_MARKER.format(number) for number in range(num_texts)]


def token_id_of(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase, name: str | None, usual: str) -> int:
    """Of a special token that the tokenizer calls `name`, if it may, or of the usual one. Raises `ModelNotUsable`."""
    token = (name and getattr(tokenizer, name, None)) or usual
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
