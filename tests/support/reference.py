"""The outside reference: greedy answers of plain `transformers.generate`. Only the pixels are made by our own code.

Prompts are laid out as upstream's processors write them: the whole text, tokenised at once.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE as SMOLVLM_TEMPLATE

from slipstream.engine.checkpoint import Checkpoint
from slipstream.families.preprocess import (
    GLM4V_PATCHES,
    QWEN3_PATCHES,
    SIGLIP_FRAMES,
    VIDEO_LLAMA_3_PATCHES,
    FramePreprocessor,
    PatchPreprocessor,
    PicturePreprocessor,
)
from slipstream.families.smolvlm import number_words
from slipstream.session_messages import Chat
from slipstream.video.messages import SampledVideo


@dataclass(frozen=True)
class Layout:
    """A video as a family's processor hands it over."""

    placeholder: str
    """What the chat template writes where the video belongs."""
    words: str
    """What stands there instead."""
    tensors: Mapping[str, Tensor]
    video_token_id: int | None = None
    """Whose tokens the model wants to be told of, beside their ids."""
    template: str | None = None
    """Instead of the checkpoint's."""
    media: Sequence[Any] = ({"type": "video"},)
    """What a message holds for the video."""


class Reference:
    """One checkpoint in fp32 as transformers runs it, its own chat template and generation config included."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.processor = Checkpoint.open(str(folder)).video_processor_config()
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self._folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def answer(self, video: SampledVideo, prompt: Chat | str, num_tokens: int, **more: Any) -> list[int]:
        """Token ids of the answer; an end-of-text token is the last one. `more` goes to `generate`."""
        given = self._given(video, prompt)
        output = self.model.generate(max_new_tokens=num_tokens, do_sample=False, **given, **more)
        answer: list[int] = output[0, given["input_ids"].shape[1] :].tolist()
        return answer

    def chances(self, video: SampledVideo, prompt: Chat | str, answer: Sequence[int]) -> Tensor:
        """Logarithms [len(answer), vocab] of how likely each token is in each place of an answer, by the model's own
        logits: a pass over the prompt, and one over the answer, which may have placeholders among its words."""
        with torch.inference_mode():
            prefill = self.model(**self._given(video, prompt), use_cache=True)
            rest = self.model(input_ids=torch.tensor([answer]), past_key_values=prefill.past_key_values)
        logits = torch.cat((prefill.logits[0, -1:], rest.logits[0, :-1]))
        return logits.log_softmax(dim=-1)

    def _given(self, video: SampledVideo, prompt: Chat | str) -> dict[str, Tensor]:
        """What the model is given: the prompt and the video."""
        layout = self._layout(video)
        given = {"input_ids": torch.tensor([self._prompt(prompt, layout)]), **layout.tensors}
        if layout.video_token_id is not None:
            given["mm_token_type_ids"] = 2 * (given["input_ids"] == layout.video_token_id).int()
        return given

    def prompt_ids(self, video: SampledVideo, prompt: Chat | str) -> list[int]:
        """Token ids of the prompt."""
        return self._prompt(prompt, self._layout(video))

    def text_answer(self, prompt: str, num_tokens: int) -> list[int]:
        """Token ids of the answer to the same chat without a video."""
        input_ids = torch.tensor([self.text_prompt_ids(prompt)])
        output = self.model.generate(input_ids=input_ids, max_new_tokens=num_tokens, do_sample=False)
        answer: list[int] = output[0, input_ids.shape[1] :].tolist()
        return answer

    def text_prompt_ids(self, prompt: str) -> list[int]:
        """Token ids of a prompt about no video."""
        token_ids: list[int] = self.tokenizer(self._rendered(Chat(prompt), None, []))["input_ids"]
        return token_ids

    def text(self, token_ids: list[int]) -> str:
        """The answer as text."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def end_at(self, token_id: int) -> None:
        """Makes `token_id` the end-of-text token, of the checkpoint on disk as well."""
        self.model.generation_config.eos_token_id = token_id
        path = self._folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": token_id}))

    def _layout(self, video: SampledVideo) -> Layout:
        return _LAYOUTS[self.model.config.model_type](self, video)

    def _prompt(self, prompt: Chat | str, layout: Layout) -> list[int]:
        chat = Chat(prompt) if isinstance(prompt, str) else prompt
        rendered = self._rendered(chat, layout.template, layout.media)
        token_ids: list[int] = self.tokenizer(rendered.replace(layout.placeholder, layout.words))["input_ids"]
        return token_ids

    def _rendered(self, chat: Chat, template: str | None, media: Sequence[Any] = ({"type": "video"},)) -> str:
        """The chat; `media` are in the first of the user's messages. `template`: instead of the checkpoint's."""
        template = template or (self._folder / "chat_template.jinja").read_text(encoding="utf-8")
        messages: list[dict[str, Any]] = []
        for number, text in enumerate((*chat.turns, chat.question)):
            role = "assistant" if number % 2 else "user"
            messages.append({"role": role, "content": [*([] if number else media), {"type": "text", "text": text}]})
        if chat.system:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": chat.system}]})
        rendered = self.tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        return str(rendered)


# -- one for each family ----------------------------------------------------------------------------------------------


def _llava_onevision(reference: Reference, video: SampledVideo) -> Layout:
    pixels = FramePreprocessor.from_config(reference.processor)(video.frames)[None]
    vision = reference.model.config.vision_config
    num_tokens = len(video.frames) * math.ceil(vision.image_size // vision.patch_size / 2) ** 2 + 1  # and a newline
    return Layout("<video>", "<video>" * num_tokens, {"pixel_values_videos": pixels})


def _internvl(reference: Reference, video: SampledVideo) -> Layout:
    picture = f"<img>{'<IMG_CONTEXT>' * reference.model.config.image_seq_length}</img>"
    words = "\n".join(f"Frame{number}: {picture}" for number in range(1, len(video.frames) + 1))
    pixels = FramePreprocessor.from_config(reference.processor)(video.frames)
    return Layout("<video>", words, {"pixel_values": pixels})


def _qwen2_vl(reference: Reference, video: SampledVideo) -> Layout:
    tensors, tokens_per_step = _patches(PatchPreprocessor.from_config(reference.processor), video)
    words = "<|video_pad|>" * (tokens_per_step * int(tensors["video_grid_thw"][0, 0]))
    return Layout("<|video_pad|>", words, tensors, reference.model.config.video_token_id)


def _qwen2_5_vl(reference: Reference, video: SampledVideo) -> Layout:
    layout = _qwen2_vl(reference, video)
    spacing_s = video.duration_s / len(video.frames)
    seconds = torch.tensor([spacing_s * PatchPreprocessor.from_config(reference.processor).temporal_patch_size])
    return replace(layout, tensors={**layout.tensors, "second_per_grid_ts": seconds})


def _qwen3_vl(reference: Reference, video: SampledVideo) -> Layout:
    tensors, tokens_per_step = _patches(PatchPreprocessor.from_config(reference.processor, QWEN3_PATCHES), video)
    times_s = [*video.timestamps_s, *video.timestamps_s[-1:] * (len(video.frames) % 2)]
    picture = f"<|vision_start|>{'<|video_pad|>' * tokens_per_step}<|vision_end|>"
    words = [
        f"<{(first + last) / 2:.1f} seconds>{picture}" for first, last in zip(times_s[::2], times_s[1::2], strict=True)
    ]
    return Layout("<|video_pad|>", "".join(words), tensors, reference.model.config.video_token_id)


def _glm4v(reference: Reference, video: SampledVideo) -> Layout:
    tensors, tokens_per_step = _patches(PatchPreprocessor.from_config(reference.processor, GLM4V_PATCHES), video)
    config = reference.model.config
    tells_tenths = reference.processor.get("processor_class") == "Glm46VProcessor" or config.model_type == "glm46v"
    picture = f"<|begin_of_image|>{'<|image|>' * tokens_per_step}<|end_of_image|>"
    words = [
        picture + (f"{time_s:.1f} seconds" if tells_tenths else str(int(time_s))) for time_s in video.timestamps_s[::2]
    ]
    return Layout("<|video|>", "".join(words), tensors, config.image_token_id)


def _llava_interleave(reference: Reference, video: SampledVideo) -> Layout:
    pixels = FramePreprocessor.from_config(reference.processor, SIGLIP_FRAMES)(video.frames)
    vision = reference.model.config.vision_config
    picture = "<image>" * (vision.image_size // vision.patch_size) ** 2
    return Layout("<image>", picture, {"pixel_values": pixels}, media=[{"type": "image"}] * len(video.frames))


def _mistral3(reference: Reference, video: SampledVideo) -> Layout:
    config = reference.model.config
    preprocess = PicturePreprocessor.from_config(
        reference.processor, config.vision_config.patch_size * config.spatial_merge_size
    )
    pixels, (rows, columns) = preprocess(video.frames), preprocess.grid(*video.frames.shape[1:3])
    picture = "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"
    sizes = torch.tensor([pixels.shape[2:]] * len(pixels))
    media = [{"type": "image"}] * len(video.frames)
    return Layout("[IMG]", picture, {"pixel_values": pixels, "image_sizes": sizes}, media=media)


def _llava_next_video(reference: Reference, video: SampledVideo) -> Layout:
    pixels = FramePreprocessor.cropping(reference.processor)(video.frames)[None]
    vision = reference.model.config.vision_config
    num_tokens = len(video.frames) * ((vision.image_size // vision.patch_size) ** 2 // 4)
    return Layout("<video>", "<video>" * num_tokens, {"pixel_values_videos": pixels})


def _smolvlm(reference: Reference, video: SampledVideo) -> Layout:
    config = reference.model.config
    num_tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2 // config.scale_factor**2
    mark = "<fake_token_around_image>"
    words = (
        f"You are provided the following series of {number_words(len(video.frames))} frames from a"
        f" {timedelta(seconds=int(video.duration_s))} [H:MM:SS] video.\n"
    )
    for time_s in video.timestamps_s:
        words += f"\nFrame from 00:{int(time_s):02d}:{mark}<global-img>{'<image>' * num_tokens}{mark}"
    pixels = FramePreprocessor.resizing_twice(reference.processor)(video.frames)[None]
    return Layout("<video>", f"{words}\n\n", {"pixel_values": pixels}, template=SMOLVLM_TEMPLATE)


def _video_llama_3(reference: Reference, video: SampledVideo) -> Layout:
    """With `use_token_compression=False`."""
    preprocess = PatchPreprocessor.from_config(reference.processor, VIDEO_LLAMA_3_PATCHES)
    tensors, tokens_per_frame = _patches(preprocess, video)
    tensors["video_merge_sizes"] = torch.tensor([preprocess.merge_size])
    tensors["video_compression_mask"] = torch.ones(len(video.frames) * tokens_per_frame, dtype=torch.bool)
    words = [f"Time {time_s:.1f}s:{'<|video_pad|>' * tokens_per_frame}" for time_s in video.timestamps_s]
    return Layout("<|video_pad|>", ",".join(words), tensors)


def _patches(preprocess: PatchPreprocessor, video: SampledVideo) -> tuple[dict[str, Tensor], int]:
    """The pictures for the model, and how many tokens two frames become."""
    steps, rows, columns = preprocess.grid(*video.frames.shape[:3])
    tensors = {
        "pixel_values_videos": preprocess(video.frames),
        "video_grid_thw": torch.tensor([[steps, rows, columns]]),
    }
    return tensors, rows * columns // preprocess.merge_size**2


_LAYOUTS: Mapping[str, Callable[[Reference, SampledVideo], Layout]] = {
    "glm46v": _glm4v,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v,
    "internvl": _internvl,
    "llava": _llava_interleave,
    "llava_next_video": _llava_next_video,
    "llava_onevision": _llava_onevision,
    "mistral3": _mistral3,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
    "qwen3_5": _qwen3_vl,
    "qwen3_5_moe": _qwen3_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "smolvlm": _smolvlm,
    "video_llama_3": _video_llama_3,
}
