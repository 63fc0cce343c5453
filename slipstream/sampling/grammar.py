"""A JSON schema, a regular expression or a choice as llguidance's parser is made of it, and whether it can be made at
all: `python -m slipstream.sampling.grammar` tries that in a process of its own.

A parser of strangers' schemas in the process that holds a model is a risk that nobody has to take: there are schemas of
some twenty characters over which llguidance runs out of its stack, which ends the process, or is busy for hours. The
trial has no model, two seconds and a gigabyte. Imports no torch.
"""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import InvalidRequest, Overloaded, SlipstreamError
from slipstream.sampling.params import STRUCTURES, SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MODULE = "slipstream.sampling.grammar"
"""What a trial runs."""
TRIAL_CPU_S, TRIAL_MEMORY_BYTES, TRIAL_S = 2, 2**30, 20.0
"""The last one by the clock, on a machine that is busy."""
MAX_STATES = 50_000
"""Of llguidance's lexer, of one text: 1 to 2 kB each. What a position takes is bounded by its own limits: 14 ms, seldom
100 ms, for which the model's thread waits."""
FIRST_FUEL = 300_000
"""Of a parser's first step, in llguidance's units. With its usual million one text of 20 characters holds 200 MB, with
this 60, and no schema of our length but those of thousands of alternatives needs more."""
WHITESPACE = r" |\n[ \t]{0,24}"
"""Between the signs of JSON, at most once: as it is usually written, on one line or indented. Small models would go on
with blanks and new lines for ever. A schema may say another: `{"x-guidance": {"whitespace_pattern": ""}}`."""
MAX_REASON_CHARS = 300
NOT_TOLD = "<non-verbose/>"
"""Stands in llguidance's errors for the state of its parser."""
PANIC = "panic: "
"""So they begin where the fault is llguidance's; what follows is for those who mend it."""
NO_SUCH_TEXT = ("NoExtensionBias", "there is no such text")
"""llguidance's words where nothing at all may come next, and ours."""


def name_of(params: SamplingParams) -> str:
    """The parameter that asks for a structure."""
    return next(name for name in STRUCTURES if getattr(params, name))


def make_parser(tokens: "LLTokenizer", params: SamplingParams) -> "LLMatcher":
    """At the beginning of a text. Raises ValueError for what is JSON to Python alone: NaN, 1e999, half of a pair of
    surrogates, 128 levels; all else that is wrong the parser says itself."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=FIRST_FUEL, max_lexer_states=MAX_STATES, verbose_errors=False)
    if params.json_schema:
        grammar = LLMatcher.grammar_from_json_schema(params.json_schema, {"whitespace_pattern": WHITESPACE})
    else:
        grammar = LLMatcher.grammar_from_regex(params.regex or "|".join(map(_literally, params.choice)))
    return LLMatcher(tokens, grammar, log_level=0, limits=limits)


def refusal(params: SamplingParams, reason: str) -> InvalidRequest:
    """That there is no such text, or that none can be kept to it."""
    if reason.startswith(PANIC):
        reason = "its parser stumbles over it"
    words = " ".join(reason.removesuffix(NOT_TOLD).replace(*NO_SUCH_TEXT).split())
    return InvalidRequest(f"{name_of(params)}: no text can be kept to it: {words[:MAX_REASON_CHARS]}")


def try_out(params: SamplingParams) -> None:
    """Raises `InvalidRequest` for a structure of which no parser can be made without harm, `Overloaded` where there is
    no process to be had, and `SlipstreamError` where no trial can be made. Takes a tenth of a second; not for an event
    loop."""
    asked = json.dumps({name: getattr(params, name) for name in STRUCTURES})
    try:
        trial = subprocess.run(
            [sys.executable, "-P", "-m", MODULE],
            input=asked.encode(),
            capture_output=True,
            timeout=TRIAL_S,
            check=False,
            cwd="/",
            env=trial_environment(),
        )
    except subprocess.TimeoutExpired:
        raise refusal(params, "its parser takes too long") from None
    except OSError as failure:
        raise Overloaded(f"{name_of(params)}: it cannot be tried now: {failure.strerror}; try again later") from None
    if trial.returncode < 0:
        raise refusal(params, "its parser takes too much time or memory")
    if trial.returncode:
        raise SlipstreamError(f"a structure could not be tried: {trial.stderr.decode(errors='replace')[-300:].strip()}")
    if trial.stdout:
        raise refusal(params, trial.stdout.decode(errors="replace"))


def trial_environment() -> dict[str, str]:
    """What finds our code and packages; no token or key of the service is handed on."""
    libraries = os.environ.get("LD_LIBRARY_PATH")
    paths = [str(Path(__file__).parents[2]), *filter(os.path.isabs, sys.path)]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "LC_ALL": "C.UTF-8"}
    return environment | ({"LD_LIBRARY_PATH": libraries} if libraries else {})


def main() -> None:
    """Tries what is asked on stdin; what is wrong with it is the output."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_MEMORY_BYTES, TRIAL_MEMORY_BYTES))
    from llguidance import LLTokenizer

    asked = json.load(sys.stdin)
    params = replace(SamplingParams(), **asked | {"choice": tuple(asked["choice"])})
    try:
        parser = make_parser(LLTokenizer("byte"), params)
        parser.compute_bitmask()
        sys.stdout.write(parser.get_error())
    except (ValueError, MemoryError) as error:
        sys.stdout.write(str(error) or "its parser takes too much memory")


def _literally(text: str) -> str:
    """A regular expression that matches this text only."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text)


if __name__ == "__main__":
    main()
