"""Whether a model thinks first, through the whole stack: prompts are those of transformers with `enable_thinking`."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from tests.support.gateway_client import caption
from tests.support.processes import check_logs
from tests.support.reference import Reference
from tests.support.tiny_checkpoint import CHAT_TEMPLATE
from tests.support.world import PROMPT, World, make_endless_world

pytestmark = pytest.mark.asyncio(loop_scope="session")

THINKING_TEMPLATE = (
    CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}{{ 'no thoughts ' }}"
    "{% else %}{{ 'thoughts ' }}{% endif %}"
)
NUM_FRAMES, NUM_TOKENS = 4, 12
SIZES = {"num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS}


def has_template(folder: Path, template: str) -> Path:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def answer(world: World, told: str) -> list[int]:
    """What transformers answers with that variable."""
    folder = has_template(world.pair.target, told + THINKING_TEMPLATE)
    found = World(world.folder, world.pair, world.clips, Reference(folder)).answer(0, NUM_TOKENS, num_frames=NUM_FRAMES)
    has_template(folder, THINKING_TEMPLATE)
    return found


async def test_a_request_or_the_gateway_says_whether_a_model_thinks(tmp_path: Path) -> None:
    world = make_endless_world(tmp_path)
    has_template(world.pair.draft, THINKING_TEMPLATE)
    thinking, silent = (answer(world, "{% set enable_thinking = " + told + " %}") for told in ("true", "false"))
    assert thinking != silent and answer(world, "") == thinking
    for default, usual in (("template", thinking), ("off", silent)):
        options = world.stack_options("--default-thinking", default)
        async with Stack(options) as running, open_channel(running.gateway_address) as channel:
            for said, expected in (({}, usual), ({"thinking": "off"}, silent), ({"thinking": "on"}, thinking)):
                for method in ("autoregressive", "slipstream"):
                    asked: dict[str, Any] = {"prompt": PROMPT, "method": method, "gate": False, **SIZES, **said}
                    assert (await caption(channel, world.clips[0], **asked)).token_ids == expected
            check_logs(running)
