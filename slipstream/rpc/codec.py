"""Between plain frozen types and wire messages: by field names where they agree; captions as in gateway.proto;
what both models are told of sampling."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from slipstream.documents.messages import RegionStage
from slipstream.errors import InvalidRequest, ProtocolViolation
from slipstream.messages import (
    Caption,
    CaptionEvent,
    CommittedText,
    CommittedToken,
    KeptTokens,
    SharedFrom,
    Speculation,
    StageChange,
    Timings,
    Trace,
    VideoFacts,
)
from slipstream.options import OPTIONS, OPTIONS_BY_NAME, CaptionOptions
from slipstream.rpc.v1 import common_pb2, gateway_pb2, target_pb2
from slipstream.sampling.params import Proposal, SamplingParams
from slipstream.service_info import GatewayInfo, ModelInfo, ServiceLoad
from slipstream.speculation.protocol import FinishReason

# -- by field names ---------------------------------------------------------------------------------------------------

# Between plain frozen types and wire messages with the same field names. What one side lacks stays out.

Descriptor = Any
"""`google.protobuf.descriptor.Descriptor`, whatever the runtime calls it."""
MessageT = TypeVar("MessageT", bound=Message)
PlainT = TypeVar("PlainT")


def to_message(value: object, message_type: type[MessageT], **others: Any) -> MessageT:
    """The dataclass `value` as a message. None is left out; `others` are fields that it lacks, or that differ."""
    return cast(MessageT, _message(value, message_type.DESCRIPTOR, others))


def from_message(message: Message, kind: type[PlainT], /, **others: Any) -> PlainT:
    """The message as a dataclass of type `kind`; `others` are fields that it lacks, or that differ."""
    return cast(PlainT, _plain(message, kind, others))


def _message(value: Any, descriptor: Descriptor, others: dict[str, Any]) -> Message:
    fields = dict(others)
    for name, nested in _shared_fields(cast(Any, type(value)), descriptor).items():
        content = getattr(value, name)
        if name in fields or content is None:
            continue
        if nested is None:
            fields[name] = content
        elif isinstance(content, tuple):
            fields[name] = [_message(item, nested, {}) for item in content]
        else:
            fields[name] = _message(content, nested, {})
    return GetMessageClass(descriptor)(**fields)


@cache
def _shared_fields(kind: Any, descriptor: Descriptor) -> dict[str, Descriptor | None]:
    """The fields that both have, with the type of those that are messages."""
    known = descriptor.fields_by_name
    return {field.name: known[field.name].message_type for field in dataclasses.fields(kind) if field.name in known}


def _plain(message: Message, kind: Any, others: dict[str, Any]) -> Any:
    fields = dict(others)
    for name, (item_kind, is_tuple, may_lack) in _plain_fields(kind, message.DESCRIPTOR).items():
        if name in fields:
            continue
        content = getattr(message, name)
        if is_tuple:
            fields[name] = (
                tuple(content) if item_kind is None else tuple(_plain(item, item_kind, {}) for item in content)
            )
        elif may_lack and not message.HasField(name):
            fields[name] = None
        else:
            fields[name] = content if item_kind is None else _plain(content, item_kind, {})
    return kind(**fields)


@cache
def _plain_fields(kind: Any, descriptor: Descriptor) -> dict[str, tuple[Any, bool, bool]]:
    """The fields that both have: the dataclass within, if it is one; whether it is a tuple of them, or may be None."""
    hints = get_type_hints(kind)
    shared: dict[str, tuple[Any, bool, bool]] = {}
    for name in _shared_fields(kind, descriptor):
        is_tuple, may_lack = get_origin(hints[name]) is tuple, type(None) in get_args(hints[name])
        inner = get_args(hints[name])[0] if is_tuple or may_lack else hints[name]
        shared[name] = (inner if dataclasses.is_dataclass(inner) else None, is_tuple, may_lack)
    return shared


# -- captions ---------------------------------------------------------------------------------------------------------

_FINISH_REASONS: dict[FinishReason | None, Any] = {
    reason: target_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
} | {None: target_pb2.FINISH_REASON_UNSPECIFIED}
_FINISH_NAMES = {number: reason for reason, number in _FINISH_REASONS.items()}
_SUMMARISED = tuple(spec.name for spec in OPTIONS if spec.name in gateway_pb2.Summary.DESCRIPTOR.fields_by_name)
"""The options that a summary repeats."""
_REPEATED = frozenset(spec.name for spec in OPTIONS if spec.repeated)


def options_message(options: CaptionOptions, *, path: str = "", request_id: str = "") -> gateway_pb2.CaptionOptions:
    """The options that are given, with what they are asked of and by which name."""
    return gateway_pb2.CaptionOptions(path=path, request_id=request_id, **options.given())


def read_options(message: gateway_pb2.CaptionOptions) -> CaptionOptions:
    """The options that the message has. Raises `InvalidRequest` for values that no gateway takes."""
    return CaptionOptions(**{name: value for name, value in option_values(message).items() if name in OPTIONS_BY_NAME})


def option_values_message(values: Mapping[str, Any]) -> gateway_pb2.CaptionOptions:
    """Options by name, for the wire. Raises `InvalidRequest` for what does not fit there, such as a text in the place
    of several, of which it would take each letter for one."""
    if not isinstance(values, Mapping):
        raise InvalidRequest(f"options must be values by their names, as in a dict, not {type(values).__name__}")
    for name in _REPEATED & values.keys():
        if isinstance(values[name], str):
            raise InvalidRequest(f"{name} must be texts, in a list or a tuple, not {values[name]!r}")
    if isinstance(schema := values.get("json_schema"), Mapping):
        values = {**values, "json_schema": CaptionOptions(json_schema=schema).json_schema}
    try:
        return gateway_pb2.CaptionOptions(**values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"an option cannot be sent: {error}") from None


def option_values(message: gateway_pb2.CaptionOptions) -> dict[str, Any]:
    """Whatever the message has, by name, in the order of the contract and as it came; `path` and `request_id` too."""
    return {field.name: _option_value(value) for field, value in message.ListFields()}


def _option_value(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else tuple(value)


def caption_event(event: CaptionEvent) -> gateway_pb2.CaptionEvent:
    """What a caption says, for the wire."""
    match event:
        case StageChange():
            return gateway_pb2.CaptionEvent(stage=to_message(event, gateway_pb2.StageChange))
        case CommittedText():
            return gateway_pb2.CaptionEvent(text=to_message(event, gateway_pb2.CommittedText))
        case Trace():
            return gateway_pb2.CaptionEvent(trace=to_message(event, gateway_pb2.Trace))
        case KeptTokens():
            return gateway_pb2.CaptionEvent(kept=to_message(event, common_pb2.KeptTokens))
        case Caption():
            return gateway_pb2.CaptionEvent(summary=summary_message(event))


def read_caption_event(message: gateway_pb2.CaptionEvent) -> CaptionEvent:
    """What a caption says. Raises `ProtocolViolation` for what says nothing."""
    kind = message.WhichOneof("message")
    if kind == "stage":
        return from_message(message.stage, StageChange)
    if kind == "text":
        tokens = tuple(from_message(token, CommittedToken) for token in message.text.tokens)
        return CommittedText(tokens)
    if kind == "trace":
        return from_message(message.trace, Trace)
    if kind == "kept":
        return from_message(message.kept, KeptTokens)
    if kind == "summary":
        return read_summary(message.summary)
    raise ProtocolViolation("the gateway sent an empty message")


def summary_message(caption: Caption) -> gateway_pb2.Summary:
    """A finished caption, for the wire; its tokens have been sent as they came."""
    return gateway_pb2.Summary(
        request_id=caption.request_id,
        text=caption.text,
        num_tokens=caption.num_tokens,
        finish_reason=finish_reason_number(caption.finish_reason),
        stop_string=caption.stop_string,
        video=to_message(caption.video, gateway_pb2.VideoFacts),
        timings=to_message(caption.timings, gateway_pb2.Timings),
        speculation=to_message(caption.speculation, gateway_pb2.Speculation),
        regions=None if caption.regions is None else to_message(caption.regions, gateway_pb2.RegionStage),
        shared=None if caption.shared is None else to_message(caption.shared, gateway_pb2.SharedFrom),
        skipped=caption.skipped,
        avg_logprob=caption.avg_logprob,
        **{name: caption.options[name] for name in _SUMMARISED if name in caption.options},
    )


def read_summary(message: gateway_pb2.Summary) -> Caption:
    """A finished caption, without its tokens."""
    return Caption(
        text=message.text,
        num_tokens=message.num_tokens,
        finish_reason=read_finish_reason(message.finish_reason),
        stop_string=message.stop_string,
        request_id=message.request_id,
        options={name: getattr(message, name) for name in _SUMMARISED},
        video=from_message(message.video, VideoFacts),
        timings=from_message(message.timings, Timings),
        speculation=from_message(message.speculation, Speculation),
        regions=from_message(message.regions, RegionStage) if message.HasField("regions") else None,
        shared=from_message(message.shared, SharedFrom) if message.HasField("shared") else None,
        skipped=message.skipped,
        avg_logprob=message.avg_logprob if message.HasField("avg_logprob") else None,
    )


def finish_reason_number(reason: FinishReason | None) -> Any:
    """The wire's number for why a text ended."""
    return _FINISH_REASONS[reason]


def read_finish_reason(number: int) -> FinishReason | None:
    """Why a text ended; None while it has not."""
    return _FINISH_NAMES.get(number)


def gateway_info_message(info: GatewayInfo) -> gateway_pb2.GatewayInfo:
    """What a gateway serves, for the wire."""
    return to_message(info, gateway_pb2.GatewayInfo)


def read_gateway_info(message: gateway_pb2.GatewayInfo) -> GatewayInfo:
    """What a gateway serves, and its limits."""
    return from_message(message, GatewayInfo)


def model_info_message(info: ModelInfo, load: ServiceLoad | None = None) -> common_pb2.ModelInfo:
    """What a model service serves, for the wire, and how full it is."""
    return to_message(
        info, common_pb2.ModelInfo, load=None if load is None else to_message(load, common_pb2.ServiceLoad)
    )


def read_model_info(message: common_pb2.ModelInfo) -> ModelInfo:
    """What a model service serves."""
    return from_message(message, ModelInfo)


def read_load(message: common_pb2.ModelInfo) -> ServiceLoad:
    """How full a model service is."""
    return from_message(message.load, ServiceLoad)


# -- sampling ---------------------------------------------------------------------------------------------------------


def read_sampling(message: common_pb2.Sampling) -> SamplingParams:
    """How tokens are to be chosen; an empty message is greedy. Raises `InvalidRequest` for values out of range."""
    return from_message(
        message,
        SamplingParams,
        top_p=message.top_p or 1.0,
        repetition_penalty=message.repetition_penalty or 1.0,
        rule=message.rule or SamplingParams.rule,
    ).check()


def proposal_messages(proposals: Iterable[Proposal]) -> list[common_pb2.Proposal]:
    """What draft tokens were drawn from."""
    return [
        common_pb2.Proposal(token_ids=proposal.token_ids, probabilities=proposal.probabilities)
        for proposal in proposals
    ]


def read_proposals(messages: Sequence[common_pb2.Proposal]) -> tuple[Proposal, ...]:
    """What draft tokens were drawn from, unjudged: a proposal without sense is the sampler's business."""
    return tuple(Proposal(tuple(message.token_ids), tuple(message.probabilities)) for message in messages)
