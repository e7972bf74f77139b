"""The optimizers that an engine drives: what is theirs, and the update of their shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.bucket import Bucket
from lightning_zero.engine.bucket_map import BucketMap
from lightning_zero.engine.layout import Segment
from lightning_zero.engine.takeover import (
    Target,
    give_back_optimizer,
    hide_state,
    parameters_of,
    state_was_edited,
    state_was_replaced,
    take_over_optimizer,
)


class Updater(Protocol):
    """Applies one optimizer's rule to shards. See :mod:`lightning_zero.optim`."""

    optimizer: Optimizer

    def prepare(self, bucket: Bucket) -> None:
        """Make ready for updates: the optimizer has parameters in ``bucket``. The same call on all ranks.

        Raises:
            ValueError: the bucket, as it is placed, cannot be updated.
        """
        ...

    def check(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise what updates with these hyperparameters would raise, on all ranks and before anything is written.

        Raises:
            ValueError: a hyperparameter is out of range.
        """
        ...

    def update(
        self, bucket: Bucket, segments: Sequence[Segment], groups: dict[int, dict[str, Any]], grad_scale: float
    ) -> None:
        """Update the masters of ``segments`` from ``bucket.gradients`` x ``grad_scale`` and publish them.

        Args:
            bucket: holds the segments.
            segments: those to update, in ascending order; all belong to this optimizer.
            groups: the hyperparameters of each parameter of the bucket, by its index.
            grad_scale: factor to apply to the gradients.
        """
        ...

    def adopt(self, holder: Callable[[Tensor], Bucket | None]) -> None:
        """Move state that lies in the optimizer itself into shards.

        Args:
            holder: gives the bucket that holds a parameter.
        """
        ...

    def gather_state(self, bucket: Bucket) -> dict[int, dict[str, Any]]:
        """The whole state of a bucket's parameters, by their index in it. Collective.

        Args:
            bucket: holds the parameters.

        Returns:
            Per parameter that has state, in torch's names: tensors in the parameter's shape, on the CPU, and scalars.
        """
        ...

    def clear(self) -> None:
        """Forget all state, as before the first step."""
        ...


@dataclass
class _Attached:
    """An optimizer's updater, and what was seen in its groups so far."""

    updater: Updater
    admitted: list[int] = field(default_factory=list)  # ids of the parameters
    buckets: list[Bucket] = field(default_factory=list)  # that hold them
    prepared: bool = True  # whether the updater has seen these


class AttachedOptimizers:
    """The optimizers whose ``step`` and ``zero_grad`` act on shards; iterates over them in the order given.

    Args:
        bucket_map: of the module; optimizers may have the parameters that its buckets hold.
    """

    def __init__(self, bucket_map: BucketMap) -> None:
        self._map = bucket_map
        self._attached: dict[int, _Attached] = {}  # by id of the optimizer
        self._handles: list[RemovableHandle] = []

    def __iter__(self) -> Iterator[Optimizer]:
        return (updater.optimizer for updater in self.updaters)

    @property
    def updaters(self) -> list[Updater]:
        """Those of the optimizers, in the order given."""
        return [attached.updater for attached in self._attached.values()]

    def attach(self, updaters: Sequence[Updater], target: Target) -> None:
        """Replace the optimizers by those of ``updaters``; see :meth:`Engine.attach`.

        Args:
            updaters: one per optimizer; an optimizer that was among those before keeps its own.
            target: what the optimizers' methods call.

        Raises:
            ValueError: an optimizer holds what is not the module's; nothing has changed then.
        """
        for updater in updaters:
            self._check_held(updater.optimizer)
        before = self._attached
        self.detach()
        for updater in updaters:
            key = id(updater.optimizer)
            self._attached[key] = _Attached(before[key].updater if key in before else updater)
        self.admit()
        for attached in self._attached.values():
            self._prepare(attached)
            self._take_state(attached.updater)
            self._handles += take_over_optimizer(attached.updater.optimizer, target)

    def detach(self) -> None:
        """Give the optimizers their own methods back."""
        for optimizer in self:
            give_back_optimizer(optimizer)
        for handle in self._handles:
            handle.remove()
        self._attached, self._handles = {}, []

    def admit(self) -> None:
        """Make ready what has joined the groups of an optimizer.

        Raises:
            ValueError: where that is not the module's.
        """
        for attached in self._attached.values():
            optimizer = attached.updater.optimizer
            parameters = parameters_of(optimizer)
            if attached.admitted == (ids := list(map(id, parameters))):
                continue
            self._check_held(optimizer)
            for bucket in self._map.holders(parameters):
                bucket.optimize()
            attached.admitted, attached.buckets, attached.prepared = ids, self._map.holders(parameters), False

    def _check_held(self, optimizer: Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            if self._map.holder(parameter) is None:
                raise ValueError(f"{type(optimizer).__name__} holds {self._why_foreign(parameter)}")

    def _why_foreign(self, parameter: Parameter) -> str:
        """Why no bucket holds ``parameter``, and what to do."""
        module = type(self._map.module).__name__
        for name, own in self._map.module.named_parameters():
            if own is parameter:
                return (
                    f"{name!r}, which joined {module} after its parameters were sharded; make it in `__init__` or "
                    "`configure_model`, and freeze it until it is needed"
                )
        return (
            f"a parameter of shape {tuple(parameter.shape)} that is not registered in {module}; give optimizers the "
            "module's parameters"
        )

    def _prepare(self, attached: _Attached) -> None:
        """Let an updater see the buckets of what was admitted to its optimizer since the last time.

        Not between forward and backward: it may change parameters.
        """
        if not attached.prepared:
            for bucket in attached.buckets:
                attached.updater.prepare(bucket)
            attached.prepared = True

    def _take_state(self, updater: Updater) -> None:
        updater.adopt(self._map.holder)
        hide_state(updater.optimizer)

    def adopt_state(self, optimizer: Optimizer) -> None:
        """Move state that user code loaded or wrote into an optimizer into shards."""
        updater = self._attached[id(optimizer)].updater
        if state_was_replaced(optimizer):
            updater.clear()
        self._take_state(updater)

    def with_parameter(self, parameter: Parameter) -> list[Optimizer]:
        """Those that ``parameter`` was admitted to."""
        return [a.updater.optimizer for a in self._attached.values() if id(parameter) in a.admitted]

    def shares_parameters(self, optimizer: Optimizer) -> bool:
        """Whether a parameter of ``optimizer`` is another's too."""
        others = [a.admitted for key, a in self._attached.items() if key != id(optimizer)]
        return any(not set(ids).isdisjoint(self._attached[id(optimizer)].admitted) for ids in others)

    def update(self, optimizer: Optimizer, used: Sequence[Parameter], grad_scale: float) -> None:
        """Update the shards of some parameters of ``optimizer``. The same call on all ranks.

        Args:
            optimizer: its hyperparameters are copied before anything is updated.
            used: the parameters to update.
            grad_scale: factor to apply to the gradients.
        """
        if state_was_edited(optimizer):
            self.adopt_state(optimizer)
        attached, hyperparameters = self._attached[id(optimizer)], _snapshot(optimizer)
        attached.updater.check({id(group): group for group in hyperparameters.values()}.values())
        self._prepare(attached)
        used_ids = set(map(id, used))
        for bucket, segments in self._map.segments_of(used):
            groups = {i: hyperparameters[id(p)] for i, p in enumerate(bucket.parameters) if id(p) in hyperparameters}
            attached.updater.update(bucket, segments, groups, grad_scale)
        for bucket in self._map.buckets:
            # Stale on all ranks or on none, also where this rank owns no segment of it.
            if indices := [i for i, p in enumerate(bucket.parameters) if id(p) in used_ids]:
                bucket.mark_updated(indices)


def _snapshot(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """The hyperparameters of every parameter, by its id; parameters of one group share one copy."""
    snapshot: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        frozen = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
        snapshot.update((id(parameter), frozen) for parameter in group["params"])
    return snapshot
