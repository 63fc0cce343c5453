"""What a record claims, and what its replay has to say again."""

import hashlib
from typing import Any

import pytest

from slipstream.archive.audits import SUMMARY, AuditOutcome, check_digests, claim_of, compare, replay_item
from slipstream.options import CaptionOptions

TARGET = {"revision": "r", "dtype": "float32"}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"text": text, "receipt": {"text_sha256": hashlib.sha256(text.encode()).hexdigest()}} | more


def record(*segments: dict[str, Any], summary: str | None = None, **options: Any) -> dict[str, Any]:
    parts = [{"segment": number, "start_s": 0.0, "end_s": 1.0} | each for number, each in enumerate(segments)]
    receipt = {"options": {"segments": "fixed:1s", **options}, "video_sha256": "v", "target": TARGET}
    whole = {"custom_id": "a", "source": "/a", "kind": "film", "state": "done", "parts": parts, "receipt": receipt}
    return whole | ({} if summary is None else {"summary": answer(summary)})


def verdicts(made: dict[str, Any], again: dict[str, Any]) -> dict[str, AuditOutcome]:
    claim = claim_of(made)
    assert claim is not None
    return {finding.where: finding.verdict for finding in compare(claim, again)}


def test_every_answer_and_the_summary_are_compared() -> None:
    made = record(answer("x", answers=[answer("x"), answer("y")]), summary="z")
    again = record(answer("x", answers=[answer("x"), answer("other")]), summary="z")
    same, differs = AuditOutcome.SAME, AuditOutcome.DIFFERS
    found = {"segment 0": same, "segment 0, prompt 2": differs, "the summary": same}
    assert verdicts(made, again) == found


@pytest.mark.parametrize("spared", [{"shared": {"job_id": "", "segment": 0}}, {"skipped": "black"}])
def test_what_was_spared_need_not_be_said_again_and_neither_what_was_made_of_it(spared: dict[str, Any]) -> None:
    made = record(answer("x"), answer("x", **spared), summary="z")
    again = record(answer("x"), answer("another"), summary="another")
    assert verdicts(made, again) == {"segment 0": AuditOutcome.SAME, "segment 1": AuditOutcome.SKIPPED}


def test_a_summary_of_other_segments_need_not_be_said_again() -> None:
    torn = {"error": "torn"}
    same, failed, skipped = AuditOutcome.SAME, AuditOutcome.FAILED, AuditOutcome.SKIPPED
    whole, part = record(answer("x"), answer("y"), summary="z"), record(answer("x"), torn, summary="of x")
    assert verdicts(part, whole) == {"segment 0": same, "the summary": skipped}
    assert verdicts(whole, part) == {"segment 0": same, "segment 1": failed, "the summary": skipped}
    without = record(answer("x"), answer("y")) | {"summary": torn}
    assert verdicts(whole, without) == {"segment 0": same, "segment 1": same, "the summary": failed}


def test_a_replay_spares_nothing() -> None:
    claim = claim_of(record(answer("x"), duplicates="share", skip_marked="black", prompts=["p", "q"]))
    assert claim is not None
    options = CaptionOptions.from_mapping(replay_item(claim, 0.5).caption)
    asked = options.get("duplicates", ""), options.get("skip_marked", ""), options.segments, options.questions
    assert asked == ("", "", "fixed:1s", ("p", "q"))


def test_a_summary_that_was_altered_is_found_by_its_digest() -> None:
    made = record(answer("x"), summary="z")
    made["summary"]["text"] = "w"
    claim = claim_of(made)
    assert claim is not None and claim.texts[-1].number == SUMMARY
    assert [finding.where for finding in check_digests(claim)] == ["the summary"]


@pytest.mark.parametrize(("whole", "where"), [("x\n\ny\n\nw", []), ("x\n\nw", [""]), (None, [])])
def test_the_text_of_a_film_is_that_of_its_segments(whole: str | None, where: list[str]) -> None:
    made = record(answer("x", answers=[answer("x"), answer("y")]), answer(""), answer("w"), summary="z")
    claim = claim_of(made | {"text": whole})
    assert claim is not None
    found = check_digests(claim)
    assert [finding.where for finding in found] == where
    assert all(finding.verdict is AuditOutcome.ALTERED for finding in found)


@pytest.mark.parametrize(("identity", "asked"), [("ab" * 32, "ab" * 32), (f"object-{'ab' * 32}", "")])
def test_a_replay_asks_for_a_digest_where_there_is_one(identity: str, asked: str) -> None:
    made = record(answer("x"))
    made["receipt"]["video_sha256"] = identity
    claim = claim_of(made)
    assert claim is not None and replay_item(claim, 0.5).sha256 == asked


def test_an_object_that_is_another_one_now_confirms_nothing() -> None:
    again = record(answer("x"))
    again["receipt"]["video_sha256"] = "object-of-today"
    assert verdicts(record(answer("x")), again) == {"": AuditOutcome.FAILED}
