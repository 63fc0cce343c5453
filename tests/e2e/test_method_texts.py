"""Every method, and every pruner, through the running stack: the text is that of plain transformers."""

from typing import Any

import grpc
import pytest

from slipstream.speculation.methods import LOSSY_METHODS, METHODS, PRUNERS
from tests.support.gateway_client import Captioned, caption, has_draft, until
from tests.support.variants import one_in, some
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")


WITHOUT_DRAFTS = ("autoregressive", "prompt_lookup")
"""Methods that may judge nothing: text that repeats nothing gives prompt lookup nothing to look up."""


def lossiness(captioned: Captioned) -> tuple[str, float]:
    return captioned.summary.options["lossy"], captioned.summary.options["lossy_keep"]


async def check(gateway: grpc.aio.Channel, world: World, num_tokens: int, **options: Any) -> Captioned:
    asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": num_tokens} | options
    captioned = await caption(gateway, world.clips[0], **asked)
    assert captioned.token_ids == world.answer(0, num_tokens)
    assert captioned.summary.speculation.drafts_lost == 0
    return captioned


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("alpha", [0.1, 0.9])
@one_in(2, "method", "alpha")
async def test_methods(gateway: grpc.aio.Channel, world: World, method: str, alpha: float) -> None:
    asked: dict[str, Any] = {"method": method, "alpha": alpha, "gate": False}
    if METHODS[method].takes_hints:
        asked["prediction"] = (world.reference.text(world.answer(0, 64)), "Something else.")
    captioned = await until(
        lambda one: one.summary.speculation.judged or method in WITHOUT_DRAFTS,
        lambda: check(gateway, world, 64, **asked),
    )
    assert captioned.summary.options["method"] == method
    if method not in WITHOUT_DRAFTS:
        assert captioned.summary.speculation.judged > 0
        assert captioned.summary.speculation.draft_pass_s > 0


@pytest.mark.parametrize("pruner", PRUNERS)
async def test_pruners(gateway: grpc.aio.Channel, world: World, pruner: str) -> None:
    captioned = await until(has_draft, lambda: check(gateway, world, 24, pruner=pruner, alpha=0.7, gate=False))
    assert captioned.summary.options["pruner"] == pruner
    assert captioned.summary.speculation.kept_tokens == {"none": 48, "all": 0}.get(pruner, 14)


@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("method", ["sd", "std", "parallelvlm", "sd_tree"])
@one_in(3, "method", "gamma")
async def test_windows_of_a_given_length(gateway: grpc.aio.Channel, world: World, method: str, gamma: int) -> None:
    captioned = await check(gateway, world, 48, method=method, gamma=gamma, alpha=0.1)
    windows = [cost.window for cost in captioned.summary.speculation.pass_costs]
    assert max(windows) <= (25 if method == "sd_tree" else gamma)


DYNAMIC = [name for name, method in METHODS.items() if method.growth is not None]


@pytest.mark.parametrize(
    "method", ["sd_tree", "std", "sd", "parallelvlm", "hints", "hsd", "hints_draft", "prompt_lookup", *DYNAMIC]
)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@one_in(2, "method", "rule")
async def test_sampled_text(gateway: grpc.aio.Channel, world: World, method: str, rule: str) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": 40, "temperature": 0.7}
    asked |= {"seed": 11, "sampling_rule": rule, "alpha": 0.1}
    plain = await caption(gateway, world.clips[0], **asked, method="autoregressive")
    sampled = await caption(gateway, world.clips[0], **asked, method=method)
    assert sampled.summary.num_tokens > 0
    if rule == "coupled" or method not in ("sd", "parallelvlm"):
        assert sampled.token_ids == plain.token_ids


@pytest.mark.parametrize("lossy", some(LOSSY_METHODS, keep=("fastv", "dycoke")))
async def test_lossy_baselines_say_so(gateway: grpc.aio.Channel, world: World, lossy: str) -> None:
    whole = await check(gateway, world, 24, method="autoregressive", lossy=lossy, lossy_keep=1.0)
    assert lossiness(whole) == (lossy, 1.0)
    asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": 24}
    pruned = await caption(gateway, world.clips[0], **asked, method="autoregressive", lossy=lossy)
    assert lossiness(pruned) == (lossy, 0.5)
    assert pruned.summary.num_tokens == 24
    plain = await check(gateway, world, 24, method="autoregressive")
    assert not any(lossiness(plain))
