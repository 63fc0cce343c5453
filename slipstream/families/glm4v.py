"""GLM-4.1V, 4.5V and 4.6V: a picture for every two frames, and behind it their time in words."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Glm4vForConditionalGeneration, PreTrainedTokenizerBase

from slipstream.device_copy import to_device
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.video_lm import PromptPlan, VideoGrid
from slipstream.errors import ModelNotUsable
from slipstream.families.adapter import FrameFacts
from slipstream.families.preprocess import GLM4V_PATCHES
from slipstream.families.prompts import ChatTemplate, find_video, token_id_of
from slipstream.families.qwen2_5_vl import USUAL_SIZE, Qwen2_5VL
from slipstream.session_messages import Chat

_TIMES: dict[str, Callable[[float], str]] = {
    "Glm4vProcessor": lambda time_s: str(int(time_s)),
    "Glm46VProcessor": lambda time_s: f"{time_s:.1f} seconds",
}
"""How a processor writes a time."""
_USUAL_PROCESSORS = {"glm4v": "Glm4vProcessor", "glm46v": "Glm46VProcessor", "glm4v_moe": "Glm4vProcessor"}
_BEGIN, _END = "<|begin_of_{}|>", "<|end_of_{}|>"


class Glm4V(Qwen2_5VL):
    """Adapter of `Glm4vForConditionalGeneration`, `Glm46VForConditionalGeneration` and their mixtures of experts.

    The prompt is: template, which has a begin and an end of the video around it; between these, for each step, a begin
    of a picture, rows * columns placeholders for pictures, an end, and the time of the step's first frame; then text.
    Positions are upstream's (`get_rope_index`): text goes on behind the larger side of each picture.

    Raises:
        ModelNotUsable: the parts of the checkpoint do not fit each other.
    """

    surface = ""
    usual_patches = GLM4V_PATCHES

    def __init__(
        self,
        model: Glm4vForConditionalGeneration,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        upstreams: Any = model
        super().__init__(upstreams, checkpoint, tokenizer)
        _tell_places(upstreams.model.visual.embeddings)
        self._write_time = _times_of(checkpoint)
        self._picture_id = token_id_of(checkpoint, tokenizer, "image_token", "<|image|>")
        self._begin_id, self._end_id, begins_video, self._ends_video = (
            token_id_of(checkpoint, tokenizer, None, mark.format(kind))
            for kind in ("image", "video")
            for mark in (_BEGIN, _END)
        )
        if self._picture_id != upstreams.config.image_token_id:
            raise ModelNotUsable(
                f"{checkpoint.ref}: image_token_id is {upstreams.config.image_token_id} in the model's config but"
                f" {self._picture_id} in the tokenizer"
            )
        _check_marks(checkpoint, self._template, self._video_token_id, begins_video, self._ends_video)

    def plan_prompt(self, chat: Chat, frames: FrameFacts) -> PromptPlan:
        num_steps, rows, columns = self._preprocess.grid(frames.num_frames, *(frames.size or USUAL_SIZE))
        placeholders = [self._picture_id] * self._num_tokens((1, rows, columns))
        video: list[str | int] = []
        for time_s in frames.times_in_words_s()[:: self.frames_per_step]:
            video += [self._begin_id, *placeholders, self._end_id, self._write_time(time_s)]
        token_ids = self._template.encode_with_video(chat, self._video_token_id, video)
        spans = find_video(token_ids, self._picture_id, num_steps * len(placeholders))
        return PromptPlan(
            token_ids=tuple(token_ids),
            video=spans,
            text_start=token_ids.index(self._ends_video, spans[-1].stop) + 1,
            grid=VideoGrid(num_steps, rows // self._merge_size, columns // self._merge_size),
            num_steps=num_steps,
        )


def _times_of(checkpoint: Checkpoint) -> Callable[[float], str]:
    """As the checkpoint's processor writes them, which is looked up where transformers looks, in its order: that of
    GLM-4.6V-Flash is another one than its model type says. Raises `ModelNotUsable` for one that is not known."""
    has_pictures = (checkpoint.path / "preprocessor_config.json").is_file()
    settings = "preprocessor_config.json" if has_pictures else "video_preprocessor_config.json"
    files = ("processor_config.json", settings, "tokenizer_config.json", "config.json")
    named = (checkpoint.read_json(name).get("processor_class") for name in files)
    processor = next(filter(None, named), _USUAL_PROCESSORS[checkpoint.model_type])
    if processor not in _TIMES:
        raise ModelNotUsable(f"{checkpoint.ref}: a processor {processor!r} is not known, only {', '.join(_TIMES)}")
    return _TIMES[processor]


def _check_marks(checkpoint: Checkpoint, template: ChatTemplate, video_id: int, begin_id: int, end_id: int) -> None:
    """That what is between them is a video, and not so many pictures."""
    before, after = template.encode_around_video(Chat("?"), video_id)
    if begin_id not in before or end_id not in after:
        around = f"{_BEGIN.format('video')} before the video and {_END.format('video')} behind it"
        raise ModelNotUsable(f"{checkpoint.ref}: the chat template must put {around}")


def _tell_places(embeddings: Any) -> None:
    """Has the embeddings of places told the pictures' sizes on the device, where they look things up by them. The host
    knows them (`tower_inputs`), and nothing waits for the device."""
    upstreams = embeddings.forward

    def forward(patches: Tensor, lengths: Tensor, sizes: Tensor, rows: Tensor, columns: Tensor) -> Any:
        lengths, sizes = (to_device(each, patches.device) for each in (lengths, sizes))
        return upstreams(patches, lengths, sizes, rows, columns)

    embeddings.forward = forward
