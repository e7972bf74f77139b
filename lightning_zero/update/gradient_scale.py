"""The scale of the gradients at hand, between the loss that is multiplied by it and the update that divides by it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.advice import Case, advice
from lightning_zero.update.loss_scaler import LossScaler, StaticLossScaler


class GradientScale:
    """Knows which scale the gradients have, and tells the scaler what became of them.

    Attributes:
        value: that of all gradients that are held; the scaler's may already be the next one.
        adapts: whether there is a scaler, which must learn of overflows.

    Args:
        scaler: chooses the scales; ``None``: always 1.
    """

    def __init__(self, scaler: LossScaler | None) -> None:
        self.adapts = scaler is not None
        self._scaler = StaticLossScaler(1.0) if scaler is None else scaler
        self.value = self._scaler.scale
        self._loss_scaled = False  # since the last `end_backward`
        # Of the steps since the last backward: the scaler's state before them, and whether one overflowed.
        self._verdict: tuple[dict[str, float], bool] | None = None

    @property
    def next(self) -> float:
        """The scale of the next backward."""
        return self._scaler.scale

    @property
    def at_minimum(self) -> bool:
        """Tells whether no lower scale will be tried."""
        return self._scaler.at_minimum

    def adopt(self) -> float:
        """Before a backward: take the scaler's scale. Returns the factor that brings gradients that are held to it.

        Gradients are held across a change where another optimizer stepped in between, or where they were not cleared.
        """
        factor, self.value = self._scaler.scale / self.value, self._scaler.scale
        return factor

    def multiply(self, loss: Tensor) -> Tensor:
        """The scaled loss; in fp32 at least: the product may exceed what fp16 holds."""
        self._loss_scaled = True
        if self.value == 1.0:
            return loss
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.value

    def check_loss(self) -> None:
        """For a backward that user code started.

        Raises:
            RuntimeError: its loss cannot have been scaled.
        """
        if self._scaler.scale != 1.0 and not self._loss_scaled:
            raise RuntimeError(
                f"loss.backward() was called on a loss that is not scaled; the loss scale is {self._scaler.scale:g}. "
                f"Use engine.scale_loss(loss).backward(){advice(Case.LOSS_IS_NOT_SCALED, ', or ')}"
            )

    def begin_backward(self) -> None:
        """Steps from now on are on other gradients."""
        self._verdict = None

    def end_backward(self) -> None:
        """The next loss is another one."""
        self._loss_scaled = False

    def judge(self, found_inf: bool) -> bool:
        """Tell the scaler what became of a step.

        Steps of several optimizers on one backward are one verdict: an overflow of any of them counts, once.

        Returns:
            Whether this made the scale fall.

        Raises:
            LossScaleError: there is no lower scale.
        """
        fallen = False  # by the step of another optimizer on the same backward
        if self._verdict is not None:
            fallen = self._scaler.scale < self.value
            state, overflowed = self._verdict
            self._scaler.load_state_dict(state)
            found_inf = found_inf or overflowed
        self._verdict = (self._scaler.state_dict(), found_inf)
        self._scaler.update(found_inf)
        return self._scaler.scale < self.value and not fallen
