"""What is asked of the reference process, and what it answers. Plain data; imports no torch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """What to caption, and with which checkpoints."""

    video: Path
    num_frames: int
    prompt: str
    max_new_tokens: int
    target: Path
    draft: Path


@dataclass(frozen=True)
class Generated:
    """An answer of `generate`."""

    token_ids: tuple[int, ...]
    first_token_s: float
    num_timed: int
    """Tokens after those that came out first."""
    decode_s: float
    """Seconds that these took."""
    note: str = ""


@dataclass(frozen=True)
class Agreement:
    """By output position, whether the draft would have written the target's token."""

    agrees: tuple[bool, ...]
    kept_tokens: int
