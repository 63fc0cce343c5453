"""A geometry as the engine's own `VideoLM`, without checkpoint and tokenizer. Knows no measurement."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from slipstream.device_copy import to_device
from slipstream.engine.attention import IMPLEMENTATION, Kernel
from slipstream.engine.forward import Decoder, DecodeState, Runner
from slipstream.engine.video_lm import VideoLM
from slipstream.engine.vision_attention import IMPLEMENTATION as WINDOWED
from slipstream.engine.vision_attention import tower_inputs
from slipstream.families.adapter import FrameFacts, Pixels, PromptPlan, TextDecoder
from slipstream.families.preprocess import FramePreprocessor, PatchPreprocessor
from slipstream.families.qwen2_5_vl import multiply_patches
from slipstream.frame_size import ANY_SIZE
from slipstream.service_info import ModelInfo
from slipstream.session_messages import Chat

MAX_CONTEXT = 131_072
"""Positions, for all of them: 25,000 video tokens must fit whatever the checkpoint was trained for."""


@dataclass(frozen=True)
class Geometry:
    name: str
    family: str
    """Its model type."""
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    published_parameters: float
    """What the hub counts in the checkpoint; 0: it is nobody's checkpoint."""
    source: str

    def config(self) -> PreTrainedConfig:
        """What upstream builds the model from."""
        text = {"max_position_embeddings": MAX_CONTEXT, "tie_word_embeddings": False, **self.text}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
        shared: dict[str, Any] = {"tie_word_embeddings": text["tie_word_embeddings"]}
        if self.family == "llava_onevision":
            text["model_type"] = "qwen2"
            shared |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        else:
            text["rope_parameters"]["mrope_section"] = text.pop("mrope_section", [16, 24, 24])
        return AutoConfig.for_model(self.family, text_config=text, vision_config=dict(self.vision), **shared)


def read_geometries(path: Path) -> dict[str, Geometry]:
    """By name, from a file of JSON."""
    return {name: Geometry(name, **facts) for name, facts in json.loads(path.read_text()).items()}


GEOMETRIES = read_geometries(Path(__file__).with_name("geometries.json"))
"""By the numbers of the published configurations."""


@dataclass(frozen=True)
class Pair:
    draft: str
    target: str

    @property
    def name(self) -> str:
        return f"{self.draft} / {self.target}"


PAIRS = (Pair("llava-onevision-qwen2-0.5b", "llava-onevision-qwen2-7b"), Pair("Qwen2.5-VL-7B", "Qwen2.5-VL-32B"))


def tiny(geometry: Geometry) -> Geometry:
    """The same family in a size that a CPU runs in milliseconds; keeps the name."""
    layers = 4 if geometry.text["num_hidden_layers"] > 24 else 2
    text = {**geometry.text, "vocab_size": 672, "hidden_size": 32, "intermediate_size": 64}
    text |= {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {**geometry.vision, "hidden_size": 16, "intermediate_size": 32}
    if geometry.family == "llava_onevision":
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    else:
        text["mrope_section"] = [2, 1, 1]
        vision |= {"depth": 1, "num_heads": 2, "fullatt_block_indexes": [0], "out_hidden_size": 32}
    return replace(geometry, text=text, vision=vision, published_parameters=0.0)


def make_upstream(geometry: Geometry, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """The upstream model with random weights that were made on `device`: nothing passes through the host's memory."""
    attention = {"": "sdpa", "vision_config": "sdpa", "text_config": IMPLEMENTATION}
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(geometry.config(), dtype=dtype, attn_implementation=attention)
    return cast(PreTrainedModel, model.eval().requires_grad_(False))


def count_parameters(geometry: Geometry) -> int:
    model = make_upstream(geometry, torch.device("meta"), torch.bfloat16)
    return sum(parameter.numel() for parameter in model.parameters())


NUM_BEFORE, NUM_TEXT = 16, 48
"""Tokens of a usual template before the video, and of a question after it."""
FRAMES_PER_STEP = {"llava_onevision": 1, "qwen2_5_vl": 2}


def plan_of(num_video_tokens: int) -> PromptPlan:
    """A prompt about so many video tokens; its words are all the same."""
    text_start = NUM_BEFORE + num_video_tokens
    return PromptPlan((1,) * (text_start + NUM_TEXT), (range(NUM_BEFORE, text_start),), text_start)


class RandomAdapter:
    """What the engine needs of a family, with prompts made by `plan_of`.

    Positions count the tokens, on all axes alike: which they are makes no difference to time or memory.
    """

    def __init__(self, upstream: PreTrainedModel, geometry: Geometry) -> None:
        parts: Any = upstream
        self.decoder = cast(Decoder, parts.model.language_model)
        self.lm_head = parts.lm_head
        self.frames_per_step = FRAMES_PER_STEP[geometry.family]
        self.tokens_per_step = 1
        self.num_axes = 1 if geometry.vision.get("image_size") else 3
        self.frame_size = ANY_SIZE
        self.surface = ""
        self._parts = parts
        self._side = geometry.vision.get("image_size", 0)
        if not self._side:
            parts.model.visual.config._attn_implementation = WINDOWED  # as the family's own adapter has it
            if self._parts.device.type == "cuda":
                multiply_patches(parts.model.visual.patch_embed.proj)

    def plan_prompt(self, chat: Chat, frames: FrameFacts) -> PromptPlan:
        return plan_of(frames.num_frames)

    def preprocess(self, frames: NDArray[np.uint8], num_frames: int) -> Pixels:
        if self._side:
            return Pixels(len(frames), FramePreprocessor(self._side, self._side)(frames, self._parts.dtype))
        preprocess = PatchPreprocessor()
        values = preprocess(frames, num_frames, self._parts.dtype)
        return Pixels(len(frames), values, preprocess.grid(*frames.shape[:3]))

    def encode(self, pixels: Pixels) -> Tensor:
        values = to_device(pixels.values, self._parts.device)
        if self._side:
            return cast(Tensor, self._parts.get_video_features(values[None]).pooler_output)[0, :-1]
        grid = torch.tensor([pixels.grid])
        inputs = tower_inputs(self._parts.model.visual, grid, self._parts.device)
        return cast(tuple[Tensor], self._parts.get_video_features(values, grid, **inputs).pooler_output)[0]

    def embed_prompt(self, plan: PromptPlan, video_embeddings: Tensor) -> Tensor:
        table = self.decoder.embed_tokens
        hidden = cast(Tensor, table(to_device(torch.tensor(plan.token_ids), table.weight.device)))
        hidden[plan.video_start : plan.video_stop] = video_embeddings
        return hidden

    def positions(self, plan: PromptPlan, rows: Tensor, scheme: str) -> tuple[Tensor, int]:
        return rows if self.num_axes == 1 else rows.expand(self.num_axes, -1), plan.num_tokens


@dataclass(frozen=True)
class RandomModel:
    """The weights of one geometry, and as many engines over them as there are kernels to compare."""

    geometry: Geometry
    upstream: PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    make_runner: Callable[..., Runner] = Runner

    @classmethod
    def make(cls, geometry: Geometry, device: torch.device, dtype: torch.dtype) -> "RandomModel":
        return cls(geometry, make_upstream(geometry, device, dtype), device, dtype)

    @property
    def _text(self) -> Any:
        return self.upstream.config.get_text_config()

    def runner(self, kernel: Kernel, *, strict_width: int = 0) -> Runner:
        parts: Any = self.upstream
        decoder = cast(Decoder, parts.model.language_model)
        return self.make_runner(decoder, parts.lm_head, kernel, fixed_shapes=strict_width > 0)

    def engine(self, kernel: Kernel, *, strict_width: int = 0, static_tokens: int = 0) -> VideoLM:
        """The model as the services have it, except that it has no words.

        Args:
            strict_width: see `VideoLM.step`.
            static_tokens: above 0, steps are static, over a pool for so many tokens.
        """
        text = self._text
        info = ModelInfo(
            model_id=self.geometry.name,
            model_type=self.geometry.family,
            device=str(self.device),
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            num_layers=text.num_hidden_layers,
            max_context=MAX_CONTEXT,
            tokens_per_frame=1,
            max_frames=MAX_CONTEXT,
        )
        adapter = RandomAdapter(self.upstream, self.geometry)
        runner = self.runner(kernel, strict_width=strict_width)
        engine = VideoLM(info, adapter, runner, cast(TextDecoder, None), strict_width=strict_width)
        if static_tokens:
            engine.open_static_steps(static_tokens * runner.kv_bytes_per_token)
        return engine

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.upstream.parameters())

    def pass_bytes(self, num_tokens: int) -> int:
        """Bytes that a decoding pass over a cache of `num_tokens` tokens must read: weights of the layers and of the
        head, and the cache."""
        parts: Any = self.upstream
        layers = sum(parameter.nbytes for parameter in parts.model.language_model.layers.parameters())
        return int(layers) + int(parts.lm_head.weight.nbytes) + num_tokens * self._kv_bytes_per_token

    @property
    def _kv_bytes_per_token(self) -> int:
        head_dim = self._text.hidden_size // self._text.num_attention_heads
        return int(2 * self._text.num_hidden_layers * self._text.num_key_value_heads * head_dim) * self.dtype.itemsize

    def video_embeddings(self, num_video_tokens: int, seed: int = 0) -> Tensor:
        """Random ones, [num_video_tokens, hidden], of the size that the embedding table has."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (num_video_tokens, self._text.hidden_size)
        return 0.02 * torch.randn(shape, dtype=self.dtype, device=self.device, generator=generator)

    def filled_state(self, runner: Runner, num_tokens: int, headroom: int = 64, seed: int = 0) -> DecodeState:
        """A state whose cache holds `num_tokens` random rows: passes over it take as long as over a real prompt."""
        text = self._text
        shape = (2, text.num_key_value_heads, num_tokens, text.hidden_size // text.num_attention_heads)
        generator = torch.Generator(self.device).manual_seed(seed)
        cache = runner.new_cache(num_tokens + headroom)
        cache.reserve(num_tokens)
        with torch.inference_mode():
            for layer in range(runner.num_layers):
                keys, values = torch.randn(shape, dtype=self.dtype, device=self.device, generator=generator)
                cache.write(layer, keys, values)
        cache.advance(num_tokens)
        return DecodeState(cache, num_prompt_tokens=num_tokens, position_offset=0)


def greedy_tokens(model: VideoLM, state: DecodeState, first: int, count: int) -> list[int]:
    """The `count` tokens that the engine writes behind `first`, one pass each, with the one wait that a pass has where
    it is served; the state is rolled back."""
    num_tokens, tokens = state.num_tokens, [first]
    for _ in range(count):
        (rows,) = model.step_and_choose([(state, tokens[-1:])])
        tokens.append(rows.largest[-1])
    state.rollback(num_tokens)
    return tokens[1:]


def chain(count: int) -> Sequence[int]:
    """New tokens for a pass of `count` rows."""
    return [1] * count
