"""The update over shards, by which an attached optimizer steps when the engine has reduced the gradients."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero import ops
from lightning_zero.sharding import Bucket, BucketForm, MasterForm, Run, Segment, runs, tiles
from lightning_zero.sharding.masters import Master
from lightning_zero.storage import Memory
from lightning_zero.torch_private import tree_map
from lightning_zero.update.footprint import Footprint
from lightning_zero.update.loading import in_torchs_form
from lightning_zero.update.native import MasterLayout
from lightning_zero.update.rules import DTYPES_STATED, ELEMENT_WISE, Traits, settings_of, state_dtypes, state_names
from lightning_zero.update.shell import ShellGroup, StepCall, in_form_for, run_step, steps_together
from lightning_zero.update.sizes import passing_bytes
from lightning_zero.update.state import OptimizerState, OwnedTensor, ParameterState, ShardState, WholeState
from lightning_zero.update.view import UpdateView
from lightning_zero.update.windows import expect_first, in_windows, largest_window

NativeOptimizer = Literal["auto", "off"]

# Number of elements whose gradients are converted and scaled at a time, on the host and on devices. On the host no more
# elements than that are updated at a time, so that temporary tensors stay in the processor's caches, and in memory that
# the C allocator keeps.
_HOST_TILE, _DEVICE_TILE = 1 << 19, 1 << 22

V = TypeVar("V")


class StateForm(NamedTuple):
    """The state that one optimizer keeps for a bucket, without the values of its tensors."""

    dtypes: dict[str, torch.dtype]  # of the per-element state, by name
    own: dict[int, ParameterState]  # by index of the parameter; parameters without state are missing


class Updater(ABC):
    """Applies an optimizer's rule to segments and keeps their state.

    Args:
        optimizer: as the user configured it. If its constructor has made state (as Adagrad's does), that is moved here.
        traits: the optimizer's traits; ``whole`` is ignored.
        dtype: dtype of the state with one value per element; ``None``: the one that the optimizer gives it.
    """

    def __init__(self, optimizer: Optimizer, traits: Traits, dtype: torch.dtype | None = None) -> None:
        self.optimizer = optimizer
        self._traits = traits
        self._dtype = dtype
        self._states: dict[int, OptimizerState] = {}  # by id of the bucket

    @property
    def per_element(self) -> frozenset[str]:
        """Names of the state with one value per element."""
        return self._traits.per_element

    def state_of(self, bucket: Bucket) -> OptimizerState:
        """The state of this rank's segments of ``bucket``, for reading. If there is none, it has no entries."""
        bucket.await_update()
        return self._states.get(id(bucket)) or self._new_state(bucket)

    def own_state(self, bucket: Bucket) -> OptimizerState:
        """The state of this rank's segments of ``bucket``, for an update to write; it is made on first use."""
        if id(bucket) not in self._states:
            self._states[id(bucket)] = self._new_state(bucket)
        return self._states[id(bucket)]

    def _new_state(self, bucket: Bucket) -> OptimizerState:
        return ShardState(bucket, self.per_element, self._dtype)

    def gather_state(self, bucket: Bucket) -> dict[int, dict[str, Any]]:
        """Gather the full state of a bucket's parameters. Collective.

        Args:
            bucket: holds the parameters.

        Returns:
            For each parameter that has state, by its index in the bucket: the state under torch's names, as tensors on
            the CPU, those with one value per element in the parameter's shape, and scalars.
        """
        (known,) = self.describe_state([bucket])
        flat = {}
        for name, dtype in known.dtypes.items():
            full = self.gather_flat(bucket, name, dtype)
            flat[name] = bucket.placement.on_host(full, bucket.name)

        def resolved(leaf: Any, index: int) -> Any:
            if isinstance(leaf, OwnedTensor):
                values = self.gather_owned(bucket, index, leaf)
                return leaf.form.view(bucket.placement.on_host(values, bucket.name))
            return copy.deepcopy(leaf)

        return {
            index: {name: bucket.view(flat[name], index).clone() for name in own.names}
            | tree_map(partial(resolved, index=index), own.rest)
            for index, own in known.own.items()
        }

    def read_flat(self, bucket: Bucket, name: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of this rank's shard of per-element state, 1-D; zeros if there is none yet."""
        state = self.state_of(bucket)
        assert isinstance(state, ShardState)
        return state.read(name, dtype, start, stop)

    def gather_flat(self, bucket: Bucket, name: str, dtype: torch.dtype) -> Tensor:
        """Gather the per-element state of a bucket, laid out as its flat buffer: 1-D, on the device. Collective."""
        read = partial(self.read_flat, bucket, name, dtype)
        return bucket.gather_read(read, dtype, self.state_of(bucket).memory)

    def owned(self, bucket: Bucket, index: int, tensor: OwnedTensor, start: int = 0, stop: int | None = None) -> Tensor:
        """A tensor of the state of a parameter on this rank, or a part of it: 1-D, in the order of its memory."""
        state = self.state_of(bucket)
        assert isinstance(state, WholeState)
        return state.read_owned(index, tensor, start, stop)

    def gather_owned(self, bucket: Bucket, index: int, tensor: OwnedTensor) -> Tensor:
        """Gather a tensor of a parameter's state: 1-D, in the order of its memory, on the device. Collective."""
        placement, owner = bucket.placement, bucket.layout.owner(index)
        values = torch.empty(tensor.form.shape.numel(), dtype=tensor.dtype, device=placement.device)
        if placement.mesh.shard.rank == owner:
            memories: tuple[Memory, Memory] = self.state_of(bucket).memory, "device"
            placement.copy(values, self.owned(bucket, index, tensor), memories, bucket.name)
        return placement.mesh.shard.broadcast_(values, f"gather state of {bucket.names[index]}", owner)

    def describe_state(self, buckets: Sequence[Bucket]) -> list[StateForm]:
        """Describe the state of the parameters of each bucket, over all ranks. Collective."""
        # A rank may own no segment of a parameter or of the bucket, so it must ask what the others have.
        mine = []
        for bucket in buckets:
            state = self.state_of(bucket)
            own = {s.param: state.describe(s) for s in bucket.segments if s in state}
            mine.append(StateForm(state.dtypes, own))
        group = buckets[0].placement.mesh.shard if buckets else None
        everyone = group.all_gather_object(mine, "describe the optimizer state") if group is not None else []
        return [
            StateForm(
                _sorted_by_key(theirs.dtypes for theirs in described),
                _sorted_by_key(theirs.own for theirs in described),
            )
            for described in zip(*everyone, strict=True)
        ]

    def adopt(self, holder: Callable[[Tensor], Bucket | None]) -> None:
        """Move state from the optimizer itself into shards.

        Args:
            holder: gives the bucket that holds a parameter; ``None`` if there is none.
        """
        for parameter, state in self._portable_state():
            if (bucket := holder(parameter)) is not None:
                self.load(bucket, bucket.index[id(parameter)], state)
        self.optimizer.state.clear()

    def _portable_state(self) -> Iterable[tuple[Tensor, dict[str, Any]]]:
        """Gives the state that the optimizer itself keeps of each parameter, in the format of torch's state dicts."""
        return self.optimizer.state.items()

    @abstractmethod
    def master_layout(self, bucket: Bucket) -> MasterLayout | None:
        """The layout that a 16-bit bucket's master must have for updates; ``None``: any layout will do.

        Args:
            bucket: a bucket in which the optimizer has parameters.

        Raises:
            ValueError: the bucket cannot be updated because of its placement or layout.
        """

    @abstractmethod
    def check(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise the errors that updates with these hyperparameters would raise; on all ranks, before any writes.

        Raises:
            ValueError: a hyperparameter is out of range.
        """

    @abstractmethod
    def alike_under(self, defaults: Collection[torch.dtype]) -> bool:
        """Tell whether updates are the same with each of ``defaults`` as torch's default dtype.

        It is the dtype of the process: an update beside a forward of a 16-bit mode may run with either dtype.
        """

    def load(self, bucket: Bucket, index: int, state: dict[str, Any]) -> None:
        """Overwrite this rank's state of one parameter.

        Args:
            bucket: holds the parameter.
            index: index of the parameter in the bucket.
            state: the parameter's full state. Tensors with one value per element have the parameter's shape.
        """
        # A CPU optimizer that was used alone has masters in its state. Here masters are set together with the weights.
        state = {k: v for k, v in state.items() if k not in ("master", "remainder")}
        state = in_torchs_form(self.optimizer, bucket.parameters[index], state, bucket.master.device)
        bucket.await_update()
        for segment in bucket.segments:
            if segment.param == index:
                # State of another dtype is converted as torch's `load_state_dict` would convert it.
                own = self.own_state(bucket)
                own.put_slice(segment, state, self._dtype or bucket.master.dtype, self._traits.own_dtype)

    def _members(self, bucket: BucketForm) -> list[tuple[Segment, dict[str, Any]]]:
        """This rank's segments of ``bucket`` that will be updated, each with its parameter group."""
        group_of = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        owned = [(segment, bucket.parameters[segment.param]) for segment in bucket.segments]
        return [(s, group_of[id(p)]) for s, p in owned if id(p) in group_of and p.requires_grad]

    @abstractmethod
    def state_names(self, group: dict[str, Any], parameter: Tensor) -> frozenset[str]:
        """The names of the tensors that the optimizer keeps of ``parameter`` with the hyperparameters of ``group``."""

    def state_shapes(self, group: dict[str, Any], parameter: Tensor) -> dict[str, torch.Size]:
        """The shapes of these tensors by name, as far as they are known."""
        return dict.fromkeys(self.per_element, parameter.shape)

    @abstractmethod
    def footprint(self, bucket: BucketForm) -> Footprint:
        """The memory that the update of ``bucket`` needs; see :class:`lightning_zero.update.footprint.Footprint`."""

    def clear(self) -> None:
        """Forget all state, as before the first step."""
        for state in self._states.values():
            state.clear()

    def advance(self, call: StepCall) -> None:  # noqa: B027  (most optimizers write nothing)
        """Write the values that a step writes to the optimizer's groups and attributes.

        It is called once per step, after the updates have begun.
        """

    @abstractmethod
    def update(self, view: UpdateView) -> None:
        """Update the masters of ``view.segments`` with ``view.gradient``, and publish them."""

    @abstractmethod
    def expect(self, view: UpdateView) -> None:
        """Begin to fetch the first data that :meth:`update` of ``view``, which is the next update, will need."""


def _sorted_by_key(parts: Iterable[Mapping[Any, V]]) -> dict[Any, V]:
    """Merge the parts, sorted by key. If several parts have a key, the value of the last one is used."""
    merged = {key: value for part in parts for key, value in part.items()}
    return {key: merged[key] for key in sorted(merged)}


class TorchUpdater(Updater):
    """Runs any element-wise torch optimizer by means of a shell, a tile at a time.

    If this changes no bit, adjacent segments of equal state are updated as one tensor, and long segments as several.
    """

    def __init__(self, optimizer: Optimizer, traits: Traits) -> None:
        super().__init__(optimizer, traits)
        self._has_state_at_once = bool(optimizer.state)  # whether its constructor makes state, as Adagrad's does
        self._passing: dict[tuple[str, torch.dtype, bool], int] = {}

    def master_layout(self, bucket: Bucket) -> MasterLayout | None:
        return None

    def check(self, groups: Iterable[dict[str, Any]]) -> None:
        """Do nothing, because torch's optimizers check their hyperparameters."""

    def alike_under(self, defaults: Collection[torch.dtype]) -> bool:
        """Whether the class is known to state the dtypes of the tensors that it makes."""
        own = type(self.optimizer)
        return torch.float64 not in defaults and (own in DTYPES_STATED or "dtypes_stated" in vars(own))

    def state_names(self, group: dict[str, Any], parameter: Tensor) -> frozenset[str]:
        if self._has_state_at_once:  # a trial would need this state, which has been moved to shards since
            return self.per_element
        return state_names(self.optimizer, group, torch.device("cpu"))

    def footprint(self, bucket: BucketForm) -> Footprint:
        """The memory for a bucket; see the base class. State is as for a parameter of the master's dtype."""
        members, master = self._members(bucket), bucket.master
        groups, state = {segment.param: group for segment, group in members}, dict[str, torch.dtype]()
        distinct = {id(group): group for group in groups.values()}.values()
        for group in distinct:
            state |= state_dtypes(self.optimizer, group, master.dtype, master.device)
        # All segments are assumed to have the same state, as they have made the same number of steps.
        segments, disk_tile = [segment for segment, _ in members], bucket.placement.optimizer_store.tile
        parts = [*self._parts(segments, groups, master, lambda _: None, disk_tile)]
        found = [sum(part.numel for part in tile) for tile in tiles(parts, tile_numel(master))]
        tile, part, passing = max(found, default=0), max((part.numel for part in parts), default=0), 0
        for group in distinct:
            together = steps_together(group, bucket.placement.device)
            passing = max(passing, (tile if together else part) * self._passing_bytes(group, master.dtype, together))
        fresh = tile * sum(dtype.itemsize for dtype in state.values())
        return Footprint(
            master,
            state,
            tile * master.dtype.itemsize,
            passing,
            fresh,
            len(found) == 1,
            staged_bytes(bucket, master),
            window=largest_window(parts, disk_tile),
        )

    def _passing_bytes(self, group: dict[str, Any], dtype: torch.dtype, foreach: bool) -> int:
        """Returns what :func:`passing_bytes` does. Results are kept, because all buckets ask for the same ones."""
        key = settings_of(group), dtype, foreach
        if key not in self._passing:
            self._passing[key] = passing_bytes(self.optimizer, group, dtype, foreach)
        return self._passing[key]

    def _parts(
        self,
        segments: Sequence[Segment],
        groups: Mapping[int, dict[str, Any]],
        master: Master | MasterForm,
        state_key: Callable[[Segment], Hashable],
        tile: int | None,
    ) -> Iterator[Run]:
        """Cut segments into runs that torch updates as one tensor each.

        Args:
            segments: the segments to update, in ascending order.
            groups: hyperparameters by index of the parameter.
            master: the bucket's master.
            state_key: see :meth:`ShardState.key`.
            tile: number of elements of a tile of the optimizer's store; ``None``: it has none.
        """
        numel = tile_numel(master)

        def key(segment: Segment) -> Hashable:
            group = groups[segment.param]
            return (id(group), state_key(segment)) if self._divides(group, master) else segment

        for run in runs(segments, key):
            if not self._divides(groups[run.segments[0].param], master):
                yield run
            else:
                yield from run.cut(numel) if tile is None else run.cut_at(min(numel, tile))

    def _divides(self, group: dict[str, Any], master: Master | MasterForm) -> bool:
        """Tell whether the updated value of an element has the same bits in whatever tensor torch updates it.

        With 16-bit values and in fused kernels it does not: the loop over vectors rounds otherwise than the loop over
        the elements that are left at the end of a tensor. For classes that are not torch's it is unknown. On a device
        there is no need to join or cut segments, since one kernel of torch updates many tensors there.
        """
        known = type(self.optimizer) in ELEMENT_WISE and not group.get("fused")
        return known and master.device.type == "cpu" and master.dtype.itemsize >= torch.float32.itemsize

    def update(self, view: UpdateView) -> None:
        state = view.state
        assert isinstance(state, ShardState)
        # The parts take their state before any is updated, because a segment may be in several parts.
        parts = list(self._parts_of(view, state))
        for window in in_windows(view, state, parts, lambda part: part.names):
            for tile in tiles(window, tile_numel(view.master)):
                self._update_tile(view, state, tile)
                view.master.write(tile[0].run.start, tile[-1].run.stop)

    def expect(self, view: UpdateView) -> None:
        state = view.state
        assert isinstance(state, ShardState)
        expect_first(view, state, self._parts_of(view, state), lambda part: part.names)

    def _parts_of(self, view: UpdateView, state: ShardState) -> Iterator[_Part]:
        for run in self._parts(view.segments, view.groups, view.master, state.key, view.tile):
            yield _Part(run, state.names(run.segments[0]), state.own_scalars(run))

    def _update_tile(self, view: UpdateView, own: ShardState, tile: Sequence[_Part]) -> None:
        master = view.master
        shell_groups: dict[int, ShellGroup] = {}
        state: dict[Tensor, dict[str, Any]] = {}
        by_tensor: dict[Tensor, Run] = {}
        for run, names, scalars in tile:
            tensor = master.read(run.start, run.stop)
            tensor.grad = scaled_gradient(view, run.start, run.stop, tensor.dtype)
            hyperparameters = view.groups[run.segments[0].param]
            if id(hyperparameters) not in shell_groups:
                form = in_form_for(view.parameters[run.segments[0].param].device, hyperparameters)
                shell_groups[id(hyperparameters)] = ShellGroup([], form)
            shell_groups[id(hyperparameters)].tensors.append(tensor)
            state[tensor] = own.views(run, names) | scalars
            by_tensor[tensor] = run
        self._run_step(view, list(shell_groups.values()), state)
        for tensor, run in by_tensor.items():
            master.keep(run.start, tensor)
            own.put(run, state[tensor])

    def _run_step(self, view: UpdateView, groups: Sequence[ShellGroup], state: dict[Tensor, dict[str, Any]]) -> None:
        """Update the tensors of groups and their state in place."""
        run_step(view.optimizer, groups, state, view.call)


def scaled_gradient(view: UpdateView, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """The gradients with which elements ``[start, stop)`` of the shard are updated: 1-D, scaled, in ``dtype``."""
    gradient = view.gradient.read(start, stop)
    if view.grad_scale != 1.0:
        # This is out of place because the averaged gradient is kept until zero_grad. It uses the wider dtype because a
        # scaled fp32 gradient may be too large for fp16, and an unscaled fp16 gradient too small.
        wide = gradient.to(torch.promote_types(gradient.dtype, dtype))
        gradient = wide * view.grad_scale if wide is gradient else wide.mul_(view.grad_scale)
    return gradient.to(dtype)


def staged_bytes(bucket: BucketForm, master: MasterForm) -> int:
    """Bytes of a shard on the device whose values are rounded on the host, because the master is there; else 0."""
    rounded = ops.runs_on(master.device) and not ops.runs_on(bucket.placement.shard_device)
    return bucket.layout.shard_numel * bucket.dtype.itemsize if rounded and master.dtype != bucket.dtype else 0


class _Part(NamedTuple):
    """A run that torch updates as one tensor, and the run's state before the update."""

    run: Run
    names: tuple[str, ...]  # names of the per-element state
    scalars: dict[str, Any]

    @property
    def numel(self) -> int:
        return self.run.numel


def tile_numel(master: Master | MasterForm) -> int:
    """The number of elements that are updated at a time, except for larger parameters."""
    return _HOST_TILE if master.device.type == "cpu" else _DEVICE_TILE
