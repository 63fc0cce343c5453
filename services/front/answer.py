"""One choice of an answer while it is written: from what the gateway tells to what its form has of it."""

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.documents.messages import DocumentFacts, PageDraft, PagePicture
from slipstream.documents.reading import DocumentEvent
from slipstream.messages import PREFILLED, Caption, CommittedText, CommittedToken, KeptTokens, StageChange, Trace
from slipstream.services.front.chat_request import ChatRequest
from slipstream.services.front.completions import PAGE_BREAK, Form, Written, timings, usage_of
from slipstream.services.front.function_calls import StreamedCalls


@dataclass
class Answer:
    """A choice, and what is known of it so far."""

    asked: ChatRequest
    form: Form
    answer_id: str
    captions: list[Caption] = field(default_factory=list)
    tokens: list[CommittedToken] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    """The timings, once they are known."""
    _pieces: list[str] = field(default_factory=list)
    _num_told: int = 0
    """Of the tokens, in a stream."""
    _num_prompt: int = 0
    """Of the caption that is being written."""
    _page: int = 0

    def __post_init__(self) -> None:
        functions = self.asked.functions
        self._calls = None if functions is None else StreamedCalls(functions, self.answer_id)

    @property
    def written(self) -> Written:
        """So far."""
        return Written("".join(self._pieces), self.captions, self.tokens, self.asked.functions)

    async def events(self, said: AsyncGenerator[DocumentEvent, None]) -> AsyncGenerator[bytes, None]:
        """What is sent of a stream. Nobody need look at it: the answer is whole when they end."""
        form, is_traced, is_begun = self.form, self.asked.options.get("trace", False), False
        async with aclosing(said):
            async for happened in said:
                deltas = self._add(happened)
                if (is_traced or isinstance(happened, KeptTokens)) and (facts := _facts(happened)):
                    yield form.aside(facts)
                if not is_begun and (deltas or isinstance(happened, CommittedText)):
                    is_begun = True
                    yield form.begin(self._usage_so_far())
                for delta in deltas:
                    yield form.add(delta, self._untold(), self._usage_so_far())
        self.measured |= timings(self.captions)
        if not is_begun:
            yield form.begin(self._usage_so_far())
        yield form.end(self.written, self._untold(), self._usage_so_far())

    def _add(self, happened: DocumentEvent) -> list[dict[str, Any]]:
        """What is told of the answer with it."""
        match happened:
            case PagePicture():
                self._page += 1
                if self._page > 1:
                    self._pieces.append(PAGE_BREAK)
                    return [] if self._calls else [{"content": PAGE_BREAK}]
            case StageChange() if happened.stage == PREFILLED:
                self._num_prompt = happened.total
            case Caption():
                self.captions.append(happened)
                self._num_prompt = 0
                return self._calls.end() if self._calls else []
            case CommittedText():
                self.tokens += happened.tokens
                self._pieces.append(text := str(happened))
                if self._calls:
                    return self._calls.add(text)
                return [{"content": text}] if text else []
        return []

    def _untold(self) -> list[CommittedToken]:
        """The tokens that no piece of the stream has brought yet."""
        untold = self.tokens[self._num_told :]
        self._num_told = len(self.tokens)
        return untold

    def _usage_so_far(self) -> dict[str, Any]:
        if not self.asked.include_usage:
            return {}
        if not self.asked.continuous_usage:
            return {"usage": None}
        return {"usage": usage_of(self.captions, len(self.tokens), self._num_prompt)}


def _facts(happened: DocumentEvent) -> dict[str, Any]:
    """What a stream that is traced says beside its text."""
    match happened:
        case Trace():
            return {"trace": asdict(happened)}
        case StageChange():
            return {"stage": asdict(happened)}
        case KeptTokens():
            return {"kept": asdict(happened) | {"bitmap": base64.b64encode(happened.bitmap).decode()}}
        case CommittedText():
            return {"tokens": [[token.piece, token.from_draft] for token in happened.tokens]}
        case PagePicture():
            return {"page": {"page": happened.page, "width": happened.width, "height": happened.height}}
        case DocumentFacts():
            return {"document": asdict(happened)}
        case Caption():
            return {"video": asdict(happened.video), "stages": asdict(happened.timings)}
        case PageDraft():
            return {}
    return {}
