"""Whether the OCR's drafts pay: they save the target's passes, and a target that is faster waits for the OCR.

`OcrGate` is arithmetic without a clock, one for all documents of a gateway; an `OcrWatch` is one document's, and looks
at the clock.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

from slipstream.messages import Caption
from slipstream.speculation.pacing import DecayedMean

# A page's draft and the next page's picture come from one process, one after the other. So a document with drafts takes
# what the OCR takes, or longer, and drafts can pay only where the target takes longer for a plain page than the OCR
# does. Before both are known nothing is tried that the target would have to wait for: it is left alone with a page for
# as long as the OCR would take (`head_start_s`). A page that outlasts this is read by a second reader beside, which is
# given up as soon as the target has done with the page. That tells what the OCR takes, or that it takes longer.
#
# Where the OCR is asked for, its worth is measured. Where the target has read all pages that are there while a draft is
# owed, it is *starved*, and that is all that a document loses by the OCR beside the core that it runs on. What it gains
# are the passes that hints save. Both are counted in plain pages, the seconds that this target takes for a page without
# hints:
#
#     loss = sum of (seconds starved - seconds saved) / plain page
#
# **Open**, the loss may come to a *budget*; so a starved target is waiting no longer than what is left of it
# (`patience_s`). Then the OCR is given up, in the middle of its page if need be, and the gate is **closed**: the next
# `rest` pages are read without it. Every trial that fails doubles the rest. So n pages of an OCR that never helps cost
# at most TRIAL_BUDGET * (1 + log2(1 + n / FIRST_REST)) plain pages, and whatever starting a reader anew takes as often,
# for which rests are longer. Gains are remembered down to -CREDIT.

TRIAL_BUDGET, PROVEN_BUDGET = 0.25, 0.5
CREDIT = 1.0
"""With which the gate has proved itself, too: a trial that comes to it ends the doubt."""
FIRST_REST, LONGEST_REST = 16, 1024
LOSS_SHARE = 0.03
"""Of the pages of a rest: what giving up cost, the new reader's start included, makes it so much longer."""
EXPECTED_OCR_S = 1.5
"""Seconds of the OCR for a page before one was seen; 0.5 to 1.9 were measured on a core of its own."""
FADING = 1 / 64
"""Each page without it takes what is known of a slow OCR so much nearer to what is expected: its machine was busy."""


class OcrGate:
    """Knows nothing at first, and remembers over all documents."""

    def __init__(self) -> None:
        self.loss = 0.0
        """Plain pages that drafts have cost more than they saved since the gate opened."""
        self.num_left = 0
        """Pages of the present rest that are still to be read."""
        self._budget = TRIAL_BUDGET
        self._rest = FIRST_REST
        self._page_s, self._token_s = DecayedMean(0.0), DecayedMean(0.0)
        self._ocr_s = DecayedMean(EXPECTED_OCR_S)

    @property
    def closed(self) -> bool:
        """Pages are read without the OCR now."""
        return self.num_left > 0

    @property
    def expects_gain(self) -> bool:
        """The target is known to take longer for a page than the OCR."""
        return not self.closed and self._page_s.value > self._ocr_s.value

    @property
    def head_start_s(self) -> float:
        """Seconds that a page is read before the OCR is worth while that was not asked for."""
        return 0.0 if self.expects_gain else self._ocr_s.value

    @property
    def patience_s(self) -> float:
        """Seconds that a target may be starved from now on; without bound while no page was read."""
        if self.closed:
            return 0.0
        return max(self._budget - self.loss, 0.0) * self._page_s.value if self._page_s.weight else math.inf

    def on_page(
        self,
        page_s: float,
        num_tokens: int,
        generate_s: float,
        plain_pass_s: float,
        *,
        by_ocr: bool = True,
        at_once: int = 1,
    ) -> None:
        """The target read a page.

        Args:
            page_s: seconds that it took, of which `generate_s` were for the tokens behind the first.
            plain_pass_s: what its plain passes took on average, 0 where it had none.
            by_ocr: a draft was asked for.
            at_once: pages that were read then, this one included. A document takes and saves that share of what one of
                them takes and saves.
        """
        if plain_pass_s:
            self._token_s.observe(plain_pass_s)
        token_s = plain_pass_s or self._token_s.value
        saved_s = (max(num_tokens - 1, 0) * token_s - generate_s) / at_once if token_s else 0.0
        self._page_s.observe(max(page_s / at_once + saved_s, 0.0))
        if self._ocr_s.value > EXPECTED_OCR_S:
            self._ocr_s.value += (EXPECTED_OCR_S - self._ocr_s.value) * FADING
        if self.closed:
            self._rested()
        elif by_ocr:
            self._charge(-saved_s)

    def on_ocr(self, seconds: float, *, is_done: bool = True) -> None:
        """The OCR took so long for a page, or had not done with it by then: it is taken for twice as slow."""
        taken_s = seconds if is_done else 2 * seconds
        if is_done or taken_s > self._ocr_s.value:
            self._ocr_s.observe(taken_s)

    def on_starved(self, seconds: float) -> None:
        """The target had no page to read for so long, while the OCR was at work, or a new reader came in its place."""
        if not self.closed:
            self._charge(seconds)
        elif self._page_s.value:
            more = int(seconds / self._page_s.value / LOSS_SHARE)
            self.num_left = min(self.num_left + more, LONGEST_REST)

    def close(self) -> None:
        """The OCR is given up: a rest begins."""
        if not self.closed:
            self.num_left, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)

    def _charge(self, seconds: float) -> None:
        if not self._page_s.value:
            return
        self.loss = max(self.loss + seconds / self._page_s.value, -CREDIT)
        if self.loss <= -CREDIT:
            self._budget, self._rest = PROVEN_BUDGET, FIRST_REST
        elif self.loss > self._budget:
            self.close()

    def _rested(self) -> None:
        self.num_left -= 1
        if not self.closed:
            self.loss, self._budget = 0.0, TRIAL_BUDGET


class OcrGivenUp(Exception):
    """The target was starved for as long as it may be."""


class OcrWatch:
    """What the target reads of one document, and whether a draft is owed meanwhile.

    Args:
        gate: is told what drafts cost and save; None: the OCR is asked for and waited for in any case.
        pages_at_once: that the target reads.
    """

    def __init__(self, gate: OcrGate | None = None, pages_at_once: int = 1) -> None:
        self._gate = gate
        self._pages_at_once = pages_at_once
        self._num_shown = self._num_reading = self._num_ended = 0
        self._has_ended = asyncio.Event()
        self._asks_ocr = gate is None
        self._owed_since: float | None = None
        self._starved_since: float | None = None
        self._bound: asyncio.Timeout | None = None

    @property
    def wants_ocr(self) -> bool:
        """The pages from now on are to be read by OCR: a gain is expected, or it is at work and not given up."""
        return self._gate is None or self._gate.expects_gain or (self._asks_ocr and not self._gate.closed)

    def on_asked(self, *, ocr: bool) -> None:
        """A reader was asked for the pages that are left."""
        self._asks_ocr = ocr

    def on_shown(self, *, is_owed: bool = False) -> None:
        """The picture of one more page is there. `is_owed`: the OCR begins with it."""
        self._num_shown += 1
        if is_owed:
            self._owed_since = asyncio.get_running_loop().time()
            self._update()

    def on_begun(self) -> None:
        """The target begins to read a page."""
        self._num_reading += 1
        self._update()

    def on_ended(self, caption: Caption | None) -> None:
        """It has read one, or failed to."""
        if self._gate is not None and caption is not None:
            timings, plain_pass_s = caption.timings, caption.speculation.plain_pass_s
            self._gate.on_page(
                timings.total_s,
                caption.num_tokens,
                timings.generate_s,
                plain_pass_s,
                by_ocr=self._asks_ocr,
                at_once=self._num_reading,
            )
        self._num_reading -= 1
        self._num_ended += 1
        self._has_ended.set()
        self._update()

    def on_drafted(self, seconds: float | None) -> None:
        """All has been said of a page that is to be said, by an OCR that took so long; None: by none."""
        if self._gate is not None and seconds is not None:
            self._gate.on_ocr(seconds)
        self._owed_since = None
        self._update()

    def on_slower(self, seconds: float) -> None:
        """The OCR had not done with a page after so long."""
        if self._gate is not None:
            self._gate.on_ocr(seconds, is_done=False)

    async def wait_room(self) -> None:
        """Returns when the target reads fewer pages than it may."""
        while self._num_shown - self._num_ended >= self._pages_at_once:
            self._has_ended.clear()
            await self._has_ended.wait()

    async def is_outlasted(self) -> bool:
        """Whether the target reads pages, and has no room for another one, for longer than the OCR would take; False as
        soon as it has room."""
        if self._gate is None or self._gate.closed:
            return False
        try:
            async with asyncio.timeout(self._gate.head_start_s):
                await self.wait_room()
        except TimeoutError:
            return not self._gate.closed
        return False

    def on_replaced(self, seconds: float) -> None:
        """It took so long from the OCR's end to a picture of the next reader."""
        if self._gate is not None:
            self._gate.on_starved(seconds)

    @contextlib.asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Raises `OcrGivenUp` in the block as soon as the target was starved for too long."""
        bound = asyncio.timeout_at(self._until)
        try:
            async with bound:
                self._bound = bound
                yield
        except TimeoutError:
            if not bound.expired() or self._gate is None:
                raise
            if self._owed_since is not None:
                self.on_slower(asyncio.get_running_loop().time() - self._owed_since)
            self._gate.close()
            raise OcrGivenUp from None
        finally:
            self._bound = None

    @property
    def _until(self) -> float | None:
        """When the OCR is given up, as the loop counts."""
        if self._starved_since is None or self._gate is None or self._gate.patience_s == math.inf:
            return None
        return self._starved_since + self._gate.patience_s

    def _update(self) -> None:
        now = asyncio.get_running_loop().time()
        is_starved = self._owed_since is not None and not self._num_reading
        if self._starved_since is not None and not is_starved and self._gate is not None:
            self._gate.on_starved(now - self._starved_since)
        if not is_starved:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = now
        if self._bound is not None:
            self._bound.reschedule(self._until)
