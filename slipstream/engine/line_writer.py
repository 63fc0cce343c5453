"""Writes the draft's lines: the rounds of passes on the model's thread, and what leaves of each line. Knows no wire."""

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import takewhile

import torch

from slipstream.engine.batcher import step_each
from slipstream.engine.draft_session import Ahead, DraftLine, DraftSession, StaticTree, ahead_of
from slipstream.engine.forward import Begun, DecodeState
from slipstream.engine.segments import Window
from slipstream.engine.thread import Lane, ModelThread
from slipstream.engine.video_lm import VideoLM
from slipstream.errors import ProtocolViolation, SlipstreamError
from slipstream.logs import get_logger
from slipstream.session_messages import DraftTokens
from slipstream.speculation.pacing import PassMean, WindowCosts
from slipstream.speculation.protocol import MoveLine, RestartLine, TokenTree
from slipstream.speculation.trees.rows import share_s

FLUSH_S = 0.005
"""A chunk that is not yet whole leaves after this long: fast drafts send windows, slow drafts send tokens."""
FIRST_PASS_S = 0.001
"""What a pass is held for until one was measured."""
CATCH_UP = 64
"""Tokens of a text that a pass takes in at most, where the draft joins or goes on behind many."""


class LineWriter:
    """The rounds of passes on the model's thread. `wake` is called on the event loop, all else happens there."""

    def __init__(self, model: VideoLM, thread: ModelThread) -> None:
        self._model = model
        self._thread = thread
        self._lock = threading.Lock()
        self._woken: list[DraftSession] = []
        self._is_running = False
        self._open: set[DraftSession] = set()
        """All that began to write, and have not ended."""
        self._is_thrifty = False
        """Passes over what hardly becomes text would keep other captions waiting, here and at all that shares cores."""
        self._writing: dict[DraftSession, None] = {}
        self._row_costs = WindowCosts(PassMean(FIRST_PASS_S))
        """Seconds of a pass by its rows beyond one a session."""
        self._ahead_s = PassMean(FIRST_PASS_S / 2)
        """Seconds of a token that is written without a look at it."""
        self._most_ahead = math.inf
        """Sessions whose tokens the model writes so together; of more it was seen to refuse."""
        self._prepared: set[int] = set()
        """Rows of which there was a pass."""
        self._has_written_ahead = False
        self._told: set[tuple[str, type[Exception]]] = set()
        """Of what went wrong and a pass made up for; see `_tell_once`."""
        self._loop = asyncio.get_running_loop()

    def wake(self, session: DraftSession) -> None:
        """The session may have something to do: it is ready, has new orders, or has ended."""
        with self._lock:
            self._woken.append(session)
            if not self._is_running:
                self._is_running = True
                self._thread.submit(self._round, Lane.DECODE)

    def _round(self) -> None:
        """Passes until nobody may write, or for `FLUSH_S`: then its cost is charged, and whoever is next goes on."""
        started = time.perf_counter()
        while self._gather():
            sessions: Sequence[DraftSession] = list(self._writing)
            try:
                sessions = self._next()
                self._pass(sessions)
            except Exception as error:  # nobody knows whose fault it is, and the other sessions write on
                for session in sessions:
                    self._fail(session, error)
            if time.perf_counter() - started > FLUSH_S:
                if self._thread.is_contended:
                    for session in self._writing:
                        self._send(session)
                self._thread.submit(self._round, Lane.DECODE)
                return

    def _next(self) -> Sequence[DraftSession]:
        """All that write, for a pass, or whose turn it is: that of a tree goes to the one with the likeliest node."""
        sessions = list(self._writing)
        if not self._take_turns:
            return sessions
        first = sessions[0]
        self._writing[first] = self._writing.pop(first)
        trees = [session for session in sessions if session.branches is not None]
        return [first if first.branches is None else max(trees, key=lambda session: session.chance)]

    @property
    def _take_turns(self) -> bool:
        """So few sessions write that they have their tokens sooner row by row than by passes that they share."""
        return 1 < len(self._writing) <= self._model.most_nodes

    def _gather(self) -> bool:
        """Who writes now. False, and the round is over, when nobody does."""
        with self._lock:
            woken, self._woken = self._woken, []
        self._writing |= dict.fromkeys(woken)
        self._open = {session for session in (*self._open, *woken) if not session.work.closed}
        drafting = [session for session in self._open if session.line.may_write]
        was_thrifty, self._is_thrifty = self._is_thrifty, len(drafting) > 1 and self._model.info.device == "cpu"
        if was_thrifty and not self._is_thrifty:
            self._writing |= dict.fromkeys(drafting)
        for session in list(self._writing):
            if not self._may_write(session):
                self._writing.pop(session, None)
        with self._lock:
            self._is_running = bool(self._writing or self._woken)
            return self._is_running

    def _may_write(self, session: DraftSession) -> bool:
        """Carries out the session's orders, and says whether its line may go on."""
        if session.work.closed:
            self._most_ahead = math.inf  # it may have been the one of which the model refused
            return False
        try:
            while session.orders:
                self._carry_out(session)
            line = session.line
            if session.has_unsent:
                self._send_in_time(session)  # others may have had their turns
            if not session.has_unsent:
                session.chunk_started_s = time.perf_counter()
            if session.request.tree:
                return self._may_grow(session)
            if self._may_go_on(session, min(line.write_until, self._room(session))):
                return True
            self._send(session)
        except Exception as error:
            self._fail(session, error)
        return False

    def _may_go_on(self, session: DraftSession, write_until: int) -> bool:
        """Whether a chain or a dynamic tree has room; of what branches it is then known what the next pass reads."""
        if session.branches is not None:
            assert session.growth is not None, "what branches knows how"
            if session.branches.has_chosen:
                return True
            num_sharing = 1 if self._take_turns else max(len(self._writing), 1)
            pass_s = partial(share_s, self._row_costs.line(), num_sharing)
            most_drawn = min(self._most_ahead, self._model.most_nodes, 1)
            most_ahead = self._most_ahead if session.sampler.takes_largest else most_drawn
            ahead_s = min(self._ahead_s.value / num_sharing, pass_s(1)) if num_sharing <= most_ahead else math.inf
            least_log = session.growth.least_log if self._is_thrifty else -math.inf
            return session.branches.choose(pass_s, ahead_s, session.growth.rows, write_until, least_log)
        has_room = session.dynamic_tree is None or session.dynamic_tree.room > 0
        return len(session.line.output) < write_until and has_room

    def _carry_out(self, session: DraftSession) -> None:
        order, line = session.orders.popleft(), session.line
        if isinstance(order, RestartLine):
            self._restart(session, order)
        elif order.epoch == line.epoch:
            line.write_until = order.write_until
            if isinstance(order, MoveLine):
                self._move(session, order.root)

    def _move(self, session: DraftSession, root: int) -> None:
        if session.branches is not None:
            state = session.work.state
            num_text = min(state.num_tokens, state.num_prompt_tokens + len(session.line.output))
            state.keep_path(num_text, session.branches.move(root))
        elif session.dynamic_tree is not None:
            session.dynamic_tree.move_along(root)

    def _restart(self, session: DraftSession, order: RestartLine) -> None:
        line = session.line
        if order.keep > len(line.output):
            raise ProtocolViolation(f"a restart keeps {order.keep} tokens, but the line has {len(line.output)}")
        if any(token >= self._model.info.vocab_size for token in order.suffix):
            raise ProtocolViolation("a restart has a token outside the vocabulary")
        output = [*line.output[: order.keep], *order.suffix]
        session.line = DraftLine(order.epoch, order.write_until, order.first_chunk, output)
        session.num_sent = len(output)
        session.proposals.clear()
        session.keep_rows(line.output, order)
        session.plant()

    def _room(self, session: DraftSession) -> int:
        """Output tokens that the context allows; the last one is written and never read."""
        state = session.work.state
        num_read = state.num_tokens - state.num_prompt_tokens
        return self._model.info.max_context - (state.next_position - num_read) + 1

    def _may_grow(self, session: DraftSession) -> bool:
        """A line is one tree, and ends when it is complete."""
        line = session.line
        if session.static_tree is None:
            depth = min(line.write_until, self._room(session)) - len(line.output)
            if depth <= 0:
                return False
            session.static_tree = StaticTree(tuple(line.output), depth, started_s=time.perf_counter())
        return not session.static_tree.is_complete

    def _pass(self, sessions: Sequence[DraftSession]) -> None:
        """The next token of every session, or the next few where that takes no wait between them."""
        by_itself = all(session.sampler.takes_largest for session in sessions)
        by_itself = by_itself or (len(sessions) == 1 and self._model.most_nodes > 0)
        ends = [self._end_of_line(session) for session in sessions] if by_itself else []
        num_tokens = min((room for _, room in ends), default=0)
        batch = [(s.work.state, token) for s, (token, _) in zip(sessions, ends, strict=True)] if num_tokens else []
        if not batch or not self._write_ahead(sessions, batch, num_tokens):
            self._step(sessions)

    def _write_ahead(self, sessions: Sequence[DraftSession], batch: Begun, num_tokens: int) -> bool:
        """The model writes at most so many tokens of each by itself. False, and nothing has happened: it does not."""
        ahead, started = ahead_of(sessions), time.perf_counter()
        try:
            written = self._model.write_ahead(batch, num_tokens, ahead.note)
        except Exception as error:  # a step of one token finds out whose fault it is
            self._tell_once("draft.write_ahead_failed", error)
            return False
        if written is None:
            self._most_ahead = min(self._most_ahead, len(sessions) - 1)
            return False
        if all(session.branches is not None for session in sessions):
            self._learn_ahead((time.perf_counter() - started) / len(written[0]))
        for session, token_ids, of_session in zip(sessions, written, ahead.read(), strict=True):
            self._take(session, token_ids, of_session)
        return True

    def _end_of_line(self, session: DraftSession) -> tuple[int, int]:
        """The token that a session goes on behind, and how many may follow without a look at their logits."""
        line, state = session.line, session.work.state
        write_until = min(line.write_until, self._room(session))
        num_known = state.num_tokens - state.num_prompt_tokens
        if session.static_tree is not None:
            return 0, 0
        if session.branches is not None:
            return session.branches.end_of_chain(num_known, write_until)
        if len(line.output) - num_known != 1:
            return 0, 0
        room = write_until - len(line.output)
        return line.output[-1], room if session.dynamic_tree is None else min(room, session.dynamic_tree.room)

    def _take(self, session: DraftSession, written: Sequence[int], ahead: Ahead) -> None:
        """Takes the tokens that the model has written ahead, up to the first that nobody could have chosen."""
        try:
            self._taken(session, written, ahead)
        except Exception as error:
            self._fail(session, error)

    def _taken(self, session: DraftSession, written: Sequence[int], ahead: Ahead) -> None:
        taken = [*takewhile(lambda token: 0 <= token < session.sampler.vocab_size, written)]
        state = session.work.state
        state.rollback(state.num_tokens - len(written) + len(taken))
        if not taken:
            self._step([session])
        elif session.branches is not None:
            session.branches.go_on(taken, ahead.candidates, session.sampler.vocab_size)
            self._send_in_time(session)
        else:
            self._go_on(session, taken, ahead)

    def _step(self, sessions: Sequence[DraftSession]) -> None:
        """The next token of every session; the first of a caption comes from the prefill's logits. Who joins a long
        text takes it in piece by piece before: the logits of one pass over all of it would take a gigabyte."""
        batch = [(session, session.work.state, *_piece(session.unseen)) for session in sessions]
        stepping = [(state, window) for _, state, window, _ in batch if window]
        started = time.perf_counter()
        outcomes = iter(self._outcomes(stepping))
        trees = [window for _, window in stepping if isinstance(window, TokenTree)]
        if trees and len(trees) == len(stepping):
            self._learn_rows(sum(len(tree.new_token_ids) - 1 for tree in trees), time.perf_counter() - started)
        for session, _, window, is_all in batch:
            outcome = next(outcomes) if window else session.prompt_logits
            if not isinstance(outcome, torch.Tensor):
                self._fail(session, outcome)
            elif is_all and (session.static_tree is not None or session.branches is not None):
                rows = outcome if isinstance(window, TokenTree) else outcome.view(-1, outcome.shape[-1])[-1:]
                self._grow(session, rows)
            elif is_all:
                self._choose(session, outcome[-1] if window else outcome)

    def _outcomes(self, stepping: Sequence[tuple[DecodeState, Window]]) -> Sequence[torch.Tensor | Exception]:
        """The logits behind what each of these reads."""
        if len(stepping) == 1 and (logits := self._by_rows(*stepping[0])) is not None:
            return [logits]
        return step_each(self._model.step, stepping) if stepping else ()

    def _by_rows(self, state: DecodeState, window: Window) -> torch.Tensor | None:
        """Those of one session, of few tokens: they may round as they like. None: this takes a pass, which also finds
        out what is wrong."""
        try:
            return self._model.read_nodes(state, window if isinstance(window, TokenTree) else TokenTree.chain(window))
        except Exception as error:
            self._tell_once("draft.rows_failed", error)
            return None

    def _tell_once(self, event: str, error: Exception) -> None:
        """What a pass goes on without would come again with every token: each kind of error is logged once."""
        if (told := (event, type(error))) not in self._told and not isinstance(error, SlipstreamError):
            self._told.add(told)
            get_logger().warning(event, exc_info=error)

    def _learn_rows(self, num_rows: int, seconds: float) -> None:
        """What a pass over nodes alone took, by its rows beyond one a session. The first one of so many may have
        prepared something, and is no measure."""
        if num_rows in self._prepared:
            self._row_costs.observe(num_rows, seconds)
        self._prepared.add(num_rows)

    def _learn_ahead(self, seconds: float) -> None:
        """What a token took that was written without a look at it; of the first ones as of rows."""
        if self._has_written_ahead:
            self._ahead_s.observe(seconds)
        self._has_written_ahead = True

    def _grow(self, session: DraftSession, rows: torch.Tensor) -> None:
        static_tree, sampler = session.static_tree, session.sampler
        try:
            if session.branches is not None:
                session.branches.grow(rows, sampler.candidates)
                self._send_in_time(session)
            elif static_tree is not None:
                static_tree.grow(rows, sampler.rank)
        except Exception as error:
            self._fail(session, error)
            return
        if static_tree is not None and static_tree.is_complete:
            tree, pass_s = static_tree.tree, (time.perf_counter() - static_tree.started_s) / static_tree.num_levels
            chunk = DraftTokens(session.line.epoch, len(static_tree.text), tree.token_ids, pass_s, parents=tree.parents)
            self._loop.call_soon_threadsafe(session.chunks.put_nowait, chunk)

    def _choose(self, session: DraftSession, logits: torch.Tensor) -> None:
        choosing = session.choosing()
        try:
            token = choosing.note(logits[None])
        except Exception as error:
            self._fail(session, error)
        else:
            self._go_on(session, [token], *choosing.read())

    def _go_on(self, session: DraftSession, token_ids: Sequence[int], ahead: Ahead) -> None:
        """These follow a line that is read along its main path alone."""
        if session.dynamic_tree is not None:
            session.dynamic_tree.go_on(token_ids, ahead.candidates, session.sampler.vocab_size)
        session.line.output += token_ids
        session.proposals += ahead.proposals
        self._send_in_time(session)

    def _send_in_time(self, session: DraftSession) -> None:
        is_first = 0 < session.line.first_chunk <= session.num_unsent
        if is_first or time.perf_counter() - session.chunk_started_s > FLUSH_S:
            self._send(session)

    def _send(self, session: DraftSession) -> None:
        if not session.has_unsent:
            return
        line, token_ids = session.line, session.line.output[session.num_sent :]
        seconds = time.perf_counter() - session.chunk_started_s
        if session.dynamic_tree is not None:
            chunk = session.dynamic_tree.take(seconds)
        else:
            pass_s = seconds / len(token_ids)
            chunk = DraftTokens(line.epoch, session.num_sent, tuple(token_ids), pass_s, tuple(session.proposals))
        session.proposals.clear()
        session.num_sent, line.first_chunk = len(line.output), 0
        self._loop.call_soon_threadsafe(session.chunks.put_nowait, chunk)

    def _fail(self, session: DraftSession, error: Exception | None) -> None:
        """The session's writing ends here; the others' goes on."""
        assert error is not None, "a line starts from the logits of the prompt"
        self._thread.note(error)
        self._writing.pop(session, None)
        self._open.discard(session)
        self._loop.call_soon_threadsafe(session.chunks.put_nowait, error)


def _piece(unseen: Window) -> tuple[Window, bool]:
    """What one pass takes in of it, and whether that is all."""
    if isinstance(unseen, TokenTree) or len(unseen) <= CATCH_UP:
        return unseen, True
    return unseen[:CATCH_UP], False
