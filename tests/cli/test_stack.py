"""The local stack with services that have no model: start, readiness, restarts, failures, and that nothing is left."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from slipstream.cli import common as common_module
from slipstream.cli.app import run
from slipstream.client.async_captioner import connect_async
from slipstream.errors import InvalidConfig, ModelNotUsable, ServiceUnavailable
from slipstream.rpc.server import ANSWER_S
from slipstream.stack import local, process
from slipstream.stack.local import Stack, StackOptions
from slipstream.stack.process import RunFolder, ServiceProcess
from tests.cli.fake_gateway import TEXT, good_video, hanging_video
from tests.support.forked_services import START_AFRESH
from tests.support.processes import our_children
from tests.support.up_process import ROOT, Up, is_alive
from tests.support.variants import one_in

MODULES = dict.fromkeys(("target", "draft", "gateway"), "tests.cli.fake_service")


@pytest.fixture
def options(tmp_path: Path) -> StackOptions:
    for role in ("target", "draft"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text("{}")
    return StackOptions(
        target_model=tmp_path / "target",
        draft_model=tmp_path / "draft",
        modules=MODULES,
        start_timeout_s=30,
    )


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = our_children()  # such as a server that other tests share
    yield
    assert our_children() <= before


def behave(options: StackOptions, **behaviours: str) -> StackOptions:
    return replace(options, extra_flags={name: ["--behaviour", value] for name, value in behaviours.items()})


def environment_of(pid: int) -> list[str]:
    """Of a service that was started afresh: a forked one shows its server's."""
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


async def test_serves_until_it_is_left(options: StackOptions) -> None:
    async with Stack(options) as stack:
        pids = {name: process.pid for name, process in stack.processes.items()}
        assert sorted(pids) == ["draft", "gateway", "target"]
        assert stack.run_dir.stat().st_mode & 0o777 == 0o700
        async with connect_async(stack.gateway_address) as captioner:
            assert (await captioner.info()).version == "9.9.9"
    assert not any(is_alive(pid) for pid in pids.values())
    assert not stack.run_dir.exists()


async def test_runs_without_a_draft(options: StackOptions) -> None:
    async with Stack(replace(options, draft_model=None)) as stack:
        assert sorted(stack.processes) == ["gateway", "target"]


@pytest.mark.usefixtures("started_afresh")
async def test_a_killed_service_is_started_again(options: StackOptions) -> None:
    reports: list[str] = []
    async with Stack(options, reports.append) as stack:
        draft = stack.processes["draft"]
        old_pid = draft.pid
        os.kill(old_pid, signal.SIGKILL)
        await asyncio.wait_for(stack.wait_started("draft", 2), 120)
        assert draft.pid != old_pid
        assert stack.failure is None
    assert reports[0].startswith("draft was killed by SIGKILL")


@pytest.mark.usefixtures("started_afresh")
async def test_the_archives_queue_outlives_its_server(
    options: StackOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.stack.redis_server.LOCK_S", 0.1)
    options = replace(options, archive=True, data=tmp_path / "data")
    reports: list[str] = []
    async with Stack(options, reports.append) as stack:
        assert stack.queue is not None
        environment = environment_of(stack.processes["gateway"].pid)
        assert f"SLIPSTREAM_GATEWAY_REDIS={stack.queue.server.url}" in environment
        old_pid = stack.queue.pid
        os.kill(old_pid, signal.SIGKILL)
        await asyncio.wait_for(stack.wait_started("redis", 2), 120)
        with pytest.raises(InvalidConfig, match=r"another Redis server uses .*--no-archive"):
            await Stack(options).__aenter__()
    assert reports[0].startswith("redis was killed by SIGKILL (log: ")
    assert not is_alive(old_pid) and not is_alive(stack.queue.pid)
    assert (tmp_path / "data" / "redis").exists()


@pytest.mark.usefixtures("started_afresh")
async def test_a_redis_that_is_given_needs_no_server(options: StackOptions) -> None:
    async with Stack(replace(options, archive=True, redis="redis://127.0.0.1:1")) as stack:
        assert stack.queue is None
        environment = environment_of(stack.processes["gateway"].pid)
        assert "SLIPSTREAM_GATEWAY_REDIS=redis://127.0.0.1:1" in environment


@pytest.mark.usefixtures("started_afresh")
async def test_without_the_archive_no_queue_of_the_environment_is_joined(
    options: StackOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stack of one command would take jobs of a production that it cannot do."""
    monkeypatch.setenv(local.REDIS_VARIABLE, "redis://127.0.0.1:1")
    async with Stack(options) as stack:
        assert f"{local.REDIS_VARIABLE}=" in environment_of(stack.processes["gateway"].pid)


async def test_a_service_may_stay_dead_on_request(options: StackOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "FIRST_BACK_OFF_S", 0.0)
    reports: list[str] = []
    async with Stack(replace(options, restart=False), reports.append) as stack:
        draft = stack.processes["draft"]
        os.kill(draft.pid, signal.SIGKILL)
        assert await draft.wait_exit() == -signal.SIGKILL
        await asyncio.sleep(0.5)
        assert draft.starts == 1 and reports == [], "a death is reported before anything waits"


async def test_a_target_that_dies_while_others_start_is_named(options: StackOptions) -> None:
    """As by the kernel's memory killer: a gateway waits for its target, and nothing would be wrong with the gateway."""
    with pytest.raises(ServiceUnavailable, match=r"^target ended with exit status 9"):
        async with Stack(behave(options, target="crash", gateway="hang")):
            pass


async def test_a_crash_loop_ends_the_stack(options: StackOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "STABLE_S", 60.0)  # however late this process hears that it serves
    async with Stack(behave(options, draft="crash")) as stack:
        with pytest.raises(ServiceUnavailable, match=r"^draft ended with exit status 9.*3 times in a row"):
            await asyncio.wait_for(stack.wait_failed(), 240)


@pytest.mark.usefixtures("started_afresh")
async def test_a_failed_start_tells_the_last_error_of_the_log(options: StackOptions) -> None:
    with pytest.raises(InvalidConfig, match=r"^target ended with exit status 2: the weights are damaged \(log: "):
        await Stack(behave(options, target="fail")).__aenter__()
    with pytest.raises(ServiceUnavailable, match="draft ended with exit status 7: no error in its log"):
        await Stack(behave(options, draft="vanish")).__aenter__()
    missing = replace(options, modules=MODULES | {"gateway": "slipstream.services.none"})
    with pytest.raises(ServiceUnavailable, match=r"gateway ended with exit status 1: .*No module named"):
        await Stack(missing).__aenter__()


async def test_a_failed_start_leaves_the_log_that_it_points_to(
    options: StackOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = Path(tempfile.gettempdir())
    stack = Stack(behave(options, gateway="fail"))
    with pytest.raises(InvalidConfig, match=r"\(log: .*gateway\.log\)"):
        await stack.__aenter__()
    assert sorted(path.name for path in stack.run_dir.iterdir()) == ["gateway.log", "lock"]
    async with Stack(options):
        assert stack.run_dir.exists(), "who was told of it may still read it"
    monkeypatch.setattr(process, "KEPT_S", 0.0)
    async with Stack(options):
        assert not stack.run_dir.exists()
    assert os.listdir(temporary) == []


async def test_logs_are_bounded(options: StackOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(local, "LOG_CHECK_S", 0.01)
    async with Stack(options) as stack:
        target = stack.processes["target"]
        with target.log_path.open("a") as log:
            print("x" * 200, file=log)
        while target.log_path.stat().st_size:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert "x" * 200 in target.log_path.with_name("target.log.1").read_text()
        os.kill(target.pid, signal.SIGKILL)
        await asyncio.wait_for(stack.wait_started("target", 2), 120)


@pytest.mark.usefixtures("started_afresh")
async def test_services_are_given_nothing_of_others(options: StackOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "secret")
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_LISTEN", "ignored:1")
    async with Stack(replace(options, archive=True, redis="redis://:secret@127.0.0.1:1")) as stack:
        told = {name: "\0".join(environment_of(process.pid)) for name, process in stack.processes.items()}
    assert not any("secret" in told[name] or "GATEWAY" in told[name] for name in ("target", "draft"))
    assert "SLIPSTREAM_TOKEN" not in told["gateway"] and "SLIPSTREAM_GATEWAY_LISTEN" in told["gateway"]


def test_uvloop_can_start_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loops, which are none of asyncio's own, refuse other keywords than these."""

    async def start(*argv: str, **keywords: object) -> None:
        assert set(keywords) <= {"stdin", "stdout", "stderr", "env", "cwd", "pass_fds", "start_new_session"}
        assert keywords["start_new_session"]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(asyncio, "get_running_loop", asyncio.AbstractEventLoop)
    with pytest.raises(StopIteration):
        START_AFRESH([sys.executable], {}, 2).send(None)


async def test_a_service_has_a_group_of_its_own_in_the_session_of_its_parent(tmp_path: Path) -> None:
    """Ctrl-C does not reach it, and the kernel weighs it as the rest of its session."""
    with (tmp_path / "log").open("w+") as log:
        told = "import os; print(os.getpid(), os.getpgrp(), os.getsid(0))"
        child = await START_AFRESH([sys.executable, "-c", told], os.environ, log.fileno())
        assert await child.wait() == 0
    assert (tmp_path / "log").read_text().split() == [str(child.pid), str(child.pid), str(os.getsid(0))]


async def test_modules_of_the_users_are_not_taken_for_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timeit.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    argv = (sys.executable, "-m", "timeit", "-n", "1", "pass")
    service = process.ServiceProcess("target", argv, "unix:none", tmp_path / "target.log", os.environ)
    await service.start()
    assert await service.wait_exit() == 0


async def test_no_proxy_is_asked_the_way_to_this_machine(
    options: StackOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with (
        Stack(replace(options, draft_model=None)) as stack,
        connect_async(stack.gateway_address) as captioner,
    ):
        assert (await captioner.info()).version == "9.9.9"


@pytest.mark.parametrize("name", ["target", "draft"])
def test_models_of_a_rank_of_torchrun_are_no_ranks(name: str) -> None:
    """As where `torchrun` starts a program on each GPU that captions its part of the videos."""
    assert local.service_environment(name, {"RANK": "1", "PATH": "/bin"}) == {"PATH": "/bin"}


def test_services_keep_their_docstrings() -> None:
    """Which transformers reads."""
    assert local.service_environment("target", {"PYTHONOPTIMIZE": "2", "PATH": "/bin"}) == {"PATH": "/bin"}


async def test_a_start_that_takes_too_long(options: StackOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.stack.local.PROGRESS_S", 0.4)
    told: list[str] = []
    late = replace(behave(options, target="hang"), draft_model=None, start_timeout_s=1, stop_grace_s=0.2)
    with pytest.raises(ServiceUnavailable, match="target was not ready after 1 s"):
        await Stack(late, report=told.append).__aenter__()
    assert any(line.startswith("target has been starting for ") for line in told)


async def test_cancelled_while_it_starts(options: StackOptions) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Stack(behave(options, gateway="hang")).__aenter__(), 2)


def test_the_end_of_a_stack_fits_its_limit() -> None:
    assert local.DRAIN_S + ANSWER_S < local.GATEWAY_GRACE_S
    assert local.GATEWAY_GRACE_S + local.LAST_GRACE_S <= local.STOP_LIMIT_S - 1


async def test_the_gateway_ends_before_what_it_calls(options: StackOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[str, bool]] = []
    stop = ServiceProcess.stop

    async def noted(self: ServiceProcess, grace_s: float) -> None:
        ended.append((self.name, stack.processes["gateway"].exit_status is None))
        await stop(self, grace_s)

    monkeypatch.setattr(ServiceProcess, "stop", noted)
    async with Stack(options) as stack:
        pass
    assert ended[0] == ("gateway", True)
    assert {("target", False), ("draft", False)} <= set(ended[1:])


async def test_services_that_do_not_end_are_killed(options: StackOptions) -> None:
    options = replace(behave(options, gateway="deaf", target="deaf"), stop_grace_s=0.2)
    async with Stack(options) as stack:
        pass
    assert stack.processes["gateway"].exit_status == stack.processes["target"].exit_status == -signal.SIGKILL


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@one_in(2, "number")
def test_up_ends_at_a_signal(options: StackOptions, number: int, status: int) -> None:
    with Up(options) as up:
        up.process.send_signal(number)
        up.told("1 s to finish")
        up.ended(status)


@pytest.mark.long
def test_in_the_background_of_a_script_it_still_ends_at_a_signal(options: StackOptions) -> None:
    with Up(options, shell=("sh", "-c", 'trap "" INT; exec "$@"', "sh")) as up:
        up.process.send_signal(signal.SIGINT)
        up.told("1 s to finish")
        up.ended(130)


def test_what_a_killed_stack_left_is_swept_by_the_next(options: StackOptions) -> None:
    temporary = Path(tempfile.gettempdir())
    (temporary / "slipstream-foreign").mkdir()
    (temporary / "slipstream-file").write_text("")
    (temporary / "slipstream-link").symlink_to(temporary / "slipstream-foreign")
    with Up(options) as up:
        (used,) = (path.parent for path in temporary.glob("slipstream-*/target.log"))
        with contextlib.closing(RunFolder()):
            assert used.exists(), "it is in use"
        up.process.kill()
        up.ended(-signal.SIGKILL)
        assert (used / "gateway.log").exists()
        with contextlib.closing(RunFolder()) as folder:
            assert not used.exists() and folder.path.exists()
    assert {path.name for path in temporary.iterdir()} == {f"slipstream-{name}" for name in ("foreign", "file", "link")}


async def test_up_ends_while_it_captions_and_says_so(options: StackOptions, tmp_path: Path) -> None:
    with Up(options) as up:
        async with connect_async(up.address) as captioner:
            events = captioner.events(hanging_video(tmp_path / "hang.mp4"), resume_wait_s=0)
            await anext(events)
            up.process.send_signal(signal.SIGINT)
            with pytest.raises(ServiceUnavailable, match="is stopping and has ended the call"):
                [event async for event in events]
        up.ended(130)


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
@one_in(2, "numbers")
def test_a_second_signal_ends_up_at_once(options: StackOptions, numbers: tuple[int, int]) -> None:
    with Up(options, behaviour="deaf", grace_s=3600) as up:
        up.process.send_signal(numbers[0])
        up.told("1 s to finish")
        up.process.send_signal(numbers[1])
        up.ended(130 if numbers[0] == signal.SIGINT else 143)


async def test_a_port_in_use(options: StackOptions) -> None:
    async with Stack(options) as stack:
        with pytest.raises(InvalidConfig, match="the port is in use"):
            await Stack(replace(options, listen=stack.gateway_address)).__aenter__()


async def test_a_missing_checkpoint(options: StackOptions, tmp_path: Path) -> None:
    with pytest.raises(ModelNotUsable, match=r"no checkpoint at .*nowhere"):
        await Stack(replace(options, target_model=tmp_path / "nowhere")).__aenter__()


def test_services_end_with_a_parent_that_was_killed(options: StackOptions) -> None:
    script = f"""
import asyncio, sys
from pathlib import Path
from slipstream.stack.local import Stack, StackOptions
async def main():
    options = StackOptions(Path({str(options.target_model)!r}), Path({str(options.draft_model)!r}),
                           modules={MODULES!r}, env={{"PYTHONPATH": {str(ROOT)!r}}})
    async with Stack(options) as stack:
        print(*(process.pid for process in stack.processes.values()), flush=True)
        await stack.wait_failed()
asyncio.run(main())
"""
    environment = os.environ | {"TMPDIR": tempfile.gettempdir()}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        parent.kill()
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


def test_caption_runs_a_stack_of_its_own(
    options: StackOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common_module, "StackOptions", partial(StackOptions, modules=MODULES))
    video = str(good_video(tmp_path / "a.mp4"))
    folders = ["--target", str(options.target_model), "--draft", str(options.draft_model)]
    assert run(["caption", video, "--json", *folders]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["text"] == TEXT
    assert "pocket" not in output.err
    assert run(["caption", video, "--target", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("slipstream: no checkpoint at")


def test_who_captions_with_the_pocket_models_is_told_once(
    options: StackOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "POCKET_DIR", tmp_path / "pocket")
    monkeypatch.setattr(common_module, "StackOptions", partial(StackOptions, modules=MODULES))
    videos = [str(good_video(tmp_path / name)) for name in ("a.mp4", "b.mp4")]
    assert run(["caption", *videos, "--json", "--target", str(options.target_model), "--draft", "none"]) == 0
    output = capsys.readouterr()
    assert [json.loads(line)["text"] for line in output.out.splitlines()] == [TEXT, TEXT]
    assert output.err.count("know only moving shapes") == 1 and "--target llava-hf/" in output.err
