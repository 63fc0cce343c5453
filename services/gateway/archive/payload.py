"""What the archive keeps in a queue, as versioned JSON: a batch's options, a job, and its result. Knows no queue.

Unknown fields are ignored and unknown versions refused with `OtherVersion`: gateways of two releases may share a queue
while a new one is rolled out.
"""

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from slipstream.errors import SlipstreamError
from slipstream.rpc.v1 import archive_pb2, gateway_pb2

VERSION = 1


class OtherVersion(SlipstreamError):
    """Written by another release, which may know what it means."""


@dataclass(frozen=True)
class BatchPayload:
    """What all jobs of a batch share."""

    key: str
    caption: gateway_pb2.CaptionOptions


@dataclass(frozen=True)
class JobPayload:
    """One job, as it was handed in."""

    source: str
    caption: gateway_pb2.CaptionOptions
    """Options that differ from the batch's."""
    sha256: str

    def merged_options(self, batch: BatchPayload) -> gateway_pb2.CaptionOptions:
        """The batch's options with the job's own in their place."""
        merged = gateway_pb2.CaptionOptions()
        merged.CopyFrom(batch.caption)
        if self.caption.stop:  # lists would be joined
            del merged.stop[:]
        merged.MergeFrom(self.caption)
        return merged


def write_batch(batch: BatchPayload) -> str:
    """Equal batches become equal texts."""
    return _dumps({"key": batch.key, "caption": _options_dict(batch.caption)})


def read_batch(text: str) -> BatchPayload:
    """Raises `OtherVersion`."""
    content = _loads(text)
    return BatchPayload(str(content.get("key", "")), _read_options(content))


def write_job(job: JobPayload) -> str:
    """Equal jobs become equal texts."""
    content: dict[str, Any] = {"source": job.source}
    if caption := _options_dict(job.caption):
        content["caption"] = caption
    if job.sha256:
        content["sha256"] = job.sha256
    return _dumps(content)


def read_job(text: str) -> JobPayload:
    """Raises `OtherVersion`."""
    content = _loads(text)
    return JobPayload(str(content.get("source", "")), _read_options(content), str(content.get("sha256", "")))


def write_result(summary: gateway_pb2.Summary, receipt: archive_pb2.Receipt) -> str:
    """Binary messages inside the JSON: a third less space, a twentieth of the time, and no field is lost on the way."""
    return _dumps({"summary": _encode(summary), "receipt": _encode(receipt)})


def read_result(text: str) -> tuple[gateway_pb2.Summary, archive_pb2.Receipt]:
    """Raises `OtherVersion`."""
    content = _loads(text)
    try:
        summary = gateway_pb2.Summary.FromString(base64.b64decode(content["summary"], validate=True))
        receipt = archive_pb2.Receipt.FromString(base64.b64decode(content["receipt"], validate=True))
    except (KeyError, TypeError, binascii.Error, DecodeError) as error:
        raise OtherVersion(f"a result cannot be read: {error}") from error
    return summary, receipt


def _encode(message: gateway_pb2.Summary | archive_pb2.Receipt) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


def _options_dict(options: gateway_pb2.CaptionOptions) -> dict[str, Any]:
    return json_format.MessageToDict(options, preserving_proto_field_name=True)


def _read_options(content: dict[str, Any]) -> gateway_pb2.CaptionOptions:
    options = gateway_pb2.CaptionOptions()
    try:
        json_format.ParseDict(content.get("caption", {}), options, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise OtherVersion(f"options cannot be read: {error}") from error
    return options


def _dumps(content: dict[str, Any]) -> str:
    return json.dumps({"v": VERSION} | content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _loads(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("v") != VERSION:
        raise OtherVersion(f"this gateway reads version {VERSION} of what the archive keeps, and this is another")
    return content
