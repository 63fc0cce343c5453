"""What a local stack is started with: its options, the checks before the start, and each service's command line."""

import errno
import hashlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.errors import InvalidConfig, ModelNotUsable

POCKET_DIR = Path(__file__).resolve().parents[2] / "models" / "pocket"
TLS_FLAG = "--tls-cert"
PRIVATE_GRACE_S = 0.5
"""Seconds to stop in, for a stack whose only client is done."""
FRESH = {"target": ("--prefix-cache-mb", "0"), "draft": ("--embedding-cache-mb", "0")}
"""`StackOptions.extra_flags` of a stack to which every clip is new, however often it was captioned before."""
LONGEST_SOCKET_PATH = 107
"""Bytes that the kernel takes as the path of a unix socket."""


def _default_modules() -> dict[str, str]:
    return {name: f"services.{name}" for name in ("target", "draft", "gateway")}


@dataclass(frozen=True)
class StackOptions:
    """How to run the three services on this machine."""

    target_model: Path = POCKET_DIR / "target"
    draft_model: Path | None = POCKET_DIR / "draft"
    """None: no draft process; every caption is decoded plainly."""
    device: str = "cpu"
    draft_device: str | None = None
    """None: the target's."""
    dtype: str = "float32"
    listen: str | None = None
    """Where the gateway listens; None: a free port of the loopback interface."""
    video_roots: tuple[Path, ...] = ()
    archive: bool = False
    """Serve the archive: with the queue in `redis`, or in an embedded server."""
    redis: str = ""
    """URL of a Redis that runs already."""
    archive_slots: int | None = None
    """Archive captions at once; None: the gateway's default."""
    data: Path | None = None
    """Folder in which the embedded server keeps the queue; None: it is gone with the stack."""
    threads: int | None = None
    """Torch threads of each model process; None: the usable cores shared out, on a CPU."""
    pin: bool = False
    """One core for each model process, where there are two or more."""
    restart: bool = True
    """Start a service that dies again."""
    start_timeout_s: float = 300.0
    stop_grace_s: float = 8.0
    """A little more than the services give the captions that run."""
    extra_flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """More command-line flags, by service name."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More environment variables for all services."""
    modules: Mapping[str, str] = field(default_factory=_default_modules)
    """The Python module that is each service."""


def make_run_dir() -> Path:
    """A private folder (mode 0700) whose sockets have paths that are short enough."""
    short_enough = len(os.fsencode(tempfile.gettempdir())) < LONGEST_SOCKET_PATH - 40
    return Path(tempfile.mkdtemp(prefix="slipstream-", dir=None if short_enough else "/tmp"))


def check_options(options: StackOptions) -> None:
    """Raises what can be known to be wrong before any process is started."""
    models = [folder for folder in (options.target_model, options.draft_model) if folder is not None]
    for folder in models:
        if not (folder / "config.json").is_file():
            raise ModelNotUsable(f"no checkpoint at {folder}: it must be a folder with a config.json")
    digests = [_tokenizer_digest(folder) for folder in models]
    if len(digests) == 2 and None not in digests and digests[0] != digests[1]:
        raise ModelNotUsable(f"{models[0]} and {models[1]} have different tokenizers; a draft must share its target's")
    for root in options.video_roots:
        if not root.is_dir():
            raise InvalidConfig(f"the video root {root} is not a folder")
    environ = os.environ | options.env
    if TLS_FLAG in options.extra_flags.get("gateway", ()) or environ.get("SLIPSTREAM_GATEWAY_TLS_CERT"):
        raise InvalidConfig(f"{TLS_FLAG} is not for a local stack, which is plaintext; start the services one by one")
    if options.pin and options.threads not in (None, 1):
        raise InvalidConfig("a pinned model process has one core, so --pin needs --threads 1")


def service_argv(options: StackOptions, name: str, addresses: Mapping[str, str]) -> list[str]:
    """The command line of one service; `addresses` holds those of all services of this stack."""
    flags = {"listen": addresses[name]}
    if name == "gateway":
        flags |= {"target": addresses["target"], "draft": addresses.get("draft", "")}
        flags |= {"archive-slots": "" if options.archive_slots is None else str(options.archive_slots)}
        flags |= {"video-roots": os.pathsep.join(str(root.resolve()) for root in options.video_roots)}
    else:
        flags |= _model_flags(options, name)
    spelled = [word for flag, value in flags.items() if value for word in (f"--{flag}", value)]
    return [sys.executable, "-m", options.modules[name], *spelled, *options.extra_flags.get(name, ())]


def _model_flags(options: StackOptions, name: str) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    device = options.draft_device if name == "draft" and options.draft_device else options.device
    threads = options.threads
    if threads is None and options.pin:
        threads = 1
    elif threads is None and device == "cpu":
        threads = max(1, len(cores) // 2)
    flags = {
        "model": str(options.draft_model if name == "draft" else options.target_model),
        "device": device,
        "dtype": options.dtype,
    }
    if threads is not None:
        flags["threads"] = str(threads)
    if options.pin and len(cores) > 1:
        flags["cpu"] = str(cores[("target", "draft").index(name)])
    return flags


def gateway_address(listen: str | None) -> str:
    """The address that the gateway will have. Raises when it cannot be had."""
    if listen is None:
        listen = "127.0.0.1:0"
    if listen.startswith("unix:"):
        return _free_socket_path(listen)
    host, _, port_text = listen.rpartition(":")
    if not host or not port_text.isdecimal() or int(port_text) > 65_535:
        raise InvalidConfig(f"cannot listen at {listen!r}: give host:port or unix:PATH")
    return f"{host}:{_free_port(host.strip('[]'), int(port_text))}"


def _free_port(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise InvalidConfig(f"cannot listen at {host}:{port}: {reason}") from None
        free_port: int = probe.getsockname()[1]
        return free_port


def _free_socket_path(listen: str) -> str:
    path = listen.removeprefix("unix:")
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise InvalidConfig(f"cannot listen at {listen}: the path is longer than {LONGEST_SOCKET_PATH} bytes")
    if not Path(path).parent.is_dir():
        raise InvalidConfig(f"cannot listen at {listen}: its folder does not exist")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return listen
    raise InvalidConfig(f"cannot listen at {listen}: the socket is in use")


def _tokenizer_digest(folder: Path) -> str | None:
    """Digest of what decides token ids; None without a tokenizer.json (the gateway compares in any case)."""
    try:
        content = json.loads((folder / "tokenizer.json").read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise ModelNotUsable(f"{folder / 'tokenizer.json'} is damaged: not JSON") from None
    for run_time_setting in ("truncation", "padding"):
        content.pop(run_time_setting, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
