"""The update of whole parameters, for optimizers that are not element-wise: Muon, Adafactor, LAMB, Shampoo, ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.advice import Case, advice
from lightning_zero.sharding import Bucket, BucketForm, Run, Segment, tiles
from lightning_zero.update.counted import advance
from lightning_zero.update.footprint import Footprint
from lightning_zero.update.native import MasterLayout
from lightning_zero.update.rules import Traits, examine
from lightning_zero.update.shell import ShellGroup, StepCall, run_step
from lightning_zero.update.sizes import Sizes, sizes_of
from lightning_zero.update.state import OptimizerState, WholeState
from lightning_zero.update.updaters import TorchUpdater, scaled_gradient, staged_bytes, tile_numel
from lightning_zero.update.view import UpdateView


@runtime_checkable
class Batches(Protocol):
    """An optimizer that updates several parameters of equal shape together, and takes memory for all of them."""

    def at_once(self, group: dict[str, Any], shape: torch.Size, device: torch.device) -> int: ...


class WholeUpdater(TorchUpdater):
    """Runs any torch optimizer that updates each parameter by itself, whatever it reads of that.

    Where parameters lie whole it sees them in their own shapes, with their gradients and all state that it keeps of
    them, which stays what it made. Where they are split, its rule is element-wise for them, and it runs as others do.

    Args:
        optimizer: as the user configured it.
        traits: of the optimizer.
        device: on which it was tried, and groups that join later are.
    """

    def __init__(self, optimizer: Optimizer, traits: Traits, device: torch.device) -> None:
        super().__init__(optimizer, traits)
        self._device = device
        self._sizes: dict[Any, Sizes] = {}

    def master_layout(self, bucket: Bucket) -> MasterLayout | None:
        if not bucket.layout.keeps_whole:
            self._check_split(bucket)
        return None

    def _check_split(self, bucket: Bucket) -> None:
        """Refuse parameters that are cut and must not be.

        Raises:
            ValueError: names one.
        """
        traits = examine(self.optimizer, self._device)  # of the groups as they are now
        for group, whole in zip(self.optimizer.param_groups, traits.whole, strict=True):
            for parameter in group["params"] if whole else ():
                if (index := bucket.index.get(id(parameter))) is not None:
                    raise ValueError(
                        f"{type(self.optimizer).__name__} needs whole parameters, and {bucket.names[index]!r} was cut "
                        "into shards before it was known to be updated by it"
                        f"{advice(Case.NEEDS_WHOLE_PARAMETERS, '. ')}"
                    )

    def _new_state(self, bucket: Bucket) -> OptimizerState:
        return WholeState(bucket) if bucket.layout.keeps_whole else super()._new_state(bucket)

    def update(self, view: UpdateView) -> None:
        if not isinstance(view.state, WholeState):
            super().update(view)
            return
        for tile in tiles(map(Run.of, view.segments), tile_numel(view.master)):
            self._update_whole(view, view.state, [run.segments[0] for run in tile])
            view.master.write(tile[0].start, tile[-1].stop)

    def expect(self, view: UpdateView) -> None:
        if not isinstance(view.state, WholeState):  # which is read where it is updated
            super().expect(view)

    def _update_whole(self, view: UpdateView, own: WholeState, segments: Sequence[Segment]) -> None:
        """One call of the optimizer's step for some parameters."""
        groups: dict[int, ShellGroup] = {}
        values: list[Tensor] = []  # 1-D, as they lie in the shard
        tensors: list[Tensor] = []  # the same in their own shapes
        for segment in segments:
            form = own.formats[segment.param]
            values.append(view.master.read(segment.start, segment.stop))
            tensors.append(form.view(values[-1]))
            gradient = scaled_gradient(view, segment.start, segment.stop, values[-1].dtype)
            tensors[-1].grad = form.view(gradient)
            hyperparameters = view.groups[segment.param]
            groups.setdefault(id(hyperparameters), ShellGroup([], hyperparameters)).tensors.append(tensors[-1])
        state = {tensor: own.get(segment) for tensor, segment in zip(tensors, segments, strict=True)}
        run_step(view.optimizer, list(groups.values()), state, view.call)
        for segment, flat, tensor in zip(segments, values, tensors, strict=True):
            if tensor.data_ptr() != flat.data_ptr():  # `data` was assigned
                own.formats[segment.param].view(flat).copy_(tensor)
            view.master.keep(segment.start, flat)
            own.put(segment, state[tensor])

    def advance(self, call: StepCall) -> None:
        if self._traits.counts:
            advance(self.optimizer, call)

    def state_names(self, group: dict[str, Any], parameter: Tensor) -> frozenset[str]:
        return frozenset(self.state_shapes(group, parameter))

    def state_shapes(self, group: dict[str, Any], parameter: Tensor) -> dict[str, torch.Size]:
        return dict(self._sizes_of(group, parameter.shape, torch.float32).shapes)

    def footprint(self, bucket: BucketForm) -> Footprint:
        """The state of this rank's parameters as the optimizer makes it; see the base class."""
        if not bucket.layout.keeps_whole:
            return super().footprint(bucket)
        return self._footprint(bucket, self._members(bucket))

    def _footprint(self, bucket: BucketForm, members: Sequence[tuple[Segment, dict[str, Any]]]) -> Footprint:
        """As :meth:`footprint`, of some segments of a bucket that keeps parameters whole, with their groups."""
        master = bucket.master
        sizes = {
            segment: self._sizes_of(group, bucket.parameters[segment.param].shape, master.dtype)
            for segment, group in members
        }
        found = [[run.segments[0] for run in tile] for tile in tiles(map(Run.of, sizes), tile_numel(master))]
        gradients = max((sum(s.numel for s in tile) for tile in found), default=0) * master.dtype.itemsize
        # One parameter or batch after the other: what a step takes for one is gone before the next.
        groups = dict(members)
        passing = max((self._passing_of(bucket, {s: groups[s] for s in tile}) for tile in found), default=0)
        if bucket.placement.optimizer_store.tile is not None:  # the values and state that are updated are copies
            size = {segment: sizes[segment].state + segment.numel * master.dtype.itemsize for segment in sizes}
            passing += max((sum(map(size.__getitem__, tile)) for tile in found), default=0)
        return Footprint(
            master,
            {},
            gradients,
            passing,
            staged=staged_bytes(bucket, master),
            owned=sum(each.state for each in sizes.values()),
        )

    def _passing_of(self, bucket: BucketForm, tile: Mapping[Segment, dict[str, Any]]) -> int:
        """The most bytes that a step takes in passing for parameters that it updates in one call."""
        alike: dict[tuple[int, torch.Size], list[dict[str, Any]]] = {}
        for segment, group in tile.items():
            alike.setdefault((id(group), bucket.parameters[segment.param].shape), []).append(group)
        most, master = 0, bucket.master
        for (_, shape), (group, *others) in alike.items():
            count = 1 + len(others)
            at_once = self.optimizer.at_once(group, shape, master.device) if isinstance(self.optimizer, Batches) else 1
            most = max(most, self._sizes_of(group, shape, master.dtype, min(count, at_once)).passing)
        return most

    def _sizes_of(self, group: dict[str, Any], shape: torch.Size, dtype: torch.dtype, count: int = 1) -> Sizes:
        """See :func:`sizes_of`; parameters of one shape ask the same."""
        plain = {k: v for k, v in group.items() if k != "params"}
        key = shape, dtype, repr(plain), count
        if key not in self._sizes:
            self._sizes[key] = sizes_of(self.optimizer, plain, shape, dtype, count)
        return self._sizes[key]
