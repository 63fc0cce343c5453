"""A GPU that is not there: torch's CUDA device in a process without one, which computes on the CPU and is as strict.

What a test on the CPU cannot see, since there all tensors are at one place and are there at once, fails here as it
would on a GPU:

- tensors of host and device do not mix, and a copy from one to the other that nobody waits for has not been made until
  somebody does: what is read too early is garbage, and host memory that changes too early is an error;
- a CUDA graph computes nothing while it is recorded, waits for nothing and takes nothing from memory not pinned;
  its replays take the same tensors, with every number of the host's as it was, and spoil what an earlier graph of the
  same pool has left in memory that was free when this one was recorded;
- memory that nobody has written holds NaN;
- after a failed assert every call fails.

Nothing here is as fast or as large as a GPU, or rounds like one. Kernels that torch has for CUDA alone are computed by
definition (`kernels`). `install` is for a process of its own; `python -m tests.pretended_gpu` runs another program so,
with all processes that it starts. It takes torch's CPU build: one for CUDA asks the driver itself, in C++.
"""

from tests.pretended_gpu.process import install, is_installed

__all__ = ["install", "is_installed"]
