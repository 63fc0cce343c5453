"""Dynamic trees that the draft writes on a tiny model: every candidate is the one that the model alone would name."""

import asyncio
import math
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from slipstream.engine import VideoLM
from slipstream.engine.branches import Branches
from slipstream.engine.draft_engine import DraftEngine
from slipstream.engine.draft_session import DraftSession
from slipstream.engine.line_writer import LineWriter
from slipstream.engine.written_tree import Ranked, WrittenTree
from slipstream.errors import InvalidRequest, ProtocolViolation
from slipstream.speculation.lines import MAX_NODES
from slipstream.speculation.methods import Shape
from slipstream.speculation.protocol import ROOT, AdvanceLine, JoinPoint, MoveLine, RestartLine
from slipstream.speculation.trees.calibration import Calibration
from slipstream.speculation.trees.dynamic_line import DynamicLine
from slipstream.speculation.trees.growth import GROWTHS, Growth
from tests.services.model_sessions import some_frames
from tests.services.test_draft_writer import SHAPES, draft_model, line, opened, prepared, running, started
from tests.speculation.dynamic_toys import tree_costs
from tests.support.variants import some

NUM_TOKENS = 20
SIBLINGS = {"width": 2, "max_rows": 1}


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    return draft_model(tmp_path_factory.mktemp("draft"), request.param)


@dataclass
class Heard:
    """The nodes of the epoch that was heard last, by their numbers."""

    epoch: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    async def listen(self, engine: DraftEngine, session: DraftSession, num_nodes: int, epoch: int) -> "Heard":
        """Until the epoch has so many nodes."""
        return await self.hear(engine.write(session), num_nodes, epoch)

    async def hear(self, events: AsyncIterator, num_nodes: int, epoch: int) -> "Heard":  # type: ignore[type-arg]
        async for chunk in events:
            if chunk.epoch > self.epoch:
                self.epoch, self.tokens, self.parents, self.chances = chunk.epoch, [], [], []
            assert chunk.position == len(self.tokens), "nodes are numbered as they are written"
            assert 0 < chunk.num_passes <= len(chunk.token_ids) and chunk.pass_s > 0
            self.tokens += chunk.token_ids
            self.parents += chunk.parents
            self.chances += chunk.chances
            if self.epoch == epoch and len(self.tokens) >= num_nodes:
                return self
        raise AssertionError("the line ended")

    def path(self, node: int) -> list[int]:
        """Tokens from the epoch's root down to a node."""
        return [*self.path(self.parents[node]), self.tokens[node]] if node != ROOT else []


async def test_the_main_path_is_the_chain_that_it_would_write(model: VideoLM) -> None:
    async with running(model) as engine:
        chain = await line(engine, await started(engine, some_frames()), NUM_TOKENS)
        session = await started(engine, some_frames(), **SIBLINGS)
        heard = await Heard().listen(engine, session, 2 * NUM_TOKENS, 1)
    assert heard.tokens[::2] == chain
    assert heard.parents == [ROOT, ROOT, *(node for node in range(0, 2 * NUM_TOKENS - 2, 2) for _ in range(2))]
    assert all(best != second for best, second in zip(heard.tokens[::2], heard.tokens[1::2], strict=True))
    assert all(1 > best >= second > 0 for best, second in zip(heard.chances[::2], heard.chances[1::2], strict=True))


async def test_candidates_written_ahead_are_those_of_passes(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a chain and a wider tree."""
    company: tuple[dict[str, int], ...] = (SIBLINGS, {}, {"width": 3, "max_rows": 1})
    async with running(model) as engine:
        together = [await started(engine, some_frames(), **asked) for asked in company]
        lines = asyncio.gather(line(engine, together[1], NUM_TOKENS), Heard().listen(engine, together[2], 60, 1))
        ahead = await Heard().listen(engine, together[0], 2 * NUM_TOKENS, 1)
        chain, wider = await lines
        monkeypatch.setattr(model, "write_ahead", lambda *_: None)
        passes = await Heard().listen(engine, await started(engine, some_frames(), **SIBLINGS), 2 * NUM_TOKENS, 1)
    assert (ahead.tokens, ahead.parents) == (passes.tokens, passes.parents)
    assert ahead.chances == pytest.approx(passes.chances, rel=1e-3)
    assert ahead.tokens[::2] == wider.tokens[::3] == chain and ahead.tokens[1::2] == wider.tokens[1::3]


@pytest.mark.parametrize(
    ("token_id", "expected"),
    [
        (4, ([4, 9], [0.5, 0.5])),
        (9, ([9, 4], [0.5, 0.5])),
        (6, ([6, 4], [0.5, 0.5])),
    ],
)
def test_the_token_that_was_taken_leads(token_id: int, expected: tuple[list[int], list[float]]) -> None:
    """Also of equals, of which there may be more than were ranked; what is no token follows nothing."""
    assert Ranked([4, 300, 9], [0.5, 0.5, 0.5]).led_by(token_id, 2, vocab_size=256) == expected


async def test_orders_of_a_tree(model: VideoLM) -> None:
    async with running(model) as engine:
        session, other = [await started(engine, some_frames(), **asked) for asked in (SIBLINGS, {})]
        heard = await Heard().listen(engine, session, 2 * NUM_TOKENS, 1)
        engine.order(session, MoveLine(1, 6, NUM_TOKENS + 1))
        assert len((await heard.listen(engine, session, 2 * NUM_TOKENS + 2, 1)).tokens) == 2 * NUM_TOKENS + 2
        engine.order(session, AdvanceLine(1, NUM_TOKENS + 2))
        await heard.listen(engine, session, 2 * NUM_TOKENS + 4, 1)
        known = heard.path(6)
        suffix = (heard.tokens[8], heard.tokens[11], 7)
        engine.order(session, RestartLine(2, len(known), suffix, 12, 1))
        again = await heard.listen(engine, session, 10, 2)
        engine.order(other, RestartLine(2, 0, (*known, *suffix), 12, 1))
        assert await line(engine, other, 5, epoch=2) == again.tokens[::2]
        engine.order(session, MoveLine(2, 99, 14))
        with pytest.raises(ProtocolViolation, match="move to node 99"):
            await heard.listen(engine, session, 99, 2)


async def test_a_tree_never_has_more_nodes_than_may_live(model: VideoLM) -> None:
    async with running(model) as engine:
        join = JoinPoint(1, (), MAX_NODES, first_chunk=1)
        session = await prepared(engine, await opened(engine, 2, join, **SIBLINGS), some_frames())
        written = engine.write(session)
        heard = await Heard().hear(written, MAX_NODES, 1)
        assert len(heard.tokens) == MAX_NODES
        engine.order(session, MoveLine(1, 4, MAX_NODES))
        assert len((await heard.hear(written, MAX_NODES + 6, 1)).tokens) == MAX_NODES + 6


@pytest.mark.parametrize("asked", [{"width": 257}, {"width": 4, "max_rows": 65}, {"width": 2, "tree": True}])
async def test_no_dynamic_tree(model: VideoLM, asked: dict[str, int]) -> None:
    async with running(model) as engine:
        with pytest.raises(InvalidRequest, match="dynamic tree"):
            await opened(engine, 2, **asked)


@pytest.mark.parametrize("least_chance", [-0.1, 1.5, math.nan])
async def test_no_chance(model: VideoLM, least_chance: float) -> None:
    async with running(model) as engine:
        with pytest.raises(InvalidRequest, match="from 0 to 1"):
            await opened(engine, 2, width=2, least_chance=least_chance)


# -- branches ---------------------------------------------------------------------------------------------------------

BRANCHES = {"width": 3, "max_rows": 4}


async def named_behind(engine: DraftEngine, session: DraftSession, epoch: int, text: list[int]) -> list[int]:
    """What the model alone names behind some tokens of the answer: the candidates of a line that begins there."""
    engine.order(session, RestartLine(epoch, 0, tuple(text), len(text) + 1, 1))
    return (await Heard().listen(engine, session, 3, epoch)).tokens


async def check_candidates(engine: DraftEngine, alone: DraftSession, heard: Heard, text: list[int], epoch: int) -> int:
    """Every node's candidates are those that the model names behind its path; the number of the next epoch."""
    for node in sorted(set(heard.parents) - {ROOT}):
        behind = [*text, *heard.path(node)]
        epoch += 1
        named = await named_behind(engine, alone, epoch, behind)
        children = [token for token, parent in zip(heard.tokens, heard.parents, strict=True) if parent == node]
        assert children == named, f"behind node {node} after {behind}"
    return epoch


async def test_candidates_of_every_branch_are_those_that_the_model_names(model: VideoLM) -> None:
    async with running(model) as engine:
        session = await started(engine, some_frames(), **BRANCHES)
        alone = await started(engine, some_frames(), width=3, max_rows=1)
        heard = await Heard().listen(engine, session, 60, 1)
        epoch = await check_candidates(engine, alone, heard, [], 1)
        beside = next(node for node, parent in enumerate(heard.parents) if parent >= 0 and node % 3)
        engine.order(session, MoveLine(1, beside, NUM_TOKENS + 4))
        await heard.listen(engine, session, len(heard.tokens) + 30, 1)
        epoch = await check_candidates(engine, alone, heard, [], epoch)
        deeper = next(node for node, parent in enumerate(heard.parents) if parent == beside)
        suffix = [heard.tokens[deeper], 7]
        text = [*heard.path(beside), *suffix]
        engine.order(session, RestartLine(2, len(text) - 2, tuple(suffix), NUM_TOKENS + 8, 1))
        again = await heard.listen(engine, session, 30, 2)
        assert again.tokens[:3] == await named_behind(engine, alone, epoch + 1, text)
        await check_candidates(engine, alone, again, text, epoch + 1)


async def test_a_move_to_a_node_that_was_not_read_goes_on_there(model: VideoLM) -> None:
    async with running(model) as engine:
        session = await started(engine, some_frames(), **BRANCHES)
        alone = await started(engine, some_frames(), width=3, max_rows=1)
        heard = await Heard().listen(engine, session, 30, 1)
        leaf = next(node for node in range(30) if node not in heard.parents)
        engine.order(session, MoveLine(1, leaf, NUM_TOKENS))
        while leaf not in heard.parents:
            await heard.listen(engine, session, len(heard.tokens) + 1, 1)
        await check_candidates(engine, alone, heard, [], 1)


async def test_sessions_that_branch_together_do_so_as_if_alone(model: VideoLM) -> None:
    async with running(model) as engine:
        sessions = [await started(engine, some_frames(2 + seed, seed), **BRANCHES) for seed in range(3)]
        alone = [await started(engine, some_frames(2 + seed, seed), width=3, max_rows=1) for seed in range(3)]
        for session, other in zip(sessions, alone, strict=True):
            heard = await Heard().listen(engine, session, 40, 1)
            await check_candidates(engine, other, heard, [], 1)


async def test_of_sessions_in_turns_the_one_that_knows_the_likeliest_node_writes(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain, which does not know, has its own turns all the same."""
    chosen, turns = list[tuple[float, float]](), list[bool]()
    run_pass = LineWriter._pass

    def spy(writer: LineWriter, sessions: list[DraftSession]) -> None:
        known = [session.line.chance for session in writer._writing if session.line.chance is not None]
        if len(sessions) == 1 and len(known) > 1 and (chance := sessions[0].line.chance) is not None:
            chosen.append((chance, max(known)))
        if len(sessions) == 1 and len(writer._writing) == 3:
            turns.append(sessions[0].line.chance is None)
        run_pass(writer, sessions)

    monkeypatch.setattr(LineWriter, "_pass", spy)
    async with running(model) as engine:
        chain = await started(engine, some_frames())
        sessions = [await started(engine, some_frames(2 + seed, seed), **BRANCHES) for seed in range(2)]
        writing = asyncio.gather(*(Heard().listen(engine, session, 40, 1) for session in sessions))
        assert await line(engine, chain, NUM_TOKENS)
        await writing
    assert bool(chosen) == (model.most_nodes >= 2) and all(chance == best for chance, best in chosen)
    assert bool(turns) == (model.most_nodes >= 3)
    assert all(sum(turns[first : first + 3]) == 1 for first in range(len(turns) - 2)), "one of three"


def grown(chances: list[list[float]]) -> Branches:
    """Behind a root, and then behind the first candidate of each place, candidates with these chances."""
    branches = Branches(WrittenTree(1, Growth(3, 4)), [7], 3, Calibration())
    for place, sure in enumerate(chances):
        assert branches.choose(lambda rows: 1.0, 0.0, 1, 99)
        branches.go_on([10 * place], [Ranked([10 * place, 1, 2], sure)], 256)
    return branches


def test_a_chain_is_written_on_where_that_gives_more_chance_a_second() -> None:
    """Of two nodes that are as likely, each half as likely as the root."""
    branches = grown([[0.5, 0.5, 0.0]])
    cheap_rows, dear_rows = (lambda rows: 1.0), (lambda rows: 1.0 * rows)
    assert branches.choose(dear_rows, 0.9, 4, 9) and branches.end_of_chain(1, 9) == (0, 7)
    assert branches.choose(cheap_rows, 0.9, 4, 99) and branches.end_of_chain(1, 99) == (0, 0), "both, in one pass"
    assert branches.choose(cheap_rows, 0.4, 4, 99) and branches.end_of_chain(1, 3) == (0, 1)
    assert branches.choose(dear_rows, math.inf, 1, 99), "where nothing can be written ahead, the likeliest is read"


def test_a_chain_may_leave_the_main_path_and_is_none_with_two_ends() -> None:
    branches = grown([[0.4, 0.6, 0.0]])
    assert branches.choose(lambda rows: 1.0, 0.9, 1, 99)
    branches.grow(torch.zeros(1, 256), lambda *_: ([3, 4, 5], [0.5, 0.3, 0.2]))
    assert branches.choose(lambda rows: 1.0, 0.0, 1, 9) and branches.end_of_chain(2, 9) == (3, 6)
    assert branches.choose(lambda rows: 1.0, math.inf, 1, 99) and branches.end_of_chain(2, 99) == (0, 0)


def test_what_is_too_unlikely_is_not_read_until_the_root_moves() -> None:
    """By what the draft itself says."""
    branches = grown([[0.5, 0.4, 0.0]])
    for _ in range(9):  # which makes the second one likelier than the first
        branches._calibration.observe([0.5, 0.4, 0.0], 1)
    read = branches.tree.nodes
    assert branches.choose(lambda rows: 1.0, math.inf, 4, 99, math.log(0.45))
    assert [read[node].said for node in branches._reading] == [0.5]
    branches.grow(torch.zeros(1, 256), lambda *_: ([3, 4, 5], [0.7, 0.2, 0.0]))
    assert not branches.choose(lambda rows: 1.0, 0.0, 4, 99, math.log(0.45)), "neither 0.4 nor 0.5 times 0.7"
    branches.move(0)
    assert branches.choose(lambda rows: 1.0, 0.0, 4, 99, math.log(0.45))
    assert [read[node].said for node in branches._reading] == [0.7]
    branches.move(5)
    assert branches.choose(lambda rows: 1.0, 0.0, 4, 99, 0.0), "the root always is"


@pytest.mark.parametrize("chances", some([(0.3, 0.1, 0.0), (1.0, 0.0, 0.0), (0.21, 0.2, 0.19)], keep=[(0.3, 0.1, 0.0)]))
def test_gateway_and_draft_count_alike_however_long_a_line_lives(chances: tuple[float, ...]) -> None:
    """Also behind what the draft said is impossible, and where the product of all chances is no number any more."""
    growth, order = GROWTHS[Shape.DYNAMIC_TREE], random.Random(1)
    line = DynamicLine(growth, tree_costs(9.0, 0.8), 16)
    line.begin(99_999, 0)
    branches = Branches(WrittenTree(line.epoch, growth), [], growth.width, Calibration())
    for _ in range(2000):
        assert branches.choose(lambda rows: 1.0, math.inf, 1, 99_999, growth.least_log) == line.owes
        while branches.choose(lambda rows: 1.0, math.inf, 1, 99_999, growth.least_log):
            branches.grow(torch.zeros(1, 9), lambda *_: ([3, 4, 5], list(chances)))
            said = branches.tree.take(1.0)
            assert line.hear(said.epoch, said.position, said.token_ids, said.parents, 9, said.chances)
            line.write(said.token_ids, said.parents, said.chances)
        assert not line.owes
        line.commit([order.choice((3, 4, 5))], 0)
        root = line.take_move()
        assert root is not None
        branches.move(root)


async def test_a_draft_in_company_rests_before_what_is_unlikely(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it reads all that is left. What is written ahead nobody looks at meanwhile."""
    monkeypatch.setattr(model, "write_ahead", lambda *_: None)
    asked = {**BRANCHES, "least_chance": 0.9}
    async with running(model) as engine:
        session, other = [await started(engine, some_frames(2 + seed, seed), **asked) for seed in range(2)]
        await Heard().listen(engine, other, 3, 1)
        written, heard = engine.write(session), Heard()
        for node in (ROOT, 0, 3, 6, 9):
            if node != ROOT:
                engine.order(session, MoveLine(1, node, NUM_TOKENS))
            await heard.hear(written, len(heard.tokens) + 3, 1)
        assert max(heard.chances) < 0.9 and heard.parents[::3] == [ROOT, 0, 3, 6, 9]
        await engine.close(other)
        await heard.hear(written, len(heard.tokens) + 30, 1)


async def test_captions_that_take_no_drafts_are_no_company(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "write_ahead", lambda *_: None)
    asked = {**BRANCHES, "least_chance": 0.9}
    async with running(model) as engine:
        session, other = [await started(engine, some_frames(2 + seed, seed), **asked) for seed in range(2)]
        await Heard().listen(engine, other, 3, 1)
        engine.order(other, RestartLine(2, 0, (7,), 1, 1))
        await Heard().listen(engine, session, 60, 1)


async def test_branches_are_written_ahead_while_they_are_a_chain(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything was measured, two nodes a pass are not worth as much as a token that is held for half as long."""
    calls, write_ahead = list[int](), model.write_ahead

    def spy(batch: Any, num_tokens: int, note: Any) -> Any:
        calls.append(num_tokens)
        return write_ahead(batch, num_tokens, note)

    monkeypatch.setattr(model, "write_ahead", spy)
    async with running(model) as engine:
        await Heard().listen(engine, await started(engine, some_frames(), width=3, max_rows=2), 60, 1)
    assert calls and all(0 < each <= NUM_TOKENS for each in calls)


async def test_where_nothing_can_be_written_ahead_passes_alone_are_weighed(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, choose = list[float](), Branches.choose

    def spy(branches: Branches, pass_s: Any, ahead_s: float, *others: Any) -> bool:
        asked.append(ahead_s)
        return choose(branches, pass_s, ahead_s, *others)

    monkeypatch.setattr(Branches, "choose", spy)
    monkeypatch.setattr(model, "write_ahead", lambda *_: None)
    async with running(model) as engine:
        session = await started(engine, some_frames(), width=3, max_rows=2)
        await Heard().listen(engine, session, 60, 1)
    refused = asked.index(math.inf)
    assert refused > 0 and set(asked[refused:]) == {math.inf}, "until it was refused it was thought possible"


async def test_a_move_off_the_main_path_of_siblings_ends_that_session_alone(model: VideoLM) -> None:
    async with running(model) as engine:
        session = await started(engine, some_frames(), **SIBLINGS)
        await Heard().listen(engine, session, 2 * NUM_TOKENS, 1)
        engine.order(session, MoveLine(1, 7, NUM_TOKENS + 6))
        with pytest.raises(ProtocolViolation, match="main path"):
            await Heard().listen(engine, session, 4 * NUM_TOKENS, 1)
        assert await line(engine, await started(engine, some_frames(3, 1)), NUM_TOKENS)


@pytest.mark.parametrize("where", ["_taken", "_pass"])
async def test_a_fault_of_the_writer_ends_a_session_and_not_all_others_for_ever(
    model: VideoLM, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async with running(model) as engine:
        session = await started(engine, some_frames())
        with monkeypatch.context() as patched:
            patched.setattr(LineWriter, where, lambda *anything: {}[0])
            engine.order(session, AdvanceLine(1, 2 * NUM_TOKENS))
            with pytest.raises(KeyError):
                assert not [chunk async for chunk in engine.write(session)]
        assert await line(engine, await started(engine, some_frames(3, 1)), NUM_TOKENS)
