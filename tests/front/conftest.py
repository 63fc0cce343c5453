"""One stack of the pocket models with its HTTP front, for all tests of this folder that need models."""

import io
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai
import pytest
import pytest_asyncio
from PIL import Image

from slipstream.client.async_captioner import AsyncCaptioner, connect_async
from slipstream.stack.local import Stack, StackOptions
from tests.cli.fake_gateway import FakeGateway
from tests.support.clips import make_colour_clip
from tests.support.front import client_of
from tests.support.processes import check_logs

NUM_FRAMES = 6


@dataclass(frozen=True)
class Served:
    """The stack, clients of both doors, and clips."""

    stack: Stack
    client: openai.AsyncOpenAI
    captioner: AsyncCaptioner
    folder: Path
    """A root of the gateway's, with `0.mp4`, `1.mp4`, ..."""
    clips: tuple[bytes, ...]
    model: str = "pocket/target"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder, data = tmp_path_factory.mktemp("clips"), tmp_path_factory.mktemp("data")
    clips = tuple(make_colour_clip(seed, size=(96, 96)) for seed in range(3))
    for number, clip in enumerate(clips):
        (folder / f"{number}.mp4").write_bytes(clip)
    flags = ("--draft-timeout-s", "30", "--max-new-tokens", "4000")
    options = StackOptions(
        threads=1, archive=True, data=data, http=0, video_roots=(folder,), extra_flags={"gateway": flags}
    )
    async with (
        Stack(options) as stack,
        client_of(stack.http_address) as client,
        connect_async(stack.gateway_address) as captioner,
    ):
        yield Served(stack, client, captioner, folder, clips)
        check_logs(stack)


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as running:
        yield running


def jpeg(shade: int, size: tuple[int, int] = (64, 48), kind: str = "JPEG", mode: str = "RGB") -> bytes:
    """A picture of one colour."""
    target = io.BytesIO()
    Image.fromarray(np.full((size[1], size[0], 3), shade, np.uint8)).convert(mode).save(target, kind)
    return target.getvalue()


def png(shade: int, size: tuple[int, int] = (64, 48), mode: str = "RGB") -> bytes:
    """The same as PNG."""
    return jpeg(shade, size, "PNG", mode)


def webp(shade: int, size: tuple[int, int] = (64, 48), mode: str = "RGB") -> bytes:
    """The same as WebP, as VP8 writes it."""
    return jpeg(shade, size, "WEBP", mode)
