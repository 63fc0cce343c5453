"""A stack of real processes that many tests share. It and its users live on the session's event loop."""

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import pytest_asyncio
import structlog
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from slipstream.rpc.calls import open_channel
from slipstream.stack import addresses, process
from slipstream.stack.local import Stack
from tests.support.forked_services import START_AFRESH, services_forked
from tests.support.processes import check_logs
from tests.support.variants import leave_to_long

if TYPE_CHECKING:
    from tests.support.world import World


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_in(number, parameters): see `tests.support.variants`")
    # Whether a draft takes part must not depend on how it did in other tests, on a machine that may have been busy.
    os.environ["SLIPSTREAM_GATEWAY_GATE_MEMORY"] = "false"
    if hasattr(config, "workerinput"):
        gc.disable()  # until `pytest_collection_finish`
    # A shell starts what runs in its background with Ctrl-C ignored, and processes of the tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Each worker looks for free ports among its own: two could find the same one before either listens there.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    addresses.UNASSIGNED_PORTS = addresses.UNASSIGNED_PORTS[worker::num_workers]
    # The same examples in every run: `make fuzz` looks for new ones. How long one takes says how busy the machine is.
    settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("same")


FOLDERS_OF_ONE = ("archive", "cli", "client", "e2e", "examples", "faults", "front", "services")
"""Folders whose tests run services, which they share, and the one whose tests harm them."""
SLOW_ONES = (
    *("e2e", "faults", "services", "cli", "front", "archive", "client", "examples"),
    "tests/bench/test_gpu_checks.py",
    "tests/bench/test_bench_reading.py",
)
"""What takes longest, first: begun last, it would keep one worker busy when the others have nothing left."""


def scope_of(nodeid: str) -> str:
    """What one worker runs as a whole: a folder that runs services, or a file."""
    path = nodeid.partition("::")[0]
    folder = path.split("/")[1]
    return folder if folder in FOLDERS_OF_ONE else path


class OneForServices(LoadScopeScheduling):
    """Gives all tests of a folder that runs services to one worker, where they share stacks, and the files of all
    others to whoever has time.

    Groups by mark (`--dist loadgroup`) would say the same, but xdist 3.8 does not see them under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # as the workers have them, not those of most tests first
    return OneForServices(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_to_long(items)
    if hasattr(config, "workerinput"):
        rank = {scope: number for number, scope in enumerate(SLOW_ONES)}
        items.sort(key=lambda item: rank.get(scope_of(item.nodeid), len(rank)))


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: no collection looks at it, which would take half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """Whoever configures logs in this process writes to a stream that ends with the test; the next one has its own."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
        logging.captureWarnings(False)
        root = logging.getLogger()
        root.handlers[:] = [handler for handler in root.handlers if type(handler) is not logging.StreamHandler]


TURNED_ON = contextlib.ExitStack()
"""Never left: modes that stay to a worker's end."""


@pytest.fixture(autouse=True)
def gradients_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch's gradients are on or off for a thread, and all tests of a worker have one. One that trains has found them
    turned off: where they are it is told, and they are turned on."""
    _turn_gradients_on(f"before {request.node.nodeid}", request.config)
    yield
    _turn_gradients_on(f"by {request.node.nodeid}", request.config)


def _turn_gradients_on(who: str, config: pytest.Config) -> None:
    torch: Any = sys.modules.get("torch")  # not of the process that only hands out tests
    if torch is not None and not torch.is_grad_enabled():
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            sys.stderr.write(f"gradients were turned off {who}\n")
        TURNED_ON.enter_context(torch.inference_mode(False))
        TURNED_ON.enter_context(torch.enable_grad())


@pytest.fixture(scope="session", autouse=True)
def _services_forked() -> Iterator[None]:
    with services_forked():
        yield


@pytest.fixture
def started_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how a process starts or ends: services import what they need themselves, as a user's do."""
    monkeypatch.setattr(process, "start_child", START_AFRESH)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> "World":
    from tests.support.world import make_world  # torch, which the process that only hands out tests does without

    return make_world(tmp_path_factory.mktemp("world"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(world: "World") -> AsyncIterator[Stack]:
    """Target, draft and gateway; whoever harms one of them starts a stack of their own."""
    async with Stack(world.stack_options()) as running:
        yield running
        check_logs(running)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def gateway(stack: Stack) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(stack.gateway_address) as channel:
        yield channel
