"""The draft's process killed, frozen and started again while captions run: every token stays what it was to be."""

import os
import signal

import pytest

from slipstream.speculation.methods import METHODS
from tests.faults.conftest import FragileStack, Strike
from tests.support.gateway_client import Captioned, has_draft, until
from tests.support.variants import one_in, some

pytestmark = pytest.mark.asyncio(loop_scope="session")

DYNAMIC = [name for name, method in METHODS.items() if method.growth is not None]
MORE = 40
"""Tokens to see after a draft came back."""
SILENT = 2000
"""Tokens of a caption that takes several times as long as a draft may be silent, on a fast machine, too."""


def came_back(captioned: Captioned) -> bool:
    """A draft joined after one was lost, or was not there, and tokens of its were accepted."""
    names = captioned.stage_names
    absent = next((index for index, name in enumerate(names) if name in ("draft_lost", "draft_missing")), len(names))
    if "draft_ready" not in names[absent:]:
        return False
    since = captioned.tokens[captioned.tokens_at[names.index("draft_ready", absent)] :]
    return len(since) >= MORE and any(token.from_draft for token in since)


@pytest.mark.parametrize("method", some(["slipstream", *DYNAMIC], keep=("slipstream", "slipstream_tree")))
async def test_killed_and_started_again(fragile: FragileStack, method: str) -> None:
    """Once, as `python -m bench draft-faults` kills many drafts at random moments."""
    strike_at, draft = 30, fragile.process("draft")
    starts = draft.starts
    kill = Strike(
        lambda c: len(c.token_ids) >= strike_at and has_draft(c),
        lambda: os.kill(draft.pid, signal.SIGKILL),
    )

    def on_event(captioned: Captioned) -> bool:
        kill(captioned)
        return came_back(captioned)

    captioned = await fragile.caption(on_event, method=method)
    assert draft.starts == starts + 1
    assert captioned.stage_names.count("draft_lost") >= 1
    await fragile.check(captioned)


async def test_missing_at_the_start_and_joining_late(fragile: FragileStack) -> None:
    async def without() -> Captioned:
        """It may be there again before the caption begins."""
        await fragile.all_serving()
        os.kill(fragile.process("draft").pid, signal.SIGKILL)
        await fragile.process("draft").wait_exit()
        return await fragile.caption(came_back)

    captioned = await until(
        lambda one: {*one.stage_names} & {"draft_missing", "draft_lost"} == {"draft_missing"}, without
    )
    assert "draft_missing" in captioned.stage_names
    assert "draft_lost" not in captioned.stage_names
    await fragile.check(captioned)


async def test_killed_while_it_joins(fragile: FragileStack) -> None:
    draft = fragile.process("draft")
    kill = Strike(lambda c: "prefill" in c.stage_names, lambda: os.kill(draft.pid, signal.SIGKILL))
    captioned = await fragile.caption(kill, max_new_tokens=64)
    assert kill.num_tokens == 0
    assert captioned.summary.num_tokens == 64
    await fragile.check(captioned)


@pytest.mark.parametrize("strike_at", [3, 17, 41])
@pytest.mark.parametrize("method", ["slipstream", *DYNAMIC])
@one_in(3, "method", "strike_at")
async def test_frozen_and_thawed(fragile: FragileStack, strike_at: int, method: str) -> None:
    draft = fragile.process("draft")
    freeze = Strike(
        lambda c: len(c.token_ids) >= strike_at and has_draft(c),
        lambda: os.kill(draft.pid, signal.SIGSTOP),
    )
    thaw = Strike(lambda c: "draft_lost" in c.stage_names, lambda: os.kill(draft.pid, signal.SIGCONT))

    def on_event(captioned: Captioned) -> bool:
        freeze(captioned)
        thaw(captioned)
        return came_back(captioned)

    try:
        captioned = await fragile.caption(on_event, method=method)
    finally:
        os.kill(draft.pid, signal.SIGCONT)
    await fragile.check(captioned)


async def test_frozen_before_a_caption_begins(fragile: FragileStack) -> None:
    draft = fragile.process("draft")
    os.kill(draft.pid, signal.SIGSTOP)
    try:
        captioned = await fragile.caption(max_new_tokens=64)
    finally:
        os.kill(draft.pid, signal.SIGCONT)
    assert not any(token.from_draft for token in captioned.tokens)
    await fragile.check(captioned)


async def test_losses_are_counted(fragile: FragileStack) -> None:
    draft = fragile.process("draft")

    async def frozen() -> Captioned:
        stop = Strike(has_draft, lambda: os.kill(draft.pid, signal.SIGSTOP))
        try:
            return await fragile.caption(stop, max_new_tokens=SILENT)
        finally:
            os.kill(draft.pid, signal.SIGCONT)

    captioned = await until(lambda one: one.summary.speculation.drafts_lost, frozen)
    assert captioned.summary.speculation.drafts_lost == captioned.stage_names.count("draft_lost") >= 1
    await fragile.check(captioned)
