"""Masters: the full-precision values of a shard, behind one interface.

Updaters read and write a shard's values through a master and never touch its tensors otherwise, so that a layout
(none, a copy, a split one) is one object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.storage import DONE, Memory, Rested, Ticket
from lightning_zero.storage.rested import changing, keep, nbytes_of, pieces
from lightning_zero.storage.staged import staged_tile


def _nothing() -> None:
    """The kernel has done it all."""


class KernelTensors(NamedTuple):
    """Tensors of a master that an update kernel takes (see :class:`lightning_zero.ops.Options`); 1-D, of one length.

    ``finish`` must be called after the kernel: it publishes what was changed, as :meth:`Master.write` does.
    """

    param: Tensor
    remainder: Tensor | None = None
    copy_out: Tensor | None = None
    copy_ties: ops.Ties = "even"
    finish: Callable[[], object] = _nothing


class Master(Protocol):
    """Full-precision values of one shard.

    Attributes:
        dtype: dtype of the values.
        device: where they can be computed on.
        memory: where :meth:`read` finds them.
        nbytes: bytes held in addition to the parameter shard, where they rest.
        pinned: whether these are.
        tile: elements that are fetched together from where they rest; ``None``: they are where they are computed on.
        in_shard: whether :meth:`read` reads the parameter shard, which whoever edits parameters may change.
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
        """Elements that a kernel takes at a time at most, so that they are on their way while the next are updated.

        ``None``: all.
        """
        ...

    @property
    def in_shard(self) -> bool: ...

    def expect(self, start: int, stop: int, complete: bool = False) -> None:
        """Begin to fetch what an update of ``[start, stop)`` needs.

        Args:
            start: first element.
            stop: the one after the last.
            complete: whether the update changes everything there, with the whole tiles around, but for padding and
                what the range that was expected before has of these tiles.
        """
        ...

    def commit(self, start: int, stop: int) -> None:
        """Begin to put back what an update of ``[start, stop)`` has changed, and published."""
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """The values of elements ``[start, stop)`` of the shard (1-D), to be changed in place before :meth:`keep`.

        Of a master with tiles take no more at a time than :func:`~lightning_zero.storage.rested.pieces` gives.
        """
        ...

    def keep(self, start: int, values: Tensor) -> None:
        """Keep what was changed in the tensor that :meth:`read` gave, before :meth:`write`."""
        ...

    def write(self, start: int, stop: int) -> Ticket:
        """Begin to publish what was changed: to derive the parameter shard from it.

        The ticket of a job in which that is done stands for it.
        """
        ...

    def tensors(self, start: int, stop: int) -> KernelTensors:
        """The tensors that a kernel on the host updates in place."""
        ...

    def derive(self, start: int, stop: int) -> None:
        """Take over values that someone wrote into the parameter shard.

        Values that come back to what they were at the last update come back with all their digits.
        """
        ...


class Home:
    """Moves values between a master and the parameter shard, which are in one memory here.

    Attributes:
        memory: in which the values rest.
    """

    memory: Memory = "host"  # of a CPU optimizer that is used alone

    def published(self, shard: Rested) -> int | None:
        """Elements of the parameter shard that are copied there together; ``None``: all, nothing passes."""
        return None

    def publish(self, shard: Tensor, values: Tensor) -> Ticket:
        """Begin to copy ``values`` to their part of the parameter shard."""
        shard.copy_(values)
        return DONE

    def filling(self, shard: Tensor) -> AbstractContextManager[Tensor]:
        """Memory where the values are, to be filled inside, which is then copied to a part of the parameter shard."""
        return nullcontext(shard)

    def taken(self, shard: Tensor) -> Tensor:
        """A part of the parameter shard, to be read where the values are."""
        return shard


class StoreHome(Home):
    """Moves values between the optimizer's store and a parameter shard that may be in another memory.

    Args:
        placement: of the bucket.
        name: of the bucket.
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
        """Whether what is written for a parameter shard there passes through other memory."""
        return (self.memory, self._placement.shard_memory) == ("host", "device") and not ops.runs_on(shard)

    def taken(self, shard: Tensor) -> Tensor:
        placement, device = self._placement, self._placement.optimizer_store.device
        if shard.device.type == device.type:
            return shard
        copy = torch.empty_like(shard, device=device)
        placement.copy(copy, shard, (placement.shard_memory, self.memory), self._name)
        return copy


class NoMaster:
    """The parameter shard is its own master: nothing is copied.

    Args:
        shard: the parameter shard.
        memory: in which its values are read.
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
        """Nothing to publish: the values are the shard's."""
        return DONE

    def tensors(self, start: int, stop: int) -> KernelTensors:
        return KernelTensors(self._shard.view(start, stop))

    def derive(self, start: int, stop: int) -> None:
        """Nothing to take over: the values are the shard's."""


class _Kept:
    """Copies of what a master held at the last update, of the parts that someone has edited since."""

    def __init__(self) -> None:
        self._copies: dict[int, list[Tensor]] = {}  # by where the part starts

    def of(self, start: int, *parts: Tensor) -> list[Tensor]:
        """The copies of the part that starts at ``start``; made of ``parts`` before its first edit."""
        if start not in self._copies:
            self._copies[start] = [part.clone() for part in parts]
        return self._copies[start]

    def forget(self) -> None:
        """Forget them: an update follows."""
        self._copies = {}


class _RestedMaster(ABC):
    """A master whose tensors rest in the optimizer's store.

    Attributes:
        rested: the tensors, laid out as the shard.

    Args:
        shard: the parameter shard; where it rests on a disk, too, its tiles are those of ``rested``.
        rested: as above.
        home: how values move between the store and the shard.
    """

    def __init__(self, shard: Rested, rested: Sequence[Rested], home: Home | None) -> None:
        self._shard = shard
        self.rested = tuple(rested)
        self._home = home or Home()
        self._updated = _Kept()
        self._publishing: Ticket = DONE  # the last publication, which may still read what was fetched

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
        self._shard.expect(start, stop, blank=complete and not self.in_shard)  # else it is only written

    def commit(self, start: int, stop: int) -> None:
        for tensor in (*self.rested, self._shard):
            tensor.commit(start, stop, after=(self._publishing,))

    def _publish(self, start: int, values: Tensor) -> Ticket:
        with changing(self._shard, start, start + values.numel(), overwritten=True) as shard:
            self._publishing = self._home.publish(shard, values)
        return self._publishing


class CopyMaster(_RestedMaster):
    """Values in a tensor of their own: in another dtype, in another store, or both.

    Args:
        shard: the parameter shard.
        values: at full precision (never made from the shard's rounded ones); kept, not copied.
        home: how values move between the store and the shard.
        ties: where a bf16 shard goes from halfway.
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

    def tensors(self, start: int, stop: int) -> KernelTensors:
        self._updated.forget()
        values = self.values.view(start, stop)
        if self._shard.dtype.itemsize != 2 or not ops.runs_on(values.device):
            return KernelTensors(values, finish=lambda: self.write(start, stop))
        # The kernel writes the 16-bit shard in the same pass: where it is, or what is copied there.
        filling = ExitStack()
        copy_out = filling.enter_context(self._home.filling(self._shard.view(start, stop)))
        return KernelTensors(values, copy_out=copy_out, copy_ties=self.ties, finish=filling.close)

    def derive(self, start: int, stop: int) -> None:
        for low, high in pieces(self.tile, start, stop):
            with changing(self.values, low, high) as master:
                self._derive(low, master, self._home.taken(self._shard.read(low, high)))

    def _derive(self, start: int, master: Tensor, shard: Tensor) -> None:
        # Only what changed: a master holds more digits than the shard.
        if shard.dtype == master.dtype:
            master.copy_(shard)
            return
        (updated,) = self._updated.of(start, master)
        torch.where(_rounds_to(updated, shard), updated, shard.to(master), out=master)


class SplitMaster(_RestedMaster):
    """Values as 16-bit numbers, which the model reads, and int16 remainders: two bytes an element less than a copy.

    See :func:`lightning_zero.ops.split_`. The values are on the host; where the shard is, or comes in passing
    (:class:`~lightning_zero.storage.staged.StagedTensor`), it is the high part.

    Args:
        shard: the parameter shard, bf16 or fp16 (bf16 with ties away from zero).
        high: where the high part rests; ``None``: in the shard itself, which is worked on by the host.
        remainder: [n] int16.
        home: how values move between the store and the shard.
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
        values = torch.empty(stop - start, dtype=torch.float32)
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

    def tensors(self, start: int, stop: int) -> KernelTensors:
        self._updated.forget()
        high, remainder = self._high.view(start, stop), self._remainder.view(start, stop)
        return KernelTensors(high, remainder, finish=lambda: self.write(start, stop))

    def derive(self, start: int, stop: int) -> None:
        # Where the shard is the high part, what it was before is not known. The remainder of an unchanged element must
        # stay, and that of a changed one is less than its rounding.
        if self._own_high is None:
            return
        for low, high in pieces(self.tile, start, stop):
            values = self._home.taken(self._shard.read(low, high))
            with self._changing(low, high) as (upper, remainder):
                was_high, was_remainder = self._updated.of(low, upper, remainder)
                remainder.copy_(was_remainder.masked_fill(values.ne(was_high), 0))
                upper.copy_(values)


def _rounds_to(master: Tensor, shard: Tensor) -> Tensor:
    """Tell where ``shard`` is ``master`` in the shard's dtype, with bf16 ties to even or away from zero; bool."""
    matches = master.to(shard.dtype) == shard
    if master.dtype == torch.float32 and shard.dtype == torch.bfloat16:
        matches |= _rounded_away(master) == shard
    return matches


def _rounded_away(values: Tensor) -> Tensor:
    """fp32 values as their nearest bf16, halfway away from zero."""
    rounded = ((values.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isnan(), torch.nan, rounded)
