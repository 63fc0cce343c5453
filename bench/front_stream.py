"""The HTTP front's page under a long stream of events, in a real Chromium: what its heap and its frames become, and
that markup in a caption stays text."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from bench.front_page import chromium, opened, why_not
from slipstream.rpc.grpc_options import SERVER_OPTIONS
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc
from slipstream.rpc.v1.gateway_pb2 import CaptionEvent, CommittedText, CommittedToken, StageChange, Trace
from tests.support.front import front_at

if TYPE_CHECKING:
    from playwright.async_api import Browser, CDPSession, Page

EVENTS_A_MINUTE = 10_000
HOSTILE = (
    '<script>window.hacked = "script"</script>',
    "<img src=x onerror=\"window.hacked = 'image'\">",
    " &lt;b&gt; ",
)
SLOW_FRAME_MS = 50.0
MOST_GROWN_MB = 3.0
"""What the heap may take more at the end of a stream than half way, after all garbage is collected."""
MOST_CPU_MS = 16.0
"""Of the page's own thread, for each frame: by itself it keeps up with a screen."""
MOST_SLOW = 0.001
"""The share of frames over `SLOW_FRAME_MS` that the page may have beyond that of an empty page beside it, whose slow
frames are the machine's. Where that one has more, the machine is too busy to tell, and only processor time counts."""
TRACED_S = 20.0
"""At the end of each half."""
END_S = 60.0


class Talker(gateway_pb2_grpc.GatewayServicer):
    """A gateway without models, whose captions are `minutes` long, at `EVENTS_A_MINUTE`, and begin with markup."""

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes

    async def Caption(self, request_iterator: Any, context: Any) -> AsyncIterator[CaptionEvent]:
        async for _ in request_iterator:
            pass
        start, number, rate = time.monotonic(), 0, EVENTS_A_MINUTE / 60
        yield CaptionEvent(stage=StageChange(stage="encode", done=1, total=1))
        while number < self.minutes * EVENTS_A_MINUTE:
            number += 3
            now = time.monotonic()
            piece = HOSTILE[number // 3 % 3] if number < 30 else "word "
            yield CaptionEvent(trace=Trace(kind="draft", at_s=now, pass_s=0.002, tokens=4, stale=number % 5 == 0))
            yield CaptionEvent(
                trace=Trace(kind="pass", at_s=now, asked_s=now - 0.01, pass_s=0.008, tokens=4, accepted=3)
            )
            tokens = [CommittedToken(token_id=number, piece=piece, from_draft=number % 2 == 0)]
            yield CaptionEvent(text=CommittedText(tokens=tokens))
            await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
        timings = gateway_pb2.Timings(first_token_s=1, generate_s=60 * self.minutes)
        yield CaptionEvent(summary=gateway_pb2.Summary(text="", num_tokens=number // 3, timings=timings))

    async def GetGateway(self, request: Any, context: Any) -> gateway_pb2.GatewayInfo:
        return gateway_pb2.GatewayInfo(version="0", target_model="big", max_frames=8, max_video_bytes=10**9)


@contextlib.asynccontextmanager
async def talking(minutes: float) -> AsyncIterator[str]:
    """The address of a `Talker`."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    gateway_pb2_grpc.add_GatewayServicer_to_server(Talker(minutes), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


# -- what a page's thread does ----------------------------------------------------------------------------------------

_WATCH = f"""() => {{
  const seen = window.seen = {{ frames: 0, slow: 0, longest_ms: 0, tasks: [] }};
  let last = 0;
  const frame = (now) => {{
    if (last) {{
      seen.frames += 1;
      seen.slow += now - last > {SLOW_FRAME_MS};
      seen.longest_ms = Math.max(seen.longest_ms, now - last);
    }}
    last = now;
    window.watching = requestAnimationFrame(frame);
  }};
  window.watching = requestAnimationFrame(frame);
  const note = (list) => seen.tasks.push(...list.getEntries().map((task) => task.duration));
  window.observer = new PerformanceObserver(note);
  window.observer.observe({{ entryTypes: ["longtask"] }});
}}"""
_SEEN = """() => { cancelAnimationFrame(window.watching); window.observer.disconnect(); return window.seen; }"""
"""Gaps between frames, and tasks of more than 50 ms, which are what the page itself may do to a frame."""


@dataclass(frozen=True)
class Seen:
    """Frames and long tasks of one page, in milliseconds."""

    frames: int
    slow: int
    """Frames over `SLOW_FRAME_MS`."""
    longest_ms: float
    tasks: list[float]

    def __add__(self, later: "Seen") -> "Seen":
        longest_ms = max(self.longest_ms, later.longest_ms)
        return Seen(self.frames + later.frames, self.slow + later.slow, longest_ms, self.tasks + later.tasks)

    @property
    def slow_share(self) -> float:
        return self.slow / max(self.frames, 1)

    def told(self) -> dict[str, Any]:
        """For the report."""
        longest = round(max(self.tasks, default=0.0), 1)
        frames = {
            "frames": self.frames,
            "over_50_ms": round(self.slow_share, 5),
            "longest_ms": round(self.longest_ms, 1),
        }
        return frames | {"long_tasks": len(self.tasks), "longest_task_ms": longest}


async def watched(pages: "Sequence[Page]", ended: Awaitable[Any]) -> list[Seen]:
    """What each of them did until `ended`."""
    for page in pages:
        await page.evaluate(_WATCH)
    await ended
    return [Seen(**await page.evaluate(_SEEN)) for page in pages]


async def traced(browser: "Browser", page: "Page", ended: Awaitable[Any]) -> None:
    """What the page's thread does from now on; `longest_task_ms` tells of it."""
    await browser.start_tracing(page=page, categories=["toplevel"])
    await ended


async def longest_task_ms(browser: "Browser") -> float:
    """The most processor time that one task of a page's main thread took: what others do on the machine is none."""
    events = json.loads(await browser.stop_tracing())["traceEvents"]
    named = (event for event in events if event["name"] == "thread_name")
    mains = {(one["pid"], one["tid"]) for one in named if one["args"]["name"] == "CrRendererMain"}
    times = [one["tdur"] for one in events if "tdur" in one and (one["pid"], one["tid"]) in mains]
    if not times:
        raise RuntimeError("the trace has no tasks of the page's thread; this Chromium traces otherwise")
    return float(max(times)) / 1000


async def heap_mb(session: "CDPSession") -> float:
    await session.send("HeapProfiler.collectGarbage")
    return float((await session.send("Runtime.getHeapUsage"))["usedSize"]) / 1e6


async def cpu_s(session: "CDPSession") -> float:
    """Processor time of the page's thread."""
    told = (await session.send("Performance.getMetrics"))["metrics"]
    return float(next(one["value"] for one in told if one["name"] == "TaskDuration"))


# -- the stream -------------------------------------------------------------------------------------------------------


async def stream_part(folder: Path, minutes: float) -> dict[str, Any]:
    """`passed`: markup stayed text, the heap is flat, and frames are as those of an empty page, whether the timeline
    shows the last seconds (the first half) or all (the second). None: no browser."""
    if why := why_not():
        return {"passed": None, "why": why}
    clip = folder / "talk.mp4"
    clip.write_bytes(b"good" * 1000)
    async with (
        chromium() as browser,
        talking(minutes) as gateway,
        front_at(gateway) as address,
        opened(browser, "about:blank") as (empty, _),
        opened(browser, f"http://{address}/") as (page, complaints),
    ):
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable", {"timeDomain": "threadTicks"})
        await page.set_input_files("#file", clip)
        await page.get_by_role("button", name="Caption it").click()
        await page.wait_for_selector(".words span")
        used_s, pages = await cpu_s(session), (page, empty)
        early = await watched(pages, _half(browser, page, 30 * minutes, asyncio.sleep(TRACED_S)))
        longest_ms = [await longest_task_ms(browser)]
        half = await heap_mb(session)  # collects garbage, which is no part of what is watched
        await page.get_by_label("Shown").select_option("all")
        result = page.locator(".result", has_text="tokens/s").wait_for(timeout=1000 * (TRACED_S + END_S))
        late = await watched(pages, _half(browser, page, 30 * minutes, result))
        longest_ms.append(await longest_task_ms(browser))
        used_s = await cpu_s(session) - used_s
        grown = await heap_mb(session) - half
        is_text = await _is_text(page)
    seen, at_rest = (one + other for one, other in zip(early, late, strict=True))
    cpu_ms, is_idle = 1000 * used_s / max(seen.frames, 1), at_rest.slow_share <= MOST_SLOW
    is_light = max(longest_ms) <= SLOW_FRAME_MS and cpu_ms <= MOST_CPU_MS
    is_smooth = is_light and (not is_idle or seen.slow_share <= at_rest.slow_share + MOST_SLOW)
    facts: dict[str, Any] = {"events": int(minutes * EVENTS_A_MINUTE), "heap_mb": round(half, 1)}
    facts |= {"heap_grown_mb": round(grown, 2), "cpu_ms_a_frame": round(cpu_ms, 2)}
    facts |= {"longest_task_cpu_ms": [round(one, 1) for one in longest_ms], "machine_is_idle": is_idle}
    facts |= {"page": seen.told(), "empty_page": at_rest.told()}
    is_right = is_text and is_smooth and grown <= MOST_GROWN_MB and not complaints
    return {"passed": is_right, "markup_is_text": is_text, "smooth": is_smooth} | facts


async def _half(browser: "Browser", page: "Page", seconds: float, end: Awaitable[Any]) -> None:
    """So many seconds of the stream, the last of them traced, to the `end`."""
    await asyncio.sleep(max(seconds - TRACED_S, 0))
    await traced(browser, page, end)


async def _is_text(page: "Page") -> bool:
    """What a caption that begins with `HOSTILE` has become."""
    hacked = await page.evaluate("() => window.hacked")
    text = await page.locator(".words").text_content() or ""
    scripts = await page.locator(".words script, .words img").count()
    return hacked is None and not scripts and all(piece in text for piece in HOSTILE)
