"""How tensors get to a device without anybody's waiting for it."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """What lies on the CPU or there already, on `device`, without a wait: from memory that it reads by itself."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    # Pinned memory has the tensor's strides: of one row that was expanded to several, torch refuses to write all.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
