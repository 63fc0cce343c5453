"""Fetches a batch's jobs and writes them out: results to the output, the others to a file beside it."""

from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack, aclosing
from dataclasses import dataclass

from slipstream.cli.archive.client import ArchiveClient
from slipstream.cli.archive.records import NAMES, STATES
from slipstream.cli.archive.writers import STDOUT, Format, open_errors, open_writer
from slipstream.rpc.v1 import archive_pb2 as pb

WITHOUT_RESULT = frozenset(STATES[name] for name in ("failed", "dead", "cancelled"))


@dataclass(frozen=True)
class Output:
    """Where results go and which."""

    path: str
    """A file, a folder for subtitles, or "-"."""
    form: Format
    states: Collection[pb.JobState] = ()
    """Jobs in these states, all to `path`. None: done ones to `path`, failed ones to `<path>.errors.jsonl`."""


async def export(client: ArchiveClient, batch: str, output: Output) -> Counter[str]:
    """Writes every job there is now; how many of each state. The same jobs give the same files, however often."""
    counts: Counter[str] = Counter()
    wanted = frozenset(output.states) or {pb.JOB_STATE_DONE}
    asked = sorted(output.states) or [pb.JOB_STATE_DONE, *sorted(WITHOUT_RESULT)]
    with ExitStack() as files:
        write = files.enter_context(open_writer(output.path, output.form))
        write_error = None
        if not output.states and output.path != STDOUT:
            write_error = files.enter_context(open_errors(output.path))
        async with aclosing(client.jobs(batch, asked)) as jobs:
            async for job in jobs:
                counts[NAMES.get(job.state, "unspecified")] += 1
                if job.state not in wanted:
                    if write_error is not None:
                        write_error(job)
                elif job.HasField("summary") or not output.form.is_subtitles:
                    write(job)
    return counts
