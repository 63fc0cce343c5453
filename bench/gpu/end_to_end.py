"""The pocket pair as two processes on one device, through the whole stack: plain decoding against slipstream.

The only part whose texts mean something, so the only one with measured speedups.
"""

import statistics
from pathlib import Path
from typing import Any

from bench.captions import Captioned, run_caption
from bench.clips import SHORT_SCENES, held_out_clips
from bench.running import say
from slipstream.cli.views import decoding_rate
from slipstream.rpc.channels import open_channel
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions
from slipstream.stack.local import FRESH, Stack, StackOptions

METHODS = ("autoregressive", "slipstream")


async def measure_end_to_end(
    device: str, *, num_clips: int = 3, num_frames: int = 64, max_new_tokens: int = 160
) -> dict[str, Any]:
    """Tokens a second of both methods clip by clip, and whether their texts are the same."""
    clips = held_out_clips(num_clips, SHORT_SCENES)
    rows = []
    async with (
        Stack(StackOptions(device=device, extra_flags=FRESH)) as stack,
        open_channel(stack.gateway_address) as channel,
    ):
        for clip in [clips[0], *clips]:  # the first one twice: it warms up
            say(f"end to end on {device}: {clip.name}")
            captions = {
                method: await run_caption(channel, clip, _options(method, num_frames, max_new_tokens))
                for method in METHODS
            }
            rows.append(_row(clip, captions))
    measured = rows[1:]
    return {
        "device": device,
        "processes": "target and draft, two processes on one device",
        "clips": measured,
        "identical": sum(row["identical"] for row in measured) / len(measured),
        "decode_speedup": statistics.median(row["decode_speedup"] for row in measured),
    }


def _options(method: str, num_frames: int, max_new_tokens: int) -> CaptionOptions:
    return CaptionOptions(method=method, num_frames=num_frames, max_new_tokens=max_new_tokens)


def _row(clip: Path, captions: dict[str, Captioned]) -> dict[str, Any]:
    plain, ours = (captions[method] for method in METHODS)
    rates = {method: decoding_rate(captioned.summary) for method, captioned in captions.items()}
    speculation = ours.summary.speculation
    return {
        "clip": clip.name,
        "tokens": len(ours.token_ids),
        "identical": plain.token_ids == ours.token_ids,
        "tokens_per_s": rates,
        "decode_speedup": rates[METHODS[1]] / rates[METHODS[0]] if rates[METHODS[0]] else 0.0,
        "total_s": {method: captioned.summary.timings.total_s for method, captioned in captions.items()},
        "tau": speculation.tau,
        "target_pass_s": speculation.target_pass_s,
        "draft_pass_s": speculation.draft_pass_s,
    }
