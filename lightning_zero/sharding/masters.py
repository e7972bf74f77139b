"""Masters: the full-precision values of a shard, behind one interface.

Updaters read and write the values of a shard only through its master. So each layout (the shard itself, a copy, a split
one) is one class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.storage import DONE, Memory, Rested, Ticket
from lightning_zero.storage.rested import changing, keep, nbytes_of, pieces
from lightning_zero.storage.staged import staged_tile


class KernelTensors(NamedTuple):
    """Tensors of a master for an update kernel (see :class:`lightning_zero.ops.Options`), 1-D and of equal length."""

    param: Tensor
    remainder: Tensor | None = None
    copy_out: Tensor | None = None
    copy_ties: ops.Ties = "even"


class Master(Protocol):
    """The full-precision values of one shard.

    Attributes:
        dtype: dtype of the values.
        device: device on which updates compute with the values.
        memory: memory in which :meth:`read` returns the values.
        nbytes: bytes that the master holds in addition to the parameter shard.
        pinned: whether these bytes are pinned host memory.
        tile: number of elements that are fetched together into memory of :attr:`device`; ``None``: they rest there.
        in_shard: whether :meth:`read` reads the parameter shard, which edits of parameters change.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def memory(self) -> Memory: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def pinned(self) -> bool: ...

    @property
    def tile(self) -> int | None: ...

    @property
    def published(self) -> int | None:
        """Largest number of elements to update at a time, so that they are copied while the next ones are updated.

        ``None``: there is no such limit.
        """
        ...

    @property
    def in_shard(self) -> bool: ...

    def expect(self, start: int, stop: int, complete: bool = False) -> None:
        """Begin to fetch the tensors that an update of ``[start, stop)`` needs.

        Args:
            start: first element.
            stop: the element after the last.
            complete: whether the update changes all elements, except padding, of the tiles that contain the range.
        """
        ...

    def commit(self, start: int, stop: int) -> None:
        """Begin to write back elements ``[start, stop)``, which were updated and published."""
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """The values of elements ``[start, stop)`` of the shard (1-D), to be changed in place before :meth:`keep`.

        If the master has tiles, a range must lie in one of :func:`~lightning_zero.storage.rested.pieces`.
        """
        ...

    def keep(self, start: int, values: Tensor) -> None:
        """Store changes of the tensor that :meth:`read` returned; call it before :meth:`write`."""
        ...

    def write(self, start: int, stop: int) -> Ticket:
        """Begin to publish changed values, that is, to update the parameter shard from them.

        Inside a job the ticket need not be waited for: the ticket of the job covers this work.
        """
        ...

    def tensors(self, start: int, stop: int) -> AbstractContextManager[KernelTensors]:
        """Gives the tensors that a kernel updates in place inside the context.

        At its end the changed values are published, as :meth:`write` does.
        """
        ...

    def derive(self, start: int, stop: int) -> None:
        """Take over values that user code wrote into the parameter shard.

        An element that is set back to its value after the last update gets its full-precision value of then.
        """
        ...


class Home:
    """Moves values between a master and the parameter shard, which are in the same memory for this class.

    Attributes:
        memory: memory in which the master's values rest.
    """

    memory: Memory = "host"  # for a CPU optimizer that is used without an engine

    def published(self, shard: Rested) -> int | None:
        """Number of elements that are copied to the parameter shard together; ``None``: there is no copy."""
        return None

    def publish(self, shard: Tensor, values: Tensor) -> Ticket:
        """Begin to copy ``values`` to ``shard``, the corresponding part of the parameter shard."""
        shard.copy_(values)
        return DONE

    def filling(self, shard: Tensor) -> AbstractContextManager[Tensor]:
        """A context that yields memory beside the values; what is written to it is copied to ``shard`` at the end."""
        return nullcontext(shard)

    def taken(self, shard: Tensor) -> Tensor:
        """``shard``, a part of the parameter shard, on the device of the values: itself, or a copy."""
        return shard


class StoreHome(Home):
    """Moves values between the optimizer's store and a parameter shard that may be in another memory.

    Args:
        placement: placement of the bucket.
        name: name of the bucket.
    """

    def __init__(self, placement: BucketPlacement, name: str) -> None:
        self._placement = placement
        self._name = name
        self.memory = placement.optimizer_store.memory

    def publish(self, shard: Tensor, values: Tensor) -> Ticket:
        placement = self._placement
        return placement.move(shard, values, (self.memory, placement.shard_memory), self._name)

    def published(self, shard: Rested) -> int | None:
        if not self._fills(shard.device):
            return None
        return staged_tile(self._placement.executor, shard.dtype)

    def filling(self, shard: Tensor) -> AbstractContextManager[Tensor]:
        return self._placement.executor.filling(shard, self._name) if self._fills(shard.device) else nullcontext(shard)

    def _fills(self, shard: torch.device) -> bool:
        """Whether values for a parameter shard on the device ``shard`` are first written to staging memory."""
        return (self.memory, self._placement.shard_memory) == ("host", "device") and not ops.runs_on(shard)

    def taken(self, shard: Tensor) -> Tensor:
        placement, device = self._placement, self._placement.optimizer_store.device
        if shard.device.type == device.type:
            return shard
        copy = torch.empty_like(shard, device=device)
        placement.copy(copy, shard, (placement.shard_memory, self.memory), self._name)
        return copy


class NoMaster:
    """The master of a shard that is its own master: nothing is copied.

    Args:
        shard: the parameter shard.
        memory: memory in which its values are read.
    """

    nbytes = 0
    pinned = False
    in_shard = True
    published = None

    def __init__(self, shard: Rested, memory: Memory) -> None:
        self._shard = shard
        self.memory = memory

    @property
    def dtype(self) -> torch.dtype:
        return self._shard.dtype

    @property
    def device(self) -> torch.device:
        return self._shard.device

    @property
    def tile(self) -> int | None:
        return self._shard.tile

    def expect(self, start: int, stop: int, complete: bool = False) -> None:
        self._shard.expect(start, stop)

    def commit(self, start: int, stop: int) -> None:
        self._shard.commit(start, stop)

    def read(self, start: int, stop: int) -> Tensor:
        return self._shard.read(start, stop)

    def keep(self, start: int, values: Tensor) -> None:
        keep(self._shard, start, values)

    def write(self, start: int, stop: int) -> Ticket:
        """Does nothing: the values are those of the shard."""
        return DONE

    def tensors(self, start: int, stop: int) -> AbstractContextManager[KernelTensors]:
        return nullcontext(KernelTensors(self._shard.view(start, stop)))

    def derive(self, start: int, stop: int) -> None:
        """Does nothing: the values are those of the shard."""


class _Kept:
    """Copies of a master's values after the last update, for the ranges that user code has edited since."""

    def __init__(self) -> None:
        self._copies: dict[int, list[Tensor]] = {}  # by the first element of the range

    def of(self, start: int, *parts: Tensor) -> list[Tensor]:
        """The copies for the range that begins at ``start``; the first call copies ``parts``."""
        if start not in self._copies:
            self._copies[start] = [part.clone() for part in parts]
        return self._copies[start]

    def forget(self) -> None:
        """Drop all copies, since an update follows."""
        self._copies = {}


class _RestedMaster(ABC):
    """A master whose tensors rest in the optimizer's store.

    Attributes:
        rested: the tensors, with the layout of the shard.

    Args:
        shard: the parameter shard; if it rests on a disk too, it has the same tiles as ``rested``.
        rested: as above.
        home: moves values between the store and the shard.
    """

    def __init__(self, shard: Rested, rested: Sequence[Rested], home: Home | None) -> None:
        self._shard = shard
        self.rested = tuple(rested)
        self._home = home or Home()
        self._updated = _Kept()
        self._publishing: Ticket = DONE  # the last publication, which may still read fetched tiles

    @property
    def memory(self) -> Memory:
        return self._home.memory

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes_of, self.rested))

    @property
    def pinned(self) -> bool:
        return all(tensor.pinned for tensor in self.rested)

    @property
    def tile(self) -> int | None:
        return self.rested[0].tile

    @property
    def published(self) -> int | None:
        return self._home.published(self._shard)

    @property
    @abstractmethod
    def in_shard(self) -> bool: ...

    def expect(self, start: int, stop: int, complete: bool = False) -> None:
        for tensor in self.rested:
            tensor.expect(start, stop)
        # A shard that is overwritten completely, and not read, need not be fetched.
        self._shard.expect(start, stop, blank=complete and not self.in_shard)

    def commit(self, start: int, stop: int) -> None:
        for tensor in (*self.rested, self._shard):
            tensor.commit(start, stop, after=(self._publishing,))

    def _publish(self, start: int, values: Tensor) -> Ticket:
        with changing(self._shard, start, start + values.numel(), overwritten=True) as shard:
            self._publishing = self._home.publish(shard, values)
        return self._publishing


class CopyMaster(_RestedMaster):
    """A master with its values in a tensor of their own: in another dtype, in another store, or both.

    Args:
        shard: the parameter shard.
        values: the full-precision values, not made from the rounded ones of the shard; the tensor is kept, not copied.
        home: moves values between the store and the shard.
        ties: how values halfway between two bf16 numbers are rounded for a bf16 shard.
    """

    in_shard = False

    def __init__(self, shard: Rested, values: Rested, home: Home | None = None, ties: ops.Ties = "even") -> None:
        super().__init__(shard, [values], home)
        self.values = values
        self.ties = ties

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def read(self, start: int, stop: int) -> Tensor:
        return self.values.read(start, stop)

    def keep(self, start: int, values: Tensor) -> None:
        keep(self.values, start, values)

    def write(self, start: int, stop: int) -> Ticket:
        self._updated.forget()
        away = self.ties == "away" and self._shard.dtype == torch.bfloat16
        ticket: Ticket = DONE
        for low, high in pieces(self.tile, start, stop):
            values = self.values.read(low, high)
            ticket = self._publish(low, _rounded_away(values) if away else values)
        return ticket

    @contextmanager
    def tensors(self, start: int, stop: int) -> Iterator[KernelTensors]:
        self._updated.forget()
        values = self.values.view(start, stop)
        if self._shard.dtype.itemsize != 2 or not ops.runs_on(values.device):
            yield KernelTensors(values)
            self.write(start, stop)
            return
        # The kernel writes the 16-bit values in the same pass, to the shard or to memory that is copied to it.
        with self._home.filling(self._shard.view(start, stop)) as copy_out:
            yield KernelTensors(values, copy_out=copy_out, copy_ties=self.ties)

    def derive(self, start: int, stop: int) -> None:
        for low, high in pieces(self.tile, start, stop):
            with changing(self.values, low, high) as master:
                self._derive(low, master, self._home.taken(self._shard.read(low, high)))

    def _derive(self, start: int, master: Tensor, shard: Tensor) -> None:
        # Change only edited elements, since the master is more precise than the shard.
        if shard.dtype == master.dtype:
            master.copy_(shard)
            return
        (updated,) = self._updated.of(start, master)
        torch.where(_rounds_to(updated, shard), updated, shard.to(master), out=master)


class SplitMaster(_RestedMaster):
    """A master that is split into 16-bit numbers, which the model reads, and int16 remainders.

    It takes two bytes per element less than a copy; see :func:`lightning_zero.ops.split_`. Updates run on the host. If
    the shard is in host memory, or is a :class:`~lightning_zero.storage.staged.StagedTensor`, whose tiles are copied to
    the host and back, it serves as the high part itself.

    Args:
        shard: the parameter shard, bf16 or fp16 (bf16 with ties away from zero).
        high: the high part in a tensor of its own; ``None``: the shard is the high part.
        remainder: the remainders, [n] int16.
        home: moves values between the store and the shard.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, shard: Rested, high: Rested | None, remainder: Rested, home: Home | None = None) -> None:
        super().__init__(shard, [remainder] if high is None else [remainder, high], home)
        self._own_high = high
        self._high = shard if high is None else high
        self._remainder = remainder

    @property
    def tile(self) -> int | None:
        return self._remainder.tile or self._high.tile

    @property
    def in_shard(self) -> bool:
        return self._own_high is None

    def read(self, start: int, stop: int) -> Tensor:
        values = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        for low, high in pieces(self.tile, start, stop):
            part = values[low - start : high - start]
            ops.join_(part, self._high.read(low, high), self._remainder.read(low, high))
        return values

    def keep(self, start: int, values: Tensor) -> None:
        self._updated.forget()
        for low, high in pieces(self.tile, start, start + values.numel()):
            with self._changing(low, high, overwritten=True) as (upper, remainder):
                ops.split_(values[low - start : high - start], upper, remainder)

    @contextmanager
    def _changing(self, start: int, stop: int, overwritten: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        with (
            changing(self._high, start, stop, overwritten) as high,
            changing(self._remainder, start, stop, overwritten) as remainder,
        ):
            yield high, remainder

    def write(self, start: int, stop: int) -> Ticket:
        ticket: Ticket = DONE
        if self._own_high is not None:
            for low, high in pieces(self.tile, start, stop):
                ticket = self._publish(low, self._own_high.read(low, high))
        return ticket

    @contextmanager
    def tensors(self, start: int, stop: int) -> Iterator[KernelTensors]:
        self._updated.forget()
        yield KernelTensors(self._high.view(start, stop), self._remainder.view(start, stop))
        self.write(start, stop)

    def derive(self, start: int, stop: int) -> None:
        # If the shard is the high part, its old values are not known. Remainders then stay as they are: an unedited
        # element needs its remainder, and for an edited one it is less than the rounding of the new value.
        if self._own_high is None:
            return
        for low, high in pieces(self.tile, start, stop):
            values = self._home.taken(self._shard.read(low, high))
            with self._changing(low, high) as (upper, remainder):
                was_high, was_remainder = self._updated.of(low, upper, remainder)
                remainder.copy_(was_remainder.masked_fill(values.ne(was_high), 0))
                upper.copy_(values)


def _rounds_to(master: Tensor, shard: Tensor) -> Tensor:
    """Tells for each element whether ``shard`` is ``master`` in its dtype (for bf16 with either rounding of ties)."""
    matches = master.to(shard.dtype) == shard
    if master.dtype == torch.float32 and shard.dtype == torch.bfloat16:
        matches |= _rounded_away(master) == shard
    return matches


def _rounded_away(values: Tensor) -> Tensor:
    """Round fp32 values to the nearest bf16, with ties away from zero."""
    rounded = ((values.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isnan(), torch.nan, rounded)
