"""Updaters, and views: all that one sees of a bucket that it updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    """All that one update of this rank's shard of a bucket reads and writes.

    It may run beside the training: what user code can change meanwhile is as it was when ``step`` was called.

    Attributes:
        optimizer: its class, attributes and groups, as :func:`~lightning_zero.update.shell.snapshot` took them.
        segments: those to update, in ascending order; all belong to the updater's optimizer.
        complete: whether they are all that there are in the shard.
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
        """The layout that updates need of a 16-bit bucket's master; ``None``: any will do.

        Args:
            bucket: in which the optimizer has parameters.

        Raises:
            ValueError: the bucket, as it is placed and laid out, cannot be updated.
        """
        ...

    def check(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise what updates with these hyperparameters would raise, on all ranks and before anything is written.

        Raises:
            ValueError: a hyperparameter is out of range.
        """
        ...

    def update(self, view: UpdateView) -> None:
        """Update the masters of ``view.segments`` from its gradients and publish them."""
        ...

    def expect(self, view: UpdateView) -> None:
        """Begin to fetch what :meth:`update` of ``view``, which comes next, will need first."""
        ...

    def advance(self, call: StepCall) -> None:
        """Write to the optimizer's groups and attributes what its step writes there: once, after updates have begun."""
        ...

    def own_state(self, bucket: Bucket) -> OptimizerState:
        """The state of this rank's segments of ``bucket``, to be written by an update; made on first use."""
        ...

    def adopt(self, holder: Callable[[Tensor], Bucket | None]) -> None:
        """Move state that lies in the optimizer itself into shards.

        Args:
            holder: gives the bucket that holds a parameter.
        """
        ...

    def gather_state(self, bucket: Bucket) -> dict[int, dict[str, Any]]:
        """The full state of a bucket's parameters, by their index in it. Collective.

        Args:
            bucket: holds the parameters.

        Returns:
            Per parameter that has state, in torch's names: tensors in the parameter's shape, on the CPU, and scalars.
        """
        ...

    def clear(self) -> None:
        """Forget all state, as before the first step."""
        ...
