"""Updaters, and the views through which an updater sees the bucket that it updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.sharding import BucketPlacement, Segment
from lightning_zero.sharding.bucket import Bucket
from lightning_zero.sharding.masters import Master
from lightning_zero.sharding.sharded_gradient import LentGradient
from lightning_zero.update.native import MasterLayout
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


class Updater(Protocol):
    """Applies one optimizer's rule to shards. See :mod:`lightning_zero.update`."""

    optimizer: Optimizer

    def master_layout(self, bucket: Bucket) -> MasterLayout | None:
        """The layout that a 16-bit bucket's master must have for updates; ``None``: any layout will do.

        Args:
            bucket: a bucket in which the optimizer has parameters.

        Raises:
            ValueError: the bucket cannot be updated because of its placement or layout.
        """
        ...

    def check(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise the errors that updates with these hyperparameters would raise; on all ranks, before any writes.

        Raises:
            ValueError: a hyperparameter is out of range.
        """
        ...

    def alike_under(self, defaults: Collection[torch.dtype]) -> bool:
        """Tell whether updates are the same with each of ``defaults`` as torch's default dtype.

        It is the dtype of the process: an update beside a forward of a 16-bit mode may run with either dtype.
        """
        ...

    def update(self, view: UpdateView) -> None:
        """Update the masters of ``view.segments`` with ``view.gradient``, and publish them."""
        ...

    def expect(self, view: UpdateView) -> None:
        """Begin to fetch the first data that :meth:`update` of ``view``, which is the next update, will need."""
        ...

    def advance(self, call: StepCall) -> None:
        """Write the values that a step writes to the optimizer's groups and attributes.

        It is called once per step, after the updates have begun.
        """
        ...

    def own_state(self, bucket: Bucket) -> OptimizerState:
        """The state of this rank's segments of ``bucket``, for an update to write; it is made on first use."""
        ...

    def adopt(self, holder: Callable[[Tensor], Bucket | None]) -> None:
        """Move state from the optimizer itself into shards.

        Args:
            holder: gives the bucket that holds a parameter; ``None`` if there is none.
        """
        ...

    def gather_state(self, bucket: Bucket) -> dict[int, dict[str, Any]]:
        """Gather the full state of a bucket's parameters. Collective.

        Args:
            bucket: holds the parameters.

        Returns:
            For each parameter that has state, by its index in the bucket: the state under torch's names, as tensors on
            the CPU, those with one value per element in the parameter's shape, and scalars.
        """
        ...

    def clear(self) -> None:
        """Forget all state, as before the first step."""
        ...
