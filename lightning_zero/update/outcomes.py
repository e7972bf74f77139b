"""The outcomes of optimizer steps. A step is taken, or skipped on all ranks because a gradient is not finite."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from torch.optim import Optimizer

from lightning_zero.advice import Case, advice
from lightning_zero.update.gradient_scale import GradientScale
from lightning_zero.update.loss_scaler import LossScaleError


class StepOutcome(NamedTuple):
    """The outcome of an optimizer's last step."""

    grad_norm: float  # global L2 norm of the unscaled, averaged gradients before clipping; may be inf or nan
    skipped: bool  # whether the step was skipped on all ranks


class SkippedStepsError(RuntimeError):
    """Raised when too many steps of an optimizer in a row were skipped, so that nothing is trained any more."""


class StepOutcomes:
    """Notes the outcome of each step. Reports skips to the loss scaler, warns of them, and raises after too many.

    All ranks note the same outcomes, so that they warn and raise together.

    Attributes:
        skipped: number of skipped steps. A run that is resumed continues the count, while warnings count the run's own.

    Args:
        scale: the scale of the gradients, with its scaler.
        limit: number of skips of one optimizer in a row at which to raise an error; ``None``: never. Skips above the
            scaler's smallest scale do not count, because the scaler then looks for a lower scale.
        warns: whether this rank is the one that warns.
    """

    def __init__(self, scale: GradientScale, limit: int | None, warns: bool) -> None:
        self.skipped = 0
        self._scale = scale
        self._limit = limit
        self._warns = warns
        self._last: dict[int, StepOutcome] = {}  # by id of the optimizer
        self._taken: Counter[int] = Counter()  # by id of the optimizer: steps since `forget`
        self._in_a_row: Counter[int] = Counter()  # by id of the optimizer: skips that no lower scale could prevent
        self._steps = self._skips = 0  # since `forget`; `skipped` may come from a checkpoint

    def forget(self) -> None:
        """Begin anew with other optimizers. Only :attr:`skipped` is kept."""
        self._last.clear()
        self._taken.clear()
        self._in_a_row.clear()
        self._steps = self._skips = 0

    def last(self, optimizer: Optimizer) -> StepOutcome | None:
        """The outcome of the last step of ``optimizer``; ``None`` before its first step."""
        return self._last.get(id(optimizer))

    def taken(self, optimizer: Optimizer) -> int:
        """The number of steps of ``optimizer`` since :meth:`forget` that were taken."""
        return self._taken[id(optimizer)]

    def counts(self) -> tuple[int, int]:
        """The number of steps since :meth:`forget`, and the number of those that were skipped."""
        return self._steps, self._skips

    def take(self, optimizer: Optimizer, grad_norm: float) -> None:
        """Note a step that is taken."""
        self._steps += 1
        self._last[id(optimizer)] = StepOutcome(grad_norm, skipped=False)
        self._taken[id(optimizer)] += 1
        self._in_a_row[id(optimizer)] = 0

    def skip(self, optimizer: Optimizer, grad_norm: float, nonfinite_names: Callable[[], str]) -> None:
        """Note a step that is skipped, and tell the loss scaler.

        Args:
            optimizer: the optimizer whose step is skipped.
            grad_norm: the norm of its gradients.
            nonfinite_names: gives the names of the gradients that are not finite. It is collective, and is called on
                all ranks or on none.

        Raises:
            LossScaleError: gradients overflow at the smallest loss scale.
            SkippedStepsError: too many steps in a row were skipped.
        """
        self._steps += 1
        self._last[id(optimizer)] = StepOutcome(grad_norm, skipped=True)
        self.skipped += 1
        self._skips += 1
        try:
            falls = self._scale.judge(found_inf=True)
        except LossScaleError as error:
            raise LossScaleError(f"{error}. Not finite: the gradient of {nonfinite_names()}") from None
        if falls:
            self._warn(
                f"gradients overflowed: the loss scale falls from {self._scale.value:g} to {self._scale.next:g} "
                f"(steps skipped so far: {self._skips})"
            )
        elif self._scale.at_minimum:  # no lower scale can help, so the data or the model must be the cause
            self._in_a_row[id(optimizer)] += 1
            name = type(optimizer).__name__
            if self._in_a_row[id(optimizer)] == self._limit:
                raise SkippedStepsError(
                    f"{self._limit} steps of {name} in a row were skipped on all ranks: inf or nan in the gradient of "
                    f"{nonfinite_names()}. Nothing is trained any more. Look at the data and the loss of these steps, "
                    f"or lower the learning rate{advice(Case.SKIPPED_TOO_OFTEN, '; ')}"
                )
            # Warnings become rarer, since every step may be skipped.
            if self._skips & (self._skips - 1) == 0:
                self._warn(
                    f"skipped a step of {name} on all ranks: inf or nan in the gradient of {nonfinite_names()} "
                    f"(steps skipped so far: {self._skips}; the next warning comes when they are twice as many)"
                )

    def _warn(self, message: str) -> None:
        if self._warns:
            warnings.warn(message, stacklevel=6)
