"""A report of a fit's memory."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from rich.console import Console, RenderableType
from typing_extensions import override

from lightning_zero.integration.strategy import ZeroStrategy
from lightning_zero.planning import Plan
from lightning_zero.planning.memory import Memory, Remedy


class MemoryReport(pl.Callback):
    """Shows the planned and the measured memory of a rank, and the overrides that would need less.

    It prints a table on rank 0 after the first optimizer step. Below it are remedies: overrides to type, each with the
    bytes by which it lowers the planned peaks of a rank. The plan does not include activations; on an accelerator they
    are the difference of the peaks, together with everything else that the plan leaves out. (If a fit runs out of
    memory, the strategy prints the same on the rank that failed, with or without this callback; its remedies save
    memory on the side that has run out, device or host.)

    The plan takes some milliseconds per remedy before the first step. Under another strategy than
    :class:`~lightning_zero.ZeroStrategy` the callback only warns.

    Attributes:
        plan: the plan of this rank; ``None`` before the fit.
        remedies: overrides that need less memory on the device or in host memory; the one that saves most comes first.

    Args:
        table: print the report; ``False``: only set the attributes.
    """

    def __init__(self, table: bool = True) -> None:
        self.table = table
        self.plan: Plan | None = None
        self.remedies: list[Remedy] = []
        self._first_step = -1  # `global_step` before it

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not isinstance(strategy := trainer.strategy, ZeroStrategy):
            rank_zero_warn(
                f"MemoryReport plans nothing under {type(strategy).__name__}; use a strategy of lightning_zero, such "
                "as zero0"
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if (memory := _memory_of(trainer)) is not None:
            self.plan, self.remedies = memory.plan, memory.remedies()
            self._first_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._first_step >= 0 and trainer.global_step > self._first_step:
            self._first_step = -1
            if self.table and trainer.is_global_zero:
                Console().print(self.report(trainer))

    def report(self, trainer: pl.Trainer) -> RenderableType:
        """Returns plan, held memory and remedies, to be printed by rich; only while a fit of our strategies runs."""
        memory = _memory_of(trainer)
        assert memory is not None
        return memory.report()


def _memory_of(trainer: pl.Trainer) -> Memory | None:
    return trainer.strategy.memory if isinstance(trainer.strategy, ZeroStrategy) else None
