"""Checks, before a fit shards anything, whether its updates may begin in backward.

They may not where code runs after backward that could decide about the step or change its gradients: by then some
parameters are updated. Code that does so in a step without being found here gets an error in that step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_zero.integration.overridden import overrides
from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.update import why_not_in_backward

# Hooks that Lightning calls between the first gradient of a backward and the step.
_OF_MODULES = ("backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
_OF_CALLBACKS = ("on_after_backward", "on_before_optimizer_step")


def check(
    trainer: pl.Trainer, module: pl.LightningModule, optimizers: Sequence[Optimizer], precision: Precision
) -> None:
    """Refuse a fit whose updates cannot begin in backward.

    Raises:
        ValueError: it says why, and what to change.
    """
    for reason, remedy in _reasons(trainer, module, optimizers, precision):
        raise ValueError(f"update_in_backward=True: {reason}. {remedy}, or use update_in_backward=False")


def _reasons(
    trainer: pl.Trainer, module: pl.LightningModule, optimizers: Sequence[Optimizer], precision: Precision
) -> Iterator[tuple[str, str]]:
    """The reasons against it, each with a remedy."""
    name = type(module).__name__
    if not module.automatic_optimization:
        yield (
            f"{name} has automatic_optimization=False, and only its own code knows after which backward a step comes",
            "Use automatic optimization",
        )
    if trainer.gradient_clip_val:  # Lightning does not clip by 0
        yield (
            f"gradient_clip_val={trainer.gradient_clip_val!r} clips gradients when some parameters are updated already",
            "Use gradient_clip_val=None",
        )
    if isinstance(precision, ZeroPrecision) and precision.scaler is not None:
        yield (
            f"precision={precision.precision!r} has a {type(precision.scaler).__name__}, which skips overflowing steps",
            "Use a precision without a loss scaler, such as 'bf16-mixed'",
        )
    if (reason := why_not_in_backward(optimizers)) is not None:
        yield reason, "Use such an optimizer"
    for hook in _OF_MODULES:
        if overrides(module, hook):
            yield f"{name}.{hook} {_comes_late(hook)}", "Remove it"
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        for hook in _OF_CALLBACKS:
            if overrides(callback, hook):
                yield f"{type(callback).__name__}.{hook} {_comes_late(hook)}", "Remove the callback"


def _comes_late(hook: str) -> str:
    if hook == "backward":
        return "may change gradients after backward has updated some parameters"
    return "comes after backward, and may read or change gradients by which some parameters are updated already"
