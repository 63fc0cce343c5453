"""The process that services of tests are forked from: `python -m tests.support.fork_server DESCRIPTOR MODULE...`.

It imports what these modules import, which takes seconds for torch and transformers, and runs none of them. What is
forked is a process of its own as any that a stack starts: its own group, environment, output, folder and arguments, and
the very `__main__` of the service or command. Over the socket comes a `Start` with three descriptors: of stdout, of
stderr, and of a pipe that is told the process's id and then its exit status, each a `NUMBER`.
"""

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

READY = b"ready"
NUMBER = struct.Struct("q")
MAX_REQUEST_BYTES = 1 << 20
IN_PLACE_OF = {"slipstream.cli": "slipstream.cli.app"}
"""Of what does its work when it is imported: what imports the same."""


@dataclass(frozen=True)
class Start:
    """What a service is started with, as JSON on the wire."""

    module: str
    arguments: list[str]
    environ: dict[str, str]
    folder: str


def main(connection: socket.socket, modules: list[str]) -> None:
    """Until whoever started this process is gone. Nothing that was forked stays."""
    before = dict(os.environ)
    for name in map(_to_import, modules):
        with contextlib.suppress(ImportError):  # of an extra that is not installed: the service itself will say so
            import_module(name)
        if name not in IN_PLACE_OF.values():
            sys.modules.pop(name, None)  # it runs when it is started
    added = {name: value for name, value in os.environ.items() if name not in before}
    gc.collect()
    gc.freeze()  # what was imported is shared, as long as no collection writes to it
    connection.send(READY)
    forked: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not connection:
                    _ended(selector, key, forked)
                    continue
                request, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
                if not request:
                    for pid in forked:
                        _kill(pid)
                    return
                _fork(selector, Start(**json.loads(request)), added, descriptors, forked)


def _to_import(module: str) -> str:
    """What `python -m` takes for this name, or what has the same imports."""
    if module in IN_PLACE_OF:
        return IN_PLACE_OF[module]
    spec = find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    return f"{module}.__main__" if is_package else module


def _fork(
    selector: selectors.BaseSelector,
    start: Start,
    added: Mapping[str, str],
    descriptors: list[int],
    forked: dict[int, int],
) -> None:
    output, errors, status = descriptors
    pid = os.fork()
    if pid == 0:
        others = [key.fd for key in selector.get_map().values()]
        selector.close()
        for descriptor in (*others, *forked.values(), status):
            os.close(descriptor)
        _become(start, added, output, errors)
    with contextlib.suppress(OSError):  # the child does it, too: whoever knows the process must find its group
        os.setpgid(pid, pid)
    os.close(output)
    os.close(errors)
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
    forked[pid] = status
    _tell(status, pid)


def _ended(selector: selectors.BaseSelector, key: selectors.SelectorKey, forked: dict[int, int]) -> None:
    selector.unregister(key.fileobj)
    os.close(key.fd)
    _, status = os.waitpid(key.data, 0)
    _tell(forked[key.data], os.waitstatus_to_exitcode(status))
    os.close(forked.pop(key.data))


def _tell(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, NUMBER.pack(number))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _become(start: Start, added: Mapping[str, str], output: int, errors: int) -> NoReturn:
    """Runs the module in this process, as `python -m` would."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.close(output)
        os.close(errors)
        os.chdir(start.folder)
        os.environ.clear()
        os.environ.update({**added, **start.environ})
        sys.argv = [start.module, *start.arguments]
        runpy.run_module(start.module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
