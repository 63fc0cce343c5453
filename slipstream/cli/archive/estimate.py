"""`slipstream archive estimate`: hours, cost and bytes of a batch before it is handed in, from a sample of it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from slipstream.archive.estimates import LEVEL, Estimate, Interval
from slipstream.archive.messages import BatchOptions, Job, JobPart
from slipstream.archive.queue import Priority
from slipstream.cli.archive.asking import BATCH_PANEL, GatewayOption, JsonOption
from slipstream.cli.archive.batch_view import SECONDS_PER_HOUR, choose_view, span, speedup
from slipstream.cli.archive.job_lines import job_record
from slipstream.cli.archive.sources import Sources
from slipstream.cli.archive.submit import DocumentFlags, RootOption, SkipBadOption, SourcesArgument, document_flags
from slipstream.cli.caption import caption_options
from slipstream.cli.common import ConnectionOptions, bundled, connection_options, run_async
from slipstream.cli.up import placement_words
from slipstream.cli.views import complain, printable
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.archive_estimate import SampledArchive, caption_sample
from slipstream.client.caption_client import gateway_info
from slipstream.errors import InvalidRequest
from slipstream.options import CaptionOptions
from slipstream.service_info import GatewayInfo

SAMPLE = 20


@bundled(options=caption_options, connection=connection_options, documents=document_flags)
def estimate_command(
    *,
    sources: SourcesArgument,
    gateway: GatewayOption,
    price: Annotated[
        float | None,
        typer.Option("--price-per-device-hour", min=0, help="Of one device.", show_default="no cost is told"),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="That the models run on.", show_default="2 with a draft, 1 without"),
    ] = None,
    sample: Annotated[int, typer.Option(min=2, max=1000, help="Items that are captioned.")] = SAMPLE,
    sample_seed: Annotated[int, typer.Option(min=0, help="Names the sample.")] = 0,
    priority: Annotated[
        Priority, typer.Option(help="Of the sample, against other batches.", rich_help_panel=BATCH_PANEL)
    ] = Priority.LOW,
    root: RootOption = None,
    skip_bad: SkipBadOption = False,
    as_json: JsonOption = False,
    documents: DocumentFlags,
    options: CaptionOptions,
    connection: ConnectionOptions,
) -> None:
    """Caption a sample of what would be submitted, and say what all of it would take."""
    batch = BatchOptions(caption=options.given(), priority=priority, document=documents.reading)

    async def run(found: Sources) -> tuple[SampledArchive, GatewayInfo]:
        async with connection.gateway(gateway).open() as channel:
            with choose_view(as_json=False, stream=sys.stderr) as show:
                done = await caption_sample(
                    ArchiveClient(channel), found, batch, sample, sample_seed, result_bytes, show
                )
            return done, await gateway_info(channel)  # afterwards: it has measured the sample

    with Sources(sources, root, complain, documents.in_folders, skip_bad) as found:
        found.check()
        sampled, info = run_async(run(found))
    devices = devices or (2 if info.draft_model else 1)
    if as_json:
        typer.echo(json.dumps(estimate_dict(sampled, info, devices, price) | {"bad_rows": found.num_bad}))
    else:
        typer.echo("\n".join(_lines(sampled, info, devices, price)))
    if found.num_bad:
        complain(f"{found.num_bad:,} bad rows", "skipped, and not counted in the estimate")
        raise typer.Exit(InvalidRequest.exit_code)


def result_bytes(job: Job, parts: Sequence[JobPart]) -> int:
    """That a result takes as a line of JSON."""
    return len(json.dumps(job_record(job, parts), ensure_ascii=False).encode(errors="surrogatepass")) + 1


def estimate_dict(sampled: SampledArchive, info: GatewayInfo, devices: int, price: float | None) -> dict[str, Any]:
    """For JSON."""
    found = sampled.estimate()
    hours = found.seconds.times(1 / SECONDS_PER_HOUR)
    return {
        "items": found.num_items,
        "sampled": len(sampled.chosen),
        "failed": len(sampled.failures),
        "without_size": sampled.num_unsized,
        "level": LEVEL,
        "hours": asdict(hours),
        "at_once": found.at_once,
        "devices": devices,
        "device_hours": asdict(hours.times(devices)),
        "cost": None if price is None else asdict(hours.times(devices * price)),
        "tokens": asdict(found.tokens),
        "result_bytes": asdict(found.result_bytes),
        "video_s": asdict(found.video_s),
        "speedup": speedup(sampled.totals),
        "placements": [asdict(each) for each in info.placements],
        "advice": _advice(info),
    }


def _lines(sampled: SampledArchive, info: GatewayInfo, devices: int, price: float | None) -> list[str]:
    found = sampled.estimate()
    device_hours = found.seconds.times(devices / SECONDS_PER_HOUR)
    lines = [
        f"{found.num_items:,} items, of which {len(sampled.chosen):,} were captioned; in brackets what the choice of"
        f" these leaves open ({LEVEL:.0%})",
        f"time     {_spans(found)}, {found.at_once:.1f} at once",
        f"devices  {_range(device_hours, 'device-hours', 2)} on {devices}",
    ]
    if price is not None:
        lines.append(f"cost     {_range(device_hours.times(price), f'at {price:g} a device-hour', 2)}")
    lines += [
        f"tokens   {_range(found.tokens, 'tokens', 0)}",
        f"results  {_range(found.result_bytes.times(1e-6), 'MB as JSON lines', 2)}",
        f"video    {_range(found.video_s.times(1 / SECONDS_PER_HOUR), 'h of video', 2)}",
    ]
    if (gained := speedup(sampled.totals)) is not None:
        lines.append(f"speedup  decoding {gained:.2f} times as fast as plain decoding in the sample")
    lines.append(f"advice   {_advice(info)}")
    if unsized := sampled.num_unsized:
        lines.append(
            f"sizes    not known of {unsized:,} items, whose sample is a plain one; `size` in a manifest says them"
        )
    if failures := sampled.failures:
        lines.append(f"failed   {len(failures):,} of the sample, such as {printable(failures[0])}")
    return lines


def _advice(info: GatewayInfo) -> str:
    if not info.placements:
        return "none: no draft was measured"
    return placement_words(info.placements)


def _spans(found: Estimate) -> str:
    seconds = found.seconds
    return f"{span(seconds.value)} ({span(seconds.low)} to {span(seconds.high)})"


def _range(figure: Interval, unit: str, digits: int) -> str:
    value, low, high = (f"{number:,.{digits}f}" for number in (figure.value, figure.low, figure.high))
    return f"{value} ({low} to {high}) {unit}"
