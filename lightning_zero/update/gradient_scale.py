"""The scale of the current gradients: the loss is multiplied by it before, the update divides by it afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.advice import Case, advice
from lightning_zero.update.loss_scaler import LossScaler, StaticLossScaler


class SharedScaler:
    """A loss scaler of one or more engines, which tell it of overflows.

    Steps of several optimizers after one backward count as one: as an overflow if any of them overflowed. The
    optimizers may belong to several engines, since one backward may run through the modules of all of them.

    Attributes:
        scaler: the loss scaler.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        # The state before the steps since the last backward, and whether one of them overflowed.
        self._verdict: tuple[dict[str, float], bool] | None = None

    def begin_backward(self) -> None:
        """Note that steps from now on use other gradients."""
        self._verdict = None

    def judge(self, found_inf: bool, scale: float) -> bool:
        """Tell the scaler whether the gradients of a step overflowed.

        Args:
            found_inf: whether a gradient was not finite, on any rank.
            scale: of the gradients.

        Returns:
            Whether this call made the scale fall.

        Raises:
            LossScaleError: there is no lower scale.
        """
        fallen = False  # whether the step of another optimizer after the same backward made the scale fall
        if self._verdict is not None:
            fallen = self.scaler.scale < scale
            state, overflowed = self._verdict
            self.scaler.load_state_dict(state)
            found_inf = found_inf or overflowed
        self._verdict = (self.scaler.state_dict(), found_inf)
        self.scaler.update(found_inf)
        return self.scaler.scale < scale and not fallen


class GradientScale:
    """Keeps the scale that the gradients of an engine have, and tells the scaler whether they overflowed.

    Attributes:
        value: the scale of all gradients that are held. The scaler may already have the next scale.
        adapts: whether there is a scaler, which must be told of overflows.

    Args:
        scaler: chooses the scales; ``None``: the scale is always 1. Engines with one scaler need one ``SharedScaler``.
    """

    def __init__(self, scaler: LossScaler | SharedScaler | None) -> None:
        self.adapts = scaler is not None
        if not isinstance(scaler, SharedScaler):
            scaler = SharedScaler(StaticLossScaler(1.0) if scaler is None else scaler)
        self._shared, self._scaler = scaler, scaler.scaler
        self.value = self._scaler.scale
        self._loss_scaled = False  # since the last `end_backward`

    @property
    def next(self) -> float:
        """The scale of the next backward."""
        return self._scaler.scale

    @property
    def at_minimum(self) -> bool:
        """Tells whether the scaler will try no lower scale."""
        return self._scaler.at_minimum

    def adopt(self) -> float:
        """Take over the scaler's scale, before a backward.

        Gradients may be held while the scale changes, if another optimizer stepped in between or if they were not
        cleared.

        Returns:
            The factor by which the gradients that are held must be multiplied to have the new scale.
        """
        factor, self.value = self._scaler.scale / self.value, self._scaler.scale
        return factor

    def multiply(self, loss: Tensor) -> Tensor:
        """The scaled loss. Unless the scale is 1 it is at least fp32: fp16 might overflow."""
        self._loss_scaled = True
        if self.value == 1.0:
            return loss
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.value

    def check_loss(self) -> None:
        """Check a backward that user code has started.

        Raises:
            RuntimeError: the loss scale is not 1, and no loss was scaled since the last backward.
        """
        if self._scaler.scale != 1.0 and not self._loss_scaled:
            raise RuntimeError(
                f"loss.backward() was called on a loss that is not scaled; the loss scale is {self._scaler.scale:g}. "
                f"Use engine.scale_loss(loss).backward(){advice(Case.LOSS_IS_NOT_SCALED, ', or ')}"
            )

    def begin_backward(self) -> None:
        """Note that steps from now on use other gradients."""
        self._shared.begin_backward()

    def end_backward(self) -> None:
        """Note that the loss has been used: the next backward needs another scaled loss."""
        self._loss_scaled = False

    def judge(self, found_inf: bool) -> bool:
        """Tell the scaler whether the gradients of a step overflowed; see :meth:`SharedScaler.judge`."""
        return self._shared.judge(found_inf, self.value)
