"""Tensors without values, and the memory that an executor and a disk keep for copies of them."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import torch

from lightning_zero.planning.account import Account, Bytes
from lightning_zero.storage import Executor, Lane, Memory
from lightning_zero.storage.staging import staged_size


class RecordedTensor(NamedTuple):
    """A tensor of which only the size is known."""

    numel: int
    dtype: torch.dtype
    memory: Memory = "device"

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numel * self.dtype.itemsize

    @property
    def amount(self) -> Bytes:
        """Its size, on its side."""
        return Bytes.of(self.memory, self.nbytes)


class RecordedLanes:
    """Memory that an executor keeps for copies, none of which ends before the host waits for it.

    Args:
        executor: whose limits it knows.
        account: notes the memory.
    """

    def __init__(self, executor: Executor, account: Account) -> None:
        self._executor = executor
        self._leaving: deque[Bytes] = deque()
        self._staged: Counter[Lane] = Counter()  # bytes, since the host has waited
        self._kept: Counter[Lane] = Counter()  # bytes
        self._passing: dict[str, int] = {}  # bytes of tiles on their way from and to a disk, by bucket
        self._kept_passing = 0
        self._account = account
        self.copied: Counter[str] = Counter()  # bytes between the memories, by direction

    @property
    def staging(self) -> Bytes:
        """Host memory in passing that is kept."""
        return Bytes(host=self._kept.total() + self._kept_passing)

    def let_go(self, tensor: RecordedTensor) -> None:
        """A tensor that was taken is on its way to the host, and nobody else needs it."""
        self.copied["d2h"] += tensor.nbytes
        self._leaving.append(tensor.amount)
        while sum(amount.total for amount in self._leaving) > self._executor.in_flight_bytes:
            self._account.give(self._leaving.popleft())

    def stage(self, lane: Lane, nbytes: int) -> None:
        """So many bytes pass through host memory."""
        limit = self._executor.staging_bytes
        if not limit or not nbytes:
            self._account.touch(Bytes(host=nbytes))
            return
        self._staged[lane] += staged_size(nbytes)
        more = min(self._staged[lane], max(limit, staged_size(nbytes))) - self._kept[lane]
        if more > 0:
            self._account.take(Bytes(host=more))
            self._kept[lane] += more

    def pass_tiles(self, bucket: str, nbytes: int, limit: int) -> None:
        """Tiles of a bucket take so many bytes of host memory, which is kept, and given to others that fit in it."""
        self._passing[bucket] = max(self._passing.get(bucket, 0), nbytes)
        kept = min(sum(self._passing.values()), max(limit, *self._passing.values()))
        self._account.take(Bytes(host=kept - self._kept_passing))
        self._kept_passing = kept

    def wait(self) -> None:
        """All copies have ended."""
        self._staged.clear()
        while self._leaving:
            self._account.give(self._leaving.popleft())
