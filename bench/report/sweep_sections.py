"""The page's sections on the sweeps: one parameter is varied, the others stay. Pure."""

from collections.abc import Collection

from bench.report import papers
from bench.report.markdown import markdown_table, plot, section
from bench.report.rows import Document, sweep
from bench.report.terminal import Cell, number, share, text

_SWEEP: dict[str, Cell] = {
    "method": text("method"),
    "tok/s": number("tokens_per_s", ".1f"),
    "speedup": number("speedup", ".2f"),
    "M": number("M", ".1f"),
    "tau": number("tau", ".3f"),
    "T_p(0) ms": number("T_p0", ".1f", 1e3),
    "T_q ms": number("T_q", ".2f", 1e3),
    "c": number("c", ".1f"),
    "gamma used": number("gamma", ".1f"),
    "kept": number("kept_tokens", ".0f"),
    "identical": share("identical"),
}
_ALPHA_OF_PAPER: dict[str, Cell] = {
    "alpha": number("alpha", ".2f"),
    "T_q ms": number("draft_pass_ms", ".1f"),
    "M": number("M", ".2f"),
    "tau": number("tau", ".2f"),
    "speedup": number("speedup", ".2f"),
}


def video_tokens(document: Document, plots: Collection[str]) -> str:
    """How speed depends on the length of the video."""
    rows = sweep(document, "video_tokens")
    if not rows:
        return ""
    columns = {"video tokens": number("video_tokens", ".0f"), "frames": number("frames", ".0f"), **_SWEEP}
    return section(
        "Length of the video",
        plot("video_tokens", "speedup against video tokens", plots),
        markdown_table(columns, rows),
    )


def alpha(document: Document, plots: Collection[str]) -> str:
    """How it depends on what the draft sees of the video, beside the papers' tables."""
    rows = sweep(document, "alpha")
    if not rows:
        return ""
    drawn = plot("alpha", "T_q, M and speedup against alpha", plots)
    beside = (
        f"Paper 000, tables 3 and 7 and figure 6, {papers.PAIRS['large']} with T_p = {papers.ALPHA_TARGET_MS:.0f} ms "
        "(2.94 is an average over benchmarks, of which 3.36 is the value at alpha 0.9; the other speedups are of "
        "VideoDetailCaption):"
    )
    table = markdown_table({"alpha": number("alpha", ".2f"), **_SWEEP}, rows)
    return section(
        "Pruned share of the draft's video",
        drawn,
        table,
        beside,
        markdown_table(_ALPHA_OF_PAPER, [vars(point) for point in papers.ALPHA]),
    )


def pruners(document: Document, plots: Collection[str]) -> str:
    """How it depends on which tokens those are."""
    rows = sweep(document, "pruner")
    if not rows:
        return ""
    rows = sorted(rows, key=lambda row: -float(row.get("M") or 0.0))
    least, most = papers.UNGUIDED_LOSS
    return section(
        "Pruners",
        plot("pruners", "M by pruner", plots),
        markdown_table({"pruner": text("pruner"), **_SWEEP}, rows),
        f"Paper 000 (figure 7b, M of UV-Prune 6.82): SpecVLM's pruner {papers.SPECVLM_LOSS:+.1f}, pruners without the "
        f"target's guidance {least:+.1f} to {most:+.1f}.",
    )


def other_sweeps(document: Document, plots: Collection[str]) -> str:
    """By speed ratio, by window length, by threads."""
    parts = []
    if rows := sweep(document, "c"):
        table = markdown_table(
            {"draft": lambda row: str(row.get("draft", "-")).replace("(replay)", "(REPLAY)"), **_SWEEP}, rows
        )
        words = (
            "Drafts marked REPLAY wait so that each of their passes lasts as long as said; the others run as they do."
        )
        parts.append(section("Speed ratio c", plot("c", "speedup against c", plots), words, table))
    if rows := sweep(document, "gamma"):
        table = markdown_table({"gamma": number("asked_gamma", ".0f"), **_SWEEP}, rows)
        parts.append(section("Window", plot("gamma", "speedup against gamma", plots), table))
    if rows := sweep(document, "threads"):
        table = markdown_table({"threads": number("threads", ".0f"), "cores": number("cores", ".0f"), **_SWEEP}, rows)
        parts.append(section("Threads of the target", table))
    return "\n\n".join(parts)
