"""Gradient norm, loss scale and skipped steps for loggers and progress bar."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.integration.strategy import ZeroStrategy


class GradientMonitor(pl.Callback):
    """Logs numbers that every step computes anyway; it needs no communication.

    * ``grad_norm``: the global L2 norm of the unscaled gradients before clipping; ``inf`` or ``nan`` if the step was
      skipped. With several optimizers ``grad_norm/0``, ``grad_norm/1``, ...
    * ``loss_scale``: the scale of the next backward, if there is a loss scaler.
    * ``skipped_steps``: the number of skipped steps so far.

    Under another strategy than :class:`~lightning_zero.ZeroStrategy` it logs nothing.

    Args:
        prog_bar: also show them on the progress bar.
    """

    def __init__(self, prog_bar: bool = True) -> None:
        self.prog_bar = prog_bar

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not isinstance(strategy := trainer.strategy, ZeroStrategy):
            return
        values = {"skipped_steps": float(strategy.skipped_steps)}
        if isinstance(strategy.precision_plugin, ZeroPrecision) and strategy.precision_plugin.scaler is not None:
            values["loss_scale"] = strategy.loss_scale
        for number, optimizer in enumerate(trainer.optimizers):
            name = "grad_norm" if len(trainer.optimizers) == 1 else f"grad_norm/{number}"
            if (norm := strategy.last_grad_norm(optimizer)) is not None:
                values[name] = norm
        pl_module.log_dict(values, prog_bar=self.prog_bar, on_step=True, on_epoch=False)
