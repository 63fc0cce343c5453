"""Which size a model's processor gives the frames of a video: decoders resize by it, models count tokens by it."""

import math
from dataclasses import dataclass

from slipstream.errors import InvalidRequest

MAX_ASPECT_RATIO = 200
"""Of Qwen2-VL's processor."""


@dataclass(frozen=True, slots=True)
class FrameSize:
    """Either exactly `height` x `width`; or near the frames' own size and shape, with sides that are multiples of
    `multiple` and an area within two bounds; or, with no field set, any size as it comes.

    The second is `smart_resize` of transformers' `Qwen2VLVideoProcessor`.
    """

    height: int = 0
    width: int = 0
    multiple: int = 0
    min_pixels: int = 0
    max_pixels: int = 0
    """Bounds of height * width after resizing."""

    @property
    def is_known(self) -> bool:
        return bool(self.height or self.multiple)

    @property
    def most_pixels(self) -> int:
        """No frame that may be resized so has more; 0 where any size comes."""
        if not self.multiple:
            return self.height * self.width
        grown = self._next_multiple(MAX_ASPECT_RATIO) * self._next_multiple(1 / MAX_ASPECT_RATIO)
        thin = self.multiple * math.isqrt(MAX_ASPECT_RATIO * self.max_pixels)
        return max(self.max_pixels, grown, thin)

    def within(self, max_pixels: int) -> "FrameSize":
        """The same with no more pixels than that, where the model leaves a choice."""
        if not self.multiple:
            return self
        most, least = min(self.max_pixels, max_pixels), min(self.min_pixels, max_pixels)
        return FrameSize(multiple=self.multiple, min_pixels=least, max_pixels=most)

    def of(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of frames that have these.

        Raises:
            InvalidRequest: no model of this kind takes frames so narrow.
        """
        if not self.multiple:
            return (self.height, self.width) if self.height else (height, width)
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise InvalidRequest(f"frames of {width} x {height} pixels are too narrow for this model")
        side = self.multiple
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side * side < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows * side, columns * side

    def _next_multiple(self, ratio: float) -> int:
        """The longest side that a picture of this shape can be given to reach the least area."""
        return math.ceil(math.sqrt(self.min_pixels * ratio) / self.multiple + 1) * self.multiple


ANY_SIZE = FrameSize()
"""Frames keep their own."""
