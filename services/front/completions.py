"""Captions as OpenAI's completions: texts, usage, llama.cpp's timings, and what speculation did."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from slipstream import __version__
from slipstream.archive.records import tallies
from slipstream.messages import Caption, CommittedToken
from slipstream.services.front.function_calls import Functions, whole_calls
from slipstream.speculation.protocol import FinishReason

PAGE_BREAK = "\n\n"
"""Between the pages of a document."""
DONE = b"data: [DONE]\n\n"
_BASELINES = ("lossy", "tolerance")


@dataclass(frozen=True)
class MediaFacts:
    """What is known of the medium's file; empty where the gateway opened it itself."""

    sha256: str = ""
    num_bytes: int = 0


@dataclass(frozen=True)
class Written:
    """A choice that is whole: of one caption, or of one a page of a document."""

    text: str
    captions: Sequence[Caption]
    tokens: Sequence[CommittedToken] = ()
    functions: Functions | None = None
    """Of which it calls one."""


class Form(Protocol):
    """How one of an answer's choices is told, in the events of a stream, and how the answer is told that has it."""

    def whole(self, choices: Sequence[Written]) -> Mapping[str, Any]:
        """The answer in one piece."""

    def begin(self, usage: Mapping[str, Any]) -> bytes:
        """What comes before all text."""

    def add(self, delta: Mapping[str, Any], tokens: Sequence[CommittedToken], usage: Mapping[str, Any]) -> bytes:
        """One piece of the text or of a call, of the form of `delta`, and the tokens that it brings."""

    def aside(self, facts: Mapping[str, Any]) -> bytes:
        """What is no text."""

    def fail(self, error: Mapping[str, Any]) -> bytes:
        """The end of a stream that fails after its status was sent."""

    def end(self, written: Written, tokens: Sequence[CommittedToken], usage: Mapping[str, Any]) -> bytes:
        """What comes behind its text; `tokens` are those that no piece has brought."""

    def close(self, choices: Sequence[Written]) -> bytes:
        """The end of the stream, behind all of them."""


@dataclass(frozen=True)
class Completion:
    """One answer: what it is called, and the captions that it is made of, one a page of a document."""

    completion_id: str
    model: str
    created_s: int
    draft_model: str = ""
    media: MediaFacts = field(default_factory=MediaFacts)

    def whole(self, choices: Sequence[Written]) -> dict[str, Any]:
        """The answer in one piece; of tokens those are told that have a logprob. What was measured stands beside the
        choice, and in each where there are several."""
        shown = [self._choice(index, written) for index, written in enumerate(choices)]
        facts = [self.facts(written) for written in choices]
        usage = {"usage": usage_of_choices(choices)}
        if len(choices) > 1:
            shown, facts = [one | measured for one, measured in zip(shown, facts, strict=True)], [{}]
        return self._head("chat.completion") | {"choices": shown} | usage | facts[0]

    def _choice(self, index: int, written: Written) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": written.text, "refusal": None}
        if written.functions is not None:
            texts = [caption.text for caption in written.captions]
            calls = whole_calls(written.functions, texts, self.choice_id(index))
            message |= {"content": None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs(written.tokens),
            "finish_reason": finish_reason(written.captions, written.functions),
        }

    def chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        finished: str | None = None,
        tokens: Sequence[CommittedToken] = (),
        **more: Any,
    ) -> bytes:
        """One piece of a choice in a stream, as an event; `tokens` are those that it brings."""
        choice = {"index": index, "delta": delta, "logprobs": logprobs(tokens), "finish_reason": finished}
        return event(self._head("chat.completion.chunk") | {"choices": [choice]} | more)

    def figures_chunk(self, **more: Any) -> bytes:
        """A piece of a stream that is no text, such as usage at its end."""
        return event(self._head("chat.completion.chunk") | {"choices": []} | more)

    def choice_id(self, index: int) -> str:
        """By which the calls of one choice are named."""
        return f"{self.completion_id}.{index}" if index else self.completion_id

    def facts(self, written: Written) -> dict[str, Any]:
        """What was measured of a choice, and its receipt."""
        return {"timings": timings(written.captions), "slipstream": self.figures(written.text, written.captions)}

    def figures(self, text: str, captions: Sequence[Caption]) -> dict[str, Any]:
        """What speculation did, and the receipt."""
        facts = [caption.speculation for caption in captions]
        judged, accepted = sum(one.judged for one in facts), sum(one.accepted for one in facts)
        plain_s = sum(tallies(caption).get("plain_generate_s", 0.0) for caption in captions)
        generate_s = sum(caption.timings.generate_s for caption in captions)
        return {
            "tau": accepted / judged if judged else 0.0,
            "M": accepted / max(sum(one.restarts for one in facts), 1),
            "passes": sum(one.passes for one in facts),
            "speedup": plain_s / generate_s if generate_s > 0 and plain_s > 0 else None,
            "plain_equivalent_s": plain_s,
            "receipt": self._receipt(text, captions),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.completion_id, "object": kind, "created": self.created_s, "model": self.model}

    def _receipt(self, text: str, captions: Sequence[Caption]) -> dict[str, Any]:
        return {
            "slipstream_version": __version__,
            "request_id": captions[0].request_id if captions else "",
            "target": self.model,
            "draft": self.draft_model if self.draft_model and any(caption.had_draft for caption in captions) else None,
            "options": _options_used(captions[0]) if captions else {},
            "media_sha256": self.media.sha256 or None,
            "media_bytes": self.media.num_bytes or None,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            **(_spared(captions[0]) if captions else {}),
        }


@dataclass(frozen=True)
class ChatForm:
    """As a chat completion, and its chunks."""

    completion: Completion
    index: int = 0
    functions: Functions | None = None
    include_usage: bool = False

    def whole(self, choices: Sequence[Written]) -> Mapping[str, Any]:
        return self.completion.whole(choices)

    def begin(self, usage: Mapping[str, Any]) -> bytes:
        delta = {"role": "assistant", "content": None if self.functions else ""}
        return self.completion.chunk(self.index, delta, **usage)

    def add(self, delta: Mapping[str, Any], tokens: Sequence[CommittedToken], usage: Mapping[str, Any]) -> bytes:
        return self.completion.chunk(self.index, delta, tokens=tokens, **usage)

    def aside(self, facts: Mapping[str, Any]) -> bytes:
        shown = {**facts, "choice": self.index} if self.index else facts
        return self.completion.figures_chunk(slipstream=shown)

    def fail(self, error: Mapping[str, Any]) -> bytes:
        return event({"error": error}) + DONE

    def end(self, written: Written, tokens: Sequence[CommittedToken], usage: Mapping[str, Any]) -> bytes:
        finished = finish_reason(written.captions, written.functions)
        return self.completion.chunk(self.index, {}, finished, tokens, **self.completion.facts(written), **usage)

    def close(self, choices: Sequence[Written]) -> bytes:
        chunk = self.completion.figures_chunk(usage=usage_of_choices(choices)) if self.include_usage else b""
        return chunk + DONE


def _options_used(caption: Caption) -> dict[str, Any]:
    """Without the baselines that were not asked for."""
    return {name: value for name, value in caption.options.items() if value or not name.startswith(_BASELINES)}


def _spared(caption: Caption) -> dict[str, Any]:
    """Why the text is not of the video's own frames, where it is not."""
    if caption.shared is not None:
        return {"shared": asdict(caption.shared)}
    return {"skipped": caption.skipped} if caption.skipped else {}


def event(data: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def finish_reason(captions: Sequence[Caption], functions: Functions | None = None) -> str:
    """Of all pages: one that was cut says so. A call is none where a stop string cut it."""
    if any(caption.finish_reason is FinishReason.LENGTH for caption in captions):
        return FinishReason.LENGTH.value
    if functions is None or any(caption.stop_string for caption in captions):
        return FinishReason.STOP.value
    return functions.finish_reason


def logprobs(tokens: Sequence[CommittedToken]) -> dict[str, Any] | None:
    """How likely they were; None where nobody asked."""
    content = [
        _likely(token.piece, token.logprob)
        | {"top_logprobs": [_likely(other.piece, other.logprob) for other in token.top_logprobs]}
        for token in tokens
        if token.logprob is not None
    ]
    return {"content": content, "refusal": None} if content else None


def _likely(piece: str, logprob: float) -> dict[str, Any]:
    return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}


def usage_of(captions: Sequence[Caption], num_streamed: int | None = None, num_prompt: int = 0) -> dict[str, Any]:
    """Tokens. Those of predictions are of hints; what a draft wrote is in `timings`.

    Args:
        num_streamed: tokens of the text so far, where there may be more. What was cached or predicted is told of a
            whole answer alone: none of it is known before a caption has ended.
        num_prompt: of the prompt of a caption that has not ended.
    """
    prompt = num_prompt + sum(caption.video.prompt_tokens for caption in captions)
    written = sum(caption.num_tokens for caption in captions) if num_streamed is None else num_streamed
    counts = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    if num_streamed is not None:
        return counts
    facts = [caption.speculation for caption in captions]
    return counts | {
        "prompt_tokens_details": {
            "cached_tokens": sum(caption.video.reused_tokens for caption in captions),
            "video_tokens": sum(caption.video.video_tokens for caption in captions),
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(one.accepted_prediction_tokens for one in facts),
            "rejected_prediction_tokens": sum(one.rejected_prediction_tokens for one in facts),
        },
    }


def usage_of_choices(choices: Sequence[Written]) -> dict[str, Any]:
    """Tokens of them all: the prompt's once, as it is one."""
    usage, *others = (usage_of(written.captions) for written in choices)
    for other in others:
        usage["completion_tokens"] += other["completion_tokens"]
        for name, count in other["completion_tokens_details"].items():
            usage["completion_tokens_details"][name] += count
    return usage | {"total_tokens": usage["prompt_tokens"] + usage["completion_tokens"]}


def timings(captions: Sequence[Caption]) -> dict[str, Any]:
    """In llama.cpp's names; milliseconds."""
    prompt = sum(caption.video.prompt_tokens for caption in captions)
    cached = sum(caption.video.reused_tokens for caption in captions)
    written = sum(caption.num_tokens for caption in captions)
    first_ms = 1000 * sum(caption.timings.first_token_s for caption in captions)
    text_ms = 1000 * sum(caption.timings.generate_s for caption in captions)
    counted = sum(max(caption.num_tokens - 1, 0) for caption in captions)
    return {
        "cache_n": cached,
        "prompt_n": prompt - cached,
        "prompt_ms": first_ms,
        "prompt_per_token_ms": first_ms / (prompt - cached) if prompt > cached else 0.0,
        "prompt_per_second": 1000 * (prompt - cached) / first_ms if first_ms else 0.0,
        "predicted_n": written,
        "predicted_ms": text_ms,
        "predicted_per_token_ms": text_ms / counted if counted else 0.0,
        "predicted_per_second": 1000 * counted / text_ms if text_ms else 0.0,
        "draft_n": sum(caption.speculation.judged for caption in captions),
        "draft_n_accepted": sum(caption.speculation.accepted for caption in captions),
    }
