"""The image built by compose.yaml, brought up, broken under a batch, and torn down: run by `make compose-check`.

Looked at are hardened containers, a batch that survives the death of the target and of Redis, nothing done twice, and
two targets with two drafts. Needs a Docker daemon that answers, with its compose plugin, on this machine: processes of
containers are killed by their ids here. `SLIPSTREAM_COMPOSE_VIDEOS` is the number of clips; without it nothing is done,
as an image takes its time.
"""

import asyncio
import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.common import ROOT, SHORT_SCENES, held_out_clips, say
from bench.faults.batches import archive_of, list_jobs, submit
from slipstream import AsyncCaptioner, connect_async
from slipstream.archive.messages import BatchItem, JobCounts
from slipstream.errors import SlipstreamError
from slipstream.stack.addresses import gateway_address
from tests.support.fuzzing import report_findings

PROJECT, SERVICES, MOUNT = "slipstream-check", ("redis", "target", "draft", "gateway"), "/videos"
INSIDE = ("models", "queue")
"""Networks from which nothing outside is reached."""
START_S, RETURN_S, BUILD_S, BATCH_S = 300.0, 180.0, 1800.0, 600.0
DOWN_S = 3.0
"""How long Redis stays away."""
FEW_VIDEOS = 6
VIDEOS_VARIABLE = "SLIPSTREAM_COMPOSE_VIDEOS"
NUM_FRAMES, MAX_NEW_TOKENS, FEWER_TOKENS = 32, 200, 64
SHOWN_LINES = 25
"""Of the output of a command that failed."""

pytestmark = [
    pytest.mark.skipif(VIDEOS_VARIABLE not in os.environ, reason="builds an image: make compose-check"),
    pytest.mark.timeout(3 * BUILD_S),
]


class CheckFailed(Exception):
    """A step did not do what it should; the message says what to look at."""


def require(holds: object, complaint: str) -> None:
    """Raises `CheckFailed` unless it holds."""
    if not holds:
        raise CheckFailed(complaint)


# -- the containers ---------------------------------------------------------------------------------------------------


class Compose:
    """The containers of one compose project. Nothing runs before `up`."""

    def __init__(self, videos: Path) -> None:
        self.address = gateway_address(None)
        own = {"VIDEOS": str(videos), "PORT": self.address.partition(":")[2], "IMAGE": PROJECT, "THREADS": "1"}
        password = videos.parent / "redis_password"
        password.write_text(secrets.token_hex(16))
        password.chmod(0o644)
        own["REDIS_PASSWORD_FILE"] = str(password)
        named = {f"SLIPSTREAM_{name}": value for name, value in own.items()}
        self._environ = {**os.environ, **named, "COMPOSE_PROJECT_NAME": PROJECT}

    async def docker(self, *words: str, timeout_s: float = 60, merge: bool = False) -> str:
        """What `docker` with these words printed; with `merge`, its errors too. Raises `CheckFailed`."""
        errors_to = asyncio.subprocess.STDOUT if merge else asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *("docker", *words), env=self._environ, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=errors_to
        )
        try:
            async with asyncio.timeout(timeout_s):
                output, errors = await process.communicate()
        except TimeoutError:
            raise CheckFailed(f"docker {' '.join(words)} took longer than {timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            tail = (output + (errors or b"")).decode(errors="replace").splitlines()[-SHOWN_LINES:]
            raise CheckFailed("\n".join([f"docker {' '.join(words)[:300]} ended with {process.returncode}", *tail]))
        return output.decode(errors="replace")

    async def compose(self, *words: str, timeout_s: float = 60) -> str:
        """`docker compose` with these words."""
        return await self.docker("compose", *words, timeout_s=timeout_s)

    async def up(self, *words: str) -> None:
        """Starts services, or all, and waits until they are healthy."""
        wait = ("-d", "--no-build", "--wait", "--wait-timeout", f"{START_S:.0f}")
        try:
            await self.compose("up", *wait, *words, timeout_s=START_S + 60)
        except CheckFailed as error:
            raise CheckFailed(f"{error}\n{await self.compose('logs', '--no-color', '--tail', '15')}") from None

    async def run_in(self, service: str, line: str) -> str:
        """What a shell's line in the service's container prints."""
        return await self.compose("exec", "-T", service, "sh", "-c", line)

    async def inspect(self, service: str) -> dict[str, Any]:
        """All that Docker knows of the service's container."""
        container = (await self.compose("ps", "--all", "--quiet", service)).strip()
        require(container, f"{service} has no container; look at: docker compose ps --all")
        return dict(json.loads(await self.docker("inspect", container))[0])

    async def is_healthy(self, service: str) -> bool:
        """Whether it runs and its health check has passed."""
        state = (await self.inspect(service))["State"]
        return bool(state["Running"] and state.get("Health", {}).get("Status") == "healthy")

    async def sessions(self, service: str) -> dict[str, int]:
        """How many sessions each of the service's containers has logged."""
        names = (await self.compose("ps", "--quiet", service)).split()
        logs = {name: await self.docker("logs", name, merge=True) for name in names}
        return {name: log.count('"event": "session.opened"') for name, log in logs.items()}

    async def kill(self, service: str) -> float:
        """SIGKILL to the service's process on this machine; seconds until its restart policy has it healthy again."""
        before, began = await self.inspect(service), time.monotonic()
        os.kill(before["State"]["Pid"], signal.SIGKILL)
        restarts = before["RestartCount"]
        while (await self.inspect(service))["RestartCount"] == restarts or not await self.is_healthy(service):
            require(time.monotonic() - began < RETURN_S, f"{service} stays away; look at docker compose logs {service}")
            await asyncio.sleep(0.5)
        return time.monotonic() - began


class Batch:
    """One batch at the archive of the containers' gateway."""

    def __init__(self, captioner: AsyncCaptioner, key: str, names: Sequence[str], max_new_tokens: int) -> None:
        caption = {"num_frames": NUM_FRAMES, "max_new_tokens": max_new_tokens}
        self.items = [BatchItem(name, f"{MOUNT}/{name}", caption) for name in names]
        self.captioner = captioner
        self.key = key

    async def counts(self) -> JobCounts:
        """How many jobs are in which state. Raises `SlipstreamError` while the archive cannot say."""
        return (await (await archive_of(self.captioner)).get(self.key)).counts

    async def wait_done(self, num_done: int, timeout_s: float = BATCH_S) -> JobCounts:
        """Waits until so many jobs are done; an archive that cannot be asked for a while is asked again."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            try:
                counts = await self.counts()
            except SlipstreamError:
                counts = JobCounts()
            lost = counts.num_ended - counts.done
            require(not lost, f"{lost} jobs of the batch were lost; look at docker compose logs gateway")
            if counts.total and counts.done >= num_done:
                return counts
            await asyncio.sleep(0.5)
        raise CheckFailed(f"{num_done} captions took longer than {timeout_s:g} s; look at docker compose logs target")


# -- the checks -------------------------------------------------------------------------------------------------------


async def check_hardening(stack: Compose, service: str) -> str:
    """Of one container, as Docker and the container itself see it; its user."""
    found = await stack.inspect(service)
    host, user = found["HostConfig"], str(found["Config"]["User"])
    require(host["ReadonlyRootfs"], f"{service}'s root is writable")
    require(host["CapDrop"] == ["ALL"] and not host["CapAdd"], f"{service} has capabilities")
    require("no-new-privileges:true" in host["SecurityOpt"], f"{service} may gain privileges")
    require(host["Memory"] > 0 and host["PidsLimit"] > 0, f"{service} has no limit of memory or of processes")
    require(user.partition(":")[0].isdecimal() and user[0] != "0", f"{service} runs as {user!r}")
    ports = [binding for bindings in (host["PortBindings"] or {}).values() for binding in bindings]
    require(all(port["HostIp"] == "127.0.0.1" for port in ports), f"{service} is published beyond loopback")
    require(bool(ports) == (service == "gateway"), f"{service} has {len(ports)} published ports")
    inside = (await stack.run_in(service, "id -u; grep ^CapEff /proc/1/status")).split()
    require(inside[0] == user.partition(":")[0], f"{service} runs as user {inside[0]}")
    require(int(inside[2], 16) == 0, f"{service} has the capabilities {inside[2]}")
    wrote = await stack.run_in(service, "(cd / && touch probe || touch /app/probe) 2>/dev/null && echo yes || echo no")
    require(wrote.strip() == "no", f"{service} can write to its root")
    return user


async def restart_redis(stack: Compose, batch: Batch) -> dict[str, Any]:
    """Kills Redis; what was done before is done afterwards."""
    before = (await batch.counts()).done
    await stack.compose("kill", "redis")
    await asyncio.sleep(DOWN_S)
    require(not await stack.is_healthy("redis"), "Redis was killed and is healthy")
    await stack.up("redis")
    after = (await batch.wait_done(0, 60)).done
    require(after >= before, f"{before} jobs were done before Redis died and {after} after it")
    return {"done_before": before, "done_after": after}


async def check_results(batch: Batch) -> dict[str, Any]:
    """Every video has one caption, and handed in again it is found again."""
    jobs, num_videos = await list_jobs(batch.captioner, batch.key), len(batch.items)
    captions = [job.caption for job in jobs if job.caption and job.caption.text]
    named = {job.custom_id for job in jobs}
    require(len(named) == len(jobs) == num_videos, f"{len(jobs)} jobs for {len(named)} of {num_videos} videos")
    require(len(captions) == num_videos, f"{num_videos - len(captions)} videos have no text")
    await submit(batch.captioner, batch.key, batch.items)
    counts = await batch.counts()
    require(counts.total == counts.done == num_videos, f"submitted again, there are {counts.total} jobs")
    return {
        "done": counts.done,
        "run_again": sum(job.receipt.runs > 1 for job in jobs if job.receipt),
        "with_draft": sum(caption.timings.draft_ready_s > 0 for caption in captions),
        "tokens": sum(caption.num_tokens for caption in captions),
    }


async def check_command_line(stack: Compose, num_videos: int) -> dict[str, Any]:
    """The same videos handed in by the command line in the gateway's container; their results are at hand."""
    asked = f"--frames {NUM_FRAMES} --max-new-tokens {MAX_NEW_TOKENS} --gateway 127.0.0.1:50050 --output -"
    line = f"slipstream archive submit {MOUNT} {asked} 2>/dev/null"
    output = await stack.compose("exec", "-T", "gateway", "sh", "-c", line, timeout_s=BATCH_S)
    rows = [json.loads(row) for row in output.splitlines()]
    with_text = sum(bool(row["text"]) for row in rows)
    require(len(rows) == with_text == num_videos, f"{len(rows)} lines, {with_text} with text, of {num_videos} videos")
    return {"lines": len(rows), "reused": sum(bool(row["receipt"].get("reused")) for row in rows)}


async def check_scaled(stack: Compose, batch: Batch) -> dict[str, Any]:
    """Two targets and two drafts: all take part, and each draft finds its target. Returns each container's sessions."""
    scale = ("--no-recreate", "--scale", "target=2", "--scale", "draft=2")
    await stack.up(*scale)
    await stack.compose("restart", "gateway")  # it looks the names up at its start
    await stack.up(*scale)
    before = {service: await stack.sessions(service) for service in ("target", "draft")}
    await submit(batch.captioner, batch.key, batch.items)
    await batch.wait_done(len(batch.items))
    require("no guidance" not in await stack.compose("logs", "gateway"), "a draft asked the wrong target for guidance")
    found = {}
    for service, counts in before.items():
        found[service] = [after - counts[name] for name, after in (await stack.sessions(service)).items()]
        require(len(found[service]) == 2 and min(found[service]) > 0, f"of two {service}s: sessions {found[service]}")
    return found


# -- the run ----------------------------------------------------------------------------------------------------------


class Steps:
    """What was done, in order, and how long each step took."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """Times a step. What is put into the row that it yields is reported with it."""
        say(f"{name} ...")
        row: dict[str, Any] = {"step": name, "ok": False}
        self.rows.append(row)
        started = time.monotonic()
        try:
            yield row
            row["ok"] = True
        finally:
            row["seconds"] = round(time.monotonic() - started, 1)
            say(f"{name}: {'done' if row['ok'] else 'FAILED'} after {row['seconds']} s")

    async def run(self, name: str, work: Awaitable[object]) -> None:
        """A step that is one thing."""
        with self.step(name):
            await work


async def check(steps: Steps, videos: Path, names: Sequence[str]) -> None:
    """Everything, from the build to torn down. Raises `CheckFailed`."""
    stack = Compose(videos)
    await steps.run("look for Docker", stack.docker("info"))
    await steps.run("build the image", stack.compose("build", timeout_s=BUILD_S))
    try:
        await steps.run("up, still without a draft", stack.up("redis", "target", "gateway"))
        await steps.run("up, all", stack.up())
        with steps.step("look at the containers") as row:
            row["users"] = {service: await check_hardening(stack, service) for service in SERVICES}
            for network in INSIDE:
                told = await stack.docker("network", "inspect", "--format", "{{.Internal}}", f"{PROJECT}_{network}")
                require(told.strip() == "true", f"the network {network} is not internal")
        async with connect_async(stack.address) as captioner:
            await check_batch(steps, stack, Batch(captioner, "compose-check", names, MAX_NEW_TOKENS))
            with steps.step("the command line, in a container") as row:
                row |= await check_command_line(stack, len(names))
            few = Batch(captioner, "scaled", names[:FEW_VIDEOS], FEWER_TOKENS)
            with steps.step("two targets and two drafts") as row:
                row["sessions"] = await check_scaled(stack, few)
    finally:
        down = ("down", "--volumes", "--remove-orphans", "--timeout", "15")
        await steps.run("down", stack.compose(*down, timeout_s=120))


async def check_batch(steps: Steps, stack: Compose, batch: Batch) -> None:
    """Captions a batch while a service and Redis are killed."""
    with steps.step("submit the batch"):
        await submit(batch.captioner, batch.key, batch.items)
        require((await batch.counts()).total == len(batch.items), "not all items were taken")
    with steps.step("first captions"):
        await batch.wait_done(2)
    with steps.step("kill -9 of the target") as row:
        row["back_after_s"] = round(await stack.kill("target"), 1)
    with steps.step("captions after that"):
        await batch.wait_done((await batch.wait_done(0, 60)).done + 1)
    with steps.step("kill Redis, and start it again") as row:
        row |= await restart_redis(stack, batch)
    with steps.step("the rest of the batch"):
        await batch.wait_done(len(batch.items))
    with steps.step("read the results, submit again") as row:
        row |= await check_results(batch)


def render_videos(folder: Path, count: int) -> list[str]:
    """Clips of the synthetic world in `folder`, readable by anyone; returns their names."""
    folder.mkdir()
    for clip in held_out_clips(count, SHORT_SCENES):
        (folder / clip.name).write_bytes(clip.read_bytes())
    for path in (folder.parent, folder, *folder.iterdir()):
        path.chmod(0o755)
    return sorted(path.name for path in folder.iterdir())


async def test_the_stack_under_compose_holds() -> None:
    steps = Steps()
    with tempfile.TemporaryDirectory(prefix="slipstream-compose-") as folder:
        videos = Path(folder) / "videos"
        names = render_videos(videos, int(os.environ[VIDEOS_VARIABLE]))
        try:
            await check(steps, videos, names)
        finally:
            report_findings("compose", {"steps": steps.rows})
