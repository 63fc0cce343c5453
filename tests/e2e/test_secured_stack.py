"""A stack on TCP with mTLS between all of it: captions with the draft's help, and nothing tells what they are about."""

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from slipstream.rpc.calls import open_channel
from slipstream.stack.process import ServiceProcess
from tests.rpc.secured import make_certificates
from tests.support.gateway_client import caption, has_draft, options_message, send, until
from tests.support.processes import STOP_S, eventually, logged, model_flags, new_process, read_log
from tests.support.world import World

CANARY = "zanzibar"
"""In the prompt, the file's name and the request's other texts."""
LISTEN = "127.0.0.1:0"


@contextlib.asynccontextmanager
async def started(name: str, folder: Path, *flags: str) -> AsyncIterator[tuple[ServiceProcess, str, str]]:
    """The process, and where it serves and shows its metrics: health checks in plaintext cannot ask it."""
    process = new_process(name, folder, *flags, listen=LISTEN)
    await process.start()
    try:
        await eventually(lambda: logged(process.log_path, "service.ready") or process.exit_status is not None, 240)
        (ready,) = logged(process.log_path, "service.ready")
        (metrics,) = logged(process.log_path, "metrics.ready")
        yield process, str(ready["address"]), str(metrics["address"])
    finally:
        await process.stop(STOP_S)


async def shown(address: str) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(read)


async def test_mtls_from_end_to_end_tells_nobody_what_is_captioned(world: World, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "ca")
    chain, key = certificates.issue("service", "service")
    ours = ["--tls-cert", chain, "--tls-key", key, "--tls-client-ca", certificates.ca]
    theirs = ["--peer-ca", certificates.ca, "--peer-cert", chain, "--peer-key", key]
    both = (*ours, *theirs, "--metrics", "0")
    clip = tmp_path / f"{CANARY}.mp4"
    clip.write_bytes(world.clips[0])
    async with contextlib.AsyncExitStack() as stack:
        target, draft = await asyncio.gather(
            *(
                stack.enter_async_context(started(name, tmp_path / name, *model_flags(checkpoint), *both))
                for name, checkpoint in (("target", world.pair.target), ("draft", world.pair.draft))
            )
        )
        peers = ("--target", target[1], "--draft", draft[1], "--video-roots", str(tmp_path), "--draft-timeout-s", "30")
        gateway = await stack.enter_async_context(started("gateway", tmp_path / "gateway", *peers, *both))
        channel = await stack.enter_async_context(open_channel(gateway[1], certificates.peer("somebody")))
        prompt, stop = f"Where is {CANARY}?", [f"{CANARY}!"]
        asked: dict[str, Any] = {"prompt": prompt, "num_frames": 4, "max_new_tokens": 24, "stop": stop, "gate": False}
        answer = await until(has_draft, lambda: caption(channel, path=str(clip), **asked))
        assert answer.summary.num_tokens == 24 and answer.summary.speculation.guidance_bytes > 0
        refusals = [await refused(channel, wrong) for wrong in wrong_options(tmp_path)]
        pages = [await shown(address) for _, _, address in (gateway, target, draft)]
        logs = [read_log(process.log_path) for process, _, _ in (gateway, target, draft)]
    assert 'slipstream_captions_total{method="' in pages[0] and "slipstream_kv_budget_bytes" in pages[1]
    texts = [*refusals, *pages, *(str(entry) for log in logs for entry in log)]
    assert [text for text in texts if CANARY in text or (answer.text and answer.text in text)] == []


def wrong_options(folder: Path) -> list[dict[str, Any]]:
    """Requests that are refused, each for another reason."""
    path, prompt = str(folder / f"{CANARY}.mp4"), f"Where is {CANARY}?"
    return [
        dict(path=str(folder / "missing" / f"{CANARY}.avi"), prompt=prompt),
        dict(path=f"/outside/{CANARY}.mp4", prompt=prompt),
        dict(path=f"{path}\0", prompt=prompt),
        dict(path=path, prompt=prompt * 10_000),
        dict(path=path, prompt=prompt, num_frames=100_000),
        dict(path=path, prompt=prompt, stop=[CANARY * 1000]),
    ]


async def refused(channel: grpc.aio.Channel, options: dict[str, Any]) -> str:
    """All that is said of a refusal."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await send(channel, [options_message(**options)])
    error = refusal.value
    return f"{error.code()} {error.details()} {error.trailing_metadata()}"
