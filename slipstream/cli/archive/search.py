"""`slipstream archive search` and `index`: what the archive has said, found by its words."""

import heapq
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.archive.passages import Passage
from slipstream.archive.text_index import RANKED, Found, TextIndex, parse_question
from slipstream.cli.archive.asking import JsonOption, ask
from slipstream.cli.archive.clips import cut_passages
from slipstream.cli.common import ConnectionOptions, bundled, connection_options, run_async
from slipstream.cli.film import clock_time
from slipstream.cli.views import complain, printable
from slipstream.client.archive_search import cache_folder, index_exports, open_batch, open_export
from slipstream.errors import InvalidRequest

SHOWN = 20


@bundled(connection=connection_options)
def search_command(
    *,
    question: Annotated[
        str,
        typer.Argument(help='Words that a text must have; "in a row"; begin*; -not.', show_default=False),
    ],
    batch: Annotated[
        str | None, typer.Argument(help="Id or key of a batch, with --gateway.", show_default="--in")
    ] = None,
    exports: Annotated[
        list[str] | None,
        typer.Option(
            "--in",
            help="CAPTIONS.jsonl of `export`, here or in a bucket, or an index; may be repeated.",
            show_default="BATCH",
        ),
    ] = None,
    gateway: Annotated[str | None, typer.Option(help="Address of a gateway: host:port, or unix:PATH.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=RANKED, help="Most texts that are shown.")] = SHOWN,
    clip: Annotated[
        Path | None,
        typer.Option(help="Also cut the segments out of their films, into this folder.", show_default="no clips"),
    ] = None,
    as_json: JsonOption = False,
    connection: ConnectionOptions,
) -> None:
    """Find texts by their words: file, second and text, the best first. Exit status 1 when there is none.

    A clip begins with the last key picture before its segment; pictures are copied as they are, without sound. Films
    are read on this machine, or in their bucket with this command's credentials.
    """
    asked = parse_question(question)
    with ExitStack() as opened:
        indexes = [opened.enter_context(index) for index in _indexes(batch, exports or [], gateway, connection)]
        num_damaged = sum(index.num_damaged for index in indexes)
        found = _merged([index.search(asked, limit) for index in indexes], limit)
    clips = {} if clip is None else run_async(cut_passages(found.passages, clip))
    for passage in found.passages:
        told = {"clip": str(clips[passage].path)} if passage in clips else {}
        typer.echo(json.dumps(passage_dict(passage) | told) if as_json else passage_line(passage))
    typer.echo(f"slipstream: {_told(found)}", err=True)
    _tell_of_damaged(num_damaged)
    raise typer.Exit(0 if found.passages else 1)


def index_command(
    exports: Annotated[
        list[str], typer.Argument(help="CAPTIONS.jsonl of `export`, here or in a bucket.", show_default=False)
    ],
    output: Annotated[Path, typer.Option(help="The index: one SQLite file.")],
    as_json: JsonOption = False,
) -> None:
    """Build one index of several exports, for `search --in`."""
    with index_exports(exports, output) as index:
        counts = {"passages": len(index), "damaged_lines": index.num_damaged}
    typer.echo(json.dumps(counts) if as_json else f"{printable(str(output))}: {counts['passages']:,} texts")
    _tell_of_damaged(counts["damaged_lines"])


def _indexes(
    batch: str | None, exports: list[str], gateway: str | None, connection: ConnectionOptions
) -> list[TextIndex]:
    cache = cache_folder(os.environ)
    if (batch is None) == (not exports):
        raise InvalidRequest("say where to search: a BATCH with --gateway, or --in CAPTIONS.jsonl")
    if batch is None:
        return [open_export(path, cache) for path in exports]
    if gateway is None:
        raise InvalidRequest("a batch is asked for at a gateway: give --gateway ADDRESS")
    named = batch
    return [ask(gateway, connection, lambda client: open_batch(client, named, cache))]


def _merged(answers: list[Found], limit: int) -> Found:
    """Those of several indexes in turn: the best of each first."""
    ranks = [[(place, number, one) for place, one in enumerate(each.passages)] for number, each in enumerate(answers)]
    best = heapq.nsmallest(limit, (entry for each in ranks for entry in each), key=lambda entry: entry[:2])
    num_ranked = max(each.num_ranked for each in answers) if any(not each.is_all for each in answers) else 0
    return Found(tuple(one for *_, one in best), num_ranked or sum(each.num_ranked for each in answers))


def _told(found: Found) -> str:
    if not found.is_all:
        return f"more than {RANKED:,} texts have the words; the best of the first {RANKED:,} are shown"
    shown = len(found.passages)
    return f"{found.num_ranked:,} found" + (f", {shown:,} shown" if shown < found.num_ranked else "")


def _tell_of_damaged(num_lines: int) -> None:
    if num_lines:
        are = "1 line is" if num_lines == 1 else f"{num_lines:,} lines are"
        complain(f"{are} not of an export", "passed by; `slipstream archive export` writes the batch anew")


def passage_dict(passage: Passage) -> dict[str, Any]:
    """For JSON: `start_s` and `end_s` of a video, `page` of a document."""
    where: dict[str, Any] = {"page": passage.page} if passage.page else {}
    if not passage.page:
        where = {"start_s": passage.start_s, "end_s": passage.end_s, "is_segment": passage.is_segment}
    return {"custom_id": passage.custom_id, "source": passage.source, **where, "text": passage.text}


def passage_line(passage: Passage) -> str:
    """For people: the file, where in it, and the text on one line."""
    where = f"page {passage.page}" if passage.page else clock_time(passage.start_s)
    text = " ".join(printable(passage.text).split())
    return f"{printable(passage.custom_id)}  {where}  {text}"
