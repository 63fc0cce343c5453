"""What happens in a synthetic clip: seeded scenes of one moving shape each. Knows neither pixels nor words."""

import random
from dataclasses import dataclass

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white")
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
SIZES = ("small", "large")
MOTIONS = ("left", "right", "up", "down", "circling", "still")
BACKGROUNDS = ("plain", "striped", "checkered", "dotted", "grid", "shaded")
EVENTS = ("none", "appear", "vanish")
VISITOR_SHAPES = ("circle", "square", "triangle")

MAX_SCENES = 6
FULL_SCENES = (4, 6)
SCENE_SECONDS = (4.0, 6.5)
APPEAR_PHASE = 0.4
VANISH_PHASE = 0.6

HELD_OUT_SEEDS = range(9_000_000, 10_000_000)
"""Seeds of evaluation clips. Training draws its seeds below this range only."""


@dataclass(frozen=True)
class Visitor:
    """The tiny second object that appears midway through some scenes."""

    colour: str
    shape: str
    corner: tuple[float, float]


@dataclass(frozen=True)
class Scene:
    """One shot between two cuts. Positions are fractions of the frame, times are seconds from the start of the clip."""

    number: int
    start_s: float
    duration_s: float
    colour: str
    shape: str
    size: str
    motion: str
    background: str
    event: str
    visitor: Visitor | None
    centre: tuple[float, float]
    spin: float
    tones: tuple[tuple[int, int, int], tuple[int, int, int]]
    texture_shift: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True)
class Clip:
    """A sequence of scenes; `seed` decides everything about it."""

    seed: int
    scenes: tuple[Scene, ...]

    @property
    def duration_s(self) -> float:
        return self.scenes[-1].end_s

    def scene_at(self, time_s: float) -> Scene:
        return next((scene for scene in self.scenes if time_s < scene.end_s), self.scenes[-1])


def sample_clip(seed: int, num_scenes: tuple[int, int] = FULL_SCENES) -> Clip:
    """The clip of `seed`, with between num_scenes[0] and num_scenes[1] scenes."""
    rng = random.Random(seed)
    scenes: list[Scene] = []
    start_s = 0.0
    for number in range(1, rng.randint(*num_scenes) + 1):
        scene = _sample_scene(rng, number, start_s)
        scenes.append(scene)
        start_s = scene.end_s
    return Clip(seed, tuple(scenes))


def frame_times(duration_s: float, num_frames: int) -> list[float]:
    """The moments at which `num_frames` frames are sampled: evenly, from the first one on."""
    return [index * duration_s / num_frames for index in range(num_frames)]


def _sample_scene(rng: random.Random, number: int, start_s: float) -> Scene:
    colour = rng.choice(COLOURS)
    event = rng.choices(EVENTS, weights=(0.5, 0.3, 0.2))[0]
    return Scene(
        number=number,
        start_s=start_s,
        duration_s=rng.uniform(*SCENE_SECONDS),
        colour=colour,
        shape=rng.choice(SHAPES),
        size=rng.choice(SIZES),
        motion=rng.choice(MOTIONS),
        background=rng.choice(BACKGROUNDS),
        event=event,
        visitor=_sample_visitor(rng, colour) if event == "appear" else None,
        centre=(rng.uniform(0.42, 0.58), rng.uniform(0.5, 0.6)),
        spin=rng.uniform(0.0, 1.0),
        tones=_sample_tones(rng),
        texture_shift=rng.uniform(0.0, 1.0),
    )


def _sample_visitor(rng: random.Random, subject_colour: str) -> Visitor:
    colour = rng.choice([name for name in COLOURS if name != subject_colour])
    corner = (rng.choice((0.11, 0.89)), rng.choice((0.2, 0.88)))
    return Visitor(colour, rng.choice(VISITOR_SHAPES), corner)


def _sample_tones(rng: random.Random) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Two muted tones of one hue, dark enough for every subject colour to stand out."""
    base = [rng.randint(38, 70) for _ in range(3)]
    lift = rng.randint(32, 46)
    dark = (base[0], base[1], base[2])
    return dark, (dark[0] + lift, dark[1] + lift, dark[2] + lift)
