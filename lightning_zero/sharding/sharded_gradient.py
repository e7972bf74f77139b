"""The sharded gradient of a bucket: this rank's slice of the gradient averaged over all ranks.

It rests in the memory of the optimizer's store or, if this store is on a disk and the gradients of the rank do not fit
into its memory for tiles in transit, on the disk (see :func:`~lightning_zero.sharding.partition.rest_gradients`). On a
disk, a slice that has arrived is written tile by tile. To add another micro-batch, each tile is read, added to and
written back. An update reads the tiles together with the optimizer state of the same elements. The whole slice is never
in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.sharding.layout import Segment, runs
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.storage import DONE, Lane, Memory, Rested, Ticket, device_type
from lightning_zero.storage.rested import Resident, keep, nbytes_of, pieces
from lightning_zero.torch_private import norms_of_each

Range = tuple[int, int]  # start and stop of a range of elements in a shard


def sharded_gradient_dtype(fixed: torch.dtype | None, values: torch.dtype, summed: bool) -> torch.dtype:
    """The dtype of a sharded gradient.

    Args:
        fixed: dtype set by the policy; ``None``: it depends on the other arguments.
        values: dtype of the arriving values.
        summed: whether several micro-batches are summed: values have arrived before or, on a disk, more will follow
            before the update. (On a disk, a later change of the dtype would mean writing the values again.)
    """
    return fixed or (torch.promote_types(values, torch.float32) if summed else values)


def notes_squares(placement: BucketPlacement, dtype: torch.dtype, again: bool, more: bool) -> bool:
    """Whether the squares of a gradient are summed while it is added up in host memory, or passes through it to a disk.

    Args:
        placement: placement of the bucket.
        dtype: dtype of the gradient.
        again: whether it is added to values that have arrived before. The first values pass through host memory only
            on a CPU rank, on their way to a disk.
        more: whether further values will be added to it.
    """
    if dtype == torch.float64 or more:
        return False
    if again:
        return placement.optimizer_store.memory == "host"
    return placement.rests_gradients and ops.runs_on(placement.device)


def squares_known(placement: BucketPlacement, again: bool, more: bool) -> bool:
    """Whether the squares of a gradient are summed on the device when its values arrive there.

    On all buckets of an engine, offloaded or resident, so that the norm does not depend on which are offloaded.

    Args:
        placement: placement of the bucket.
        again: whether the values are added to others that have arrived before.
        more: whether further values will be added to them.
    """
    if device_type(placement.device).shares_host_memory:
        return False
    return not again if placement.optimizer_store.as_on_host else not more


class _Summing:
    """Adds the last values to a shard in host memory, and sums the squares of ranges of the result on the way.

    Attributes:
        work: ticket of the last submitted job that calls :meth:`add`.

    Args:
        ranges: the ranges whose squares are summed.
    """

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._sums = {each: ops.RunningSquares(each[1] - each[0]) for each in ranges}
        self._cuts = sorted({cut for low, high in ranges for cut in (*range(low, high, ops.SQUARES_ROW), high)})
        self.work = DONE

    def add(self, start: int, total: Tensor, values: Tensor) -> None:
        """Add ``values`` to ``total``, the elements from ``start`` on; parts of a shard must come in order.

        What becomes a row of a range's sum is added at a time, so that it is still in the cache when it is summed.
        """
        stop = start + total.numel()
        for low, high in pairwise((start, *(cut for cut in self._cuts if start < cut < stop), stop)):
            part = total[low - start : high - start]
            ops.accumulate_(part, values[low - start : high - start])
            for (first, last), running in self._sums.items():
                if first < high and low < last:
                    running.add(part[max(first - low, 0) : last - low])

    def totals(self) -> dict[Range, float]:
        """The sums by range; ``work`` must have ended."""
        return {each: running.total() for each, running in self._sums.items()}


class LentGradient(NamedTuple):
    """The values of a sharded gradient while an update reads them.

    Attributes:
        values: the values, 1-D.
        arriving: ticket of the last work that writes them.
    """

    values: Rested
    arriving: Ticket

    def expect(self, start: int, stop: int) -> None:
        """Begin to fetch elements ``[start, stop)`` for :meth:`read`; they stay in memory until :meth:`drop`."""
        self.values.expect(start, stop)

    def read(self, start: int, stop: int) -> Tensor:
        """The gradient of elements ``[start, stop)``, 1-D; callers must not change it."""
        if self.arriving is not DONE:
            self.arriving.synchronize()
        return self.values.read(start, stop)

    def drop(self, start: int, stop: int) -> None:
        """Release the fetched elements ``[start, stop)``."""
        self.values.drop(start, stop)


class ShardedGradient:
    """Accumulates the reduced gradients of one shard over micro-batches.

    The values, from which overflow and norm are computed, do not depend on stage or store. (Only on a disk may 16-bit
    values be held in fp32 from the first micro-batch on; the numbers are the same.)

    Attributes:
        squares: sums of squares of the values, one for each segment: 1-D float64 on the device, not finite if a value
            is not. ``None``: they are not known without reading the values. They are computed before values are copied
            to host memory, so that the norm is known before the copy has ended, and then for all buckets of an engine.
            Who reads them must :meth:`await_reduction`.
        reduced: the last reduction that goes on beside the training, which calls :meth:`add`.

    Where the last values are added in host memory, or CPU ranks write values to a disk, squares are summed on the way,
    so that the values need not be read again for the norm: see :meth:`squares_of`.

    Args:
        name: name of the bucket.
        numel: length of the shard.
        placement: memory and dtype of the values; see :func:`sharded_gradient_dtype`.
        segments: segments of the shard.
        gap: segments at most this far apart are summed together; see :func:`~lightning_zero.sharding.layout.runs`.
    """

    def __init__(
        self, name: str, numel: int, placement: BucketPlacement, segments: Sequence[Segment], gap: int = 0
    ) -> None:
        self._name = name
        self._numel = numel
        self._placement = placement
        self._store = placement.optimizer_store
        self._fixed_dtype = placement.precision.grad_dtype
        self._values: Rested | None = None  # 1-D
        self._empty = True
        self.squares: Tensor | None = None
        self.reduced = DONE
        self._noted: dict[Range, float] = {}  # sums of squares by range of the shard
        self._summing: _Summing | None = None  # computes the sums of squares of values that are being written
        self._asked: dict[Range, None] = {}  # ranges passed to `squares_of` since `_ranges` was called last
        self._segments = segments
        self._gap = gap
        self._arriving = DONE  # the last work that writes the values in memory, if nobody has waited for it
        self._lent_to = DONE  # the last work that reads the values, if nobody has waited for it

    def make_room(self, dtype: torch.dtype, more: bool) -> None:
        """Make the tensor to which :meth:`add` will add values of ``dtype``, in memory of the current stream."""
        self._ensure(self._dtype_for(dtype, more))

    def _dtype_for(self, values: torch.dtype, more: bool) -> torch.dtype:
        summed = not self._empty or (more and self._placement.rests_gradients)
        return sharded_gradient_dtype(self._fixed_dtype, values, summed)

    def add(self, values: Tensor, more: bool = False) -> None:
        """Begin to add ``values`` to the sharded gradient.

        Args:
            values: this rank's slice of a reduced gradient, 1-D, on the device; callers must not change it afterwards.
            more: whether further values will be added before an update.
        """
        placement, again = self._placement, not self._empty
        held = self._ensure(self._dtype_for(values.dtype, more))
        self._forget_squares()
        known = squares_known(placement, again, more)
        if known and self._store.as_on_host:
            self._square(values if self._fixed_dtype is None else values.to(self._fixed_dtype))  # the values to be kept
        if held.tile is not None:
            self._arrive()  # an update in another thread may be reading tiles
        if notes_squares(placement, held.dtype, again, more):
            if again:
                self._summing = _Summing(self._ranges())
            else:
                self._note_squares(values, held.dtype)
        before, work = (self._arriving, self._lent_to), DONE
        for low, high in self._in_turn(held, 0, self._numel, fetched=again):
            target, arrived = held.open(low, high, blank=not again)
            part, after = values[low:high], (*before, arrived)
            work = self._sum(low, target, part, after) if again else self._copy(target, part, after)
            held.commit(low, high, after=[work])
        self._arriving = work if held.tile is None else DONE  # reading a tile waits for the writes of that tile
        self._lent_to = DONE  # `work` runs after it
        self._empty = False
        if known and not self._store.as_on_host:
            self._square(held.view(0, self._numel))

    def _square(self, values: Tensor) -> None:
        parts = [values[segment.start : segment.stop] for segment in self._segments]
        self.squares = torch.stack(norms_of_each(parts)).square_() if parts else None

    def add_by(self, dtype: torch.dtype, function: Callable[[Tensor, bool], object]) -> None:
        """Add values that ``function`` computes, without a tensor of their own; see ``sums_where_kept``.

        Args:
            dtype: dtype of the values.
            function: takes the sharded gradient, in memory of this process, and whether to add the values to it. If
                not, they are written to it.
        """
        again = not self._empty
        held = self._ensure(sharded_gradient_dtype(self._fixed_dtype, dtype, again))
        self._arrive()
        self._forget_squares()
        function(held.view(0, self._numel), again)
        self._empty = False

    def _copy(self, target: Tensor, values: Tensor, after: Sequence[Ticket]) -> Ticket:
        return self._placement.move(target, values, ("device", self._store.memory), self._name, after)

    def _sum(self, start: int, target: Tensor, values: Tensor, after: Sequence[Ticket]) -> Ticket:
        # On a disk not in the lane of updates: an update in it may be waiting for memory that is freed only after the
        # sum has been written.
        lane = Lane.WRITE if self._placement.rests_gradients else Lane.HOST
        accumulate, memory, summing = self._placement.accumulate, self._store.memory, self._summing
        if summing is None:
            return accumulate(target, values, memory, self._name, after, lane)
        in_order = (*after, summing.work)  # if a tile fails, all following ones do
        summing.work = accumulate(target, values, memory, self._name, in_order, lane, partial(summing.add, start))
        return summing.work

    def await_reduction(self) -> None:
        """Let the current stream wait for the reductions of the values that go on beside it."""
        self.reduced.wait()

    def _arrive(self) -> None:
        """Wait for all work that writes or reads the values, before they are read or changed where they rest."""
        if self._store.memory == "device":
            self.await_reduction()
        for work in (self._arriving, self._lent_to):
            if work is not DONE:
                self._placement.await_host(work)
        self._arriving = self._lent_to = DONE

    def lend(self) -> LentGradient:
        """The values for an update, which may read them until the work passed to :meth:`lent_to` has ended."""
        if self._store.memory == "device":
            self.await_reduction()
        return LentGradient(self._filled(), self._arriving)

    def lent_to(self, work: Ticket) -> None:
        """Note that ``work`` reads the values from :meth:`lend`; later changes of the values wait for it."""
        self._lent_to = work

    def read(self, start: int, stop: int) -> Tensor:
        """The gradient of elements ``[start, stop)``, 1-D, not to be changed; zeros if no gradient has arrived."""
        self._arrive()
        return self._filled().read(start, stop)

    def read_pieces(self, start: int, stop: int, numel: int) -> Iterator[Tensor]:
        """Yields what :meth:`read` returns in pieces of ``numel`` elements; the last one may be shorter.

        A piece is valid until the next one is requested.
        """
        self._arrive()
        held = self._filled()
        if held.tile is None:
            yield from held.read(start, stop).split(numel)
            return
        piece, filled = torch.empty(min(numel, stop - start), dtype=held.dtype, device="cpu"), 0
        for low, high in self._in_turn(held, start, stop):
            rest = held.view(low, high)
            while rest.numel():
                part = rest[: piece.numel() - filled]
                piece[filled : filled + part.numel()].copy_(part)
                filled, rest = filled + part.numel(), rest[part.numel() :]
                if filled == piece.numel():
                    yield piece
                    filled = 0
            held.drop(low, high)
        if filled:
            yield piece[:filled]

    def change(self, start: int, stop: int, function: Callable[[Tensor], object]) -> None:
        """Change elements ``[start, stop)`` in place.

        Args:
            start: first element.
            stop: the element after the last.
            function: an element-wise function in place, which is called with one part of the range after the other.
        """
        self._arrive()
        self._forget_squares()
        held = self._filled()
        for low, high in self._in_turn(held, start, stop):
            function(held.view(low, high))
            held.commit(low, high)

    def keep(self, start: int, values: Tensor) -> None:
        """Store changes of the tensor ``values`` that :meth:`read` returned for elements from ``start`` on.

        No gradient may have arrived in between.
        """
        self._forget_squares()
        keep(self._filled(), start, values)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of :meth:`read`'s result."""
        return self._filled().dtype

    @property
    def shown_dtype(self) -> torch.dtype:
        """The dtype of the values after :meth:`raise_precision`."""
        held = torch.float32 if self._values is None else self._values.dtype
        return self._fixed_dtype or torch.promote_types(held, torch.float32)

    def raise_precision(self) -> None:
        """Convert the values to fp32, unless the dtype is fixed or wider, before they are scaled."""
        if not self._empty and self._fixed_dtype is None:
            self._ensure(torch.float32)

    def clear(self) -> None:
        """Discard the values but keep the memory for the next step, whose values wait for work that still writes."""
        self._empty = True
        self._forget_squares()

    def squares_of(self, start: int, stop: int) -> float | None:
        """The sum of squares of ``[start, stop)``, equal to that of ``ops.sum_of_squares``; ``None`` if not noted.

        For the next gradients it will be noted.
        """
        self._asked[start, stop] = None
        if self._summing is not None:
            self._placement.await_host(self._summing.work)
            self._noted, self._summing = self._summing.totals(), None
        return self._noted.get((start, stop))

    def _ranges(self) -> list[Range]:
        """The ranges last passed to :meth:`squares_of`; at first those for one optimizer with all parameters."""
        asked, self._asked = [*self._asked], {}
        return asked or [(run.start, run.stop) for run in runs(self._segments, lambda _: True, gap=self._gap)]

    def _note_squares(self, values: Tensor, dtype: torch.dtype) -> None:
        """Note sums of squares of ``values`` in ``dtype``, by the ranges that a norm over all parameters sums."""
        exact = torch.promote_types(values.dtype, dtype) == dtype
        for start, stop in self._ranges():
            part = values[start:stop]
            if exact:
                total = ops.sum_of_squares(part)
            else:
                total = ops.sum_of_squares_in_pieces(piece.to(dtype) for piece in part.split(ops.SQUARES_PIECE))
            self._noted[start, stop] = total

    def _forget_squares(self) -> None:
        """Discard the sums of squares, since the values change."""
        self.squares, self._noted, self._summing = None, {}, None

    @property
    def empty(self) -> bool:
        """Whether no gradient has arrived since the last :meth:`clear`."""
        return self._empty

    @property
    def memory(self) -> Memory:
        """The memory in which the values rest."""
        return self._placement.gradient_memory

    @property
    def in_tiles(self) -> bool:
        """Whether the values rest on a disk and come to memory in tiles."""
        return self._placement.rests_gradients

    @property
    def nbytes(self) -> int:
        """Bytes allocated in :attr:`memory`."""
        return 0 if self._values is None else nbytes_of(self._values)

    @property
    def pinned(self) -> bool:
        """Whether the values rest in pinned host memory."""
        return self._values is not None and self._values.pinned

    def _filled(self) -> Rested:
        """The values; filled with zeros if no gradient has arrived."""
        if self._empty:
            self._arrive()
            held = self._ensure(self._fixed_dtype or torch.float32)
            for low, high in self._in_turn(held, 0, self._numel, fetched=False):
                held.open(low, high, blank=True)[0].zero_()
                held.commit(low, high)
            self._empty = False
        assert self._values is not None
        return self._values

    def _ensure(self, dtype: torch.dtype) -> Rested:
        """The tensor of the values, converted to ``dtype`` if it is narrower; a wider one of an earlier step stays."""
        before = self._values
        if before is None:
            self._values = self._made(dtype)
        elif torch.promote_types(before.dtype, dtype) != before.dtype:
            self._arrive()
            self._values = wider = self._made(dtype)
            for low, high in self._in_turn(before, 0, 0 if self._empty else self._numel):
                wider.open(low, high, blank=True)[0].copy_(before.view(low, high))
                wider.commit(low, high)
                before.drop(low, high)
        assert self._values is not None
        return self._values

    def _made(self, dtype: torch.dtype) -> Rested:
        if self._placement.rests_gradients:
            return self._store.rest(self._numel, dtype, f"the gradients of {self._name}")
        return Resident(self._store.zeros(self._numel, dtype), self._store.memory)

    @staticmethod
    def _in_turn(held: Rested, start: int, stop: int, fetched: bool = True) -> Iterator[tuple[int, int]]:
        """The tiles of ``[start, stop)``; with ``fetched`` each is fetched while the one before it is used."""
        found = [*pieces(held.tile, start, stop)]
        for number, tile in enumerate(found):
            for coming in found[number : number + 2] if fetched else ():
                held.expect(*coming)
            yield tile
