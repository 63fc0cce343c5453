"""Waiting for a device. CUDA works behind the host's back: what is not waited for seems to take no time, and whatever
reads a result next pays for it. The services time their blocks of work and share the model by these times."""

import torch


def finish_work(device: torch.device) -> None:
    """Returns when `device` has done what this thread has given it. On a CPU that is at once."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
