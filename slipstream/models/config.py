"""What every process that owns a model can be told at start: which model, where, and on how many threads."""

import os
import sys
from dataclasses import dataclass

from slipstream.config import between, one_of, option
from slipstream.errors import InvalidConfig
from slipstream.logs import LEVELS
from slipstream.models.base import VideoLM
from slipstream.models.memory import MIB, available_bytes
from slipstream.rpc.security import WireOptions


@dataclass(frozen=True, kw_only=True)
class ModelServiceConfig(WireOptions):
    """Options of a model service."""

    model: str = option("checkpoint: a directory, or a hub id")
    listen: str = option("address to serve on: HOST:PORT, port 0 for any, or unix:/path")
    device: str = option("torch device of the weights", default="cpu")
    dtype: str = option(
        "weights are converted to this type", default="float32", check=one_of("float32", "bfloat16", "float16")
    )
    attention: str = option("attention kernel: auto, matmul, sdpa or flash", default="auto")
    threads: int = option("torch threads of the model; 0 leaves the choice to torch", default=0, check=between(0, 1024))
    cpu: int = option("core to run on; -1 leaves the choice to the system", default=-1, check=between(-1, 4095))
    max_sessions: int = option("captions served at once", default=16, check=between(1, 4096))
    kv_budget_mb: int = option(
        "MiB for keys and values of all captions; 0 takes a share of the memory that is available at start",
        default=0,
        check=between(0, 2**30),
    )
    replay: str = option(
        "for benchmarks: passes last as long as in this table of a device, see slipstream/models/device_times.py",
        default="",
    )
    replay_speed: float = option("divides all times of --replay", default=1.0, check=between(0.001, 1000))
    log_level: str = option("least severe log event", default="info", check=one_of(*LEVELS))

    @property
    def num_threads(self) -> int:
        """Threads for torch: as told, or the cores this process may run on."""
        return self.threads or len(os.sched_getaffinity(0))

    def kv_budget(self, model: VideoLM, share: float, set_aside_bytes: int = 0) -> int:
        """Bytes for keys and values: as told, or `share` of what is available on the model's device beside
        `set_aside_bytes`."""
        if self.kv_budget_mb:
            return self.kv_budget_mb * MIB
        return max(0, int(share * (available_bytes(model.info.device) - set_aside_bytes)))

    def pin(self) -> None:
        """Ties the process to its core, if one was named. Raises `InvalidConfig` when there is no such core."""
        if self.cpu < 0:
            return
        if sys.platform != "linux":
            raise InvalidConfig("--cpu is supported on Linux only")
        try:
            os.sched_setaffinity(0, {self.cpu})
        except OSError:
            raise InvalidConfig(f"--cpu {self.cpu}: this machine has no such core for us") from None
