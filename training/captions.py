"""The words of the synthetic world: writes a clip's caption, reads attributes back out of one, scores it."""

import random
import re
from collections.abc import Sequence

from training.world import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, SIZES, Clip, Scene

DEFAULT_PROMPT = "Describe this video in detail."
PROMPTS = (
    DEFAULT_PROMPT,
    "Describe the video.",
    "What happens in this video?",
    "Write a detailed caption for this clip.",
    "Tell me what you see in the video, scene by scene.",
    "Please caption this video.",
)
SCORED_ATTRIBUTES = ("colour", "shape", "motion")
ALL_ATTRIBUTES = ("colour", "shape", "motion", "size", "background")

DOMINANT_PROBABILITY = 0.88
"""How often a slot takes the wording that its scene calls for; the rest is spread over the other wordings."""

_OPENINGS = (
    ("The video opens on a {bg} background.", "It all begins on a {bg} background."),
    ("The second scene cuts to a {bg} background.", "Next comes a {bg} background."),
    ("In the third scene we see a {bg} background.", "After another cut there is a {bg} background."),
    ("Scene four is set on a {bg} background.", "Then the fourth scene has a {bg} background."),
    ("The fifth scene shows a {bg} background.", "Later on, scene five has a {bg} background."),
    ("Finally, the sixth scene has a {bg} background.", "At last we cut to a {bg} background."),
)
_SUBJECTS = (
    "A {size} {colour} {shape} {moves}.",
    "Here a {size} {colour} {shape} {moves}.",
    "On it, a {size} {colour} {shape} {moves}.",
)
_MOVES = {
    "left": ("drifts to the left", "slides to the left"),
    "right": ("drifts to the right", "slides to the right"),
    "up": ("rises up the frame", "climbs up the frame"),
    "down": ("sinks down the frame", "falls down the frame"),
    "circling": ("turns in circles", "runs around in circles"),
    "still": ("stays perfectly still", "rests in one place"),
}
_TRAILS = {
    "left": ("A fading {colour} trail follows the {shape}.", "It has a fading {colour} trail."),
    "right": ("A fading {colour} trail follows the {shape}.", "It has a fading {colour} trail."),
    "up": ("Under it hangs a fading {colour} trail.", "It has a fading {colour} trail."),
    "down": ("Above it hangs a fading {colour} trail.", "It has a fading {colour} trail."),
    "circling": ("Its fading {colour} trail bends into a loop.", "It has a fading {colour} trail."),
    "still": ("The {colour} {shape} leaves no trail.", "It leaves no trail."),
}
_EVENTS = {
    "none": ("Nothing else happens here.", "Nothing else comes into view.", "The rest of the scene is calm."),
    "appear": (
        "Halfway through, a tiny {other} appears.",
        "Midway, a tiny {other} shows up.",
        "Then a tiny {other} pops up.",
    ),
    "vanish": (
        "Before the cut, the {shape} disappears.",
        "Near the end, the {shape} vanishes.",
        "Then the {shape} is gone.",
    ),
}
_CLOSINGS = ("In all, the video has {count} scenes.", "There are {count} scenes in total.")
_COUNTS = ("no", "one", "two", "three", "four", "five", "six")

_SUBJECT_PATTERN = re.compile(
    rf"\b(?P<size>{'|'.join(SIZES)}) (?P<colour>{'|'.join(COLOURS)}) (?P<shape>{'|'.join(SHAPES)}) (?P<moves>[^.]*)"
)
_BACKGROUND_PATTERN = re.compile(rf"\b({'|'.join(BACKGROUNDS)}) background")
_MOTION_WORDS = {
    "left": "left",
    "right": "right",
    "up": "up",
    "down": "down",
    "circles": "circling",
    "still": "still",
    "place": "still",
}


def write_caption(clip: Clip) -> str:
    """A paragraph about `clip`; the same clip always gets the same words."""
    rng = random.Random(f"caption {clip.seed}")
    sentences = [sentence for scene in clip.scenes for sentence in _scene_sentences(rng, scene)]
    sentences.append(_choose(rng, _CLOSINGS, 0).format(count=_COUNTS[len(clip.scenes)]))
    return " ".join(sentences)


def scene_truth(clip: Clip) -> list[dict[str, str]]:
    """The attributes of every scene's subject, in order."""
    return [{name: getattr(scene, name) for name in ALL_ATTRIBUTES} for scene in clip.scenes]


def parse_attributes(text: str) -> list[dict[str, str]]:
    """The attributes a caption states, one dict a scene; what it does not state is absent."""
    scenes = []
    for match in _SUBJECT_PATTERN.finditer(text):
        attributes = {name: match[name] for name in ("colour", "shape", "size")}
        motions = [_MOTION_WORDS[word] for word in match["moves"].split() if word in _MOTION_WORDS]
        if motions:
            attributes["motion"] = motions[-1]
        backgrounds = _BACKGROUND_PATTERN.findall(text, 0, match.start())
        if backgrounds:
            attributes["background"] = backgrounds[-1]
        scenes.append(attributes)
    return scenes


def score_caption(
    text: str, truth: Sequence[dict[str, str]], names: Sequence[str] = SCORED_ATTRIBUTES
) -> tuple[int, int]:
    """How many of the truth's attributes the caption states rightly, scene by scene, and how many there are."""
    stated = parse_attributes(text)
    right = sum(
        stated[index].get(name) == scene[name] for index, scene in enumerate(truth[: len(stated)]) for name in names
    )
    return right, len(truth) * len(names)


def _scene_sentences(rng: random.Random, scene: Scene) -> list[str]:
    words = {
        "bg": scene.background,
        "size": scene.size,
        "colour": scene.colour,
        "shape": scene.shape,
        "moves": _choose(rng, _MOVES[scene.motion], SIZES.index(scene.size)),
        "other": f"{scene.visitor.colour} {scene.visitor.shape}" if scene.visitor else "",
    }
    templates = (
        _choose(rng, _OPENINGS[scene.number - 1], 0),
        _choose(rng, _SUBJECTS, BACKGROUNDS.index(scene.background)),
        _choose(rng, _TRAILS[scene.motion], 0),
        _choose(rng, _EVENTS[scene.event], MOTIONS.index(scene.motion)),
    )
    return [template.format(**words) for template in templates]


def _choose(rng: random.Random, wordings: Sequence[str], dominant: int) -> str:
    """Mostly wordings[dominant], counted round the list; otherwise one of the others."""
    dominant %= len(wordings)
    if rng.random() < DOMINANT_PROBABILITY:
        return wordings[dominant]
    return rng.choice([wording for index, wording in enumerate(wordings) if index != dominant])
