"""Every example is short and runs, the ones that caption with the pocket pair behind one gateway."""

import asyncio
import contextlib
import json
import runpy
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from slipstream.messages import Caption, CommittedText, CommittedToken
from slipstream.stack.local import Stack, StackOptions
from tests.support.clips import make_colour_clip

pytestmark = pytest.mark.asyncio(loop_scope="session")

FOLDER = Path(__file__).resolve().parents[2] / "examples"
MAX_LINES = 30


@dataclass(frozen=True)
class Pocket:
    """A gateway before the pocket pair, and a folder below its roots with one clip."""

    gateway: str
    url: str
    """Of OpenAI's protocol."""
    folder: Path
    clip: Path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pocket(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pocket]:
    folder = tmp_path_factory.mktemp("clips")
    (folder / "clip.mp4").write_bytes(make_colour_clip(5))
    async with Stack(StackOptions(threads=1, archive=True, video_roots=(folder,), http=0)) as stack:
        yield Pocket(stack.gateway_address, f"http://{stack.http_address}/v1", folder, folder / "clip.mp4")


async def run(name: str, *arguments: object) -> str:
    """What the example prints. It must say nothing on stderr."""
    argv = [sys.executable, str(FOLDER / name), *map(str, arguments)]
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), 240)
    assert (process.returncode, errors.decode()) == (0, "")
    return output.decode()


def _with_a_test() -> set[str]:
    return {name.removeprefix("test_") + ".py" for name in globals() if name.startswith("test_")}


async def test_every_example_is_short_and_has_a_test() -> None:
    examples = {path.name: path for path in FOLDER.glob("*.py")}
    assert examples and set(examples) <= _with_a_test()
    assert all(len(path.read_text().splitlines()) <= MAX_LINES for path in examples.values())


async def test_caption_file(pocket: Pocket) -> None:
    text, speed, passes = (await run("caption_file.py", pocket.clip, pocket.gateway)).splitlines()
    assert text and speed.startswith("64 tokens") and "target passes" in passes


async def test_ask_again(pocket: Pocket) -> None:
    printed = await run("ask_again.py", pocket.clip, pocket.gateway)
    at_hand = [int(line.strip().removeprefix("(").split()[0]) for line in printed.splitlines() if "at hand" in line]
    assert len(at_hand) == 3 and min(at_hand[1:]) > 0, "the video's prefill is found again"


async def test_json_captions(pocket: Pocket) -> None:
    (line,) = (await run("json_captions.py", pocket.gateway, pocket.clip)).splitlines()
    assert list(json.loads(line)) == ["video", "opening", "background", "scenes"]


async def test_likeliest_of(pocket: Pocket) -> None:
    lines = (await run("likeliest_of.py", pocket.url, pocket.clip, 3)).splitlines()
    logprobs = [float(line.split()[0]) for line in lines]
    assert 1 <= len(lines) <= 3 and logprobs == sorted(logprobs, reverse=True) and max(logprobs) <= 0


async def test_stream_live(pocket: Pocket) -> None:
    text, closing = (await run("stream_live.py", pocket.clip, pocket.gateway)).rsplit("\n", 2)[:2]
    assert text and closing.startswith("64 tokens in ")  # how many marks there are is up to a draft that may be late


async def test_stream_live_marks_what_the_draft_wrote(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stream(list[CommittedText]):
        caption = Caption("", 2, None)

    class FakeCaptioner:
        def stream(self, video: str, **options: int) -> Stream:
            return Stream([CommittedText((CommittedToken(1, "A red", True), CommittedToken(2, " circle", False)))])

    monkeypatch.setattr("slipstream.Captioner", lambda: contextlib.nullcontext(FakeCaptioner()))
    runpy.run_path(str(FOLDER / "stream_live.py"))["main"]("a.mp4")
    assert capsys.readouterr().out == "[A red] circle\n2 tokens in 0.0 s\n"


async def test_compare_methods(pocket: Pocket) -> None:
    *rows, texts = (await run("compare_methods.py", pocket.clip, pocket.gateway)).splitlines()
    assert [row.split()[0] for row in rows] == ["autoregressive", "sd", "parallelvlm", "slipstream"]
    assert texts == "different texts: 1"


async def test_submit_folder(pocket: Pocket) -> None:
    for _ in range(2):  # the second time nothing is new
        first, *_, last = (await run("submit_folder.py", pocket.folder, pocket.gateway)).splitlines()
        assert first.startswith("clip.mp4: ") and len(first) > 30 and last == "1 of 1 captioned"


async def test_use_pieces() -> None:
    pruned, decoded = (await run("use_pieces.py")).splitlines()
    assert pruned.startswith("39 of 392 video tokens kept")
    assert decoded == "60 tokens in 18 target passes, 43 of them the draft's"
