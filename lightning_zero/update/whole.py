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
from lightning_zero.update.counted import Written, advance, attributes_of, check_alone, written_alone
from lightning_zero.update.footprint import Footprint
from lightning_zero.update.native import MasterLayout
from lightning_zero.update.rules import Traits, examine, settings_of
from lightning_zero.update.shell import ShellGroup, StepCall, run_step
from lightning_zero.update.sizes import Sizes, sizes_of
from lightning_zero.update.state import OptimizerState, WholeState
from lightning_zero.update.updaters import TorchUpdater, scaled_gradient, staged_bytes, tile_numel
from lightning_zero.update.view import UpdateView
from lightning_zero.update.windows import expect_first, in_windows, largest_window, windows_of

_IN_FLIGHT = 3  # number of windows with state in memory: one is fetched, one is updated, and one is put back


@runtime_checkable
class Batches(Protocol):
    """An optimizer that updates several parameters of equal shape together, and needs memory for all of them."""

    def at_once(self, group: dict[str, Any], shape: torch.Size, device: torch.device) -> int: ...


class _Call(NamedTuple):
    """The parameters that one call of the optimizer's step updates."""

    run: Run

    @classmethod
    def all_of(cls, segments: Iterable[Segment], numel: int) -> list[_Call]:
        """Calls for segments in ascending order. Each has at most ``numel`` elements, or is one larger segment."""
        found = [[run.segments[0] for run in tile] for tile in tiles(map(Run.of, segments), numel)]
        return [cls(Run(some[0].start, some[-1].stop, tuple(some))) for some in found]

    @staticmethod
    def most_at_once(calls: Iterable[_Call], tile: int | None, nbytes: Callable[[Segment], int]) -> int:
        """The most bytes of state that are fetched together for one window."""
        fetched = (sum(nbytes(s) for call in window for s in call.run.segments) for window in windows_of(calls, tile))
        return max(fetched, default=0)


class _Fetched:
    """The state of whole parameters, with the interface ``WindowedState`` for an update by windows.

    Args:
        own: the state of the bucket.
        segments: the segments that are updated.
        leaving: for each window that is being put back, the tensors of its state.
        kept: number of windows, the last ones, that may still be on their way back when another one is fetched.
    """

    def __init__(self, own: WholeState, segments: Sequence[Segment], leaving: list[list[Rested]], kept: int) -> None:
        self._own, self._segments, self._leaving, self._kept = own, segments, leaving, kept

    def _within(self, start: int, stop: int) -> list[Segment]:
        return [segment for segment in self._segments if start <= segment.start < stop]

    def expect(self, start: int, stop: int, names: Iterable[str]) -> None:
        """Begin to fetch all state of the segments in ``[start, stop)``. ``names`` is ignored."""
        settle_before(self._leaving, self._kept)
        self._own.expect(self._within(start, stop))

    def commit(self, start: int, stop: int) -> None:
        """Begin to put back the state of the segments in ``[start, stop)``."""
        self._leaving.append(self._own.commit(self._within(start, stop)))


class WholeUpdater(TorchUpdater):
    """Runs any torch optimizer that updates each parameter independently of the others.

    If a bucket keeps parameters whole, the optimizer sees them in their own shapes, with their gradients and with the
    state that it has made, unchanged. If parameters are split, its rule must be element-wise for them, and they are
    updated as by the base class.

    Args:
        optimizer: as the user configured it.
        traits: the optimizer's traits.
        device: the device on which it was tried, and on which groups that are added later are tried.
    """

    def __init__(self, optimizer: Optimizer, traits: Traits, device: torch.device) -> None:
        super().__init__(optimizer, traits)
        self._device = device
        self._sizes: dict[Any, Sizes] = {}
        self._leaving: list[list[Rested]] = []  # state that is being put back on a disk, by window
        # Of the last step: its copy of the optimizer, and what it writes alone, by ids of the groups of a call.
        self._alone: tuple[Optimizer | None, dict[tuple[int, ...], list[Written]]] = None, {}

    def master_layout(self, bucket: Bucket) -> MasterLayout | None:
        if not bucket.layout.keeps_whole:
            self._check_split(bucket)
        return None

    def _check_split(self, bucket: Bucket) -> None:
        """Refuse a bucket in which parameters are cut that must be whole.

        Raises:
            ValueError: it has such a parameter, which the message names.
        """
        traits = examine(self.optimizer, self._device)  # with the groups as they are now
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
        self._leaving.clear()  # a place on the disk is freed when its last write, which refers to the tensor, has ended
        super().clear()

    def _fetched(self, view: UpdateView, own: WholeState, alone: bool) -> _Fetched:
        return _Fetched(own, view.segments, self._leaving, 0 if alone else _IN_FLIGHT - 2)

    def _calls(self, view: UpdateView, own: WholeState) -> tuple[list[_Call], bool]:
        """The calls of an update, and whether a window is fetched only when the previous one has been put back."""
        calls, store = _Call.all_of(view.segments, tile_numel(view.master)), view.placement.optimizer_store
        state = _Call.most_at_once(calls, store.tile, lambda segment: sum(map(nbytes_of, own.resting([segment]))))
        return calls, not _reads_ahead(store, state)

    def _update_whole(self, view: UpdateView, own: WholeState, segments: Sequence[Segment]) -> None:
        """Update some parameters by one call of the optimizer's step."""
        groups: dict[int, ShellGroup] = {}
        values: list[Tensor] = []  # 1-D, as in the shard
        tensors: list[Tensor] = []  # the same values in the parameters' shapes
        for segment in segments:
            form = own.formats[segment.param]
            values.append(view.master.read(segment.start, segment.stop))
            tensors.append(form.view(values[-1]))
            gradient = scaled_gradient(view, segment.start, segment.stop, values[-1].dtype)
            tensors[-1].grad = form.view(gradient)
            hyperparameters = view.groups[segment.param]
            groups.setdefault(id(hyperparameters), ShellGroup([], hyperparameters)).tensors.append(tensors[-1])
        state = {tensor: own.get(segment) for tensor, segment in zip(tensors, segments, strict=True)}
        self._run_step(view, list(groups.values()), state)
        for segment, flat, tensor in zip(segments, values, tensors, strict=True):
            if tensor.data_ptr() != flat.data_ptr():  # the step has assigned `data`
                own.formats[segment.param].view(flat).copy_(tensor)
            view.master.keep(segment.start, flat)
            own.put(segment, state[tensor])

    def _run_step(self, view: UpdateView, groups: Sequence[ShellGroup], state: dict[Tensor, dict[str, Any]]) -> None:
        """Does what the base class does.

        Raises:
            KeptOutsideError: the step has written to the groups or to attributes, and not what :meth:`advance` writes.
        """
        shell = run_step(view.optimizer, groups, state, view.call)
        known, attributes = [group.hyperparameters for group in groups], attributes_of(view.optimizer)
        written = [Written.by(shell, group, attributes, index) for index, group in enumerate(known)]
        check_alone(type(self.optimizer).__name__, written, self._written_alone(view, known))

    def _written_alone(self, view: UpdateView, groups: Sequence[dict[str, Any]]) -> list[Written]:
        """Finds what :meth:`advance` writes to these groups and to attributes, once per step for all its tiles."""
        if not self._traits.counts:
            return []
        if self._alone[0] is not view.optimizer:  # which is copied once per step
            self._alone = view.optimizer, {}
        found, key = self._alone[1], tuple(map(id, groups))  # the copies of a step's groups live as long as it
        if key not in found:
            found[key] = written_alone(view.optimizer, groups, view.call)
        return found[key]

    def advance(self, call: StepCall) -> None:
        if self._traits.counts:
            advance(self.optimizer, call)

    def state_names(self, group: dict[str, Any], parameter: Tensor) -> frozenset[str]:
        return frozenset(self.state_shapes(group, parameter))

    def state_shapes(self, group: dict[str, Any], parameter: Tensor) -> dict[str, torch.Size]:
        return dict(self._sizes_of(group, parameter.shape, torch.float32).shapes)

    def footprint(self, bucket: BucketForm) -> Footprint:
        """The memory for a bucket; see the base class. State is what the optimizer makes for this rank's parameters."""
        if not bucket.layout.keeps_whole:
            return super().footprint(bucket)
        return self._footprint(bucket, self._members(bucket))

    def _footprint(self, bucket: BucketForm, members: Sequence[tuple[Segment, dict[str, Any]]]) -> Footprint:
        """The footprint of some segments, with their groups, of a bucket that keeps parameters whole."""
        master = bucket.master
        sizes = {
            segment: self._sizes_of(group, bucket.parameters[segment.param].shape, master.dtype)
            for segment, group in members
        }
        calls, store = _Call.all_of(sizes, tile_numel(master)), bucket.placement.optimizer_store
        found = [call.run.segments for call in calls]
        gradients = max((sum(s.numel for s in tile) for tile in found), default=0) * master.dtype.itemsize
        # A step updates one parameter or batch after the other, and frees the memory of one before the next.
        groups = dict(members)
        passing = max((self._passing_of(bucket, {s: groups[s] for s in tile}) for tile in found), default=0)
        fresh = 0
        if store.tile is not None:
            fresh = state = _Call.most_at_once(calls, store.tile, lambda segment: sizes[segment].state)
            # Windows of a previous bucket, with smaller state, may still be on their way back.
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
        """The most temporary bytes that a step needs for parameters that it updates in one call."""
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
        """Returns what :func:`sizes_of` does. Results are kept: all parameters of one shape ask for the same ones."""
        key = settings_of(group), shape, dtype, count
        if key not in self._sizes:
            self._sizes[key] = sizes_of(self.optimizer, group, shape, dtype, count)
        return self._sizes[key]


def settle_before(leaving: list[list[Rested]], kept: int) -> None:
    """Wait until all tensors but those of the last ``kept`` lists are where they rest, so that their memory is free."""
    while len(leaving) > kept:
        for values in leaving.pop(0):
            values.settle()


def _reads_ahead(store: TensorStore, state: int) -> bool:
    """Whether one window is fetched while another is updated, if each has at most ``state`` bytes of state."""
    return _IN_FLIGHT * state <= store.passing_bytes
