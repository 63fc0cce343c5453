"""How long a stage may train, in steps or minutes, the learning rate that follows from it, and one update."""

import math
import time
from dataclasses import dataclass, field

import torch

from training.parallel import average_among_processes


@dataclass
class Budget:
    """Ends after `steps` steps if given (reproducible), otherwise after `minutes`; `progress` goes from 0 to 1."""

    minutes: float
    steps: int | None = None
    done_steps: int = 0
    progress: float = 0.0
    _started_s: float = field(default_factory=time.monotonic)

    def spent(self) -> float:
        """The share of the budget that this process has used once the present step is done."""
        if self.steps is not None:
            return (self.done_steps + 1) / self.steps
        return (time.monotonic() - self._started_s) / (60 * self.minutes)

    def step(self, progress: float) -> None:
        self.done_steps += 1
        self.progress = min(1.0, progress)


@dataclass
class Pace:
    """Learning-rate schedule: a short warm-up, then from `peak` down to `floor` along a cosine."""

    peak: float
    floor: float
    warmup_steps: int = 60

    def rate(self, budget: Budget) -> float:
        fall = 0.5 * (1 + math.cos(math.pi * budget.progress))
        warm = min(1.0, (budget.done_steps + 1) / self.warmup_steps)
        return warm * (self.floor + (self.peak - self.floor) * fall)


def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)


def apply_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor, pace: Pace, budget: Budget) -> None:
    """One update from the gradients of all processes, clipped to norm 1; they also agree on how far they are."""
    rate = pace.rate(budget)
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss.backward()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    progress = torch.tensor([budget.spent()], device=loss.device)
    average_among_processes([*gradients, progress])
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    budget.step(progress.item())
