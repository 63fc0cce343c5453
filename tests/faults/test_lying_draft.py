"""A draft that lies in every way the protocol allows to express: the caption completes, and its text is the same."""

import asyncio
import math
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from slipstream.speculation.methods import METHODS
from slipstream.speculation.protocol import FinishReason
from slipstream.stack.local import Stack
from tests.faults.fake_draft import (
    FAULTLESS,
    KIND_OF_LIE,
    LIES,
    Behaviour,
    Event,
    FakeDraft,
    Orders,
    boasts,
    floods,
    ready,
    repeats_what_ended,
    says,
    silent,
    tokens,
    writes,
)
from tests.support.gateway_client import MOST_TRIES, Captioned, caption, until
from tests.support.processes import logged, read_log, running
from tests.support.variants import one_in, some
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SILENCE_S = 0.3
OF_EACH_KIND = (
    *("floods of ready", "millions of tokens", "hangs up", "a huge digest"),
    *("never ready", "mute", "complains", "nonsense"),
)
"""Lies of each kind that faults are counted by, and some drafts that have none."""
NOTICED = 40
"""Tokens of a caption in which a lie is noticed; SILENT of one that takes longer than a draft may be silent for."""
SILENT = 1000


@dataclass(frozen=True)
class Liar:
    """A gateway whose draft is ours to misbehave."""

    draft: FakeDraft
    target: str
    gateway: grpc.aio.Channel
    world: World
    log: Path
    metrics: str

    async def check(self, behaviour: Behaviour, *, clip: int = 0, num_tokens: int = 40, **options: Any) -> Captioned:
        """Captions with that draft and compares with the reference. Without the gate: it would leave liars alone."""
        self.draft.behaviour = behaviour
        asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": num_tokens}
        asked |= {"gate": False} | options
        captioned = await caption(self.gateway, self.world.clips[clip], **asked)
        expected = self.world.answer(clip, num_tokens)
        assert captioned.token_ids == expected
        assert captioned.text == captioned.summary.text == self.world.reference.text(expected)
        return captioned

    async def until(
        self, holds: Callable[[Captioned], object], behaviour: Behaviour, tries: int = MOST_TRIES, **options: Any
    ) -> Captioned:
        """See `gateway_client.until`."""
        return await until(holds, lambda: self.check(behaviour, **options), tries)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def liar(stack: Stack, world: World, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Liar]:
    folder = tmp_path_factory.mktemp("liar")
    async with open_channel(stack.processes["draft"].address) as channel:
        model = await draft_pb2_grpc.DraftStub(channel).GetModel(common_pb2.GetModelRequest())
    async with FakeDraft(folder, model) as draft:
        flags = ("--target", stack.processes["target"].address, "--draft", draft.address)
        flags += ("--draft-timeout-s", str(SILENCE_S), "--draft-away-s", "0", "--metrics", "0", "--gate-memory", "true")
        async with running("gateway", folder, *flags) as process:
            (shown,) = logged(process.log_path, "metrics.ready")
            async with open_channel(process.address) as gateway:
                target = stack.processes["target"].address
                yield Liar(draft, target, gateway, world, process.log_path, shown["address"])
            assert not [entry for entry in read_log(process.log_path) if entry["level"] == "error"]


def reasons(captioned: Captioned) -> str:
    return "; ".join(stage.detail for stage in captioned.stages if stage.stage == "draft_lost")


def was_lost_by_a_lie(captioned: Captioned) -> bool:
    """Not by what is this process's alone: silence, see `was_heard_in_time`, and connections that it does not take in
    time."""
    lost = [stage.detail for stage in captioned.stages if stage.stage == "draft_lost"]
    return any("silent for" not in detail and "not reachable" not in detail for detail in lost)


def was_heard_in_time(captioned: Captioned) -> bool:
    """The draft lives in this process, which may stand still for longer than the gateway waits."""
    return not any(words in reasons(captioned) for words in ("silent for", "not reachable"))


# -- a draft that is right --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["self_clocked", "fixed"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 9, 16, 17, 40])
@one_in(2, "num_tokens", "policy")
async def test_a_prophet_and_the_limit(liar: Liar, num_tokens: int, policy: str) -> None:
    answer = liar.world.answer(0)
    behaviour = writes(lambda at: answer[at % 96])
    captioned = await liar.until(was_heard_in_time, behaviour, num_tokens=num_tokens, policy=policy)
    assert captioned.summary.speculation.accepted >= captioned.summary.speculation.judged - 1
    assert captioned.summary.finish_reason == FinishReason.LENGTH
    assert "draft_lost" not in captioned.stage_names


@pytest.mark.parametrize("policy", ["self_clocked", "fixed"])
@pytest.mark.parametrize("max_window", [1, 3, 16, 64])
@one_in(2, "max_window", "policy")
async def test_a_prophet_and_the_end_token(liar: Liar, max_window: int, policy: str) -> None:
    answer = liar.world.answer(2)
    behaviour = writes(lambda at: answer[at] if at < len(answer) else 7)
    captioned = await liar.check(behaviour, clip=2, num_tokens=96, max_window=max_window, policy=policy)
    assert captioned.summary.finish_reason == FinishReason.STOP
    assert max(cost.window for cost in captioned.summary.speculation.pass_costs) <= max_window


async def test_right_half_of_the_time(liar: Liar) -> None:
    answer = liar.world.answer(0)
    behaviour = writes(lambda at: answer[at % 96] if at // 3 % 2 else 7)
    captioned = await liar.until(
        lambda one: one.summary.speculation.restarts and was_heard_in_time(one), behaviour, gate=False
    )
    assert captioned.summary.speculation.restarts > 0
    assert captioned.summary.speculation.drafts_lost == 0


# -- lies that are noticed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (says(lambda at: tokens(at.epoch + 7, at.known, [5])), "never started"),
        (says(lambda at: tokens(at.epoch, at.known + 1, [5])), "was next"),
        (says(lambda at: tokens(at.epoch, 2**32 - 1, [5])), "was next"),
        (says(lambda at: tokens(at.epoch, at.known, [5] * 5000)), "past output position"),
        (says(lambda at: tokens(at.epoch, at.known, [320])), "outside the vocabulary of 320"),
        (says(lambda at: tokens(at.epoch, at.known, [2**32 - 1])), "outside the vocabulary of 320"),
        (says(lambda at: tokens(at.epoch, at.known, [])), "without tokens"),
        (says(lambda at: tokens(0, 0, [])), "nothing was to come"),
        (floods(lambda at: tokens(0, 0, [5])), "nothing was to come"),
        (repeats_what_ended, "was next"),
        (floods(lambda at: ready()), "a second time"),
        (boasts(encode_s=math.nan), "its prefill took nan"),
        (boasts(prune_s=-1.0), "its prefill took"),
        (boasts(guidance_s=1e9), "its prefill took"),
        (boasts(kept_tokens=2**32 - 1), "kept 4294967295 of 48 tokens"),
        (boasts(guidance_bytes=2**64 - 1), "18446744073709551615 bytes"),
        (boasts(kept_digest="0" * 65), "digest"),
        (boasts(kept_digest="[bold]"), "digest"),
        (
            boasts(kept=common_pb2.KeptTokens(bitmap=b"\xff" * 6, num_steps=3, num_rows=4, num_columns=4)),
            "names other tokens",
        ),
        (
            boasts(kept=common_pb2.KeptTokens(bitmap=b"\1", num_steps=3, num_rows=4, num_columns=4)),
            "names other tokens",
        ),
        (boasts(kept=common_pb2.KeptTokens(bitmap=b"\1" + bytes(5), num_rows=4, num_columns=4)), "names other tokens"),
        (boasts(kept=common_pb2.KeptTokens(bitmap=b"\1" * 2**15)), "names other tokens"),
        (floods(lambda at: tokens(0, 0, [5] * 100_000)), "more than 65536 bytes"),
        (floods(lambda at: b"\xff" * 9), "no message"),
        (says(lambda at: tokens(at.epoch, at.known, [5], 999.0)), "took 999.0 s"),
        (says(lambda at: tokens(at.epoch, at.known, [5], math.nan)), "took nan s"),
        (says(lambda at: tokens(at.epoch, at.known, [5], math.inf)), "took inf s"),
        (says(lambda at: tokens(at.epoch, at.known, [5], -1.0)), "took -1.0 s"),
        (says(lambda at: tokens(at.epoch, at.known, [5], 0.0)), "took 0.0 s"),
        (says(lambda at: tokens(at.epoch, at.known, [5], 5e-324)), "took 5e-324 s"),
        (says(lambda at: tokens(at.epoch, at.known, [5], 1e300)), "took 1e+300 s"),
        (says(lambda at: Event()), "empty message"),
        (says(), "silent for 0.3 s"),
        (says(stays=False), "ended the session"),
        (floods(lambda at: tokens(at.epoch, at.known, [5])), "was next"),
    ],
)
@pytest.mark.parametrize("policy", ["self_clocked", "fixed"])
@one_in(2, "behaviour", "policy")
async def test_lies_that_are_noticed(liar: Liar, behaviour: Behaviour, reason: str, policy: str) -> None:
    num_tokens = SILENT if "silent" in reason else NOTICED
    captioned = await liar.until(
        lambda one: reason in reasons(one), behaviour, policy=policy, num_tokens=num_tokens, gate=False
    )
    assert reason in reasons(captioned)
    assert captioned.summary.speculation.drafts_lost >= 1


async def test_a_draft_that_fails(liar: Liar) -> None:
    async def behave(orders: object) -> AsyncIterator[Event | bytes]:
        yield ready()
        raise RuntimeError("on purpose")

    captioned = await liar.until(lambda one: one.summary.speculation.drafts_lost, behave)
    assert captioned.summary.speculation.drafts_lost >= 1


# -- lies of a draft that branches -------------------------------------------------------------------------------------

DYNAMIC = [name for name, method in METHODS.items() if method.growth is not None]


def nodes(at: Orders, first: int, token_ids: Sequence[int], parents: Sequence[int], *chances: float) -> Event:
    """Of a dynamic tree; surer than it should be."""
    says_of_each = chances or (1.0,) * len(token_ids)
    written = {"epoch": at.epoch, "position": first, "token_ids": token_ids, "parents": parents, "pass_s": 0.001}
    return Event(tokens=draft_pb2.DraftTokens(**written, chances=says_of_each, num_passes=2**32 - 1))


@pytest.mark.parametrize("method", DYNAMIC)
@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (says(lambda at: nodes(at, 7, [5], [-1])), "node 7; 0 was next"),
        (says(lambda at: nodes(at, 0, [5, 6], [-1, 1])), "no tree"),
        (says(lambda at: nodes(at, 0, [5], [-(2**31)])), "no tree"),
        (says(lambda at: nodes(at, 0, [5, 6], [-1])), "no tree"),
        (says(lambda at: tokens(at.epoch, at.known, [5])), "no tree"),
        (says(lambda at: nodes(at, 0, [5] * 257, [-1] * 257)), "past node 256"),
        (says(lambda at: nodes(at, 0, [5], [-1], math.nan)), "chances that are none"),
        (says(lambda at: nodes(at, 0, [5], [-1], 1.5)), "chances that are none"),
        (says(lambda at: nodes(at, 0, [5, 6], [-1, -1], 0.5)), "chances that are none"),
        (says(lambda at: nodes(at, 0, [320], [-1])), "outside the vocabulary of 320"),
        (says(lambda at: nodes(at, 0, [5] * 250, range(-1, 249))), "past output position"),
        (says(lambda at: nodes(at, 0, [5], [-1]), lambda at: nodes(at, 1, [6], [-1])), "a second time what follows"),
    ],
)
@one_in(3, "behaviour", "method")
async def test_lies_of_a_tree_that_are_noticed(liar: Liar, behaviour: Behaviour, reason: str, method: str) -> None:
    captioned = await liar.until(
        lambda one: reason in reasons(one), behaviour, method=method, num_tokens=NOTICED, gate=False
    )
    assert reason in reasons(captioned)


@pytest.mark.parametrize("method", DYNAMIC)
async def test_a_tree_of_nonsense_costs_speed_only(liar: Liar, method: str) -> None:
    behaviour = says(lambda at: nodes(at, 0, [7, 8, 9, 10], [-1, -1, 0, 1]))
    await liar.check(behaviour, method=method, num_tokens=24)


# -- lies that cost nothing but speed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["self_clocked", "fixed"])
@pytest.mark.parametrize(
    "behaviour",
    [
        silent,
        writes(lambda at: 7),
        writes(lambda at: at % 320),
        writes(lambda at: 7, pause_s=0.2, pass_s=0.2),
        writes(lambda at: 7, pass_s=0.9),
        writes(lambda at: 7, pass_s=1e-6),
    ],
    ids=["never ready", "garbage", "counting", "slow", "claims slow", "claims fast"],
)
@one_in(2, "behaviour", "policy")
async def test_lies_that_cost_speed_only(liar: Liar, behaviour: Behaviour, policy: str) -> None:
    await liar.check(behaviour, policy=policy, num_tokens=24)


@pytest.mark.parametrize("behaviour", [writes(lambda at: 7), says()], ids=["garbage", "mute"])
async def test_a_bad_draft_and_the_gate(liar: Liar, behaviour: Behaviour) -> None:
    """Whether and when it closes is a matter of seconds; the text and the account of it are not."""
    for gate in (True, False):
        speculation = (await liar.check(behaviour, num_tokens=96, gate=gate)).summary.speculation
        was_closed = speculation.gate_closings > 0 or speculation.gate_start == "rest"
        assert (speculation.gated_tokens > 0) <= was_closed <= gate
        assert speculation.gated_tokens <= sum(cost.count for cost in speculation.pass_costs if not cost.window)


async def test_a_draft_that_does_not_help_is_left_out_of_later_captions(liar: Liar) -> None:
    """Its lines never live, so each caption loses something, and the next ones are plain ones: on a busy machine, where
    plain passes take as uneven times as windows do, after more of them."""
    captioned = await liar.until(
        lambda one: one.summary.speculation.gate_start == "rest",
        writes(lambda at: 7),
        tries=60,
        num_tokens=96,
        gate=True,
    )
    speculation = captioned.summary.speculation
    assert speculation.gate_start == "rest" and "to rest" in speculation.gate_reason
    assert (speculation.judged, speculation.gated_tokens, speculation.passes) == (0, 95, 95)
    assert "draft_ready" not in captioned.stage_names


async def test_tokens_before_it_is_ready(liar: Liar) -> None:
    async def behave(orders: object) -> AsyncIterator[Event | bytes]:
        yield tokens(1, 0, [5, 6])
        yield ready()
        await asyncio.Event().wait()

    captioned = await liar.until(was_lost_by_a_lie, behave)
    assert "before it was ready" in reasons(captioned)


async def test_its_words_are_cut_and_plain(liar: Liar) -> None:
    async def behave(orders: object) -> AsyncIterator[Event | bytes]:
        yield ready()
        raise RuntimeError("\x1b[2J[bold]" * 300)

    captioned = await liar.until(reasons, behave)
    details = [stage.detail for stage in captioned.stages if stage.stage == "draft_lost"]
    assert details and all(len(detail) < 250 and detail.isprintable() for detail in details)


async def test_lies_are_not_remembered(liar: Liar) -> None:
    """The running averages of this gateway have seen all of the above, and still make sense."""
    answer = liar.world.answer(0)
    for policy in ("self_clocked", "fixed"):
        options: dict[str, Any] = {"num_tokens": 96, "policy": policy, "gate": False}
        behaviour = writes(lambda at: answer[at % 96])
        captioned = await liar.until(lambda one: one.summary.speculation.windows, behaviour, **options)
        assert captioned.summary.speculation.windows > 0


# -- lies that go on ---------------------------------------------------------------------------------------------------


def faults(address: str) -> dict[str, float]:
    """By kind, from the gateway's metrics."""
    page = urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return {one.labels["kind"]: one.value for one in samples if one.name == "slipstream_draft_faults_total"}


@pytest.mark.parametrize("name", some(LIES, keep=OF_EACH_KIND))
async def test_a_lie_beside_a_plain_caption(liar: Liar, name: str) -> None:
    """Both texts are the target's, both end, faults are counted, and a draft that only fails has not lied."""
    before = await asyncio.to_thread(faults, liar.metrics)
    plainly = liar.check(LIES[name], clip=1, method="autoregressive")
    must_be_heard = name not in FAULTLESS
    lies = liar.until(
        lambda one: was_lost_by_a_lie(one) or not must_be_heard, LIES[name], num_tokens=NOTICED, gate=False
    )
    lied, _ = await asyncio.gather(lies, plainly)
    after = await asyncio.to_thread(faults, liar.metrics)
    kinds = {kind for kind, count in after.items() if count > before.get(kind, 0)} - {"silent"}
    assert kinds == ({KIND_OF_LIE.get(name, "order")} if must_be_heard else set())
    assert lied.stage_names.count("draft_ready") <= lied.stage_names.count("draft_lost") + 1
    assert not logged(liar.log, "draft.failed")


async def test_a_draft_that_lies_thrice_is_left_alone(liar: Liar, tmp_path: Path) -> None:
    flags = ("--target", liar.target, "--draft", liar.draft.address, "--metrics", "0")
    async with running("gateway", tmp_path, *flags) as process, open_channel(process.address) as channel:
        victim, left_alone = replace(liar, gateway=channel), partial(logged, process.log_path, "draft.left_alone")
        await victim.until(lambda one: left_alone(), floods(lambda at: ready()), num_tokens=NOTICED)
        assert left_alone()
        before = liar.draft.num_sessions
        captioned = await victim.check(writes(lambda at: 7))
        assert liar.draft.num_sessions == before
        assert "left alone" in "".join(stage.detail for stage in captioned.stages if stage.stage == "draft_missing")
        (shown,) = logged(process.log_path, "metrics.ready")
        assert await asyncio.to_thread(faults, shown["address"]) == {"order": 3}


async def test_a_draft_that_does_not_say_what_it_is(liar: Liar) -> None:
    """Nobody waits for its answer."""
    liar.draft.answers.clear()
    try:
        captioned = await liar.check(silent)
    finally:
        liar.draft.answers.set()
    assert captioned.summary.speculation.judged == 0
