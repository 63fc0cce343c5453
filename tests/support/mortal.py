"""A compactor and a feeder that can be killed between any two of their steps, before or after one took effect."""

from typing import Any

from slipstream.archive.queue import QueuePolicy
from slipstream.archive.results_folder import ResultsFolder
from slipstream.archive.spill_queue import SpillQueue


class Killed(BaseException):
    """What a process feels that is killed: nothing can be done about it."""


class Life:
    """How many steps are left."""

    def __init__(self) -> None:
        self.left: float = float("inf")
        self.is_after = False
        """Whether the last step still takes effect, and only its answer is lost."""

    def spend(self, *, is_after: bool) -> None:
        """Called before and after every step."""
        if is_after == self.is_after:
            self.left -= 1
            if self.left < 0:
                raise Killed


class MortalFolder(ResultsFolder):
    """Each PUT is a step."""

    def __init__(self, url: str, life: Life) -> None:
        super().__init__(url)
        self._life = life

    async def put(self, name: str, data: bytes) -> bytes | None:
        self._life.spend(is_after=False)
        there = await super().put(name, data)
        self._life.spend(is_after=True)
        return there


class MortalQueue(SpillQueue):
    """Each script is a step."""

    def __init__(self, url: str, folder: MortalFolder, name: str, policy: QueuePolicy, life: Life) -> None:
        super().__init__(url, folder, name, policy)
        self._life = life

    async def _run(self, script: str, *args: str | int | bytes) -> Any:
        self._life.spend(is_after=False)
        answer = await super()._run(script, *args)
        self._life.spend(is_after=True)
        return answer
