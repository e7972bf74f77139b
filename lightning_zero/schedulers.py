"""Learning-rate schedules counted in optimizer steps.

A resumed run continues at the saved step with its own arguments: with a larger ``total_steps`` the schedule is longer.
Its first step still uses the saved rate, and the optimizer's groups keep the saved base rates, peaks and momenta.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, ParamSpec

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lightning_zero.torch_private import SCHEDULE_OF_ONE_CYCLE

P = ParamSpec("P")
# DeepSpeed's names of arguments, with the names here.
_OF_DEEPSPEED = {
    "total_num_steps": "total_steps",
    "warmup_num_steps": "warmup_steps",
    "warmup_min_lr": "min_lr",
    "warmup_max_lr": "max_lr",
    "last_batch_iteration": "last_epoch",
}


def _takes_names_of_deepspeed(init: Callable[P, None]) -> Callable[P, None]:
    """Decorates a constructor so that it also accepts DeepSpeed's names of its arguments."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def renamed(*args: P.args, **kwargs: P.kwargs) -> None:
        for theirs, ours in _OF_DEEPSPEED.items():
            if theirs in kwargs and ours in known:
                if ours in kwargs:
                    raise TypeError(
                        f"{theirs}={kwargs[theirs]} is DeepSpeed's name of {ours}={kwargs[ours]}, which is given too: "
                        f"omit {theirs}, and set {ours}."
                    )
                kwargs[ours] = kwargs.pop(theirs)
        init(*args, **kwargs)

    return renamed


class _KeepsArguments(LRScheduler):
    """Leaves its arguments out of the saved state, and keeps its own when it loads state of torch's schedulers."""

    _arguments: ClassVar[frozenset[str]]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key not in self._arguments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key not in self._arguments})


class WarmupCosineLR(_KeepsArguments):
    """Linear warm-up to each group's learning rate, then a cosine to a fraction of it.

    Step t of the warm-up uses `lr * (t + 1) / (warmup_steps + 1)`, so that no step is lost to a rate of zero.

    Args:
        optimizer: The optimizer whose groups are scheduled.
        total_steps: Optimizer steps after which the minimum is reached; later steps use the minimum.
        warmup_steps: Steps of the warm-up, part of `total_steps`; 0 means none.
        min_lr_ratio: The minimum, as a fraction of each group's learning rate.
        last_epoch: Index of the last step taken; -1 starts a new schedule.

    Raises:
        ValueError: `warmup_steps` or `min_lr_ratio` is out of range.
    """

    _arguments = frozenset({"total_steps", "warmup_steps", "min_lr_ratio"})

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
        """The fraction of each group's learning rate that `step` uses."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr_ratio + cosine * (1.0 - self.min_lr_ratio)

    def get_lr(self) -> list[float | Tensor]:
        factor = self.factor(self.last_epoch)
        return [lr * factor for lr in self.base_lrs]


class WarmupLR(_KeepsArguments):
    """DeepSpeed's ``WarmupLR``: rises from a minimum to a maximum, which is kept.

    With `i` = max(0, t - 1), step t (the first is 0) uses `min_lr + (max_lr - min_lr) * g`, where g is
    `log(i + 1) / log(warmup_steps)` or `i / warmup_steps` while `i < warmup_steps`, and 1 afterwards. The log form
    reaches the maximum one step before the linear one.

    As in DeepSpeed, the first two steps use the minimum, because its schedule starts at -1 and g is 0 for `i = 0`:
    with `min_lr=0` they change no parameter (but do change the optimizer's state). A warm-up of one step counts as two.
    Unlike in DeepSpeed, an unknown `warmup_type` is an error, and `max_lr=None` means each group's own learning rate
    instead of the first group's. DeepSpeed's names of the arguments, `warmup_min_lr`, `warmup_max_lr` and
    `warmup_num_steps`, are accepted too, so that the `params` of its configuration can be used.

    Args:
        optimizer: The optimizer whose groups are scheduled.
        min_lr: Learning rate at the start.
        max_lr: Learning rate at the end of the warm-up; None: each group's own.
        warmup_steps: Optimizer steps of the warm-up, at least 1.
        warmup_type: `"log"`, which rises fast at first, or `"linear"`.
        last_epoch: Index of the last step taken; -1 starts a new schedule.

    Raises:
        ValueError: An argument is out of range or unknown.
    """

    _arguments = frozenset({"min_lr", "max_lr", "warmup_steps", "warmup_type", "total_steps"})

    @_takes_names_of_deepspeed
    def __init__(
        self,
        optimizer: Optimizer,
        min_lr: float = 0.0,
        max_lr: float | None = None,
        warmup_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps={warmup_steps} must be at least 1: without a warm-up, use no scheduler.")
        if warmup_type not in ("log", "linear"):
            raise ValueError(f"warmup_type={warmup_type!r} must be 'log' or 'linear'.")
        lowest = min(group["lr"] for group in optimizer.param_groups) if max_lr is None else max_lr
        if not 0.0 <= min_lr <= lowest:
            source = "the optimizer's lr" if max_lr is None else "max_lr"
            raise ValueError(f"min_lr={min_lr} must be at least 0 and at most {source}={float(lowest)}.")
        self.min_lr = min_lr
        self.max_lr = max_lr
        self.warmup_steps = max(2, warmup_steps)
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """The position of the learning rate of `step` between minimum and maximum, from 0 to 1."""
        index = max(0, step - 1)
        if index >= self.warmup_steps:
            return self.after_warmup(index)
        if self.warmup_type == "linear":
            return index / self.warmup_steps
        return math.log(index + 1) / math.log(self.warmup_steps)

    def after_warmup(self, index: int) -> float:
        """The factor for the index `i` (see the class), which is at least `warmup_steps`."""
        return 1.0

    def get_lr(self) -> list[float | Tensor]:
        factor = self.factor(self.last_epoch)
        highest = self.base_lrs if self.max_lr is None else [self.max_lr] * len(self.base_lrs)
        return [self.min_lr + (lr - self.min_lr) * factor for lr in highest]


class WarmupDecayLR(WarmupLR):
    """DeepSpeed's ``WarmupDecayLR``: the warm-up of `WarmupLR`, then a linear decay to the minimum.

    After the warm-up, g is `(total_steps - i) / (total_steps - warmup_steps)`, but at least 0. The minimum is reached
    at step `total_steps + 1`, because `i` lags one step behind. `max_lr=None` means each group's own learning rate; in
    DeepSpeed it is 0.001. A warm-up that ends after `total_steps` is an error; in DeepSpeed it is a warning.
    DeepSpeed's names of the arguments, such as `total_num_steps`, are accepted too.

    Args:
        optimizer: The optimizer whose groups are scheduled.
        total_steps: Optimizer steps of warm-up and decay together.
        min_lr: Learning rate at the start and at the end.
        max_lr: Learning rate at the end of the warm-up; None: each group's own.
        warmup_steps: Optimizer steps of the warm-up, at least 1.
        warmup_type: `"log"`, which rises fast at first, or `"linear"`.
        last_epoch: Index of the last step taken; -1 starts a new schedule.

    Raises:
        ValueError: An argument is out of range or unknown.
    """

    @_takes_names_of_deepspeed
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        min_lr: float = 0.0,
        max_lr: float | None = None,
        warmup_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        if total_steps <= (length := max(2, warmup_steps)):
            raise ValueError(
                f"A warm-up of {length} steps must be shorter than total_steps={total_steps}: "
                "lower warmup_steps or train for more steps."
            )
        self.total_steps = total_steps
        super().__init__(optimizer, min_lr, max_lr, warmup_steps, warmup_type, last_epoch)

    def after_warmup(self, index: int) -> float:
        return max(0.0, (self.total_steps - index) / (self.total_steps - self.warmup_steps))


class OneCycleLR(_KeepsArguments, lr_scheduler.OneCycleLR):
    """torch's ``OneCycleLR``, whose peak can be each group's own learning rate.

    The rate rises from `max_lr / div_factor` to `max_lr` and then falls to a small fraction of its initial value; the
    momentum (or the first beta) moves in the opposite direction. This is not DeepSpeed's ``OneCycle``.

    Args:
        optimizer: The optimizer whose groups are scheduled.
        total_steps: Optimizer steps of the cycle; a step after the last is an error.
        max_lr: The peak; None: each group's own learning rate.
        pct_start: Fraction of the cycle in which the rate rises.
        anneal_strategy: `"cos"` or `"linear"`.
        cycle_momentum: Cycle the momentum too; must be False for optimizers without momentum.
        base_momentum: The lowest momentum, at the peak.
        max_momentum: The highest momentum, at both ends.
        div_factor: The first rate is `max_lr / div_factor`.
        final_div_factor: The last rate is the first one divided by `final_div_factor`.
        three_phase: First fall symmetrically to the rise, then to the last rate.
        last_epoch: Index of the last step taken; -1 starts a new schedule.

    Raises:
        ValueError: `div_factor` or `final_div_factor` is not greater than 0, or torch refuses an argument.
    """

    _arguments = frozenset({"total_steps", *SCHEDULE_OF_ONE_CYCLE, "cycle_momentum", "use_beta1"})

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        max_lr: float | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        if div_factor <= 0 or final_div_factor <= 0:
            raise ValueError(f"div_factor={div_factor} and final_div_factor={final_div_factor} must be greater than 0.")
        super().__init__(
            optimizer,
            [group["lr"] for group in optimizer.param_groups] if max_lr is None else max_lr,
            total_steps=total_steps,
            pct_start=pct_start,
            anneal_strategy=anneal_strategy,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            three_phase=three_phase,
            last_epoch=last_epoch,
        )
