"""What all families share: the adapter that each implements, and the way from token ids back to text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.device_copy import to_device
from slipstream.engine.forward import Decoder
from slipstream.families.preprocess import FramePreprocessor
from slipstream.families.prompts import inner_tokenizer
from slipstream.frame_size import FrameSize
from slipstream.session_messages import Chat
from slipstream.speculation.methods import Positions

# -- adapter ----------------------------------------------------------------------------------------------------------

# What a model family supplies to the engine, `Adapter`, and the plain facts that pass between them.

_UNTIMED_FRAMES_PER_S = 24.0


@dataclass(frozen=True, slots=True)
class FrameFacts:
    """What a prompt is planned with: all that is known of a video's frames before they are there."""

    num_frames: int
    size: tuple[int, int] | None = None
    """Their height and width; None: the usual size."""
    seconds_per_frame: float | None = None
    """From one frame to the next; None: not known."""
    times_s: Sequence[float] = ()
    """When each is shown, from the video's start; none: not known."""

    def times_in_words_s(self, untimed_frames_per_s: float = _UNTIMED_FRAMES_PER_S) -> list[float]:
        """When each is shown; where that is not known what upstream says of frames without times."""
        return list(self.times_s) or [index / untimed_frames_per_s for index in range(self.num_frames)]


@dataclass(frozen=True, slots=True)
class VideoGrid:
    """How the video tokens of a family with positions in time and space lie: step after step, row after row."""

    num_steps: int
    num_rows: int
    num_columns: int
    seconds_per_step: float = 1.0


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """A tokenised prompt and where its video lies; of a prompt about no video, that it has none.

    Between the parts of the video, and between the video and the text, there may be other tokens, such as the times of
    frames or LLaVA's newline; they are always kept and belong to neither.
    """

    token_ids: tuple[int, ...]
    """The whole prompt, with a placeholder id for every video token."""
    video: tuple[range, ...]
    """Where the prunable tokens stand, in ascending ranges that are not empty; none without a video."""
    text_start: int
    """The first text token that can see the video; 0 without one."""
    grid: VideoGrid | None = None
    """None where positions simply count the tokens."""
    num_steps: int = 1
    """Frames, or groups of frames, of the video; every one has as many tokens."""

    @property
    def is_text(self) -> bool:
        """There is no video."""
        return not self.video

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_text_tokens(self) -> int:
        """Text tokens behind the video."""
        return self.num_tokens - self.text_start

    @property
    def num_video_tokens(self) -> int:
        """Prunable tokens."""
        return sum(map(len, self.video))

    @property
    def video_start(self) -> int:
        return self.video[0].start

    @property
    def video_stop(self) -> int:
        """Behind the last video token."""
        return self.video[-1].stop

    @property
    def video_rows(self) -> Tensor:
        """Rows of the video tokens in the prompt, int64 [num_video_tokens], ascending."""
        return torch.tensor([row for span in self.video for row in span], dtype=torch.int64)

    @property
    def video_parts(self) -> Tensor:
        """For every token which part of the video it belongs to, int64 [num_tokens]; -1: to none."""
        parts = torch.full((self.num_tokens,), -1)
        for number, span in enumerate(self.video):
            parts[span.start : span.stop] = number
        return parts


@dataclass(frozen=True, slots=True)
class Pixels:
    """Preprocessed frames on the CPU: what the vision tower takes."""

    num_frames: int
    values: Tensor
    """Of the model's dtype: [n, 3, height, width], or rows of patches for families that cut frames up."""
    grid: tuple[int, int, int] | None = None
    """Patches along time, height and width, of such families."""


class Adapter(Protocol):
    """The part of the engine that knows one model family."""

    decoder: Decoder
    lm_head: nn.Module
    frames_per_step: int
    """Frames that share their tokens; a divisor of `FRAMES_PER_CHUNK`."""
    tokens_per_step: int
    """Video tokens of one step, for frames of usual size."""
    frame_size: FrameSize
    """What frames are resized to; those of another size are resized here."""
    surface: str
    """How models of the family write what they read of a page, one of `SURFACES`; empty: nothing is known."""
    num_axes: int
    """Of position ids: 1, or time, row and column, which are equal for the answer."""

    def plan_prompt(self, chat: Chat, frames: FrameFacts) -> PromptPlan:
        """Tokenise a chat about a video; nothing said in it acts as a special token. See `VideoLM`."""
        ...

    def preprocess(self, frames: NDArray[np.uint8], num_frames: int) -> Pixels:
        """Pixel values of whole steps, or of the video's end, from RGB [n, height, width, 3] of a video of
        `num_frames`. On any thread."""
        ...

    def encode(self, pixels: Pixels) -> Tensor:
        """Their video embeddings, [tokens, hidden], beside each the features that layer 0, 1, ... add to it, if any."""
        ...

    def embed_prompt(self, plan: PromptPlan, video_embeddings: Tensor) -> Tensor:
        """Input embeddings of the whole prompt, [num_tokens, hidden]."""
        ...

    def positions(self, plan: PromptPlan, rows: Tensor, scheme: str) -> tuple[Tensor, int]:
        """Position ids of the prompt tokens `rows` (sorted int64), and the position of the token after the prompt.

        Args:
            scheme: "original" leaves every token where it was before pruning; "compact" closes the gaps, on each axis.

        Returns:
            [n], or [axes, n] for rotary embeddings of several axes.
        """
        ...


def embedded(decoder: Decoder, plan: PromptPlan, video_embeddings: Tensor) -> Tensor:
    """Input embeddings of a prompt with the video's in their places, [num_tokens, hidden]."""
    table = decoder.embed_tokens
    device = table.weight.device
    hidden = cast(Tensor, table(to_device(torch.tensor(plan.token_ids), device)))
    hidden[to_device(plan.video_rows, device)] = video_embeddings
    return hidden


class CountedTokens:
    """A part of the adapters of families whose positions count the tokens, and whose steps are single frames."""

    frames_per_step = 1
    num_axes = 1
    surface = ""

    def __init__(self, model: PreTrainedModel, text_model: nn.Module, frame_size: FrameSize) -> None:
        self._model: Any = model
        self.decoder = cast(Decoder, text_model)
        self.lm_head: nn.Module = self._model.lm_head
        self.frame_size = frame_size

    def embed_prompt(self, plan: PromptPlan, video_embeddings: Tensor) -> Tensor:
        return embedded(self.decoder, plan, video_embeddings)

    def positions(self, plan: PromptPlan, rows: Tensor, scheme: str) -> tuple[Tensor, int]:
        if scheme == Positions.COMPACT:
            return torch.arange(len(rows)), len(rows)
        return rows, plan.num_tokens

    def _values(self, pixels: Pixels) -> Tensor:
        """On the model's device."""
        return to_device(pixels.values, self._model.device)


class EqualFrames(CountedTokens):
    """The same of families that resize all frames to one size."""

    def __init__(self, model: PreTrainedModel, text_model: nn.Module, frames: FramePreprocessor) -> None:
        super().__init__(model, text_model, frames.frame_size)
        self._frames = frames

    def preprocess(self, frames: NDArray[np.uint8], num_frames: int) -> Pixels:
        return Pixels(len(frames), self._frames(frames, self._model.dtype))


# From token ids back to text, all at once or token by token.

_REPLACEMENT = "\ufffd"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token of tokenizers that spell unknown characters byte by byte, such as Llama's."""
_CONTEXT_TOKENS = 4
"""Tokens kept before the new ones; every token is at least one byte, and no UTF-8 character has more than four."""


class TextDecoder:
    """Decodes ids, leaving out special tokens and ids that the vocabulary does not have."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._alone: dict[tuple[int, bool], str] = {}
        self._byte_ids = frozenset(i for token, i in tokenizer.get_vocab().items() if _BYTE.fullmatch(token))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids of text that stands behind a special token, as an answer does. On any thread."""
        token_ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return token_ids

    @cached_property
    def _plain(self) -> Tokenizer:
        return inner_tokenizer(self.tokenizer)

    def alone(self, token_id: int, *, begins: bool) -> str:
        """What one token says by itself, as the first of a text or behind others; "" for a special one. Tokenizers of
        Llama's kind begin no text with a space, and what is decoded alone is a text."""
        key = token_id, begins
        if key not in self._alone:
            self._alone[key] = self._decode_alone(token_id, begins) if self.has_text(token_id) else ""
        return self._alone[key]

    def _decode_alone(self, token_id: int, begins: bool) -> str:
        text = self.decode([token_id])
        return text if begins else self.decode([token_id] * 2)[len(text) :]

    def has_text(self, token_id: int) -> bool:
        """Whether the token stands for bytes of text."""
        return token_id not in self._special_ids and self.tokenizer.id_to_token(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte of a character that the vocabulary lacks. What a run of them says is not known
        before it ends: one that is wrong makes all of them unreadable."""
        return token_id in self._byte_ids


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

    def alone(self, token_id: int, *, begins: bool) -> str:
        """As of `TextDecoder`."""
        return self._decoder.alone(token_id, begins=begins)

    def flush(self) -> str:
        """What was held back, as the end of the text."""
        piece = self._decoder.decode(self._window)[self._num_emitted :]
        self._window.clear()
        self._num_emitted = 0
        return piece

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        if self._decoder.is_byte(token_id):
            return ""
        text = self._decoder.decode(self._window)
        num_stable = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._num_emitted : num_stable]
        del self._window[:-_CONTEXT_TOKENS]
        self._num_emitted = len(self._decoder.decode(self._window)) - (len(text) - num_stable)
        return piece


# -- stops ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoppedText:
    """The text of some tokens, as far as it is certain, and whether a stop string ended it."""

    pieces: list[str]
    """One for each token, up to and including the one that completed a stop string."""
    stop: str = ""
    """That stop string, if there was one. The last piece then ends before it, and the tokens behind are void."""


class StopMatcher:
    """Looks for the first of some strings in a text that comes in pieces (Knuth, Morris and Pratt, one per string)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        """Characters of each stop string that the text ends with."""
        self._held = ""

    def push(self, piece: str) -> tuple[str, str]:
        """The text that is certain now, and the stop string that was completed, or "". After one nothing may follow."""
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            for index, stop in enumerate(self._stops):
                self._matched[index] = _advance(stop, self._borders[index], self._matched[index], character)
            complete = [stop for stop, length in zip(self._stops, self._matched, strict=True) if length == len(stop)]
            if complete:
                stop = max(complete, key=len)
                self._held = ""
                return text[: end - len(stop)], stop
        certain = len(text) - max(self._matched, default=0)
        self._held = text[certain:]
        return text[:certain], ""

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


class StoppingText:
    """A text stream that ends before the first stop string. Without stop strings it is the stream itself."""

    def __init__(self, stream: TextStream, stops: Sequence[str] = ()) -> None:
        self._stream = stream
        self._matcher = StopMatcher(stops)

    def alone(self, token_id: int, *, begins: bool) -> str:
        """As of `TextDecoder`."""
        return self._stream.alone(token_id, begins=begins)

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> StoppedText:
        """The text of newly committed tokens; with `last`, all that was held back is let go with the last of them.

        The caller cuts its verdict behind token `len(pieces) - 1` when there is a stop (`Verdict.ended_at`).
        """
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            (piece,) = self._stream.push([token_id])
            ends = last and index == len(token_ids) - 1
            certain, stop = self._matcher.push(piece + self._stream.flush() if ends else piece)
            pieces.append(certain)
            if stop:
                return StoppedText(pieces, stop)
            if ends:
                pieces[-1] += self._matcher.flush()
        return StoppedText(pieces)


def _borders(stop: str) -> list[int]:
    """For each n, the length of the longest proper prefix that `stop[:n]` ends with."""
    borders = [0] * (len(stop) + 1)
    for index in range(1, len(stop)):
        borders[index + 1] = _advance(stop, borders, borders[index], stop[index])
    return borders


def _advance(stop: str, borders: list[int], matched: int, character: str) -> int:
    """Characters of `stop` that the text ends with after one more, when it ended with `matched` < len(stop) before."""
    while matched and stop[matched] != character:
        matched = borders[matched]
    return matched + 1 if stop[matched] == character else 0
