"""An archive whose prompts ride along, in simulated time: the target's own planner over devices that are given.

Two clips at a time, plain or speculative, at the working points of the end-to-end table of the study of trees. Without
rides a prompt's layers and passes take turns, as the target's lanes have it; with rides passes carry rows. What nobody
has measured is how much of a decoding pass hides the rows' arithmetic: `overlap`, 1 all of it, 0 none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.common import make_parser
from bench.output import finish
from bench.tables import print_rows
from slipstream.engine.ride_plan import RideCounts, RidePlanner, alone_counts

NOTHING = RideCounts(0, 0)
OVERLAPS = (1.0, 0.5, 0.0)


@dataclass(frozen=True)
class Point:
    """A pair on a device: seconds, and what the study says that decoding 512 tokens takes."""

    name: str
    prefill_s: float
    prompt_rows: int
    pass_s: float
    decode_s: float
    num_layers: int = 80

    @property
    def num_passes(self) -> int:
        return round(self.decode_s / self.pass_s)

    @property
    def row_s(self) -> float:
        return self.prefill_s / self.prompt_rows

    def work(self, counts: RideCounts) -> float:
        """So many rows as if all of them ran through all layers; L is at a quarter of those."""
        return 0.25 * counts.first + 0.75 * counts.second


POINTS = (
    Point("7B/72B plain", 44.2, 25_088, 0.42, 215.0),
    Point("7B/72B slipstream", 44.2, 25_088, 0.42, 78.0),
    Point("7B/72B slipstream_tree", 44.2, 25_088, 0.42, 58.0),
    Point("H100 72B plain", 3.4, 25_000, 0.035, 17.9),
    Point("H100 72B slipstream", 3.4, 25_000, 0.035, 7.5),
    Point("H200 32B plain", 4.3, 25_000, 0.016, 8.2, 64),
    Point("H200 32B slipstream", 4.3, 25_000, 0.016, 3.4, 64),
)


@dataclass
class Archive:
    """A device that captions clip after clip, `slots` at a time."""

    point: Point
    slots: int
    clips: int
    now_s: float = 0.0
    prompts: list[RideCounts] = field(default_factory=list)
    """Rows done of each that has not run; first come, first served."""
    decoding: list[int] = field(default_factory=list)
    """Passes left of each session."""
    _num_begun: int = 0

    @property
    def goes_on(self) -> bool:
        """There is a clip to caption; as many as there is room for have begun."""
        while len(self.prompts) + len(self.decoding) < self.slots and self._num_begun < self.clips:
            self.prompts.append(NOTHING)
            self._num_begun += 1
        return bool(self.prompts or self.decoding)

    def decode(self, carried_s: float = 0.0) -> float:
        """One pass over all that decode, with rows that take so much longer; its seconds."""
        taken_s = self.point.pass_s + carried_s
        self.decoding = [left - 1 for left in self.decoding if left > 1]
        self.now_s += taken_s
        return taken_s

    def advance(self, counts: RideCounts) -> None:
        """These rows of the first prompt have run."""
        done = RideCounts(self.prompts[0].first + counts.first, self.prompts[0].second + counts.second)
        self.prompts[0] = done
        if done.second >= self.point.prompt_rows:
            self.prompts.pop(0)
            self.decoding.append(self.point.num_passes)


def in_turns(archive: Archive) -> float:
    """Seconds a clip where a layer of a prompt and passes take turns, for as long each."""
    point, rows = archive.point, archive.point.prompt_rows
    decoded_s = prefilled_s = 0.0
    num_layers = 0
    while archive.goes_on:
        if archive.prompts and (not archive.decoding or prefilled_s <= decoded_s):
            archive.now_s += point.prefill_s / point.num_layers
            prefilled_s += point.prefill_s / point.num_layers if archive.decoding else 0.0
            num_layers += 1
            if num_layers == point.num_layers:
                num_layers = 0
                archive.advance(RideCounts(rows, rows))
        else:
            taken_s = archive.decode()
            decoded_s += taken_s if archive.prompts else 0.0
    return archive.now_s / archive.clips


def riding(archive: Archive, planner: RidePlanner, overlap: float) -> float:
    """Seconds a clip where passes carry rows."""
    point = archive.point
    while archive.goes_on:
        if not archive.decoding:
            counts = alone_counts(archive.prompts[0], point.prompt_rows)
            taken_s = point.work(counts) * point.row_s
            planner.observe_alone(point.work(counts), taken_s)
            archive.now_s += taken_s
            archive.advance(counts)
            continue
        num_rows, counts = len(archive.decoding), NOTHING
        if archive.prompts:
            counts = planner.next_counts(num_rows, archive.prompts[0], point.prompt_rows, beside_people=False)
        rows_s = point.work(counts) * point.row_s
        hidden_s = overlap * min(rows_s, max(point.pass_s - num_rows * point.row_s, 0.0))
        planner.observe(num_rows, counts, archive.decode(rows_s - hidden_s))
        if counts.most:
            archive.advance(counts)
    return archive.now_s / archive.clips


def measure(shares: Sequence[float], slots: int, clips: int) -> list[dict[str, Any]]:
    """A row for each point and share."""
    rows = []
    for point in POINTS:
        before_s = in_turns(Archive(point, slots, clips))
        for share in shares:
            row: dict[str, Any] = {"point": point.name, "prefill_s": point.prefill_s, "decode_s": point.decode_s}
            row |= {"clip_s": round(before_s, 2), "share": share}
            for overlap in OVERLAPS:
                after_s = riding(Archive(point, slots, clips), RidePlanner(share), overlap)
                row[f"faster at {overlap:g}"] = round(before_s / after_s, 3)
            rows.append(row)
    return rows


def main(argv: Sequence[str]) -> None:
    flags: dict[str, Any] = {"shares": ([0.1, 0.3, 1.0], "the target's --ride-along"), "slots": 2, "clips": 24}
    given = make_parser("simulate-rides", "An archive that rides along, in simulated time.", **flags).parse_args(argv)
    rows = measure(given.shares, given.slots, given.clips)
    print_rows("SIMULATED: an archive's clips, how much faster with rides, by what a pass hides", rows)
    finish("simulate-rides", {"slots": given.slots, "clips": given.clips, "rows": rows})
