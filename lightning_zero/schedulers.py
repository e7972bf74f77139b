"""Learning-rate schedules counted in optimizer steps."""

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class WarmupCosineLR(LRScheduler):
    """Linear warm-up to each group's learning rate, then a cosine to a fraction of it.

    Step t of the warm-up uses `lr * (t + 1) / (warmup_steps + 1)`, so that no step is lost to a rate of zero.

    Args:
        optimizer: The optimizer whose groups are scheduled.
        total_steps: Optimizer steps after which the minimum is reached; it is kept from there on.
        warmup_steps: Steps of the warm-up, part of `total_steps`; 0 means none.
        min_lr_ratio: The minimum, as a fraction of each group's learning rate.
        last_epoch: Index of the last step taken; -1 starts anew.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        min_lr_ratio: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(
                f"warmup_steps={warmup_steps} must be at least 0 and less than total_steps={total_steps}: "
                "shorten the warm-up or train for more steps."
            )
        if not 0.0 <= min_lr_ratio <= 1.0:
            raise ValueError(f"min_lr_ratio={min_lr_ratio} must lie between 0 and 1: it multiplies lr.")
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """Fraction of the learning rate that `step` uses."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr_ratio + cosine * (1.0 - self.min_lr_ratio)

    def get_lr(self) -> list[float | Tensor]:
        factor = self.factor(self.last_epoch)
        return [lr * factor for lr in self.base_lrs]
