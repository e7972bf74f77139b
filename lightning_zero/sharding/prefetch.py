"""Stage 3's look-ahead: units that come next are gathered while one computes, the one after read from a disk."""

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
        """Of the parameters."""
        ...

    def expect_shard(self) -> None:
        """Begins to fetch this rank's part from a disk, where it rests on one."""
        ...

    def begin_unshard(self) -> None:
        """Begins to gather the parameters, unless they are or will be."""
        ...

    def unshard(self) -> None:
        """Gathers the parameters, unless they are."""
        ...

    def reshard(self) -> None:
        """Frees the parameters, unless somebody holds them."""
        ...


class Prefetcher:
    """Gathers units when they are needed, and begins to gather those that are expected next.

    A *pass* is one forward with its backward, or one forward without gradients. What comes next is what came next in
    the last pass of that kind, recomputations included: at first module order, and for backward its reverse. The
    decision depends on nothing that differs between ranks, as long as they run the same units in the same order.

    The next unit is always begun, within the limit, and further ones while those ahead take no more than
    ``prefetch_mb`` together. A unit that computes now is not begun again for its next turn, nor what comes after that.

    Args:
        units: the buckets of each unit, in module order.
        max_live_numel: units are not gathered ahead beyond so many elements in all unsharded units together;
            ``None``: no limit. A unit that is larger is gathered alone when it is needed.
        prefetch_mb: 2^20 bytes of unsharded parameters, as above.
    """

    def __init__(
        self, units: Sequence[Sequence[Gatherable]], max_live_numel: int | None, prefetch_mb: float = 0.0
    ) -> None:
        self._units = [tuple(buckets) for buckets in units]
        self._limit = max_live_numel
        self._depth = int(prefetch_mb * 2**20)
        forward = list(range(len(self._units)))
        self._expected = {True: [*forward, *reversed(forward)], False: forward}  # by whether gradients are enabled
        self._kind: bool | None = None  # of the pass under way
        self._seen: list[int] = []  # units in the order in which this pass needed them
        self._next = 0  # position of what comes next among those expected
        self._ahead: list[int] = []  # the units gathered ahead, and not needed so far, in the order of their turns

    def begin_pass(self) -> None:
        """Before a forward; a pass of its kind that has begun goes on."""
        kind = torch.is_grad_enabled()
        if self._kind not in (None, kind):  # a forward whose backward never came
            self.end_pass()
        self._kind = kind

    @property
    def has_gathered(self) -> bool:
        """Tells whether this pass has gathered a unit."""
        return bool(self._seen)

    def end_pass(self) -> None:
        """After backward, or after a forward without one: the order that was seen is expected from now on."""
        if self._kind is not None and self._seen:
            self._expected[self._kind] = self._seen
        self._kind, self._seen, self._next, self._ahead = None, [], 0, []

    def gather(self, unit: int) -> None:
        """Unshard the ``unit``-th unit now, and begin with the next ones."""
        if all(bucket.state is BucketState.GATHERED for bucket in self._units[unit]):
            return  # it still is, or a context holds it
        self._give_up_before(unit)
        for bucket in self._units[unit]:
            bucket.unshard()
        if self._kind is not None:
            self._seen.append(unit)
            self._move_to(unit)
            self._begin_next()
            self._expect_later()

    def _move_to(self, unit: int) -> None:
        """Go on after the next place where ``unit`` is expected; at an unexpected one stay."""
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
        """Begin to read the unit after those that are gathered ahead."""
        assert self._kind is not None
        later = self._next + len(self._ahead)
        for unit in self._expected[self._kind][later : later + 1]:
            for bucket in self._units[unit]:
                bucket.expect_shard()

    def _nbytes(self, unit: int) -> int:
        return sum(bucket.layout.padded_numel * bucket.dtype.itemsize for bucket in self._units[unit])

    def _live_numel(self, more: Sequence[Gatherable]) -> int:
        """The elements of all unsharded units once ``more`` is unsharded too."""
        buckets = [bucket for unit in self._units for bucket in unit]
        return sum(b.layout.padded_numel for b in buckets if b.state is not BucketState.SHARDED or b in more)

    def _give_up_before(self, needed: int) -> None:
        """Free what was gathered ahead of ``needed`` in vain: all, unless that is among it."""
        turn = self._ahead.index(needed) if needed in self._ahead else len(self._ahead)
        for unit in self._ahead[:turn]:
            for bucket in self._units[unit]:
                if bucket.state is BucketState.GATHERING:  # else a part of the unit was called
                    bucket.reshard()
        del self._ahead[: turn + 1]
