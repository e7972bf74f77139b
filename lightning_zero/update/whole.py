"""The update of whole parameters, for optimizers that are not element-wise: Muon, Adafactor, LAMB, Shampoo, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.advice import Case, advice
from lightning_zero.sharding import Bucket, BucketForm, Run, Segment, tiles
from lightning_zero.storage import Rested, TensorStore
from lightning_zero.storage.rested import nbytes_of
from lightning_zero.update.counted import advance
from lightning_zero.update.footprint import Footprint
from lightning_zero.update.native import MasterLayout
from lightning_zero.update.rules import Traits, examine
from lightning_zero.update.shell import ShellGroup, StepCall, run_step
from lightning_zero.update.sizes import Sizes, sizes_of
from lightning_zero.update.state import OptimizerState, WholeState
from lightning_zero.update.updaters import TorchUpdater, scaled_gradient, staged_bytes, tile_numel
from lightning_zero.update.view import UpdateView
from lightning_zero.update.windows import expect_first, in_windows, largest_window, windows_of

_IN_FLIGHT = 3  # windows whose state is in memory at a time: of one it is fetched, of one updated, of one put back


@runtime_checkable
class Batches(Protocol):
    """An optimizer that updates several parameters of equal shape together, and takes memory for all of them."""

    def at_once(self, group: dict[str, Any], shape: torch.Size, device: torch.device) -> int: ...


class _Call(NamedTuple):
    """Parameters that are updated by one call of the optimizer's step."""

    run: Run

    @classmethod
    def all_of(cls, segments: Iterable[Segment], numel: int) -> list[_Call]:
        """Calls for segments in ascending order, of at most ``numel`` elements, or for one segment alone."""
        found = [[run.segments[0] for run in tile] for tile in tiles(map(Run.of, segments), numel)]
        return [cls(Run(some[0].start, some[-1].stop, tuple(some))) for some in found]

    @staticmethod
    def most_at_once(calls: Iterable[_Call], tile: int | None, nbytes: Callable[[Segment], int]) -> int:
        """The most bytes of state that are fetched together."""
        fetched = (sum(nbytes(s) for call in window for s in call.run.segments) for window in windows_of(calls, tile))
        return max(fetched, default=0)


class _Fetched:
    """The state of whole parameters as an update by windows uses it; see ``WindowedState``.

    Args:
        own: of the bucket.
        segments: that are updated.
        leaving: the tensors that are being put back, by the window that they were fetched for.
        kept: windows whose state may still be on its way when that of another is fetched: the last ones.
    """

    def __init__(self, own: WholeState, segments: Sequence[Segment], leaving: list[list[Rested]], kept: int) -> None:
        self._own, self._segments, self._leaving, self._kept = own, segments, leaving, kept

    def _within(self, start: int, stop: int) -> list[Segment]:
        return [segment for segment in self._segments if start <= segment.start < stop]

    def expect(self, start: int, stop: int, names: Iterable[str]) -> None:
        """Begin to fetch all the state of what lies in ``[start, stop)``, whatever its names."""
        settle_before(self._leaving, self._kept)
        self._own.expect(self._within(start, stop))

    def commit(self, start: int, stop: int) -> None:
        """Begin to put it back."""
        self._leaving.append(self._own.commit(self._within(start, stop)))


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
        self._leaving: list[list[Rested]] = []  # state on its way to a disk

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
        calls, alone = self._calls(view, view.state)
        state = self._fetched(view, view.state, alone)
        for window in in_windows(view, state, calls, lambda _: (), one_at_a_time=alone):
            for call in window:
                self._update_whole(view, view.state, call.run.segments)
                view.master.write(call.run.start, call.run.stop)

    def expect(self, view: UpdateView) -> None:
        if not isinstance(view.state, WholeState):
            super().expect(view)
            return
        calls, alone = self._calls(view, view.state)
        if not alone:
            expect_first(view, self._fetched(view, view.state, alone), calls, lambda _: ())

    def clear(self) -> None:
        settle_before(self._leaving, 0)  # their places on the disk are free then
        super().clear()

    def _fetched(self, view: UpdateView, own: WholeState, alone: bool) -> _Fetched:
        return _Fetched(own, view.segments, self._leaving, 0 if alone else _IN_FLIGHT - 2)

    def _calls(self, view: UpdateView, own: WholeState) -> tuple[list[_Call], bool]:
        """The calls of an update, and whether a window is fetched only when the one before was put back."""
        calls, store = _Call.all_of(view.segments, tile_numel(view.master)), view.placement.optimizer_store
        state = _Call.most_at_once(calls, store.tile, lambda segment: sum(map(nbytes_of, own.resting([segment]))))
        return calls, not _reads_ahead(store, state)

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
        calls, store = _Call.all_of(sizes, tile_numel(master)), bucket.placement.optimizer_store
        found = [call.run.segments for call in calls]
        gradients = max((sum(s.numel for s in tile) for tile in found), default=0) * master.dtype.itemsize
        # One parameter or batch after the other: what a step takes for one is gone before the next.
        groups = dict(members)
        passing = max((self._passing_of(bucket, {s: groups[s] for s in tile}) for tile in found), default=0)
        fresh = 0
        if store.tile is not None:
            fresh = state = _Call.most_at_once(calls, store.tile, lambda segment: sizes[segment].state)
            # Others may be on their way of a bucket before, whose state is smaller.
            passing += state + min((_IN_FLIGHT - 1) * state, store.passing_bytes * (_IN_FLIGHT - 1) // _IN_FLIGHT)
        return Footprint(
            master,
            {},
            gradients,
            passing,
            fresh=fresh,
            staged=staged_bytes(bucket, master),
            owned=sum(each.state for each in sizes.values()),
            window=largest_window((call.run for call in calls), store.tile),
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


def settle_before(leaving: list[list[Rested]], kept: int) -> None:
    """Wait until all but the last ones of these are where they rest: their memory is free then."""
    while len(leaving) > kept:
        for values in leaving.pop(0):
            values.settle()


def _reads_ahead(store: TensorStore, state: int) -> bool:
    """Whether one window is fetched while another one is updated, where each has at most so many bytes of state."""
    return _IN_FLIGHT * state <= store.passing_bytes
