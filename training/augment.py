"""Roughens rendered frames the way video coding does, so that decoded files look familiar to the models."""

import torch
from torch.nn import functional

from training.pocket import normalise


def roughen(frames: torch.Tensor) -> torch.Tensor:
    """uint8 [n, h, w, 3] as pixel values [n, 3, h, w] with random blur, colour shift and noise for each frame."""
    pixels = normalise(frames)
    shape = (len(pixels), 1, 1, 1)
    blurred = functional.avg_pool2d(pixels, 3, stride=1, padding=1, count_include_pad=False)
    pixels = torch.lerp(pixels, blurred, 0.5 * torch.rand(shape))
    shift = 0.04 * torch.randn(len(pixels), 3, 1, 1)
    noise = 0.03 * torch.rand(shape) * torch.randn_like(pixels)
    return pixels + shift + noise
