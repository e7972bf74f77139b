"""The updates of one step of an optimizer, submitted bucket by bucket.

All of them use the hyperparameters that the optimizer had when the step began, whenever they run: user code, a learning
rate scheduler for one, may change these right after the step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.sharding.bucket import GATHERS, Bucket
from lightning_zero.sharding.bucket_map import BucketMap
from lightning_zero.sharding.layout import Segment
from lightning_zero.torch_private import tree_leaves
from lightning_zero.update.shell import StepCall, snapshot
from lightning_zero.update.updaters import Updater
from lightning_zero.update.view import UpdateView, fetch_nothing


class StepUpdates:
    """Keeps what a step of an optimizer updates with, and submits its updates.

    Attributes:
        begun: ids of the buckets whose updates have begun, also of one whose update has failed.
        call: the call of the optimizer's ``step``.

    Args:
        updater: of the optimizer, whose hyperparameters and attributes are copied now.
        bucket_map: holds the parameters.
        grad_scale: factor to apply to the gradients.
        call: as above.

    Raises:
        ValueError: a hyperparameter is out of range; nothing has been written then.
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
        """Whether the optimizer still has the parameters and hyperparameters that were copied."""
        now = _hyperparameters(self._updater.optimizer)
        return now.keys() == self._hyperparameters.keys() and all(
            _same(group, self._hyperparameters[key]) for key, group in now.items()
        )

    def begin(self, parts: Sequence[tuple[Bucket, list[Segment]]]) -> None:
        """Submit the updates of some buckets; see :meth:`Bucket.begin_update`.

        Args:
            parts: buckets that have not begun, each with the segments to update, in the order of the updates.
        """
        views: list[tuple[Bucket, UpdateView]] = []
        ahead: Callable[[], object] = fetch_nothing
        for bucket, segments in reversed(parts):
            view = self._view(bucket, segments, ahead)
            views.insert(0, (bucket, view))
            on_disk = bucket.placement.optimizer_store.tile is not None
            ahead = partial(self._updater.expect, view) if on_disk else fetch_nothing
        # For all buckets before the first update: in its own thread, that already fetches tiles for the next one.
        for bucket, _ in views:
            _end_gather(bucket)
        for number, (bucket, view) in enumerate(views):
            self.begun.add(id(bucket))  # first: an update that fails at once may have written some of its values
            touched = [each for each, _ in views[number : number + 2]]  # the second is fetched ahead
            lent_to = bucket.begin_update(partial(_run, partial(self._updater.update, view), touched))
            self._map.gradients_of(bucket).sharded.lent_to(lent_to)

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


def _run(update: Callable[[], None], touched: Sequence[Bucket]) -> None:
    """Run an update. If it fails, drop tiles that it was to overwrite: they were not read, and may not be written."""
    try:
        update()
    except BaseException:
        for bucket in touched:
            if not bucket.master.in_shard:
                bucket.shard.drop(0, bucket.shard.numel)
        raise


def _end_gather(bucket: Bucket) -> None:
    """Wait for a gather under way, and drop tiles that were fetched for a later one: the shard is about to change."""
    if bucket.state in GATHERS:
        bucket.unshard()
    if not bucket.updating:  # or another optimizer's update, which goes on, writes tiles of its own
        bucket.shard.drop(0, bucket.shard.numel)


def _hyperparameters(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Copies of the hyperparameters by id of the parameter; the parameters of a group share one copy."""
    found: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        frozen = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
        found.update((id(parameter), frozen) for parameter in group["params"])
    return found


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())


def _equal(one: Any, other: Any) -> bool:
    ours, theirs = tree_leaves(one), tree_leaves(other)  # betas are a pair, of tensors perhaps
    return len(ours) == len(theirs) and all(map(_same_leaf, ours, theirs))


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return one is other or bool(one == other)  # a copy of nan is the same object
