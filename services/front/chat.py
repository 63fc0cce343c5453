"""`/v1/chat/completions` and `/v1/models`: captions in OpenAI's form, whole or as they are written."""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from slipstream.client.caption_client import caption_events
from slipstream.client.document_client import document_events
from slipstream.documents.messages import DocumentFacts, PageDraft, PagePicture
from slipstream.documents.reading import DocumentEvent
from slipstream.errors import DeadlineExceeded, SlipstreamError
from slipstream.messages import PREFILLED, Caption, CommittedText, CommittedToken, KeptTokens, StageChange, Trace
from slipstream.service_info import GatewayInfo
from slipstream.services.front.api_errors import as_api_error, not_found
from slipstream.services.front.bodies import json_body, read_json
from slipstream.services.front.call import Call
from slipstream.services.front.chat_request import ChatRequest, check_kind, read_chat
from slipstream.services.front.completions import PAGE_BREAK, ChatForm, Completion, Form, Written, timings, usage_of
from slipstream.services.front.function_calls import StreamedCalls
from slipstream.services.front.gateways import short_name
from slipstream.services.front.json_body import JsonBody, Media
from slipstream.services.front.sources import Opened

LATER_S = 5.0
"""The gateway's time ends so much later than ours, which says what it was."""

# -- models -----------------------------------------------------------------------------------------------------------


async def list_models(call: Call) -> None:
    """GET /v1/models."""
    info = await call.front.gateways.info(call.token)
    await call.answer({"object": "list", "data": [_model(call, info)]})


async def get_model(call: Call) -> None:
    """GET /v1/models/{model}."""
    info = await call.front.gateways.info(call.token)
    _check_model(call, info, call.params["model"])
    await call.answer(_model(call, info))


def _model(call: Call, info: GatewayInfo) -> dict[str, Any]:
    name = call.front.gateways.served_name(info)
    facts = {
        "version": info.version,
        "draft": short_name(info.draft_model) or None,
        "tokens_per_frame": info.tokens_per_frame,
    }
    limits = {name: getattr(info, name) for name in ("max_frames", "max_new_tokens", "max_video_bytes")}
    more = {"reads_documents": info.reads_documents, "accepts_paths": info.accepts_paths}
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "slipstream",
        "slipstream": facts | limits | more,
    }


def _check_model(call: Call, info: GatewayInfo, asked: str) -> None:
    name = call.front.gateways.served_name(info)
    if asked != name:
        raise not_found(f"there is no model {asked!r}; this server has {name!r}", param="model", code="model_not_found")


# -- chat -------------------------------------------------------------------------------------------------------------


async def create_chat(call: Call) -> None:
    """POST /v1/chat/completions."""

    def read(said: Any, media: Mapping[str, Media]) -> tuple[ChatRequest, FormMaker]:
        asked = read_chat(said, media)
        return asked, lambda completion: ChatForm(completion, asked.functions, asked.include_usage)

    await answer_chat(call, read)


FormMaker = Callable[[Completion], Form]
ChatReader = Callable[[Any, Mapping[str, Media]], tuple[ChatRequest, FormMaker]]


async def answer_chat(call: Call, read: ChatReader) -> None:
    """Answers a body that `read` makes a chat request of, in the form that it says."""
    front = call.front
    with json_body(front.config) as body, front.spooled.held(0) as take:
        said = await read_json(call.scope, call.receive, front.config, body, take)
        front.figures.spooled.inc(body.media_bytes)
        async with call.while_there():
            asked, make_form = read(said, body.media)
            info = await front.gateways.info(call.token)
            _check_model(call, info, asked.model)
            await _answer(call, asked, make_form, body, info)


async def _answer(call: Call, asked: ChatRequest, make_form: FormMaker, body: JsonBody, info: GatewayInfo) -> None:
    front = call.front
    async with (
        _errors_named(asked),
        asyncio.timeout(front.config.request_timeout_s),
        front.sources.opened(asked.medium, body, info, call.owner) as opened,
    ):
        check_kind(asked, opened.is_document)
        completion = Completion(
            completion_id=f"chatcmpl-{call.request_id}",
            model=asked.model,
            created_s=int(time.time()),
            draft_model=short_name(info.draft_model),
            media=opened.facts,
        )
        answer = _Answer(asked, form := make_form(completion), completion.completion_id)
        call.measured = answer.measured
        if asked.stream:
            call.tell_failure = form.fail
            with front.figures.streams.track_inprogress():
                await call.stream(answer.events(_events(call, asked, opened)))
            return
        async with aclosing(answer.events(_events(call, asked, opened))) as events:
            async for _ in events:
                pass
    await call.answer(form.whole(answer.written))


@asynccontextmanager
async def _errors_named(asked: ChatRequest) -> AsyncGenerator[None, None]:
    """Errors about an option name the field that gave it."""
    try:
        yield
    except TimeoutError:
        raise as_api_error(DeadlineExceeded("the answer took longer than this server serves one")) from None
    except SlipstreamError as error:
        answer = as_api_error(error, asked.params)
        if answer.param is None and answer.status in (400, 404, 413) and answer.code != "not_served":
            answer.param = "messages" if "prompt" in str(error)[:12] else asked.medium.param
        raise answer from error


def _events(call: Call, asked: ChatRequest, opened: Opened) -> AsyncGenerator[DocumentEvent, None]:
    connection = call.front.gateways.connection(call.token)
    timeout_s = call.front.config.request_timeout_s + LATER_S
    if opened.is_document:
        return document_events(
            connection, opened.video, asked.document, request_id=call.request_id, timeout_s=timeout_s
        )
    return caption_events(connection, opened.video, asked.options, request_id=call.request_id, timeout_s=timeout_s)


@dataclass
class _Answer:
    """An answer while it is written."""

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
