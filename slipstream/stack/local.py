"""The services as child processes of this one: started together, restarted when they die, never left behind."""

import asyncio
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from slipstream.budget import num_cores
from slipstream.errors import InvalidConfig, ModelNotUsable, ServiceUnavailable, SlipstreamError
from slipstream.families.checkpoints import folders_tokenizer_digest, is_hub_id
from slipstream.process_life import PARENT_PID_VARIABLE
from slipstream.rpc.security import TOKEN_VARIABLE
from slipstream.stack.addresses import gateway_address
from slipstream.stack.process import HttpProcess, RunFolder, ServiceProcess, bound_log, start_behind
from slipstream.stack.redis_server import QueueServer, private_folder
from slipstream.stack.start_order import ONE_GPU, start_groups
from slipstream.video.paths import joined

# -- launch -----------------------------------------------------------------------------------------------------------

POCKET_DIR = (Path(__file__).resolve().parents[1] / "checkpoints" / "pocket").resolve()
"""The pair that comes with the package: its data in a wheel, `models/` in a checkout."""
POCKET_READER = POCKET_DIR.parent / "pocket-reader"
"""Comes with it too: a target that reads synthetic pages."""
TLS_FLAG = "--tls-cert"
LOAD_S, DOWNLOAD_S = 300.0, 7200.0
"""Seconds for a service to be ready: with its model on this machine, and with one to be fetched from the hub first."""
STOP_LIMIT_S = 5.0
"""A stack ends within this time, idle or busy: `GATEWAY_GRACE_S` and `LAST_GRACE_S` leave a second of it to spare."""
DRAIN_S = 1.0
"""Seconds that captions and archive jobs in work get to finish; then they are told, and handed back."""
GATEWAY_GRACE_S = 3.0
"""Seconds in which the gateway has to end, `DRAIN_S` among them. It is killed if it has not."""
LAST_GRACE_S = 1.0
"""Seconds for the models and the queue's server, which end together after the gateway and have no caller left."""
PRIVATE_GRACE_S = 0.5
"""`StackOptions.stop_grace_s` of a stack whose only client is done."""
FRESH = {
    "target": ("--prefix-cache-mb", "0"),
    "draft": ("--embedding-cache-mb", "0"),
    "gateway": ("--gate-memory", "false"),
}
"""`StackOptions.extra_flags` of a stack to which every clip is new, however often it was captioned before."""


def _default_modules() -> dict[str, str]:
    return {name: f"slipstream.services.{name}" for name in ("target", "draft", "reader", "gateway", "front")}


@dataclass(frozen=True)
class StackOptions:
    """How to run the services on this machine."""

    target_model: Path | str = POCKET_DIR / "target"
    """A folder; as a string also OWNER/NAME of a model on the hub, where no such folder exists."""
    draft_model: Path | str | None = POCKET_DIR / "draft"
    """None: no draft process; every caption is decoded plainly."""
    device: str = "cpu"
    draft_device: str | None = None
    """None: the target's."""
    target_gpus: str = ""
    """Numbers of the GPUs that share the target, such as "0,1,2,3"; empty: `device` alone."""
    dtype: str = "auto"
    listen: str | None = None
    """Where the gateway listens; None: a free port of the loopback interface."""
    video_roots: tuple[Path, ...] = ()
    object_roots: tuple[str, ...] = ()
    """Buckets or folders in them, as s3://BUCKET/PREFIX, whose objects requests may name."""
    formats: str | None = None
    """What is decoded, one of `slipstream.video.formats.TIERS`; None: the gateway's default."""
    archive: bool = False
    """Serve the archive: with the queue in `redis`, or in an embedded server."""
    redis: str = ""
    """URL of a Redis that runs already."""
    archive_slots: int | None = None
    """Archive captions at once; None: the gateway's default."""
    data: Path | None = None
    """Folder in which the embedded server keeps the queue; None: it is gone with the stack."""
    http: int | None = None
    """Port of the HTTP front on the loopback interface, 0 for a free one; None: there is none."""
    reader: bool = False
    """Read documents, by a reader process."""
    threads: int | None = None
    """Torch threads of each model process; None: on a CPU the cores shared out for decoding, all for prefills."""
    pin: bool = False
    """One core for each model process, where there are two or more."""
    restart: bool = True
    """Start a service that dies again."""
    start_timeout_s: float | None = None
    """Seconds in which each service has to be ready; None: `LOAD_S`, or `DOWNLOAD_S` with a model on the hub."""
    stop_grace_s: float = GATEWAY_GRACE_S
    """Seconds in which the gateway has to end."""
    extra_flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """More command-line flags, by service name."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More environment variables for all services."""
    modules: Mapping[str, str] = field(default_factory=_default_modules)
    """The Python module that is each service."""

    @property
    def is_pocket(self) -> bool:
        """Whether the target is a pocket model, which knows only moving shapes or synthetic pages."""
        return Path(os.path.expanduser(self.target_model)).resolve().is_relative_to(POCKET_DIR.parent)

    @property
    def is_pocket_reader(self) -> bool:
        """Whether the target is the pocket reader, which knows only synthetic pages."""
        return Path(os.path.expanduser(self.target_model)).resolve() == POCKET_READER

    def devices_of(self, name: str) -> list[str]:
        """Of target or draft; the target may have several."""
        numbers = [number.strip() for number in self.target_gpus.split(",")]
        of_target = [f"cuda:{number}" for number in numbers if number] or [self.device]
        return of_target if name == "target" else [self.draft_device or of_target[0]]

    @property
    def start_limit_s(self) -> float:
        """Seconds in which each service has to be ready."""
        if self.start_timeout_s is not None:
            return self.start_timeout_s
        return DOWNLOAD_S if self.needs_hub else LOAD_S

    @property
    def needs_hub(self) -> bool:
        """Whether a model is named as one of the hub."""
        return any(model is not None and _is_on_hub(model) for model in (self.target_model, self.draft_model))


def check_options(options: StackOptions) -> None:
    """Raises what can be known to be wrong before any process is started."""
    _check_models([model for model in (options.target_model, options.draft_model) if model is not None])
    for root in options.video_roots:
        if not root.is_dir():
            raise InvalidConfig(f"the video root {root} is not a folder")
    environ = os.environ | options.env
    for door in ("gateway",) if options.http is None else ("gateway", "front"):
        if TLS_FLAG in options.extra_flags.get(door, ()) or environ.get(f"SLIPSTREAM_{door.upper()}_TLS_CERT"):
            raise InvalidConfig(f"{TLS_FLAG} is not for a local stack, whose {door} is plaintext: start all one by one")
    if options.redis and not options.redis.startswith(("redis://", "rediss://", "unix://", "sentinel://")):
        raise InvalidConfig("--redis: no URL of a Redis server; use redis://, rediss://, unix:// or sentinel://")
    if options.pin and options.threads not in (None, 1):
        raise InvalidConfig("a pinned model process has one core, so --pin needs --threads 1")


def service_argv(options: StackOptions, name: str, addresses: Mapping[str, str]) -> list[str]:
    """The command line of one service; `addresses` holds those of all services of this stack."""
    flags = {"listen": addresses[name]}
    if name == "front":
        flags |= {"gateway": addresses["gateway"], "drain-s": str(DRAIN_S)}
    elif name == "gateway":
        flags |= {peer: addresses.get(peer, "") for peer in ("target", "draft", "reader")}
        flags |= {"drain-s": str(DRAIN_S), "archive-drain-s": str(DRAIN_S)}
        flags |= {"archive-slots": "" if options.archive_slots is None else str(options.archive_slots)}
        flags |= {"video-roots": joined(options.video_roots)}
        flags |= {"formats": options.formats or "", "object-roots": ",".join(options.object_roots)}
    elif name != "reader":
        flags |= _model_flags(options, name)
    spelled = [word for flag, value in flags.items() if value for word in (f"--{flag}", value)]
    modules = {**_default_modules(), **options.modules}
    return [sys.executable, "-m", modules[name], *spelled, *options.extra_flags.get(name, ())]


def service_environment(name: str, given: Mapping[str, str]) -> dict[str, str]:
    """What a service of this name is given: not its user's token, nor options of other services, which may hold the
    queue's password, nor what is about this process: that it is a rank of `torchrun`, or has no docstrings."""
    foreign = tuple(f"SLIPSTREAM_{other.upper()}_" for other in _default_modules() if other != name)
    unwanted = (TOKEN_VARIABLE, "RANK", "PYTHONOPTIMIZE")
    return {key: value for key, value in given.items() if key not in unwanted and not key.startswith(foreign)}


def _with_http_folder(options: StackOptions, folder: Path) -> StackOptions:
    """The front keeps files there, and the gateway may read the media of its batches."""
    media = private_folder(folder.resolve() / "media")
    flags = ("--data", str(folder.resolve()), "--shared-media", "true", *options.extra_flags.get("front", ()))
    extra = {**options.extra_flags, "front": flags}
    return replace(options, video_roots=(*options.video_roots, media), extra_flags=extra)


def _model_flags(options: StackOptions, name: str) -> dict[str, str]:
    gpus = options.target_gpus if name == "target" else ""
    device, threads, prefill_threads = options.devices_of(name)[0], options.threads, ""
    if threads is None and options.pin:
        threads = 1
    elif threads is None and device == "cpu":
        threads, prefill_threads = max(1, num_cores() // 2), str(num_cores())
    flags = {
        "model": str(options.draft_model if name == "draft" else options.target_model),
        "device": "" if gpus else device,
        "gpus": gpus,
        "dtype": options.dtype,
        "prefill-threads": prefill_threads,
    }
    if threads is not None:
        flags["threads"] = str(threads)
    if options.pin and len(cores := sorted(os.sched_getaffinity(0))) > 1:
        flags["cpu"] = str(cores[("target", "draft").index(name)])
    return flags


def _is_on_hub(ref: Path | str) -> bool:
    return isinstance(ref, str) and is_hub_id(ref) and not Path(ref).exists()


def _folder_of(ref: Path | str) -> Path | None:
    """The folder of a checkpoint on this machine; None for a hub id, which the service itself looks up."""
    if _is_on_hub(ref):
        return None
    folder = Path(os.path.expanduser(ref))  # as it is where nobody has that name
    if (folder / "config.json").is_file():
        return folder
    raise ModelNotUsable(
        f"no checkpoint at {ref}: it must be a folder with a config.json, or OWNER/NAME of a model on the hub"
    )


def _check_models(models: Sequence[Path | str]) -> None:
    """Raises what folders tell of models that cannot be loaded or do not fit; of the hub's the gateway finds it out."""
    folders = [folder for folder in map(_folder_of, models) if folder is not None]
    digests = {folders_tokenizer_digest(folder) for folder in folders} - {None}
    differ = len(digests) == 2
    if (differ or len(folders) < len(models)) and any(folder.is_relative_to(POCKET_DIR) for folder in folders):
        raise ModelNotUsable("the pocket models fit no others: give --target and --draft (`none`: decode without one)")
    if differ:
        raise ModelNotUsable(f"{models[0]} and {models[1]} have different tokenizers; a draft must share its target's")


# -- stack ------------------------------------------------------------------------------------------------------------

STABLE_S = 1.0
"""A service that dies sooner after it was ready counts as one that never started."""
MAX_FAILED_STARTS, FIRST_BACK_OFF_S, LOG_CHECK_S = 3, 0.25, 10.0
PROGRESS_S = 15.0
"""How often a start that takes long is told of."""
REDIS_VARIABLE = "SLIPSTREAM_GATEWAY_REDIS"
"""Not a flag: a URL may hold a password, and command lines are public."""


class Stack:
    """A running local stack, as an async context manager: entered when all services are ready, left when all ended.

    With the archive there is also the server of its queue, unless one is given. `run_dir` is private and holds the
    sockets of the models and `<service>.log`, JSON lines. It is removed at the end, but for logs that the error of
    a stack that failed points to.
    """

    def __init__(self, options: StackOptions | None = None, report: Callable[[str], None] = lambda line: None) -> None:
        self.options = options or StackOptions()
        self.processes: dict[str, ServiceProcess] = {}
        self.queue: QueueServer | None = None
        self.failure: SlipstreamError | None = None
        self._report = report
        self._failed = asyncio.Event()
        self._started = asyncio.Condition()
        self._draft_comes_last = False
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def gateway_address(self) -> str:
        """Where clients find the gateway."""
        return self.processes["gateway"].address

    async def __aenter__(self) -> Self:
        check_options(self.options)
        address = gateway_address(self.options.listen)
        self._folder = RunFolder()
        self.run_dir = self._folder.path
        try:
            await self._start_queue()
            self._prepare(address)
            groups = start_groups(list(self.processes), *map(self.options.devices_of, ("target", "draft")))
            self._draft_comes_last = ["draft"] in groups
            if self._draft_comes_last:
                self._report(ONE_GPU)
            await start_behind(self.processes["target"], self._start_all(groups))
        except BaseException as error:
            await self._shut_down(error if isinstance(error, SlipstreamError) else None)
            raise
        self._keepers = [asyncio.create_task(self._bound_logs())]
        if self.options.restart:
            self._keepers += [asyncio.create_task(self._keep(child)) for child in self._children]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._shut_down(self.failure)

    async def wait_failed(self) -> NoReturn:
        """Sleeps until a service cannot be kept running, then raises why."""
        await self._failed.wait()
        assert self.failure is not None
        raise self.failure

    async def wait_started(self, name: str, starts: int) -> None:
        """Returns when the service is ready after having been started that often: 2 after its first death."""
        process = next(child for child in self._children if child.name == name)
        async with self._started:
            await self._started.wait_for(lambda: process.starts >= starts and process.is_serving)

    @property
    def http_address(self) -> str:
        """Where HTTP clients find the front, HOST:PORT; '' without one."""
        return self.processes["front"].address if "front" in self.processes else ""

    @property
    def _children(self) -> list[ServiceProcess | QueueServer]:
        return [*self.processes.values(), *([] if self.queue is None else [self.queue])]

    def _prepare(self, address: str) -> None:
        names = ["target", *(["draft"] if self.options.draft_model is not None else [])]
        names += [*(["reader"] if self.options.reader else []), "gateway"]
        addresses = {name: f"unix:{self.run_dir / name}.sock" for name in names} | {"gateway": address}
        options = self.options
        if options.http is not None:
            names.append("front")
            addresses["front"] = gateway_address(f"127.0.0.1:{options.http}")
            options = _with_http_folder(options, (options.data or self.run_dir) / "http")
        url = self.queue.server.url if self.queue else self.options.redis if self.options.archive else ""
        given = os.environ | self.options.env | {REDIS_VARIABLE: url}  # and not that of the user's own environment
        for name in names:
            argv = service_argv(options, name, addresses)
            env = service_environment(name, given) | {PARENT_PID_VARIABLE: str(os.getpid())}
            kind = HttpProcess if name == "front" else ServiceProcess
            self.processes[name] = kind(name, argv, addresses[name], self.run_dir / f"{name}.log", env)

    async def _start_queue(self) -> None:
        """Runs a server for the archive's queue, where one is wanted and none is given."""
        if self.options.archive and not self.options.redis:
            self.queue = QueueServer((self.options.data or self.run_dir) / "redis")
            await self._start(self.queue)

    async def _start_all(self, groups: Sequence[Sequence[str]]) -> None:
        try:
            for names in groups:
                async with asyncio.TaskGroup() as group:
                    for name in names:
                        group.create_task(self._start(self.processes[name]))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _start(self, process: ServiceProcess | QueueServer) -> None:
        telling = asyncio.create_task(self._tell_progress(process.name))
        try:
            await process.start()
            await process.wait_serving(self.options.start_limit_s)
        finally:
            telling.cancel()
        async with self._started:
            self._started.notify_all()

    async def _tell_progress(self, name: str) -> None:
        """Large weights take minutes, and a long queue: whoever waits is told that something happens."""
        for number in itertools.count(1):
            await asyncio.sleep(PROGRESS_S)
            limit = f", of at most {self.options.start_limit_s:.0f} (--start-timeout)" if name in self.processes else ""
            self._report(f"{name} has been starting for {number * PROGRESS_S:.0f} s{limit}")

    async def _keep(self, process: ServiceProcess | QueueServer) -> None:
        failed_starts = 0
        while True:
            await process.wait_exit()
            failed_starts = 0 if process.served_s >= STABLE_S else failed_starts + 1
            error = process.exit_error()
            if failed_starts >= MAX_FAILED_STARTS:
                self.failure = ServiceUnavailable(f"{error}; it died {failed_starts} times in a row")
                self._failed.set()
                return
            self._report(f"{error}; starting it again")
            await asyncio.sleep(FIRST_BACK_OFF_S * 2**failed_starts)
            if process.name == "draft" and self._draft_comes_last:
                await self.wait_started("target", 1)  # whose memory it would take
            try:
                await self._start(process)
            except (SlipstreamError, OSError):
                process.kill()

    async def _bound_logs(self) -> None:
        while True:
            for child in self._children:
                bound_log(child.log_path)
            await asyncio.sleep(LOG_CHECK_S)

    async def _shut_down(self, failure: SlipstreamError | None) -> None:
        """The doors first: they end the captions and hand jobs back, and then nobody needs the others."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        try:
            doors = [self.processes[name] for name in ("front", "gateway") if name in self.processes]
            await asyncio.gather(*(door.stop(self.options.stop_grace_s) for door in doors))
            await asyncio.gather(*(child.stop(LAST_GRACE_S) for child in self._children))
        finally:
            for child in self._children:
                child.kill()
            self._folder.close(told=str(failure or ""))
