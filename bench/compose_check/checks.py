"""What the stack must show: hardened containers, a batch that survives, nothing done twice. Raises `CheckFailed`."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from bench.common import SHORT_SCENES, held_out_clips
from bench.compose_check.stack import PROJECT, SERVICES, CheckFailed, Stack, Steps, run, wait_until
from slipstream.rpc.v1 import archive_pb2 as pb
from slipstream.rpc.v1 import archive_pb2_grpc

MOUNT = "/videos"
CALL_TIMEOUT_S = 20
PAGE = 100
NUM_FRAMES, MAX_NEW_TOKENS = 32, 200


def render_videos(folder: Path, count: int) -> list[str]:
    """Clips of the synthetic world in `folder`, readable by anyone; returns their names."""
    folder.mkdir()
    folder.chmod(0o755)
    names = []
    for clip in held_out_clips(count, SHORT_SCENES):
        copy = folder / clip.name
        copy.write_bytes(clip.read_bytes())
        copy.chmod(0o644)
        names.append(clip.name)
    return names


class Batch:
    """One batch at the archive of the gateway at `address`."""

    def __init__(self, address: str, key: str, names: Sequence[str], max_new_tokens: int = MAX_NEW_TOKENS) -> None:
        self._key = key
        self._max_new_tokens = max_new_tokens
        self._names = names
        self._channel = grpc.insecure_channel(address)
        self._stub = archive_pb2_grpc.ArchiveStub(self._channel)

    def submit(self) -> pb.SubmitBatchResponse:
        """Hands it in, or finds it again."""
        answer: pb.SubmitBatchResponse = self._stub.SubmitBatch(
            self._messages(), timeout=CALL_TIMEOUT_S, wait_for_ready=True
        )
        return answer

    def counts(self) -> pb.JobCounts:
        """How many jobs are in which state. Raises `grpc.RpcError` while the archive cannot say."""
        answer: pb.Batch = self._stub.GetBatch(pb.GetBatchRequest(batch=self._key), timeout=CALL_TIMEOUT_S)
        return answer.counts

    def wait_done(self, num_done: int, timeout_s: float) -> pb.JobCounts:
        """Waits until so many jobs are done; an archive that cannot be asked for a while is asked again."""
        last = pb.JobCounts()

        def enough() -> bool:
            nonlocal last
            try:
                last = self.counts()
            except grpc.RpcError:
                return False
            lost = last.failed + last.dead + last.cancelled
            if lost:
                raise CheckFailed(f"{lost} jobs of the batch were lost; look at docker compose logs gateway")
            return last.done >= num_done

        wait_until(f"{num_done} captions are done", enough, timeout_s, "docker compose logs gateway target")
        return last

    def jobs(self) -> list[pb.Job]:
        """All jobs with their results."""
        jobs, token = [], ""
        while True:
            request = pb.ListJobsRequest(batch=self._key, page_token=token, page_size=PAGE)
            page = self._stub.ListJobs(request, timeout=CALL_TIMEOUT_S)
            jobs += page.jobs
            token = page.next_page_token
            if not token:
                return jobs

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def _messages(self) -> Iterator[pb.SubmitBatchRequest]:
        caption = {"num_frames": NUM_FRAMES, "max_new_tokens": self._max_new_tokens}
        yield pb.SubmitBatchRequest(batch=pb.BatchOptions(key=self._key, caption=caption))
        for name in self._names:
            yield pb.SubmitBatchRequest(item=pb.BatchItem(custom_id=name, source=f"{MOUNT}/{name}"))


DOWN_S = 3.0
"""How long Redis stays away."""
BATCH_TIMEOUT_S = 600.0


def check_hardening(stack: Stack) -> dict[str, Any]:
    """Of every container, as Docker and the container itself see it."""
    users = {}
    for service in SERVICES:
        found = stack.inspect(service)
        host, user = found["HostConfig"], found["Config"]["User"]
        _require(host["ReadonlyRootfs"], f"{service}'s root is writable")
        _require(host["CapDrop"] == ["ALL"] and not host["CapAdd"], f"{service} has capabilities")
        _require("no-new-privileges:true" in host["SecurityOpt"], f"{service} may gain privileges")
        _require(host["Memory"] > 0 and host["PidsLimit"] > 0, f"{service} has no limit of memory or of processes")
        _require(user.partition(":")[0].isdecimal() and user[0] != "0", f"{service} runs as {user!r}")
        ports = [binding for bindings in (host["PortBindings"] or {}).values() for binding in bindings]
        _require(all(port["HostIp"] == "127.0.0.1" for port in ports), f"{service} is published beyond loopback")
        _require(bool(ports) == (service == "gateway"), f"{service} has {len(ports)} published ports")
        inside = stack.compose("exec", "-T", service, "sh", "-c", "id -u; grep ^CapEff /proc/1/status").split()
        _require(inside[0] == user.partition(":")[0], f"{service} runs as user {inside[0]}")
        _require(int(inside[2], 16) == 0, f"{service} has the capabilities {inside[2]}")
        _require(not stack.can(service, "cd / && touch probe || touch /app/probe"), f"{service} can write to its root")
        users[service] = user
    words = ["docker", "network", "inspect", "--format", "{{.Internal}}", f"{PROJECT}_back"]
    _require(run(words, timeout_s=30, environ=stack.environ).strip() == "true", "the models' network is not internal")
    return users


def check_batch(steps: Steps, stack: Stack, batch: Batch, num_videos: int) -> dict[str, Any]:
    """Captions a batch while a service and Redis are killed; returns its counts."""
    with steps.step("submit the batch") as row:
        answer = batch.submit()
        row["added"] = answer.num_added
        _require(answer.num_added == num_videos, f"{answer.num_added} of {num_videos} items were taken")
    with steps.step("first captions"):
        batch.wait_done(2, BATCH_TIMEOUT_S)
    with steps.step("kill -9 of the target") as row:
        row["back_after_s"] = round(stack.kill("target"), 1)
    with steps.step("captions after that"):
        batch.wait_done(batch.wait_done(0, 60).done + 1, BATCH_TIMEOUT_S)
    with steps.step("kill Redis, and start it again") as row:
        row |= _restart_redis(stack, batch)
    with steps.step("the rest of the batch"):
        batch.wait_done(num_videos, BATCH_TIMEOUT_S)
    with steps.step("read the results, submit again"):
        return _check_results(batch, num_videos)


def _restart_redis(stack: Stack, batch: Batch) -> dict[str, Any]:
    done_before = batch.counts().done
    stack.compose("kill", "redis")
    time.sleep(DOWN_S)
    _require(not stack.is_healthy("redis"), "Redis was killed and is healthy")
    stack.up("redis")
    done_after = batch.wait_done(0, 60).done
    _require(done_after >= done_before, f"{done_before} jobs were done before Redis died and {done_after} after it")
    return {"done_before": done_before, "done_after": done_after}


def _check_results(batch: Batch, num_videos: int) -> dict[str, Any]:
    jobs = batch.jobs()
    num_named = len({job.custom_id for job in jobs})
    _require(num_named == len(jobs) == num_videos, f"{len(jobs)} jobs for {num_named} of {num_videos} videos")
    empty = [job.custom_id for job in jobs if not job.summary.text]
    _require(not empty, f"no text for {', '.join(empty[:3])}")
    again = batch.submit()
    _require(again.num_added == 0 and again.num_known == num_videos, f"submitted again, {again.num_added} were added")
    counts = batch.counts()
    return {
        "total": counts.total,
        "done": counts.done,
        "lost": counts.failed + counts.dead + counts.cancelled,
        "run_again": sum(job.receipt.runs > 1 for job in jobs),
        "with_draft": sum(job.summary.timings.draft_ready_s > 0 for job in jobs),
        "tokens": sum(job.summary.num_tokens for job in jobs),
    }


def check_command_line(stack: Stack, num_videos: int) -> dict[str, Any]:
    """The same videos handed in by the command line in the gateway's container; their results are at hand."""
    gateway = ("--gateway", "127.0.0.1:50050")
    asked = ("--frames", str(NUM_FRAMES), "--max-new-tokens", str(MAX_NEW_TOKENS), "--output", "-")
    words = ("exec", "-T", "gateway", "slipstream", "archive", "submit", MOUNT, *gateway, *asked)
    lines = [json.loads(line) for line in stack.compose(*words, timeout_s=BATCH_TIMEOUT_S).splitlines()]
    with_text = sum(bool(line["text"]) for line in lines)
    _require(
        len(lines) == with_text == num_videos, f"{len(lines)} lines, {with_text} with text, for {num_videos} videos"
    )
    return {"lines": len(lines), "reused": sum(bool(line["receipt"].get("reused")) for line in lines)}


def check_scaled(stack: Stack, batch: Batch, num_videos: int) -> dict[str, Any]:
    """Two targets and two drafts: all take part, and each draft finds its target. Returns each container's sessions."""
    scale = ("--no-recreate", "--scale", "target=2", "--scale", "draft=2")
    stack.up(*scale)
    stack.compose("restart", "gateway")  # it looks the names up at its start
    stack.up(*scale)
    before = {service: stack.count_logged(service, "session.opened") for service in ("target", "draft")}
    batch.submit()
    batch.wait_done(num_videos, BATCH_TIMEOUT_S)
    _require("no guidance" not in stack.compose("logs", "gateway"), "a draft asked the wrong target for guidance")
    sessions = {}
    for service, counts in before.items():
        now = stack.count_logged(service, "session.opened")
        sessions[service] = [after - counts[name] for name, after in now.items()]
        all_served = len(sessions[service]) == 2 and min(sessions[service]) > 0
        _require(all_served, f"of two {service}s, the sessions were {sessions[service]}")
    return sessions


def _require(holds: object, complaint: str) -> None:
    if not holds:
        raise CheckFailed(complaint)
