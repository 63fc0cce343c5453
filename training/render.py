"""Draws the frames of a clip with distance functions, at any resolution. Knows no words and no video files."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from training.world import APPEAR_PHASE, MAX_SCENES, VANISH_PHASE, Clip, Scene, Visitor

Image = npt.NDArray[np.floating[Any]]
Points = npt.NDArray[np.floating[Any]]

PAINT = {
    "red": (225, 40, 40),
    "orange": (242, 138, 25),
    "yellow": (245, 228, 60),
    "green": (45, 185, 70),
    "blue": (50, 95, 235),
    "purple": (140, 50, 205),
    "pink": (250, 150, 205),
    "white": (246, 246, 246),
    "grey": (165, 165, 165),
}
RADIUS = {"small": 0.125, "large": 0.19}
VISITOR_RADIUS = 0.085
TRAVEL = 0.40
ORBIT_RADIUS = 0.15
TRAIL_BLOBS = 7
TRAIL_ALPHA = 0.6
TEXTURE_PERIOD = 0.15
_HEADING = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0), "still": (0.0, 0.0)}


class Renderer:
    """Frames of one clip at `size` x `size`; each scene's background is drawn once and kept."""

    def __init__(self, clip: Clip, size: int) -> None:
        self._clip = clip
        self._size = size
        self._backdrops: dict[int, Image] = {}

    def frame(self, time_s: float) -> npt.NDArray[np.uint8]:
        """The picture at `time_s` as uint8 [size, size, 3]."""
        scene = self._clip.scene_at(time_s)
        if scene.number not in self._backdrops:
            self._backdrops[scene.number] = _draw_backdrop(scene, self._size)
        image = self._backdrops[scene.number].copy()
        phase = (time_s - scene.start_s) / scene.duration_s
        if scene.event != "vanish" or phase < VANISH_PHASE:
            _draw_subject(image, scene, phase)
        if scene.visitor and phase >= APPEAR_PHASE:
            draw_visitor(image, scene.visitor)
        return np.rint(image).clip(0, 255).astype(np.uint8)


def render_frames(clip: Clip, times_s: list[float], size: int) -> npt.NDArray[np.uint8]:
    """The frames at `times_s` as uint8 [n, size, size, 3]."""
    renderer = Renderer(clip, size)
    return np.stack([renderer.frame(time_s) for time_s in times_s])


def subject_position(scene: Scene, phase: float) -> tuple[float, float]:
    """Where the subject's centre is, as fractions of the frame, `phase` of the way through its scene."""
    x, y = scene.centre
    if scene.motion == "circling":
        angle = 2 * math.pi * (scene.spin + 1.2 * phase)
        return x + ORBIT_RADIUS * math.cos(angle), y + ORBIT_RADIUS * math.sin(angle)
    heading_x, heading_y = _HEADING[scene.motion]
    return x + heading_x * TRAVEL * (phase - 0.5), y + heading_y * TRAVEL * (phase - 0.5)


def _draw_subject(image: Image, scene: Scene, phase: float) -> None:
    radius = RADIUS[scene.size]
    paint = PAINT[scene.colour]
    if scene.motion != "still":
        pace = 2 * math.pi * ORBIT_RADIUS * 1.2 if scene.motion == "circling" else TRAVEL
        lag = (radius + 0.2) / TRAIL_BLOBS / pace
        for blob in range(TRAIL_BLOBS, 0, -1):
            alpha = TRAIL_ALPHA * (1.0 - blob / (TRAIL_BLOBS + 1.5))
            centre = subject_position(scene, phase - blob * lag)
            _stamp(image, _circle, centre, radius * (0.75 - 0.05 * blob), paint, alpha)
    _stamp(image, _OUTLINES[scene.shape], subject_position(scene, phase), radius, paint, 1.0)


def draw_visitor(image: Image, visitor: Visitor) -> None:
    """Into a picture [size, size, 3] of floats."""
    _stamp(image, _OUTLINES[visitor.shape], visitor.corner, VISITOR_RADIUS, PAINT[visitor.colour], 1.0)


def _stamp(
    image: Image,
    outline: Callable[[Points, Points], Points],
    centre: tuple[float, float],
    radius: float,
    paint: tuple[int, int, int],
    alpha: float,
) -> None:
    """Blends a shape into the part of the image it touches; edges are one pixel soft."""
    size = image.shape[0]
    left, top = (max(0, int((c - radius) * size) - 2) for c in centre)
    right, bottom = (min(size, int((c + radius) * size) + 3) for c in centre)
    if left >= right or top >= bottom:
        return
    across = ((np.arange(left, right, dtype=np.float32) + 0.5) / size - centre[0]) / radius
    down = ((np.arange(top, bottom, dtype=np.float32) + 0.5) / size - centre[1]) / radius
    distance = outline(across[None, :], down[:, None])
    cover = alpha * np.clip(0.5 - distance * np.float32(radius * size), 0.0, 1.0)[..., None]
    window = image[top:bottom, left:right]
    window += cover * (np.array(paint, dtype=np.float32) - window)


def _circle(u: Points, v: Points) -> Points:
    return np.hypot(u, v) - 1.0


def _ring(u: Points, v: Points) -> Points:
    return np.abs(np.hypot(u, v) - 0.76) - 0.24


def _square(u: Points, v: Points) -> Points:
    farther: Points = np.maximum(np.abs(u), np.abs(v))
    return farther - 0.86


def _triangle(u: Points, v: Points) -> Points:
    distance: Points = np.maximum(v - 0.75, 0.873 * np.abs(u) - 0.488 * (v + 1.0))
    return distance


def _cross(u: Points, v: Points) -> Points:
    u, v = np.abs(u), np.abs(v)
    distance: Points = np.minimum(np.maximum(u - 1.0, v - 0.3), np.maximum(u - 0.3, v - 1.0))
    return distance


def _star(u: Points, v: Points) -> Points:
    fifth = 2 * math.pi / 5
    angle = np.abs((np.arctan2(u, -v) + fifth / 2) % fifth - fifth / 2)
    reach = np.hypot(u, v)
    return 0.384 * (reach * np.cos(angle) - 1.0) + 0.923 * reach * np.sin(angle)


_OUTLINES: dict[str, Callable[[Points, Points], Points]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "ring": _ring,
    "cross": _cross,
}


def _draw_backdrop(scene: Scene, size: int) -> Image:
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size
    x, y = np.meshgrid(axis, axis)
    weight = _texture(scene, x, y, size)[..., None]
    dark, light = (np.array(tone, dtype=np.float32) for tone in scene.tones)
    image = dark + weight * (light - dark)
    _draw_chapter_mark(image, scene.number)
    return image


def _texture(scene: Scene, x: Points, y: Points, size: int) -> Points:
    """How light the background is at each point, 0 to 1."""
    period_px = TEXTURE_PERIOD * size
    shift = scene.texture_shift
    wave_x = np.abs((x / TEXTURE_PERIOD + shift) % 1.0 - 0.5) * 2
    wave_y = np.abs((y / TEXTURE_PERIOD + shift) % 1.0 - 0.5) * 2

    def soft(signed: Points) -> Points:
        return np.clip(0.5 + signed * period_px / 2, 0.0, 1.0)

    match scene.background:
        case "plain":
            return np.full_like(x, 0.5)
        case "striped":
            return soft(np.abs(((x + y) / TEXTURE_PERIOD / 1.2 + shift) % 1.0 - 0.5) * 2 - 0.5)
        case "checkered":
            first, second = soft(wave_x - 0.5), soft(wave_y - 0.5)
            return first * second + (1 - first) * (1 - second)
        case "dotted":
            return soft(0.5 - np.hypot(wave_x, wave_y))
        case "grid":
            return soft(np.maximum(0.3 - wave_x, 0.3 - wave_y))
        case _:
            angle = 2 * math.pi * shift
            return np.clip(0.5 + 1.3 * ((x - 0.5) * math.cos(angle) + (y - 0.5) * math.sin(angle)), -0.2, 1.2)


def _draw_chapter_mark(image: Image, number: int) -> None:
    """A strip of boxes along the upper edge; scene k has the first k of them lit."""
    size = image.shape[0]

    def pixels(start: float, end: float) -> slice:
        return slice(round(start * size), round(end * size))

    image[pixels(0.0, 0.0804)] = 12.0
    for box in range(MAX_SCENES):
        left = (box + 0.2) / MAX_SCENES
        image[pixels(0.018, 0.0625), pixels(left, left + 0.1)] = 250.0 if box < number else 55.0
