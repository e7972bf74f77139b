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
    """Shows what each rank holds, planned and measured, and what would take less.

    It prints a table on rank 0 after the first optimizer step. Under it are remedies: overrides to type, each with the
    bytes that it takes off the planned peak of a rank. Activations are in no plan; on an accelerator they are, with
    what else is not, the difference of the peaks. (Where a fit runs out of memory, the strategy prints the same on the
    rank that did, with this callback or without.)

    The plan costs some milliseconds per remedy before the first step. Under another strategy than
    :class:`~lightning_zero.ZeroStrategy` the callback only warns.

    Attributes:
        plan: of this rank; ``None`` before the fit.
        remedies: what saves most comes first.

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
            self.plan, self.remedies = memory.plan, memory.remedies
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
        """Plan, what is held now, and remedies, to be printed by rich; while a fit runs under one of our strategies."""
        memory = _memory_of(trainer)
        assert memory is not None
        return memory.report()


def _memory_of(trainer: pl.Trainer) -> Memory | None:
    return trainer.strategy.memory if isinstance(trainer.strategy, ZeroStrategy) else None
