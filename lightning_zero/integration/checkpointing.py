"""Checkpoints of the strategy: gives Lightning from shards the state that it saves, and loads state into shards."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero import checkpoint as _checkpoint
from lightning_zero.engine import Engine
from lightning_zero.integration import private
from lightning_zero.integration.advice import WEIGHTS_ALONE
from lightning_zero.integration.base import EngineStrategy
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.integration.precision import ZeroPrecision, unwrap
from lightning_zero.sharding import Group, Mesh
from lightning_zero.sharding.compiled import plain_names
from lightning_zero.sharding.sharded_init import usable_inside
from lightning_zero.update import Updater, decoded
from lightning_zero.version import __version__

WRITTEN_BY = "lightning_zero"  # the checkpoint's entry on the run that wrote it


class _GatheredState:
    """State for user code, which may save it on rank 0 alone: all of it is gathered there."""

    def of_module(self, engine: Engine) -> dict[str, Any]:
        return _checkpoint.full_on_first(_checkpoint.module_state_dict(engine), engine)

    def of_optimizer(self, engine: Engine, updater: Updater) -> dict[str, Any]:
        state = _checkpoint.full_on_first(_checkpoint.optimizer_state_dict(engine, updater), engine)
        return state if engine.placement.mesh.world.rank == 0 else {**state, "state": {}}


class _LazyState:
    """State for the Trainer's checkpoints, which all ranks write: tensors are read when they are written.

    Args:
        compact: whether 8-bit optimizer state stays in that form.
    """

    def __init__(self, compact: bool) -> None:
        self._compact = compact

    def of_module(self, engine: Engine) -> dict[str, Any]:
        return _checkpoint.module_state_dict(engine)

    def of_optimizer(self, engine: Engine, updater: Updater) -> dict[str, Any]:
        return _checkpoint.optimizer_state_dict(engine, updater, self._compact)


# What the strategy gives out. Lightning's connector asks it for a checkpoint's state by the same methods as user code.
_GATHERED = _GatheredState()
_STATE: ContextVar[_GatheredState | _LazyState] = ContextVar("state", default=_GATHERED)


class CheckpointingStrategy(EngineStrategy):
    """Part of :class:`~lightning_zero.ZeroStrategy`: saves, loads and removes checkpoints, and gives out state."""

    _background: _checkpoint.Background | None = None
    _rng: dict[str, Tensor] | None = None  # states that a resumed fit has not yet restored to its generators
    _begun: bool = False  # whether a training loop of this fit has run its hooks of the start
    _full_precision: _checkpoint.FullPrecision | None = None  # of values that were loaded before there was an engine
    _fitting: bool = False  # saves may run in the background

    # ------------------------------------------------------------------------------------------------------- saving

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: private.PathLike, storage_options: Any | None = None
    ) -> None:
        if self._mesh is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._is_ours:
            check_storage_options(storage_options)
        engines = [] if self._engine is None else [self._engine]
        if any(bucket.rounded for engine in engines for bucket in engine.buckets):
            rank_zero_warn(
                f"{filepath} will hold weights that were cast for evaluation ({self.precision_plugin.precision!r}), "
                "since no full-precision weights are kept before a fit. To keep them, use "
                "ZeroStrategy(evaluation_masters=True)"
            )
        _checkpoint.follow_first(engines)
        if self._background is not None:
            self._background.wait()
        checkpoint = {**checkpoint, WRITTEN_BY: self._written_by(self._mesh)}
        # Rank 0's hooks alone may have dropped the entry, and what it holds is written.
        world, resumable = self._mesh.world, "optimizer_states" in checkpoint
        if world.broadcast_object(resumable, "tell whether a run can resume from a checkpoint"):
            checkpoint[_checkpoint.rng.ENTRY] = _checkpoint.rng.gather(world, self.root_device)
        with _checkpoint.pickled_as_masters(engines):
            self._save(checkpoint, filepath, storage_options, world, engines)

    def _save(
        self,
        checkpoint: dict[str, Any],
        filepath: private.PathLike,
        storage_options: Any | None,
        world: Group,
        engines: Sequence[Engine],
    ) -> None:
        if self._is_ours:
            path, form = _checkpoint.locate_first(filepath, world), self.options.checkpoint_format
            save = _checkpoint.begin(form, checkpoint, path, engines, world, checksums=self.options.checksums)
            self._write(save, world)
            return
        warn_of_other_writer(self.checkpoint_io, filepath, self.options)
        _checkpoint.fetch_for_first(checkpoint, engines)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _write(self, save: _checkpoint.Save, world: Group) -> None:
        warn_of_nodes(save)
        if self._background is not None and not save.in_background:
            rank_zero_warn(
                f"training waits while rank 0 gathers and writes {save.path}: at a URL, and where ranks share no file "
                "system, async_save=True needs checkpoint_format='sharded'"
            )
        # Lightning requeues a job as soon as its SLURM checkpoint is there.
        beside = self._fitting and save.in_background and not save.path.name.startswith("hpc_ckpt_")
        if self._background is not None and beside:
            self._background.start(save, world)
        else:
            save.write(world)

    @override
    def remove_checkpoint(self, filepath: private.PathLike) -> None:
        # The checkpoint that is being written may be the one that replaces it.
        remove = functools.partial(self._remove, filepath)
        if self._background is None:
            remove()
        else:
            self._background.after(remove)

    def _remove(self, filepath: private.PathLike) -> None:
        path = _checkpoint.locate(filepath)
        if self._is_ours and isinstance(path, Path) and path.is_dir():
            if self.local_rank == 0:  # each node may have a file; if they share it, only one of them finds it
                with contextlib.suppress(FileNotFoundError):
                    _checkpoint.remove(path)
        else:
            super().remove_checkpoint(filepath)

    @property
    def _is_ours(self) -> bool:
        """Whether the user has not passed a ``CheckpointIO``, so that ours reads and writes checkpoints."""
        return type(self.checkpoint_io) is TorchCheckpointIO

    def _written_by(self, mesh: Mesh) -> dict[str, Any]:
        """The entry that describes the writing run; for information only."""
        precision = str(self.precision_plugin.precision)
        return self.options.record(__version__, mesh.world.size, mesh.shard.size, precision)

    # -------------------------------------------------------------------------------------------------------- state

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is None:
            return plain_names(super().lightning_module_state_dict())
        return _STATE.get().of_module(self.engine)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        updater = self._updater_of(unwrap(optimizer))
        return optimizer.state_dict() if updater is None else _STATE.get().of_optimizer(self.engine, updater)

    def _dump(self, connector: private.CheckpointConnector, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the connector's own ``dump_checkpoint``, and give it lazy tensors as state."""
        gathered = _STATE.set(_LazyState(self.options.checkpoint_state == "compact"))
        try:
            return type(connector).dump_checkpoint(connector, *args, **kwargs)
        finally:
            _STATE.reset(gathered)

    def _updater_of(self, optimizer: Optimizer) -> Updater | None:
        """The updater that drives ``optimizer``; ``None`` for the stand-in of a module that configures none."""
        return next((updater for updater in self.engine.updaters if updater.optimizer is optimizer), None)

    # ------------------------------------------------------------------------------------------------------ loading

    @override
    def load_checkpoint(self, checkpoint_path: private.PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        if not self._is_ours:
            return super().load_checkpoint(checkpoint_path, weights_only)
        if self._background is not None:
            self._background.wait()
        path = _checkpoint.locate(checkpoint_path)
        loaded = _checkpoint.load(path, self.world, weights_only is not False, self.options.checksums)
        if self._mesh is not None and (before := loaded.get(WRITTEN_BY)):
            now = self._written_by(self._mesh)
            changed = [
                f"{name.replace('_', ' ')} {before[name]} -> {now[name]}"
                for name in ("world_size", "shard_size", "stage", "precision")
                if name in before and before[name] != now[name]
            ]
            if changed:
                rank_zero_info(f"ZeroStrategy: resharding {checkpoint_path}: {', '.join(changed)}")
        # Their tensors, such as a learning rate, are kept after loading, and views would keep the file mapped.
        kept = ("lr_schedulers", _checkpoint.rng.ENTRY)
        return loaded | {entry: copy.deepcopy(loaded[entry]) for entry in kept if entry in loaded}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        if self._engine is not None and not self._engine.released and self._engine.module is module:
            if module.trainer.state.fn == TrainerFn.FITTING:
                self._engine.begin_training()  # for masters that are loaded next
            _checkpoint.load_module_state_dict(self._engine, checkpoint["state_dict"], strict)
            return
        assert isinstance(self.precision_plugin, ZeroPrecision)
        state = _checkpoint.state_for(module, checkpoint["state_dict"])
        self._full_precision = _checkpoint.FullPrecision()
        with usable_inside(module.parameters()), self._full_precision:
            if self.precision_plugin.policy.param_dtype == torch.float64:
                # Parameters get their dtype in `setup`; before it, loaded values would be rounded to the present dtype.
                module.double()
            super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)
        for value in state.values():
            if isinstance(value, Tensor):
                _checkpoint.give_back_pages(value)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint has {len(states)} optimizers, the module {len(self.optimizers)}; configure as many, "
                f"{WEIGHTS_ALONE}"
            )
        updaters = [self._updater_of(optimizer) for optimizer in self.optimizers]
        for load in (_checkpoint.check_optimizer_state_dict, _checkpoint.load_optimizer_state_dict):  # all or nothing
            for updater, state in zip(updaters, states, strict=True):
                if updater is not None:
                    load(self.engine, updater, state)
        self._rng = checkpoint.get(_checkpoint.rng.ENTRY)
        if self._rng and (note := _checkpoint.rng.note(self._rng, self.world_size)):
            rank_zero_info(f"ZeroStrategy: {note}")
        if self._begun:  # a search for a learning rate is over; what it goes back to begins no second time
            self._restore_rng()

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        self._begun = True
        trainer = self.lightning_module.trainer
        # The saving run had drawn for its set-up, hooks of the start and its first iterator before it saved.
        if self._restore_rng() and begins_epoch(trainer.fit_loop) and trainer.current_epoch > 0:
            private.renew_iterator(trainer.fit_loop)

    def _restore_rng(self) -> bool:
        """Restore the states that wait for it, once; tells whether there were any."""
        rng, self._rng = self._rng, None
        if rng is None or self._mesh is None:
            return False
        _checkpoint.rng.restore(rng, self._mesh.world.rank, self.root_device)
        return True


def check_storage_options(storage_options: Any | None) -> None:
    """Check on every rank the options for a ``CheckpointIO``, if the user has not passed one.

    Raises:
        TypeError: there are options.
    """
    if storage_options is not None:
        raise TypeError(
            f"nothing takes storage_options={storage_options!r}: the strategy writes checkpoints itself. Pass a "
            "CheckpointIO of your own that takes them, plugins=[...], or leave them out; for a URL set them in the "
            "configuration of fsspec"
        )


def warn_of_other_writer(writer: CheckpointIO, path: private.PathLike, options: StrategyOptions) -> None:
    """Warn that the user's ``CheckpointIO`` writes a checkpoint, if options of the strategy have no effect on it."""
    if options.checkpoint_format != "full" or options.async_save:
        rank_zero_warn(
            f"{type(writer).__name__} writes {path}. Therefore rank 0 gathers the whole checkpoint first, and training "
            "waits for it. checkpoint_format and async_save work only without your own CheckpointIO"
        )


def warn_of_nodes(save: _checkpoint.Save) -> None:
    """Warn that ranks do not see the same files, of which the user may not think when a run is to resume."""
    if save.spread:
        rank_zero_warn(
            "not all ranks share the file system of rank 0: there will be a folder on each node. Copy the files of "
            "all folders into each of them, or into one, before a run loads it"
        )
    if save.gathered:
        rank_zero_warn(
            f"not all ranks share the file system of {save.path} with rank 0. Therefore rank 0 gathers the whole "
            "checkpoint and writes it, which takes time and host memory. Save to a file system that all nodes share, "
            "or use checkpoint_format='sharded'"
        )


class FileCheckpointIO(TorchCheckpointIO):
    """Reads and writes files for other strategies, also with 8-bit state; for a folder its error says what to do."""

    @override
    def load_checkpoint(self, path: private.PathLike, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint.

        Raises:
            CheckpointError: for a folder.
        """
        if Path(path).is_dir():
            raise _checkpoint.CheckpointError(
                f"{path} is a folder, a sharded checkpoint, which this strategy cannot read. Write it as one file "
                f"first, `lightning-zero consolidate {path} one.ckpt`, and load that; or use a zero strategy"
            )
        loaded: dict[str, Any] = decoded(super().load_checkpoint(path, *args, **kwargs))
        return loaded


def begins_epoch(loop: private.FitLoop) -> bool:
    """Whether a starting loop has made its iterator for a new epoch, and not to continue in the middle of one."""
    if not loop.restarting or loop.restarted_on_epoch_start:
        return True
    after_last_batch = loop.epoch_loop.restarted_on_train_batch_end and loop.epoch_loop.batch_progress.is_last_batch
    return loop.restarted_mid_epoch and after_last_batch
