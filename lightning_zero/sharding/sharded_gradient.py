"""The sharded gradient of a bucket: this rank's slice of what is averaged over all ranks, from step to step.

It rests in the memory of the optimizer's store or, where that has tiles and the gradients of the rank do not fit the
memory that these pass through, on the disk (see :func:`~lightning_zero.sharding.partition.rest_gradients`).
There a slice is written a tile at a time when it has arrived, another micro-batch is added to the tiles on their way
from and to the disk, and an update reads them beside the state of the same elements. Nobody has a view of all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.sharding.layout import Segment, runs
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.storage import DONE, Lane, Memory, Rested, Ticket, device_type
from lightning_zero.storage.rested import Resident, keep, nbytes_of, pieces
from lightning_zero.torch_private import norms_of_each

Range = tuple[int, int]  # of elements of a shard


def sharded_gradient_dtype(fixed: torch.dtype | None, values: torch.dtype, summed: bool) -> torch.dtype:
    """The dtype of a sharded gradient.

    Args:
        fixed: what the policy asks for; ``None`` leaves it to what arrives.
        values: dtype of what arrives.
        summed: whether something has arrived before; on a disk, also where more will follow before the update: what is
            there need not be written again in another dtype then.
    """
    return fixed or (torch.promote_types(values, torch.float32) if summed else values)


def notes_squares(placement: BucketPlacement, dtype: torch.dtype, again: bool, more: bool) -> bool:
    """Whether the squares of a gradient that rests on a disk are summed when it passes through the host's memory.

    Args:
        placement: of the bucket.
        dtype: of the gradient.
        again: whether it is added to what has arrived before; what arrives first comes from the memory of a CPU rank.
        more: whether others will be added to it.
    """
    known = placement.rests_gradients and dtype != torch.float64 and not more
    return known and (again or ops.runs_on(placement.device))


class _Summing:
    """Sums the squares of ranges of a shard whose values pass through host memory tile by tile.

    Attributes:
        work: the last part of it.

    Args:
        ranges: as above.
    """

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._sums = {each: ops.RunningSquares(each[1] - each[0]) for each in ranges}
        self.work = DONE

    def submit(self, placement: BucketPlacement, start: int, values: Tensor, what: str, after: Ticket) -> Ticket:
        """Begin to add those of ``values``, elements from ``start`` on, when ``after`` has ended; tiles come in order.

        It is done in the lane in which they are summed up, that of writes. Where a tile fails, all that follow do.
        """
        job = partial(self._add, start, values)
        self.work = placement.executor.submit(job, Lane.WRITE, what, [self.work, after])
        return self.work

    def _add(self, start: int, values: Tensor) -> None:
        for (low, high), running in self._sums.items():
            running.add(values[max(low - start, 0) : max(high - start, 0)])

    def totals(self) -> dict[Range, float]:
        """The sums by range, when ``work`` has ended."""
        return {each: running.total() for each, running in self._sums.items()}


class LentGradient(NamedTuple):
    """The values of a sharded gradient, to be read by an update.

    Attributes:
        values: 1-D.
        arriving: the last work on them.
    """

    values: Rested
    arriving: Ticket

    def expect(self, start: int, stop: int) -> None:
        """Begin to fetch what :meth:`read` will be asked for, up to :meth:`drop`."""
        self.values.expect(start, stop)

    def read(self, start: int, stop: int) -> Tensor:
        """The gradient of elements ``[start, stop)``, which may not be changed."""
        if self.arriving is not DONE:
            self.arriving.synchronize()
        return self.values.read(start, stop)

    def drop(self, start: int, stop: int) -> None:
        """Let go of what was fetched of ``[start, stop)``."""
        self.values.drop(start, stop)


class ShardedGradient:
    """Accumulates the reduced gradients of one shard over micro-batches.

    Its dtype does not depend on stage or store, since overflow and norm are judged from these values; but for 16-bit
    ones that more are added to, which are the same numbers in fp32.

    Attributes:
        squares: on the device, sums of squares of the values, one for each segment, float64; not finite where a value
            is not. ``None``: nobody knows them without reading the values. They are noted when values leave for host
            memory, so that nobody waits for their arrival to know the norm, and when others do.

    What goes to a disk, from the memory of CPU ranks or as the sum of several micro-batches, need not be read again for
    its norm either: see :meth:`squares_of`.

    Args:
        name: of the bucket.
        numel: length of the shard.
        placement: where the values rest, and in which dtype: a fixed one, or that of what arrives, raised to fp32 by a
            second arrival.
        segments: of the shard.
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
        self._noted: dict[Range, float] = {}  # sums of squares by range of the shard
        self._summing: _Summing | None = None  # those of values that are on their way
        self._asked: dict[Range, None] = {}  # ranges of which they were asked for since they were noted
        self._segments = segments
        self._gap = gap
        self._arriving = DONE  # the last work on `values` in memory, which nobody has waited for
        self._lent_to = DONE  # the last work that reads them, likewise

    def add(self, values: Tensor, more: bool = False) -> None:
        """Begin to add ``values`` (1-D, on the device), which nobody changes any more.

        Args:
            values: as above.
            more: whether others will be added to them before an update.
        """
        placement, again = self._placement, not self._empty
        summed = again or (more and placement.rests_gradients)
        held = self._ensure(sharded_gradient_dtype(self._fixed_dtype, values.dtype, summed))
        self._forget_squares()
        # Alike in all places of an engine: the norm does not depend on which buckets are in which.
        if (
            not again
            and self._store.as_on_host
            and not device_type(placement.device).shares_host_memory
            and self._segments
        ):
            kept = values if self._fixed_dtype is None else values.to(self._fixed_dtype)  # the norm is of these
            parts = [kept[segment.start : segment.stop] for segment in self._segments]
            self.squares = torch.stack(norms_of_each(parts)).square_()
        if held.tile is not None:
            self._arrive()  # the update that reads tiles of it, in its own thread
        if notes_squares(placement, held.dtype, again, more):
            if again:
                self._summing = _Summing(self._ranges())
            else:
                self._note_squares(values, held.dtype)
        before, work = (self._arriving, self._lent_to), DONE
        for low, high in self._in_turn(held, 0, self._numel, fetched=again):
            target, arrived = held.open(low, high, blank=not again)
            work = (self._sum if again else self._copy)(target, values[low:high], (*before, arrived))
            if self._summing is not None:
                work = self._summing.submit(placement, low, target, self._name, work)
            held.commit(low, high, after=[work])
        self._arriving = work if held.tile is None else DONE  # who reads tiles waits for their writes
        self._lent_to = DONE  # it comes before
        self._empty = False

    def _copy(self, target: Tensor, values: Tensor, after: Sequence[Ticket]) -> Ticket:
        return self._placement.move(target, values, ("device", self._store.memory), self._name, after)

    def _sum(self, target: Tensor, values: Tensor, after: Sequence[Ticket]) -> Ticket:
        # Of what rests on a disk not in the lane of updates: one of these may wait for memory that is free only when
        # the sum is written.
        lane = Lane.WRITE if self._placement.rests_gradients else Lane.HOST
        return self._placement.accumulate(target, values, self._store.memory, self._name, after, lane)

    def _arrive(self) -> None:
        """Wait for what was added and for who reads it: the host is about to read or change the values."""
        for work in (self._arriving, self._lent_to):
            if work is not DONE:
                self._placement.await_host(work)
        self._arriving = self._lent_to = DONE

    def lend(self) -> LentGradient:
        """The values for an update, which may read them until the work that :meth:`lent_to` is told of has ended."""
        return LentGradient(self._filled(), self._arriving)

    def lent_to(self, work: Ticket) -> None:
        """``work`` reads what :meth:`lend` gave: what changes the values waits for it."""
        self._lent_to = work

    def read(self, start: int, stop: int) -> Tensor:
        """The gradient of elements ``[start, stop)``, not to be changed; zeros where nothing arrived."""
        self._arrive()
        return self._filled().read(start, stop)

    def read_pieces(self, start: int, stop: int, numel: int) -> Iterator[Tensor]:
        """The same ``numel`` elements at a time, the last ones fewer; each is there until the next is asked for."""
        self._arrive()
        held = self._filled()
        if held.tile is None:
            yield from held.read(start, stop).split(numel)
            return
        piece, filled = torch.empty(min(numel, stop - start), dtype=held.dtype), 0
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
        """Call a function that changes values in place, element by element, with parts of ``[start, stop)``."""
        self._arrive()
        self._forget_squares()
        held = self._filled()
        for low, high in self._in_turn(held, start, stop):
            function(held.view(low, high))
            held.commit(low, high)

    def keep(self, start: int, values: Tensor) -> None:
        """Keep what was changed in what :meth:`read` has given, of elements from ``start`` on; nothing came since."""
        self._forget_squares()
        keep(self._filled(), start, values)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what :meth:`read` gives."""
        return self._filled().dtype

    @property
    def shown_dtype(self) -> torch.dtype:
        """The dtype of the values after :meth:`raise_precision`."""
        held = torch.float32 if self._values is None else self._values.dtype
        return self._fixed_dtype or torch.promote_types(held, torch.float32)

    def raise_precision(self) -> None:
        """Make the values fp32, unless the dtype is fixed, before they are scaled or compared with fp32 numbers."""
        if not self._empty and self._fixed_dtype is None:
            self._ensure(torch.float32)

    def clear(self) -> None:
        """Forget the values; the room is kept for the next step, which what still arrives there comes before."""
        self._empty = True
        self._forget_squares()

    def squares_of(self, start: int, stop: int) -> float | None:
        """The sum of squares of ``[start, stop)`` as ``ops.sum_of_squares`` has it; ``None``: it was not noted.

        That of the next gradients will be.
        """
        self._asked[start, stop] = None
        if self._summing is not None:
            self._placement.await_host(self._summing.work)
            self._noted, self._summing = self._summing.totals(), None
        return self._noted.get((start, stop))

    def _ranges(self) -> list[Range]:
        """The ranges that were asked for last; before, those that will be where one optimizer has all parameters."""
        asked, self._asked = [*self._asked], {}
        return asked or [(run.start, run.stop) for run in runs(self._segments, lambda _: True, gap=self._gap)]

    def _note_squares(self, values: Tensor, dtype: torch.dtype) -> None:
        """Of what ``dtype`` keeps of values."""
        exact = torch.promote_types(values.dtype, dtype) == dtype
        for start, stop in self._ranges():
            part = values[start:stop]
            if exact:
                total = ops.sum_of_squares(part)
            else:
                total = ops.sum_of_squares_in_pieces(piece.to(dtype) for piece in part.split(ops.SQUARES_PIECE))
            self._noted[start, stop] = total

    def _forget_squares(self) -> None:
        """The values are others from now on."""
        self.squares, self._noted, self._summing = None, {}, None

    @property
    def empty(self) -> bool:
        """Whether no gradient has arrived since it was cleared."""
        return self._empty

    @property
    def memory(self) -> Memory:
        """Where the values rest."""
        return self._placement.gradient_memory

    @property
    def in_tiles(self) -> bool:
        """Whether they come to memory in parts only."""
        return self._placement.rests_gradients

    @property
    def nbytes(self) -> int:
        """Bytes held, where they rest."""
        return 0 if self._values is None else nbytes_of(self._values)

    @property
    def pinned(self) -> bool:
        """Whether they rest in pinned host memory."""
        return self._values is not None and self._values.pinned

    def _filled(self) -> Rested:
        """The values; zeros where nothing has arrived."""
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
        """The tensor, at least as wide as ``dtype``; a wider one of an earlier step holds the same values."""
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
        """The ranges of tiles, of which one is fetched while the one before is worked on."""
        found = [*pieces(held.tile, start, stop)]
        for number, tile in enumerate(found):
            for coming in found[number : number + 2] if fetched else ():
                held.expect(*coming)
            yield tile
