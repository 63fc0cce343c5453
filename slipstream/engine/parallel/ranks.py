"""The processes of one model, and rank 0's side: it serves, starts its followers or meets those of `torchrun`, agrees
with them before anything is loaded, and ends when one of them is lost."""

import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d, rendezvous  # type: ignore[attr-defined]

from slipstream.engine.parallel.links import Link, LinkLost, read_all
from slipstream.engine.parallel.patience import Patience
from slipstream.errors import DeviceLost, ModelNotUsable

JOIN_S = 120.0
"""For processes to start and to find each other."""
COLLECTIVE_S = {"gloo": 30.0, "nccl": 30.0}
"""After so long a rank that waits for another one gives up, should nobody have noticed before."""
PROBE_S = 25.0
"""For the first sum, once ranks are connected: less, so that advice comes before torch ends the process."""
SILENCE_S = {"gloo": 4.0, "nccl": 20.0}
"""Of a rank that works: then it counts as lost. Beside a GPU, libraries that compile may hold the interpreter."""
_ON_NCCL = {
    "NCCL_GRAPH_REGISTER": "0",  # would take what a graph's sums read for one allocation, unlike expandable segments
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # which takes up to a minute beyond the timeout,
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",  # and so does torch's wait for it, which it does not leave out
}
_INTERFACES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
"""What each takes its network from."""
_LOCALHOST = "127.0.0.1"
SaidT = TypeVar("SaidT")


@dataclass(frozen=True)
class RankOrder:
    """How every rank loads its share: what `load_model` is told, and the devices by rank."""

    model: str
    devices: tuple[str, ...]
    dtype: str
    attention: str
    strict_width: int
    threads: int

    @property
    def size(self) -> int:
        return len(self.devices)


def rank_here(environ: Mapping[str, str] = os.environ) -> int | None:
    """Which rank `torchrun`, or rank 0, has started this process as; None: nobody said."""
    return int(environ["RANK"]) if environ.get("RANK", "").isdecimal() else None


class Group(ABC):
    """What `load_model` needs of the ranks: how many, which one this is, and that they agree."""

    def __init__(self, rank: int, size: int, store: Store) -> None:
        self.rank = rank
        self.size = size
        self.store = store
        self.met_at = ("", 0)
        """Address and port of rank 0 that all others have reached."""
        self.token = ""
        """Of this start: the store of `torchrun` still has what an earlier one has put there."""
        self.backend = ""
        self._patience = Patience(self._give_up)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """What happens inside needs no other rank. Goes on when all ranks have done it, however late one of them is,
        and none has failed; else raises. Collectives have no such patience (`COLLECTIVE_S`)."""
        try:
            yield
        except Exception as error:
            self._tell(str(error) or type(error).__name__)
            raise
        self._tell("")

    def connect(self, device: torch.device) -> None:
        """Makes collectives work, on this rank's device. Raises `ModelNotUsable` where the ranks do not reach each
        other."""
        self.backend = backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(device)
            for name, value in _ON_NCCL.items():
                os.environ.setdefault(name, value)
            # An error ends the process. `torchrun` asks for 1, to take NCCL down before, which waits for all graphs.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
        try:
            with self._patience.within(JOIN_S, self._unreachable("it was waited for in vain")):
                dist.init_process_group(
                    backend,
                    store=PrefixStore(f"model {self.token}", self.store),
                    rank=self.rank,
                    world_size=self.size,
                    timeout=timedelta(seconds=COLLECTIVE_S[backend]),
                )
                probe = torch.ones(1, device=device)
                dist.all_reduce(probe)  # NCCL connects at the first collective only
            with self._patience.within(PROBE_S, self._unreachable("a first sum does not end")):
                probe.item()
        except RuntimeError as error:  # of which torch has a class for some of the causes
            distributed_c10d._world.group_count = 0  # ranks of one number meet, and torch counts attempts in vain
            raise ModelNotUsable(self._unreachable(_first_line(error))) from error

    def _unreachable(self, reason: str) -> str:
        return (
            f"all ranks reached rank 0 at {':'.join(map(str, self.met_at))}, but rank {self.rank} of {self.size}"
            f" does not reach the others over {self.backend}; name the network that they share in"
            f" {_INTERFACES[self.backend]} (a name that `ip addr` lists) of every rank, and let their machines reach"
            f" each other on all ports: {reason}"
        )

    @abstractmethod
    def compare(self, facts: Mapping[str, str]) -> None:
        """Of this rank, by their names; all ranks call it. Raises `ModelNotUsable`, which ends all, where they differ:
        shares of two models would compute nonsense together, and say nothing of it."""

    @abstractmethod
    def _give_up(self, why: str) -> None:
        """Ends this rank, of which a thread waits for ever."""

    @abstractmethod
    def _tell(self, failure: str) -> None:
        """The other ranks: what failed here, or nothing. Waits for all of them, and raises where one has failed."""


# -- rank 0 -----------------------------------------------------------------------------------------------------------


class Leader(Group):
    """Rank 0's side. Every loss ends all ranks: nothing of a pass that some have run and others have not is of use.

    Args:
        on_lost: told once, from any thread, when a rank is lost.
    """

    def __init__(self, size: int, store: Store, on_lost: Callable[[DeviceLost], None]) -> None:
        super().__init__(0, size, store)
        self.loss: DeviceLost | None = None
        self._on_lost = on_lost
        self._losing = threading.Lock()
        self._links: dict[int, Link] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.least_free: int | None = None
        """Bytes that the other rank with the least room on its GPU has free, when all have loaded; None: on a CPU."""
        self._answers: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()

    def start(self, order: RankOrder, port: int) -> None:
        """Starts the other ranks on this machine, as `torchrun` would."""
        words = (sys.executable, "-m", "slipstream.engine.parallel.follower", json.dumps(asdict(order)))
        where = {"MASTER_ADDR": _LOCALHOST, "MASTER_PORT": str(port), "WORLD_SIZE": str(self.size)}
        for rank in range(1, self.size):
            environ = {**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": _local(order, rank)}
            self._processes[rank] = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL)

    def meet(self, host: str) -> None:
        """Waits for every other rank's connection; `host` is where they find this machine. Raises `ModelNotUsable`."""
        self.token = token = secrets.token_hex(16)
        with _listen(host) as listener:
            self.met_at = (host, listener.getsockname()[1])
            self.store.set("leader", json.dumps([*self.met_at, token]))
            listener.settimeout(0.2)
            deadline = time.monotonic() + JOIN_S
            while missing := set(range(1, self.size)) - set(self._links):
                self._check_started(missing, deadline)
                try:
                    end, _ = listener.accept()
                except TimeoutError:
                    continue
                self._greet(Link(end), token)

    def _check_started(self, missing: set[int], deadline: float) -> None:
        for rank, process in self._processes.items():
            if process.poll() is not None:
                raise ModelNotUsable(f"rank {rank} of {self.size} ended with {_status(process)} while it was starting")
        if time.monotonic() > deadline:
            raise ModelNotUsable(
                f"{len(missing)} of {self.size} ranks did not come within {JOIN_S:g} s, first of them rank"
                f" {min(missing)}; start all of them, and let them reach this machine"
            )

    def _greet(self, link: Link, token: str) -> None:
        try:
            greeting = link.receive_greeting()
        except LinkLost:
            return link.close()
        rank, said = greeting.get("rank"), str(greeting.get("token"))
        is_known = secrets.compare_digest(said.encode(), token.encode())
        if not is_known or not isinstance(rank, int) or not 0 < rank < self.size or rank in self._links:
            return link.close()
        self._links[rank] = link
        read_all(
            link,
            lambda record: self._answers.put((rank, record)),
            lambda why: self._lose_rank(rank, why),
        )

    def connect(self, device: torch.device) -> None:
        try:
            super().connect(device)
        except ModelNotUsable as error:
            if self.loss is None:
                raise
            raise ModelNotUsable(f"{self.loss}; {error}") from error  # what it waited for in vain

    def compare(self, facts: Mapping[str, str]) -> None:
        for rank, theirs in enumerate(self.gather(facts)):
            for name, own in facts.items():
                if (other := theirs.get(name)) != own:
                    raise ModelNotUsable(
                        f"rank {rank} of {self.size} has another {name} than rank 0 ({other}, not {own}); start all"
                        " ranks with the same options, and give them the same files"
                    )

    def _tell(self, failure: str) -> None:
        """Hears all others, and has them go on. Of its own failure they hear by its end."""
        if failure:
            return
        self._hear("cannot take its share")
        self.publish("go")

    def ready(self) -> None:
        """Waits until all have loaded; from here on a rank that stands still is noticed at once."""
        answers = self._hear("has not loaded its share")
        self.least_free = min((answer["free"] for answer in answers if "free" in answer), default=None)
        silence_s = SILENCE_S[self.backend]
        for link in self._links.values():
            link.expect_signs(silence_s)
        self.publish("signs", silence_s=silence_s)

    def _hear(self, what: str) -> list[dict[str, Any]]:
        """One answer of each other rank."""
        answers = []
        for _ in range(1, self.size):
            rank, answer = self._answers.get()
            if "failed" in answer:
                raise ModelNotUsable(f"rank {rank} of {self.size} {what}: {answer['failed']}")
            answers.append(answer)
        return answers

    def gather(self, said: SaidT) -> list[SaidT]:
        """What each rank says, by rank: this one `said`, and the others as they come to the same point. Raises
        `DeviceLost`."""
        heard = {0: said}
        while len(heard) < self.size:
            rank, answer = self._answers.get()
            if "failed" in answer:
                raise self._lose(f"rank {rank} of {self.size}: {answer['failed']}")
            heard[rank] = answer["said"]
        return [heard[rank] for rank in range(self.size)]

    def publish(self, op: str, **fields: Any) -> None:
        """Has all followers do it. Raises `DeviceLost` when one is lost."""
        if self.loss is not None:
            raise self.loss
        for rank, link in self._links.items():
            try:
                link.send({"op": op, **fields})
            except LinkLost as error:
                self._lose_rank(rank, str(error))
        if self.loss is not None:
            raise self.loss

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what the followers do, too: an error of one rank leaves the others waiting for it. Raises
        `DeviceLost`."""
        try:
            yield
        except DeviceLost:
            raise
        except Exception as error:
            raise self._lose(f"rank 0: {error}") from error

    def close(self) -> None:
        """Ends the followers. Behind recorded steps over NCCL it would wait for their graphs."""
        self._on_lost = lambda error: None
        self._patience.close()
        self._end_all("the model was closed")
        if dist.is_initialized():
            dist.destroy_process_group()

    def _give_up(self, why: str) -> None:
        self._lose(f"rank 0: {why}")

    def _lose_rank(self, rank: int, why: str) -> None:
        self._answers.put((rank, {"failed": why}))
        process = self._processes.get(rank)
        if process is not None:
            time.sleep(0.05)  # its status comes with its end
            why = why if process.poll() is None else f"it ended with {_status(process)}"
        self._lose(f"rank {rank} of {self.size}: {why}")

    def _lose(self, why: str) -> DeviceLost:
        """The loss, which is the first one."""
        with self._losing:
            if self.loss is not None:
                return self.loss
            reason = why.partition("\n")[0]
            self.loss = loss = DeviceLost(f"a rank of the model was lost, and with it the model: {reason}")
        self._on_lost(loss)
        self._end_all(why)
        return loss

    def _end_all(self, why: str) -> None:
        """Without a word: who waits for another rank hears none. Their closed sockets end what waits for them here."""
        with self._losing:
            self.loss = self.loss or DeviceLost(why)
        for process in self._processes.values():
            process.kill()
            process.wait()
        for link in self._links.values():
            link.close()


def lead(order: RankOrder, on_lost: Callable[[DeviceLost], None]) -> Leader:
    """Rank 0 with all its followers there, started here or by `torchrun`. Raises `ModelNotUsable`."""
    if rank_here() is not None:
        return _met(Leader(order.size, store_of_torchrun(), on_lost), _host_for_others())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server((_LOCALHOST, 0)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(_LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    leader = Leader(order.size, store, on_lost)
    leader.start(order, port)
    os.environ["LOCAL_RANK"] = _local(order, 0)  # from which upstream takes this rank's device
    return _met(leader, _LOCALHOST)


def _met(leader: Leader, host: str) -> Leader:
    try:
        leader.meet(host)
    except BaseException:
        leader.close()
        raise
    return leader


def _host_for_others(environ: Mapping[str, str] = os.environ) -> str:
    """Where the other ranks of `torchrun` find this one."""
    are_here = environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]
    return _LOCALHOST if are_here else environ["MASTER_ADDR"]


def _listen(host: str) -> socket.socket:
    """On loopback, where all ranks are on this machine; else on all of its networks, as the store does. The name by
    which others find it may lead to loopback here, as on Debian, and an address of it may be none of its own."""
    if host == _LOCALHOST:
        return socket.create_server((host, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def store_of_torchrun() -> Store:
    """Where the ranks meet that the environment tells of. Raises `ModelNotUsable`."""
    try:
        store: Store = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))[0]
    except (ValueError, RuntimeError) as error:
        raise not_met(error) from error
    return store


def not_met(error: Exception) -> ModelNotUsable:
    address, port = (os.environ.get(name) or f"({name} is not set)" for name in ("MASTER_ADDR", "MASTER_PORT"))
    return ModelNotUsable(
        f"rank {rank_here()} does not meet the others at {address}:{port} within {JOIN_S:g} s; start all ranks with the"
        " same address and port (torchrun's --master-addr and --master-port), of a machine and a network that all of"
        f" them reach, and name that network in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME: {_first_line(error)}"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _local(order: RankOrder, rank: int) -> str:
    return order.devices[rank].partition(":")[2] or str(rank)


def _status(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return signal.Signals(-code).name if code < 0 else f"status {code}"
