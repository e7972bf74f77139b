"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_zero import checkpoint as _checkpoint
from lightning_zero.engine import Engine, engines_of, follow
from lightning_zero.integration.patches import OnShards
from lightning_zero.integration.strategy import ZeroStrategy
from lightning_zero.storage import DeviceStore, HostStore, TensorStore, device_type

_SAVED = ("state_dict", "current_model_state", "averaging_state")  # a checkpoint's entries, by Lightning's names


class EMA(OnShards, EMAWeightAveraging):
    """Averages the weights as Lightning's ``EMAWeightAveraging``; under ``ZeroStrategy`` the average is in shards.

    The average is a copy of the weights after the first update, and every further update changes it to
    ``decay * average + (1 - decay) * weights``; integers, such as indices and counts, are copied. Validation runs with
    the average. Checkpoints hold it as ``state_dict``, and the training weights as ``current_model_state``. When
    training ends the average replaces the weights. Before the first update, the training weights are used in all these
    places. This callback and Lightning's resume from each other's checkpoints.

    Under :class:`~lightning_zero.ZeroStrategy` each rank keeps the average of its shard of the weights beside the
    optimizer state; for 16-bit weights it averages the fp32 masters. Updates of the average gather nothing. All ranks
    write checkpoints, each its shards; these resume at any stage and number of ranks. A skipped step does not change
    the average. After an error in validation the shards hold the training weights, and these are saved; the module
    shows them in full when its strategy has released it. Under any other strategy every rank keeps a full copy of the
    module, as Lightning's callback does.

    Args:
        decay: weight of the old average in an update, from 0 to 1.
        update_every_n_steps: number of optimizer steps between two updates, at least 1.
        update_starting_at_step: first optimizer step, counted from 0, after which it is updated; None: the first.
        use_buffers: also average buffers, on each rank its own; validation and checkpoints use those of rank 0.
        device: where the average rests; None: with the optimizer state or, under other strategies, with the module.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        use_buffers: bool = True,
        device: torch.device | str | int | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay={decay} must lie between 0 and 1: it is the weight of the old average")
        if update_every_n_steps < 1:
            raise ValueError(f"update_every_n_steps={update_every_n_steps} must be a number of steps >= 1")
        if update_starting_at_step is not None and update_starting_at_step < 0:
            raise ValueError(f"update_starting_at_step={update_starting_at_step} must be the index of a step, >= 0")
        super().__init__(device, use_buffers, decay, update_every_n_steps, update_starting_at_step)
        self._decay = decay
        self._saved: Mapping[str, Any] | None = None  # state to resume from, until there is an average
        self._aside: _AverageOnShards | None = None  # the average of the last fit, while an evaluation runs

    @property
    @override
    def state_key(self) -> str:
        return EMAWeightAveraging.__qualname__  # each resumes from the other's checkpoints

    @property
    def _shards(self) -> _AverageOnShards | None:
        return self._average_model if isinstance(self._average_model, _AverageOnShards) else None

    @override
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether the steps have passed a multiple of ``update_every_n_steps``; several optimizers may jump over it."""
        if step_idx is None:
            return False
        before = max(self._latest_update_step, self.update_starting_at_step or 0) - 1
        return step_idx // self.update_every_n_steps > before // self.update_every_n_steps

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._latest_update_step = min(self._latest_update_step, trainer.global_step)  # it may be an earlier Trainer's
        if isinstance(trainer.strategy, ZeroStrategy):
            # An earlier fit's average has replaced the weights. A save after an evaluation needs what was replaced.
            self._aside = None if trainer.state.fn == TrainerFn.FITTING else self._shards or self._aside
            self._average_model = self._saved = None
        else:
            super().setup(trainer, pl_module, stage)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end_evaluation(trainer, pl_module)

    def _end_evaluation(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the average back, unless the evaluation has replaced the weights beside it, or their engine is gone."""
        average, self._aside = self._aside, None
        if average is not None and trainer.ckpt_path is None and average.is_of(pl_module):
            self._average_model = average  # type: ignore[assignment]  # see `on_sharded`

    @override
    def on_sharded(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the average, from the weights or from saved state."""
        strategy = trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        self._average_model = None  # free it first
        average = _AverageOnShards(strategy.engine, self._decay, self._use_buffers, self._store(strategy))
        if self._saved is not None:
            average.load(self._saved, pl_module.strict_loading)
            self._saved = None
        self._average_model = average  # type: ignore[assignment]  # it has what Lightning's hooks use

    @override
    def averages(self, trainer: pl.Trainer) -> list[TensorStore | None]:
        assert isinstance(trainer.strategy, ZeroStrategy)
        return [self._store(trainer.strategy)]

    def _store(self, strategy: ZeroStrategy) -> TensorStore | None:
        if self._device is None:
            return None
        device = torch.device(self._device)
        in_host_memory = device_type(device).shares_host_memory
        return HostStore(pin_for=strategy.root_device) if in_host_memory else DeviceStore(device)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._average_model is not None and not self._average_model.n_averaged:
            checkpoint["state_dict"] = checkpoint["current_model_state"]
        if self._shards is not None and self._shards.shadow.swapped:  # in validation, or when training has ended
            average, weights, _ = _SAVED
            checkpoint[average], checkpoint[weights] = checkpoint[weights], checkpoint[average]

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, ZeroStrategy) or trainer.state.fn != TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
            return
        if all(name in checkpoint for name in _SAVED):
            self._saved = {name: checkpoint[name] for name in _SAVED}
            # The average was loaded as the weights.
            strategy.load_model_state_dict({"state_dict": checkpoint["current_model_state"]}, pl_module.strict_loading)
        else:
            rank_zero_warn("the checkpoint has no average of the weights; a new one starts from its weights")
        if self._average_model is not None:  # within a fit, as where a finder of learning rates ends
            self.on_sharded(trainer, pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._shards is not None and self._shards.shadow.swapped:
            self._shards.shadow.swap()  # without communication: other ranks may be gone
        self._end_evaluation(trainer, pl_module)

    @override
    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        assert self._average_model is not None
        if not self._average_model.n_averaged:
            return
        if self._shards is not None:
            self._shards.swap()
        else:
            super()._swap_models(pl_module)

    @override
    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        assert self._average_model is not None
        if not self._average_model.n_averaged:
            rank_zero_warn(
                f"EMA: the average was never updated (update_every_n_steps={self.update_every_n_steps}, "
                f"update_starting_at_step={self.update_starting_at_step}); the weights stay as they were trained"
            )
        elif self._shards is not None:
            self._shards.swap()  # swapped and not copied, since a later save needs the training weights
        else:
            super()._copy_average_to_current(pl_module)


class _AverageOnShards:
    """Does for Lightning's hooks what an ``AveragedModel`` does, with a shadow of the engine.

    Args:
        engine: of the module.
        decay: weight of the old average in an update.
        use_buffers: also average buffers; otherwise they are copied.
        store: where the average rests.
    """

    def __init__(self, engine: Engine, decay: float, use_buffers: bool, store: TensorStore | None) -> None:
        self.shadow = engine.make_shadow(store)
        self.n_averaged = 0
        self._engine, self._decay, self._use_buffers = engine, decay, use_buffers

    def is_of(self, module: nn.Module) -> bool:
        """Whether the engine still holds parameters of the module."""
        return self._engine in engines_of(module)

    def update_parameters(self, module: nn.Module) -> None:
        rule = self._average if self.n_averaged else follow
        self.shadow.update(rule, rule if self._use_buffers else follow)
        self.n_averaged += 1

    def _average(self, average: Tensor, weights: Tensor) -> Tensor:
        """Average with the same bits as Lightning, but in place, which takes a fraction of the time."""
        return average.mul_(self._decay).add_((1 - self._decay) * weights)

    def swap(self) -> None:
        self.shadow.swap()
        # All ranks use each other's shards, and therefore also rank 0's buffers.
        self._engine.sync_buffers()
        self._engine.settle()

    def state_dict(self) -> dict[str, Any]:
        average = _checkpoint.module_state_dict(self._engine, self.shadow)
        return {"n_averaged": torch.tensor(self.n_averaged, dtype=torch.int64, device="cpu")} | {
            f"module.{k}": v for k, v in average.items()
        }

    def load(self, saved: Mapping[str, Any], strict: bool) -> None:
        _checkpoint.load_shadow_state_dict(self._engine, self.shadow, saved["state_dict"], strict)
        self.n_averaged = int(saved["averaging_state"]["n_averaged"])
