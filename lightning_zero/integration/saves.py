"""Saves of a run that fails.

All ranks save together, at the same place of the training. But an error may come to one of them alone, or to each at
another place. A rank that began to save there would wait for ranks that wait for it in the training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint

from lightning_zero.integration.overridden import overrides
from lightning_zero.integration.patches import Undo, replace_methods


class Refusal(Protocol):
    """The error that ends a run, which can say why the run cannot be saved then."""

    def why_no_save(self, trainer: pl.Trainer) -> str:
        """Say why nothing can be saved now; empty if it can."""


def guard_exceptions(trainer: pl.Trainer, failed: Callable[[BaseException], Refusal]) -> list[Undo]:
    """Have callbacks save a run that fails only where all ranks do so, and tell the other ranks of the error before.

    Args:
        trainer: that runs.
        failed: makes the failure of the run, or returns the one that it has made of this error.

    Returns:
        What undoes it.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [_guard(callback, failed) for callback in callbacks if overrides(callback, "on_exception")]


def _guard(callback: Callback, failed: Callable[[BaseException], Refusal]) -> Undo:
    own = callback.on_exception

    def on_exception(
        callback: Callback, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        failure = failed(exception)
        if not _saves(callback):
            own(trainer, pl_module, exception)
        elif reason := failure.why_no_save(trainer):
            exception.add_note(
                f"{type(callback).__name__} has saved nothing: {reason}, which ModelCheckpoint(every_n_train_steps=n) "
                "writes every n steps"
            )
        else:
            try:
                own(trainer, pl_module, exception)
            except Exception as error:  # noqa: BLE001  (raised here, it would hide the other one and stop the teardown)
                exception.add_note(f"{type(callback).__name__} could not save: {error!r}")

    return replace_methods(callback, {"on_exception": on_exception})


def _saves(callback: Callback) -> bool:
    """Whether the callback saves a run that fails."""
    on_exception = isinstance(callback, ModelCheckpoint) and callback.save_on_exception
    return on_exception or isinstance(callback, OnExceptionCheckpoint)
