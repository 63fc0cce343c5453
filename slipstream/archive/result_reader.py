"""Reads finished jobs back from result files: by position, a block at a time, the latest blocks kept."""

from collections import OrderedDict
from collections.abc import Sequence

from slipstream.archive.queue import DamagedRecord
from slipstream.archive.result_files import LINES, FinishedJob, ResultFile, read_block
from slipstream.archive.results_folder import ResultsFolder

CACHE_BYTES = 8 * 1024**2
"""Of compressed blocks; what they hold is some five times as much."""


class ResultReader:
    """Of one folder, for all batches."""

    def __init__(self, folder: ResultsFolder) -> None:
        self._folder = folder
        self._blocks: OrderedDict[tuple[str, int], tuple[int, list[FinishedJob]]] = OrderedDict()
        """Compressed bytes and jobs by name of the file and number of the block, the latest used last."""
        self._num_bytes = 0

    async def find(self, files: Sequence[ResultFile], positions: Sequence[int]) -> dict[int, FinishedJob]:
        """The jobs at these ascending positions of a batch that has these files. Raises `DamagedRecord` for a position
        that none of them has, `ObjectNotFound` for a file that somebody removed."""
        found: dict[int, FinishedJob] = {}
        left = list(positions)
        for file in files:
            for number in file.blocks_of(left):
                wanted = set(left)
                found |= {job.position: job for job in await self._block(file, number) if job.position in wanted}
            left = [position for position in left if position not in found]
        if left:
            raise DamagedRecord(
                f"{len(left)} finished jobs are in none of the {len(files)} result files of their batch"
            )
        return found

    async def _block(self, file: ResultFile, number: int) -> list[FinishedJob]:
        key = (file.name, number)
        if key not in self._blocks:
            start, end = file.span(number)
            jobs = read_block(await self._folder.read_range(file.name + LINES, start, end))
            if key not in self._blocks:
                self._blocks[key] = (end - start, jobs)
                self._num_bytes += end - start
            while self._num_bytes > CACHE_BYTES and len(self._blocks) > 1:
                _, (gone, _) = self._blocks.popitem(last=False)
                self._num_bytes -= gone
            return jobs
        self._blocks.move_to_end(key)
        return self._blocks[key][1]
