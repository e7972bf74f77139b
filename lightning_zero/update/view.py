"""The view through which an updater sees the bucket that it updates."""

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
    """Everything that one update of this rank's shard of a bucket reads and writes.

    The update may run beside the training. What user code can change in the meantime has the values from the time when
    ``step`` was called.

    Attributes:
        optimizer: a copy of the optimizer's class, attributes and groups, made by
            :func:`~lightning_zero.update.shell.snapshot`.
        segments: the segments to update, in ascending order; all belong to the updater's optimizer.
        complete: whether these are all segments of the shard.
        master: the values to update, by range of the shard.
        gradient: the averaged gradients, by range of the shard.
        state: the optimizer's state of the bucket's segments.
        groups: the hyperparameters of each of the optimizer's parameters in the bucket, by index of the parameter.
        grad_scale: factor to apply to the gradients.
        gap: segments at most this many elements apart may be updated as one; the elements between them are zeros.
        parameters: the bucket's parameters by index, to identify them; their values may be out of date.
        placement: the bucket's placement: where updates can be computed, and how data is copied there.
        tile: number of elements of a tile of the optimizer's store, or else of the master; see
            :class:`~lightning_zero.storage.rested.Rested`.
        call: the call of the optimizer's ``step``. An updater that runs the class's own ``step`` passes its arguments
            on.
        ahead: begins to fetch the first data that the next update needs. It is called while the last window of this
            update is computed.
    """

    optimizer: Optimizer
    segments: Sequence[Segment]
    complete: bool
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


def fetch_nothing() -> None:
    """Do nothing, as ``ahead`` of a view: no update follows, or its data is in memory, or another update fetches it."""
