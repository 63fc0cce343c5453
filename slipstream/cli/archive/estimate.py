"""`slipstream archive estimate`: hours, cost and bytes of a batch before it is handed in, from a sample of it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any

import typer

from slipstream.archive.estimates import LEVEL, Estimate, Interval
from slipstream.archive.messages import BatchOptions, Job, JobPart
from slipstream.archive.queue import Priority
from slipstream.cli.archive.asking import (
    BATCH_PANEL,
    DocumentFlags,
    GatewayOption,
    JsonOption,
    RootOption,
    SkipBadOption,
    SourcesArgument,
    document_flags,
)
from slipstream.cli.archive.batch_view import SECONDS_PER_HOUR, choose_view, span, speedup
from slipstream.cli.archive.job_lines import job_record
from slipstream.cli.archive.sources import Sources
from slipstream.cli.caption import caption_options
from slipstream.cli.common import ConnectionOptions, bundled, connection_options, run_async
from slipstream.cli.up import placement_words
from slipstream.cli.views import complain, printable
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.archive_estimate import SampledArchive, caption_plainly, caption_sample
from slipstream.client.caption_client import gateway_info
from slipstream.client.trial_batch import Follow
from slipstream.errors import InvalidRequest
from slipstream.options import CaptionOptions
from slipstream.service_info import GatewayInfo
from slipstream.speculation.placement import Advice, Compared, captions_of_each, compare, plain_targets

SAMPLE, COMPARED = 20, 3


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
        typer.Option(min=1, help="That the models run on.", show_default="one for each target and draft"),
    ] = None,
    sample: Annotated[int, typer.Option(min=2, max=1000, help="Items that are captioned.")] = SAMPLE,
    sample_seed: Annotated[int, typer.Option(min=0, help="Names the sample.")] = 0,
    compare: Annotated[
        int,
        typer.Option(min=0, max=100, help="Of the sample, captioned again without the draft, to compare placements."),
    ] = COMPARED,
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

    async def run(found: Sources) -> tuple[SampledArchive, GatewayInfo, Compared | None]:
        async with connection.gateway(gateway).open() as channel:
            client = ArchiveClient(channel)
            with choose_view(as_json=False, stream=sys.stderr) as show:
                done = await caption_sample(client, found, batch, sample, sample_seed, result_bytes, show)
                info = await gateway_info(channel)  # it has measured the sample
                on = Hardware.of(info, devices)
                compared = await _compare(client, done, batch, compare, on, show)
            return done, info, compared

    with Sources(sources, root, complain, documents.in_folders, skip_bad) as found:
        found.check()
        sampled, info, compared = run_async(run(found))
        told = Told(sampled, info, Hardware.of(info, devices).devices, price, compared, found.num_bad)
    typer.echo(json.dumps(told.as_dict()) if as_json else "\n".join(told.lines()))
    if told.num_bad:
        complain(f"{told.num_bad:,} could not be handed in", "each is named above; the estimate does not count them")
        raise typer.Exit(InvalidRequest.exit_code)


@dataclass(frozen=True)
class Hardware:
    """What the models run on."""

    targets: int
    drafts: int
    devices: int

    @classmethod
    def of(cls, info: GatewayInfo, devices: int | None) -> "Hardware":
        """Of a gateway; `devices` as it was told, or one for each model service."""
        targets, drafts = (sum(peer.role == role for peer in info.peers) for role in ("target", "draft"))
        drafts = max(drafts, 1) if info.draft_model else 0
        targets = max(targets, 1)
        return cls(targets, drafts, devices or targets + drafts)

    @property
    def plain_targets(self) -> float:
        """That the same devices would hold without drafts."""
        return plain_targets(self.targets, self.drafts, self.devices)


async def _compare(
    client: ArchiveClient, done: SampledArchive, batch: BatchOptions, num_items: int, on: Hardware, show: Follow
) -> Compared | None:
    """None where no draft took part, or nothing is to be captioned for it."""
    if done.drafted is None or not on.drafts or not num_items:
        return None
    each = captions_of_each(done.drafted.at_once, on.plain_targets)
    plain = await caption_plainly(client, done, batch, num_items, each, show)
    return compare(done.drafted, plain, on.targets, on.plain_targets) if plain is not None else None


def result_bytes(job: Job, parts: Sequence[JobPart]) -> int:
    """That a result takes as a line of JSON."""
    return len(json.dumps(job_record(job, parts), ensure_ascii=False).encode(errors="surrogatepass")) + 1


@dataclass(frozen=True)
class Told:
    """All that an estimate says."""

    sampled: SampledArchive
    info: GatewayInfo
    devices: int
    price: float | None
    compared: Compared | None
    num_bad: int = 0
    """Rows of the manifest that were skipped."""

    @cached_property
    def found(self) -> Estimate:
        """Of all items."""
        return self.sampled.estimate()

    @property
    def hours(self) -> Interval:
        """Of wall time."""
        return self.found.seconds.times(1 / SECONDS_PER_HOUR)

    def cost(self, times: float = 1.0) -> Interval | None:
        """Of all devices, for so many times the hours."""
        return None if self.price is None else self.hours.times(times * self.devices * self.price)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found, cost = self.found, self.cost()
        return {
            "items": found.num_items,
            "sampled": len(self.sampled.chosen),
            "failed": len(self.sampled.failures),
            "bad_rows": self.num_bad,
            "without_size": self.sampled.num_unsized,
            "level": LEVEL,
            "hours": asdict(self.hours),
            "at_once": found.at_once,
            "devices": self.devices,
            "device_hours": asdict(self.hours.times(self.devices)),
            "cost": None if cost is None else asdict(cost),
            "tokens": asdict(found.tokens),
            "result_bytes": asdict(found.result_bytes),
            "video_s": asdict(found.video_s),
            "speedup": speedup(self.sampled.totals),
            "placements": [asdict(each) for each in self.info.placements],
            "without_draft": self._without_draft(),
            "advice": self._advice(),
        }

    def lines(self) -> list[str]:
        """For people."""
        found, cost = self.found, self.cost()
        lines = [
            f"{found.num_items:,} items, of which {len(self.sampled.chosen):,} were captioned; in brackets what the"
            f" choice of these leaves open ({LEVEL:.0%})",
            f"time     {_spans(found.seconds)}, {found.at_once:.1f} at once",
            f"devices  {_range(self.hours.times(self.devices), 'device-hours', 2)} on {self.devices}",
        ]
        if cost is not None:
            lines.append(f"cost     {_range(cost, f'at {self.price:g} a device-hour', 2)}")
        lines += [
            f"tokens   {_range(found.tokens, 'tokens', 0)}",
            f"results  {_range(found.result_bytes.times(1e-6), 'MB as JSON lines', 2)}",
        ]
        if found.video_s.high:  # documents have none
            lines.append(f"video    {_range(found.video_s.times(1 / SECONDS_PER_HOUR), 'h of video', 2)}")
        if (gained := speedup(self.sampled.totals)) is not None:
            lines.append(f"speedup  decoding {gained:.2f} times as fast as plain decoding in the sample")
        if (other := self.compared) is not None:
            cost = self.cost(other.times)
            words = "" if cost is None else f"; {_range(cost, 'in all', 2)}"
            spans = _spans(found.seconds.times(other.times))
            lines.append(f"or       {spans} with {_plain_words(other)} on the same devices{words}")
        lines.append(f"advice   {self._advice()}")
        if unsized := self.sampled.num_unsized:
            lines.append(
                f"sizes    not known of {unsized:,} items, whose sample is a plain one; `size` in a manifest says them"
            )
        if failures := self.sampled.failures:
            lines.append(f"failed   {len(failures):,} of the sample, such as {printable(failures[0])}")
        return lines

    def _without_draft(self) -> dict[str, Any] | None:
        if (other := self.compared) is None:
            return None
        cost = self.cost(other.times)
        return {
            "targets": other.plain_targets,
            "hours": asdict(self.hours.times(other.times)),
            "cost": None if cost is None else asdict(cost),
            "recommended": other.advice,
            **{name: getattr(other, name) for name in ("times", "at_once", "faster", "prefill_share")},
        }

    def _advice(self) -> str:
        if self.compared is not None:
            return compared_words(self.compared)
        return placement_words(self.info.placements) if self.info.placements else "none: no draft was measured"


def compared_words(compared: Compared) -> str:
    """Which placement is recommended, and why."""
    plain = _plain_words(compared)
    begin = {
        Advice.DRAFT: f"keep the draft: {plain} would take {compared.times:.2f} times as long",
        Advice.PLAIN: f"{plain} instead of the draft: they would take {compared.times:.2f} times as long",
        Advice.EITHER: f"keep the draft: {plain} would take about as long ({compared.times:.2f} times)",
    }[compared.advice]
    why = (
        f"a target is {compared.faster:.2f} times as fast with it but for prefills, which are"
        f" {compared.prefill_share:.0%} of a plain target's time"
    )
    if round(compared.at_once) < compared.plain_targets:
        why += f"; with {compared.at_once:.1f} at once not all of the plain targets have work"
    return f"{begin}. With {compared.at_once:.1f} at once {why}."


def _plain_words(compared: Compared) -> str:
    number = compared.plain_targets
    return f"{number:.3g} plain target{'s' * (number != 1)}"


def _spans(seconds: Interval) -> str:
    return f"{span(seconds.value)} ({span(seconds.low)} to {span(seconds.high)})"


def _range(figure: Interval, unit: str, digits: int) -> str:
    value, low, high = (f"{number:,.{digits}f}" for number in (figure.value, figure.low, figure.high))
    return f"{value} ({low} to {high}) {unit}"
