"""Which size a model's processor gives the frames of a video: decoders resize by it, models count tokens by it."""

import math
from dataclasses import dataclass, replace

from slipstream.errors import InvalidRequest

MAX_ASPECT_RATIO = 200
"""Of Qwen2-VL's processor."""


@dataclass(frozen=True, slots=True)
class FrameSize:
    """Either exactly `height` x `width`, perhaps by way of another size; or near the frames' own size and shape, with
    sides that are multiples of `multiple` and an area within two bounds; or, with no field set, any size as it comes.

    The second is `smart_resize` of transformers' `Qwen2VLVideoProcessor`; with `frames_per_step`, whose bounds are of
    all frames together, that of `Qwen3VLVideoProcessor`.
    """

    height: int = 0
    width: int = 0
    multiple: int = 0
    min_pixels: int = 0
    max_pixels: int = 0
    """Bounds of height * width after resizing."""
    frames_per_step: int = 0
    """0: the bounds are of each frame. Else of the whole video, which is counted in steps of so many frames."""
    frame_pixels: int = 0
    """Of a whole video's frames, none has more; 0: no bound."""
    shortest_edge: int = 0
    """Above 0: frames are resized so that their shorter side is this, and `height` x `width` in the middle is kept."""
    longest_edge: int = 0
    """Above 0: frames are resized so that their longer side is this, and then again, to `height` x `width`."""
    lanczos: bool = False
    """They are resized by Lanczos' kernel, not by the cubic one."""

    @property
    def is_known(self) -> bool:
        return bool(self.height or self.multiple)

    @property
    def has_two_steps(self) -> bool:
        """Whether frames get their size by way of another one."""
        return self.shortest_edge > 0 or self.longest_edge > 0

    def most_pixels(self, num_frames: int) -> int:
        """No frame of so many that may be resized so has more; 0 where any size comes."""
        if not self.multiple:
            return self.height * self.width
        least, most = (bound // self._counted(num_frames)[0] for bound in self._bounds(num_frames))
        grown = self._next_multiple(least, MAX_ASPECT_RATIO) * self._next_multiple(least, 1 / MAX_ASPECT_RATIO)
        thin = self.multiple * math.isqrt(MAX_ASPECT_RATIO * most)
        return max(most, grown, thin)

    def within(self, max_pixels: int) -> "FrameSize":
        """The same with no more pixels in a frame than that, where the model leaves a choice."""
        if not self.multiple:
            return self
        if self.frames_per_step:
            return replace(self, frame_pixels=min(self.frame_pixels or max_pixels, max_pixels))
        return replace(self, min_pixels=min(self.min_pixels, max_pixels), max_pixels=min(self.max_pixels, max_pixels))

    def of(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """Height and width of frames that have these, in a video of so many.

        Raises:
            InvalidRequest: no model of this kind takes frames so narrow.
        """
        if not self.multiple:
            return (self.height, self.width) if self.height else (height, width)
        _check_shape(height, width)
        (counted, frames), (least, most), side = self._counted(num_frames), self._bounds(num_frames), self.multiple
        if self._is_done(height, width, num_frames):
            return height, width
        if self.frames_per_step and min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        rows, columns = round(height / side), round(width / side)
        if counted * rows * columns * side * side > most:
            shrink = math.sqrt(frames * height * width / most)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif counted * rows * columns * side * side < least:
            grow = math.sqrt(least / (frames * height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows * side, columns * side

    def on_the_way(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that frames have before they get the exact ones; where there is no such way, their own.

        Raises:
            InvalidRequest: the frames are so narrow that they would be huge on the way.
        """
        if self.shortest_edge:
            _check_shape(height, width)
            short = min(height, width)
            return int(self.shortest_edge * height / short), int(self.shortest_edge * width / short)
        if not self.longest_edge:
            return height, width
        ratio = width / height
        if width >= height:
            return max(1, _even(int(self.longest_edge / ratio))), self.longest_edge
        return self.longest_edge, max(1, _even(int(self.longest_edge * ratio)))

    def _is_done(self, height: int, width: int, num_frames: int) -> bool:
        """Whether frames of this size stay as they are; so those do that were resized before."""
        least, most = self._bounds(num_frames)
        few, many = sorted(self._counted(num_frames))
        fits = few * height * width <= most and many * height * width >= least
        return fits and not height % self.multiple and not width % self.multiple

    def _counted(self, num_frames: int) -> tuple[int, int]:
        """How many frames the bounds are compared with, and how many they are shared by."""
        if not self.frames_per_step:
            return 1, 1
        return max(1, round(num_frames / self.frames_per_step)) * self.frames_per_step, max(2, num_frames)

    def _bounds(self, num_frames: int) -> tuple[int, int]:
        """Fewest and most pixels."""
        if not self.frame_pixels:
            return self.min_pixels, self.max_pixels
        most = min(self.max_pixels, self.frame_pixels * self._counted(num_frames)[0])
        return min(self.min_pixels, most), most

    def _next_multiple(self, least: int, ratio: float) -> int:
        """The longest side that a picture of this shape can be given to reach the least area."""
        return math.ceil(math.sqrt(least * ratio) / self.multiple + 1) * self.multiple


def _check_shape(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise InvalidRequest(f"frames of {width} x {height} pixels are too narrow for this model")


def _even(side: int) -> int:
    return side + side % 2


ANY_SIZE = FrameSize()
"""Frames keep their own."""
