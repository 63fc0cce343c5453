"""The target's process killed, frozen or cut off in the middle of captions, which go on as if nothing had happened."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from slipstream.captioning.resumption import MAX_RESUMPTIONS
from slipstream.errors import ServiceUnavailable
from slipstream.rpc.calls import open_channel
from tests.faults.conftest import ENDLESS, FragileStack, Strike
from tests.support.gateway_client import Captioned, caption, until
from tests.support.processes import eventually, logged, running
from tests.support.variants import some
from tests.support.world import NUM_FRAMES, PROMPT

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 160
KINDS: dict[str, dict[str, Any]] = {
    "slipstream": {},
    "autoregressive": {"method": "autoregressive"},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "sampled plainly": {"temperature": 0.9, "seed": 11, "method": "autoregressive"},
    "tree": {"method": "sd_tree"},
    "drafts itself": {"method": "std"},
    "lossy": {"method": "autoregressive", "lossy": "fastv"},
    "repetitions": {"repetition_penalty": 1.2, "stop": ["never to be written"]},
}


def outcome(captioned: Captioned) -> tuple[object, ...]:
    """What an undisturbed caption must have alike."""
    summary = captioned.summary
    assert summary.text == captioned.text and summary.num_tokens == len(captioned.token_ids)
    pieces = [token.piece for token in captioned.tokens]
    return captioned.token_ids, pieces, summary.finish_reason, summary.num_tokens, summary.text


def kill(fragile: FragileStack, *names: str) -> None:
    for name in names:
        os.kill(fragile.process(name).pid, signal.SIGKILL)


async def lost_once(fragile: FragileStack, lose: Callable[[], None], options: dict[str, Any]) -> None:
    """The target is lost after some tokens, and the caption is that of an undisturbed stack."""
    options = options | {"max_new_tokens": NUM_TOKENS}
    undisturbed = await fragile.caption(**options)

    async def struck() -> Captioned:
        await fragile.all_serving()
        return await fragile.caption(Strike(lambda c: len(c.token_ids) >= 20, lose), **options)

    captioned = await until(lambda one: one.summary.timings.resumptions, struck)
    assert outcome(captioned) == outcome(undisturbed)
    assert captioned.summary.timings.resumptions == 1 and captioned.summary.timings.resume_s > 0
    assert [stage.stage for stage in captioned.stages if stage.stage.startswith("resume")] == ["resume", "resumed"]


@pytest.mark.parametrize(("kind", "killed"), [("slipstream", ("target", "draft")), ("sampled plainly", ("target",))])
async def test_killed_during_a_caption(fragile: FragileStack, kind: str, killed: tuple[str, ...]) -> None:
    gateway_pid = fragile.process("gateway").pid
    await lost_once(fragile, lambda: kill(fragile, *killed), KINDS[kind])
    assert fragile.process("gateway").pid == gateway_pid


class Cable:
    """Passes on what is said on a unix socket, until `cut`: then those who speak have lost each other, and may call
    again."""

    def __init__(self, address: str) -> None:
        self._path = address.removeprefix("unix:")
        self._ends: list[asyncio.StreamWriter] = []

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self._path)
        self._ends += writer, far_writer
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    def cut(self) -> None:
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def at_a_cable(
    fragile_stack: FragileStack, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[FragileStack, Cable]]:
    """The same models behind another gateway, whose connections to the target can be cut."""
    await fragile_stack.all_serving()
    folder = tmp_path_factory.mktemp("cable")
    cable, path = Cable(fragile_stack.process("target").address), folder / "cable.sock"
    draft = fragile_stack.process("draft").address
    peers = ("--target", f"unix:{path}", "--draft", draft, "--draft-timeout-s", "30")
    server = await asyncio.start_unix_server(cable.take, path)
    try:
        async with running("gateway", folder, *peers) as gateway, open_channel(gateway.address) as channel:
            yield replace(fragile_stack, gateway=channel), cable
            cable.cut()
    finally:
        server.close()  # as a context it also waits for who is still connected, from Python 3.12 on


@pytest.mark.parametrize("kind", some(KINDS, keep=("sampled", "drafts itself", "lossy")))
async def test_cut_off_during_a_caption(at_a_cable: tuple[FragileStack, Cable], kind: str) -> None:
    """Whatever the method: the target lives and may still have the session that was lost."""
    cut_off, cable = at_a_cable
    await cut_off.all_serving()
    await lost_once(cut_off, cable.cut, KINDS[kind])


async def test_cut_off_again_and_again(at_a_cable: tuple[FragileStack, Cable]) -> None:
    cut_off, cable = at_a_cable
    await cut_off.all_serving()
    undisturbed = await cut_off.caption(max_new_tokens=NUM_TOKENS)

    async def struck() -> Captioned:
        cuts = [0]

        def on_event(captioned: Captioned) -> None:
            """Once more whenever there are new tokens since the last cut."""
            if len(captioned.token_ids) >= cuts[-1] + 20 and len(cuts) <= MAX_RESUMPTIONS:
                cuts.append(len(captioned.token_ids))
                cable.cut()

        return await cut_off.caption(on_event, max_new_tokens=NUM_TOKENS)

    captioned = await until(lambda one: one.summary.timings.resumptions == MAX_RESUMPTIONS, struck)
    assert outcome(captioned) == outcome(undisturbed)
    assert captioned.summary.timings.resumptions == MAX_RESUMPTIONS


async def test_cut_off_in_the_prefill(at_a_cable: tuple[FragileStack, Cable]) -> None:
    cut_off, cable = at_a_cable
    await cut_off.all_serving()

    async def struck() -> Captioned:
        """The text may be all said before this process hears of its prefill."""
        return await cut_off.caption(Strike(lambda c: "prefill" in c.stage_names, cable.cut), max_new_tokens=32)

    captioned = await until(lambda one: one.summary.timings.resumptions, struck)
    assert captioned.token_ids == cut_off.world.answer(0)[:32]
    assert captioned.summary.timings.resumptions == 1


async def test_a_text_that_depends_on_its_draft_ends(fragile: FragileStack) -> None:
    seen = Captioned()
    strike = Strike(lambda c: len(c.token_ids) >= 20, lambda: kill(fragile, "target"))

    def on_event(captioned: Captioned) -> None:
        nonlocal seen
        seen = captioned
        strike(captioned)

    with pytest.raises(ServiceUnavailable) as failed:
        await fragile.caption(on_event, temperature=1.0, sampling_rule="rejection", request_id="orphan")
    assert f"({len(seen.token_ids)} tokens were delivered)" in str(failed.value)
    assert "target is not reachable" in str(failed.value)
    await fragile.freed("orphan", "draft")


async def test_nobody_waits_longer_than_was_said(fragile: FragileStack, tmp_path: Path) -> None:
    """A target of its own gateway that does not come back."""
    target = fragile.process("target")
    flags = ("--target", target.address, "--resume-wait-s", "0.5", "--max-new-tokens", str(ENDLESS))
    async with running("gateway", tmp_path, *flags) as gateway:
        pid, video = target.pid, fragile.world.clips[0]
        freeze = Strike(lambda c: len(c.token_ids) >= 4, lambda: os.kill(pid, signal.SIGSTOP))
        try:
            async with open_channel(gateway.address) as channel:
                with pytest.raises(ServiceUnavailable, match="tokens were delivered"):
                    await caption(
                        channel, video, on_event=freeze, prompt=PROMPT, num_frames=NUM_FRAMES, max_new_tokens=ENDLESS
                    )
        finally:
            os.kill(pid, signal.SIGCONT)
        await eventually(lambda: logged(gateway.log_path, "caption.resume"))


async def test_frozen_during_a_caption(fragile: FragileStack) -> None:
    """A frozen target is as good as dead; the caption goes on when it is thawed, in a session of its own."""
    target = fragile.process("target")
    pid, tried = target.pid, list[str]()

    async def frozen() -> Captioned:
        """The text may be all said before this process hears of its middle."""
        tried.append(f"frozen-{len(tried)}")
        freeze = Strike(lambda c: len(c.token_ids) >= 20, lambda: os.kill(pid, signal.SIGSTOP))
        thaw = Strike(lambda c: "resume" in c.stage_names, lambda: os.kill(pid, signal.SIGCONT))

        def on_event(captioned: Captioned) -> None:
            freeze(captioned)
            thaw(captioned)

        try:
            return await fragile.caption(on_event, max_new_tokens=NUM_TOKENS, request_id=tried[-1])
        finally:
            os.kill(pid, signal.SIGCONT)

    captioned = await until(lambda one: one.summary.timings.resumptions, frozen)
    await eventually(lambda: len(logged(target.log_path, "session.closed", request_id=tried[-1])) == 2)
    await fragile.freed(tried[-1], "draft")
    await fragile.check(captioned)
    assert captioned.summary.timings.resumptions == 1 and target.pid == pid
