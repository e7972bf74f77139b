"""Runs steps of training without tensors, which count memory and traffic in the order of a real step.

The runtime's own :class:`~lightning_zero.sharding.reducer.Reducer` and
:class:`~lightning_zero.sharding.prefetch.Prefetcher` decide when buckets are gathered, freed and reduced. Here they
drive buckets without tensors, which count bytes on an account and collectives on imagined groups.
:class:`RecordedRun` calls them at the same places as the engine and its hooks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.nn import Parameter

from lightning_zero.planning.account import NOTHING, Account, Bytes, state_of
from lightning_zero.planning.lanes import RecordedLanes, RecordedTensor
from lightning_zero.planning.recorded_gradients import RecordedGradients
from lightning_zero.planning.tracing import Trace
from lightning_zero.sharding.bucket import GATHERS, BucketState
from lightning_zero.sharding.collectives import Group
from lightning_zero.sharding.forms import BucketForm
from lightning_zero.sharding.partition import ROOT, Unit
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.sharding.prefetch import Prefetcher
from lightning_zero.sharding.reducer import Reducer
from lightning_zero.storage.disk_file import aligned
from lightning_zero.storage.nvme import tiles_at_work
from lightning_zero.update.clipping import squares_scratch
from lightning_zero.update.footprint import Footprint
from lightning_zero.update.in_backward import left_to_forward

_SMALL_ITEM = 8  # bytes of each number in the step's small all-reduce: float64


class TracedParameters:
    """Activations by parameter and unit, in terms of a plan's module.

    Args:
        trace: of a copy of the module.
        names: of the module's parameters, by their ids.
    """

    def __init__(self, trace: Trace, names: Mapping[int, str]) -> None:
        self._trace = trace
        self._order = {name: number for number, name in enumerate(trace.backward)}
        self._names = names

    def forward(self, unit: str) -> Bytes:
        """The most at a time in the forward of a unit."""
        return Bytes(device=self._trace.forward.get(unit, 0))

    def backward(self, parameter: Parameter) -> Bytes:
        """The most at a time before the gradient of a parameter."""
        return Bytes(device=self._trace.backward.get(self._names[id(parameter)], 0))

    def entered(self, unit: str) -> Bytes:
        """The most at a time before the backward of a unit began."""
        return Bytes(device=self._trace.entered.get(unit, 0))

    def left(self, parameters: Iterable[Parameter]) -> Bytes:
        """The bytes that live on beside the gradients of all of these parameters."""
        names = [self._names[id(p)] for p in parameters if self._names[id(p)] in self._order]
        last = max(names, key=self._order.__getitem__, default=None)
        return NOTHING if last is None else Bytes(device=self._trace.left.get(last, 0))

    def in_order(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """Parameters in the order of their gradients; those that got none are not among them."""
        known = [p for p in parameters if self._names[id(p)] in self._order]
        return sorted(known, key=self.number)

    def number(self, parameter: Parameter) -> int:
        """The place of a parameter's gradient among all."""
        return self._order[self._names[id(parameter)]]


class RecordedBucket:
    """The states of one bucket's flat buffer; see ``Bucket``.

    Attributes:
        form: sizes and dtypes.
        layout: offsets in the flat buffer.
        gradients: of its parameters.
        state: the parameter values that the rank holds.
    """

    def __init__(self, form: BucketForm, account: Account, lanes: RecordedLanes) -> None:
        self.form = form
        self.layout = form.layout
        self.gradients = RecordedGradients(form, account, lanes)
        self._shards_params = form.placement.sharding.shard_params
        self.state = BucketState.SHARDED if self._shards_params else BucketState.GATHERED
        self._flat = RecordedTensor(form.layout.padded_numel, form.dtype)
        self._group = form.placement.mesh.shard
        self._account = account
        self._lanes = lanes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.form.dtype

    @property
    def _shard_bytes(self) -> int:
        return self.layout.shard_numel * self.form.dtype.itemsize

    def begin_unshard(self) -> None:
        """Takes the flat buffer's memory, where it has none, and sends the shard."""
        if self.state is not BucketState.GATHERED and self.state not in GATHERS:
            before = self.state
            if before is BucketState.SHARDED:
                self._account.take(self._flat.amount)
                if self.form.placement.param_store.memory == "host":
                    self._lanes.copied["h2d"] += self._shard_bytes
                self._gather_tiles()
            self._group.count("all_gather", self._flat.nbytes)
            self.state = BucketState.GATHERING if before is BucketState.SHARDED else BucketState.REFRESHING

    def unshard(self) -> None:
        """Waits for the other shards."""
        self.begin_unshard()
        self.state = BucketState.GATHERED

    def reshard(self) -> None:
        """Gives back the flat buffer's memory where the stage shards parameters."""
        if self._shards_params and self.state is not BucketState.SHARDED:
            self._account.give(self._flat.amount)
            self.state = BucketState.SHARDED

    def optimizer_state(self, footprint: Footprint) -> Bytes:
        """The per-element state that an optimizer keeps."""
        return state_of(self.form.placement.optimizer_store, footprint, self.layout.shard_numel)

    def update(self, footprints: Iterable[Footprint], first: bool, scales: bool) -> None:
        """Updates the shard: each optimizer takes memory in passing, and what is gathered is out of date.

        Args:
            footprints: of the optimizers.
            first: whether their state is made, which nobody has taken memory for then.
            scales: whether gradients may be scaled, for clipping or by a loss scaler.
        """
        placement = self.form.placement
        shard_memory = placement.shard_memory
        if self.form.trained and (placement.optimizer_store.memory, shard_memory) == ("host", "device"):
            self._lanes.copied["h2d"] += self._shard_bytes  # what was updated
        for footprint in footprints:
            if not scales and self.gradients.sharded_dtype == footprint.master.dtype:
                footprint = footprint._replace(gradients=0)  # the update reads the sharded gradient itself
            memory = placement.optimizer_store.memory if footprint.master.pieces else shard_memory
            fresh = footprint.fresh if first else 0
            self._account.touch(Bytes.of(memory, footprint.scratch + fresh))
            if first:
                self._account.take(self.optimizer_state(footprint))
                last = footprint.gradients if footprint.one_tile else footprint.scratch
                self._account.touch(Bytes.of(memory, last + fresh))
            self._lanes.update(footprint, self.layout.shard_numel, self.form.dtype.itemsize)
            self._update_tiles(footprint)
            self._lanes.summed += self.gradients.sharded.disk
        if self.form.trained and self.state is BucketState.GATHERED and self.layout.shards > 1:
            self.state = BucketState.STALE

    def _update_tiles(self, footprint: Footprint) -> None:
        store, numel = self.form.placement.optimizer_store, self.layout.shard_numel
        if store.tile is not None:
            sizes = [dtype.itemsize for dtype in (*footprint.master.pieces, *footprint.state.values())]
            if self._shards_params and self.form.placement.param_store.tile is not None:
                sizes.append(self.form.dtype.itemsize)
            if (tile := self.gradients.tile) is not None:
                sizes.append(tile.dtype.itemsize)
            window = max(footprint.window, min(store.tile, numel))
            largest = aligned(min(window, numel) * max(sizes))
            self._lanes.update_tiles(self, len(sizes), tiles_at_work(window, numel), largest)

    def expect_shard(self) -> None:
        """Takes memory for tiles that are fetched ahead."""
        if self.state is BucketState.SHARDED and (tile := self.form.placement.param_store.tile) is not None:
            ahead = min(self.form.placement.tiles_ahead(self.form.dtype), -(-self.layout.shard_numel // tile))
            self._lanes.expect_tiles(self, ahead, self._tile_bytes(tile))

    def _gather_tiles(self) -> None:
        if (tile := self.form.placement.param_store.tile) is not None:
            self._lanes.gather_tiles(self, tiles_at_work(tile, self.layout.shard_numel), self._tile_bytes(tile))

    def _tile_bytes(self, tile: int) -> int:
        return aligned(min(tile, self.layout.shard_numel) * self.form.dtype.itemsize)


class RecordedRun:
    """The steps of a training in which every parameter that requires a gradient gets one.

    Of the root, some gradients come first (a head's) and some last (an embedding's): without a trace, which knows the
    order, all are taken as the first.

    Attributes:
        buckets: in forward order.

    Args:
        units: in module order.
        parameters: by unit, :data:`ROOT` included, in module order.
        forms: of the buckets, in forward order.
        footprints: of the optimizers, by bucket.
        placement: on an imagined mesh of its own, which counts what is sent.
        account: notes the memory.
        max_live_numel: see :class:`Prefetcher`.
        prefetch_mb: see there.
        recomputed: whether units run under reentrant checkpointing.
        resting: bytes that rest on a disk.
        in_backward: whether updates begin there; see :mod:`lightning_zero.update.in_backward`.
        traced: activations, if they are known.
        clips_by_value: whether the gradients of each step are clipped by value.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        parameters: dict[str, list[Parameter]],
        forms: Sequence[BucketForm],
        footprints: Sequence[Sequence[Footprint]],
        placement: BucketPlacement,
        account: Account,
        max_live_numel: int | None,
        prefetch_mb: float,
        recomputed: bool,
        resting: int,
        in_backward: bool = False,
        traced: TracedParameters | None = None,
        clips_by_value: bool = False,
    ) -> None:
        passing = max(placement.optimizer_store.passing_bytes, placement.param_store.passing_bytes)
        self._lanes = RecordedLanes(placement, account, passing, resting)
        self.buckets = [RecordedBucket(form, account, self._lanes) for form in forms]
        self._account = account
        self._footprints = footprints
        self._placement = placement
        self._recomputed = recomputed
        self._bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.form.parameters}
        self._index_of = {id(p): index for form in forms for index, p in enumerate(form.parameters)}
        self._parameters = [parameters[unit.name] for unit in units]
        self._traced = traced
        self._names = [unit.name for unit in units]
        self._own = [self._own_buckets(ps) for ps in self._parameters]  # of those that get no gradient, too
        self._first_root, self._last_root = self._split(parameters[ROOT])
        self._reducer = Reducer([bucket.gradients for bucket in self.buckets], placement.sharding)
        self._of_gradients = {id(bucket.gradients): n for n, bucket in enumerate(self.buckets)}
        self._in_backward = in_backward
        self._clips_by_value = clips_by_value
        self._early = [in_backward and not left for left in left_to_forward(forms)]
        self._waiting: set[int] = set()  # numbers of the buckets that this step has not updated
        self._first = False  # whether this step is
        self._prefetcher = Prefetcher(self._own, max_live_numel, prefetch_mb)

    def _split(self, root: Sequence[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
        """The root's parameters whose gradients come before those of the first unit's end, and the others."""
        traced = self._traced
        if traced is None:
            return list(reversed(root)), []
        self._parameters = [list(reversed(traced.in_order(parameters))) for parameters in self._parameters]
        inside = [traced.number(p) for parameters in self._parameters for p in parameters]
        ordered = traced.in_order(root)
        first = [p for p in ordered if not inside or traced.number(p) < min(inside)]
        return first, ordered[len(first) :]

    def _own_buckets(self, parameters: Iterable[Parameter]) -> list[RecordedBucket]:
        """The buckets that a unit frees."""
        held = {id(bucket): bucket for bucket in (self._bucket_of[id(p)] for p in parameters)}
        return [bucket for bucket in held.values() if not bucket.form.spec.in_root]

    def step(self, micro_batches: int, optimizers: int, first: bool) -> None:
        """Runs one step; see :class:`Engine`. In the first one optimizers make their state."""
        for bucket in self.buckets:
            bucket.gradients.clear()
        self._waiting, self._first = set(range(len(self.buckets))), first
        for number in range(1, micro_batches + 1):
            with torch.enable_grad():
                self._forward()
            with contextlib.nullcontext() if number == micro_batches else self._reducer.no_sync():
                self._backward()
        self._lanes.wait()
        self._sum_norms(optimizers)
        if self._clips_by_value:
            for bucket in self.buckets:
                bucket.gradients.clamp()
        updates = sorted(self._waiting, key=lambda n: not self.buckets[n].form.spec.in_root)  # as a forward needs them
        if first:  # up to here there may have been the state of a checkpoint
            self._give_state(updates)
        self._lanes.begin_updates()
        for number in updates:
            self._update(number)

    def _update(self, number: int) -> None:
        """Updates a bucket. Where updates begin in backward, nothing scales gradients."""
        self.buckets[number].update(self._footprints[number], self._first, not self._in_backward)

    def _give_state(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._account.give(sum(map(self.buckets[number].optimizer_state, self._footprints[number]), NOTHING))

    def _update_early(self, completed: Iterable[RecordedGradients]) -> None:
        """Updates, in the last backward of a step, the buckets of these complete and reduced gradients if allowed."""
        for number in (self._of_gradients[id(gradients)] for gradients in completed):
            if self._reducer.last_micro_batch and self._early[number] and number in self._waiting:
                self._waiting.remove(number)
                if self._first:
                    self._give_state([number])
                self._lanes.begin_updates()
                self._update(number)

    def evaluate(self) -> None:
        """Runs a forward without gradients; see :meth:`Engine.forward_context`."""
        with torch.no_grad():
            self._forward()
        self._end_pass()

    @property
    def staging(self) -> Bytes:
        """Host memory that is kept for copies to pass through."""
        return self._lanes.staging

    @property
    def copied(self) -> Counter[str]:
        """Bytes that were copied between device and host memory, by direction."""
        return self._lanes.copied

    @property
    def summed(self) -> int:
        """Bytes of gradients that were written to a disk and read from it."""
        return self._lanes.summed

    @property
    def added(self) -> int:
        """Bytes that the host read and wrote to add up gradients of micro-batches that came from a device."""
        return self._lanes.added

    def reset_traffic(self) -> None:
        """Starts counting collectives and copies from zero."""
        self._lanes.copied, self._lanes.summed, self._lanes.added = Counter(), 0, 0
        for group in self._groups():
            group.reset_counters()

    def traffic(self) -> tuple[Counter[str], Counter[str]]:
        """Bytes and calls by collective."""
        sent, calls = Counter[str](), Counter[str]()
        for group in self._groups():
            sent += group.sent
            calls += group.calls
        return sent, calls

    def _groups(self) -> tuple[Group, ...]:
        mesh = self._placement.mesh
        return mesh.shard, mesh.replica, mesh.world

    def _forward(self) -> None:
        shards_params = self._placement.sharding.shard_params
        for bucket in self.buckets:
            if bucket.form.spec.in_root or not shards_params:
                bucket.unshard()
        self._prefetcher.begin_pass()
        for number in range(len(self._own)):
            self._run_forward(number)
        self._live_in(ROOT)
        self._lanes.end_updates()

    def _live_in(self, unit: str) -> None:
        """Notes the activations of a unit's forward."""
        if self._traced is not None:
            self._account.touch(self._traced.forward(unit))

    def _enter_backward(self, number: int) -> None:
        """Notes the activations before the backward of a unit, while the parameters of the unit after it are there."""
        if self._traced is not None and number >= 0:
            self._account.touch(self._traced.entered(self._names[number]))

    def _run_forward(self, number: int) -> None:
        shards_params = self._placement.sharding.shard_params
        if shards_params:
            self._prefetcher.gather(number)
        self._live_in(self._names[number])
        if shards_params:
            for bucket in self._own[number]:
                bucket.reshard()

    def _backward(self) -> None:
        self._reducer.begin(eager=True)
        self._run_backward(self._first_root)
        self._enter_backward(len(self._own) - 1)
        for number in reversed(range(len(self._own))):
            if self._placement.sharding.shard_params:
                if self._recomputed:
                    self._run_forward(number)
                self._prefetcher.gather(number)
            self._run_backward(list(reversed(self._parameters[number])))
            self._enter_backward(number - 1)
            if self._placement.sharding.shard_params:
                with self._beside(self._parameters[number]):
                    complete = self._reducer.end_unit([bucket.gradients for bucket in self._own[number]])
                    for bucket in self._own[number]:
                        bucket.reshard()
                    self._update_early(complete)
        self._run_backward(self._last_root)
        self._reducer.flush()
        self._end_pass()

    def _end_pass(self) -> None:
        self._prefetcher.end_pass()
        for bucket in self.buckets:
            bucket.reshard()

    def _run_backward(self, parameters: Sequence[Parameter]) -> None:
        for parameter in parameters:
            if parameter.requires_grad:
                if self._traced is not None:
                    self._account.touch(self._traced.backward(parameter))
                gradients, index = self._bucket_of[id(parameter)].gradients, self._index_of[id(parameter)]
                gradients.arrive(index)
                with self._beside([parameter]):
                    self._update_early(self._reducer.mark_ready(gradients, index))

    @contextlib.contextmanager
    def _beside(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        """Keeps the activations that have not been used yet on the account inside the context."""
        left = self._account.take(NOTHING if self._traced is None else self._traced.left(parameters))
        yield
        self._account.give(left)

    def _sum_norms(self, optimizers: int) -> None:
        """The one small all-reduce of a step; see :class:`~lightning_zero.update.clipping.GradientClipping`."""
        world, device = self._placement.mesh.world, self._placement.device
        for bucket in self.buckets:
            if bucket.form.trained and not bucket.gradients.known_squares:
                store = bucket.form.placement.optimizer_store
                self._account.touch(Bytes.of(store.memory, squares_scratch(bucket.layout.shard_numel, store)))
                bucket.gradients.read_squares()
        flags = sum(len(bucket.form.parameters) + 1 for bucket in self.buckets)
        numbers = 2 * world.size + optimizers + flags + 1  # digests, squares, used, left over; whether buffers changed
        world.count("all_reduce", _SMALL_ITEM * (numbers + world.padding(numbers, device)))
