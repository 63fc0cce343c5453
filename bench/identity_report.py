"""What the identity run found, for people. Knows only the JSON document."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from bench.report import make_console, make_table, number


def show(document: Mapping[str, Any]) -> None:
    """Prints the coverage, the differences and the verdict."""
    console = make_console()
    console.print(_coverage_table(document))
    for difference in document["differences"]:
        console.print(
            f"{difference['clip']} differs at token {difference['position']}: expected {difference['expected']}, got "
            f"{difference['got']}; the reference's best led by {difference['reference_margin']:.2e}; "
            f"{difference['setting']}",
            highlight=False,
        )
    guidance = document["guidance"]
    columns = {
        "guidance": lambda row: str(row["kind"]),
        "video tokens": number("video_tokens", ".0f"),
        "bytes": number("bytes", ",.0f"),
    }
    rows = [
        {"kind": kind, "video_tokens": video_tokens, "bytes": num_bytes}
        for kind, sizes in guidance["bytes_by_video_tokens"].items()
        for video_tokens, num_bytes in sizes.items()
    ]
    console.print(make_table("guidance on the wire", columns, rows))
    console.print(
        f"both kinds keep the same tokens in {guidance['pairs_that_keep_the_same_tokens']} of "
        f"{guidance['pairs_compared']} pairs"
    )
    console.print(
        f"identical: {document['identical']} clips, {document['comparisons_identical']} of "
        f"{document['comparisons']} texts, {document['tokens_compared']} tokens"
    )


def _coverage_table(document: Mapping[str, Any]) -> Table:
    table = Table("setting", "how many texts had it", title="what was compared", title_justify="left", box=None)
    levels = document["coverage"] | {"ended by": document["endings"]}
    for name, counts in levels.items():
        table.add_row(name, "  ".join(f"{level}: {count}" for level, count in counts.items()))
    return table
