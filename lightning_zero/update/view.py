"""Views: all that an updater sees of a bucket that it updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.sharding import BucketPlacement, Segment
from lightning_zero.sharding.masters import Master
from lightning_zero.sharding.sharded_gradient import LentGradient
from lightning_zero.update.shell import StepCall
from lightning_zero.update.state import OptimizerState

Groups = dict[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class UpdateView:
    """All that one update of this rank's shard of a bucket reads and writes.

    It may run beside the training: what user code can change meanwhile is as it was when ``step`` was called.

    Attributes:
        optimizer: its class, attributes and groups, as :func:`~lightning_zero.update.shell.snapshot` took them.
        segments: those to update, in ascending order; all belong to the updater's optimizer.
        master: the values to update, by range of the shard.
        gradient: the averaged gradients, by range of the shard.
        state: the optimizer's, of the segments.
        groups: the hyperparameters of each parameter of the bucket that the optimizer has, by its index.
        grad_scale: factor to apply to the gradients.
        gap: segments at most this far apart may be updated as one; what lies between them are zeros.
        parameters: of the bucket, by index, to tell them apart; their values may be out of date.
        placement: of the bucket: where it can be computed, and how what is computed with gets there.
        tile: of the optimizer's store, or else of the master; see :class:`~lightning_zero.storage.rested.Rested`.
        call: of the optimizer's ``step``, which an updater that runs the class's own passes on to it.
        ahead: begins to fetch what the update that follows this one needs first; called while the last window of this
            one is updated.
    """

    optimizer: Optimizer
    segments: Sequence[Segment]
    master: Master
    gradient: LentGradient
    state: OptimizerState
    groups: Groups
    grad_scale: float
    gap: int
    parameters: Sequence[Parameter]
    placement: BucketPlacement
    tile: int | None
    call: StepCall
    ahead: Callable[[], object]
