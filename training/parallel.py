"""Several training processes with one thread each: on a busy CPU they lose far less than one process with threads."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn


def run_processes(work: Callable[..., None], count: int, *arguments: object) -> None:
    """Calls `work(rank, *arguments)` in `count` processes that can average tensors among themselves; this is one."""
    if count == 1:
        return work(0, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = (Path(folder) / "meeting").as_uri()
        spawn(_join_and_work, (work, count, meeting_point, *arguments), nprocs=count)


def average_among_processes(tensors: list[torch.Tensor]) -> None:
    """Replaces each tensor, in place, by its mean over all processes; alone, does nothing."""
    if not distributed.is_initialized():
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))


def _join_and_work(rank: int, work: Callable[..., None], count: int, meeting_point: str, *arguments: object) -> None:
    distributed.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=count)
    try:
        work(rank, *arguments)
    finally:
        distributed.destroy_process_group()
