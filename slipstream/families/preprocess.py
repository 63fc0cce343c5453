"""Frames to pixel values, bit for bit as the checkpoint's own video processor does it, without needing torchvision.

transformers resizes uint8 frames with torchvision, which calls `torch.nn.functional.interpolate(..., antialias=True)`
on uint8, and then folds rescaling into the mean and standard deviation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from slipstream.engine.checkpoint import Checkpoint
from slipstream.errors import InvalidRequest, ModelNotUsable
from slipstream.frame_size import ANY_SIZE, FrameSize, fit

_OPENAI_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_OPENAI_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_DEFAULT_SIZE, _CROPPED_SIZE = 384, 224
_MAX_FRAME_TOKENS = 768
"""Of Qwen3-VL's processor, where it caps the pixels of frames."""
_LONGEST_EDGE = 4096
"""The longest that SmolVLM's processor makes a side."""
_LANCZOS, _BICUBIC = 1, 3
"""Pillow's numbers, which processor configs carry."""


FRAMES_PER_CHUNK = 8
"""Frames that a vision tower takes at once; on CUDA up to `MAX_CHUNKS` times as many, as long as they have no more
pixels than `CHUNK_PIXELS`: a GPU spends more time on being told of a kernel than on a kernel of few frames."""
MAX_CHUNKS, CHUNK_PIXELS = 4, 32 * 448 * 448
_NORMALIZED_AT_ONCE = 1 << 18
"""Numbers: 1 MiB of fp32."""


def frames_at_once(device: str, size: tuple[int, ...]) -> int:
    """Frames of this height and width for a vision tower: no less than `FRAMES_PER_CHUNK`, and a multiple of it."""
    if not device.startswith("cuda"):
        return FRAMES_PER_CHUNK
    return FRAMES_PER_CHUNK * min(max(1, CHUNK_PIXELS // (FRAMES_PER_CHUNK * math.prod(size))), MAX_CHUNKS)


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """Which steps a processor takes, and with what constants. The defaults are those of all processors here."""

    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = _OPENAI_CLIP_MEAN
    image_std: tuple[float, ...] = _OPENAI_CLIP_STD
    lanczos: bool = False
    """Not bicubic. Where torchvision is older than 0.27, upstream takes bicubic all the same."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], usual: "PixelSettings | None" = None) -> "PixelSettings":
        """From a video processor's JSON; what it leaves out is as `usual`.

        Raises:
            ModelNotUsable: it asks for a step that is not implemented here.
        """
        usual = usual or cls()
        resample = config.get("resample", _LANCZOS if usual.lanczos else _BICUBIC)
        if resample not in (_LANCZOS, _BICUBIC):
            raise ModelNotUsable(
                f"video processor: resample {resample} is not supported, only Lanczos (1) and bicubic (3)"
            )
        return cls(
            do_resize=bool(config.get("do_resize", usual.do_resize)),
            do_rescale=bool(config.get("do_rescale", usual.do_rescale)),
            do_normalize=bool(config.get("do_normalize", usual.do_normalize)),
            rescale_factor=float(config.get("rescale_factor", usual.rescale_factor)),
            image_mean=tuple(config.get("image_mean", usual.image_mean)),
            image_std=tuple(config.get("image_std", usual.image_std)),
            lanczos=resample == _LANCZOS,
        )

    def resized(self, frames: NDArray[np.uint8], size: FrameSize, num_frames: int) -> Tensor:
        """RGB frames, uint8 [n, h, w, 3] of any size -> uint8 [n, 3, height, width].

        Those that have the right size already are taken as resized.
        """
        _, height, width, _ = frames.shape
        wanted = size.of(height, width, num_frames)
        if not self.do_resize or wanted == (height, width):
            return _planes(frames)
        if self.lanczos or size.has_two_steps:
            return _planes(np.stack([fit(frame, size, num_frames) for frame in frames]))
        return interpolate(_planes(frames), size=list(wanted), mode="bicubic", align_corners=False, antialias=True)

    def normalized(self, levels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """uint8 [n, 3, ...] -> pixel values of the same shape, computed in fp32 and then rounded to `dtype`: of few
        rows at a time, which stay in a core's cache."""
        made = torch.empty(levels.shape, dtype=dtype)
        rows = max(1, _NORMALIZED_AT_ONCE // max(1, levels[0].numel()))
        for part, values in zip(levels.split(rows), made.split(rows), strict=True):
            exact = values if dtype == torch.float32 else torch.empty(part.shape)
            self._normalize(exact.copy_(part))
            values.copy_(exact)
        return made

    def _normalize(self, values: Tensor) -> None:
        """Of levels, fp32 [n, 3, ...], in their place."""
        if self.do_normalize:
            scale = 1.0 / self.rescale_factor if self.do_rescale else 1.0
            shape = (-1, *[1] * (values.ndim - 2))
            mean, std = (torch.tensor(each).mul_(scale).view(shape) for each in (self.image_mean, self.image_std))
            values.sub_(mean).div_(std)
        elif self.do_rescale:
            values.mul_(self.rescale_factor)


_HALVES = PixelSettings(image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5))
"""The defaults of `SiglipImageProcessor`, `Qwen3VLVideoProcessor` and `VideoLlama3VideoProcessor`."""
_SMOLVLM_PIXELS = replace(_HALVES, lanczos=True)
"""The defaults of `SmolVLMVideoProcessor`."""


def _planes(frames: NDArray[np.uint8]) -> Tensor:
    """[n, h, w, 3] -> uint8 [n, 3, h, w]."""
    return torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class FramePreprocessor:
    """Every frame to one size. The defaults are those of `LlavaOnevisionVideoProcessor`."""

    height: int = _DEFAULT_SIZE
    width: int = _DEFAULT_SIZE
    pixels: PixelSettings = field(default_factory=PixelSettings)
    shortest_edge: int = 0
    """See `FrameSize`, as `longest_edge`."""
    longest_edge: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], usual: "FramePreprocessor | None" = None) -> "FramePreprocessor":
        """From a processor's JSON that names one height and width; what it leaves out is as `usual`.

        Raises:
            ModelNotUsable: it asks for a step that is not implemented here.
        """
        _check_uncropped(config)
        usual = usual or cls()
        height, width = _height_and_width("size", config.get("size") or {"height": usual.height, "width": usual.width})
        return cls(height, width, PixelSettings.from_config(config, usual.pixels))

    @classmethod
    def cropping(cls, config: Mapping[str, Any]) -> "FramePreprocessor":
        """From the JSON of a `LlavaNextVideoVideoProcessor`: the middle of frames whose shorter side has one length.

        Raises:
            ModelNotUsable: it asks for a step that is not implemented here.
        """
        pixels = PixelSettings.from_config(config)
        shortest_edge = int((config.get("size") or {}).get("shortest_edge", _CROPPED_SIZE))
        height, width = _height_and_width("crop_size", config.get("crop_size") or _CROPPED_SIZE)
        if not (config.get("do_center_crop", True) and pixels.do_resize) or max(height, width) > shortest_edge:
            raise ModelNotUsable(
                "video processor: frames must be resized by size['shortest_edge'] and then cropped, to a crop_size that"
                " is not larger"
            )
        return cls(height, width, pixels, shortest_edge=shortest_edge)

    @classmethod
    def resizing_twice(cls, config: Mapping[str, Any]) -> "FramePreprocessor":
        """From the JSON of a `SmolVLMVideoProcessor`: by the longer side, then to a square.

        Raises:
            ModelNotUsable: it asks for a step that is not implemented here.
        """
        _check_uncropped(config)
        size = config.get("size") or (config.get("video_sampling") or {}).get("video_size") or {"longest_edge": 4 * 364}
        side = int((config.get("max_image_size") or {}).get("longest_edge", 364))
        pixels = PixelSettings.from_config(config, _SMOLVLM_PIXELS)
        if set(size) != {"longest_edge"} or not pixels.do_resize:
            raise ModelNotUsable(f"video processor: size must have longest_edge alone, got {dict(size)}")
        return cls(side, side, pixels, longest_edge=min(int(size["longest_edge"]), _LONGEST_EDGE))

    @property
    def frame_size(self) -> FrameSize:
        """What frames are resized to."""
        if not self.pixels.do_resize:
            return ANY_SIZE
        return FrameSize(
            self.height,
            self.width,
            shortest_edge=self.shortest_edge,
            longest_edge=self.longest_edge,
            lanczos=self.pixels.lanczos,
        )

    def __call__(self, frames: NDArray[np.uint8], dtype: torch.dtype = torch.float32) -> Tensor:
        """RGB frames, uint8 [n, h, w, 3] of any size -> pixel values [n, 3, height, width] on the CPU."""
        return self.pixels.normalized(self.pixels.resized(frames, self.frame_size, len(frames)), dtype)


SIGLIP_FRAMES = FramePreprocessor(224, 224, _HALVES)
"""The defaults of `SiglipImageProcessor`."""


@dataclass(frozen=True, slots=True)
class PicturePreprocessor:
    """Frames at nearly their own size, whole. The defaults are those of `PixtralImageProcessor`."""

    multiple: int
    """Of both sides: what one token stands for."""
    longest_edge: int = 1024
    pixels: PixelSettings = field(default_factory=PixelSettings)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], multiple: int) -> "PicturePreprocessor":
        """From an image processor's JSON.

        Raises:
            ModelNotUsable: it asks for a step that is not implemented here.
        """
        _check_uncropped(config)
        size = config.get("size") or {"longest_edge": cls(multiple).longest_edge}
        pixels = PixelSettings.from_config(config)
        if set(size) != {"longest_edge"} or int(size["longest_edge"]) < 1 or not pixels.do_resize:
            raise ModelNotUsable(f"image processor: frames must be resized by size['longest_edge'], got {dict(size)}")
        return cls(multiple, int(size["longest_edge"]), pixels)

    @property
    def frame_size(self) -> FrameSize:
        """What frames are resized to."""
        most = -(-self.longest_edge // self.multiple) * self.multiple
        return FrameSize(
            multiple=self.multiple,
            max_pixels=most**2,
            longest_edge=self.longest_edge,
            lanczos=self.pixels.lanczos,
        )

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens that a frame of this size becomes. Raises what `FrameSize.of` raises."""
        height, width = self.frame_size.of(height, width, 1)
        return height // self.multiple, width // self.multiple

    def __call__(self, frames: NDArray[np.uint8], dtype: torch.dtype = torch.float32) -> Tensor:
        """RGB frames, uint8 [n, h, w, 3] of any size -> pixel values [n, 3, height, width] on the CPU."""
        return self.pixels.normalized(self.pixels.resized(frames, self.frame_size, 1), dtype)


def _check_uncropped(config: Mapping[str, Any]) -> None:
    if config.get("do_center_crop"):
        raise ModelNotUsable("video processor: do_center_crop is not supported for this family")


def _check_positive(settings: "PatchPreprocessor", *names: str) -> None:
    if wrong := {name: value for name in names if (value := getattr(settings, name)) < 1}:
        raise ModelNotUsable(f"video processor: sizes and bounds of frames must be positive, not {wrong}")


def _height_and_width(name: str, size: Mapping[str, int] | int) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    if set(size) != {"height", "width"}:
        raise ModelNotUsable(f"video processor: {name} must have height and width, got {dict(size)}")
    return int(size["height"]), int(size["width"])


def check_tower_size(checkpoint: Checkpoint, preprocess: FramePreprocessor, size: tuple[int, int]) -> None:
    """Raises `ModelNotUsable` where frames would not have the height and width that the vision tower takes."""
    if (preprocess.height, preprocess.width) != size:
        raise ModelNotUsable(
            f"{checkpoint.ref}: the vision tower takes frames of {size[0]}x{size[1]}, not the"
            f" {preprocess.height}x{preprocess.width} of the video processor's config"
        )


@dataclass(frozen=True, slots=True)
class PatchPreprocessor:
    """Frames to rows of patches at nearly their own size. The defaults are those of `Qwen2VLVideoProcessor`."""

    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    """Bounds of height * width after resizing."""
    patch_size: int = 14
    temporal_patch_size: int = 2
    """Frames in a patch."""
    merge_size: int = 2
    """Side of the square of patches that become one token: its patches stand together."""
    is_of_video: bool = False
    """The bounds are of all frames together."""
    shares_most: bool = False
    """See `FrameSize`."""
    max_frame_tokens: int = 0
    """Above 0: a frame has at most so many and its share of the bounds, see `FrameSize.capped_pixels`."""
    pixels: PixelSettings = field(default_factory=PixelSettings)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], usual: "PatchPreprocessor | None" = None) -> "PatchPreprocessor":
        """From a video processor's JSON; what it leaves out is as `usual`.

        Raises:
            ModelNotUsable: it asks for a step that is not implemented here.
        """
        _check_uncropped(config)
        usual = usual or cls()
        size = dict(config.get("size") or {"shortest_edge": usual.min_pixels, "longest_edge": usual.max_pixels})
        for edge, key in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            if config.get(key) is not None:
                size[edge] = config[key]
        if not size.get("shortest_edge") or not size.get("longest_edge"):
            raise ModelNotUsable(f"video processor: size must have shortest_edge and longest_edge, got {size}")
        caps = usual.is_of_video and bool(config.get("cap_pixels_per_frame"))
        settings = cls(
            min_pixels=int(size["shortest_edge"]),
            max_pixels=int(size["longest_edge"]),
            patch_size=int(config.get("patch_size", usual.patch_size)),
            temporal_patch_size=int(config.get("temporal_patch_size", usual.temporal_patch_size)),
            merge_size=int(config.get("merge_size", usual.merge_size)),
            is_of_video=usual.is_of_video,
            shares_most=usual.shares_most,
            max_frame_tokens=int(config.get("max_video_tokens", _MAX_FRAME_TOKENS)) if caps else 0,
            pixels=PixelSettings.from_config(config, usual.pixels),
        )
        _check_positive(settings, "patch_size", "temporal_patch_size", "merge_size", "min_pixels", "max_pixels")
        return settings

    @property
    def frame_size(self) -> FrameSize:
        """What frames are resized to."""
        if not self.pixels.do_resize:
            return ANY_SIZE
        return FrameSize(
            multiple=self.patch_size * self.merge_size,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            frames_per_step=self.temporal_patch_size if self.is_of_video else 0,
            shares_most=self.shares_most,
            capped_pixels=self.max_frame_tokens * (self.patch_size * self.merge_size) ** 2,
            lanczos=self.pixels.lanczos,
        )

    def grid(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Patches along time, height and width that frames of this size become.

        Raises:
            InvalidRequest: frames too narrow or too flat, or of a size that cannot be cut without resizing.
        """
        height, width = self._resized(height, width, num_frames)
        num_steps = -(-num_frames // self.temporal_patch_size)
        return num_steps, height // self.patch_size, width // self.patch_size

    def __call__(
        self, frames: NDArray[np.uint8], num_frames: int | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """RGB frames, uint8 [n, h, w, 3] -> patches on the CPU, [t * h * w, 3 * temporal * patch * patch].

        If n is no multiple of the frames in a patch, the last frame is repeated. `num_frames`: of the whole video, if
        these are not all.
        """
        num_frames = num_frames or len(frames)
        height, width = self._resized(frames.shape[1], frames.shape[2], num_frames)
        levels = self.pixels.resized(frames, self.frame_size, num_frames)
        missing = -len(levels) % self.temporal_patch_size
        if missing:
            levels = torch.cat([levels, levels[-1:].expand(missing, -1, -1, -1)])
        side, merge = self.patch_size, self.merge_size
        blocks = levels.view(
            -1, self.temporal_patch_size, 3, height // side // merge, merge, side, width // side // merge, merge, side
        )
        patches = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3, self.temporal_patch_size * side * side)
        return self.pixels.normalized(patches, dtype).flatten(1)

    def _resized(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        side = self.patch_size * self.merge_size
        if not self.pixels.do_resize and (height % side or width % side):
            raise InvalidRequest(f"frames of {width} x {height} pixels: this model takes multiples of {side} only")
        return self.frame_size.of(height, width, num_frames)


QWEN3_PATCHES = PatchPreprocessor(
    min_pixels=128 * 32 * 32, max_pixels=768 * 32 * 32, patch_size=16, is_of_video=True, pixels=_HALVES
)
"""The defaults of `Qwen3VLVideoProcessor`."""
GLM4V_PATCHES = PatchPreprocessor(min_pixels=112 * 112, max_pixels=2 * 30000 * 28 * 28, is_of_video=True)
"""The defaults of `Glm4vVideoProcessor` and `Glm46VVideoProcessor`."""
VIDEO_LLAMA_3_PATCHES = PatchPreprocessor(
    min_pixels=0, max_pixels=0, temporal_patch_size=1, shares_most=True, pixels=_HALVES
)
"""The defaults of `VideoLlama3VideoProcessor`, without its bounds, which checkpoints must have themselves: of more than
six frames upstream's leave each less than the least."""
