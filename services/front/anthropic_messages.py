"""`/v1/messages`: the same answers in the form of Anthropic's protocol, for clients that speak no other."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.messages import CommittedToken
from slipstream.services.front.anthropic_request import BARE_MEDIA, SentNames, read_message
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.call import Call
from slipstream.services.front.chat import FormMaker, answer_chat
from slipstream.services.front.chat_messages import object_at
from slipstream.services.front.chat_request import ChatRequest
from slipstream.services.front.completions import Completion, Written, event, finish_reason, usage_of
from slipstream.services.front.function_calls import whole_calls
from slipstream.services.front.json_body import Media
from slipstream.speculation.protocol import FinishReason

_KINDS_BY_CODE = {
    **dict.fromkeys(("not_found", "model_not_found", "unknown_url"), "not_found_error"),
    **dict.fromkeys(("too_large", "limit_exceeded"), "request_too_large"),
    "unavailable": "overloaded_error",
    "timeout": "timeout_error",
}
_KINDS = {"server_error": "api_error"}


async def create_message(call: Call) -> None:
    """POST /v1/messages."""
    await _answer(call, MessageForm)


async def count_tokens(call: Call) -> None:
    """POST /v1/messages/count_tokens. The prompt runs, as only what a video becomes tells its tokens; a message that
    asks the same next finds that done."""
    await _answer(call, _CountForm, {"max_tokens": 1, "stream": False})


async def _answer(call: Call, form: "type[MessageForm]", fixed: Mapping[str, Any] | None = None) -> None:
    """`fixed`: what the request asks for, whatever it says."""
    names = SentNames()

    def read(said: Any, media: Mapping[str, Media]) -> tuple[ChatRequest, FormMaker]:
        asked = read_message({**object_at(said, "the body"), **(fixed or {})}, media, names)
        is_called = asked.functions is not None
        return asked, lambda completion, _: form(completion, call.request_id, is_called=is_called)

    try:
        await answer_chat(call, read, BARE_MEDIA)
    except ApiError as error:
        raise names.told(error) from error


def error_body(error: Mapping[str, Any]) -> dict[str, Any]:
    """An error as this protocol's clients read it; `param` and `code` are said, too."""
    kind = _KINDS_BY_CODE.get(error["code"] or "", _KINDS.get(error["type"], error["type"]))
    return {"type": "error", "error": {**error, "type": kind}}


class MessageForm:
    """As a message, and the events of its making."""

    def __init__(self, completion: Completion, request_id: str, *, is_called: bool) -> None:
        """`is_called`: it is a call of a function."""
        self._completion = completion
        self._request_id = request_id
        self._is_called = is_called
        self._num_blocks = 0
        self._is_open = False
        """The last of them has not ended."""

    # -- whole ---------------------------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Written]) -> dict[str, Any]:
        (written,) = choices
        blocks = self._blocks(written)
        ending = _ending(written, is_call=any(block["type"] == "tool_use" for block in blocks))
        message = self._message(usage_of(written.captions)) | {"content": blocks}
        return message | ending | self._completion.facts(written)

    def _message(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._completion.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(counts),
        }

    def _blocks(self, written: Written) -> list[dict[str, Any]]:
        if written.functions is None:
            return [_text(written.text)]
        texts = [caption.text for caption in written.captions]
        calls = whole_calls(written.functions, texts, self._completion.completion_id)
        return [_call(call["id"], **call["function"]) for call in calls]

    # -- in events -----------------------------------------------------------------------------------------------------

    def begin(self, usage: Mapping[str, Any]) -> bytes:
        begun = _event("message_start", message=self._message(usage.get("usage") or {}))
        return begun if self._is_called else begun + self._begin_block(_text(""))

    def add(self, delta: Mapping[str, Any], tokens: Sequence[CommittedToken], usage: Mapping[str, Any]) -> bytes:
        if "content" in delta:
            return self._of_block({"type": "text_delta", "text": delta["content"]})
        (call,) = delta["tool_calls"]
        if "id" in call:
            return self._end_block() + self._begin_block(_call(call["id"], call["function"]["name"], "{}"))
        return self._of_block({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})

    def aside(self, facts: Mapping[str, Any]) -> bytes:
        return _event("slipstream.figures", slipstream=facts)

    def fail(self, error: Mapping[str, Any]) -> bytes:
        return _event("error", **{name: value for name, value in error_body(error).items() if name != "type"})

    def end(self, written: Written, tokens: Sequence[CommittedToken], usage: Mapping[str, Any]) -> bytes:
        counts = {"usage": _usage(usage_of(written.captions))}
        told = {"delta": _ending(written, is_call=self._is_called)} | counts | self._completion.facts(written)
        return self._end_block() + _event("message_delta", **told) + _event("message_stop")

    def close(self, choices: Sequence[Written]) -> bytes:
        return b""

    def _begin_block(self, block: Mapping[str, Any]) -> bytes:
        self._is_open = True
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _of_block(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _end_block(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)


class _CountForm(MessageForm):
    """As the number of tokens of the prompt."""

    def whole(self, choices: Sequence[Written]) -> dict[str, Any]:
        (written,) = choices
        return {"input_tokens": usage_of(written.captions)["prompt_tokens"]}


def _event(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\n".encode() + event({"type": kind} | more)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Of one that was cut off the arguments are no object: what there is of it is text, which nobody calls. So is one
    with a number that is larger than JSON's readers have: it would make the answer unreadable."""
    try:
        said = json.loads(arguments)
        json.dumps(said, allow_nan=False)
    except (ValueError, RecursionError):
        return _text(arguments)
    return {"type": "tool_use", "id": f"toolu_{call_id.removeprefix('call_')}", "name": name, "input": said}


def _ending(written: Written, is_call: bool) -> dict[str, Any]:
    """Why it ended: of several pages, one that was cut says so. `is_call`: it has a block that calls."""
    finished = finish_reason(written.captions, written.functions)
    if finished == FinishReason.LENGTH.value:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    stops = [caption.stop_string for caption in written.captions if caption.stop_string]
    if stops:
        return {"stop_reason": "stop_sequence", "stop_sequence": stops[-1]}
    return {"stop_reason": "tool_use" if is_call else "end_turn", "stop_sequence": None}


def _usage(counts: Mapping[str, Any]) -> dict[str, Any]:
    """In the names of this protocol, where what was at hand is counted beside the input and not in it."""
    cached = counts.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": counts.get("prompt_tokens", 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts.get("completion_tokens", 0),
    }
