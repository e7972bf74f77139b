"""Replaces methods on objects of Lightning and of the user, for as long as a Trainer runs.

This serves three purposes that no hook can: schedulers and averaged weights ignore optimizer steps that were skipped on
overflow; callbacks that copy, average or replace full weights, and loggers that draw the module's graph, find the
module unsharded; and ``ModelCheckpoint`` and loggers take saves in the background into account. Each function returns a
function that undoes its change.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_zero.checkpoint import Background
from lightning_zero.integration import private
from lightning_zero.sharding import MixedPrecisionPolicy
from lightning_zero.storage import TensorStore

Skipped = Callable[[], bool]
Undo = Callable[[], None]


def replace_methods(target: Any, methods: dict[str, Callable[..., Any]]) -> Undo:
    """Replace the methods of these names on this object only; returns a function that undoes it."""
    before = {name: target.__dict__[name] for name in methods if name in target.__dict__}
    for name, function in methods.items():
        setattr(target, name, types.MethodType(function, target))

    def undo() -> None:
        for name in methods:
            target.__dict__.pop(name, None)
        target.__dict__.update(before)

    return undo


# ----------------------------------------------------------------------------------------------------- skipped steps
# Lightning steps schedulers and averages after every optimizer step, even if the step was skipped.


def skip_scheduler_steps(config: LRSchedulerConfig, skipped: Skipped) -> Undo:
    """Make the scheduler's ``step`` do nothing while ``skipped()``; one without ``step`` is left to user code."""
    if not hasattr(config.scheduler, "step"):
        return lambda: None
    own_step, own_state_dict = config.scheduler.step, config.scheduler.state_dict

    def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        return None if skipped() else own_step(*args, **kwargs)

    # torch's schedulers save their whole `__dict__`, which would include these two methods.
    def state_dict(scheduler: Any) -> dict[str, Any]:
        ours = (step, state_dict)
        return {name: value for name, value in own_state_dict().items() if getattr(value, "__func__", None) not in ours}

    return replace_methods(config.scheduler, {"step": step, "state_dict": state_dict})


def skip_average_updates(callback: WeightAveraging, skipped: Skipped) -> Undo:
    """Make the callback not update its average after a step while ``skipped()``."""
    own_should_update = callback.should_update

    def should_update(callback: WeightAveraging, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None and skipped():
            return False
        return own_should_update(step_idx=step_idx, epoch_idx=epoch_idx)

    return replace_methods(callback, {"should_update": should_update})


# ------------------------------------------------------------------------------------------------------ full weights
# In hooks of these callbacks weights are unsharded and at full precision. An average of 16-bit weights would not change
# if the changes of the weights are smaller than their last digit, and weights that are swapped out and in again would
# come back rounded.


class OnShards:
    """Base class of such callbacks that work on shards themselves, and need nothing unsharded."""

    def on_sharded(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called when a fit has sharded the module, before any callback's ``on_fit_start``."""

    def averages(self, trainer: pl.Trainer) -> Sequence[TensorStore | None]:
        """The stores of the second values of all weights that the callback will keep; ``None``: the optimizer's."""
        return ()


class Unsharded(Protocol):
    """Makes a context in which the module's weights are unsharded."""

    def __call__(self, writeback: bool, full_precision: bool) -> AbstractContextManager[None]: ...


class _Hooks(NamedTuple):
    """Names of a callback's hooks, by what they do with weights."""

    reading: tuple[str, ...] = ()
    writing: tuple[str, ...] = ()  # also through ``.data``
    updating: tuple[str, ...] = ()  # read weights only if `should_update` says so
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
    # It compares parameters with those of the optimizer by value.
    BaseFinetuning: _Hooks(reading=("on_train_epoch_start",), full_precision=False),
}


def copies_module(callback: Callback) -> bool:
    """Whether the callback keeps a copy of the full module."""
    return isinstance(callback, WeightAveraging | StochasticWeightAveraging) and not isinstance(callback, OnShards)


def unshard_for(callback: Callback, unsharded: Unsharded) -> list[Undo]:
    """Run the hooks of the callback that need full weights inside ``unsharded``."""
    undo = []
    for kind, hooks in _HOOKS.items():
        if isinstance(callback, kind) and not isinstance(callback, OnShards):
            inside = functools.partial(unsharded, full_precision=hooks.full_precision)
            to_read = functools.partial(inside, writeback=False)
            to_write = functools.partial(inside, writeback=True)
            reading = {name: _within(callback, name, to_read) for name in hooks.reading}
            writing = {name: _within(callback, name, to_write) for name in hooks.writing}
            undo.append(replace_methods(callback, reading | writing))
            if hooks.updating:
                undo.append(_unshard_for_updates(callback, hooks.updating, to_read))
    return undo


def compute_for_graph(logger: Logger, unsharded: Callable[[], AbstractContextManager[None]]) -> list[Undo]:
    """Let a logger that draws the graph of a run of the module do so inside ``unsharded``, which all ranks enter."""
    return [replace_methods(logger, {"log_graph": _within(logger, "log_graph", unsharded)})] if draws(logger) else []


def draws(logger: Logger) -> bool:
    """Whether a logger may run the module to draw its graph; of Lightning's loggers one does, if it is told to."""
    if isinstance(logger, TensorBoardLogger):
        return private.draws_graph(logger)
    method = type(logger).log_graph
    return method.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")


def average_in_full_precision(callback: Callback, policy: MixedPrecisionPolicy) -> list[Undo]:
    """Make the callback average 16-bit weights that get masters in fp32: it copies the module before they exist."""
    dtype = policy.param_dtype
    if not copies_module(callback) or dtype is None or dtype.itemsize != 2 or not policy.master_weights:
        return []
    assert isinstance(callback, WeightAveraging | StochasticWeightAveraging)
    own = callback.setup

    @functools.wraps(own)
    def setup(callback: Any, *args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        for parameter in () if (average := private.average_of(callback)) is None else average.parameters():
            if parameter.requires_grad and parameter.dtype.itemsize == 2:
                parameter.data = parameter.data.float()

    return [replace_methods(callback, {"setup": setup})]


def _within(target: Any, name: str, context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """Makes a method that runs the target's own method of this name in a context."""
    own = getattr(target, name)

    @functools.wraps(own)
    def hook(target: Any, *args: Any, **kwargs: Any) -> Any:
        with context():
            return own(*args, **kwargs)

    return hook


def _unshard_for_updates(
    callback: Any, names: tuple[str, ...], unsharded: Callable[[], AbstractContextManager[None]]
) -> Undo:
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
            running[-1].enter_context(unsharded())
        return True

    hooks = {name: _within(callback, name, until_the_end) for name in names}
    return replace_methods(callback, {"should_update": should_update, **hooks})


# -------------------------------------------------------------------------------------------------- background saves


def know_background(callback: ModelCheckpoint, background: Background) -> Undo:
    """Make the callback take a running save into account."""
    own_exists, own_link = callback.file_exists, private.link_method(callback)

    def file_exists(callback: ModelCheckpoint, filepath: private.PathLike, trainer: pl.Trainer) -> bool:
        background.wait()  # the next save would wait, too; a name that is being written counts as existing
        return own_exists(filepath, trainer)

    def link_checkpoint(callback: ModelCheckpoint, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        # A link to a file that is never completed must not replace a link to a complete one. No barrier is needed.
        alone = SimpleNamespace(is_global_zero=trainer.is_global_zero, strategy=SimpleNamespace(barrier=lambda: None))
        background.after(functools.partial(own_link, cast("pl.Trainer", alone), filepath, linkpath))

    return replace_methods(callback, {"file_exists": file_exists, private.LINK_CHECKPOINT: link_checkpoint})


def tell_after_saves(logger: Logger, background: Background) -> Undo:
    """Tell the logger of a save when the file is complete: one that uploads files would not find it before.

    It is told in the thread of the save, and gets a callback with the attributes at the time of the call.
    """
    own = logger.after_save_checkpoint
    taken: dict[int, tuple[ModelCheckpoint, dict[str, Any]]] = {}  # by id of a callback's attributes

    def after_save_checkpoint(logger: Logger, checkpoint_callback: ModelCheckpoint) -> None:
        attributes = vars(checkpoint_callback)  # it is a weak proxy, perhaps another one than before
        # One copy for all saves, since a logger may keep it and upload at the end. Nobody reads it now: the save before
        # has ended.
        copied, _ = taken.setdefault(id(attributes), (object.__new__(checkpoint_callback.__class__), attributes))
        vars(copied).update({k: dict(v) if isinstance(v, dict) else v for k, v in attributes.items()})
        background.after(functools.partial(own, copied))

    undo = replace_methods(logger, {"after_save_checkpoint": after_save_checkpoint})

    def undo_and_bring_up_to_date() -> None:
        undo()
        for copied, attributes in taken.values():
            vars(copied).update(attributes)

    return undo_and_bring_up_to_date
