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
from slipstream.engine.draft_session import Ahead, DraftSession, PassCosts, ahead_of
from slipstream.engine.forward import Begun, DecodeState
from slipstream.engine.segments import Window
from slipstream.engine.thread import Lane, ModelThread
from slipstream.engine.video_lm import VideoLM
from slipstream.errors import ProtocolViolation, SlipstreamError
from slipstream.logs import get_logger
from slipstream.speculation.pacing import PassMean, WindowCosts
from slipstream.speculation.protocol import JoinPoint, MoveLine, RestartLine, TokenTree
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
        if first.line.chance is None:
            return [first]
        return [max(sessions, key=lambda session: session.line.chance or 0.0)]

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
            if session.line.has_unsent:
                self._send_in_time(session)  # others may have had their turns
            if not session.line.has_unsent:
                session.chunk_started_s = time.perf_counter()
            if session.line.goes_on(self._end(session), partial(self._costs, session)):
                return True
            self._send(session)
        except Exception as error:
            self._fail(session, error)
        return False

    def _costs(self, session: DraftSession) -> PassCosts:
        """Of the session's next pass, alone or with all others that write."""
        num_sharing = 1 if self._take_turns else max(len(self._writing), 1)
        pass_s = partial(share_s, self._row_costs.line(), num_sharing)
        most_drawn = min(self._most_ahead, self._model.most_nodes, 1)
        most_ahead = self._most_ahead if session.line.sampler.takes_largest else most_drawn
        ahead_s = min(self._ahead_s.value / num_sharing, pass_s(1)) if num_sharing <= most_ahead else math.inf
        return PassCosts(pass_s, ahead_s, self._is_thrifty)

    def _carry_out(self, session: DraftSession) -> None:
        order, line = session.orders.popleft(), session.line
        if isinstance(order, RestartLine):
            self._restart(session, order)
        elif order.epoch == line.epoch:
            line.write_until = order.write_until
            if isinstance(order, MoveLine):
                line.move(session.work.state, order.root)

    def _restart(self, session: DraftSession, order: RestartLine) -> None:
        line = session.line
        if order.keep > len(line.output):
            raise ProtocolViolation(f"a restart keeps {order.keep} tokens, but the line has {len(line.output)}")
        if any(token >= self._model.info.vocab_size for token in order.suffix):
            raise ProtocolViolation("a restart has a token outside the vocabulary")
        text = (*line.output[: order.keep], *order.suffix)
        line.keep_rows(session.work.state, order)
        session.line = session.begin(JoinPoint(order.epoch, text, order.write_until, order.first_chunk))

    def _end(self, session: DraftSession) -> int:
        """Output tokens that the line may come to: as it was told, and as the context allows. The last one is written
        and never read."""
        room = self._model.info.max_context - (session.work.state.next_position - session.num_known) + 1
        return min(session.line.write_until, room)

    def _pass(self, sessions: Sequence[DraftSession]) -> None:
        """The next token of every session, or the next few where that takes no wait between them."""
        by_itself = all(session.line.sampler.takes_largest for session in sessions)
        by_itself = by_itself or (len(sessions) == 1 and self._model.most_nodes > 0)
        ends = [s.line.end_of_chain(s.num_known, self._end(s)) for s in sessions] if by_itself else []
        num_tokens = min((room for _, room in ends), default=0)
        batch = [(s.work.state, token) for s, (token, _) in zip(sessions, ends, strict=True)] if num_tokens else []
        if not batch or not self._write_ahead(sessions, batch, num_tokens):
            self._step(sessions)

    def _write_ahead(self, sessions: Sequence[DraftSession], batch: Begun, num_tokens: int) -> bool:
        """The model writes at most so many tokens of each by itself. False, and nothing has happened: it does not."""
        ahead, started = ahead_of([session.line for session in sessions]), time.perf_counter()
        try:
            written = self._model.write_ahead(batch, num_tokens, ahead.note)
        except Exception as error:  # a step of one token finds out whose fault it is
            self._tell_once("draft.write_ahead_failed", error)
            return False
        if written is None:
            self._most_ahead = min(self._most_ahead, len(sessions) - 1)
            return False
        if all(session.line.chance is not None for session in sessions):
            self._learn_ahead((time.perf_counter() - started) / len(written[0]))
        for session, token_ids, of_session in zip(sessions, written, ahead.read(), strict=True):
            self._take(session, token_ids, of_session)
        return True

    def _take(self, session: DraftSession, written: Sequence[int], ahead: Ahead) -> None:
        """Takes the tokens that the model has written ahead, up to the first that nobody could have chosen."""
        try:
            self._taken(session, written, ahead)
        except Exception as error:
            self._fail(session, error)

    def _taken(self, session: DraftSession, written: Sequence[int], ahead: Ahead) -> None:
        state, vocab_size = session.work.state, session.line.sampler.vocab_size
        taken = [*takewhile(lambda token: 0 <= token < vocab_size, written)]
        state.rollback(state.num_tokens - len(written) + len(taken))
        if not taken:
            self._step([session])
            return
        session.line.go_on(taken, ahead)
        self._send_in_time(session)

    def _step(self, sessions: Sequence[DraftSession]) -> None:
        """The next token of every session; the first of a caption comes from the prefill's logits. Who joins a long
        text takes it in piece by piece before: the logits of one pass over all of it would take a gigabyte."""
        batch = [(session, session.work.state, *_piece(session.line.unseen(session.num_known))) for session in sessions]
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
            elif is_all:
                rows = outcome if isinstance(window, TokenTree) else outcome.view(-1, outcome.shape[-1])[-1:]
                self._read(session, rows)

    def _read(self, session: DraftSession, rows: torch.Tensor) -> None:
        """The logits [n, vocab] behind what the line's pass took in."""
        try:
            session.line.read(rows)
            self._send_in_time(session)
        except Exception as error:
            self._fail(session, error)

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

    def _send_in_time(self, session: DraftSession) -> None:
        is_first = 0 < session.line.first_chunk <= session.line.num_unsent
        if is_first or time.perf_counter() - session.chunk_started_s > FLUSH_S:
            self._send(session)

    def _send(self, session: DraftSession) -> None:
        line = session.line
        if line.has_unsent:
            chunk = line.take(time.perf_counter() - session.chunk_started_s)
            line.first_chunk = 0
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
