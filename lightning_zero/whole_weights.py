"""Lightning's callbacks that copy, average or replace whole weights: their hooks run while the module has them.

In such a hook weights are at full precision as well: an average of 16-bit weights would stand still where their changes
are smaller than their digits, and weights that are swapped out and in again would come back rounded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)

from lightning_zero.standstill import Undo, replace_methods


class OnShards:
    """Base of a callback of one of these kinds that works on shards itself, and needs nothing whole."""

    def on_sharded(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called when a fit has sharded the module, before any callback's ``on_fit_start``."""


class Whole(Protocol):
    """Makes a context in which the module's weights are whole."""

    def __call__(self, writeback: bool, full_precision: bool) -> AbstractContextManager[None]: ...


class _Hooks(NamedTuple):
    """What the hooks of a callback need."""

    reading: tuple[str, ...] = ()
    writing: tuple[str, ...] = ()  # also through ``.data``
    updating: tuple[str, ...] = ()  # read where `should_update` says so, and leave the module alone otherwise
    full_precision: bool = True


_HOOKS: dict[type[Callback], _Hooks] = {
    WeightAveraging: _Hooks(
        reading=("setup",),
        writing=("on_validation_epoch_start", "on_validation_epoch_end", "on_train_end", "on_load_checkpoint"),
        updating=("on_train_batch_end", "on_train_epoch_end"),
    ),
    StochasticWeightAveraging: _Hooks(reading=("setup",), writing=("on_train_epoch_start", "on_train_end")),
    ModelPruning: _Hooks(
        reading=("setup", "on_save_checkpoint"),
        writing=("on_train_epoch_end", "on_validation_epoch_end", "on_train_end"),
    ),
    # It compares parameters with those of the optimizer, by value.
    BaseFinetuning: _Hooks(reading=("on_train_epoch_start",), full_precision=False),
}


def copies_module(callback: Callback) -> bool:
    """Whether the callback keeps a copy of the whole module."""
    return isinstance(callback, WeightAveraging | StochasticWeightAveraging) and not isinstance(callback, OnShards)


def hold(callback: Callback, whole: Whole) -> list[Undo]:
    """Run those hooks of the callback that need it inside ``whole``; returns what undoes it."""
    undo = []
    for kind, hooks in _HOOKS.items():
        if isinstance(callback, kind) and not isinstance(callback, OnShards):
            inside = functools.partial(whole, full_precision=hooks.full_precision)
            reading = [_within(callback, name, functools.partial(inside, writeback=False)) for name in hooks.reading]
            writing = [_within(callback, name, functools.partial(inside, writeback=True)) for name in hooks.writing]
            undo.append(replace_methods(callback, *reading, *writing))
            if hooks.updating:
                undo.append(_hold_updates(callback, hooks.updating, functools.partial(inside, writeback=False)))
    return undo


def _within(callback: Callback, name: str, context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """A method like the callback's own one of this name, which runs in a context."""
    own = getattr(callback, name)

    @functools.wraps(own)
    def hook(callback: Callback, *args: Any, **kwargs: Any) -> Any:
        with context():
            return own(*args, **kwargs)

    return hook


def _hold_updates(callback: Any, names: tuple[str, ...], whole: Callable[[], AbstractContextManager[None]]) -> Undo:
    """Gather only for the batches after which the average changes: most hooks of most batches do nothing."""
    running: list[ExitStack] = []
    own_should_update = callback.should_update

    @contextlib.contextmanager
    def until_the_end() -> Iterator[None]:
        with ExitStack() as stack:
            running.append(stack)
            try:
                yield
            finally:
                running.remove(stack)

    def should_update(callback: Any, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if not own_should_update(step_idx=step_idx, epoch_idx=epoch_idx):
            return False
        if running:
            running[-1].enter_context(whole())
        return True

    return replace_methods(callback, should_update, *(_within(callback, name, until_the_end) for name in names))
