"""Frames to pixel values, bit for bit as the checkpoint's own video processor does it, without needing torchvision.

transformers resizes uint8 frames with torchvision, which calls `torch.nn.functional.interpolate(..., antialias=True)`
on uint8 for bicubic, and then folds rescaling into the mean and standard deviation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from slipstream.errors import ModelNotUsable

_OPENAI_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_OPENAI_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_DEFAULT_SIZE = 384
_BICUBIC = 3
"""Pillow's number, which processor configs carry."""


@dataclass(frozen=True, slots=True)
class FramePreprocessor:
    """Resize, rescale and normalise. The defaults are those of `LlavaOnevisionVideoProcessor`."""

    height: int = _DEFAULT_SIZE
    width: int = _DEFAULT_SIZE
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = _OPENAI_CLIP_MEAN
    image_std: tuple[float, ...] = _OPENAI_CLIP_STD

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "FramePreprocessor":
        """From a video processor's JSON.

        Raises:
            ModelNotUsable: it asks for a step that is not implemented here.
        """
        size = config.get("size") or {"height": _DEFAULT_SIZE, "width": _DEFAULT_SIZE}
        if set(size) != {"height", "width"}:
            raise ModelNotUsable(f"video processor: size must have height and width, got {dict(size)}")
        if config.get("do_center_crop"):
            raise ModelNotUsable("video processor: do_center_crop is not supported")
        if config.get("resample", _BICUBIC) != _BICUBIC:
            raise ModelNotUsable(f"video processor: resample {config['resample']} is not supported, only bicubic (3)")
        return cls(
            height=int(size["height"]),
            width=int(size["width"]),
            do_resize=bool(config.get("do_resize", True)),
            do_rescale=bool(config.get("do_rescale", True)),
            do_normalize=bool(config.get("do_normalize", True)),
            rescale_factor=float(config.get("rescale_factor", 1 / 255)),
            image_mean=tuple(config.get("image_mean", _OPENAI_CLIP_MEAN)),
            image_std=tuple(config.get("image_std", _OPENAI_CLIP_STD)),
        )

    def __call__(self, frames: NDArray[np.uint8]) -> Tensor:
        """RGB frames, uint8 [n, height, width, 3] of any size -> fp32 pixel values [n, 3, height, width] on the CPU."""
        pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).contiguous()
        if self.do_resize and pixels.shape[-2:] != (self.height, self.width):
            pixels = interpolate(
                pixels, size=[self.height, self.width], mode="bicubic", align_corners=False, antialias=True
            )
        return self._rescale_and_normalize(pixels)

    def _rescale_and_normalize(self, pixels: Tensor) -> Tensor:
        if not self.do_normalize:
            return pixels * self.rescale_factor if self.do_rescale else pixels.float()
        scale = 1.0 / self.rescale_factor if self.do_rescale else 1.0
        mean = torch.tensor(self.image_mean) * scale
        std = torch.tensor(self.image_std) * scale
        return pixels.to(torch.float32).sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))
