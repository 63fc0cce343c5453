"""A stack whose services may be harmed: each is started again when it ends. Its target never ends a text by itself."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import pytest_asyncio

from slipstream.rpc.calls import open_channel
from slipstream.stack.local import STABLE_S, Stack
from slipstream.stack.process import ServiceProcess
from tests.support.gateway_client import Captioned, OnEvent, caption
from tests.support.processes import START_S, check_logs, eventually, logged
from tests.support.world import NUM_FRAMES, PROMPT, World

ENDLESS = 3500
"""More tokens than any test waits for, and few enough for the context."""


HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""At the end of a text that its limit of tokens has cut."""


class Strike:
    """Does something once, when a condition first holds; says how many tokens there were."""

    def __init__(self, when: Callable[[Captioned], bool], blow: Callable[[], None]) -> None:
        self._when = when
        self._blow = blow
        self.num_tokens: int | None = None

    def __call__(self, captioned: Captioned) -> None:
        if self.num_tokens is None and self._when(captioned):
            self.num_tokens = len(captioned.token_ids)
            self._blow()


@dataclass
class FragileStack:
    """Captions with the stack that may be harmed."""

    stack: Stack
    gateway: grpc.aio.Channel
    world: World
    _plain: Captioned = field(default_factory=Captioned)
    """The longest text of plain decoding that was asked for so far."""

    def process(self, name: str) -> ServiceProcess:
        return self.stack.processes[name]

    async def caption(self, on_event: OnEvent | None = None, **options: Any) -> Captioned:
        """A caption of clip 0; until `on_event` has enough, unless a number of tokens is given.

        Without the gate: a draft that is asked for nothing could not be missed.
        """
        asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": ENDLESS, "alpha": 0.0}
        asked["gate"] = False
        return await caption(self.gateway, self.world.clips[0], on_event=on_event, **asked | options)

    async def check(self, captioned: Captioned) -> None:
        """Its tokens must be those of plain decoding, which must be those of transformers as far as that was asked."""
        num_tokens = len(captioned.token_ids)
        if len(self._plain.token_ids) < num_tokens:
            self._plain = await self.caption(method="autoregressive", max_new_tokens=num_tokens)
        plain = self._plain
        assert captioned.token_ids == plain.token_ids[:num_tokens]
        assert plain.text.startswith(captioned.text.rstrip(HALF_A_CHARACTER))
        assert captioned.token_ids[:96] == self.world.answer(0)[:num_tokens]

    async def all_serving(self) -> None:
        """Waits for services that are being started again. A stack gives up those that die soon, again and again: what
        a test kills has served for long enough."""
        processes = self.stack.processes.values()
        await eventually(lambda: all(one.is_serving and one.served_s >= STABLE_S for one in processes), START_S)
        await asyncio.wait_for(self.gateway.channel_ready(), START_S)

    async def freed(self, request_id: str, *names: str) -> None:
        """Waits until these services have closed the session."""
        for name in names:
            closed = partial(logged, self.process(name).log_path, "session.closed", request_id=request_id)
            await eventually(closed)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fragile_stack(world: World) -> AsyncIterator[FragileStack]:
    options = replace(world.stack_options(), target_model=world.endless_target(), restart=True)
    gateway_flags = ("--max-new-tokens", str(ENDLESS), "--drain-s", "30")
    options = replace(options, extra_flags={"gateway": gateway_flags})
    async with Stack(options) as stack, open_channel(stack.gateway_address) as channel:
        yield FragileStack(stack, channel, world)
        assert stack.failure is None
        check_logs(stack)


@pytest_asyncio.fixture(loop_scope="session")
async def fragile(fragile_stack: FragileStack) -> FragileStack:
    """The stack, whole."""
    await fragile_stack.all_serving()
    return fragile_stack
