"""Several texts of one request (`n`): OpenAI's own client at a real stack, and the order and the end of such an answer
with a gateway's events made by hand."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import openai
import pytest

from slipstream.documents.reading import DocumentEvent
from slipstream.errors import ServiceUnavailable
from slipstream.messages import PREFILLED, Caption, CommittedText, CommittedToken, StageChange
from slipstream.services.front.answer import Answer
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.chat_request import ChatRequest
from slipstream.services.front.choices import tell_choices
from slipstream.services.front.completions import ChatForm, Completion
from slipstream.services.front.json_body import Window
from slipstream.services.front.responses_request import read_response
from slipstream.services.front.sources import Opened
from slipstream.speculation.protocol import FinishReason
from tests.front.conftest import Served
from tests.front.test_chat_requests import read, request
from tests.front.test_openai_chat import NUM_TOKENS, chat
from tests.support.front import data_url
from tests.support.processes import eventually

HOT: dict[str, Any] = {"temperature": 2.0, "seed": 7}
PIECES = ["A star", " rises."]

# -- of a real stack --------------------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_scope="session")
async def test_each_is_the_text_of_its_own_seed_and_the_video_is_read_once(served: Served) -> None:
    url = data_url(served.clips[0])
    alone = [await chat(served, url, temperature=2.0, seed=seed) for seed in (7, 8, 9)]
    texts = [answer.choices[0].message.content for answer in alone]
    answer = await chat(served, url, n=3, **HOT)
    assert [choice.message.content for choice in answer.choices] == texts and len(set(texts)) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert answer.usage.completion_tokens == 3 * NUM_TOKENS
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3 * NUM_TOKENS
    receipts = [choice.slipstream["receipt"] for choice in answer.choices]
    assert len({receipt["text_sha256"] for receipt in receipts}) == 3
    assert len({receipt["request_id"] for receipt in receipts}) == 3
    assert all(choice.timings["predicted_n"] == NUM_TOKENS for choice in answer.choices)
    assert not hasattr(answer, "timings"), "they are each choice's own"


@pytest.mark.asyncio(loop_scope="session")
async def test_the_others_find_the_prefill_of_the_first(served: Served) -> None:
    answer = await chat(served, data_url(served.clips[1]), n=3, **HOT)
    cached = [choice.timings["cache_n"] for choice in answer.choices]
    assert min(cached[1:]) > answer.usage.prompt_tokens / 2, cached


@pytest.mark.asyncio(loop_scope="session")
async def test_a_stream_of_several_is_told_apart_by_index(served: Served) -> None:
    url, options = data_url(served.clips[0]), {"include_usage": True}
    whole = await chat(served, url, n=2, **HOT)
    chunks = [chunk async for chunk in await chat(served, url, n=2, stream=True, stream_options=options, **HOT)]
    *pieces, last = chunks
    told = [choice for chunk in pieces for choice in chunk.choices]
    for choice in whole.choices:
        own = [one for one in told if one.index == choice.index]
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert [one.finish_reason for one in own if one.finish_reason] == ["length"] and own[0].delta.role
    assert not last.choices and last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )


@pytest.mark.asyncio(loop_scope="session")
async def test_what_fails_for_one_fails_for_all(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(served, data_url(b"no video"), n=3, **HOT)
    assert refused.value.param == "messages[0].content[1]"


# -- what is asked ----------------------------------------------------------------------------------------------------


def test_seeds_count_on_and_begin_anew_at_the_end() -> None:
    asked = read(request(n=3, seed=2**63 - 2, slipstream={"surface": "lines"}))
    choices = [asked.choice(index) for index in range(3)]
    assert [choice.options.get("seed", 0) for choice in choices] == [2**63 - 2, 2**63 - 1, 0]
    assert all(choice.document.caption == choice.options for choice in choices)
    assert [read(request(n=2)).choice(index).options.get("seed", 0) for index in range(2)] == [0, 1]


def test_a_response_has_one() -> None:
    said = {"model": "m", "input": [{"role": "user", "content": []}]}
    with pytest.raises(ApiError) as refused:
        read_response(said | {"n": 2}, {})
    assert refused.value.param == "n"


def test_a_medium_is_read_by_all_at_once(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(1 << 20)
    (path := tmp_path / "clip").write_bytes(b"before" + data)
    with path.open("rb") as file, ThreadPoolExecutor(8) as pool:
        opened = Opened(Window(file, 6, 6 + len(data)), is_document=False)

        def read(video: Any) -> bytes:
            return b"".join(iter(lambda: video.read(999), b""))

        assert all(found == data for found in pool.map(read, [opened.video() for _ in range(8)]))


# -- as it is written -------------------------------------------------------------------------------------------------


class Told:
    """Events of a gateway, which wait until they are let go."""

    def __init__(self, asked: ChatRequest) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.prefill, self.text = asyncio.Event(), asyncio.Event()
        completion = Completion("chatcmpl-1", "m", 5)
        self.answers = [
            Answer(asked.choice(index), ChatForm(completion, index), completion.choice_id(index))
            for index in range(asked.num_choices)
        ]

    async def of(self, index: int) -> AsyncGenerator[DocumentEvent, None]:
        self.begun.append(index)
        try:
            await self.prefill.wait()
            yield StageChange(PREFILLED, total=20)
            await self.text.wait()
            for piece in PIECES:
                yield CommittedText((CommittedToken(5, piece, from_draft=False),))
            yield Caption("".join(PIECES), 2, FinishReason.STOP)
        finally:
            self.ended.append(index)


async def test_what_is_told_beside_a_text_says_of_which() -> None:
    told = Told(read(request(n=2, slipstream={"trace": True})))
    told.prefill.set(), told.text.set()
    async with aclosing(tell_choices(told.answers, told.of)) as stream:
        events = [json.loads(piece.removeprefix(b"data: ")) async for piece in stream if b"[DONE]" not in piece]
    beside = [event["slipstream"] for event in events if not event["choices"]]
    assert [facts.get("choice", 0) for facts in beside if "stage" in facts] == [0, 1]


async def test_the_others_begin_when_the_first_is_prefilled() -> None:
    told = Told(read(request(n=3)))
    async with aclosing(tell_choices(told.answers, told.of)) as stream:
        first = asyncio.ensure_future(anext(stream))
        await eventually(lambda: told.begun)
        assert told.begun == [0] and not first.done()
        told.prefill.set()
        await eventually(lambda: told.begun == [0, 1, 2])
        told.text.set()
        pieces = [await first] + [piece async for piece in stream]
    assert pieces[-1] == b"data: [DONE]\n\n" and sorted(told.ended) == [0, 1, 2]
    assert [answer.written.text for answer in told.answers] == ["A star rises."] * 3


async def test_one_that_needs_no_prefill_holds_up_no_other() -> None:
    told = Told(read(request(n=2)))
    told.prefill.set(), told.text.set()

    async def spared(index: int) -> AsyncGenerator[DocumentEvent, None]:
        if index:
            async for happened in told.of(index):
                yield happened
        else:
            yield Caption("", 0, None, skipped="black")

    async with aclosing(tell_choices(told.answers, spared)) as stream:
        assert [piece async for piece in stream][-1] == b"data: [DONE]\n\n"
    assert [answer.written.text for answer in told.answers] == ["", "A star rises."]


async def test_the_failure_of_one_ends_the_others() -> None:
    told = Told(read(request(n=3)))
    told.prefill.set()

    async def failing(index: int) -> AsyncGenerator[DocumentEvent, None]:
        async with aclosing(told.of(index)) as events:
            async for happened in events:
                yield happened
                if index == 1:
                    raise ServiceUnavailable("the gateway went away")

    async with aclosing(tell_choices(told.answers, failing)) as stream:
        with pytest.raises(ServiceUnavailable, match="went away"):
            await anext(stream)
    assert sorted(told.begun) == sorted(told.ended)


async def test_who_leaves_ends_them_all() -> None:
    told = Told(read(request(n=3)))
    told.prefill.set(), told.text.set()
    stream = tell_choices(told.answers, told.of)
    await anext(stream)
    await stream.aclose()
    assert sorted(told.begun) == sorted(told.ended)
