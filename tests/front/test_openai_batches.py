"""Files and batches by OpenAI's own client at a real stack: each request has one line, whatever is killed meanwhile."""

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from slipstream.services.front import batches
from slipstream.services.front.file_store import FileStore
from tests.cli.fake_gateway import FakeGateway
from tests.front.conftest import NUM_FRAMES, Served
from tests.support.front import CHAT, PROMPT, asked, batch_line, client_of, data_url, front_at, front_process

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 8
ENDS = {"completed", "failed", "expired", "cancelled"}
DAY: Any = "24h"
CHAT_ENDPOINT: Any = CHAT


def body(served: Served, url: str, **more: Any) -> dict[str, Any]:
    given = {"model": served.model, "messages": asked(url), "max_tokens": NUM_TOKENS}
    return given | {"slipstream": {"num_frames": NUM_FRAMES}} | more


async def opened(client: openai.AsyncOpenAI, lines: list[str], window: str = DAY, **more: Any) -> Any:
    """A batch of these lines."""
    file = await client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    options: Any = {"completion_window": window, "endpoint": CHAT_ENDPOINT} | more
    return await client.batches.create(input_file_id=file.id, **options)


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    async with asyncio.timeout(240):
        while batch.status not in ENDS:
            await asyncio.sleep(0.1)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    text = "" if file_id is None else (await client.files.content(file_id)).text
    return [json.loads(line) for line in text.splitlines()]


async def test_every_request_has_its_line(served: Served) -> None:
    client, path = served.client, served.folder / "1.mp4"
    uploaded = await client.files.create(file=path, purpose="user_data")
    by_id = body(served, "")
    by_id["messages"] = [{"role": "user", "content": [{"type": "file", "file": {"file_id": uploaded.id}}]}]
    by_id["messages"][0]["content"].insert(0, {"type": "text", "text": PROMPT})
    lines = [
        batch_line("by value", body(served, data_url(served.clips[0]))),
        batch_line("by path", body(served, f"file://{path}")),
        batch_line("by id", by_id),
        batch_line("no file", body(served, f"file://{served.folder}/none.mp4")),
        batch_line("no video", body(served, data_url(b"no video at all"))),
        batch_line("unknown field", body(served, f"file://{path}", magic=1)),
        batch_line("streamed", body(served, f"file://{path}", stream=True)),
        batch_line("of several texts", body(served, f"file://{path}", n=2)),
        "",
    ]
    batch = await opened(client, lines, metadata={"of": "me"})
    assert batch.status == "validating" and batch.metadata == {"of": "me"}
    batch = await ended(client, batch)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 8, 3, 5)
    done = {line["custom_id"]: line["response"]["body"] for line in await lines_of(client, batch.output_file_id)}
    for name, clip in (("by value", 0), ("by path", 1), ("by id", 1)):
        caption = await served.captioner.caption(
            served.clips[clip], PROMPT, num_frames=NUM_FRAMES, max_new_tokens=NUM_TOKENS, method="autoregressive"
        )
        assert done[name]["choices"][0]["message"]["content"] == caption.text
        assert done[name]["slipstream"]["receipt"]["media_sha256"] and done[name]["usage"]["completion_tokens"]
    failed = {line["custom_id"]: line for line in await lines_of(client, batch.error_file_id)}
    statuses = {name: line["response"]["status_code"] for name, line in failed.items()}
    refused = dict.fromkeys(("no video", "unknown field", "streamed", "of several texts"), 400)
    assert statuses == {"no file": 404} | refused
    assert failed["unknown field"]["response"]["body"]["error"]["param"] == "magic"
    assert (await client.batches.list(limit=1)).data[0].id == batch.id
    for limit in ("0", "00000000199999", "0" * 9 + "1" * 5000):
        with pytest.raises(openai.BadRequestError, match="limit must be between 1 and"):
            await client.batches.list(limit=cast(int, limit))
    await client.files.delete(uploaded.id)


async def test_a_line_is_answered_as_the_request_itself_would_be(served: Served) -> None:
    good = f"file://{served.folder}/1.mp4"
    bodies = {
        "another model": body(served, good, model="another"),
        "no file": body(served, f"file://{served.folder}/none.mp4"),
        "no such root": body(served, "file:///etc/passwd"),
        "no such host": body(served, "https://example.com/a.mp4"),
        "no video": body(served, data_url(b"no video")),
        "unknown field": body(served, good, logit_bias={"1": 1}),
        "unknown method": body(served, good, slipstream={"method": "magic"}),
        "too many tokens": body(served, good, max_tokens=10**6),
        "too many frames": body(served, good, slipstream={"num_frames": 10**6}),
        "too long a prompt": body(served, good, messages=asked(good, "blue " * 10_000)),
        "too much for the model": body(served, good, messages=asked(good, "blue " * 2500)),
        "impossible": body(
            served, good, response_format={"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
        ),
    }
    told = {}
    for name, asked_for in bodies.items():
        with pytest.raises(openai.APIStatusError) as refused:
            await served.client.post("/chat/completions", body=asked_for, cast_to=object)
        told[name] = refused.value.status_code
    batch = await ended(served.client, await opened(served.client, [batch_line(*each) for each in bodies.items()]))
    lines = await lines_of(served.client, batch.error_file_id)
    assert {line["custom_id"]: line["response"]["status_code"] for line in lines} == told
    assert set(told.values()) == {400, 404, 413}


async def test_a_file_that_cannot_be_read_runs_nothing(served: Served) -> None:
    good = batch_line("a", body(served, "file:///none"))
    batch = await ended(served.client, await opened(served.client, [good, "no JSON", good, '{"custom_id": "b"}']))
    assert batch.status == "failed" and batch.output_file_id is None and batch.error_file_id is None
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "invalid_json"),
        (3, "duplicate_custom_id"),
        (4, "invalid_url"),
    ]
    with pytest.raises(openai.ConflictError):
        await served.client.batches.cancel(batch.id)


async def test_a_batch_may_be_cancelled(served: Served) -> None:
    clip = f"file://{served.folder}/2.mp4"
    slow = [batch_line(str(n), body(served, clip, max_tokens=3000, temperature=5.0, seed=n)) for n in range(12)]
    batch = await opened(served.client, slow)
    cancelling = await served.client.batches.cancel(batch.id)
    assert cancelling.status in ("cancelling", "cancelled")
    batch = await ended(served.client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at >= batch.cancelling_at
    errors = await lines_of(served.client, batch.error_file_id)
    done = await lines_of(served.client, batch.output_file_id)
    if batch.request_counts.total == len(errors) + len(done):  # it was handed in before
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}


async def test_a_window_that_passes_ends_a_batch(served: Served) -> None:
    clip = f"file://{served.folder}/2.mp4"
    slow = [batch_line(str(n), body(served, clip, max_tokens=3000, temperature=5.0, seed=50 + n)) for n in range(12)]
    batch = await ended(served.client, await opened(served.client, slow, "1s"))
    assert batch.status == "expired" and batch.expired_at
    names = Counter[str]()
    for file_id in (batch.output_file_id, batch.error_file_id):
        names.update(line["custom_id"] for line in await lines_of(served.client, file_id))
    assert set(names.values()) == {1} and len(names) == len(slow)


async def test_the_same_key_is_the_same_batch(served: Served) -> None:
    file = await served.client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    headers = {"idempotency-key": "once"}
    options: Any = {"completion_window": DAY, "endpoint": CHAT_ENDPOINT, "extra_headers": headers}
    batches = [await served.client.batches.create(input_file_id=file.id, **options) for _ in range(2)]
    assert batches[0].id == batches[1].id


async def test_files(served: Served) -> None:
    client, content = served.client, bytes(range(256)) * 5000
    file = await client.files.create(
        file=('naïve ".bin', content), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.bytes == len(content) and file.expires_at - file.created_at == 3600
    assert (await client.files.content(file.id)).content == content
    assert file.id in [one.id async for one in client.files.list(purpose="user_data")]
    assert file.id not in [one.id async for one in client.files.list(purpose="batch")]
    assert (await client.files.delete(file.id)).deleted
    for gone in (client.files.retrieve(file.id), client.files.content(file.id), client.files.delete(file.id)):
        with pytest.raises(openai.NotFoundError):
            await gone
    wrong: Any = "fine-tune"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=("a", b"b"), purpose=wrong)
    assert refused.value.param == "purpose"


async def test_a_front_that_is_killed_loses_and_doubles_nothing(served: Served, tmp_path: Path) -> None:
    """Its media are not readable to the gateway here, so the videos are named by path."""
    front = front_process(served.stack.gateway_address, tmp_path)
    clips = [f"file://{served.folder}/{n % 3}.mp4" for n in range(30)]
    lines = [batch_line(f"line {n}", body(served, clip, max_tokens=1 + n // 3)) for n, clip in enumerate(clips)]
    await front.start()
    try:
        await front.wait_serving(240)
        async with client_of(front.address) as client:
            batch = await opened(client, lines)
            for _ in range(3):
                os.kill(front.pid, signal.SIGKILL)
                await front.wait_exit()
                await front.start()
                await front.wait_serving(240)
                batch = await client.batches.retrieve(batch.id)
            batch = await ended(client, batch)
            names = [line["custom_id"] for line in await lines_of(client, batch.output_file_id)]
    finally:
        await front.stop(30)
    assert batch.status == "completed" and batch.request_counts.completed == len(lines)
    assert names == [f"line {n}" for n in range(len(lines))]


async def test_a_sweep_that_fails_ends_nothing_else(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may be another front's, too, and its disk may fail for a while."""
    loop, again, faults = asyncio.get_running_loop(), asyncio.Event(), [OSError("gone"), ValueError("odd")]

    def sweep(store: FileStore) -> None:
        if faults:
            raise faults.pop()
        loop.call_soon_threadsafe(again.set)

    monkeypatch.setattr(FileStore, "sweep", sweep)
    monkeypatch.setattr(batches, "SWEEP_S", 0.0)
    monkeypatch.setattr(batches, "LOOK_S", 0.01)
    async with front_at(gateway.address, data=str(tmp_path)), asyncio.timeout(30):
        await again.wait()
