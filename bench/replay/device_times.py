"""How long the passes of some device take, from a table: what a replay makes a model's passes last.

A table is a JSON file, made from a paper's figures or measured on a device; all times are seconds:

    {"name": "7B/72B", "source": "where the figures are from", "prefill_tokens": 25088,
     "target": {"pass_s": {"1": 0.42, "9": 0.43}, "prefill_s": 44.2, "guidance_s": 11.0, "encode_frame_s": 0.01},
     "draft": {"pass_s": {"0": 0.078, "0.9": 0.047}, "prefill_s": 7.9, "row_share": 0.05}}

`pass_s` is by the number of rows for the target (a window and one), by the pruned share alpha for the draft: straight
lines between the points, flat outside. `row_share` is what each row beyond a session's first adds to a draft's pass, as
a share of it. `prefill_s` is of a whole prompt of `prefill_tokens`, `guidance_s` the part of it up to layer L. What is
left out lasts what it really takes.
"""

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidConfig

ROLES = ("target", "draft")
_SECONDS = ("prefill_s", "guidance_s", "encode_frame_s")


@dataclass(frozen=True)
class DeviceTimes:
    """One model's part of a table, in seconds."""

    name: str
    points: tuple[tuple[float, float], ...]
    """Seconds of a pass by rows, or by alpha; ascending."""
    prefill_s: float | None = None
    guidance_s: float | None = None
    encode_frame_s: float = 0.0
    row_share: float = 0.0

    def pass_s(self, place: float, more_rows: int = 0) -> float:
        """Of a pass of so many rows, or at that alpha with one row a session and `more_rows` beyond them."""
        return self._one_pass_s(place) * (1 + self.row_share * more_rows)

    def _one_pass_s(self, place: float) -> float:
        for (left, low), (right, high) in itertools.pairwise(self.points):
            if left <= place <= right:
                return low + (high - low) * (place - left) / (right - left)
        return self.points[0][1] if place < self.points[0][0] else self.points[-1][1]

    def layer_s(self, layer: int, num_layers: int, guidance_layer: int) -> float:
        """Seconds that a prefill takes in the layer of that index, all rows of the prompt taking part."""
        if self.prefill_s is None:
            return 0.0
        if self.guidance_s is None or not 0 < guidance_layer < num_layers:
            return self.prefill_s / num_layers
        if layer < guidance_layer:
            return self.guidance_s / guidance_layer
        return (self.prefill_s - self.guidance_s) / (num_layers - guidance_layer)


def load_device_times(path: str, role: str, speed: float) -> DeviceTimes:
    """The part of `role` in a table's file, all of it divided by `speed`.

    Raises:
        InvalidConfig: no such file, or not such a table.
    """
    assert role in ROLES
    try:
        return _parsed(json.loads(Path(path).read_text()), role, speed)
    except OSError as error:
        raise InvalidConfig(f"--replay {path}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidConfig(
            f"--replay {path} is no table of times as in bench/replay/device_times.py: {error!r}"
        ) from None


def _parsed(table: Mapping[str, Any], role: str, speed: float) -> DeviceTimes:
    part = table[role]
    unknown = set(part) - {"pass_s", "row_share", *_SECONDS}
    if unknown:
        raise ValueError(f"{role} has unknown times: {', '.join(sorted(unknown))}")
    points = sorted((float(place), _seconds(value) / speed) for place, value in part["pass_s"].items())
    if not points:
        raise ValueError(f"{role} has no pass_s")
    times = {name: _seconds(part[name]) / speed for name in _SECONDS if part.get(name) is not None}
    if times.get("guidance_s", 0.0) > times.get("prefill_s", math.inf):
        raise ValueError("guidance_s is a part of prefill_s, not more")
    return DeviceTimes(str(table["name"]), tuple(points), row_share=_seconds(part.get("row_share", 0.0)), **times)


def _seconds(value: object) -> float:
    seconds = float(value)  # type: ignore[arg-type]
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{value!r} is no time")
    return seconds
