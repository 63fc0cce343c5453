"""The page's files: served whole, under a policy that forbids all from elsewhere, and written so that it can hold. What
a browser makes of them `make front-check` shows."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slipstream.services.front.web_files import POLICY, web_files
from tests.cli.fake_gateway import FakeGateway
from tests.support.front import error_of, front_at, raw, status_of

FILES = {name: file.data.decode() for name, file in web_files().items()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
READS_HTML = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\b|new Function|setTimeout\(\""
)


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


async def test_every_file_is_served_as_what_it_is(gateway: FakeGateway) -> None:
    kinds = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    async with front_at(gateway.address) as address:
        for name, text in FILES.items():
            path = "/" if name == "index.html" else f"/web/{name}"
            head, _, body = (await raw(address, get(path))).partition(b"\r\n\r\n")
            told = head.decode().lower()
            assert status_of(head) == 200 and body.decode() == text
            assert f"content-type: {kinds[name.rpartition('.')[2]]}" in told
            assert f"content-security-policy: {POLICY}".lower() in told and "x-content-type-options: nosniff" in told
        head, _, body = (await raw(address, get("/", "HEAD"))).partition(b"\r\n\r\n")
        assert status_of(head) == 200 and not body


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "%2e%2e", "index.html/", ".", "app.js%00"])
async def test_nothing_else_is(gateway: FakeGateway, name: str) -> None:
    async with front_at(gateway.address) as address:
        answer = await raw(address, get(f"/web/{name}"))
        assert status_of(answer) == 404 and error_of(answer)["code"] == "unknown_url"


async def test_it_is_open_where_tokens_are_asked_for_and_what_it_asks_is_not(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    path.touch()
    async with front_at(gateway.address, tokens=str(path)) as address:
        assert status_of(await raw(address, get("/"))) == 200
        assert status_of(await raw(address, get("/web/app.js"))) == 200
        assert status_of(await raw(address, get("/v1/models"))) == 401


def test_the_policy_allows_nothing_inline_and_nothing_foreign() -> None:
    rules = dict(rule.strip().partition(" ")[::2] for rule in POLICY.split(";"))
    assert rules["default-src"] == "'self'" and not re.search(r"unsafe|\*|https?:|data:", POLICY)
    assert set(rules["media-src"].split()) == set(rules["img-src"].split()) == {"'self'", "blob:"}
    page = FILES["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|<base|<iframe|<form", page)
    addresses = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert addresses and all(address.startswith(("/web/", "#")) for address in addresses)
    assert {address.removeprefix("/web/") for address in addresses if address.startswith("/web/")} <= set(FILES)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_reads_no_html_and_loads_its_neighbours_alone(name: str) -> None:
    text = SCRIPTS[name]
    assert not re.search(READS_HTML, text), "texts of models and of users may stand in it"
    imported = re.findall(r'(?:from|import)\s*\(?"([^"]*)"', text)
    assert all(path.removeprefix("./") in SCRIPTS for path in imported)
    assert not re.search(r"https?://", text)


def test_all_scripts_are_used() -> None:
    seen, todo = set[str](), ["app.js"]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [path.removeprefix("./") for path in re.findall(r'from "([^"]*)"', SCRIPTS[name])]
    assert seen == set(SCRIPTS)


def test_colours_of_the_legend_are_those_of_the_drawing() -> None:
    legend = set(re.findall(r'^  \["(\w+)", "', FILES["timeline.js"], re.MULTILINE))
    classes = set(re.findall(r"\.k-(\w+)", FILES["style.css"]))
    assert legend == classes and legend
    light, dark = (set(re.findall(r"--([\w-]+):", part)) for part in FILES["style.css"].split("@media", 2)[:2])
    assert light == dark and legend - {"idle"} <= light


NODE = shutil.which("node")


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """The page's scripts where node takes them for modules, as a browser does."""
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    return tmp_path


def seen(journey: str, scripts: Path) -> Any:
    """What a journey through the page's views has shown."""
    if NODE is None:
        pytest.skip("there is no node: apt-get install nodejs")
    program = Path(__file__).with_name("page_views.mjs")
    ran = subprocess.run([NODE, program, journey, scripts], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_another_file_ends_the_caption_of_the_one_before_and_can_be_stopped(scripts: Path) -> None:
    assert seen("another_file", scripts) == {"isFirstEnded": True, "mayStop": True, "ended": [True, True]}


def test_a_further_question_knows_what_was_answered(scripts: Path) -> None:
    shown = seen("further_question", scripts)
    assert not shown["mayAskOnAtFirst"], "nothing was asked yet"
    further = [["user", ["video"]], ["assistant", "A cat."], ["user", "And then?"]]
    assert shown["texts"] == [[["user", ["video"]]], further, [["user", ["What?", "video"]]]]


def test_about_a_picture_that_is_read_as_a_page_there_is_no_further_question(scripts: Path) -> None:
    assert seen("a_picture", scripts) == {"mayAskOn": [True, False]}


def test_why_a_batch_cannot_be_cancelled_stays_when_it_is_asked_for_anew(scripts: Path) -> None:
    assert seen("refused_cancel", scripts) == {"numLooks": 2, "isTold": True}


def test_what_no_file_would_tell_of_is_not_offered_to_run_again(scripts: Path) -> None:
    assert seen("retries", scripts) == {"mayRetry": [True, False]}


def test_what_waits_leaves_nothing_behind_on_a_page_that_stays_open(scripts: Path) -> None:
    assert seen("pauses", scripts) == {"left": 0, "last": "AbortError"}
