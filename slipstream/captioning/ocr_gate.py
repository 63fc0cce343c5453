"""Whether the OCR's drafts pay: they save the target's passes, and a target that is faster waits for the OCR.

`OcrGate` is arithmetic without a clock, one for all documents of a gateway; an `OcrWatch` is one document's, and looks
at the clock.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slipstream.messages import Caption
from slipstream.speculation.pacing import DecayedMean

# A page's draft and the next page's picture come from one process, one after the other. So where the target has read
# all pages that are there while a draft is owed, it is *starved*, and that is all that a document loses by the OCR
# beside the core that it runs on. What it gains are the passes that hints save. Both are counted in plain pages, the
# seconds that this target takes for a page without hints:
#
#     loss = sum of (seconds starved - seconds saved) / plain page
#
# **Open**, the loss may come to a *budget*; so a starved target is waiting no longer than what is left of it
# (`patience_s`). Then the OCR is given up, in the middle of its page if need be, and the gate is **closed**: the next
# `rest` pages are read without it. The trial behind them has a smaller budget, and every trial that fails doubles the
# rest. So n pages of an OCR that never helps cost at most FIRST_BUDGET + TRIAL_BUDGET * log2(1 + n / FIRST_REST) plain
# pages, and whatever starting a reader anew takes as often, for which rests are longer. Gains are remembered down to
# -CREDIT.

FIRST_BUDGET, TRIAL_BUDGET = 0.5, 0.25
CREDIT = 1.0
"""With which the gate has proved itself, too: a trial that comes to it ends the doubt."""
FIRST_REST, LONGEST_REST = 16, 1024
LOSS_SHARE = 0.03
"""Of the pages of a rest: what giving up cost, the new reader's start included, makes it so much longer."""


class OcrGate:
    """Open at first: what is not known is measured."""

    def __init__(self) -> None:
        self.loss = 0.0
        """Plain pages that drafts have cost more than they saved since the gate opened."""
        self.num_left = 0
        """Pages of the present rest that are still to be read."""
        self._budget = FIRST_BUDGET
        self._rest = FIRST_REST
        self._page_s, self._token_s = DecayedMean(0.0), DecayedMean(0.0)

    @property
    def closed(self) -> bool:
        """Pages are read without the OCR now."""
        return self.num_left > 0

    @property
    def patience_s(self) -> float:
        """Seconds that a target may be starved from now on; without bound while no page was read."""
        if self.closed:
            return 0.0
        return max(self._budget - self.loss, 0.0) * self._page_s.value if self._page_s.weight else math.inf

    def on_page(self, page_s: float, num_tokens: int, generate_s: float, plain_pass_s: float) -> None:
        """The target read a page in `page_s`, of which `generate_s` were for the tokens behind the first; its plain
        passes took so long on average, 0 where it had none."""
        if plain_pass_s:
            self._token_s.observe(plain_pass_s)
        token_s = plain_pass_s or self._token_s.value
        saved_s = max(num_tokens - 1, 0) * token_s - generate_s if token_s else 0.0
        self._page_s.observe(max(page_s + saved_s, 0.0))
        if self.closed:
            self._rested()
        else:
            self._charge(-saved_s)

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
            self._budget, self._rest = FIRST_BUDGET, FIRST_REST
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
    """

    def __init__(self, gate: OcrGate | None = None) -> None:
        self._gate = gate
        self._num_reading = 0
        self._is_owed = False
        self._starved_since: float | None = None
        self._bound: asyncio.Timeout | None = None

    @property
    def wants_ocr(self) -> bool:
        """The pages from now on are to be read by OCR."""
        return self._gate is None or not self._gate.closed

    def on_begun(self) -> None:
        """The target begins to read a page."""
        self._num_reading += 1
        self._update()

    def on_ended(self, caption: Caption | None) -> None:
        """It has read one, or failed to."""
        self._num_reading -= 1
        if self._gate is not None and caption is not None:
            timings, plain_pass_s = caption.timings, caption.speculation.plain_pass_s
            self._gate.on_page(timings.total_s, caption.num_tokens, timings.generate_s, plain_pass_s)
        self._update()

    def on_owed(self, is_owed: bool) -> None:
        """The OCR has begun a page, or has said what it can say of it."""
        self._is_owed = is_owed
        self._update()

    def on_replaced(self, seconds: float) -> None:
        """It took so long from the OCR's end to a picture of the next reader."""
        if self._gate is not None:
            self._gate.on_starved(seconds)

    @asynccontextmanager
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
        is_starved = self._is_owed and not self._num_reading
        if self._starved_since is not None and not is_starved and self._gate is not None:
            self._gate.on_starved(now - self._starved_since)
        if not is_starved:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = now
        if self._bound is not None:
            self._bound.reschedule(self._until)
