"""Finds user code that may read parameters between a step and the next forward, once per fit.

If there is none, stale parameters need not be gathered before the next forward needs them (see
:mod:`lightning_zero.sharding.refresh`).
"""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from typing_extensions import override

from lightning_zero.integration.overridden import overrides

# Hooks that run between a step and the next `training_step`, in every step.
_OF_DATA = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_OF_MODULES = (
    *("optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_train_batch_start"),
    *_OF_DATA,
    *("on_validation_model_zero_grad", "on_validation_model_eval"),
)
_OF_CALLBACKS = ("on_train_batch_end", "on_train_batch_start")
# These read no parameters in such hooks, or only through the strategy. A subclass may read them.
_HARMLESS = frozenset(
    (
        *(BackboneFinetuning, DeviceStatsMonitor, EarlyStopping, GradientAccumulationScheduler, LearningRateMonitor),
        *(ModelCheckpoint, ModelSummary, RichModelSummary, RichProgressBar, ThroughputMonitor, Timer, TQDMProgressBar),
    )
)


def reads_after_each_step(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether hooks may read parameters between a step and the next forward; in manual optimization all code may."""
    if not module.automatic_optimization or any(overrides(module, hook) for hook in _OF_MODULES):
        return True
    data: pl.LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None and any(overrides(data, hook) for hook in _OF_DATA):
        return True
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(
        overrides(callback, hook)
        for callback in callbacks
        if type(callback) not in _HARMLESS and not type(callback).__module__.startswith("lightning_zero.")
        for hook in _OF_CALLBACKS
    )


class Before(Callback):
    """Acts before all hooks that are called only after some steps, since it is the first callback.

    Args:
        act: the function to call.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._act()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._act()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._act()
