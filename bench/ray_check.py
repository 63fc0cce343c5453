"""The part `ray` of scale-check: two raylets on this machine, whose actors ask one gateway.

While the rows are captioned an actor is killed, then a raylet with its actor, then the driver; another driver is
started on the same parts. Every row must be in the parts once, with the text of plain decoding, and the second driver
may caption only what was in none. A model folder that is missing on a worker must end the job by its name. A driver of
another Python, where `--other-python` names one that has Ray, must be refused before it does anything, by both names.
"""

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
from asyncio.subprocess import PIPE, STDOUT
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil  # type: ignore[import-untyped]

import slipstream.ray
from bench.common import ROOT, say
from slipstream import AsyncCaptioner, Caption, Captioner, CaptionOptions, connect_async
from slipstream.archive.queue import JobRecord
from slipstream.archive.records import job_of
from slipstream.archive.result_files import LINES, TABLE, read_block
from slipstream.service_info import GatewayInfo
from slipstream.stack.local import Stack, StackOptions
from tests.support.clips import make_colour_clip

CLIPS, ROWS_PER_PART, AT_ONCE, ACTORS = 60, 4, 2, 2
BROKEN, MISSING = "broken.mp4", "missing.mp4"
OPTIONS = CaptionOptions(num_frames=4, max_new_tokens=16)
ACTOR_PARTS, RAYLET_PARTS, DRIVER_PARTS = 2, 5, 8
"""Parts that are there when each is struck, of 16."""
STORE_BYTES = 200 * 1024**2
PATIENCE_S = 1200.0
NOWHERE = "/nowhere/target"
ACTOR = "MapBatches(CaptionRows)"

# -- driver -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a driver is told, as JSON."""

    address: str
    """Of the cluster."""
    folder: str
    gateway: str
    """Empty: each actor is to have a stack of models that are not there."""

    @property
    def parts(self) -> Path:
        return Path(self.folder) / "parts"

    @property
    def said(self) -> Path:
        """What the latest driver prints."""
        return Path(self.folder) / "driver.log"

    @property
    def rows(self) -> Path:
        return Path(self.folder) / "rows.jsonl"

    @property
    def log(self) -> Path:
        """A line for each caption that an actor begins."""
        return Path(self.folder) / "captions.log"


class _Counted:
    """A captioner that tells what it is asked for."""

    def __init__(self, gateway: str, log: Path) -> None:
        self._captioner = slipstream.connect(gateway)
        self._log = log

    def info(self) -> GatewayInfo:
        return self._captioner.info()

    def caption(self, video: str, *, options: CaptionOptions) -> Caption:
        with self._log.open("a") as log:
            log.write(f"{Path(video).name}\n")
        return self._captioner.caption(video, options=options)


def drive(work: Work) -> None:
    """A driver: writes a line of JSON for each row at the end."""
    import ray.data

    ray.init(address=work.address, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    make: Any = partial(_Counted, work.gateway, work.log) if work.gateway else partial(Captioner, target=NOWHERE)
    rows = ray.data.from_items([{"source": str(path)} for path in _sources(Path(work.folder))])
    captions = slipstream.ray.caption(
        rows,
        parts=work.parts.as_uri(),
        captioner=make,
        options=OPTIONS,
        actors=ACTORS,
        at_once=AT_ONCE,
        rows_per_part=ROWS_PER_PART,
        num_cpus=0,
        resources={"captions": 1},
    )
    work.rows.write_text("".join(f"{json.dumps(row)}\n" for row in captions.iter_rows()))


def _sources(folder: Path) -> list[Path]:
    return [folder / f"{number}.mp4" for number in range(CLIPS)] + [folder / BROKEN, folder / MISSING]


# -- check ------------------------------------------------------------------------------------------------------------


async def run_ray(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `ray`. Needs the extra `ray`."""
    if importlib.util.find_spec("ray") is None:
        return {"missing": "ray"}
    with tempfile.TemporaryDirectory(prefix="slipstream-ray-") as name:
        folder = Path(name)
        (folder / "parts").mkdir()
        (folder / BROKEN).write_bytes(b"no video")
        for number in range(CLIPS):
            (folder / f"{number}.mp4").write_bytes(make_colour_clip(number))
        async with Stack(StackOptions(threads=1)) as stack:
            say("the texts of plain decoding")
            plain = await _plain_texts(stack.gateway_address, folder)
            with _Cluster() as cluster:
                refused = await other_python(given.other_python, cluster.address)
                report = await _strike(cluster, Work(cluster.address, name, stack.gateway_address), plain)
    return {**report, **refused, "passed": report["passed"] and refused["other_python"] not in ("taken", "failed")}


OTHER = """
import platform, sys, ray
print("python", platform.python_version(), "ray", ray.__version__, flush=True)
ray.init(address=sys.argv[1], log_to_driver=False)
"""


async def other_python(interpreter: str, address: str) -> dict[str, str]:
    """What a cluster says to a driver of another Python: `refused` and by which words, `taken`, `failed`
    otherwise, or why it was not tried. One of another Ray shows nothing of Python, and is not tried either."""
    here = f"Python {platform.python_version()} and Ray {importlib.metadata.version('ray')}"
    if not interpreter:
        return {"other_python": f"skipped: --other-python names none; it needs Ray, and is to be no {here}"}
    words = (interpreter, "-c", OTHER, address)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    driver = await asyncio.create_subprocess_exec(*words, stdout=PIPE, stderr=STDOUT, env=environ)
    try:
        said = (await asyncio.wait_for(driver.communicate(), PATIENCE_S))[0].decode(errors="replace")
    except TimeoutError:
        return {"other_python": "failed", "other_python_said": f"no answer within {PATIENCE_S:g} s"}
    finally:
        if driver.returncode is None:
            driver.kill()
    found = re.search(r"^python (\S+) ray (\S+)$", said, re.M)
    if found is None:
        return {"other_python": f"skipped: {interpreter} has no Ray: {said.strip()[-200:]}"}
    there = f"Python {found[1]} and Ray {found[2]}"
    if found[2] != importlib.metadata.version("ray") or found[1] == platform.python_version():
        return {"other_python": f"skipped: {interpreter} is {there}, and the cluster is {here}"}
    names = ("Version mismatch", f"Python: {found[1]}", f"Python: {platform.python_version()}")
    if driver.returncode and all(name in said for name in names):
        message = said[said.index("Version mismatch") :].strip()
        return {"other_python": "refused", "other_python_said": " ".join(message.split())[:400]}
    verdict = "failed" if driver.returncode else "taken"
    return {"other_python": verdict, "other_python_said": said.strip()[-400:]}


async def _plain_texts(gateway: str, folder: Path) -> Mapping[str, str]:
    options = CaptionOptions(method="autoregressive").over(OPTIONS)
    turns = asyncio.Semaphore(AT_ONCE)

    async def text(captioner: AsyncCaptioner, path: Path) -> str:
        async with turns:
            return (await captioner.caption(path, options=options)).text

    async with connect_async(gateway) as captioner:
        paths = _sources(folder)[:CLIPS]
        texts = await asyncio.gather(*(text(captioner, path) for path in paths))
    return dict(zip(map(str, paths), texts, strict=True))


class _Cluster:
    """A head, and two raylets with room for an actor each. Ray wants its calls in the main thread."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
        shared = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **shared})
        self._raylets = [
            self._cluster.add_node(num_cpus=1, resources={"captions": 1}, object_store_memory=STORE_BYTES)
            for _ in range(ACTORS)
        ]
        self.address = str(self._cluster.address)

    def kill_raylet(self) -> None:
        """With all that runs below it."""
        self._cluster.remove_node(self._raylets.pop(), allow_graceful=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()


async def _strike(cluster: _Cluster, work: Work, plain: Mapping[str, str]) -> Mapping[str, Any]:
    first = await _driver(work)
    await _parts_there(work, first, ACTOR_PARTS)
    say("two parts are there; an actor is killed")
    _kill_actor()
    await _parts_there(work, first, RAYLET_PARTS)
    say("a raylet is killed")
    cluster.kill_raylet()
    await _parts_there(work, first, DRIVER_PARTS)
    say("the driver is killed")
    first.kill()
    await first.wait()
    async with asyncio.timeout(PATIENCE_S):
        while _actors():  # noqa: ASYNC110 (Ray ends them)
            await asyncio.sleep(0.1)
    there = {record.custom_id for record in _records(work)}
    begun = _begun(work)
    say(f"{len(there)} rows are in parts; another driver is started")
    if errors := await _errors(await _driver(work), work):
        raise RuntimeError(f"the second driver failed: {errors[-2000:]}")
    rows = [json.loads(line) for line in work.rows.read_text().splitlines()]
    refusal = await _errors(await _driver(replace(work, gateway="")), work)
    return _report(work, plain, rows, there, begun, refusal)


def _report(
    work: Work, plain: Mapping[str, str], rows: list[Any], there: set[str], begun: Counter[str], refusal: str
) -> dict[str, Any]:
    records = _records(work)
    jobs = [job_of(record) for record in records]
    by_state = Counter(row["caption_state"] for row in rows)
    last = _begun(work) - begun
    missing = {path.name for path in _sources(Path(work.folder)) if str(path) not in there}
    report: dict[str, Any] = {
        "rows": len(rows),
        "in_parts": len(records),
        "doubled": len(records) - len({record.job_id for record in records}),
        "parts": _num_parts(work),
        "tables": len(list(work.parts.glob(f"*{TABLE}"))),
        "states": dict(by_state),
        "identical": sum(job.caption.text == plain[job.source] for job in jobs if job.caption),
        "in_parts_at_restart": len(there),
        "begun_by_first_driver": begun.total(),
        "begun_by_second_driver": last.total(),
        "second_did_what_was_missing": set(last) == missing and last.total() == len(missing),
        "model_missing_is_told": f"no checkpoint at {NOWHERE}" in refusal,
    }
    whole = report["rows"] == CLIPS + 2 and by_state == {"done": CLIPS, "failed": 1, "dead": 1}
    once = report["in_parts"] == CLIPS + 1 and not report["doubled"] and report["parts"] == report["tables"]
    answered = {row["source"]: row["caption"] for row in rows if row["caption"]}
    same = report["identical"] == CLIPS and answered == plain
    told = report["second_did_what_was_missing"] and report["model_missing_is_told"]
    report["passed"] = bool(whole and once and same and told)
    return report


async def _driver(work: Work) -> asyncio.subprocess.Process:
    words = (sys.executable, "-m", "bench.ray_check", json.dumps([work.address, work.folder, work.gateway]))
    with work.said.open("wb") as said:
        return await asyncio.create_subprocess_exec(*words, stdout=said, stderr=said, cwd=ROOT)


async def _errors(driver: asyncio.subprocess.Process, work: Work) -> str:
    """What it printed, if it failed."""
    await asyncio.wait_for(driver.wait(), PATIENCE_S)
    return work.said.read_text() if driver.returncode else ""


def _actors() -> list[psutil.Process]:
    """Processes of actors that caption. Ray names them after what they run."""
    return [each for each in psutil.process_iter(["cmdline"]) if ACTOR in " ".join(each.info["cmdline"] or ())]


def _kill_actor() -> None:
    ours = {child.pid for child in psutil.Process().children(recursive=True)}
    next(actor for actor in _actors() if actor.pid in ours).kill()


def _num_parts(work: Work) -> int:
    return len(list(work.parts.glob(f"*{LINES}")))


def _records(work: Work) -> list[JobRecord]:
    return [job.record for path in sorted(work.parts.glob(f"*{LINES}")) for job in read_block(path.read_bytes())]


def _begun(work: Work) -> Counter[str]:
    return Counter(work.log.read_text().split())


async def _parts_there(work: Work, driver: asyncio.subprocess.Process, num_parts: int) -> None:
    """Returns when there are so many. Raises `RuntimeError` with what the driver printed when it ends before."""
    async with asyncio.timeout(PATIENCE_S):
        while _num_parts(work) < num_parts:
            if driver.returncode is not None:
                raise RuntimeError(f"the driver ended too soon: {work.said.read_text()[-2000:]}")
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    drive(Work(*json.loads(sys.argv[1])))
