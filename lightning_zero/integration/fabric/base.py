"""The base class of the parts of Fabric's strategy: its options, and the engines of the modules that were set up."""

from __future__ import annotations

import contextlib
from typing import Any, cast
from weakref import WeakSet

import torch
from lightning.fabric import is_wrapped
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine import Engine
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.sharding import Mesh
from lightning_zero.update import Updater


class ShardedModule(nn.Module):
    """Runs the forward of a module through its engine; ``fabric.setup`` returns a wrapper of it.

    Attributes:
        module: the user's module.
        engine: the engine that shards it.
        awaits_backward: whether a forward with gradients has run since the last backward.
        trained: whether a forward in training mode has run since all ranks had rank 0's buffers.
    """

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        super().__init__()
        self.module = module
        self.engine = engine
        self.awaits_backward = self.trained = False

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._share_buffers()
        # The end of a pass without gradients would free parameters that a later backward still needs.
        with contextlib.nullcontext() if self._is_aside() else self.engine.forward_context():
            output = self.module(*args, **kwargs)
        self.awaits_backward |= torch.is_grad_enabled()
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Fabric compiles this module if the user's was
    def _share_buffers(self) -> None:
        """Give every rank rank 0's buffers (statistics of BatchNorm, ...) when an evaluation begins. Collective then.

        Under ``ddp`` the first forward after one of the training does so, in any mode. A backward that is still to come
        may need the buffers as they are; then a later forward does it.
        """
        if self.module.training:
            self.trained = True
        elif self.trained and not (self.awaits_backward or self.engine.released):
            self.engine.sync_buffers()
            self.trained = False

    def _is_aside(self) -> bool:
        """Whether this is a pass without gradients between a forward and its backward."""
        return self.awaits_backward and not torch.is_grad_enabled()


class EnginesStrategy(DDPStrategy):
    """Base class of the parts of :class:`~lightning_zero.ZeroFabricStrategy`.

    Attributes:
        options: the options that were given to the constructor.
    """

    options: StrategyOptions
    _wrappers: WeakSet[ShardedModule]  # Fabric's wrappers hold them
    _mesh: Mesh | None = None

    @property
    def engines(self) -> list[Engine]:
        """The engines of the modules that are set up, in the order of their set-up."""
        return [sharded.engine for sharded in self._sharded]

    @property
    def _sharded(self) -> list[ShardedModule]:
        alive = (sharded for sharded in self._wrappers if not sharded.engine.released)
        return sorted(alive, key=lambda sharded: sharded.engine.number)

    def _engine_with(self, module: nn.Module) -> Engine | None:
        """The engine of a module, given as the user's, as what ``fabric.setup`` returned, or as Fabric passes it on."""
        if is_wrapped(module):
            module = cast("nn.Module", module.module)  # the user's, also where the wrapper is compiled
        if isinstance(module, ShardedModule):
            return None if module.engine.released else module.engine
        return next((sharded.engine for sharded in self._sharded if sharded.module is module), None)

    def _updater_of(self, optimizer: Optimizer) -> tuple[Engine, Updater] | None:
        for engine in self.engines:
            for updater in engine.updaters:
                if updater.optimizer is optimizer:
                    return engine, updater
        return None

    def _engine_of(self, optimizer: Optimizer) -> Engine:
        if found := self._updater_of(optimizer):
            return found[0]
        raise ValueError(
            f"this {type(optimizer).__name__} was not set up: use the one that fabric.setup or fabric.setup_optimizers "
            "returned"
        )
