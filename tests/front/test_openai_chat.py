"""OpenAI's own client at a real stack: the text is the gateway's, whichever way the video came."""

import asyncio
import base64
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from slipstream.messages import Caption
from tests.front.conftest import NUM_FRAMES, Served, jpeg, png, webp
from tests.support.front import PROMPT, asked, data_url
from tests.support.gateway_client import MOST_TRIES
from tests.support.processes import eventually, logged

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 24
LONG = 3000
EXTRA: dict[str, Any] = {"slipstream": {"num_frames": NUM_FRAMES}}


async def plain(served: Served, clip: int = 0, **options: Any) -> Caption:
    """What the gateway says by itself, without a draft."""
    given = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "method": "autoregressive"}
    return await served.captioner.caption(served.clips[clip], **(given | options))


async def chat(served: Served, url: str, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    given = {"model": served.model, "messages": asked(url), "max_completion_tokens": NUM_TOKENS}
    return await served.client.chat.completions.create(**(given | fields), extra_body=EXTRA | (extra or {}))


async def test_the_model_is_listed(served: Served) -> None:
    (model,) = [model async for model in served.client.models.list()]
    assert model.id == served.model and (await served.client.models.retrieve(served.model)).owned_by == "slipstream"
    with pytest.raises(openai.NotFoundError) as refused:
        await served.client.models.retrieve("another")
    assert refused.value.code == "model_not_found"


async def test_the_text_is_that_of_plain_decoding(served: Served) -> None:
    caption = await plain(served)
    answer = await chat(served, data_url(served.clips[0]))
    (choice,) = answer.choices
    assert choice.message.content == caption.text and choice.finish_reason == caption.finish_reason.value
    assert answer.usage.prompt_tokens == caption.video.prompt_tokens
    assert answer.usage.completion_tokens == caption.num_tokens == NUM_TOKENS
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + NUM_TOKENS
    details, timings = answer.usage.completion_tokens_details, answer.timings
    assert timings["draft_n"] >= timings["draft_n_accepted"]
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0), "nothing was predicted"
    assert timings["predicted_n"] == NUM_TOKENS
    figures = answer.slipstream
    assert set(figures) >= {"tau", "M", "passes", "speedup", "receipt"} and figures["passes"] > 0
    assert figures["receipt"]["media_bytes"] == len(served.clips[0])


async def test_an_answer_is_json_of_the_schema_that_is_asked_for(served: Served) -> None:
    """By the client's own way of asking for it; the words are of no model that could say more."""

    class Scene(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        place: Literal["indoors", "outdoors"]
        objects: int = pydantic.Field(ge=1, le=99)

    given = {"model": served.model, "messages": asked(data_url(served.clips[0])), "max_completion_tokens": 400}
    answer = await served.client.chat.completions.parse(**given, response_format=Scene, extra_body=EXTRA)
    scene = answer.choices[0].message.parsed
    assert isinstance(scene, Scene) and answer.choices[0].finish_reason == "stop"
    plain = await chat(served, data_url(served.clips[0]), extra={"structured_outputs": {"choice": ["a star", "none"]}})
    assert plain.choices[0].message.content in ("a star", "none")
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: foo") as refused:
        await chat(served, data_url(served.clips[0]), response_format=wrong)
    assert refused.value.param == "response_format.json_schema.schema"


async def test_a_stream_is_the_same_text_with_usage_at_its_end(served: Served) -> None:
    caption = await plain(served)
    options = {"include_usage": True}
    chunks = [
        chunk async for chunk in await chat(served, data_url(served.clips[0]), stream=True, stream_options=options)
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == caption.text and len([text for text in texts if text]) > 1
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["length"]
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == NUM_TOKENS
    assert all(chunk.usage is None for chunk in chunks[:-1]) and len({chunk.id for chunk in chunks}) == 1
    assert chunks[-2].timings["predicted_n"] == NUM_TOKENS and chunks[-2].slipstream["receipt"]["text_sha256"]


async def test_how_likely_tokens_are_is_told(served: Served) -> None:
    asked_for: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    answer = await chat(served, data_url(served.clips[0]), **asked_for)
    told = answer.choices[0].logprobs.content
    assert "".join(one.token for one in told) == answer.choices[0].message.content
    assert len(told) == NUM_TOKENS and all(bytes(one.bytes).decode() == one.token for one in told)
    for one in told:  # greedily the likeliest is the one
        assert one.logprob == one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob and one.logprob <= 0
    chunks = [chunk async for chunk in await chat(served, data_url(served.clips[0]), stream=True, **asked_for)]
    parts = [one for chunk in chunks for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content]
    assert [(one.token, len(one.top_logprobs)) for one in parts] == [(one.token, 2) for one in told]
    assert [one.logprob for one in parts] == pytest.approx([one.logprob for one in told], abs=1e-4)
    assert (await chat(served, data_url(served.clips[0]))).choices[0].logprobs is None


async def test_an_answer_is_handed_back_for_the_next_question(served: Served) -> None:
    """As chat programs do: the client's own object is the next message."""
    messages = [{"role": "system", "content": "Be brief."}, *asked(data_url(served.clips[0]))]
    first = await chat(served, "", messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "And then?"}]
    second = await chat(served, "", messages=messages)
    said = {"prompt": "And then?", "system": "Be brief.", "turns": (PROMPT, first.choices[0].message.content)}
    assert second.choices[0].message.content == (await plain(served, **said)).text
    assert second.usage.prompt_tokens_details.cached_tokens > second.usage.prompt_tokens / 2


async def test_every_chunk_has_the_usage_so_far(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await chat(served, data_url(served.clips[0]), stream=True, stream_options=options)
    told = [chunk.usage async for chunk in stream]
    written = [usage.completion_tokens for usage in told]
    assert written == sorted(written) and written[-1] == NUM_TOKENS
    assert {usage.prompt_tokens for usage in told} == {(await plain(served)).video.prompt_tokens}
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in told)


async def test_a_traced_stream_says_who_wrote_what(served: Served) -> None:
    stream = await chat(
        served, data_url(served.clips[0]), {"slipstream": EXTRA["slipstream"] | {"trace": True}}, stream=True
    )
    said = [chunk.slipstream async for chunk in stream if not chunk.choices]
    tokens = [token for one in said for token in one.get("tokens", [])]
    assert len(tokens) == NUM_TOKENS and "".join(piece for piece, _ in tokens) == (await plain(served)).text
    assert any("trace" in one for one in said) and any("stage" in one for one in said)
    (stages,) = [one["stages"] for one in said if "stages" in one]
    assert stages["first_token_s"] > 0 and stages["draft_prefill_s"] > 0


async def test_a_stream_says_which_video_tokens_the_draft_keeps(served: Served) -> None:
    own = EXTRA["slipstream"] | {"want_kept": True, "gate": False}
    stream = await chat(served, data_url(served.clips[0]), {"slipstream": own}, stream=True)
    said = [chunk.slipstream async for chunk in stream if not chunk.choices]
    (kept,) = [one["kept"] for one in said if "kept" in one]
    assert len(said) == 1, "nothing else was asked for"
    num_tokens = kept["num_steps"] * kept["num_rows"] * kept["num_columns"]
    assert len(base64.b64decode(kept["bitmap"])) == -(-num_tokens // 8) and len(kept["times_s"]) == kept["num_steps"]


async def test_one_video_in_many_ways(served: Served, tmp_path: Path) -> None:
    path = served.folder / "0.mp4"
    uploaded = await served.client.files.create(file=path, purpose="user_data")
    parts: list[dict[str, Any]] = [
        {"type": "video_url", "video_url": {"url": f"file://{path}"}},
        {"type": "video", "video": f"file://{path}"},
        {"type": "file", "file": {"file_id": uploaded.id}},
        {"type": "file", "file": {"file_data": data_url(served.clips[0]), "filename": "0.mp4"}},
    ]
    texts = set()
    for part in parts:
        messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": [part]}]
        texts.add((await chat(served, "", messages=messages)).choices[0].message.content)
    assert texts == {(await plain(served)).text}
    await served.client.files.delete(uploaded.id)


async def test_frames_are_a_video(served: Served) -> None:
    frames = [jpeg(shade) for shade in (0, 80, 160, 240)]
    one_by_one = {"type": "video", "video": [data_url(frame, "image/jpeg") for frame in frames]}
    joined = {"type": "video_url", "video_url": {"url": data_url(frames[0], "video/jpeg")}}
    for frame in frames[1:]:
        joined["video_url"]["url"] += "," + data_url(frame).partition(",")[2]
    lossless = {"type": "video", "video": [data_url(png(shade), "image/png") for shade in (0, 80, 160, 240)]}
    answers = []
    from_a_browser = {"type": "video", "video": [data_url(webp(shade), "image/webp") for shade in (0, 80, 160, 240)]}
    for part in (lossless, from_a_browser, one_by_one, joined):
        messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}, part]}]
        answers.append(
            await served.client.chat.completions.create(
                model=served.model, messages=messages, max_completion_tokens=NUM_TOKENS
            )
        )
    assert len({answer.choices[0].message.content for answer in answers[2:]}) == 1
    (tokens,) = {answer.usage.prompt_tokens_details.video_tokens for answer in answers}
    assert tokens == len(frames) * (await served.captioner.info()).tokens_per_frame
    picture = {"type": "image_url", "image_url": {"url": data_url(frames[0], "image/jpeg")}}
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}, picture]}]
    answer = await chat(served, "", messages=messages, extra={"slipstream": {}})
    assert answer.usage.prompt_tokens_details.video_tokens == tokens // len(frames)


async def test_sampling_is_the_gateways(served: Served) -> None:
    sampled = {"temperature": 0.9, "top_p": 0.9, "seed": 7}
    caption = await plain(served, **sampled)
    answer = await chat(served, data_url(served.clips[0]), {"top_k": -1, "repetition_penalty": 1.0}, **sampled)
    assert answer.choices[0].message.content == caption.text
    word = caption.text.split()[3]
    stopped = await chat(served, data_url(served.clips[0]), stop=[word], **sampled)
    assert stopped.choices[0].message.content == caption.text[: caption.text.index(word)]
    assert stopped.choices[0].finish_reason == "stop"


async def test_a_prediction_saves_passes_and_changes_nothing(served: Served) -> None:
    caption = await plain(served, 1)
    prediction = {"type": "content", "content": caption.text}
    without_gate = {"slipstream": EXTRA["slipstream"] | {"gate": False}}
    for _ in range(MOST_TRIES):  # what a pass took when a machine was busy makes windows short
        answer = await chat(served, data_url(served.clips[1]), without_gate, prediction=prediction)
        assert answer.choices[0].message.content == caption.text
        assert answer.slipstream["receipt"]["options"]["method"] == "hints"
        accepted = answer.usage.completion_tokens_details.accepted_prediction_tokens
        if accepted > NUM_TOKENS // 2:
            break
    assert accepted > NUM_TOKENS // 2
    assert answer.slipstream["passes"] < NUM_TOKENS // 2


async def test_the_same_again_is_cached(served: Served) -> None:
    await chat(served, data_url(served.clips[2]))
    again = await chat(served, data_url(served.clips[2]))
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert again.timings["cache_n"] == again.usage.prompt_tokens_details.cached_tokens


async def test_leaving_a_stream_ends_its_caption(served: Served) -> None:
    log = served.stack.processes["target"].log_path
    stream = await served.client.chat.completions.create(
        model=served.model,
        messages=asked(data_url(served.clips[0])),
        max_completion_tokens=LONG,
        stream=True,
        extra_body=EXTRA | {"temperature": 5.0},
        extra_headers={"x-request-id": "left-by-its-client"},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    await stream.close()
    await eventually(lambda: logged(log, "session.closed", request_id="left-by-its-client"))


async def test_many_streams_at_once(served: Served) -> None:
    caption = await plain(served)

    async def text() -> str:
        stream = await chat(served, data_url(served.clips[0]), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert set(await asyncio.gather(*(text() for _ in range(8)))) == {caption.text}


async def test_errors_are_those_that_the_client_knows(served: Served) -> None:
    good, no_video = data_url(served.clips[0]), data_url(b"no video")
    cases: list[tuple[type[openai.APIStatusError], dict[str, Any], str | None]] = [
        (openai.BadRequestError, {"url": no_video}, "messages[0].content[1]"),
        (openai.NotFoundError, {"url": "file:///etc/passwd"}, "messages[0].content[1]"),
        (openai.BadRequestError, {"url": "https://example.com/a.mp4"}, "messages[0].content[1]"),
        (openai.NotFoundError, {"url": good, "model": "another"}, "model"),
        (openai.BadRequestError, {"url": good, "logit_bias": {"1": 1}}, "logit_bias"),
        (openai.APIStatusError, {"url": good, "max_tokens": 10**6, "max_completion_tokens": None}, "max_tokens"),
        (openai.BadRequestError, {"url": good, "extra": {"slipstream": {"method": "magic"}}}, "slipstream.method"),
        (openai.BadRequestError, {"url": good, "extra": {"slipstream": {"prompts": ["a", "b"]}}}, "slipstream.prompts"),
        (openai.BadRequestError, {"url": good, "extra": {"slipstream": {"tolerance": 0.5}}}, "slipstream.tolerance"),
        (
            openai.BadRequestError,
            {"url": good, "extra": {"slipstream": {"skip_marked": "black"}}},
            "slipstream.skip_marked",
        ),
        (openai.BadRequestError, {"url": good, "extra": {"slipstream": {"segments": "shots"}}}, "slipstream.segments"),
        (openai.BadRequestError, {"url": good, "extra": {"slipstream": {"shape": "tree"}}}, "slipstream.shape"),
    ]
    for kind, fields, param in cases:
        with pytest.raises(kind) as refused:
            await chat(served, **fields)
        assert refused.value.param == param, fields
        assert (refused.value.code == "unreadable_media") == (fields["url"] == no_video), fields
        assert refused.value.type == "invalid_request_error" and refused.value.response.headers["x-request-id"]


async def test_documents_need_a_reader(served: Served) -> None:
    part = {"type": "file", "file": {"file_data": data_url(b"%PDF-1.7 ...", "application/pdf"), "filename": "a.pdf"}}
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(served, "", messages=[{"role": "user", "content": [part]}], extra={"slipstream": {}})
    assert refused.value.code == "not_served" and refused.value.param == "messages[0].content[0]"
