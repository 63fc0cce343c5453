"""`/v1/responses`: the same answers in the form of OpenAI's newer protocol. None is kept; a conversation is sent anew
each time."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.messages import Caption, CommittedToken
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.call import Call
from slipstream.services.front.chat import FormMaker, answer_chat
from slipstream.services.front.chat_request import ChatRequest
from slipstream.services.front.completions import Completion, Written, event, finish_reason, logprobs, usage_of
from slipstream.services.front.function_calls import is_json, whole_calls
from slipstream.services.front.json_body import Media
from slipstream.services.front.responses_request import UNREAD, read_response, sent_names

ECHOED = ("instructions", "max_output_tokens", "temperature", "top_logprobs", "top_p", *UNREAD)
"""Fields of the request that its answer repeats."""
REPEATED = (*ECHOED, "tools", "tool_choice", "parallel_tool_calls", "text")
"""Those, and others that it also has where they were not said."""


async def create_response(call: Call) -> None:
    """POST /v1/responses."""

    def read(said: Any, media: Mapping[str, Media]) -> tuple[ChatRequest, FormMaker]:
        asked = read_response(said, media)
        is_called = asked.functions is not None
        return asked, lambda completion, _: ResponseForm(completion, said, call.request_id, is_called=is_called)

    try:
        await answer_chat(call, read)
    except ApiError as error:
        raise sent_names(error) from error


class ResponseForm:
    """As a response, and the events of its making."""

    def __init__(
        self,
        completion: Completion,
        said: Mapping[str, Any],
        request_id: str,
        *,
        is_called: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`said`: the request, of which `REPEATED` are read. `clock`: when the answer is whole (unix time)."""
        self._completion = completion
        self._request_id = request_id
        self._is_called = is_called
        self._clock = clock
        self._echo = {name: said.get(name) for name in ECHOED} | {
            "tools": said.get("tools") or [],
            "tool_choice": said.get("tool_choice") or "auto",
            "parallel_tool_calls": said.get("parallel_tool_calls") is not False,
            "text": said.get("text") or {"format": {"type": "text"}},
        }
        self._num_events = 0
        self._open: dict[str, Any] | None = None
        """The item of the output that is being told, with what was told of it."""
        self._done: list[dict[str, Any]] = []

    # -- whole ---------------------------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Written]) -> dict[str, Any]:
        (written,) = choices
        is_cut = finish_reason(written.captions) == "length"
        status = "incomplete" if is_cut else "completed"
        output = self._calls(written) if written.functions else [self._message(written, status)]
        return (
            self._response(status, output)
            | {
                "completed_at": None if is_cut else int(self._clock()),
                "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
                "usage": _usage(written.captions),
            }
            | self._completion.facts(written)
        )

    def _response(self, status: str, output: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        return {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": self._completion.created_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._completion.model,
            "output": [*output],
            "previous_response_id": None,
            "store": False,
            "usage": None,
            **self._echo,
        }

    def _message(self, written: Written, status: str) -> dict[str, Any]:
        return _message(f"msg_{self._request_id}", status, [_text(written.text, written.tokens)])

    def _calls(self, written: Written) -> list[dict[str, Any]]:
        assert written.functions is not None
        texts = [caption.text for caption in written.captions]
        calls = whole_calls(written.functions, texts, self._completion.completion_id)
        return [_ended(_call(call["id"], **call["function"])) for call in calls]

    # -- in events -----------------------------------------------------------------------------------------------------

    def begin(self, usage: Mapping[str, Any]) -> bytes:
        events = self._created()
        if self._is_called:
            return events
        events += self._begin_item(_message(f"msg_{self._request_id}", "in_progress", []))
        return events + self._of_item("response.content_part.added", content_index=0, part=_text(""))

    def add(self, delta: Mapping[str, Any], tokens: Sequence[CommittedToken], usage: Mapping[str, Any]) -> bytes:
        if "content" in delta:
            likely = _logprobs(tokens)
            return self._of_item("response.output_text.delta", content_index=0, delta=delta["content"], logprobs=likely)
        (call,) = delta["tool_calls"]
        if "id" in call:
            return self._end_call() + self._begin_item(_call(call["id"], **call["function"]))
        assert self._open is not None
        self._open["arguments"] += (more := call["function"]["arguments"])
        return self._of_item("response.function_call_arguments.delta", delta=more)

    def aside(self, facts: Mapping[str, Any]) -> bytes:
        return self._created() + self._event("slipstream.figures", slipstream=facts)

    def fail(self, error: Mapping[str, Any]) -> bytes:
        """As this protocol has it, and as clients of it look for it: they raise what stands in `error`."""
        fields = {name: error[name] for name in ("code", "message", "param")}
        return self._event("error", **fields, error=error)

    def end(self, written: Written, tokens: Sequence[CommittedToken], usage: Mapping[str, Any]) -> bytes:
        whole = self.whole([written])
        events = self._end_call() if self._is_called else self._end_message(whole["output"][0])
        return events + self._event(f"response.{whole['status']}", response=whole)

    def close(self, choices: Sequence[Written]) -> bytes:
        return b""

    def _created(self) -> bytes:
        """The first events, once: OpenAI's client takes no other before them."""
        if self._num_events:
            return b""
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _begin_item(self, item: dict[str, Any]) -> bytes:
        self._open = item
        return self._event("response.output_item.added", output_index=len(self._done), item=item)

    def _end_item(self, item: dict[str, Any]) -> bytes:
        index = len(self._done)
        self._done.append(item)
        self._open = None
        return self._event("response.output_item.done", output_index=index, item=item)

    def _end_message(self, item: dict[str, Any]) -> bytes:
        (part,) = item["content"]
        fields = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
        done = self._of_item("response.output_text.done", **fields)
        done += self._of_item("response.content_part.done", content_index=0, part=part)
        return done + self._end_item(item)

    def _end_call(self) -> bytes:
        if self._open is None:
            return b""
        item = _ended(self._open)
        fields = {"name": item["name"], "arguments": item["arguments"]}
        return self._of_item("response.function_call_arguments.done", **fields) + self._end_item(item)

    def _of_item(self, kind: str, **more: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._done), **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return f"event: {kind}\n".encode() + event({"type": kind, "sequence_number": number} | more)


def _message(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": content}


def _text(text: str, tokens: Sequence[CommittedToken] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": _logprobs(tokens)}


def _call(call_id: str, *, name: str, arguments: str) -> dict[str, Any]:
    called = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"type": "function_call", "id": f"fc_{call_id.removeprefix('call_')}", "status": "in_progress"} | called


def _ended(call: Mapping[str, Any]) -> dict[str, Any]:
    """Of several calls, one a page, each says for itself whether it is whole: arguments are an object, and what is cut
    off one is none."""
    return {**call, "status": "completed" if is_json(call["arguments"]) else "incomplete"}


def _logprobs(tokens: Sequence[CommittedToken]) -> list[dict[str, Any]]:
    found = logprobs(tokens)
    return [] if found is None else found["content"]


def _usage(captions: Sequence[Caption]) -> dict[str, Any]:
    """In the names of this protocol; the details are those of a chat completion."""
    counts = usage_of(captions)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cache_write_tokens": 0} | counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0} | counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }
