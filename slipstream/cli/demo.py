"""`slipstream demo`: captions sample clips with both methods on a stack of its own and shows what speculation gains."""

import importlib
import json
import os
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.archive.messages import Batch, BatchItem, BatchOptions, Job
from slipstream.cli.archive.batch_view import overall, watch
from slipstream.cli.common import run_async
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.async_captioner import AsyncCaptioner, connect_async
from slipstream.errors import InvalidConfig
from slipstream.messages import Caption
from slipstream.options import CaptionOptions
from slipstream.stack.local import FRESH, POCKET_DIR, PRIVATE_GRACE_S, Stack, StackOptions
from slipstream.stack.redis_server import find_server

# -- demo report ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClipResult:
    """One clip captioned by both methods."""

    name: str
    attributes_right: int
    attributes_total: int
    autoregressive: Caption
    speculative: Caption

    @property
    def identical(self) -> bool:
        """Whether speculation left text and tokens as they are."""
        ids, speculative_ids = (
            [token.token_id for token in one.tokens] for one in (self.autoregressive, self.speculative)
        )
        return self.autoregressive.text == self.speculative.text and ids == speculative_ids

    @property
    def drafted(self) -> bool:
        """Whether the draft took part; the text is the same without it, only slower."""
        return self.speculative.speculation.accepted > 0

    @property
    def decode_speedup(self) -> float:
        """Tokens a second after the first token, against plain decoding."""
        return _ratio(self.speculative.decoding_rate, self.autoregressive.decoding_rate)

    @property
    def end_to_end_speedup(self) -> float:
        """From the request to its last token, against plain decoding."""
        return _ratio(self.autoregressive.timings.total_s, self.speculative.timings.total_s)

    @property
    def first_token_ratio(self) -> float:
        """Time to the first token, against plain decoding's."""
        return _ratio(self.speculative.timings.first_token_s, self.autoregressive.timings.first_token_s)

    def row(self) -> dict[str, Any]:
        """The clip's figures under the names of the JSON document."""
        speculation = self.speculative.speculation
        return {
            "clip": self.name,
            "caption": self.speculative.text,
            "num_tokens": self.speculative.num_tokens,
            "attributes_right": self.attributes_right,
            "attributes_total": self.attributes_total,
            "autoregressive_tokens_per_s": self.autoregressive.decoding_rate,
            "slipstream_tokens_per_s": self.speculative.decoding_rate,
            "decode_speedup": self.decode_speedup,
            "end_to_end_speedup": self.end_to_end_speedup,
            "first_token_ratio": self.first_token_ratio,
            "tau": speculation.tau,
            "mean_accepted_length": speculation.mean_accepted_length,
            "c": speculation.speed_ratio,
            "kept_tokens": speculation.kept_tokens,
            "video_tokens": self.speculative.video.video_tokens,
            "identical": self.identical,
        }


MEDIANS = (
    "autoregressive_tokens_per_s",
    "slipstream_tokens_per_s",
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
    "autoreg.\ntok/s": lambda row: f"{row['autoregressive_tokens_per_s']:.1f}",
    "slipstream\ntok/s": lambda row: f"{row['slipstream_tokens_per_s']:.1f}",
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


# -- demo archive -----------------------------------------------------------------------------------------------------

# The demo's archive: a few clips through the queue, against the captions that the same gateway gives directly.

MAX_CLIPS = 4
MAX_FRAMES = 8
KEY = "demo"


@dataclass(frozen=True)
class ArchiveResult:
    """The batch at its end, its jobs, and by custom id the text that the Caption call gave for the same options."""

    batch: Batch
    jobs: tuple[Job, ...]
    direct: dict[str, str]

    @property
    def identical(self) -> bool:
        """Whether every clip has a caption in the archive, and it is the directly given one."""
        return {job.custom_id: job.caption.text for job in self.jobs if job.caption} == self.direct

    def document(self) -> dict[str, Any]:
        """What the demo's JSON says of it."""
        return {
            "jobs": self.batch.counts.total,
            "done": self.batch.counts.done,
            "identical": self.identical,
            "videos_per_hour": overall(self.batch).videos_per_h,
        }

    def table(self) -> Table:
        """One row a job."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
        table.title = "the same gateway's archive"
        for name in ("clip", "state", "tokens", "first token", "runs", "identical"):
            table.add_column(name, justify="left" if name in ("clip", "state") else "right", no_wrap=True)
        for job in self.jobs:
            caption = job.caption or Caption("", 0, None)
            same = caption.text == self.direct[job.custom_id]
            runs = job.receipt.runs if job.receipt else 0
            row = str(caption.num_tokens), f"{caption.timings.first_token_s:.2f} s", str(runs), "yes" if same else "NO"
            table.add_row(job.custom_id, job.state, *row)
        return table


def has_queue_server() -> bool:
    """Whether a server for the queue is at hand; the demo has no archive without one."""
    try:
        find_server()
    except InvalidConfig:
        return False
    return True


async def archive_clips(
    captioner: AsyncCaptioner, videos: Sequence[Path], frames: int, max_new_tokens: int
) -> ArchiveResult:
    """Captions the first clips directly, then hands them to the archive and waits for it."""
    options = CaptionOptions(num_frames=min(frames, MAX_FRAMES), max_new_tokens=max_new_tokens)
    chosen = videos[:MAX_CLIPS]
    direct = {video.stem: (await captioner.caption(video, options=options)).text for video in chosen}
    client = ArchiveClient(await captioner.connection())
    items = [BatchItem(custom_id=video.stem, source=str(video.resolve())) for video in chosen]
    submitted = await client.submit_all(BatchOptions(key=KEY, caption=options.given()), items)
    batch = await watch(client, submitted.batch_id, nullcontext(lambda snapshot: None))
    async with aclosing(client.jobs(submitted.batch_id)) as jobs:
        return ArchiveResult(batch, tuple([job async for job in jobs]), direct)


# -- demo -------------------------------------------------------------------------------------------------------------

# `slipstream demo`: captions sample clips with both methods on a stack of its own and shows what speculation gains.

CLIP_FOLDER = POCKET_DIR.parents[1] / ".cache" / "demo"
MAX_NEW_TOKENS = 320
WARM_UP_TOKENS = 16
METHODS = ("autoregressive", "slipstream")
PIPE_WIDTH = 140
"""Columns of the table where no terminal gives them."""

Say = Callable[[str], None]


def demo_command(
    clips: Annotated[int, typer.Option(min=1, max=1000, help="Clips to caption.")] = 3,
    frames: Annotated[int, typer.Option(min=1, max=4096, help="Frames to sample of each.")] = 128,
    json_only: Annotated[bool, typer.Option("--json-only", help="Print only the JSON document.")] = False,
) -> None:
    """Caption sample clips with both methods, compare speed and text, and run an archive; the last line is JSON."""
    console = Console(stderr=True)
    with console.status("rendering sample clips") as status:
        videos = _sample_clips(clips)
        results, archived = run_async(_caption_clips(videos, frames, status.update))
    if not json_only:
        terminal = Console()
        terminal = terminal if terminal.is_terminal else Console(width=PIPE_WIDTH)
        terminal.print(demo_table(results))
        if archived is not None:
            terminal.print(archived.table())
    document = demo_document(results, frames) | {"archive": None if archived is None else archived.document()}
    typer.echo(json.dumps(document))
    undrafted = [result.name for result in results if not result.drafted]
    if undrafted:
        console.print(
            f"the draft took no part in {', '.join(undrafted)}: the log of `slipstream up` says why", style="red"
        )
    if undrafted or not document["identical"] or (archived is not None and not archived.identical):
        raise typer.Exit(1)


def _sample_clips(count: int) -> list[Path]:
    """Clips that the models were never trained on; rendered unless an earlier run did."""
    first: int = _training("world").HELD_OUT_SEEDS.start
    paths: list[Path] = _training("data").render_folder(CLIP_FOLDER, range(first, first + count))
    return paths


CHECKOUT = Path(__file__).resolve().parents[2]
"""Of the project, if this is one."""


def _training(module: str) -> Any:
    """A module of the trainer's package, which alone knows the world of the clips. It is in the checkout only."""
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    try:
        return importlib.import_module(f"training.{module}")
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"the demo renders its clips with the package `training`, which is not installed here ({error.name} is "
            "missing): run it in a checkout of the project, after `make setup`"
        ) from None


async def _caption_clips(videos: list[Path], frames: int, say: Say) -> tuple[list[ClipResult], ArchiveResult | None]:
    say("loading the models")
    stack_options = StackOptions(
        threads=1,
        pin=len(os.sched_getaffinity(0)) > 1,
        stop_grace_s=PRIVATE_GRACE_S,
        extra_flags=FRESH,
        archive=has_queue_server(),
        video_roots=(CLIP_FOLDER,),
    )
    async with Stack(stack_options) as stack, connect_async(stack.gateway_address) as captioner:
        say("warming up")
        await captioner.caption(videos[0], num_frames=frames, max_new_tokens=WARM_UP_TOKENS)
        results = []
        for number, video in enumerate(videos):
            captions = {}
            for method in METHODS if number % 2 == 0 else METHODS[::-1]:
                say(f"clip {number + 1} of {len(videos)}: {method}")
                captions[method] = await captioner.caption(
                    video, num_frames=frames, max_new_tokens=MAX_NEW_TOKENS, method=method
                )
            right, total = _score(captions["slipstream"].text, video)
            results.append(ClipResult(video.stem, right, total, captions["autoregressive"], captions["slipstream"]))
        if not stack_options.archive:
            return results, None
        say("the archive")
        return results, await archive_clips(captioner, videos, frames, MAX_NEW_TOKENS)


def _score(text: str, video: Path) -> tuple[int, int]:
    """How many attributes of the clip the caption states rightly, and how many there are."""
    truth = json.loads(video.with_suffix(".json").read_text())
    right, total = _training("captions").score_caption(text, truth["scenes"])
    return right, total
