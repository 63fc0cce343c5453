"""What a caption's summary says: as a dictionary for JSON, as one line, and the rates that follow from it."""

from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from slipstream.rpc.v1.gateway_pb2 import Summary
from slipstream.rpc.v1.target_pb2 import FinishReason


def decoding_rate(summary: Summary) -> float:
    """Tokens a second after the first one; 0 when there is no second one."""
    return _rate(summary.num_tokens - 1, summary.timings.generate_s)


def end_to_end_rate(summary: Summary) -> float:
    """Tokens a second from the request's arrival to its last token."""
    return _rate(summary.num_tokens, summary.timings.total_s)


def closing_line(summary: Summary) -> str:
    """The caption's figures on one line."""
    speculation = summary.speculation
    facts = [
        f"{summary.num_tokens} tokens",
        f"{decoding_rate(summary):.1f} tokens/s",
        f"{speculation.passes} passes",
        f"first token after {summary.timings.first_token_s:.2f} s",
    ]
    if summary.lossy:
        facts.insert(0, f"lossy: {summary.lossy} keeps {summary.lossy_keep:.0%}")
    if speculation.judged:
        facts.insert(2, f"tau {speculation.tau:.2f}")
    if speculation.drafts_lost:
        facts.append(f"draft lost {speculation.drafts_lost} time(s)")
    if speculation.gate_closings:
        facts.append(f"{speculation.gated_tokens} tokens decoded plainly by the gate")
    if summary.stop_string:
        facts.append(f"ended before {summary.stop_string!r}")
    if summary.finish_reason == FinishReason.FINISH_REASON_LENGTH:
        facts.append("cut at the token limit")
    return ", ".join([*facts, *summary.video.warnings])


def message_dict(message: Message) -> dict[str, Any]:
    """Every field of a message under its name in the contract; numbers stay numbers, absent messages stay out."""
    fields: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _restore_numbers(message, fields)
    return fields


def summary_dict(summary: Summary) -> dict[str, Any]:
    """`message_dict` of a summary, in which every group has an entry."""
    fields = message_dict(summary)
    fields["finish_reason"] = FinishReason.Name(summary.finish_reason).removeprefix("FINISH_REASON_").lower()
    for group in ("video", "timings", "speculation"):
        fields.setdefault(group, {})
    return fields


def _restore_numbers(message: Message, fields: dict[str, Any]) -> None:
    """protobuf's JSON spells 64-bit numbers as strings."""
    for descriptor, value in message.ListFields():
        if isinstance(value, Message):
            _restore_numbers(value, fields[descriptor.name])
    for name, value in fields.items():
        if isinstance(value, str) and isinstance(getattr(message, name), int):
            fields[name] = int(value) if value.lstrip("-").isdecimal() else value


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0
