"""The HTTP front's page in a real Chromium: every journey by keyboard, axe, and the page's recovery when front, gateway
and Redis are killed under it."""

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import ROOT, held_out_clips, say
from slipstream.archive.messages import BatchItem, BatchOptions
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.async_captioner import connect_async
from slipstream.client.connection import GatewayAddress
from slipstream.rpc.security import new_token
from slipstream.stack.local import Stack
from tests.support.front import front_at

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = ROOT / ".cache" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
"""Put there by `make front-check`, from npm."""
SHOTS = ROOT / ".cache" / "bench" / "front_page"
SIZE = {"width": 1280, "height": 900}
NUM_FRAMES, MOST_TABS = 32, 60
PATIENCE_MS = 180_000
HOSTILE = '<script>window.hacked = "script"</script>'
RESULT, KEEPS = re.compile(r"tokens/s"), re.compile(r"The draft keeps \d")

# -- a browser --------------------------------------------------------------------------------------------------------


def why_not() -> str:
    """What is missing for this part; '' where nothing is."""
    if CHROMIUM is None:
        return "there is no Chromium: apt-get install chromium"
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install slipstream[front-check]"
    return ""


@contextlib.asynccontextmanager
async def chromium() -> "AsyncIterator[Browser]":
    """Without a display, and with nothing kept."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def opened(browser: "Browser", url: str, **how: Any) -> "AsyncIterator[tuple[Page, list[str]]]":
    """A page in a session of its own, and what its console complains of: of scripts, and of what its policy forbids."""
    context = await browser.new_context(viewport=SIZE, **how)
    if AXE.is_file():
        await context.add_init_script(path=AXE)
    page, complaints = await context.new_page(), list[str]()
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda told: complaints.append(told.text) if "Content Security" in told.text else None)
    page.on("dialog", lambda dialog: dialog.accept())
    try:
        await page.goto(url)
        yield page, complaints
    finally:
        await context.close()


async def tab_to(page: "Page", name: str) -> None:
    """By the Tab key alone, from where the focus is to what has this name. Raises where it is never reached."""
    for _ in range(MOST_TABS):
        await page.keyboard.press("Tab")
        text = "document.activeElement.textContent || ''"
        told = await page.evaluate(f"() => (document.activeElement.labels?.[0]?.textContent || {text}).trim()")
        if told.startswith(name):
            return
    raise AssertionError(f"the Tab key does not lead to {name!r}")


async def until(page: "Page", condition: str) -> None:
    """Asks again and again: the page's policy forbids what Playwright would wait with."""
    async with asyncio.timeout(PATIENCE_MS / 1000):
        while not await page.evaluate(f"() => {condition}"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def results(page: "Page", number: int) -> list[str]:
    """The closing lines of so many captions, when all are there."""
    from playwright.async_api import expect

    await expect(page.locator(".result")).to_contain_text([RESULT] * number, timeout=PATIENCE_MS)
    return list(await page.locator(".result").all_text_contents())


async def violations(page: "Page") -> list[str] | None:
    """What axe finds, as `rule: element`; None where it is not there."""
    if not AXE.is_file():
        return None
    found = await page.evaluate("() => axe.run()")
    return [f"{rule['id']}: {node['html'][:100]}" for rule in found["violations"] for node in rule["nodes"]]


async def shoot(page: "Page", name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=SHOTS / f"{name}.png", full_page=True)


_HAS_SQUARES = """() => { const { width, height } = document.querySelector("canvas.kept");
  const drawn = document.querySelector("canvas.kept").getContext("2d").getImageData(0, 0, width, height).data;
  return new Set(drawn.filter((value, index) => index % 4 === 3)).size > 1; }"""
# -- journeys ---------------------------------------------------------------------------------------------------------


async def try_it(browser: "Browser", stack: Stack) -> dict[str, Any]:
    """A caption, and a race with plain decoding, by keyboard: the text is the gateway's, and both writers show."""
    clip = held_out_clips(1)[0]
    async with connect_async(stack.gateway_address) as captioner:
        text = (await captioner.caption(clip.read_bytes(), method="autoregressive", num_frames=NUM_FRAMES)).text
    async with opened(browser, f"http://{stack.http_address}/") as (page, complaints):
        await page.set_input_files("#file", clip)
        await page.get_by_label("Frames").fill(str(NUM_FRAMES))
        await page.get_by_label("Race plain").focus()
        await tab_to(page, "Caption it")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".words span")
        (line,) = await results(page, 1)
        texts = [await page.locator(".words").text_content()]
        writers = [await page.locator(f".words .by-{name}").count() for name in ("draft", "target")]
        plays = await page.evaluate("() => document.querySelector('video').currentTime > 0")
        squares = await page.get_by_text(KEEPS).is_visible() and await page.evaluate(_HAS_SQUARES)
        await shoot(page, "try")
        found = await violations(page)
        await page.get_by_label("Race plain").focus()
        await page.keyboard.press("Space")
        await tab_to(page, "Caption it")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".run:nth-child(2) .words span")
        await results(page, 2)
        texts += await page.locator(".words").all_text_contents()
        await shoot(page, "race")
    is_right = set(texts) == {text} and all(writers) and bool(plays) and squares and not complaints
    is_told = "of draft tokens accepted" in line
    return {"passed": is_right and is_told, "line": line, "axe": found, "complaints": complaints}


async def archive(browser: "Browser", stack: Stack) -> dict[str, Any]:
    """Overview, batch and item by keyboard: progress, errors by message, marks, retry, export, sentences and segments
    that jump; dark."""
    videos = stack.options.video_roots[0]
    items = [BatchItem(f"clip {n}", str(videos / f"{n % 4}.mp4"), {"num_frames": 8 + n}) for n in range(4)]
    items += [BatchItem(f"none {n}", str(videos / "none.mp4")) for n in range(2)] + [
        BatchItem(HOSTILE, str(videos / "0.mp4"), {"num_frames": 4}),
        BatchItem("film", str(videos / "0.mp4"), {"num_frames": 4, "segments": "fixed:6s", "skip_marked": "frozen"}),
    ]
    async with GatewayAddress(stack.gateway_address).open() as connection:
        await ArchiveClient(connection).submit(BatchOptions("films", {"max_new_tokens": 40}), items)
    url = f"http://{stack.http_address}/#/overview"
    async with opened(browser, url, color_scheme="dark") as (page, complaints):
        await page.wait_for_selector("tbody a")
        await page.wait_for_selector("table[aria-label=Gateways] td:text-is('yes')")
        await shoot(page, "overview")
        found = await violations(page) or []
        await tab_to(page, "films")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("text=completed")
        errors = await page.locator("table[aria-label=Errors] tbody tr").count()
        marked = await page.locator("table[aria-label=Items] td:text-is('cut')").count()
        await shoot(page, "batch")
        found += await violations(page) or []
        async with page.expect_download() as exported:
            await page.get_by_role("button", name="Export").press("Enter")
        await (await exported.value).save_as(SHOTS / "export.jsonl")
        lines = await asyncio.to_thread(_lines, SHOTS / "export.jsonl")
        await page.get_by_role("button", name="Retry").press("Enter")
        await page.wait_for_selector("text=2 items wait again")
        await page.wait_for_selector("text=completed")
        await page.get_by_role("link", name="clip 0").press("Enter")
        await page.wait_for_selector(".cues button")
        await page.set_input_files("input[type=file]", videos / "0.mp4")
        await until(page, "document.querySelector('video').readyState >= 2")
        await page.locator(".cues button").nth(1).press("Enter")
        jumped = await page.evaluate("() => document.querySelector('video').currentTime > 0")
        await page.wait_for_selector(".cues button[aria-current]")
        await page.wait_for_selector(".cards dd:text-is('cut')")
        await shoot(page, "item")
        found += await violations(page) or []
        await page.get_by_role("link", name="Back to the batch").press("Enter")
        await page.get_by_role("link", name="film").press("Enter")
        segments = page.locator(".cues button", has=page.locator(".mark:text-is('cut')"))
        await segments.nth(1).wait_for()
        await page.wait_for_selector(".cues .mark:text-is('skipped: frozen')")
        await shoot(page, "film")
        found += await violations(page) or []
        hacked = await page.evaluate("() => window.hacked")
    is_right = (
        errors == 1 and marked == 5 and len(lines) == len(items) and bool(jumped) and hacked is None and not complaints
    )
    names = {json.loads(line)["custom_id"] for line in lines}
    is_whole = names == {item.custom_id for item in items}
    return {"passed": is_right and is_whole, "axe": found if AXE.is_file() else None, "complaints": complaints}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


async def owners(browser: "Browser", stack: Stack, folder: Path) -> dict[str, Any]:
    """Without a token the page says so; with one it goes on. Two tabs have a token each."""
    token, line = new_token("ann")
    path = folder / "tokens"
    path.write_text(line)
    async with (
        front_at(stack.gateway_address, tokens=str(path)) as address,
        opened(browser, f"http://{address}/#/overview") as (page, complaints),
    ):
        await page.wait_for_selector("text=needs a token")
        await page.get_by_label("Token").fill(token)
        await page.keyboard.press("Enter")
        await page.wait_for_selector("text=films")
        other = await page.context.new_page()
        await other.goto(f"http://{address}/#/overview")
        await other.wait_for_selector("text=needs a token")
        kept = await page.evaluate("() => JSON.stringify([localStorage.length, document.cookie])")
    return {"passed": kept == '[0,""]' and not complaints, "complaints": complaints}


async def restarts(browser: "Browser", stack: Stack) -> dict[str, Any]:
    """Front, gateway and Redis are killed under two open tabs, one of which shows a caption: both recover by
    themselves, and the caption is whole, whoever was killed."""
    clip, seconds, texts = held_out_clips(1)[0], dict[str, float](), set[str | None]()
    url = f"http://{stack.http_address}/"
    async with opened(browser, url) as (page, complaints), opened(browser, f"{url}#/overview") as (other, more):
        await other.wait_for_selector("text=Gateways that serve")
        assert stack.queue is not None, "the stack has an archive"
        for killed in (stack.processes["front"], stack.processes["gateway"], stack.queue):
            await page.reload()
            await page.set_input_files("#file", clip)
            await page.get_by_label("Frames").fill("128")
            await page.get_by_role("button", name="Caption it").click()
            await page.wait_for_selector(".words span")
            start = time.monotonic()
            starts = killed.starts
            os.kill(killed.pid, signal.SIGKILL)
            while killed.starts == starts or not killed.is_serving:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await results(page, 1)
            texts.add(await page.locator(".words").text_content())
            await other.wait_for_selector("#server:text-is('ready')")
            await until(other, "document.querySelector('main .bad').textContent === ''")
            seconds[killed.name] = round(time.monotonic() - start, 1)
    return {"passed": len(texts) == 1 and not complaints + more, "recovered_after_s": seconds}


# -- all of it --------------------------------------------------------------------------------------------------------


async def page_part(stack: Stack, folder: Path) -> dict[str, Any]:
    """All journeys; `passed` is None where there is no browser to take them in."""
    if why := why_not():
        return {"passed": None, "why": why}
    found: dict[str, Any] = {}
    async with chromium() as browser:
        journeys: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "try_it": lambda: try_it(browser, stack),
            "archive": lambda: archive(browser, stack),
            "owners": lambda: owners(browser, stack, folder),
            "restarts": lambda: restarts(browser, stack),
        }
        for name, journey in journeys.items():
            try:
                found[name] = await journey()
            except Exception as error:
                found[name] = {"passed": False, "why": f"{type(error).__name__}: {error}"[:600]}
            say(f"{name}: {found[name]}")
    axe = [one for journey in found.values() for one in journey.get("axe") or ()]
    is_right = all(journey["passed"] for journey in found.values()) and not axe
    told = (
        "run"
        if AXE.is_file()
        else f"left out: there is no {AXE.relative_to(ROOT)}; npm install --prefix .cache/axe axe-core"
    )
    return {"passed": is_right, "axe": told, "pictures": str(SHOTS)} | found
