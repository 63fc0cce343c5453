"""The HTTP front before a real stack of the pocket models: OpenAI's client, random requests from the OpenAPI document,
what streaming costs beside gRPC, a batch under which front and gateway are killed, and the page in a browser, at last
under a long stream of events."""

import argparse
import asyncio
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import openai

from bench.common import PROMPT, held_out_clips, machine_facts, make_parser, run_to_end, say
from bench.front_clients import openai_tests, other_clients, ran
from bench.front_hostile import hostile
from bench.front_page import page_part
from bench.front_stream import stream_part
from bench.output import finish
from slipstream.client.async_captioner import connect_async
from slipstream.messages import CommittedText
from slipstream.stack.local import Stack, StackOptions
from tests.support.front import CHAT, asked, batch_line, client_of, data_url

PARTS = ("openai", "clients", "hostile", "schemathesis", "overhead", "kills", "page", "stream")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
COUNTED = re.compile(r"(\d+) generated, (\d+) passed")
EXAMPLES, MOST_RUNS = 250, 10
"""Of each operation in one run of schemathesis, which makes as many where the schema has so many; and runs."""
NUM_FRAMES, NUM_TOKENS = 16, 160
NUM_STREAMS = 64
LEAST_RATE, MOST_LATER_MS = 0.97, 50.0
"""What HTTP may cost beside gRPC: of tokens a second, and until the first text."""
MODEL = "pocket/target"
WAIT_S = 1800.0


@asynccontextmanager
async def _stack(folder: Path) -> AsyncIterator[Stack]:
    """The pocket pair with archive and front; what is killed starts again."""
    videos = folder / "videos"
    videos.mkdir()
    for number, clip in enumerate(held_out_clips(4)):
        (videos / f"{number}.mp4").write_bytes(clip.read_bytes())
    flags = {"gateway": ("--max-captions", str(NUM_STREAMS))}
    data = folder / "data"
    options = StackOptions(threads=1, archive=True, data=data, http=0, video_roots=(videos,), extra_flags=flags)
    async with Stack(options, say) as stack:
        yield stack


async def _schemathesis(address: str, num_cases: int) -> dict[str, Any]:
    """At least so many requests that are made from the document, run after run with other seeds; `passed`: none was
    answered in a way that it does not tell."""
    if importlib.util.find_spec("schemathesis") is None:
        return {"passed": None, "why": "it is not installed: pip install slipstream[front-check]"}
    words = ["--checks", CHECKS, "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES)]
    program = str(Path(sys.executable).with_name("schemathesis"))
    cases = sound = runs = 0
    is_sound = True
    while is_sound and cases < num_cases and runs < MOST_RUNS:
        runs += 1
        told = await ran([program, "run", f"http://{address}/openapi.json", *words, "--seed", str(runs)])
        found = COUNTED.search(told.output)
        is_sound = told.status == 0 and found is not None
        cases += int(found[1]) if found else 0
        sound += int(found[2]) if found else 0
    return {"passed": is_sound and cases >= num_cases, "cases": cases, "sound": sound, "runs": runs}


# -- overhead ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heard:
    """One text as its client heard it, in seconds from the request."""

    text: str
    first_s: float
    last_s: float
    num_tokens: int

    @property
    def rate(self) -> float:
        """Tokens a second after the first of the text."""
        return self.num_tokens / (self.last_s - self.first_s)


async def _over_grpc(address: str, clip: bytes) -> Heard:
    async with connect_async(address) as captioner:
        start, first, pieces = time.monotonic(), 0.0, []
        given: dict[str, Any] = {"num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS}
        stream = captioner.events(clip, PROMPT, **given)
        async for event in stream:
            if isinstance(event, CommittedText):
                first, last = first or time.monotonic() - start, time.monotonic() - start
                pieces.append(str(event))
        return Heard("".join(pieces), first, last, stream.caption.num_tokens)


async def _over_http(client: openai.AsyncOpenAI, clip: bytes) -> Heard:
    start, first, last, pieces = time.monotonic(), 0.0, 0.0, []
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=asked(data_url(clip)),
        max_completion_tokens=NUM_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"slipstream": {"num_frames": NUM_FRAMES}},
    )
    num_tokens = 0
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first, last = first or time.monotonic() - start, time.monotonic() - start
            pieces.append(chunk.choices[0].delta.content)
        num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
    return Heard("".join(pieces), first, last, num_tokens)


async def _overhead(stack: Stack, rounds: int) -> dict[str, Any]:
    """The same clip over both doors, turn by turn; and many streams at once. `rate_ratio` is the median of pairs."""
    clip = held_out_clips(1)[0].read_bytes()
    async with client_of(stack.http_address) as client:
        await _over_grpc(stack.gateway_address, clip)
        pairs = [(await _over_grpc(stack.gateway_address, clip), await _over_http(client, clip)) for _ in range(rounds)]
        many = await asyncio.gather(*(_over_http(client, clip) for _ in range(NUM_STREAMS)), return_exceptions=True)
    texts = {heard.text for pair in pairs for heard in pair}
    whole = [heard for heard in many if isinstance(heard, Heard) and heard.text in texts]
    rate_ratio = median(http.rate / grpc.rate for grpc, http in pairs)
    later_ms = 1000 * median(http.first_s - grpc.first_s for grpc, http in pairs)
    is_cheap = rate_ratio >= LEAST_RATE and later_ms <= MOST_LATER_MS
    return {
        "passed": is_cheap and len(texts) == 1 and len(whole) == NUM_STREAMS,
        "rounds": rounds,
        "rate_ratio": round(rate_ratio, 4),
        "grpc_tokens_s": round(median(grpc.rate for grpc, _ in pairs), 1),
        "http_tokens_s": round(median(http.rate for _, http in pairs), 1),
        "later_first_text_ms": round(later_ms, 1),
        "streams": {"asked": NUM_STREAMS, "whole": len(whole)},
    }


# -- kills ------------------------------------------------------------------------------------------------------------


async def _kills(stack: Stack, num_lines: int, num_kills: int) -> dict[str, Any]:
    """A batch during which the front and the gateway are killed in turn, a few results apart, as a job that is killed
    three times is given up. Each request must have one line, of its answer or of its end. Texts are whole, and no two
    requests are the same, so that the batch is not over before the last kill: jobs go on while a front starts."""
    videos = stack.options.video_roots[0]
    lines = [batch_line(f"line {n}", _asked(f"file://{videos}/{n % 4}.mp4", 150 + n)) for n in range(num_lines)]
    async with client_of(stack.http_address) as once:
        client = once.with_options(max_retries=20)
        file = await client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
        options: Any = {"endpoint": CHAT, "completion_window": "24h"}
        batch: Any = await client.batches.create(
            input_file_id=file.id, extra_headers={"idempotency-key": "kills"}, **options
        )
        killed, apart, seen = Counter[str](), num_lines // (3 * num_kills), 0
        deadline = time.monotonic() + WAIT_S
        while batch.status not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < deadline:
            name = "front" if killed["front"] <= killed["gateway"] else "gateway"
            ended = batch.request_counts.completed + batch.request_counts.failed
            if killed[name] < num_kills and ended >= seen + apart:
                seen, starts = ended, stack.processes[name].starts
                os.kill(stack.processes[name].pid, signal.SIGKILL)
                killed[name] += 1
                await stack.wait_started(name, starts + 1)
            await asyncio.sleep(0.2)
            batch = await client.batches.retrieve(batch.id)
        names: Counter[str] = Counter()
        for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
            text = (await client.files.content(file_id)).text
            names.update(json.loads(line)["custom_id"] for line in text.splitlines())
    is_exact = set(names) == {f"line {n}" for n in range(num_lines)} and set(names.values()) == {1}
    counts = {"completed": batch.request_counts.completed, "failed": batch.request_counts.failed}
    is_exact = is_exact and batch.status == "completed" and sum(counts.values()) == num_lines
    is_hit = killed["front"] == killed["gateway"] == num_kills
    return {"passed": is_exact and is_hit, "lines": num_lines, "status": batch.status, "killed": dict(killed)} | counts


def _asked(url: str, num_tokens: int) -> dict[str, Any]:
    options = {"num_frames": 8}
    return {"model": MODEL, "messages": asked(url), "max_tokens": num_tokens, "slipstream": options}


# -- program ----------------------------------------------------------------------------------------------------------


Check = Callable[[], Awaitable[dict[str, Any]]]


async def run(given: argparse.Namespace) -> dict[str, Any]:
    """The parts by name, and how long each took; one that breaks off has failed, and the others go on."""
    with tempfile.TemporaryDirectory(prefix="slipstream-front-") as name:
        folder = Path(name)
        found = await _checked(given.parts, {"openai": openai_tests})
        if not set(given.parts) <= {"openai", "stream"}:
            async with _stack(folder) as stack:
                checks: dict[str, Check] = {
                    "clients": lambda: other_clients(stack.http_address, MODEL, folder),
                    "hostile": lambda: hostile(stack),
                    "overhead": lambda: _overhead(stack, given.rounds),
                    "schemathesis": lambda: _schemathesis(stack.http_address, given.cases),
                    "kills": lambda: _kills(stack, given.lines, given.kills),
                    "page": lambda: page_part(stack, folder),
                }
                found |= await _checked(given.parts, checks)
        return found | await _checked(given.parts, {"stream": lambda: stream_part(folder, given.minutes)})


async def _checked(parts: Sequence[str], checks: Mapping[str, Check]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, check in checks.items():
        if name not in parts:
            continue
        start = time.monotonic()
        try:
            told = await check()
        except Exception as error:
            told = {"passed": False, "why": f"{type(error).__name__}: {error}"[:600]}
        found[name] = told | {"seconds": round(time.monotonic() - start)}
        say(f"{name}: {found[name]}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Ends with 1 where a part has failed; a part that could not run has `passed` null."""
    parser = make_parser(
        "front-check",
        __doc__ or "",
        parts=(list(PARTS), f"which of {', '.join(PARTS)}"),
        cases=(5000, "least random requests, over all operations"),
        rounds=(20, "captions over each door"),
        lines=(200, "of the batch"),
        kills=(10, "of the front, and of the gateway"),
        minutes=(10.0, "of the page's long stream, at 10,000 events a minute"),
    )
    given = parser.parse_args(argv)
    found = run_to_end(run(given))
    finish("front", {"machine": machine_facts(), **found})
    if any(part["passed"] is False for part in found.values()):
        sys.exit(1)
