"""What the demo found, as a table and as a JSON document. Knows no service."""

import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from slipstream.cli.summary import decoding_rate
from slipstream.rpc.v1.gateway_pb2 import Summary


@dataclass(frozen=True)
class Run:
    """One caption by one method."""

    token_ids: tuple[int, ...]
    summary: Summary


@dataclass(frozen=True)
class ClipResult:
    """One clip captioned by both methods."""

    name: str
    attributes_right: int
    attributes_total: int
    plain: Run
    parallel: Run

    @property
    def identical(self) -> bool:
        """Whether speculation left text and tokens as they are."""
        same_text = self.plain.summary.text == self.parallel.summary.text
        return same_text and self.plain.token_ids == self.parallel.token_ids

    @property
    def decode_speedup(self) -> float:
        """Tokens a second after the first token, against plain decoding."""
        return _ratio(decoding_rate(self.parallel.summary), decoding_rate(self.plain.summary))

    @property
    def end_to_end_speedup(self) -> float:
        """From the request to its last token, against plain decoding."""
        return _ratio(self.plain.summary.timings.total_s, self.parallel.summary.timings.total_s)

    @property
    def first_token_ratio(self) -> float:
        """Time to the first token, against plain decoding's."""
        return _ratio(self.parallel.summary.timings.first_token_s, self.plain.summary.timings.first_token_s)

    def row(self) -> dict[str, Any]:
        """The clip's figures under the names of the JSON document."""
        speculation = self.parallel.summary.speculation
        return {
            "clip": self.name,
            "caption": self.parallel.summary.text,
            "num_tokens": self.parallel.summary.num_tokens,
            "attributes_right": self.attributes_right,
            "attributes_total": self.attributes_total,
            "plain_tokens_per_s": decoding_rate(self.plain.summary),
            "parallel_tokens_per_s": decoding_rate(self.parallel.summary),
            "decode_speedup": self.decode_speedup,
            "end_to_end_speedup": self.end_to_end_speedup,
            "first_token_ratio": self.first_token_ratio,
            "tau": speculation.tau,
            "mean_accepted_length": speculation.mean_accepted_length,
            "c": speculation.speed_ratio,
            "kept_tokens": speculation.kept_tokens,
            "video_tokens": self.parallel.summary.video.video_tokens,
            "identical": self.identical,
        }


MEDIANS = (
    "plain_tokens_per_s",
    "parallel_tokens_per_s",
    "decode_speedup",
    "end_to_end_speedup",
    "first_token_ratio",
    "tau",
    "mean_accepted_length",
    "c",
    "kept_tokens",
    "video_tokens",
)


def demo_document(results: Sequence[ClipResult], frames: int) -> dict[str, Any]:
    """Medians over the clips, the share of right attributes, and a row for each clip."""
    rows = [result.row() for result in results]
    total = sum(row["attributes_total"] for row in rows)
    return {
        "clips": len(rows),
        "frames": frames,
        "identical": all(row["identical"] for row in rows),
        "attribute_accuracy": _ratio(sum(row["attributes_right"] for row in rows), total),
        **{name: statistics.median(row[name] for row in rows) for name in MEDIANS},
        "rows": rows,
    }


SHOWN_CAPTION = 120
"""Characters of a caption in the table; the document holds all of it."""

_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "right": lambda row: f"{row['attributes_right']}/{row['attributes_total']}",
    "plain\ntok/s": lambda row: f"{row['plain_tokens_per_s']:.1f}",
    "parallel\ntok/s": lambda row: f"{row['parallel_tokens_per_s']:.1f}",
    "decode": lambda row: f"{row['decode_speedup']:.2f}x",
    "end to\nend": lambda row: f"{row['end_to_end_speedup']:.2f}x",
    "tau": lambda row: f"{row['tau']:.2f}",
    "M": lambda row: f"{row['mean_accepted_length']:.1f}",
    "c": lambda row: f"{row['c']:.1f}",
    "kept\ntokens": lambda row: f"{row['kept_tokens']}/{row['video_tokens']}",
    "iden-\ntical": lambda row: "yes" if row["identical"] else "NO",
}


def demo_table(results: Sequence[ClipResult]) -> Table:
    """One row a clip; the caption takes the width that the figures leave."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("clip", no_wrap=True)
    table.add_column("caption", min_width=16)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in (result.row() for result in results):
        cells = [cell(row) for cell in _COLUMNS.values()]
        caption = textwrap.shorten(row["caption"], SHOWN_CAPTION, placeholder="...")
        table.add_row(row["clip"].removeprefix("clip-"), Text(caption), *cells)
    return table


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
