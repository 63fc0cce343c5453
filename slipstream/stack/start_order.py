"""Which services of a stack on one machine start together, and which after others."""

from collections.abc import Sequence

DOORS = ("gateway", "front")
ONE_GPU = (
    "target and draft share a GPU, which they use in turns unless CUDA's MPS runs, so that a draft may make captions"
    " slower; --draft-device gives it another one"
)


def start_groups(names: Sequence[str], target_devices: Sequence[str], draft_devices: Sequence[str]) -> list[list[str]]:
    """The services, one group after the other: what the doors lead to comes before them. Target and draft of one GPU
    do not start together: each takes a share of the memory that it finds free, and would take the other's.

    Args:
        names: of all services.
        target_devices: of all shares of the target; the draft's may be one of them.
    """
    doors = [name for name in names if name in DOORS]
    behind = [name for name in names if name not in doors]
    shared = set(map(_gpu, target_devices)) & set(map(_gpu, draft_devices))
    if "draft" in behind and any(device.startswith("cuda") for device in shared):
        return [[name for name in behind if name != "draft"], ["draft"], doors]
    return [behind, doors]


def _gpu(device: str) -> str:
    """Torch's "cuda" is the first."""
    return "cuda:0" if device == "cuda" else device
