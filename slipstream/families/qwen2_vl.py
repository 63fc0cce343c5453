"""Qwen2-VL: as Qwen2.5-VL, but its time axis counts steps and knows no seconds."""

from slipstream.families.qwen2_5_vl import Qwen2_5VL


class Qwen2VL(Qwen2_5VL):
    """Adapter of `Qwen2VLForConditionalGeneration`. Its `get_rope_index` takes the spacing of frames and ignores it."""

    surface = ""
