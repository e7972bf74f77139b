"""Checkpoints of Fabric: sharded modules and optimizers, beside other state of user code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero import checkpoint as _checkpoint
from lightning_zero.checkpoint.folder_reader import OF_TRAINER
from lightning_zero.integration import private
from lightning_zero.integration.checkpointing import (
    WRITTEN_BY,
    check_storage_options,
    warn_of_nodes,
    warn_of_other_writer,
)
from lightning_zero.integration.fabric.base import EnginesStrategy
from lightning_zero.sharding import Group, Mesh
from lightning_zero.version import __version__

SCALER = "loss_scaler"  # key of the loss scaler's running state, in the entry that describes the writing run


class CheckpointingStrategy(EnginesStrategy):
    """Part of :class:`~lightning_zero.ZeroFabricStrategy`: saves and loads, and gives out state."""

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The module's state: full and at full precision on rank 0, elsewhere without sharded tensors. Collective."""
        engine = self._engine_with(module)
        if engine is None:
            return super().get_module_state_dict(module)
        return _checkpoint.full_on_first(_checkpoint.module_state_dict(engine), engine)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, full on rank 0; elsewhere ``state`` is empty. Collective."""
        if (found := self._updater_of(optimizer)) is None:
            return super().get_optimizer_state(optimizer)
        full = _checkpoint.full_on_first(_checkpoint.optimizer_state_dict(*found), found[0])
        return full if self.is_global_zero else {**full, "state": {}}

    @override
    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        engine = self._engine_with(module)
        if engine is None:
            super().load_module_state_dict(module, _checkpoint.state_for(module, state_dict), strict)
        else:
            _checkpoint.load_module_state_dict(engine, state_dict, strict)

    @override
    def save_checkpoint(
        self,
        path: private.PathLike,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save modules, optimizers and other state; each rank writes its part. Collective.

        Args:
            path: of the file, or of the folder with ``checkpoint_format="sharded"``.
            state: objects by name; values may be lists of modules or optimizers.
            storage_options: for a ``CheckpointIO`` of the user's, which writes on rank 0 alone.
            filter: functions by name of an entry, which say which of its items to save; an entry that is no dictionary
                has none, and is saved. Reading the values of a sharded item gathers it; do this on all ranks.

        Raises:
            CheckpointError: a rank has failed; raised on all ranks.
            TypeError: there are storage options and no ``CheckpointIO`` of the user's.
        """
        if self._mesh is None:
            raise RuntimeError("fabric.save was called before fabric.launch(); call fabric.launch() first")
        if self._is_ours:
            check_storage_options(storage_options)
        contents = {key: self._state_of(value) for key, value in state.items()}
        for key, keeps in (filter or {}).items():
            if isinstance(contents[key], dict):
                contents[key] = {name: value for name, value in contents[key].items() if keeps(name, value)}
            else:
                rank_zero_warn(
                    f"the filter of {key!r} has no effect: the entry is a {type(state[key]).__name__}, and saved as it "
                    "is. Give a module, an optimizer or a dictionary a name of its own in the state to filter its items"
                )
        contents[WRITTEN_BY] = self._written_by(self._mesh)
        if "state_dict" in contents:  # the Trainer's name of the weights; it loads no checkpoint without this entry
            contents.setdefault(OF_TRAINER, lightning.__version__)
        _checkpoint.follow_first(self.engines)
        world = self._mesh.world
        with _checkpoint.pickled_as_masters(self.engines):
            if self._is_ours:
                form, checksums = self.options.checkpoint_format, self.options.checksums
                target = _checkpoint.locate_first(path, world)
                save = _checkpoint.begin(form, contents, target, self.engines, world, checksums=checksums)
                warn_of_nodes(save)
                save.write(world)
                return
            warn_of_other_writer(self.checkpoint_io, path, self.options)
            _checkpoint.fetch_for_first(contents, self.engines)
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(contents, path, storage_options)

    def _state_of(self, value: Any) -> Any:
        """The entry of a checkpoint for an object; with lazy tensors if the object is sharded."""
        if isinstance(value, nn.Module):
            engine = self._engine_with(value)
            return value.state_dict() if engine is None else _checkpoint.module_state_dict(engine)
        if isinstance(value, Optimizer) and (found := self._updater_of(value)):
            return _checkpoint.optimizer_state_dict(*found, self.options.checkpoint_state == "compact")
        if _is_list_of_objects(value):
            return [self._state_of(item) for item in value]
        return value.state_dict() if _is_stateful(value) else value

    def _written_by(self, mesh: Mesh) -> dict[str, Any]:
        record = self.options.record(__version__, mesh.world.size, mesh.shard.size, str(self.precision.precision))
        return {**record, SCALER: self.precision.state_dict()}

    @override
    def load_checkpoint(
        self,
        path: private.PathLike,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of Fabric or Trainer, by any strategy, into objects. Each rank reads its part. Collective.

        Args:
            path: of a file, or of a folder in the format of ``torch.distributed.checkpoint``.
            state: the objects to load into: objects by name, as for :meth:`save_checkpoint`, or a module or an
                optimizer if the file holds only its state. Values without state of their own are replaced.
            strict: all names must be in the checkpoint, and the names in a module must match.
            weights_only: ``False`` also loads pickled objects; use it only for files that you trust.

        Returns:
            The entries that were not loaded into ``state``.

        Raises:
            KeyError: a name is not in the checkpoint.
            CheckpointError: the checkpoint is incomplete or damaged, or holds no dictionary.
            RuntimeError: a module has other names or shapes; nothing is loaded then.
            ValueError: an optimizer has other groups or state, or the entry of an object is of another kind; nothing is
                loaded then.
        """
        if self._is_ours:
            world = Group() if self._mesh is None else self._mesh.world
            source = _checkpoint.locate(path)
            loaded = _checkpoint.load(source, world, weights_only is not False, self.options.checksums)
        else:
            loaded = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        if not isinstance(state, dict):
            if state is not None:
                self._check(state, loaded, strict)
                self._load_into(state, loaded, strict)
                return {}
            return dict(loaded)
        if strict and (missing := [name for name in state if name not in loaded]):
            raise KeyError(f"{path} has no {', '.join(map(repr, missing))}; {_contents_of(loaded)}")
        rest = dict(loaded)
        written_by = rest.pop(WRITTEN_BY, None) or {}
        entries = {name: rest.pop(name) for name in state if name in rest}
        for name, saved in entries.items():  # all or nothing
            self._check(state[name], saved, strict)
        for name, saved in entries.items():
            if not self._load_into(state[name], saved, strict):
                state[name] = saved
        if any(self._has_engine(value) for value in state.values()):
            of_trainer = loaded.get("ZeroPrecision") or {}
            self.precision.load_state_dict(written_by.get(SCALER) or of_trainer.get("scaler") or {})
        return rest

    def _check(self, value: Any, saved: Any, strict: bool) -> None:
        """Check that :meth:`_load_into` can restore a module, or an optimizer that was set up; nothing is changed."""
        if isinstance(value, nn.Module):
            engine = self._engine_with(value)
            module = value if engine is None else engine.module
            _check_kind(module, saved)
            _checkpoint.check_module_state_dict(module, engine, saved, strict)
        elif isinstance(value, Optimizer) and (found := self._updater_of(value)):
            _check_kind(value, saved, "state", "param_groups")
            _checkpoint.check_optimizer_state_dict(*found, saved)
        elif _is_list_of_objects(value):
            if not isinstance(saved, list | tuple) or len(value) != len(saved):
                number = len(saved) if isinstance(saved, list | tuple) else "no list of"
                raise ValueError(
                    f"the checkpoint has {number} objects where {len(value)} are to be loaded; give as many as were "
                    "saved under this name, and an object that was saved alone without a list"
                )
            for item, saved_item in zip(value, saved, strict=True):
                self._check(item, saved_item, strict)

    def _load_into(self, value: Any, saved: Any, strict: bool) -> bool:
        """Restore an object in place; returns whether this is possible."""
        if isinstance(value, nn.Module):
            self.load_module_state_dict(value, saved, strict)
        elif isinstance(value, Optimizer) and (found := self._updater_of(value)):
            _checkpoint.load_optimizer_state_dict(*found, saved)
        elif _is_list_of_objects(value):
            for item, saved_item in zip(value, saved, strict=True):
                self._load_into(item, saved_item, strict)
        elif _is_stateful(value):
            value.load_state_dict(saved)
        else:
            return False
        return True

    def _has_engine(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(map(self._has_engine, value))
        return isinstance(value, nn.Module) and self._engine_with(value) is not None

    @property
    def _is_ours(self) -> bool:
        """Whether the user has not passed a ``CheckpointIO``, so that ours reads and writes checkpoints."""
        return type(self.checkpoint_io) is TorchCheckpointIO


def _contents_of(loaded: Mapping[str, Any]) -> str:
    """The end of a message about entries that are not in a checkpoint: what is there, and the remedy."""
    if loaded and all(isinstance(value, Tensor) for value in loaded.values()):
        return "it holds the state of one module, which fabric.load_raw(path, module) loads"
    return f"it has {', '.join(map(repr, loaded))}. With strict=False objects that are missing in it are left unchanged"


def _check_kind(value: nn.Module | Optimizer, saved: Any, *keys: str) -> None:
    """Check that the entry of a checkpoint can be the state of an object: a dictionary with these keys.

    Raises:
        ValueError: it cannot.
    """
    if isinstance(saved, Mapping) and all(key in saved for key in keys):
        return
    without = f" without {' and '.join(map(repr, keys))}" if isinstance(saved, Mapping) else ""
    raise ValueError(
        f"the checkpoint has an entry of type {type(saved).__name__}{without} where the state of a "
        f"{type(value).__name__} is to be loaded; give each object under the name with which it was saved, and those "
        "of a list in a list"
    )


def _is_list_of_objects(value: Any) -> bool:
    """Whether a value is a list of objects with state, such as the optimizers in a checkpoint of the Trainer."""
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_stateful, value))


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
