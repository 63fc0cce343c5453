"""`/v1/chat/completions` and `/v1/models`: captions in OpenAI's form, whole or as they are written."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from slipstream.client.caption_client import caption_events
from slipstream.client.document_client import document_events
from slipstream.documents.reading import DocumentEvent
from slipstream.errors import DeadlineExceeded, SlipstreamError
from slipstream.service_info import GatewayInfo
from slipstream.services.front.answer import Answer
from slipstream.services.front.api_errors import as_api_error, not_found
from slipstream.services.front.bodies import json_body, read_json
from slipstream.services.front.call import Call
from slipstream.services.front.chat_request import ChatRequest, check_kind, read_chat
from slipstream.services.front.choices import tell_choices
from slipstream.services.front.completions import ChatForm, Completion, Form
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
        return asked, lambda completion, index: ChatForm(completion, index, asked.functions, asked.include_usage)

    await answer_chat(call, read)


FormMaker = Callable[[Completion, int], Form]
"""Of the choice of that index."""
ChatReader = Callable[[Any, Mapping[str, Media]], tuple[ChatRequest, FormMaker]]


async def answer_chat(call: Call, read: ChatReader, bare: re.Pattern[bytes] | None = None) -> None:
    """Answers a body that `read` makes a chat request of, in the form that it says. `bare`: before media without a
    head, see `JsonBody`."""
    front = call.front
    with json_body(front.config, bare) as body, front.spooled.held(0) as take:
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
        answers = [
            Answer(asked.choice(index), make_form(completion, index), completion.choice_id(index))
            for index in range(asked.num_choices)
        ]
        form, call.measured = answers[0].form, answers[0].measured
        stream = tell_choices(answers, lambda index: _events(call, answers[index].asked, opened, index))
        if asked.stream:
            call.tell_failure = form.fail
            with front.figures.streams.track_inprogress():
                await call.stream(stream)
            return
        async with aclosing(stream):
            async for _ in stream:
                pass
    await call.answer(form.whole([answer.written for answer in answers]))


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
            answer.param = asked.medium.param
        raise answer from error


def _events(call: Call, asked: ChatRequest, opened: Opened, index: int) -> AsyncGenerator[DocumentEvent, None]:
    connection = call.front.gateways.connection(call.token)
    timeout_s = call.front.config.request_timeout_s + LATER_S
    request_id = f"{call.request_id}.{index}" if index else call.request_id
    if opened.is_document:
        return document_events(connection, opened.video(), asked.document, request_id=request_id, timeout_s=timeout_s)
    return caption_events(connection, opened.video(), asked.options, request_id=request_id, timeout_s=timeout_s)
