"""A chat request as OpenAI's clients, vLLM's and Qwen's write it, read into what a gateway is asked. What is unknown,
or cannot be honoured, is refused with the field's name: a request never means less than it says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.documents.messages import DocumentRequest
from slipstream.documents.pages import MAX_RANGE_CHARS
from slipstream.documents.reading import DocumentOptions
from slipstream.errors import SlipstreamError
from slipstream.options import OPTIONS_BY_NAME, CaptionOptions
from slipstream.sampling.params import MAX_MIN_NEW_TOKENS
from slipstream.services.front.answer_format import FORMAT_FIELDS, OPTION_OF, read_format
from slipstream.services.front.api_errors import ApiError, as_api_error
from slipstream.services.front.chat_messages import (
    MAX_MESSAGES,
    Asked,
    Medium,
    MediumKind,
    check_names,
    frame_rate,
    object_at,
    read_messages,
    text_at,
)
from slipstream.services.front.function_calls import Functions, read_functions
from slipstream.services.front.json_body import Media

# -- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatRequest:
    """What is asked, and how to answer."""

    model: str
    medium: Medium
    options: CaptionOptions
    document: DocumentOptions
    """With the same caption options; counts where the medium is a document."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    num_choices: int = 1
    """Texts that are asked for."""
    functions: Functions | None = None
    """Of which the answer calls one."""
    document_params: tuple[str, ...] = ()
    """The fields that say how a document is to be read."""
    params: Mapping[str, str] = field(default_factory=dict)
    """The field of the request that gave an option, also one of documents, by the option's name."""

    def choice(self, index: int) -> "ChatRequest":
        """What is asked for one of the texts: each has the seed behind that of the one before."""
        if index == 0:
            return self
        seed = (self.options.get("seed", 0) + index) % 2**63
        options = CaptionOptions(seed=seed).over(self.options)
        return replace(self, options=options, document=replace(self.document, caption=options))


# -- fields -----------------------------------------------------------------------------------------------------------

TOLERATED = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
"""Said by clients about themselves; they change no answer."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "prompt_logprobs": (0,),
    "logit_bias": ({},),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "stop_token_ids": ([],),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "add_special_tokens": (False,),
    "bad_words": ([],),
    "priority": (0,),
}
"""Fields that are known, and the values that ask for nothing; others are refused."""
MAX_CHOICES = 16
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
)
OWN_NAMES = {
    *(*SAMPLING, *OPTION_OF.values(), "stop", "prompt"),
    *("max_new_tokens", "min_new_tokens", "logprobs", "top_logprobs"),
}
"""Options of the table with fields of their own."""
OF_SEVERAL = {*OWN_NAMES, "system", "turns", "thinking", "num_frames", "fps"}
"""Those, and others that may come by more fields than that of `slipstream`, such as messages."""
OF_PAGES: Mapping[str, type] = {"pages": str, "dpi": int, "ocr_dpi": int, "text_layer": bool}
"""Fields of `slipstream` that are those of `DocumentRequest`."""
DOCUMENT_FIELDS: Mapping[str, type] = {**OF_PAGES, "surface": str, "stage": str, "ocr": str}
"""And those of `DocumentOptions`."""
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
METADATA: Mapping[str, Any] = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": MAX_KEY_CHARS},
    "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_CHARS},
}
"""What a client may have told again; a chat request has it for nothing."""
READ = {
    *("model", "messages", "stream", "stream_options", "stop", "n"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos"),
    *("prediction", "media_io_kwargs", "mm_processor_kwargs", "tools", "tool_choice", "logprobs", "top_logprobs"),
    *("chat_template_kwargs", "reasoning_effort"),
    "slipstream",
    *FORMAT_FIELDS,
    *SAMPLING,
}


def read_chat(body: Any, media: Mapping[str, Media], most_messages: int = MAX_MESSAGES) -> ChatRequest:
    """The request in a body whose `data:` strings are `media`, by the names that stand for them. Raises `ApiError`."""
    fields = _said(body, "the body")
    for name, value in fields.items():
        _check_known(name, value)
    asked = Asked(media)
    for name in SAMPLING:
        value = fields.get(name)
        asked.give(name, 0 if name == "top_k" and value == -1 else value, name)
    stop = fields.get("stop")
    asked.give("stop", (stop,) if isinstance(stop, str) else _tuple(stop), "stop")
    _read_limits(fields, asked)
    _read_thinking(fields, asked)
    read_format(fields, asked)
    functions = read_functions(fields, asked)
    _read_logprobs(fields, asked)
    told_of_frames = _read_frame_count(fields, asked)
    prediction = fields.get("prediction")
    asked.give("prediction", None if prediction is None else (_prediction(prediction),), "prediction")
    document = _read_own(fields.get("slipstream"), asked)
    medium = _timed(read_messages(fields.get("messages"), asked, most_messages), told_of_frames, asked)
    options = asked.options()
    stream_options = _stream_options(fields)
    return ChatRequest(
        model=text_at(fields.get("model"), "model"),
        medium=medium,
        options=options,
        document=_document(document, options, asked.params),
        stream=_flag(fields.get("stream"), "stream"),
        include_usage=_flag(stream_options.get("include_usage"), "stream_options.include_usage"),
        continuous_usage=_flag(stream_options.get("continuous_usage_stats"), "stream_options.continuous_usage_stats"),
        num_choices=_num_choices(fields.get("n", 1)),
        functions=functions,
        document_params=tuple(f"slipstream.{name}" for name in document),
        params=asked.params,
    )


def _check_known(name: str, value: Any) -> None:
    if name in READ or name in TOLERATED:
        return
    if name not in NEUTRAL:
        raise ApiError(f"{name[:64]!r} is not supported; leave it out", param=name[:64], code="unsupported_parameter")
    if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL[name]):
        raise ApiError(f"{name} cannot be honoured with this value; leave it out", param=name, code="unsupported_value")


def _read_limits(fields: Mapping[str, Any], asked: Asked) -> None:
    for name in ("max_completion_tokens", "max_tokens"):
        asked.give("max_new_tokens", fields.get(name), name)
    asked.give("min_new_tokens", fields.get("min_tokens"), "min_tokens")
    if _flag(fields.get("ignore_eos"), "ignore_eos"):
        asked.values["min_new_tokens"], asked.params["min_new_tokens"] = MAX_MIN_NEW_TOKENS, "ignore_eos"


def _read_thinking(fields: Mapping[str, Any], asked: Asked) -> None:
    """By vLLM's field, or by OpenAI's, of which one value is taken."""
    variables = fields.get("chat_template_kwargs")
    for name, value in _said({} if variables is None else variables, "chat_template_kwargs").items():
        where = f"chat_template_kwargs.{name[:64]}"
        if name != "enable_thinking":
            raise ApiError(f"{where} is not supported; leave it out", param=where, code="unsupported_parameter")
        if value is not None:
            asked.give("thinking", "on" if _flag(value, where) else "off", where)
    if (effort := fields.get("reasoning_effort")) is not None:
        if effort != "none":
            raise ApiError('reasoning_effort must be "none"', param="reasoning_effort", code="unsupported_value")
        asked.give("thinking", "off", "reasoning_effort")


def _num_choices(said: Any) -> int:
    if type(said) is not int or not 1 <= said <= MAX_CHOICES:
        raise ApiError(f"n must be a whole number from 1 to {MAX_CHOICES}", param="n")
    return said


def _read_logprobs(fields: Mapping[str, Any], asked: Asked) -> None:
    asked.give("logprobs", fields.get("logprobs"), "logprobs")
    if most := fields.get("top_logprobs"):
        asked.give("top_logprobs", most, "top_logprobs")
        if not asked.values.get("logprobs"):
            raise ApiError("top_logprobs are for logprobs: true", param="top_logprobs")


@dataclass(frozen=True)
class _OfFrames:
    """What is said of frames that only the medium gives a meaning."""

    rates: dict[str, Any] = field(default_factory=dict)
    """How many of each second, by field."""
    unsampled: list[str] = field(default_factory=list)
    """Fields that say that all are taken."""


def _read_frame_count(fields: Mapping[str, Any], asked: Asked) -> _OfFrames:
    """vLLM's two ways of saying how many frames."""
    media_io, told = _said(fields.get("media_io_kwargs") or {}, "media_io_kwargs"), _OfFrames()
    for kind, said in media_io.items():
        if kind != "video":
            raise ApiError(f"media_io_kwargs.{kind[:64]} is not supported", param=f"media_io_kwargs.{kind[:64]}")
        _read_frame_fields(said, "media_io_kwargs.video", asked, told)
    _read_frame_fields(fields.get("mm_processor_kwargs") or {}, "mm_processor_kwargs", asked, told)
    return told


def _read_frame_fields(said: Any, param: str, asked: Asked, told: _OfFrames) -> None:
    for name, value in _said(said, param).items():
        where = f"{param}.{name[:64]}"
        if name == "num_frames":
            asked.give("num_frames", value, where)
        elif name == "fps":
            if value != -1:
                told.rates[where] = value
        elif name == "do_sample_frames" and isinstance(value, bool):
            if not value:
                told.unsampled.append(where)
        else:
            raise ApiError(f"{where} is not supported; leave it out", param=where, code="unsupported_parameter")


def _timed(medium: Medium, told: _OfFrames, asked: Asked) -> Medium:
    """Of a video, `fps` is how many frames of each second are taken. Of frames in one string, it is how many there
    are: no other field says so, and Qwen's recipe gives it as a list, of the one video; it also says that none of
    them is to be left out."""
    for param in told.unsampled:
        if not medium.num_frames:
            raise ApiError(
                f"{param}: a video's frames are sampled; leave it out", param=param, code="unsupported_value"
            )
        asked.give("num_frames", medium.num_frames, param)
        asked.give("fps", 0, param)
    if medium.kind is not MediumKind.FRAMES or medium.frames:
        for param, rate in told.rates.items():
            asked.give("fps", rate, param)
        return medium
    rates = {
        param: frame_rate(rate[0] if isinstance(rate, list) and len(rate) == 1 else rate, param)
        for param, rate in told.rates.items()
    }
    if len(set(rates.values())) > 1:
        raise ApiError(f"{' and '.join(rates)} say different things; give one of them", param=max(rates))
    return replace(medium, frames_per_second=rates.popitem()[1]) if rates else medium


def _read_own(said: Any, asked: Asked) -> dict[str, Any]:
    """The object `slipstream`: options of the table, and those of documents, which are returned."""
    document: dict[str, Any] = {}
    for name, value in _said({} if said is None else said, "slipstream").items():
        param = f"slipstream.{name[:64]}"
        if name in DOCUMENT_FIELDS:
            if type(value) is not DOCUMENT_FIELDS[name]:
                raise ApiError(f"{param} must be of type {DOCUMENT_FIELDS[name].__name__}", param=param)
            document[name], asked.params[name] = value, param
        elif name in OPTIONS_BY_NAME and name not in OWN_NAMES:
            asked.give(name, _tuple(value) if isinstance(value, list) else value, param)
        else:
            raise ApiError(f"{param} is not supported; leave it out", param=param, code="unsupported_parameter")
    return document


def _document(said: Mapping[str, Any], options: CaptionOptions, params: Mapping[str, str]) -> DocumentOptions:
    """How a document is to be read. Raises `ApiError`."""
    request = DocumentRequest(**{name: value for name, value in said.items() if name in OF_PAGES})
    if len(request.pages) > MAX_RANGE_CHARS:
        raise ApiError(f"slipstream.pages has more than {MAX_RANGE_CHARS} characters", param="slipstream.pages")
    try:
        document = DocumentOptions(request, **{name: said[name] for name in said if name not in OF_PAGES}).check()
    except SlipstreamError as error:
        raise as_api_error(error, params) from None
    return replace(document, caption=options)


def check_kind(asked: ChatRequest, is_document: bool) -> None:
    """Raises `ApiError` for what is said of documents about something else, and for what no page can have."""
    if is_document:
        try:
            asked.document.check()
        except SlipstreamError as error:
            raise as_api_error(error, asked.params) from None
    elif asked.document_params:
        param = asked.document_params[0]
        raise ApiError(f"{param} is for documents, and this is none", param=param, code="unsupported_parameter")


# -- small things -----------------------------------------------------------------------------------------------------


def _said(value: Any, param: str) -> dict[str, Any]:
    """The fields of an object that are not null."""
    return {name: inner for name, inner in object_at(value, param).items() if inner is not None}


def _prediction(said: Any) -> str:
    fields = object_at(said, "prediction")
    check_names(fields, {"type", "content"}, "prediction")
    if fields.get("type") != "content":
        raise ApiError('prediction.type must be "content"', param="prediction.type")
    content = fields.get("content")
    if isinstance(content, list):
        parts = [object_at(part, f"prediction.content[{index}]") for index, part in enumerate(content)]
        return "".join(text_at(part.get("text"), f"prediction.content[{n}].text") for n, part in enumerate(parts))
    return text_at(content, "prediction.content")


def _stream_options(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    said = fields.get("stream_options")
    if said is None:
        return {}
    options = object_at(said, "stream_options")
    check_names(options, {"include_usage", "continuous_usage_stats", "include_obfuscation"}, "stream_options")
    if options.get("include_obfuscation"):
        raise ApiError("there is no obfuscation; leave it out", param="stream_options.include_obfuscation")
    if any(options.values()) and not fields.get("stream"):
        raise ApiError("stream_options are for stream: true", param="stream_options")
    return options


def read_metadata(said: Any) -> Mapping[str, str]:
    """A client's own texts, where an answer has them again. Raises `ApiError` for what is none."""
    if said is None:
        return {}
    if not isinstance(said, dict) or len(said) > MAX_METADATA:
        raise ApiError(f"metadata must be an object with at most {MAX_METADATA} entries", param="metadata")
    for key, value in said.items():
        if not isinstance(value, str) or len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            limits = f"keys of at most {MAX_KEY_CHARS} characters and texts of at most {MAX_VALUE_CHARS}"
            raise ApiError(f"metadata must have {limits}", param=f"metadata.{key[:64]}")
    return said


def _flag(value: Any, param: str) -> bool:
    if value not in (None, True, False) or (value in (0, 1) and not isinstance(value, bool)):
        raise ApiError(f"{param} must be true or false", param=param)
    return bool(value)


def _tuple(value: Sequence[Any] | Any) -> Any:
    """A list as a tuple; whatever else it is, the table will refuse."""
    return tuple(value) if isinstance(value, list) else value
