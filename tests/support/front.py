"""The HTTP front for tests: in this process before a gateway of their own, or as a process that may be killed."""

import asyncio
import base64
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai

from slipstream.process_life import PARENT_PID_VARIABLE
from slipstream.services.front.app import make_app
from slipstream.services.front.completions import Form
from slipstream.services.front.config import FrontConfig
from slipstream.services.front.figures import FrontFigures
from slipstream.services.front.front import make_front
from slipstream.services.front.function_calls import Functions, StreamedCalls
from slipstream.services.front.routes import ENDPOINTS
from slipstream.services.front.server import bound_socket, serving
from slipstream.stack.addresses import gateway_address
from slipstream.stack.process import HttpProcess

PROMPT = "Describe this video in detail."
CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def front_at(gateway: str, **options: Any) -> AsyncIterator[str]:
    """HOST:PORT of a front in this process and on this event loop."""
    config = FrontConfig(listen="127.0.0.1:0", gateway=gateway, **{"drain_s": 0.1, **options})
    front = make_front(config, FrontFigures())
    running = asyncio.create_task(front.batches.run()) if front.batches else None
    try:
        with bound_socket(config) as listening:
            async with serving(make_app(front, ENDPOINTS), config, listening, front.stopping, asyncio.Event()):
                yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        if running is not None and front.batches is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await front.batches.close()
        await front.gateways.close()


def front_process(gateway: str, folder: Path, *flags: str, host: str = "127.0.0.1") -> HttpProcess:
    """A front that is not started yet, with its files in `folder`; it has the same address whenever it starts."""
    address = gateway_address(f"{host}:0")
    argv = [sys.executable, "-m", "slipstream.services.front", "--listen", address, "--gateway", gateway]
    argv += ["--data", str(folder), "--shared-media", "true", "--drain-s", "1", *flags]
    environ = os.environ | {PARENT_PID_VARIABLE: str(os.getpid())}
    return HttpProcess("front", argv, address, folder / "front.log", environ)


def client_of(address: str, token: str = "nobody") -> openai.AsyncOpenAI:
    """OpenAI's own client, which asks once."""
    return openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=token, max_retries=0, timeout=240)


def data_url(data: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def asked(url: str, prompt: str = PROMPT) -> Any:
    """The messages that ask about a video."""
    parts = [{"type": "text", "text": prompt}, {"type": "video_url", "video_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


def batch_line(custom_id: str, body: Mapping[str, Any], url: str = CHAT) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


async def raw(address: str, data: bytes | Sequence[bytes], *, pause_s: float = 0.0) -> bytes:
    """What the server answers to these bytes, to the end of the connection or of 30 s."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        with contextlib.suppress(ConnectionError):
            for piece in [data] if isinstance(data, bytes) else data:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                return await reader.read()
        return b""
    finally:
        writer.transport.abort()


def post(path: str, body: bytes, *, length: int | None = None, more: str = "") -> bytes:
    """A request as it stands on the wire; the connection ends with its answer."""
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n{more}\r\n"
    return head.encode() + body


def status_of(answer: bytes) -> int:
    return int(answer.split(maxsplit=2)[1])


def error_of(answer: bytes) -> dict[str, Any]:
    """The error in an answer."""
    error: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return error


def events_of(told: bytes) -> list[dict[str, Any]]:
    """Of a stream; each is what its line says it is."""
    events = []
    for block in told.decode().removesuffix("\n\n").split("\n\n"):
        head, _, data = block.partition("\ndata: ")
        events.append(json.loads(data))
        assert head == f"event: {events[-1]['type']}"
    return events


def told_calls(form: Form, functions: Functions, texts: Sequence[str], width: int = 1000) -> bytes:
    """A stream of answers that call functions, up to its end: each text comes in pieces of that width."""
    calls, stream = StreamedCalls(functions, "chatcmpl-7"), form.begin({})
    for text in texts:
        pieces = [text[at : at + width] for at in range(0, len(text), width)]
        for delta in [delta for piece in pieces for delta in calls.add(piece)] + calls.end():
            stream += form.add(delta, [], {})
    return stream
