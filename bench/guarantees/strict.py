"""How many bf16 captions differ from plain decoding, with and without strict mode.

A row of a window and the same row alone are computed by different kernels, which round differently; where two tokens
are nearly as likely, that decides. A strict target runs every pass at one width.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common import first_difference, held_out_clips, run_caption, say
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
from slipstream.stack.local import Stack, StackOptions

MAX_WINDOW = 16
SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 11}, {"temperature": 1.5, "seed": 12})
"""Greedy, and two that have more near-ties: a race between many tokens."""


async def measure_strict(
    num_clips: int = 16, num_frames: int = 16, dtype: str = "bfloat16", device: str = "cpu"
) -> dict[str, Any]:
    """For either mode: captions that differ from plain ones and where first, and both ways' seconds of decoding."""
    options = StackOptions(dtype=dtype, device=device, threads=1, pin=True, restart=False)
    clips = held_out_clips(num_clips)
    rows = {}
    for name, width in (("packed", 0), ("strict", MAX_WINDOW + 1)):
        flags = {"target": ("--strict-width", str(width), "--prefix-cache-mb", "0")}
        say(f"strict mode: {name}")
        async with (
            Stack(replace(options, extra_flags=flags), report=say) as stack,
            connect_async(stack.gateway_address) as captioner,
        ):
            rows[name] = await _compare(captioner, clips, num_frames)
            say(f"strict mode: {name}: {rows[name]}")
    return {"dtype": dtype, "device": device, "clips": num_clips, "frames": num_frames, **rows}


async def _compare(captioner: AsyncCaptioner, clips: list[Path], num_frames: int) -> dict[str, Any]:
    first_differences, num_captions, plain_s, drafted_s = [], 0, 0.0, 0.0
    for clip in clips:
        for sampling in SAMPLINGS:
            plain, drafted = [
                await run_caption(
                    captioner,
                    clip,
                    CaptionOptions(method=method, num_frames=num_frames, max_window=MAX_WINDOW, gate=False, **sampling),
                )
                for method in ("autoregressive", "slipstream")
            ]
            num_captions += 1
            plain_s += plain.caption.timings.generate_s
            drafted_s += drafted.caption.timings.generate_s
            position = first_difference(plain.token_ids, drafted.token_ids)
            first_differences += [] if position is None else [position]
    return {
        "differ": f"{len(first_differences)}/{num_captions}",
        "first_differences": first_differences,
        "plain_s": round(plain_s, 2),
        "speedup": round(plain_s / drafted_s, 2),
    }
