"""The archive at scale, part by part; see `PARTS`."""

import argparse
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.archive_audit import run_audit
from bench.archive_duplicates import run_duplicates, told_apart
from bench.archive_estimate import run_bucket_estimate, run_estimate
from bench.archive_formats import run_damaged, run_formats
from bench.archive_manifest import run_manifest
from bench.archive_placement import run_placement
from bench.archive_put import run_put
from bench.archive_search import run_search
from bench.archive_spill import run_spill
from bench.common import MODELS, machine_facts, make_parser, run_parts, run_to_end
from bench.film_kills import run_bucket_film, run_film
from bench.film_lookup import run_lookup
from bench.film_prompts import run_prompts
from bench.output import finish
from bench.spill_steps import run_steps

Report = Mapping[str, Any]


FILM_ZEROS = (
    *("shots_wrong", "clips_differing"),
    *("not_done", "missing", "differing", "kept_twice", "begun_after_kept"),
)

SPILL_ZEROS = ("results_missing", "results_doubled", "contents_lost", "contents_invented", "over_memory")


@dataclass(frozen=True)
class Part:
    """One question, how it is asked by default, and which answers are good enough."""

    run: Callable[[argparse.Namespace], Coroutine[Any, Any, Report]]
    flags: Mapping[str, Any]
    zeros: tuple[str, ...] = ()
    """Figures of its report that must be 0."""
    at_most: Mapping[str, float] = field(default_factory=dict)
    check: Callable[[Report], bool] = lambda report: True

    def passes(self, report: Report) -> bool:
        """Whether every figure is there and within its bound."""
        bounds = dict.fromkeys(self.zeros, 0.0) | dict(self.at_most)
        return all(report[name] <= most for name, most in bounds.items()) and self.check(report)


def in_time(report: Report) -> bool:
    """Whether each segment of a film begins and ends within one frame step of its scene."""
    return bool(report["largest_time_error_s"] <= report["frame_step_s"])


def fast_enough(report: Report) -> bool:
    """Whether as many jobs a second went through as were asked for, whatever else the machine did."""
    return bool(report["jobs_per_s"] >= report["rate_asked"])


def in_ranges(report: Report) -> bool:
    """Whether no gateway fetched more of the film than the segments that it had to read."""
    return bool(0 < report["fetched_bytes"] <= report["needed_bytes"])


PARTS = {
    # A long film in segments, whose processes are killed at random points.
    "film": Part(
        run_film,
        {
            "segments": (60, "of the film"),
            "seconds": (10, "of a segment"),
            "frames": 8,
            "max_new_tokens": 48,
            "kills": (20, "at random points"),
        },
        zeros=FILM_ZEROS,
        check=in_time,
    ),
    # The same, of a film in a bucket; `--segments` and its like are those of `film`.
    "film-bucket": Part(
        run_bucket_film,
        {},
        zeros=FILM_ZEROS,
        check=lambda report: in_time(report) and in_ranges(report),
    ),
    # Clips of every tier, by the confined decoders.
    "formats": Part(run_formats, {}, zeros=("clips_wrong", "taken_by_the_tier_below")),
    # The same, damaged in all ways that the fault runs know.
    "damaged": Part(
        run_damaged,
        {"damaged_files": (2_000, "of old formats")},
        zeros=("failed", "files_missing", "crashed", "hung"),
    ),
    # What captions of earlier segments are worth as drafts.
    "lookup": Part(
        run_lookup,
        {"lookup_clips": (8, "that are the segments of its film"), "lookup_frames": 32, "lookup_tokens": 160},
        zeros=("differing",),
    ),
    # What a second prompt about a segment costs.
    "prompts": Part(run_prompts, {}, zeros=("differing", "too_dear")),
    # How near an estimate comes to what a batch takes.
    "estimate": Part(
        run_estimate,
        {
            "estimate_clips": (60, "of which a sample is taken"),
            "estimate_sample": 20,
            "estimate_frames": 32,
            "estimate_tokens": 192,
        },
        at_most={"estimate_error": 0.15},
    ),
    # The same, of clips in a bucket; `--estimate-clips` and its like are those of `estimate`.
    "estimate-bucket": Part(run_bucket_estimate, {}, zeros=("without_size",), at_most={"estimate_error": 0.15}),
    # Whether altered results are found, and no others, by making them again on another target.
    "audit": Part(
        run_audit,
        {"audit_clips": (8, "beside a film in segments")},
        zeros=("untouched_accused", "planted_missed", "others_accused"),
    ),
    # How long a question over very many texts takes.
    "search": Part(
        run_search,
        {"texts": (1_000_000, "that are searched"), "questions": 500},
        zeros=("differing",),
        at_most={"search_p95_ms": 50.0},
    ),
    # Whether copies are told from what is not.
    "duplicates": Part(
        run_duplicates,
        {"films": (12, "with copies"), "window_seconds": (2.0, "of the windows whose copies are looked for")},
        check=told_apart,
    ),
    # Two plain targets against a target and its draft, on the same two cores.
    "placement": Part(
        run_placement,
        {
            "placement_videos": (8, "captioned at each number of sessions"),
            "placement_rounds": 3,
            "placement_frames": 32,
            "placement_tokens": 192,
        },
        zeros=("differing", "advised_wrong"),
    ),
    # Many jobs through feeder, queue and compactor.
    "spill": Part(
        run_spill,
        {
            "spill_jobs": 1_000_000,
            "spill_kills": 50,
            "spill_workers": 2,
            "spill_queue_mb": (128, "that jobs may take in Redis"),
            "spill_file_mb": (32, "of a result file's jobs"),
            "spill_rate": (2000.0, "jobs a second that are asked for"),
            "spill_to": ("", "where results go: s3://BUCKET/FOLDER and its like, or moto; else to a local disk"),
        },
        zeros=SPILL_ZEROS,
        check=fast_enough,
    ),
    # Results in a store that speaks S3: conditional PUTs, two compactors, and a name that is taken.
    "put": Part(
        run_put,
        {
            "put_jobs": (10_000, "through two compactors into a bucket of moto's server"),
            "put_kills": (10, "of compactors, feeder and Redis"),
        },
        zeros=(
            *SPILL_ZEROS,
            *("puts_wrong", "error_unnamed", "overwritten", "lost_meanwhile"),
            *("held_up_beside", "not_written_afterwards"),
        ),
    ),
    # A very long manifest with bad lines: read as a whole, and a shorter one handed in by who is killed.
    "manifest": Part(
        run_manifest,
        {
            "manifest_lines": (10_000_000, "that are read"),
            "manifest_jobs": (100_000, "lines of the manifest that is handed in"),
            "manifest_kills": (5, "of who hands in, and of the feeder"),
            "manifest_queue_mb": (64, "that jobs may take in Redis"),
        },
        zeros=(
            *("items_wrong", "bad_wrong", "jobs_bad_wrong", "conflicts_wrong", "known_wrong"),
            *("results_missing", "results_doubled", "results_invented"),
        ),
        at_most={"read_growth_mb": 100.0},
    ),
    # What each step of them takes of a processor.
    "steps": Part(run_steps, {"steps_jobs": (20_000, "taken through the same, step by step")}, zeros=("not_done",)),
}

FROM_0 = ("seed", "damaged_files", "kills", "spill_kills", "put_kills", "manifest_kills")


def main(argv: Sequence[str]) -> None:
    """Exits with 1 when a part fails."""
    flags = {name: default for part in PARTS.values() for name, default in part.flags.items()}
    parser = make_parser(
        "archive-scale", "Does the archive hold what it promises at scale?", FROM_0, **flags, seed=1, **MODELS
    )
    parser.add_argument("--only", choices=list(PARTS), nargs="+", default=list(PARTS), help="parts to run")
    given = parser.parse_args(argv)
    reports = run_parts(given.only, lambda name: run_to_end(PARTS[name].run(given)))
    passed = {name: PARTS[name].passes(report) for name, report in reports.items()}
    document = {"passed": all(passed.values()), "parts_passed": passed, **reports, "machine": machine_facts()}
    finish("archive-scale", document)
    sys.exit(0 if document["passed"] else 1)
