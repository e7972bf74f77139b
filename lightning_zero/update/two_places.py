"""Updates in two places: masters and state rest on the host, and the device computes the costly part of the step.

The optimizer's step must have such a part (:class:`StepInParts`). Its input, matrices in 16 bits, is copied to the
device in batches of equal shapes, and the result is copied back. These copies take 4 bytes per element, in addition to
those of gradients and parameters. State stays where it is; to copy fp32 momentum as well would take 8 bytes more. While
the device computes one batch, the host prepares the next one in other memory. When a batch has come back, the host adds
it to the masters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.sharding import BucketForm, BucketPlacement, Run, Segment
from lightning_zero.storage import Lane, Memory, Rested, Ticket
from lightning_zero.storage.executor import Staged
from lightning_zero.storage.staging import staged_size
from lightning_zero.update.footprint import Apart, Footprint
from lightning_zero.update.native import ParamGroup
from lightning_zero.update.rules import Traits, settings_of
from lightning_zero.update.sizes import Passing
from lightning_zero.update.state import WholeState
from lightning_zero.update.updaters import scaled_gradient
from lightning_zero.update.view import UpdateView, fetch_nothing
from lightning_zero.update.whole import WholeUpdater, settle_before
from lightning_zero.update.windows import largest_window

# Number of elements that go to the device together, except for larger matrices. Copies of some MiB are fast.
_BATCH = 1 << 22

_TO_DEVICE: tuple[Memory, Memory] = ("host", "device")
_TO_HOST: tuple[Memory, Memory] = ("device", "host")


class StepInParts(Protocol):
    """An optimizer's step of one parameter in three parts. The second part needs neither values nor state.

    The parts give the same bits as the step if the second part is computed by the same routines.

    Attributes:
        dtype: dtype of the input and the result of the second part.
    """

    dtype: torch.dtype

    def fits(self, group: ParamGroup, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether these parts can update a parameter of this shape with masters of ``dtype``."""
        ...

    def prepare(self, group: ParamGroup, gradient: Tensor, state: dict[str, Any], into: Tensor) -> None:
        """Do the first part: update the state, and write the input of the second part to ``into``.

        Args:
            group: hyperparameters.
            gradient: the scaled gradient, in the shape and the masters' dtype of the parameter.
            state: the parameter's state, which is updated in place, and made if it is empty.
            into: receives the input of the second part, in the shape of the parameter and :attr:`dtype`.
        """
        ...

    def compute(self, group: ParamGroup, batch: Tensor) -> None:
        """Do the second part: replace each input in ``batch``, ``[batch, *shape]``, by its update."""
        ...

    def apply(self, group: ParamGroup, parameter: Tensor, update: Tensor) -> None:
        """Do the third part: change the values of ``parameter`` in place by ``update``, which has its shape."""
        ...


class TwoPlacesUpdater(WholeUpdater):
    """Runs an optimizer's step in parts: on the host, on the device, and on the host again.

    Buckets with masters on the device, and parameters that the parts do not fit, are updated by the base class.

    Args:
        optimizer: see the base class.
        traits: see the base class.
        device: see the base class.
        parts: the parts of the optimizer's step.
    """

    def __init__(self, optimizer: Optimizer, traits: Traits, device: torch.device, parts: StepInParts) -> None:
        super().__init__(optimizer, traits, device)
        self._step = parts
        self._taken: dict[Any, tuple[int, int]] = {}

    def update(self, view: UpdateView) -> None:
        if not isinstance(view.state, WholeState) or not view.placement.updates_apart:
            super().update(view)
            return
        apart = self._apart(view.segments, view.groups, view.parameters, view.master.dtype)
        if len(apart) < len(view.segments):
            here = [segment for segment in view.segments if segment not in apart]
            ahead = fetch_nothing if apart else view.ahead  # only the last window of all fetches for the next update
            super().update(replace(view, segments=here, complete=not apart and view.complete, ahead=ahead))
        if apart:
            _Rounds(view, view.state, self._step, _batches(apart, view.groups), self._leaving).run()

    def expect(self, view: UpdateView) -> None:
        # Otherwise the data of a batch is fetched when the batch is prepared.
        if not isinstance(view.state, WholeState) or not view.placement.updates_apart:
            super().expect(view)

    def _apart(
        self,
        segments: Iterable[Segment],
        groups: Mapping[int, ParamGroup],
        parameters: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> dict[Segment, torch.Size]:
        """The segments that are updated in two places, with the shapes of their parameters."""
        shapes = {segment: parameters[segment.param].shape for segment in segments}
        return {s: shape for s, shape in shapes.items() if self._step.fits(groups[s.param], shape, dtype)}

    def footprint(self, bucket: BucketForm) -> Footprint:
        """The memory for a bucket; see the base class.

        Matrices are prepared one at a time on the host, and computed in batches on the device.
        """
        if not bucket.layout.keeps_whole or not bucket.placement.updates_apart:
            return super().footprint(bucket)
        members, dtype = self._members(bucket), bucket.master.dtype
        groups = {segment.param: group for segment, group in members}
        apart = self._apart([segment for segment, _ in members], groups, bucket.parameters, dtype)
        here = self._footprint(bucket, [(segment, group) for segment, group in members if segment not in apart])
        if not apart:
            return here
        store = bucket.placement.optimizer_store
        on_disk = store.tile is not None
        scratch, owned, fresh, most = here, here.owned, here.fresh, 0
        for segment, shape in apart.items():
            group, values = groups[segment.param], shape.numel() * dtype.itemsize
            state = self._sizes_of(group, shape, dtype).state
            # Two parameters' state is in memory: that of one is used while that of another is put back.
            passing = self._taken_by(group, shape, dtype, 1)[0] + 2 * state * on_disk
            scratch = max(scratch, here._replace(gradients=values, passing=passing), key=lambda each: each.scratch)
            owned, fresh = owned + state, max(fresh, state * on_disk)
        batches = _batches(apart, groups)
        for batch in batches:
            shape = apart[batch[0]]
            most = max(most, self._taken_by(groups[batch[0].param], shape, dtype, len(batch))[1])
        form = _SlotForm.of(bucket.placement, self._step.dtype, batches, apart)
        moved = sum(shape.numel() for shape in apart.values()) * self._step.dtype.itemsize
        return scratch._replace(
            owned=owned,
            fresh=fresh,
            window=max(here.window, *(largest_window([Run.of(segment)], store.tile) for segment in apart)),
            apart=Apart(most + form.number * form.nbytes, form.number * staged_size(form.nbytes), moved),
        )

    def _taken_by(self, group: ParamGroup, shape: torch.Size, dtype: torch.dtype, count: int) -> tuple[int, int]:
        """Temporary bytes on the host for one parameter, and on the device for ``count``, from a trial on meta."""
        key = settings_of(group), shape, dtype, count
        if key not in self._taken:
            gradient = torch.empty(shape, dtype=dtype, device="meta")
            batch = torch.empty(count, *shape, dtype=self._step.dtype, device="meta")
            state: dict[str, Any] = {}
            with torch.no_grad():
                self._step.prepare(group, gradient, state, batch[0])  # makes the state
                kept = [value for value in state.values() if isinstance(value, Tensor)]
                with Passing([gradient, batch, *kept]) as on_host:
                    self._step.prepare(group, gradient, state, batch[0])
                with Passing([batch]) as on_device:
                    self._step.compute(group, batch)
            self._taken[key] = on_host.most, on_device.most
        return self._taken[key]


def _batches(shapes: Mapping[Segment, torch.Size], groups: Mapping[int, ParamGroup]) -> list[list[Segment]]:
    """Sort segments into batches that go to the device together. Those of a batch have one shape and one group.

    A batch has at most ``_BATCH`` elements, or is one larger parameter.
    """
    alike: dict[tuple[int, torch.Size], list[Segment]] = {}
    for segment, shape in shapes.items():
        alike.setdefault((id(groups[segment.param]), shape), []).append(segment)
    batches = []
    for (_, shape), segments in alike.items():
        count = max(1, _BATCH // shape.numel())
        batches += [segments[start : start + count] for start in range(0, len(segments), count)]
    return batches


class _SlotForm(NamedTuple):
    """The number of batches that are under way at a time, and the bytes of the largest batch.

    The number is 2, so that the host and the device work at the same time, if buffers in host memory may have that
    size.
    """

    number: int
    nbytes: int

    @classmethod
    def of(
        cls,
        placement: BucketPlacement,
        dtype: torch.dtype,
        batches: Sequence[Sequence[Segment]],
        shapes: Mapping[Segment, torch.Size],
    ) -> _SlotForm:
        nbytes = max(len(batch) * shapes[batch[0]].numel() for batch in batches) * dtype.itemsize
        both = len(batches) > 1 and 2 * staged_size(nbytes) <= placement.executor.staging_bytes
        return cls(1 + both, nbytes)


@dataclass(eq=False)
class _Slot:
    """The memory of a batch on the host and on the device, and the ticket of the last work on it."""

    staged: Staged
    on_device: Tensor  # 1-D
    work: Ticket

    def tensors(self, count: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """The batch as tensors of shape ``[count, *shape]``, on the host and on the device."""
        numel = count * shape.numel()
        on_host, on_device = (flat[:numel].view(count, *shape) for flat in (self.staged.tensor, self.on_device))
        return on_host, on_device


class _Rounds:
    """One update of some of a bucket's parameters, batch by batch.

    Args:
        view: the view of the bucket.
        own: the state of the bucket.
        step: the optimizer's step in parts.
        batches: the segments of each batch.
        leaving: for each parameter whose state is being put back, the tensors of this state.
    """

    def __init__(
        self,
        view: UpdateView,
        own: WholeState,
        step: StepInParts,
        batches: Sequence[Sequence[Segment]],
        leaving: list[list[Rested]],
    ) -> None:
        self._view = view
        self._own = own
        self._step = step
        self._batches = batches
        self._leaving = leaving
        self._what = f"the matrices of {own.bucket}"

    def run(self) -> None:
        """Update all batches. When this returns, only the work that publishes the values may still be under way."""
        with ExitStack() as taken:
            free, under_way = self._take_slots(taken), deque[tuple[Sequence[Segment], _Slot]]()
            for batch in self._batches:
                if not free:
                    free.append(self._finish(*under_way.popleft()))
                slot = free.pop()
                self._begin(batch, slot)
                under_way.append((batch, slot))
            self._view.ahead()
            while under_way:
                self._finish(*under_way.popleft())

    def _take_slots(self, until: ExitStack) -> list[_Slot]:
        """Take the memory for batches; it is given back at the end of ``until``, also that of a slot which fails."""
        placement, dtype = self._view.placement, self._step.dtype
        shapes = {batch[0]: self._view.parameters[batch[0].param].shape for batch in self._batches}
        form = _SlotForm.of(placement, dtype, self._batches, shapes)
        numel, on_device = form.nbytes // dtype.itemsize, list[Tensor]()

        def take() -> None:  # allocates on the stream that uses the memory
            on_device.extend(torch.empty(numel, dtype=dtype, device=placement.device) for _ in range(form.number))

        taken = placement.executor.submit(take, Lane.SIDE, self._what)
        slots = list[_Slot]()
        for tensor in on_device:
            # Other streams may use the memory only when the stream has come to the point at which it was allocated.
            slots.append(_Slot(placement.executor.take(numel, dtype), tensor, taken))
            until.callback(self._give, slots[-1])
        return slots

    def _give(self, slot: _Slot) -> None:
        self._view.placement.executor.give(slot.staged, slot.work)

    def _begin(self, batch: Sequence[Segment], slot: _Slot) -> None:
        view, placement = self._view, self._view.placement
        group = view.groups[batch[0].param]
        on_host, on_device = slot.tensors(len(batch), view.parameters[batch[0].param].shape)
        for segment, into in zip(batch, on_host, strict=True):
            gradient = scaled_gradient(view, segment.start, segment.stop, view.master.dtype)
            self._own.expect([segment])
            state = self._own.get(segment)
            self._step.prepare(group, self._own.formats[segment.param].view(gradient), state, into)
            self._own.put(segment, state)
            settle_before(self._leaving, 0)
            self._leaving.append(self._own.commit([segment]))
        slot.work = fetched = placement.move(on_device, on_host, _TO_DEVICE, self._what, [slot.work])
        compute = partial(self._step.compute, group, on_device)
        slot.work = computed = placement.executor.submit(compute, Lane.SIDE, self._what, [fetched])
        slot.work = placement.move(on_host, on_device, _TO_HOST, self._what, [computed])

    def _finish(self, batch: Sequence[Segment], slot: _Slot) -> _Slot:
        view = self._view
        view.placement.await_host(slot.work)
        updates, _ = slot.tensors(len(batch), view.parameters[batch[0].param].shape)
        for segment, update in zip(batch, updates, strict=True):
            view.master.expect(segment.start, segment.stop)
            values = view.master.read(segment.start, segment.stop)
            parameter = self._own.formats[segment.param].view(values)
            self._step.apply(view.groups[segment.param], parameter, update)
            view.master.keep(segment.start, values)
            view.master.write(segment.start, segment.stop)
            view.master.commit(segment.start, segment.stop)
        return slot
