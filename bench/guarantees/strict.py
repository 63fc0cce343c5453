"""How many bf16 captions differ from plain decoding, with and without strict mode.

A row of a window and the same row alone are computed by different kernels, which round differently; where two tokens
are nearly as likely, that decides. A strict target runs every pass at one width.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from bench.common import first_difference, held_out_clips, run_caption, say
from slipstream.rpc.channels import open_channel
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions
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
            open_channel(stack.gateway_address) as channel,
        ):
            rows[name] = await _compare(channel, clips, num_frames)
            say(f"strict mode: {name}: {rows[name]}")
    return {"dtype": dtype, "device": device, "clips": num_clips, "frames": num_frames, **rows}


async def _compare(channel: grpc.aio.Channel, clips: list[Path], num_frames: int) -> dict[str, Any]:
    first_differences, num_captions, plain_s, parallel_s = [], 0, 0.0, 0.0
    for clip in clips:
        for sampling in SAMPLINGS:
            plain, parallel = [
                await run_caption(
                    channel,
                    clip,
                    CaptionOptions(method=method, num_frames=num_frames, max_window=MAX_WINDOW, gate=False, **sampling),
                )
                for method in ("autoregressive", "parallel")
            ]
            num_captions += 1
            plain_s += plain.summary.timings.generate_s
            parallel_s += parallel.summary.timings.generate_s
            position = first_difference(plain.token_ids, parallel.token_ids)
            first_differences += [] if position is None else [position]
    return {
        "differ": f"{len(first_differences)}/{num_captions}",
        "first_differences": first_differences,
        "plain_s": round(plain_s, 2),
        "speedup": round(plain_s / parallel_s, 2),
    }
