"""What the figures say, in sentences: first what was to be shown, then where we are worse. Pure."""

from collections.abc import Callable, Iterator

from bench.report import papers
from bench.report.positions import END_WIDTH, end_shares, num_positions
from bench.report.rows import PLAIN, Document, Row, method_named, prediction_rows, rate_of, sweep

OURS, PAPERS_OWN = "slipstream", "parallelvlm"
AIM_OVER_PAPER = 1.1
TOLERATED_ERROR = 0.1
NO_LOSS = 0.05
"""Of M, or of a speedup: less is called equal."""


def findings(document: Document) -> list[str]:
    """What the run was to show, and whether it did."""
    return [sentence for part in (_our_speed, _lossless, _over_paper, _prediction) for sentence in part(document)]


def shortfalls(document: Document) -> list[str]:
    """Where another method does better than ours, or the stack worse than predicted or promised."""
    parts: tuple[Callable[[Document], Iterator[str]], ...] = (
        _not_identical,
        _faster_lossless,
        _below_aim,
        _better_per_device,
        _later_first_token,
        _more_memory,
        _faster_lossy,
        _better_pruners,
        _better_alphas,
        _slower_with_little_video,
        _mispredicted,
    )
    return [sentence for part in parts for sentence in part(document)]


def lossless_rows(document: Document) -> list[Row]:
    """The methods of our stack that promise the plain text."""
    return [row for row in document["methods"] if not row.get("lossy") and row.get("family") != "outside"]


def _our_speed(document: Document) -> Iterator[str]:
    row = method_named(document, OURS)
    if row is None or row.get("speedup_engine") is None:
        return
    text = f"`{OURS}` decodes {row['speedup_engine']:.2f}x as fast as plain decoding by the same engine"
    if row.get("speedup_transformers") is not None:
        text += f" and {row['speedup_transformers']:.2f}x as fast as plain `transformers`"
    if row.get("end_to_end_speedup") is not None:
        text += f"; with the prefill counted in, a caption is done {row['end_to_end_speedup']:.2f}x as fast"
    yield text + "."


def _lossless(document: Document) -> Iterator[str]:
    rows = [row for row in lossless_rows(document) if row.get("identical") is not None and row["name"] != PLAIN]
    same = [row for row in rows if row["identical"] == 1.0]
    if rows:
        yield f"{len(same)} of {len(rows)} lossless methods gave the text of plain decoding on every clip."


def _over_paper(document: Document) -> Iterator[str]:
    ratio = _over_papers_own(document)
    if ratio is not None:
        met = "met" if ratio >= AIM_OVER_PAPER else "not met"
        yield (
            f"`{OURS}` has {ratio:.2f}x the tokens/s of `{PAPERS_OWN}` (paper 000 as written); the aim of "
            f"{AIM_OVER_PAPER}x is {met}."
        )


def _prediction(document: Document) -> Iterator[str]:
    error = document.get("prediction_error")
    if error is not None:
        yield f"The event simulator predicts the methods' tokens/s with a median error of {error:.0%}."


def _not_identical(document: Document) -> Iterator[str]:
    for row in lossless_rows(document):
        if row.get("identical") is not None and row["identical"] < 1.0:
            given = f"gave it on {row['identical']:.0%} of the clips"
            yield f"`{row['name']}` promises the text of plain decoding and {given}."


def _faster_lossless(document: Document) -> Iterator[str]:
    ours = rate_of(method_named(document, OURS))
    for row in lossless_rows(document):
        rate = rate_of(row)
        if ours and rate and row["name"] != OURS and rate > ours:
            yield (
                f"`{row['name']}` is faster than `{OURS}`: {rate:.0f} tokens/s against {ours:.0f} "
                f"({rate / ours:.2f}x, medians)."
            )


def _below_aim(document: Document) -> Iterator[str]:
    ratio = _over_papers_own(document)
    if ratio is not None and ratio < AIM_OVER_PAPER:
        yield f"`{OURS}` was to reach {AIM_OVER_PAPER}x of `{PAPERS_OWN}` and reaches {ratio:.2f}x."


def _better_per_device(document: Document) -> Iterator[str]:
    ours = (method_named(document, OURS) or {}).get("tokens_per_s_per_device")
    better = [
        f"`{row['name']}` {row['tokens_per_s_per_device']:.0f}"
        for row in lossless_rows(document)
        if ours and row["name"] != OURS and (row.get("tokens_per_s_per_device") or 0.0) > ours
    ]
    if better:
        yield f"Counted a device, these have more tokens/s than `{OURS}`'s {ours:.0f}: {', '.join(better)}."


def _later_first_token(document: Document) -> Iterator[str]:
    ours, plain = (method_named(document, name) or {} for name in (OURS, PLAIN))
    later = _share_above(ours.get("first_token_s"), plain.get("first_token_s"))
    if later > NO_LOSS:
        yield (
            f"`{OURS}`'s first token comes {later:.0%} later than plain decoding's "
            f"({ours['first_token_s']:.2f} s against {plain['first_token_s']:.2f} s)."
        )


def _more_memory(document: Document) -> Iterator[str]:
    ours, plain = (_memory(method_named(document, name)) for name in (OURS, PLAIN))
    more = _share_above(ours, plain)
    if more > NO_LOSS and ours and plain:
        yield (
            f"`{OURS}` needs {ours / 1e6:.0f} MB at its peak, all processes together; plain decoding "
            f"{plain / 1e6:.0f} MB."
        )


def _faster_lossy(document: Document) -> Iterator[str]:
    ours = rate_of(method_named(document, OURS))
    for row in document["methods"]:
        rate = rate_of(row)
        if row.get("lossy") and ours and rate and rate > ours:
            kept = "" if row.get("A") is None else f", with {row['A']:.1%} of its tokens the target's own choice"
            yield f"The lossy `{row['name']}` is faster: {rate:.0f} tokens/s against {ours:.0f}{kept}."


def _better_pruners(document: Document) -> Iterator[str]:
    rows = {row["pruner"]: row["M"] for row in sweep(document, "pruner") if row.get("M") is not None}
    own = rows.get("uv_spread")
    better = [f"`{name}` {length:.1f}" for name, length in rows.items() if own and length > own * (1 + NO_LOSS)]
    if better:
        yield f"These pruners have a longer M than `uv_spread`'s {own:.1f}: {', '.join(better)}."


def _better_alphas(document: Document) -> Iterator[str]:
    rows = {
        row["alpha"]: row["speedup"] for row in sweep(document, "alpha") if row["method"] == OURS and row["speedup"]
    }
    own = rows.get(0.9)
    if not own:
        return
    best = max(rows, key=lambda alpha: float(rows[alpha]))
    if rows[best] > own * (1 + NO_LOSS):
        yield f"alpha 0.9, the default, is not the fastest here: {best:g} has {rows[best]:.2f}x, 0.9 {own:.2f}x."


def _slower_with_little_video(document: Document) -> Iterator[str]:
    rows = [
        row for row in sweep(document, "video_tokens") if row["method"] == OURS and (row.get("speedup") or 1.0) < 1.0
    ]
    for row in rows:
        yield f"With {row['video_tokens']} video tokens `{OURS}` is slower than plain decoding: {row['speedup']:.2f}x."


def _mispredicted(document: Document) -> Iterator[str]:
    for row in prediction_rows(document):
        ratio = row.get("ratio")
        if ratio and abs(ratio - 1) > TOLERATED_ERROR:
            side = "below" if ratio < 1 else "above"
            cause = f" Cause: {row['cause']}" if row.get("cause") else ""
            yield f"`{row['method']}` measures {abs(ratio - 1):.0%} {side} what the event simulator predicts.{cause}"


def positional_bias(document: Document) -> list[tuple[str, float, float]]:
    """By pruner: of the tokens kept, the shares in the first and in the last positions."""
    kept = document.get("kept") or {}
    return [(name, *end_shares(positions, num_positions(kept))) for name, positions in kept.get("pruners", {}).items()]


def bias_sentence(document: Document) -> str | None:
    """Our attention's bias beside the papers'."""
    shares = {name: first + last for name, first, last in positional_bias(document)}
    if "attention" not in shares or "uv" not in shares:
        return None
    return (
        f"An even choice keeps {2 * END_WIDTH:.0%} there; attention keeps {shares['attention']:.1%} and UV-Prune "
        f"{shares['uv']:.1%}. Paper 000 reports {papers.ATTENTION_END_SHARE:.1%} of attention's tokens within "
        f"{papers.ATTENTION_END_WIDTH:.0%} of the positions, both ends together"
        + (
            "; the pocket pair shows no such bias."
            if shares["attention"] < 2 * (2 * END_WIDTH)
            else "; the pocket pair shows it too."
        )
    )


def _over_papers_own(document: Document) -> float | None:
    """Clip by clip if the document says so, else of the medians."""
    ratio: float | None = document.get("slipstream_over_parallelvlm")
    ours, theirs = (rate_of(method_named(document, name)) for name in (OURS, PAPERS_OWN))
    return ratio or (ours / theirs if ours and theirs else None)


def _share_above(ours: float | None, other: float | None) -> float:
    return ours / other - 1 if ours and other else 0.0


def _memory(row: Row | None) -> float | None:
    peaks = (row or {}).get("peak_bytes") or {}
    return sum(value for value in peaks.values() if value) or None
