"""`python -m bench NAME [options]`: runs one measurement; without a name, lists them.

Progress and tables come first; the last line is one JSON document of at most 8 kB (`bench.output`).
"""

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from slipstream.errors import SlipstreamError

PROGRAMS = {
    "methods": ("bench.methods.program", "every method on the same clips in one run"),
    "report": ("bench.report.page", "docs/results.md and its pictures again, from a kept document"),
    "models": ("bench.model_memory", "memory that models of full size need, computed"),
    "simulate": ("bench.simulate", "both pacing rules in simulated time, and what bad drafts cost"),
    "simulate-trees": ("bench.simulate_trees", "dynamic trees in simulated time, beside the study that proposed them"),
    "replay": ("bench.replay.program", "the real stack at the pace of the papers' devices"),
    "ride-along": ("bench.ride_along", "an archive whose prompts ride along, and people beside it"),
    "prompt-turns": ("bench.prompt_turns", "a short caption beside long ones of people, and of an archive"),
    "simulate-rides": ("bench.simulate_rides", "the same in simulated time, at working points of GPUs"),
    "replay-shares": ("bench.replay.shares", "the same with one draft for one, two and four targets"),
    "gpu": ("bench.gpu.program", "models of full size with random weights on a GPU"),
    "gpu-check": ("bench.gpu.checks", "all checks for one GPU, in order, beside what passes"),
    "gpu-write": ("bench.gpu.folders", "a geometry with random weights, as a folder of the hub's form"),
    "gpu-serve": ("bench.gpu.serve", "models of full size from such folders through the real stack"),
    "gpu-graph": ("bench.gpu.passes:main_graph", "decoding passes as they are served: seconds, launches, waits"),
    "gpu-kernels": ("bench.gpu.kernels", "every way to attend over a past, beside maths in fp64"),
    "gpu-vision": ("bench.gpu.passes:main_vision", "vision towers as they are served"),
    "gpu-fault": ("bench.gpu.fault", "a failed assert on the device ends the target"),
    "gpu-tp": ("bench.gpu.tp", "a model over several GPUs, and the loss of one"),
    "guarantees": ("bench.guarantees.program", "what docs/algorithms.md promises, part by part"),
    "sessions": ("bench.guarantees.sessions", "many captions at once, by method and number of clients"),
    "gate": ("bench.guarantees.many_captions", "drafts that do not help, and that do, over a hundred short captions"),
    "served-gate": ("bench.guarantees.served_captions", "the same by the real stack, with drafts that really are so"),
    "identity": ("bench.guarantees.identity", "texts of the stack against transformers, token by token"),
    "draft-faults": ("bench.guarantees.draft_faults", "the draft killed, frozen and restarted under captions"),
    "faults": ("bench.faults.program", "everything harmed under an archive, and damaged input"),
    "soak": ("bench.soak", "memory of the services over a thousand small captions"),
    "archive": ("bench.archive_rates", "videos an hour of an archive with 1, 2 and 4 workers"),
    "archive-scale": ("bench.archive_scale", "films, many jobs, estimates, searches and duplicates of an archive"),
    "scale-check": ("bench.scale_check", "the archive behind Sentinel, in Kubernetes' words, on Slurm, on three hosts"),
    "objects": ("bench.object_ranges", "how much of a film in a bucket is fetched for its frames"),
    "compose-check": (
        "bench.faults.program:main_compose",
        "the containers, harmed under a batch; needs Docker",
    ),
    "front-check": ("bench.front", "the HTTP front: clients, random requests, streams beside gRPC, kills"),
    "documents": ("bench.documents.program", "text that is already there as a draft: hints"),
    "document-pages": ("bench.document_pages", "what a page costs the reader of documents, and how well it reads"),
    "needles": ("bench.needles", "pruners on clips where what is kept decides how long the draft stays right"),
    "floors": ("bench.floors", "passes on a CPU beside what its memory and arithmetic allow"),
    "round-costs": ("bench.round_costs", "what a round of speculation costs besides the models, thread by thread"),
    "trees": ("bench.trees", "this checkout beside an older one: speed and texts"),
    "house": ("bench.house", "sizes and names of the code itself"),
}


def main(argv: Sequence[str]) -> None:
    """Runs the program that `argv` names. Exits with 2 for a name that there is not, and with what a user may be told
    where the program ends so, as the command line does."""
    if not argv or argv[0] in ("-h", "--help"):
        print("python -m bench NAME [options]; NAME is one of:\n")
        print("\n".join(f"  {name:15}{words}" for name, (_, words) in PROGRAMS.items()))
        return
    name, *options = argv
    if name not in PROGRAMS:
        _end(f"there is no benchmark {name!r}; python -m bench lists them", 2)
    module, _, function = PROGRAMS[name][0].partition(":")
    try:
        getattr(importlib.import_module(module), function or "main")(options)
    except SlipstreamError as error:
        _end(str(error), error.exit_code)


def _end(words: str, status: int) -> NoReturn:
    print(words, file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
