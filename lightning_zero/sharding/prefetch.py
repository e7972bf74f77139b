"""Prefetches at stage 3: while a unit computes, the next units are gathered, and the one after is read from a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lightning_zero.sharding.bucket import BucketState
from lightning_zero.sharding.layout import FlatLayout


class Gatherable(Protocol):
    """A bucket as the prefetcher drives it: one that trains, or one that a plan records."""

    @property
    def state(self) -> BucketState:
        """The parameter values that this rank holds."""
        ...

    @property
    def layout(self) -> FlatLayout:
        """Offsets in the flat buffer."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        ...

    def expect_shard(self) -> None:
        """Begins to fetch this rank's shard, if it rests on a disk."""
        ...

    def begin_unshard(self) -> None:
        """Begins to gather the parameters, unless they are gathered or a gather has begun."""
        ...

    def unshard(self) -> None:
        """Gathers the parameters, unless they are gathered."""
        ...

    def reshard(self) -> None:
        """Frees the parameters, unless a ``gathered_parameters`` context holds them."""
        ...


class Prefetcher:
    """Gathers units when they are needed, and begins to gather the units that are expected next.

    A *pass* is one forward with its backward, or one forward without gradients. The expected order is the order in
    which the last pass of the same kind needed its units, recomputations included. In the first pass it is module
    order for forward, and the reverse for backward. If all ranks run the same units in the same order, they make the
    same decisions.

    Within ``max_live_numel`` the gather of the next unit is always begun, and of further units while all units gathered
    ahead take at most ``prefetch_mb``. Prefetching stops before a unit that is still unsharded.

    Args:
        units: the buckets of each unit, in module order.
        max_live_numel: upper bound for the number of elements in all unsharded units; no unit is gathered ahead if it
            would be exceeded. ``None``: no bound. A larger unit is gathered when it is needed.
        prefetch_mb: upper bound for the size of the units gathered ahead, in 2^20 bytes.
    """

    def __init__(
        self, units: Sequence[Sequence[Gatherable]], max_live_numel: int | None, prefetch_mb: float = 0.0
    ) -> None:
        self._units = [tuple(buckets) for buckets in units]
        self._limit = max_live_numel
        self._depth = int(prefetch_mb * 2**20)
        forward = list(range(len(self._units)))
        self._expected = {True: [*forward, *reversed(forward)], False: forward}  # by whether gradients are enabled
        self._kind: bool | None = None  # of the current pass: whether gradients are enabled
        self._seen: list[int] = []  # units in the order in which this pass needed them
        self._next = 0  # position of the next unit in the expected order
        self._ahead: list[int] = []  # units gathered ahead and not needed so far, in expected order

    def begin_pass(self) -> None:
        """Begin a pass before a forward, or continue the current pass if it is of the same kind."""
        kind = torch.is_grad_enabled()
        if self._kind not in (None, kind):  # the last pass was a forward without its backward
            self.end_pass()
        self._kind = kind

    @property
    def has_gathered(self) -> bool:
        """Whether this pass has gathered a unit."""
        return bool(self._seen)

    def end_pass(self) -> None:
        """End the pass, after backward or a forward without one; its order becomes the expected one."""
        if self._kind is not None and self._seen:
            self._expected[self._kind] = self._seen
        self._kind, self._seen, self._next, self._ahead = None, [], 0, []

    def gather(self, unit: int) -> None:
        """Unshard unit number ``unit`` now, and begin to gather the next units."""
        if all(bucket.state is BucketState.GATHERED for bucket in self._units[unit]):
            return  # it was not resharded, or a context holds it
        self._give_up_before(unit)
        for bucket in self._units[unit]:
            bucket.unshard()
        if self._kind is not None:
            self._seen.append(unit)
            self._move_to(unit)
            self._begin_next()
            self._expect_later()

    def repeat(self) -> None:
        """Gather and free the units in the expected order, as a rank does that computes; this one has nothing to."""
        assert self._kind is not None
        for unit in [*self._expected[self._kind]]:
            self.gather(unit)
            for bucket in self._units[unit]:
                bucket.reshard()

    def _move_to(self, unit: int) -> None:
        """Continue the expected order after the next occurrence of ``unit``; if there is none, do not move."""
        assert self._kind is not None
        expected = self._expected[self._kind]
        places = [i for i in range(self._next, len(expected)) if expected[i] == unit]
        if places:
            self._next = places[0] + 1

    def _begin_next(self) -> None:
        assert self._kind is not None
        for unit in self._expected[self._kind][self._next + len(self._ahead) :]:
            buckets = self._units[unit]
            if any(bucket.state is not BucketState.SHARDED for bucket in buckets):
                return
            if self._limit is not None and self._live_numel(buckets) > self._limit:
                return
            if self._ahead and sum(map(self._nbytes, (*self._ahead, unit))) > self._depth:
                return
            for bucket in buckets:
                bucket.begin_unshard()
            self._ahead.append(unit)

    def _expect_later(self) -> None:
        """Begin to read the unit after those gathered ahead from the disk."""
        assert self._kind is not None
        later = self._next + len(self._ahead)
        for unit in self._expected[self._kind][later : later + 1]:
            for bucket in self._units[unit]:
                bucket.expect_shard()

    def _nbytes(self, unit: int) -> int:
        return sum(bucket.layout.padded_numel * bucket.dtype.itemsize for bucket in self._units[unit])

    def _live_numel(self, more: Sequence[Gatherable]) -> int:
        """The number of elements in all unsharded units, once ``more`` is unsharded too."""
        buckets = [bucket for unit in self._units for bucket in unit]
        return sum(b.layout.padded_numel for b in buckets if b.state is not BucketState.SHARDED or b in more)

    def _give_up_before(self, needed: int) -> None:
        """Free the units that were gathered ahead but skipped: those before ``needed``, or all if it is not ahead."""
        turn = self._ahead.index(needed) if needed in self._ahead else len(self._ahead)
        for unit in self._ahead[:turn]:
            for bucket in self._units[unit]:
                if bucket.state is BucketState.GATHERING:  # if it is gathered, a part of the unit was called
                    bucket.reshard()
        del self._ahead[: turn + 1]
