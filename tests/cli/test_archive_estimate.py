"""What an estimate says of the placement that runs, and of plain targets on the same devices."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from slipstream.archive.estimates import Sampled, Span
from slipstream.archive.messages import BatchItem, BatchOptions, BatchTotals, Job, JobKind, JobPart
from slipstream.archive.queue import JobState
from slipstream.cli.archive.estimate import Hardware, Told
from slipstream.client import archive_estimate
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.archive_estimate import SampledArchive, caption_sample, drafted_time, rest_time, stratified
from slipstream.errors import InvalidRequest
from slipstream.messages import Caption, SharedFrom, Speculation, Timings
from slipstream.service_info import GatewayInfo, PeerInfo, Placement, ServiceLoad
from slipstream.speculation.placement import Compared

SAMPLED = SampledArchive(
    tuple(Sampled(1, Span(18.0 * number, 18.0 * (number + 1)), 100) for number in range(20)),
    tuple(range(20)),
    (1,) * 2000,
    BatchTotals(tokens=2000, generate_s=100.0, plain_generate_s=300.0),
)
DRAFTED = GatewayInfo(target_model="t", draft_model="d", placements=(Placement(1, 3.0, 3.0, 0.9, 0.9),))


def told(times: float, at_once: float = 2.0, price: float | None = 2.5) -> Told:
    return Told(SAMPLED, DRAFTED, 2, price, Compared(times, 2, at_once, 3.0, 0.25))


def line(said: Told, name: str) -> str:
    (found,) = [each for each in said.lines() if each.startswith(name)]
    return found


def test_both_placements_have_hours_and_cost_and_one_is_recommended() -> None:
    facts = json.loads(json.dumps(told(0.8).as_dict()))
    other = facts["without_draft"]
    assert other["recommended"] == "plain" and other["targets"] == 2
    assert facts["hours"]["value"] == pytest.approx(10.0)
    assert other["hours"]["value"] == pytest.approx(8.0)
    assert other["cost"]["value"] == pytest.approx(8.0 * 2 * 2.5) and facts["cost"]["value"] == pytest.approx(50.0)
    assert line(told(0.8), "or ").startswith("or       8.0 h (") and "2 plain targets" in line(told(0.8), "or ")
    assert "40.00 (" in line(told(0.8), "or ")


@pytest.mark.parametrize(
    ("times", "at_once", "words"),
    [
        (1.8, 2.0, "keep the draft: 2 plain targets would take 1.80 times as long. With 2.0 at once"),
        (1.05, 2.0, "keep the draft: 2 plain targets would take about as long (1.05 times)."),
        (0.5, 8.0, "2 plain targets instead of the draft: they would take 0.50 times as long. With 8.0 at once"),
        (1.8, 1.0, "with 1.0 at once not all of the plain targets have work."),
    ],
)
def test_the_advice_says_why(times: float, at_once: float, words: str) -> None:
    said = line(told(times, at_once), "advice")
    assert words in said and "3.00 times as fast" in said and "prefills, which are 25% of" in said


def test_without_a_comparison_the_gateways_own_figures_advise() -> None:
    said = replace(told(1.0, price=None), compared=None)
    assert "no draft, a target on every device" in line(said, "advice")
    assert said.as_dict()["without_draft"] is None
    assert "no draft was measured" in line(replace(said, info=GatewayInfo()), "advice")


def test_devices_are_those_of_the_gateway_unless_told() -> None:
    peers = tuple(PeerInfo(role, n, "", ServiceLoad(), 0) for role, n in (("target", 1), ("target", 2), ("draft", 1)))
    assert Hardware.of(replace(DRAFTED, peers=peers), None) == Hardware(2, 1, 3)
    assert Hardware.of(DRAFTED, None) == Hardware(1, 1, 2)
    assert Hardware.of(GatewayInfo(), None) == Hardware(1, 0, 1)
    assert Hardware.of(DRAFTED, 5).plain_targets == 1.25


def caption(total_s: float, generate_s: float, prefill_s: float, decode_s: float = 0.0) -> Caption:
    timings = Timings(
        total_s=total_s, generate_s=generate_s, target_prefill_s=prefill_s, target_encode_s=0.25, decode_s=decode_s
    )
    return Caption("a", 100, None, timings=timings)


def test_the_rest_is_what_prefills_leave() -> None:
    alone = caption(3.5, 2.0, 0.75, decode_s=0.5)
    assert rest_time([(10.0, alone)]) == pytest.approx(2.5)
    beside = caption(5.0, 4.0, 0.75)
    assert rest_time([(10.0, beside), (10.0, beside)]) == pytest.approx(3.0), "both prefills lie within"
    assert rest_time([(10.0, caption(1.0, 0.9, 5.0))]) == pytest.approx(0.9), "never less than one has written"


async def test_what_a_draft_took_part_in_is_compared_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A document of 100 s beside a video of 10 s, a caption that another film's was taken for, and one of no draft."""
    drafted = replace(caption(10.0, 8.0, 1.0), speculation=Speculation(judged=50, accepted=40))
    made = [
        (JobKind.VIDEO, 10.0, drafted),
        (JobKind.VIDEO, 10.0, replace(drafted, shared=SharedFrom("j2"))),
        (JobKind.DOCUMENT, 110.0, drafted),
    ]

    def captioned(only: JobKind | None = None) -> Callable[..., AsyncIterator[tuple[Job, list[JobPart]]]]:
        async def run(*given: Any) -> AsyncIterator[tuple[Job, list[JobPart]]]:
            for place, (kind, ended_s, each) in enumerate(made):
                if only in (None, kind):
                    state = JobState.DONE
                    yield (
                        Job("j", str(place), "a", state, "", "", "", 1, 0, "w", 0.0, 0.0, ended_s, each, kind=kind),
                        [],
                    )

        return run

    items = [BatchItem(str(place), "a") for place in range(len(made))]
    asked: Any = (None, items, BatchOptions(), len(items), 0, lambda job, parts: 100)
    monkeypatch.setattr(archive_estimate, "run_trial", captioned())
    both = await caption_sample(*asked)
    assert both.drafted is not None and both.drafted.num_tokens == 100
    assert both.drafted.wall_s == pytest.approx(10.0)
    monkeypatch.setattr(archive_estimate, "run_trial", captioned(JobKind.DOCUMENT))
    documents = await caption_sample(*asked)
    assert documents.drafted is None and documents.totals.judged == 50


async def test_items_that_fail_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four videos of 10 s, one after the other, each second one fails: twenty take as long as ten."""

    async def run(client: Any, purpose: str, options: BatchOptions, items: list[BatchItem], follow: Any) -> Any:
        for place, item in enumerate(items):
            made = caption(10.0, 8.0, 1.0) if item.source == "good" else None
            state, ended_s = JobState.DONE if made else JobState.FAILED, 10.0 * place + 10.0
            yield Job("j", item.custom_id, "a", state, "", "", "", 1, 0, "w", 0.0, 0.0, ended_s, made), []

    monkeypatch.setattr(archive_estimate, "run_trial", run)
    how: Any = (BatchOptions(), 4, 0, lambda job, parts: 100)
    items = [BatchItem("", "bad" if place % 2 else "good") for place in range(4)]
    sampled = await caption_sample(cast(ArchiveClient, None), items, *how)
    found = replace(sampled, strata=sampled.strata * 5).estimate()
    assert (found.num_items, len(sampled.failures)) == (20, 2)
    assert found.seconds.times(found.at_once).value == pytest.approx(100.0)
    assert (found.tokens.value, found.result_bytes.value) == (1000, 1000)
    with pytest.raises(InvalidRequest, match="no item of the sample could be captioned"):
        await caption_sample(cast(ArchiveClient, None), items[1::2], *how)


def test_formats_of_addresses_are_those_of_their_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_estimate, "strata_of", lambda sizes, formats: np.array(formats))
    sources = ("https://a/v.mp4?sig=1", "https://a/w.mp4?sig=2", "https://a/v.mkv", "v.mp4")
    assert stratified(BatchItem(source, source) for source in sources).tolist() == [0, 0, 1, 0]


def test_captions_at_once_are_counted_by_their_own_time() -> None:
    found = drafted_time(5.0, [caption(5.0, 4.0, 0.75)] * 2)
    assert (found.at_once, found.prefill_s, found.num_tokens) == (2.0, 2.0, 200)
