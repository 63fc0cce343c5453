"""What the three services log of a caption: one id in all of them, JSON only, and no word of prompt or text."""

import itertools
from functools import partial
from typing import Any

import grpc
import pytest

from slipstream.stack.local import Stack
from tests.support.gateway_client import caption, has_draft, options_message, refusal, until
from tests.support.processes import eventually, logged, read_log
from tests.support.world import World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECRET = "What does the woman with the xylophone whisper?"


async def test_one_id_crosses_all_services(stack: Stack, gateway: grpc.aio.Channel, world: World) -> None:
    ids = (f"follow-me-{number}" for number in itertools.count())
    asked: dict[str, Any] = {"prompt": SECRET, "num_frames": 4, "max_new_tokens": 40, "gate": False}
    captioned = await until(has_draft, lambda: caption(gateway, world.clips[0], request_id=next(ids), **asked))
    request_id = captioned.summary.request_id
    assert request_id.startswith("follow-me-")
    logs = {name: process.log_path for name, process in stack.processes.items()}
    for name in ("target", "draft"):
        await eventually(partial(logged, logs[name], "session.closed", request_id=request_id))
    await eventually(partial(logged, logs["gateway"], "audit", request_id=request_id))
    events = {
        name: [entry["event"] for entry in read_log(path) if entry.get("request_id") == request_id]
        for name, path in logs.items()
    }
    assert events == {
        "target": ["session.opened", "session.closed"],
        "draft": ["session.opened", "draft.ready", "session.closed"],
        "gateway": ["caption.finished", "audit"],
    }
    for name, path in logs.items():
        entries = [entry for entry in read_log(path) if entry.get("request_id") == request_id]
        assert all(entry["service"] == name and entry["level"] == "info" for entry in entries)
        assert all({"timestamp", "method"} <= entry.keys() for entry in entries)
        assert "xylophone" not in path.read_text()
        words = [word for entry in read_log(path) for word in entry.values() if isinstance(word, str)]
        assert not any(captioned.text[start : start + 12] in word for start in (0, 12) for word in words)


async def test_an_id_is_made_when_none_is_given(stack: Stack, gateway: grpc.aio.Channel, world: World) -> None:
    runs = [await caption(gateway, world.clips[0], num_frames=1, max_new_tokens=1) for _ in range(2)]
    ids = [run.summary.request_id for run in runs]
    assert ids[0] != ids[1] and all(len(name) == 32 for name in ids)
    assert all(logged(stack.processes["gateway"].log_path, "caption.finished", request_id=name) for name in ids)


async def test_a_refusal_is_logged_once(stack: Stack, gateway: grpc.aio.Channel) -> None:
    await refusal(gateway, [options_message(prompt=SECRET, request_id="refused", alpha=7.0)])
    await refusal(gateway, [options_message(prompt=SECRET, request_id="unseen", num_frames=1)])
    log = stack.processes["gateway"].log_path
    await eventually(partial(logged, log, "audit", request_id="unseen"))
    entry, _ = (entry for entry in read_log(log) if entry.get("request_id") == "unseen")
    assert (entry["event"], entry["level"], entry["status"]) == ("request.refused", "warning", "INVALID_ARGUMENT")
    assert "xylophone" not in log.read_text()
