"""What a result of the archive claims, what to ask so that it is made again by plain decoding, and whether both agree.
Pure: records in, findings out.

A record is a line of an export. Its text must be the one that its receipt has the digest of; and the target alone,
asked the same of the same file, must say it again.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from slipstream.archive.messages import BatchItem, JobKind
from slipstream.documents.pages import page_ranges
from slipstream.errors import InvalidRequest
from slipstream.objects.store import IDENTITY
from slipstream.options import OF_FILMS, OPTIONS_BY_NAME, CaptionOptions

PLAIN = "autoregressive"
SUMMARY = -1
_TEXT_GROUPS = ("common", "sampling")
"""Of the table of options: those that the text depends on."""
_SPARING = ("duplicates", "skip_marked")
"""But for these: a replay makes every text."""


class AuditOutcome(StrEnum):
    """What became of a result that was looked at."""

    SAME = "same"
    ALTERED = "altered"
    """Its text is not the one that its receipt was made for."""
    DIFFERS = "differs"
    """Plain decoding says another text."""
    FAILED = "failed"
    """It could not be made again: nothing is known."""
    SKIPPED = "skipped"
    """Plain decoding does not have to say the same: why is told."""


@dataclass(frozen=True)
class Finding:
    """One result, page or segment."""

    custom_id: str
    verdict: AuditOutcome
    reason: str = ""
    where: str = ""
    """Such as "page 3"; empty: the whole."""
    text: str = ""
    """As it is kept, and in `plain` as plain decoding says it."""
    plain: str = ""


@dataclass(frozen=True)
class Said:
    """One text of a result."""

    number: int
    """Of the segment or page; 0 for a video, `SUMMARY` for what sums up a film."""
    text: str
    text_sha256: str
    dpi: float = 0.0
    prompt: int = 0
    """Which of several it answers."""
    spared: str = ""
    """Why its replay need not say it, as one that was not made of these frames; empty for most."""


@dataclass(frozen=True)
class Claim:
    """A result as its record has it."""

    custom_id: str
    source: str
    kind: JobKind
    options: Mapping[str, Any]
    video_sha256: str
    target: tuple[str, str]
    """Revision and dtype of the model that is said to have made it."""
    texts: tuple[Said, ...]
    whole: str | None = None
    """The text of a document or film, which is that of its parts; None of a video, and where parts are missing."""

    def where(self, said: Said) -> str:
        """What people call that part."""
        if said.number == SUMMARY:
            return "the summary"
        part = {JobKind.FILM: "segment", JobKind.DOCUMENT: "page"}.get(self.kind, "")
        return part and f"{part} {said.number}" + (f", prompt {said.prompt + 1}" if said.prompt else "")


def claim_of(record: Mapping[str, Any]) -> Claim | None:
    """What a record claims; None where it has no result, as jobs that failed, or no receipt that can be read."""
    try:
        receipt, kind = record["receipt"], JobKind(record.get("kind") or JobKind.VIDEO)
        return Claim(
            custom_id=str(record["custom_id"]),
            source=str(record["source"]),
            kind=kind,
            options=dict(receipt["options"]),
            video_sha256=str(receipt["video_sha256"]),
            target=(str(receipt["target"]["revision"]), str(receipt["target"]["dtype"])),
            texts=tuple(_texts_of(record, kind)),
            whole=record.get("text") if kind.has_parts else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def without_receipt(record: Mapping[str, Any]) -> Finding:
    """Of a record that is done and claims nothing: there is nothing to hold its text against."""
    reason = "it is done, and has no receipt that can be read"
    return Finding(str(record.get("custom_id")), AuditOutcome.ALTERED, reason)


def _texts_of(record: Mapping[str, Any], kind: JobKind) -> list[Said]:
    if not kind.has_parts:
        return [_said(record, 0)]
    number = "segment" if kind is JobKind.FILM else "page"
    texts = [
        _said(answer, int(part[number]), prompt)
        for part in record["parts"]
        for prompt, answer in enumerate(part.get("answers") or [part])
        if answer.get("text") is not None
    ]
    summary = record.get("summary") or {}
    if summary.get("text") is not None and not any(said.spared for said in texts):  # it is made of the others
        texts.append(_said(summary, SUMMARY))
    return texts


def _said(record: Mapping[str, Any], number: int, prompt: int = 0) -> Said:
    spared = "it is a near-duplicate's" if record.get("shared") else ""
    if record.get("skipped"):
        spared = f"the video is {record['skipped']}"
    digest, dpi = str(record["receipt"]["text_sha256"]), float(record.get("dpi") or 0)
    return Said(number, str(record["text"]), digest, dpi, prompt, spared)


def check_digests(claim: Claim) -> list[Finding]:
    """A finding for each text that is not the one of its receipt; where all are, for a whole that is not theirs."""
    altered = [
        Finding(
            claim.custom_id,
            AuditOutcome.ALTERED,
            "its SHA-256 is not the one in its receipt",
            claim.where(said),
            said.text,
        )
        for said in claim.texts
        if hashlib.sha256(said.text.encode(errors="surrogatepass")).hexdigest() != said.text_sha256
    ]
    parts = "\n\n".join(said.text for said in claim.texts if said.text and said.number != SUMMARY)
    if altered or claim.whole in (None, parts):
        return altered
    return [Finding(claim.custom_id, AuditOutcome.ALTERED, "its text is not that of its parts")]


def why_not_replayed(claim: Claim) -> str:
    """Why plain decoding need not say the same; empty where it must."""
    options = claim.options
    if options.get("lossy"):
        return f"it was made by {options['lossy']!r}, which changes the text"
    if options.get("tolerance", 1) < 1:
        return "it took what was nearly as likely (tolerance below 1)"
    if options.get("sampling_rule") == "rejection" and options.get("temperature"):
        return "it was sampled by the rule 'rejection', by which the text depends on the draft"
    return "" if claim.texts else "it has no text"


def replay_item(claim: Claim, nonce: float) -> BatchItem:
    """What to hand in so that the target makes it anew from the same file: every option that the text depends on, as
    the receipt has it. `nonce` (0 to 1) goes where plain decoding does not look: no kept result is of the same name.
    Of an object that was read by ranges nobody knows the digest: `compare` sees whether it is the same one.

    Raises `InvalidRequest` for options that this release does not take.
    """
    names = {name for name, spec in OPTIONS_BY_NAME.items() if spec.group in _TEXT_GROUPS}
    kept = {name: value for name, value in claim.options.items() if name in names}
    for left_out in _SPARING if claim.kind is JobKind.FILM else OF_FILMS:
        kept.pop(left_out, None)
    options = CaptionOptions.from_mapping(kept | {"method": PLAIN, "alpha": nonce})
    document: dict[str, Any] = {}
    if claim.kind is JobKind.DOCUMENT:
        document["pages"] = page_ranges([said.number for said in claim.texts])
        if dpi := round(max(said.dpi for said in claim.texts)):
            document["dpi"] = dpi
    kind = JobKind.DOCUMENT if claim.kind is JobKind.DOCUMENT else JobKind.VIDEO
    sha256 = "" if claim.video_sha256.startswith(IDENTITY) else claim.video_sha256
    return BatchItem(claim.custom_id, claim.source, options.given(), sha256, kind, document)


def compare(claim: Claim, replayed: Mapping[str, Any]) -> list[Finding]:
    """A finding for each text of the claim, beside the record of its replay."""
    again = claim_of(replayed)
    if again is None or replayed.get("state") != "done":
        reason = str(replayed.get("error") or "its replay has no result")
        return [Finding(claim.custom_id, AuditOutcome.FAILED, reason)]
    if again.target != claim.target:
        (revision, dtype), (theirs, their_dtype) = claim.target, again.target
        reason = f"made by the target {revision[:12]} ({dtype}), replayed by {theirs[:12]} ({their_dtype})"
        return [Finding(claim.custom_id, AuditOutcome.SKIPPED, reason)]
    if (replayed.get("receipt") or {}).get("reused"):
        reason = "the archive took over a result instead of making it again"
        return [Finding(claim.custom_id, AuditOutcome.FAILED, reason)]
    if again.video_sha256 != claim.video_sha256:
        return [Finding(claim.custom_id, AuditOutcome.FAILED, "the object is another one now, or was read another way")]
    texts = {(said.number, said.prompt): said for said in again.texts}
    made, unlike = claim.texts, {(said.number, said.prompt) for said in claim.texts} ^ texts.keys()
    if unlike - {(SUMMARY, 0)}:  # a segment that can be decoded at times alone
        reason = "its replay sums up other segments"
        made = tuple(replace(said, spared=reason) if said.number == SUMMARY else said for said in made)
    return [_finding(claim, said, texts.get((said.number, said.prompt))) for said in made]


def _finding(claim: Claim, said: Said, again: Said | None) -> Finding:
    where = claim.where(said)
    if said.spared:
        return Finding(claim.custom_id, AuditOutcome.SKIPPED, said.spared, where)
    if again is None:
        return Finding(claim.custom_id, AuditOutcome.FAILED, "its replay has no such part", where)
    if again.dpi != said.dpi:
        reason = f"drawn at {said.dpi:g} dpi, replayed at {again.dpi:g}"
        return Finding(claim.custom_id, AuditOutcome.SKIPPED, reason, where)
    verdict = AuditOutcome.SAME if again.text == said.text else AuditOutcome.DIFFERS
    reason = "" if verdict is AuditOutcome.SAME else "plain decoding says another text"
    return Finding(claim.custom_id, verdict, reason, where, said.text, again.text)


def sampled_share(text: str) -> float:
    """A share of all: "1%", or 0.01. Raises `InvalidRequest`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise InvalidRequest(f"--share {text!r}: give a part of all, such as 1% or 0.01")
    return share


def place_of(custom_id: str, seed: int) -> float:
    """Where a result stands between 0 and 1, by its name and a seed: those below a share are that share of all."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{custom_id}".encode(errors="surrogatepass")).digest()[:8]) / 2**64
