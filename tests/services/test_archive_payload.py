"""What the archive keeps: equal things become equal texts, nothing is lost, and another release's is recognised."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive.intake import check_batch, read_item
from slipstream.archive.messages import (
    BatchItem,
    BatchOptions,
    BatchTotals,
    JobKind,
    ModelReceipt,
    OptionValues,
    Receipt,
    document_options,
    document_values,
)
from slipstream.archive.quality import COUNTED_MARKS
from slipstream.archive.queue import Priority
from slipstream.archive.records import (
    BatchPayload,
    JobPayload,
    OtherVersion,
    content_key,
    options_used,
    parts_key,
    read_batch,
    read_job,
    read_result,
    tallies,
    write_batch,
    write_job,
    write_result,
)
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.plan import CaptionPlan, make_plan
from slipstream.documents.messages import DocumentRequest
from slipstream.documents.reading import OCR_WHEN, STAGES
from slipstream.documents.surfaces import SURFACES
from slipstream.errors import InvalidConfig
from slipstream.messages import Caption, PassCost, SharedFrom, Speculation, VideoFacts
from slipstream.options import OPTIONS, CaptionOptions
from slipstream.rpc.archive_codec import batch_item_message, read_batch_item
from slipstream.rpc.v1 import archive_pb2
from slipstream.sampling.params import STRUCTURES
from slipstream.service_info import ModelInfo
from slipstream.speculation.protocol import FinishReason

CONFIG = GatewayConfig(listen="", target="t:1", draft="d:1")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def option_values(**others: st.SearchStrategy[Any]) -> st.SearchStrategy[OptionValues]:
    """Some options, each of them perhaps."""
    kinds: Mapping[str, st.SearchStrategy[Any]] = {
        "prompt": TEXT,
        "num_frames": st.integers(0, 2**32 - 1),
        "seed": st.integers(0, 2**64 - 1),
        "alpha": st.floats(allow_nan=False),
        "gate": st.booleans(),
        "stop": st.lists(TEXT, min_size=1, max_size=3).map(tuple),
    }
    return st.fixed_dictionaries({}, optional={**kinds, **others})


VALUES = option_values()
VALID = option_values(
    num_frames=st.integers(1, 2**32 - 1),
    seed=st.integers(0, 2**63 - 1),
    alpha=st.floats(0, 1),
    stop=st.lists(st.text("ab.", min_size=1), min_size=1, max_size=3).map(tuple),
)


@given(VALUES, TEXT, TEXT)
def test_jobs_and_batches_come_back_as_they_were(options: OptionValues, source: str, key: str) -> None:
    job, batch = JobPayload(source, options, "ab"), BatchPayload(key, options)
    assert read_job(write_job(job)) == job and write_job(read_job(write_job(job))) == write_job(job)
    assert read_batch(write_batch(batch)) == batch and write_batch(read_batch(write_batch(batch))) == write_batch(batch)


@given(VALID, VALID)
def test_a_jobs_options_stand_in_place_of_its_batchs(own: OptionValues, shared: OptionValues) -> None:
    merged = JobPayload("", own, "").merged_options(BatchPayload("", shared)).given()
    for name in ("prompt", "num_frames", "seed", "alpha", "gate", "stop"):
        giver = own if name in own else shared
        assert (name in merged) == (name in giver) and merged.get(name) == giver.get(name)


@pytest.mark.parametrize("own", [{"choice": ["a", "b"]}, {"regex": "a+"}, {"json_schema": '{"type": "null"}'}])
def test_a_jobs_structure_stands_in_place_of_any_of_its_batchs(own: OptionValues) -> None:
    for shared in ({"json_schema": "{}"}, {"choice": ["c"], "seed": 3}, {"regex": "b"}):
        batch = BatchPayload("", shared)
        merged = JobPayload("", own, "").merged_options(batch)
        assert merged == CaptionOptions(**own).over(CaptionOptions(**shared).without(*STRUCTURES))
        assert not read_item(BatchItem("a", "/a.mp4", own), 1, batch, Priority.NORMAL, CONFIG).rejection
    free = JobPayload("", {"json_schema": ""}, "").merged_options(BatchPayload("", {"json_schema": "{}"}))
    assert not free.sampling.is_structured, "what is empty asks for free text"


@pytest.mark.parametrize(
    ("own", "code"),
    [
        ({"num_frames": CONFIG.max_frames + 1}, "OUT_OF_RANGE"),
        ({"max_new_tokens": CONFIG.max_new_tokens + 1}, "OUT_OF_RANGE"),
        ({"method": "none"}, "INVALID_ARGUMENT"),
    ],
)
def test_what_cannot_run_has_the_status_that_a_call_would_have(own: OptionValues, code: str) -> None:
    job = read_item(BatchItem("a", "/a.mp4", own), 1, BatchPayload("", {}), Priority.NORMAL, CONFIG)
    assert job.rejection and job.rejection_code == code


def test_what_the_target_would_ignore_is_refused_as_it_is_handed_in() -> None:
    older, newer = ModelInfo(), ModelInfo(keeps_structure=True, honours=frozenset({"min_p"}))
    for asked, why in (({"regex": "a+"}, "can keep no text to a"), ({"min_p": 0.1}, "knows no min_p")):
        shared, own = BatchOptions(caption=asked), BatchItem("a", "/a.mp4", asked)
        check_batch(shared, CONFIG)
        check_batch(shared, CONFIG, newer)
        with pytest.raises(InvalidConfig, match=why):
            check_batch(shared, CONFIG, older)
        told = [read_item(own, 1, BatchPayload("", {}), Priority.LOW, CONFIG, one).rejection for one in (newer, older)]
        assert not told[0] and why in told[1]


@pytest.mark.parametrize("own", [{"choice": ()}, {"choice": []}, {"regex": ""}, {"json_schema": ""}])
def test_a_job_that_asks_for_free_text_is_handed_in_so(own: OptionValues) -> None:
    """A line of a manifest has what `CaptionOptions` made of it."""
    sent = read_batch_item(batch_item_message(BatchItem("a", "/a.mp4", own)))
    merged = JobPayload("", sent.caption, "").merged_options(BatchPayload("", {"choice": ["c"], "seed": 3}))
    assert not merged.sampling.is_structured and merged.seed == 3


@pytest.mark.parametrize("name", [spec.name for spec in OPTIONS if spec.repeated])
@pytest.mark.parametrize("empty", [(), []])
def test_an_empty_list_of_a_job_takes_its_batchs_back(name: str, empty: Sequence[str]) -> None:
    item = BatchItem("a", "/a.mp4", {name: empty, "seed": 3})
    sent = read_batch_item(archive_pb2.BatchItem.FromString(batch_item_message(item).SerializeToString()))
    batch = BatchPayload("", {name: ("a", "b"), "num_frames": 4})
    read = read_job(write_job(JobPayload("", sent.caption, "")))
    assert read.merged_options(batch).given() == {name: (), "seed": 3, "num_frames": 4}
    assert not read_item(sent, 1, BatchPayload("", {}), Priority.NORMAL, CONFIG).rejection


def test_a_list_that_is_none_is_refused_as_it_is_handed_in() -> None:
    for name in ("seed", "path", "magic"):
        sent = read_batch_item(archive_pb2.BatchItem(custom_id="a", source="/a.mp4", emptied=[name]))
        job = read_item(sent, 1, BatchPayload("", {}), Priority.NORMAL, CONFIG)
        assert name in job.rejection and write_job(JobPayload("", sent.caption, ""))


def test_a_schema_of_a_job_may_be_an_object() -> None:
    sent = read_batch_item(batch_item_message(BatchItem("a", "/a.mp4", {"json_schema": {"type": "null"}})))
    assert sent.caption == {"json_schema": '{"type": "null"}'}


def test_results_come_back_as_they_were() -> None:
    used = {"method": "slipstream", "pruner": "uv", "alpha": 0.9, "policy": "self_clocked", "max_window": 16}
    caption = Caption(
        "Ein Hund läuft. \U0001f415",
        4,
        FinishReason.STOP,
        request_id="r",
        options=used | {"tolerance": 0.0, "tolerance_rule": "", "lossy": "", "lossy_keep": 0.0},
        video=VideoFacts(num_frames=2, timestamps_s=(0.0, 0.5), warnings=("odd",)),
        speculation=Speculation(tau=0.5, pass_costs=(PassCost(0, 3, 0.25, 0.5),)),
    )
    model = ModelReceipt("big", "ab", "float32")
    options = {"prompt": "Why?", "seed": 2**40, "stop": (".", "!"), "gate": False}
    for draft in (None, model):
        receipt = Receipt("9.9", model, draft, options, "ab", 2**40, "cd", runs=2)
        assert read_result(write_result(caption, receipt)) == (caption, receipt)


@pytest.mark.parametrize(
    "said",
    [
        {"system": "Be short."},
        {"turns": ("What?", "A cat.")},
        {"fps": 2.0},
        {"choice": ("a cat", "a dog")},
        {"regex": "a+"},
        {"json_schema": '{"type": "object"}'},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"min_new_tokens": 5},
    ],
)
def test_what_a_release_would_leave_out_of_a_job_is_left_alone_by_it(said: OptionValues) -> None:
    for kind in (JobKind.VIDEO, JobKind.DOCUMENT, JobKind.FILM):
        job = JobPayload("a", said, "", kind)
        assert json.loads(write_job(job))["v"] == 5 and read_job(write_job(job)) == job
    batch = BatchPayload("k", said)
    assert json.loads(write_batch(batch))["v"] == 5 and read_batch(write_batch(batch)) == batch
    page = JobPayload("a", {"fps": 2.0, "temperature": 0.5}, "", JobKind.DOCUMENT).page_options(batch)
    assert page.given() == {"temperature": 0.5} | {name: said[name] for name in said if name not in ("turns", "fps")}


def test_unknown_fields_are_ignored_and_other_versions_recognised() -> None:
    job = JobPayload("/a.mp4", {"num_frames": 3}, "")
    content = json.loads(write_job(job))
    content["caption"]["mood"] = "cheerful"
    assert read_job(json.dumps(content | {"colour": 7})) == job
    for text in (json.dumps(content | {"v": 6}), "", "[]", "{", "{}"):
        for read in (read_job, read_batch, read_result):
            with pytest.raises(OtherVersion):
                read(text)
    for text in ('{"v":1}', '{"v":1,"summary":"?","receipt":""}', '{"v":1,"summary":"//8=","receipt":""}'):
        with pytest.raises(OtherVersion):
            read_result(text)


def plan_of(**asked: Any) -> CaptionPlan:
    return make_plan(CaptionOptions(**asked), CONFIG, path="/a", request_id="one")


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "pages": st.sampled_from(["1", "2-5,9"]),
            "dpi": st.integers(20, 600),
            "text_layer": st.booleans(),
            "stage": st.sampled_from(STAGES),
            "ocr": st.sampled_from(OCR_WHEN),
            "surface": st.sampled_from(sorted(SURFACES)),
        },
    )
)
def test_ways_of_reading_and_their_options_are_the_same(values: OptionValues) -> None:
    """So what a way of reading is made of is that way again."""
    asked = document_options(values)
    told = document_values(asked)
    assert document_options(told) == asked and told.items() <= values.items()
    batch = BatchPayload("", {}, values)
    assert read_batch(write_batch(batch)) == batch
    assert JobPayload("", {}, "", JobKind.DOCUMENT).merged_document(batch) == asked


def test_how_a_document_is_read_is_in_the_key_of_its_parts() -> None:
    def key(**values: Any) -> str:
        return parts_key("sha", document_options(values), plan_of(), ModelInfo(), None)

    keys = {key(), key(dpi=90), key(stage="region+page"), key(ocr="never"), key(ocr="paying")}
    keys |= {key(surface="lines"), key(surface="markdown")}
    assert len(keys) == 7 and key(ocr="always") == key()
    way = json.dumps(dataclasses.asdict(DocumentRequest()) | {"stage": "page"}, sort_keys=True)
    assert key().endswith(f" {way}"), "as older releases wrote it"


def test_what_the_content_key_depends_on() -> None:
    target, draft = ModelInfo(revision="t", dtype="float32"), ModelInfo(revision="d")
    plan = plan_of()
    key = content_key("sha", plan, target, draft)
    assert content_key("sha", replace(plan, path="/b", request_id="two"), target, draft) == key
    assert content_key("sha", plan, target, None) == key, "with coupled draws the text does not depend on the draft"
    others = [
        content_key("other", plan, target, draft),
        content_key("sha", plan_of(seed=1), target, draft),
        content_key("sha", plan_of(prompt="Why?"), target, draft),
        content_key("sha", plan, ModelInfo(revision="t2", dtype="float32"), draft),
        content_key("sha", plan, ModelInfo(revision="t", dtype="bfloat16"), draft),
    ]
    drawn = plan_of(temperature=1.0, sampling_rule="rejection")
    others += [content_key("sha", drawn, target, model) for model in (draft, None, target)]
    assert len({key, *others}) == len(others) + 1


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.5, "top_k": 4, "stop": (".",), "seed": 9, "gate": False, "gamma": 3},
        {"method": "specvlm", "alpha": 0.5},
        {"method": "autoregressive", "lossy": "fastv", "lossy_keep": 0.25},
    ],
)
def test_a_receipts_options_ask_for_the_same_again(asked: dict[str, Any]) -> None:
    plan = plan_of(**asked)
    assert plan_of(**options_used(plan)) == plan


def test_no_option_is_forgotten_in_receipts() -> None:
    """A new option that were missing would be missing from the content key, too."""
    plans = (
        plan_of(gamma=3, stop=(".",), segments="fixed:10s", prompts=("a", "b"), summary=True, summary_prompt="c"),
        plan_of(duplicates="share", skip_marked="black", fps=2.0, system="a", turns=("b", "c")),
        plan_of(method="autoregressive", lossy="fastv"),
        plan_of(method="hsd", tolerance=0.5, prediction=("a",)),
    )
    told_only = {"trace", "want_kept", "logprobs", "top_logprobs"}
    assert {name for plan in plans for name in options_used(plan)} == {spec.name for spec in OPTIONS} - told_only


def test_tallies_are_fields_of_the_totals_and_plain_time_is_what_was_measured() -> None:
    speculation = Speculation(judged=5, accepted=4, plain_pass_s=9.0, pass_costs=(PassCost(0, 1, 0.0, round_s=0.5),))
    counted = tallies(Caption("", 11, None, speculation=speculation))
    assert counted["plain_generate_s"] == 5.0 and counted["tokens"] == 11
    names = {field.name for field in dataclasses.fields(BatchTotals)}
    marks = {mark.value for mark in COUNTED_MARKS}
    assert marks <= names and counted["empty"] == 1
    assert set(counted) - marks == names - marks - {"reused", "pages", "segments", "shared", "skipped"}
    assert tallies(Caption("a cat", 2, None, shared=SharedFrom("job", 3, 4.5))) == {"shared": 1}
    assert tallies(Caption("", 0, None, skipped="black")) == {"skipped": 1}
    windowed = replace(speculation, passes=3, windows=2, plain_token_s=0.2)
    assert tallies(Caption("", 11, None, speculation=windowed))["plain_generate_s"] == 2.0, "no round trip a token"
    plain = replace(speculation, passes=10, plain_token_s=0.2)
    assert tallies(Caption("", 11, None, speculation=plain))["plain_generate_s"] == 5.0, "which is its own time"
    unmeasured = Speculation(speed_ratio=4.0, draft_pass_s=0.1)
    assert tallies(Caption("", 3, None, speculation=unmeasured))["plain_generate_s"] == pytest.approx(0.8)
