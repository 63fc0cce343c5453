"""A follower: loads its share of the model, and does with it what rank 0 says, until rank 0 is gone.

`python -m slipstream.engine.parallel.follower ORDER` is how rank 0 starts one on its own machine.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.engine.forward import ForwardPass, Runner
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.loading import load_model
from slipstream.engine.parallel.links import LinkLost
from slipstream.engine.parallel.member import Member, join
from slipstream.engine.parallel.ranks import RankOrder
from slipstream.engine.parallel.shards import join_heads, own_heads
from slipstream.engine.parallel.steps import MemberAccord
from slipstream.engine.segments import Additions, Rows
from slipstream.engine.static.pool import PooledCache
from slipstream.engine.static.step import Entry, StaticStep
from slipstream.engine.static.steps import StaticSteps
from slipstream.engine.static.windows import StepShape
from slipstream.engine.text_attention import TextAttention
from slipstream.engine.thread import finish_work
from slipstream.errors import ModelNotUsable, SlipstreamError
from slipstream.logs import configure_logs, get_logger, log_all_output
from slipstream.speculation.protocol import TokenTree

Record = Mapping[str, Any]
_PR_SET_PDEATHSIG = 1


class Follower:
    """One rank's caches and passes by the numbers that rank 0 gave them; a method for each of its records."""

    def __init__(self, runner: Runner, device: torch.device, member: Member) -> None:
        self._runner = runner
        self._device = device
        self._computing = member.computing if device.type == "cuda" else contextlib.nullcontext
        self._accord = MemberAccord(member)
        self._caches: dict[int, KVCache] = {}
        self._passes: dict[int, ForwardPass] = {}
        self._steps: StaticSteps | None = None

    def do(self, record: Record) -> None:
        """What the record says, together with all ranks."""
        for number in record.get("gone", ()):
            self._caches.pop(number, None)
            self._passes.pop(number, None)
        if self._runner.pool is not None:
            self._runner.pool.free(record.get("free", ()))
        with torch.inference_mode():
            getattr(self, f"_{record['op']}")(record)

    # -- caches -------------------------------------------------------------------------------------------------------

    def _new_cache(self, record: Record) -> None:
        self._caches[record["cache"]] = self._runner.new_cache(record["capacity"], record["num_text"])

    def _rollback(self, record: Record) -> None:
        self._caches[record["cache"]].rollback(record["length"])

    def _keep(self, record: Record) -> None:
        self._caches[record["cache"]].keep(record["num_before"], record["rows"])

    def _copy_from(self, record: Record) -> None:
        self._caches[record["cache"]].copy_from(self._caches[record["other"]], record["num_tokens"])

    def _copy_chosen(self, record: Record) -> None:
        among, chosen = self._receive(record["among"]), self._receive(record["chosen"])
        own = list(chosen[:, own_heads(chosen.shape[1])])
        self._caches[record["cache"]].copy_chosen(self._caches[record["other"]], among, own)

    def _clear(self, record: Record) -> None:
        self._caches[record["cache"]].clear()

    # -- passes -------------------------------------------------------------------------------------------------------

    def _start(self, record: Record) -> None:
        self._passes[record["number"]] = self._runner.start([self._rows(told) for told in record["rows"]])

    def _run(self, record: Record) -> None:
        self._runner.run([self._rows(told) for told in record["rows"]])

    def _run_layers(self, record: Record) -> None:
        running = self._passes[record["number"]]
        for told in record["recordings"]:
            video = self._receive(told["video"])
            joined = partial(join_heads, num_heads=self._runner.decoder.config.num_key_value_heads)
            observer = TextAttention.twin(told["order"], video, joined)
            running.observe(told["segment"], observer)
        running.run_layers(record["until"])

    def _keep_rows(self, record: Record) -> None:
        self._passes[record["number"]].keep_rows(self._receive(record["keep"]))

    def _conclude(self, record: Record) -> None:
        self._passes.pop(record["number"]).finish(last_row_only=record["last_row_only"])

    # -- static steps -------------------------------------------------------------------------------------------------

    def _open_steps(self, record: Record) -> None:
        options = {"width": record["width"], "accord": self._accord}
        with contextlib.suppress(ModelNotUsable):  # which rank 0 raises as well, and ends all
            self._steps = StaticSteps(self._runner, record["num_bytes"], record["num_axes"], **options)

    def _fix_widths(self, record: Record) -> None:
        self._opened_steps.fix_widths()

    def _prepare_steps(self, record: Record) -> None:
        self._opened_steps.prepare()

    def _make_step(self, record: Record) -> None:
        self._opened_steps.make(StepShape(*record["shape"]))

    def _drop_steps(self, record: Record) -> None:
        self._opened_steps.drop()

    def _reserve(self, record: Record) -> None:
        self._caches[record["cache"]].reserve(record["num_tokens"])

    def _trim(self, record: Record) -> None:
        self._caches[record["cache"]].trimmed(record["num_tokens"])

    def _run_step(self, record: Record) -> None:
        step, entries = self._step(record), [self._entry(told) for told in record["entries"]]
        with self._computing():
            step.run(entries)
            finish_work(self._device)  # so that what fails does so at its own record
        for told in record["entries"]:
            self._caches[told["cache"]].advance(len(told["token_ids"]))

    def _write_ahead(self, record: Record) -> None:
        step, entries = self._step(record), [self._entry(told) for told in record["entries"]]
        with self._computing():
            step.write_ahead(entries, record["num_tokens"], None)
        for told in record["entries"]:
            self._caches[told["cache"]].advance(record["num_tokens"])

    @property
    def _opened_steps(self) -> StaticSteps:
        assert self._steps is not None, "rank 0 has had them opened"
        return self._steps

    def _step(self, record: Record) -> StaticStep:
        step = self._opened_steps.step(StepShape(*record["shape"]))
        assert step is not None, "rank 0 takes those that all ranks have"
        return step

    def _entry(self, told: Record) -> Entry:
        cache = self._caches[told["cache"]]
        assert isinstance(cache, PooledCache) and cache.extent is not None, "its rows lie in the pool"
        assert (cache.extent.start, cache.length) == (told["start"], told["past"]), "as at rank 0"
        return Entry(cache.extent, told["past"], told["token_ids"], told["positions"], _tree(told))

    # -- what is told -------------------------------------------------------------------------------------------------

    def _rows(self, told: Record) -> Rows:
        hidden, positions, *additions = map(self._receive, told["tensors"])
        return Rows(
            self._caches[told["cache"]],
            hidden,
            positions,
            tree=_tree(told),
            additions=Additions(additions[0], tuple(additions[1:])) if additions else None,
        )

    def _receive(self, described: Record) -> Tensor:
        empty = torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]), device=self._device)
        dist.broadcast(empty, src=0)
        return empty


def _tree(told: Record) -> TokenTree | None:
    fields = told.get("tree")
    return None if fields is None else TokenTree(**{name: _tupled(value) for name, value in fields.items()})


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def follow(order: RankOrder) -> None:
    """Serves rank 0 until it is gone, which ends the process. Raises `SlipstreamError`, and whatever a pass does."""
    member: Member = join(order)
    # Who stops all ranks at once, as torchrun does, has rank 0 end its captions; the others end with its connection.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(order.threads)
    runner = load_model(
        order.model,
        dtype=order.dtype,
        device=order.devices[member.rank],
        attention=order.attention,
        strict_width=order.strict_width,
        group=member,
    ).runner
    gc.collect()  # the vision tower, which rank 0 alone needs
    device = torch.device(order.devices[member.rank])
    if device.type == "cuda":
        torch.cuda.empty_cache()
    follower = Follower(runner, device, member)
    member.ready(device)
    get_logger().info("rank.ready", rank=member.rank, size=member.size, device=str(device), pid=os.getpid())
    while True:
        follower.do(member.records.get())


def run_follower(told: Callable[[], RankOrder]) -> NoReturn:
    """The body of a follower's process. Exits with the status of what went wrong; rank 0 ends it without a word."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for rank 0, which stops in good order
    status = 1
    try:
        follow(told())
    except SlipstreamError as error:
        status = error.exit_code
        get_logger().error("rank.failed", error=str(error))
    except LinkLost as error:
        get_logger().error("rank.failed", error=str(error))
    except Exception:
        get_logger().exception("rank.failed")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # also where another thread waits for a rank that is gone


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log_all_output()
    configure_logs("target")
    order = json.loads(sys.argv[1])
    run_follower(lambda: RankOrder(**order | {"devices": tuple(order["devices"])}))


if __name__ == "__main__":
    main()
