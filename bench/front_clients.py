"""Clients of OpenAI's protocol before a running stack, unmodified: OpenAI's own by its tests; others by command, each
from an environment of its own, where `make front-clients` has made one: the load tools saturate, guidellm and aiperf,
the libraries litellm, langchain-openai and instructor, and the command line `llm`."""

import asyncio
import io
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import openai

from bench.common import ROOT, held_out_clips, say
from tests.support.front import PROMPT, asked, client_of, data_url

CLIENTS = ROOT / ".cache" / "clients"
"""An environment each, by the package's name."""
NUM_REQUESTS, NUM_AT_ONCE, NUM_TOKENS = 8, 2, 24
TOOL_S = 300.0


@dataclass(frozen=True)
class Ran:
    """A command that ended, or was killed as it took too long."""

    status: int
    output: str


async def ran(
    words: Sequence[str | Path],
    given: bytes = b"",
    *,
    limit_s: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Ran:
    """Runs a command to its end, with `given` as its input and `environ` beside the variables of this process."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=ROOT,
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | dict(environ or {}),
    )
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate(given)
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
    say(output.decode(errors="replace")[-2000:])
    return Ran(process.returncode or 0, output.decode(errors="replace"))


async def openai_tests() -> dict[str, Any]:
    """The tests with OpenAI's own client, in a process of their own."""
    tests = sorted((ROOT / "tests" / "front").glob("test_*.py"))
    told = await ran([sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests])
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", told.output)}
    return {"passed": told.status == 0, "openai": openai.__version__} | counts


# -- other clients ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What a tool is set on: the front, one clip, and what plain decoding says of it."""

    address: str
    model: str
    folder: Path
    """For the tool's files."""
    url: str
    text: str

    @property
    def body(self) -> dict[str, Any]:
        """A whole request."""
        return {"model": self.model, "messages": asked(self.url), "max_completion_tokens": NUM_TOKENS}

    def lines(self, name: str, line: dict[str, Any]) -> Path:
        """A file with the line so often as there are requests."""
        path = self.folder / name
        path.write_text((json.dumps(line) + "\n") * NUM_REQUESTS)
        return path


SATURATE = """
import glob, json, sys, saturate
from pyarrow.parquet import read_table
endpoint, output, number, at_once = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
body, rows = json.load(sys.stdin), [{"id": str(index)} for index in range(number)]
parse = lambda row, answer: {"text": answer["choices"][0]["message"]["content"]}
saturate.pump(rows, lambda row: body, parse, endpoint, output, window=saturate.Fixed(at_once), id_key="id")
parts = [read_table(path).to_pylist() for path in glob.glob(output + "/part-*.parquet")]
print(json.dumps([row.get("text") or row.get("error") for part in parts for row in part]))
"""


async def run_saturate(home: Path, target: Target) -> bool:
    """A library: rows in, parquet out. Every row has the text."""
    words: list[str | Path] = [
        home / "bin" / "python",
        "-c",
        SATURATE,
        f"http://{target.address}/v1",
        target.folder / "rows",
    ]
    told = await ran([*words, str(NUM_REQUESTS), str(NUM_AT_ONCE)], json.dumps(target.body).encode(), limit_s=TOOL_S)
    return told.status == 0 and json.loads(told.output.splitlines()[-1]) == [target.text] * NUM_REQUESTS


async def run_guidellm(home: Path, target: Target) -> bool:
    """A benchmark over a data set with videos; it streams and asks for usage in every chunk."""
    video = {"type": "video", "video": target.url}
    path, report = target.lines("guidellm.jsonl", {"prompt": PROMPT, "video": video}), target.folder / "guidellm.json"
    extras = {"body": {"max_completion_tokens": NUM_TOKENS}}
    backend = {"kind": "openai_http", "target": f"http://{target.address}", "model": target.model, "extras": extras}
    options = {
        "--backend": json.dumps(backend),
        "--profile": f"kind=concurrent,streams={NUM_AT_ONCE}",
        "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "--data": f"kind=json_file,path={path}",
        "--output": f"kind=json,path={report}",
    }
    words = [word for name, value in options.items() for word in (name, str(value))]
    told = await ran([home / "bin" / "guidellm", "run", *words, "--disable-console-interactive"], limit_s=TOOL_S)
    if told.status or not report.exists():
        return False
    requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
    return not requests["errored"] and {one["output"] for one in requests["successful"]} == {target.text}


async def run_aiperf(home: Path, target: Target) -> bool:
    """A benchmark that sends whole requests as they are, streams, counts usage, and reads `/metrics`."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    path, folder = target.lines("aiperf.jsonl", target.body | streamed), target.folder / "aiperf"
    options = {
        "--model": target.model,
        "--url": f"http://{target.address}",
        "--endpoint-type": "chat",
        "--input-file": path,
        "--custom-dataset-type": "raw-payload",
        "--request-count": str(NUM_REQUESTS),
        "--concurrency": str(NUM_AT_ONCE),
        "--tokenizer": ROOT / "models" / "pocket" / "target",
        "--output-artifact-dir": folder,
        "--ui": "none",
    }
    words = [word for name, value in options.items() for word in (name, str(value))]
    told = await ran(
        [home / "bin" / "aiperf", "profile", *words, "--streaming", "--use-server-token-count"], limit_s=TOOL_S
    )
    report = folder / "profile_export_aiperf.json"
    if told.status or not report.exists():
        return False
    found = json.loads(report.read_text())
    tokens, failed = found["output_sequence_length"], found.get("error_request_count", {"avg": 0})
    return (
        found["request_count"]["avg"] == NUM_REQUESTS
        and tokens["min"] == tokens["max"] == NUM_TOKENS
        and not failed["avg"]
    )


LITELLM = """
import json, sys, litellm
body = json.load(sys.stdin)
body |= {"model": "openai/" + body["model"], "api_base": sys.argv[1], "api_key": "none"}
whole = litellm.completion(**body).choices[0].message.content
pieces = litellm.completion(**body, stream=True, stream_options={"include_usage": True})
print(json.dumps([whole, "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)]))
"""
LANGCHAIN = """
import json, sys
from langchain_openai import ChatOpenAI
body = json.load(sys.stdin)
options = {"base_url": sys.argv[1], "api_key": "none", "max_tokens": body["max_completion_tokens"]}
chat, messages = ChatOpenAI(model=body["model"], **options), body["messages"]
print(json.dumps([chat.invoke(messages).content, "".join(piece.content for piece in chat.stream(messages))]))
"""


SCENE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"enum": ["indoors", "outdoors"]},
        "objects": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["place", "objects"],
    "additionalProperties": False,
}
INSTRUCTOR = """
import json, sys, typing, instructor, openai, pydantic
class Scene(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    place: typing.Literal["indoors", "outdoors"]
    objects: int = pydantic.Field(ge=1, le=99)
body = json.load(sys.stdin) | {"response_model": Scene, "max_completion_tokens": 400}
chat = instructor.from_openai(openai.OpenAI(base_url=sys.argv[1], api_key="none")).chat.completions
whole, (*_, last) = chat.create(**body), chat.create_partial(**body)
print(json.dumps([whole.model_dump(), last.model_dump()]))
"""


async def _whole_and_streamed(script: str, home: Path, target: Target, expected: Any) -> bool:
    """A library that asks twice: for the whole answer, and for a stream."""
    words: list[str | Path] = [home / "bin" / "python", "-c", script, f"http://{target.address}/v1"]
    told = await ran(words, json.dumps(target.body).encode(), limit_s=TOOL_S)
    return told.status == 0 and json.loads(told.output.splitlines()[-1]) == [expected] * 2


async def run_litellm(home: Path, target: Target) -> bool:
    """A library before all providers."""
    return await _whole_and_streamed(LITELLM, home, target, target.text)


async def run_langchain(home: Path, target: Target) -> bool:
    """The chat model of a framework."""
    return await _whole_and_streamed(LANGCHAIN, home, target, target.text)


async def run_instructor(home: Path, target: Target) -> bool:
    """A library that asks for objects, by functions that are to be called."""
    function = {"type": "function", "function": {"name": "Scene"}}
    called = {"type": "function", "function": {"name": "Scene", "parameters": SCENE}}
    message = await plain_answer(
        target.address, target.model, asked(target.url), tools=[called], tool_choice=function, max_completion_tokens=400
    )
    scene = json.loads(message.tool_calls[0].function.arguments)
    return await _whole_and_streamed(INSTRUCTOR, home, target, scene)


async def run_llm(home: Path, target: Target) -> bool:
    """A command line with a file of models that it knows, and a picture for its prompt; it streams."""
    folder = target.folder / "llm"
    folder.mkdir()
    known: dict[str, Any] = {
        "model_id": "captions",
        "model_name": target.model,
        "api_base": f"http://{target.address}/v1",
    }
    known |= {"vision": True, "api_key_name": "none"}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([known]))
    picture = folder / "frame.jpg"
    picture.write_bytes(_first_frame(held_out_clips(1)[0]))
    words: list[str | Path] = [
        "--model",
        "captions",
        "--attachment",
        picture,
        "--option",
        "max_tokens",
        str(NUM_TOKENS),
        "--no-log",
    ]
    told = await ran(
        [home / "bin" / "llm", "prompt", PROMPT, *words, "--key", "none"],
        limit_s=TOOL_S,
        environ={"LLM_USER_PATH": str(folder)},
    )
    image = {"type": "image_url", "image_url": {"url": data_url(picture.read_bytes(), "image/jpeg")}}
    content = [{"type": "text", "text": PROMPT}, image]
    text = await plain_text(target.address, target.model, [{"role": "user", "content": content}])
    return told.status == 0 and told.output.strip() == text


def _first_frame(clip: Path) -> bytes:
    """As a JPEG."""
    picture = io.BytesIO()
    with av.open(str(clip)) as container:
        next(container.decode(video=0)).to_image().save(picture, "JPEG")
    return picture.getvalue()


async def plain_text(address: str, model: str, messages: Any) -> str:
    """By plain decoding, asked for by OpenAI's client."""
    return (await plain_answer(address, model, messages)).content or ""


async def plain_answer(address: str, model: str, messages: Any, **fields: Any) -> Any:
    """The message."""
    plainly: Any = {"slipstream": {"method": "autoregressive"}}
    given: Any = {"model": model, "messages": messages, "max_completion_tokens": NUM_TOKENS} | fields
    async with client_of(address) as client:
        return (await client.chat.completions.create(**given, extra_body=plainly)).choices[0].message


Tool = Callable[[Path, Target], Awaitable[bool]]
TOOLS: dict[str, Tool] = {
    "saturate": run_saturate,
    "guidellm": run_guidellm,
    "aiperf": run_aiperf,
    "litellm": run_litellm,
    "langchain-openai": run_langchain,
    "instructor": run_instructor,
    "llm": run_llm,
}


async def other_clients(address: str, model: str, folder: Path) -> dict[str, Any]:
    """Each of those that are there. `passed` is None where none is."""
    url = data_url(held_out_clips(1)[0].read_bytes())
    target = Target(address, model, folder, url, await plain_text(address, model, asked(url)))
    found: dict[str, Any] = {}
    for name, run in TOOLS.items():
        home = CLIENTS / name
        found[name] = await _tried(run, home, target) if home.is_dir() else "not installed: make front-clients"
        say(f"{name}: {found[name]}")
    outcomes = [told["passed"] for told in found.values() if isinstance(told, dict)]
    return {"passed": all(outcomes) if outcomes else None, "requests_of_load_tools": NUM_REQUESTS} | found


async def _tried(run: Tool, home: Path, target: Target) -> dict[str, Any]:
    version = await ran(
        [home / "bin" / "python", "-c", f"from importlib.metadata import version as v; print(v({home.name!r}))"]
    )
    return {"passed": await run(home, target), "version": version.output.strip()}
