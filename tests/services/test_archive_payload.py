"""What the archive keeps: equal things become equal texts, nothing is lost, and another release's is recognised."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.captioning.options import resolve_options

from slipstream.archive.records import (
    BatchPayload,
    JobPayload,
    OtherVersion,
    content_key,
    options_message,
    read_batch,
    read_job,
    read_result,
    tallies,
    write_batch,
    write_job,
    write_result,
)
from slipstream.captioning.config import GatewayConfig
from slipstream.rpc.v1 import archive_pb2, common_pb2, gateway_pb2

CONFIG = GatewayConfig(listen="", target="t:1", draft="d:1")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
OPTIONS = st.builds(
    gateway_pb2.CaptionOptions,
    prompt=st.none() | TEXT,
    num_frames=st.none() | st.integers(0, 2**32 - 1),
    seed=st.none() | st.integers(0, 2**64 - 1),
    alpha=st.none() | st.floats(allow_nan=False),
    gate=st.none() | st.booleans(),
    stop=st.lists(TEXT, max_size=3),
)


@given(OPTIONS, TEXT, TEXT)
def test_jobs_and_batches_come_back_as_they_were(options: gateway_pb2.CaptionOptions, source: str, key: str) -> None:
    job, batch = JobPayload(source, options, "ab"), BatchPayload(key, options)
    assert read_job(write_job(job)) == job and write_job(read_job(write_job(job))) == write_job(job)
    assert read_batch(write_batch(batch)) == batch and write_batch(read_batch(write_batch(batch))) == write_batch(batch)


@given(OPTIONS, OPTIONS)
def test_a_jobs_options_stand_in_place_of_its_batchs(
    own: gateway_pb2.CaptionOptions, shared: gateway_pb2.CaptionOptions
) -> None:
    merged = JobPayload("", own, "").merged_options(BatchPayload("", shared))
    for name in ("prompt", "num_frames", "seed", "alpha", "gate"):
        giver = own if own.HasField(name) else shared
        assert merged.HasField(name) == giver.HasField(name) and getattr(merged, name) == getattr(giver, name)
    assert list(merged.stop) == list(own.stop or shared.stop)


def test_results_come_back_as_they_were() -> None:
    summary = gateway_pb2.Summary(text="Ein Hund läuft. \U0001f415", num_tokens=4)
    receipt = archive_pb2.Receipt(runs=2, video_sha256="ab")
    assert read_result(write_result(summary, receipt)) == (summary, receipt)


def test_unknown_fields_are_ignored_and_other_versions_recognised() -> None:
    job = JobPayload("/a.mp4", gateway_pb2.CaptionOptions(num_frames=3), "")
    content = json.loads(write_job(job))
    content["caption"]["mood"] = "cheerful"
    assert read_job(json.dumps(content | {"colour": 7})) == job
    for text in (json.dumps(content | {"v": 2}), "", "[]", "{", "{}"):
        for read in (read_job, read_batch, read_result):
            with pytest.raises(OtherVersion):
                read(text)
    for text in ('{"v":1}', '{"v":1,"summary":"?","receipt":""}', '{"v":1,"summary":"//8=","receipt":""}'):
        with pytest.raises(OtherVersion):
            read_result(text)


def test_what_the_content_key_depends_on() -> None:
    target, draft = common_pb2.ModelInfo(revision="t", dtype="float32"), common_pb2.ModelInfo(revision="d")
    options = resolve_options(gateway_pb2.CaptionOptions(path="/a", request_id="one"), CONFIG)
    key = content_key("sha", options, target, draft)
    assert content_key("sha", replace(options, path="/b", request_id="two"), target, draft) == key
    assert content_key("sha", options, target, None) == key, "with coupled draws the text does not depend on the draft"
    others = [
        content_key("other", options, target, draft),
        content_key("sha", replace(options, seed=1), target, draft),
        content_key("sha", replace(options, prompt="Why?"), target, draft),
        content_key("sha", options, common_pb2.ModelInfo(revision="t2", dtype="float32"), draft),
        content_key("sha", options, common_pb2.ModelInfo(revision="t", dtype="bfloat16"), draft),
    ]
    sampling = replace(options.sampling, temperature=1.0, rule="rejection")
    drawn = replace(options, sampling=sampling)
    others += [content_key("sha", drawn, target, model) for model in (draft, None, target)]
    assert len({key, *others}) == len(others) + 1


@pytest.mark.parametrize(
    "asked",
    [
        gateway_pb2.CaptionOptions(temperature=0.5, top_k=4, stop=["."], seed=9, gate=False, gamma=3),
        gateway_pb2.CaptionOptions(method="specvlm", alpha=0.5),
        gateway_pb2.CaptionOptions(method="autoregressive", lossy="fastv", lossy_keep=0.25),
    ],
)
def test_a_receipts_options_ask_for_the_same_again(asked: gateway_pb2.CaptionOptions) -> None:
    options = resolve_options(asked, CONFIG)
    again = resolve_options(options_message(options), CONFIG)
    assert replace(again, request_id=options.request_id) == options


def test_no_option_is_forgotten_in_receipts() -> None:
    """A new option that were missing would be missing from the content key, too."""
    fields = {field.name for field in gateway_pb2.CaptionOptions.DESCRIPTOR.fields} - {"path", "request_id", "trace"}
    chain = resolve_options(gateway_pb2.CaptionOptions(gamma=3, stop=["."]), CONFIG)
    lossy = resolve_options(gateway_pb2.CaptionOptions(method="autoregressive", lossy="fastv"), CONFIG)
    told = {field.name for options in (chain, lossy) for field, _ in options_message(options).ListFields()}
    assert told == fields


def test_tallies_are_fields_of_the_totals_and_plain_time_is_what_was_measured() -> None:
    speculation = gateway_pb2.Speculation(
        judged=5, accepted=4, plain_pass_s=9.0, pass_costs=[gateway_pb2.PassCost(window=0, count=1, round_s=0.5)]
    )
    counted = tallies(gateway_pb2.Summary(num_tokens=11, speculation=speculation))
    assert counted["plain_generate_s"] == 5.0 and counted["tokens"] == 11
    names = {field.name for field in archive_pb2.BatchTotals.DESCRIPTOR.fields}
    assert set(counted) == names - {"reused"}
    unmeasured = gateway_pb2.Speculation(speed_ratio=4.0, draft_pass_s=0.1)
    assert tallies(gateway_pb2.Summary(num_tokens=3, speculation=unmeasured))["plain_generate_s"] == pytest.approx(0.8)
