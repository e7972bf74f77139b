"""The base of the parts of the strategy: its options and the engine that it drives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar, overload

from lightning.pytorch.strategies import DDPStrategy

from lightning_zero.engine import Engine
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.integration.patches import Undo
from lightning_zero.sharding import Mesh, ShardingPolicy

T = TypeVar("T")


class _Option(Generic[T]):
    """An option as an attribute of the strategy, which can be read and not assigned.

    Its type is that of the field: a type checker infers it from ``read``.
    """

    def __init__(self, read: Callable[[StrategyOptions], T]) -> None:
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self.__doc__ = f"The option ``{name}``."

    @overload
    def __get__(self, strategy: None, owner: type) -> _Option[T]: ...
    @overload
    def __get__(self, strategy: EngineStrategy, owner: type) -> T: ...
    def __get__(self, strategy: EngineStrategy | None, owner: type) -> _Option[T] | T:
        return self if strategy is None else self._read(strategy.options)

    def __set__(self, strategy: EngineStrategy, value: T) -> NoReturn:
        raise AttributeError(
            f"{self._name}={value!r} comes too late: options are fixed when the strategy is made; use "
            f"{type(strategy).__name__}({self._name}={value!r})"
        )


class EngineStrategy(DDPStrategy):
    """Base of the parts that :class:`~lightning_zero.ZeroStrategy` is made of.

    Each option is an attribute of its name, too; none can be assigned.
    """

    _options: StrategyOptions
    _policy: ShardingPolicy
    _undo: list[Undo]  # for what was replaced on objects that outlive the fit
    _engine: Engine | None = None
    _mesh: Mesh | None = None

    # Lightning's class has `process_group_backend`.
    stage = _Option(lambda options: options.stage)
    offload_optimizer = _Option(lambda options: options.offload_optimizer)
    offload_params = _Option(lambda options: options.offload_params)
    shard_size = _Option(lambda options: options.shard_size)
    bucket_size_mb = _Option(lambda options: options.bucket_size_mb)
    units = _Option(lambda options: options.units)
    persistence_numel = _Option(lambda options: options.persistence_numel)
    max_live_numel = _Option(lambda options: options.max_live_numel)
    check_steps = _Option(lambda options: options.check_steps)
    detect_data_edits = _Option(lambda options: options.detect_data_edits)
    native_optimizer = _Option(lambda options: options.native_optimizer)
    skip_nonfinite = _Option(lambda options: options.skip_nonfinite)
    max_consecutive_skips = _Option(lambda options: options.max_consecutive_skips)
    checkpoint_format = _Option(lambda options: options.checkpoint_format)
    async_save = _Option(lambda options: options.async_save)
    checksums = _Option(lambda options: options.checksums)
    timeout = _Option(lambda options: options.timeout)
    start_method = _Option(lambda options: options.start_method)

    @property
    def options(self) -> StrategyOptions:
        """The options, as they were given to the constructor."""
        return self._options

    @property
    def engine(self) -> Engine:
        """The engine that shards the module; exists from ``setup`` on."""
        if self._engine is None:
            raise RuntimeError(
                "this Trainer's strategy holds no shards: they exist from the start of Trainer.fit, validate, test or "
                "predict until strategy.release(). Save checkpoints and read optimizer state before the release"
            )
        if self._engine.released:
            raise RuntimeError(
                "another Trainer has taken over this module, and with it the weights; the optimizer state of this one "
                "is gone. Save its checkpoint before the other Trainer runs, or save the other's"
            )
        return self._engine
