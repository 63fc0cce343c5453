"""The architectures that a pocket pair can be trained in."""

from training.llava import LlavaFamily
from training.pocket import Family
from training.qwen import QwenFamily

FAMILIES: dict[str, Family] = {family.name: family for family in (LlavaFamily(), QwenFamily())}
