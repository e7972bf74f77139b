"""The updates of one step of an optimizer, which are submitted bucket by bucket."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.sharding.bucket import Bucket, BucketState
from lightning_zero.sharding.bucket_map import BucketMap
from lightning_zero.sharding.layout import Segment
from lightning_zero.update.shell import StepCall, snapshot
from lightning_zero.update.view import Updater, UpdateView


class StepUpdates:
    """Values that one step of an optimizer updates with, as they are when this is made, and what has begun of it.

    Attributes:
        begun: ids of the buckets whose updates were submitted.
        call: of the optimizer's ``step``.

    Args:
        updater: of the optimizer; its hyperparameters and attributes are copied.
        bucket_map: of the module.
        grad_scale: factor to apply to the gradients.
        call: as above.

    Raises:
        ValueError: a hyperparameter is out of range; nothing was written then.
    """

    def __init__(self, updater: Updater, bucket_map: BucketMap, grad_scale: float, call: StepCall) -> None:
        self.begun: set[int] = set()
        self.call = call
        self._updater = updater
        self._map = bucket_map
        self._grad_scale = grad_scale
        self._hyperparameters = _hyperparameters(updater.optimizer)
        updater.check({id(group): group for group in self._hyperparameters.values()}.values())
        self._taken = snapshot(updater.optimizer)

    def as_now(self) -> bool:
        """Whether the optimizer's parameters have the hyperparameters still that were copied."""
        now = _hyperparameters(self._updater.optimizer)
        return now.keys() == self._hyperparameters.keys() and all(
            _same(group, self._hyperparameters[key]) for key, group in now.items()
        )

    def begin(self, parts: Sequence[tuple[Bucket, list[Segment]]]) -> None:
        """Submit the updates of some segments of buckets that it has not begun with.

        See :meth:`Bucket.begin_update`.

        Args:
            parts: in the order in which they are updated.
        """
        views: list[tuple[Bucket, UpdateView]] = []
        ahead: Callable[[], object] = _fetch_nothing
        for bucket, segments in reversed(parts):
            view = self._view(bucket, segments, ahead)
            views.insert(0, (bucket, view))
            on_disk = bucket.placement.optimizer_store.tile is not None
            ahead = partial(self._updater.expect, view) if on_disk else _fetch_nothing
        # All of them before the first update, which fetches for the next one, in its own thread.
        for bucket, _ in views:
            _end_gather(bucket)
        for number, (bucket, view) in enumerate(views):
            touched = [each for each, _ in views[number : number + 2]]  # the second is fetched ahead
            lent_to = bucket.begin_update(partial(self._update, view, touched))
            self._map.gradients_of(bucket).sharded.lent_to(lent_to)
            self.begun.add(id(bucket))

    def _update(self, view: UpdateView, touched: Sequence[Bucket]) -> None:
        try:
            self._updater.update(view)
        except BaseException:
            for bucket in touched:
                if not bucket.master.in_shard:  # what was to be overwritten was not read, and may not have been written
                    bucket.shard.drop(0, bucket.shard.numel)
            raise

    def _view(self, bucket: Bucket, segments: Sequence[Segment], ahead: Callable[[], object]) -> UpdateView:
        known = self._hyperparameters
        return UpdateView(
            self._taken,
            segments,
            len(segments) == len(bucket.segments),
            bucket.master,
            self._map.gradients_of(bucket).sharded.lend(),
            self._updater.own_state(bucket),
            {i: known[id(p)] for i, p in enumerate(bucket.parameters) if id(p) in known},
            self._grad_scale,
            bucket.layout.align - 1,
            bucket.parameters,
            bucket.placement,
            bucket.placement.optimizer_store.tile or bucket.master.tile,
            self.call,
            ahead,
        )


def _end_gather(bucket: Bucket) -> None:
    """Wait for a gather that has begun, and let go of tiles that were fetched for one: the shard is about to change."""
    if bucket.state is BucketState.GATHERING:
        bucket.unshard()
    bucket.shard.drop(0, bucket.shard.numel)


def _fetch_nothing() -> None:
    """Do nothing: what follows is in memory, or nothing does."""


def _hyperparameters(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Those of every parameter, by its id; parameters of one group share one copy."""
    found: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        frozen = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
        found.update((id(parameter), frozen) for parameter in group["params"])
    return found


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
