"""How tensors get to a device without anybody's waiting for it."""

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """What lies on the CPU, on `device`, without a wait: from memory that the device reads by itself."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
