"""Activations in host memory between forward and backward.

What autograd saves in forward for its backward is copied to pinned host memory, in the lane D2H, and its memory on the
device is given back; ahead of the backward that reads it, it is copied back, in the lane H2D. The values are the same
bits, and so are shapes, strides and offsets.

* A *storage* is moved, as a whole and once, however many nodes of the graph save it or views of it.
* The newest storages stay on the device, up to a limit of bytes, while they are copied: backward reads them first.
  Those before them are given back once the copy has ended, for which the stream that computes waits, not the host.
* Backward reads in reverse order. So far as the same limit allows, storages that come next are on their way already.
* What is not moved: parameters and their views, gathered or not, buffers of the module, leaves that require a gradient,
  small tensors, tensors of other devices, of subclasses and of other layouts than strided, views of a small part of a
  storage, and whatever is saved inside a backward, as by recomputation, which reads it at once.

Torch's own check survives, which hooks for saved tensors switch off: where a saved tensor was changed in place before
the backward that reads it, that is an error (:class:`_Unchanged`). It survives for what is not moved, too.

Moments when memory on the device is given back depend on no timing: see :meth:`ActivationOffload.end_backward`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from lightning_zero.storage import DONE, Executor, HostStore, Lane, Ticket, device_type
from lightning_zero.storage.staging import staged_size
from lightning_zero.storage.streams import DEFAULT_BYTES
from lightning_zero.torch_private import base_of, inside_backward, no_subclass_functions, version_counter, version_of

_WHAT = "activations"  # in messages of lanes
_MOST_AROUND = 16  # a view of a smaller part of its storage than 1 in so many is not worth moving all of it


@dataclass(frozen=True)
class ActivationLimits:
    """Which saved tensors are moved, and the memory on the device that moved ones may take.

    Attributes:
        least: bytes of the smallest storage that is moved.
        window: bytes on the device of storages that are on their way: of the newest ones in forward, and of those that
            backward reads next. One storage there always is, however large.
    """

    least: int = 1 << 20
    window: int = DEFAULT_BYTES


class Copy(Protocol):
    """The copy of a storage in host memory, which goes with this object."""


class Copies(Protocol):
    """Makes copies of storages in host memory."""

    def save(self, source: Tensor) -> tuple[Copy, Ticket]:
        """Begin to copy the whole storage of ``source``, which must stay alive until the ticket's work has ended."""
        ...

    def fetch(self, copy: Copy) -> tuple[Tensor, Ticket]:
        """Begin to copy a storage back: to a 1-D tensor of bytes, which must stay alive likewise."""
        ...


class _Block:
    """Pinned memory, and the last work on it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # 1-D, bytes
        self.work: Ticket = DONE


class _HostCopy:
    """A copy in a block, which is given back with it."""

    __slots__ = ("_give", "block", "nbytes")

    def __init__(self, block: _Block, nbytes: int, give: Callable[[_Block], object]) -> None:
        self.block, self.nbytes, self._give = block, nbytes, give

    def __del__(self) -> None:
        self._give(self.block)


class PinnedCopies:
    """Copies in pinned memory, in blocks that later ones of about the same size use again, in all steps.

    Args:
        device: that computes.
        executor: that copies.
    """

    def __init__(self, device: torch.device, executor: Executor) -> None:
        self._device = device
        self._executor = executor
        self._store = HostStore(pin_for=device)
        self._free: dict[int, list[_Block]] = {}  # by size
        self._returned: deque[_Block] = deque()  # since blocks were last looked for; by any thread
        self.nbytes = 0  # of all blocks

    def save(self, source: Tensor) -> tuple[_HostCopy, Ticket]:
        whole = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source.untyped_storage())
        block = self._take(whole.nbytes)
        # Who had the block before may be reading it still.
        block.work = self._copy(block.memory[: whole.nbytes], whole, Lane.D2H, block)
        return _HostCopy(block, whole.nbytes, self._returned.append), block.work

    def fetch(self, copy: Copy) -> tuple[Tensor, Ticket]:
        assert isinstance(copy, _HostCopy)
        target = torch.empty(copy.nbytes, dtype=torch.uint8, device=self._device)
        copy.block.work = self._copy(target, copy.block.memory[: copy.nbytes], Lane.H2D, copy.block)
        return target, copy.block.work

    def _copy(self, target: Tensor, source: Tensor, lane: Lane, block: _Block) -> Ticket:
        """Copy in a lane, after the last work on a block.

        The executor's own copies keep tensors until the host sees their end, which may be long after the device has
        reached it.
        """
        job = partial(target.copy_, source, non_blocking=block.memory.is_pinned())
        return self._executor.submit(job, lane, _WHAT, [block.work])

    def _take(self, nbytes: int) -> _Block:
        while self._returned:
            block = self._returned.popleft()
            self._free.setdefault(block.memory.nbytes, []).append(block)
        size = staged_size(nbytes)
        if found := min((each for each in self._free if size <= each <= 2 * size), default=0):
            return self._pop(found)
        room = 0
        while room < size and (smaller := min(self._free, default=size)) < size:  # too small for what comes now
            room += smaller
            self.nbytes -= self._pop(smaller).memory.nbytes
        self.nbytes += size
        return _Block(self._store.zeros(size, torch.uint8))

    def _pop(self, size: int) -> _Block:
        blocks = self._free[size]
        block = blocks.pop()
        if not blocks:
            del self._free[size]
        return block


class _OnDevice:
    """A storage on the device that a copy reads or writes: its memory is not given back before ``work`` has ended."""

    __slots__ = ("owner", "source", "work")

    def __init__(self, owner: _Saved, source: Tensor, work: Ticket) -> None:
        self.owner = weakref.ref(owner)
        self.source: Tensor | None = source  # any tensor of the storage; ``None`` once it was given back
        self.work = work

    @property
    def nbytes(self) -> int:
        """Of the storage."""
        return 0 if self.source is None else self.source.untyped_storage().nbytes()

    def give_back(self) -> None:
        """Later work on the current stream may use the memory: that waits."""
        self.work.wait()
        self.source = None


class _Unchanged:
    """Finds that a saved tensor was changed in place, as torch does where no hooks are.

    Args:
        counter: has the count of changes of the saved tensor.
        dtype: of the saved tensor, as its shape.
        shape: for the message.
    """

    __slots__ = ("_count", "_counter", "_dtype", "_shape")

    def __init__(self, counter: Tensor, dtype: torch.dtype, shape: torch.Size) -> None:
        self._counter, self._count = counter, version_of(counter)
        self._dtype, self._shape = dtype, shape

    def check(self) -> None:
        """Raise a :class:`RuntimeError` where it was."""
        if (now := version_of(self._counter)) != self._count:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of {self._dtype} and shape {tuple(self._shape)} is at version {now}; expected version "
                f"{self._count} instead. "
                "torch.autograd.set_detect_anomaly(True) shows the forward call that saved it"
            )

    def is_of(self, tensor: Tensor) -> bool:
        """Whether nothing has changed since ``tensor``, of the same base, was saved."""
        return self._count == version_of(tensor)


class _Saved:
    """One storage that was moved; those who refer to it are what autograd keeps."""

    def __init__(self, number: int, tensor: Tensor, copy: Copy) -> None:
        storage = tensor.untyped_storage()
        self.number = number  # of those that were saved, in their order
        self.copy = copy
        self.dtype = tensor.dtype
        self.nbytes = storage.nbytes()
        self.unchanged = _Unchanged(version_counter(tensor), tensor.dtype, tensor.shape)
        self.on_device: _OnDevice | None = None
        self.readers = 0  # handles
        self.fetches = 0
        self.left = 0  # of the handles, those that have not read what was fetched last
        self._storage, self._viewed = weakref.ref(storage), weakref.ref(base_of(tensor))

    def holds(self, tensor: Tensor) -> bool:
        """Whether the copy has the values of ``tensor``, which may be another view."""
        return (
            self._storage() is tensor.untyped_storage()
            and self._viewed() is base_of(tensor)
            and self.dtype == tensor.dtype
            and self.unchanged.is_of(tensor)
        )


class _Moved:
    """Stands for a tensor that was moved; autograd keeps it."""

    __slots__ = ("_form", "fetch", "saved")

    def __init__(self, saved: _Saved, tensor: Tensor) -> None:
        self.saved = saved
        self.fetch = -1  # that it has read last; 0: before it was given back
        self._form = (tensor.shape, tensor.stride(), tensor.storage_offset())

    def view(self, source: Tensor) -> Tensor:
        """The tensor, in a storage with the values."""
        typed = source if source.dtype == self.saved.dtype else _typed(source, self.saved.dtype)
        return typed.as_strided(*self._form)


def _typed(whole: Tensor, dtype: torch.dtype) -> Tensor:
    return whole[: whole.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)


class _Stayed:
    """Stands for a tensor that was not moved; autograd keeps it. By the tensor itself a graph might refer to itself."""

    __slots__ = ("_alias", "_unchanged")

    def __init__(self, tensor: Tensor) -> None:
        self._alias = tensor.detach()
        self._unchanged = _Unchanged(self._alias, tensor.dtype, tensor.shape)

    def read(self) -> Tensor:
        """An alias of it."""
        self._unchanged.check()
        return self._alias


class ActivationOffload:
    """Moves what autograd saves to host memory and back; see the module's docstring.

    Args:
        device: that computes.
        copies: in host memory.
        limits: as their docstring says.
        stay: tensors whose storages are not moved, asked for in every forward.
        kind: the class of tensors that are moved.
    """

    def __init__(
        self,
        device: torch.device,
        copies: Copies,
        limits: ActivationLimits,
        stay: Callable[[], Iterable[Tensor]] = tuple,
        kind: type[Tensor] = Tensor,
    ) -> None:
        self._device = device
        self._copies = copies
        self._limits = limits
        self._stay = stay
        self._kind = kind
        self._staying: frozenset[int] = frozenset()  # ids of storages
        self._saved = weakref.WeakValueDictionary[int, _Saved]()  # by number
        self._latest = weakref.WeakValueDictionary[int, _Saved]()  # by id of the storage
        self._first = self._next = 0  # numbers
        self._newest: deque[_OnDevice] = deque()  # oldest first
        self._ahead: list[_OnDevice] = []  # fetched, and not read yet
        self._lock = threading.RLock()  # backward runs in threads of autograd's

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around a forward: what autograd saves inside is moved."""
        if not torch.is_grad_enabled():  # nothing is saved
            yield
            return
        with self._lock:
            self._give_back_unused()
        with no_subclass_functions():
            self._staying = frozenset(
                id(tensor.untyped_storage()) for tensor in self._stay() if tensor.layout is torch.strided
            )
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        except BaseException:
            self._give_back_all()  # nobody may come to run a backward
            raise

    def end_backward(self) -> None:
        """After a backward: nothing stays on the device but what another backward, of the same forward, may read."""
        with self._lock:
            for fetched in self._ahead:
                fetched.give_back()
            self._ahead.clear()
            self._give_back_unused()

    def _give_back_all(self) -> None:
        with self._lock:
            for held in (*self._newest, *self._ahead):
                held.give_back()
            self._newest.clear()
            self._ahead.clear()

    def _give_back_unused(self) -> None:
        """Give back the memory of what no graph refers to any longer."""
        if any(held.owner() is None for held in (*self._newest, *self._ahead)):
            for held in (*self._newest, *self._ahead):
                if held.owner() is None:
                    held.give_back()
            self._newest = deque(held for held in self._newest if held.source is not None)
            self._ahead = [held for held in self._ahead if held.source is not None]
        if not self._saved:
            self._first = self._next

    # ------------------------------------------------------------------------------------------------------- forward

    def _pack(self, tensor: Tensor) -> _Moved | _Stayed:
        with self._lock, torch.no_grad():
            if not self._may_move(tensor):
                return _Stayed(tensor)
            saved = self._latest.get(id(tensor.untyped_storage()))
            if saved is None or not saved.holds(tensor):
                if tensor.untyped_storage().nbytes() > _MOST_AROUND * tensor.nbytes:
                    return _Stayed(tensor)
                saved = self._move(tensor)
            saved.readers += 1
            saved.left += 1
            return _Moved(saved, tensor)

    def _may_move(self, tensor: Tensor) -> bool:
        if type(tensor) is not self._kind or tensor.device != self._device or tensor.layout is not torch.strided:
            return False
        storage, base = tensor.untyped_storage(), base_of(tensor)
        return not (
            storage.nbytes() < self._limits.least
            or id(storage) in self._staying
            or isinstance(base, Parameter)
            or (base.is_leaf and base.requires_grad)
            or tensor.is_conj()
            or tensor.is_neg()
            or inside_backward()
        )

    def _move(self, tensor: Tensor) -> _Saved:
        self._give_back_unused()
        alias = tensor.detach()
        copy, work = self._copies.save(alias)
        saved = _Saved(self._next, tensor, copy)
        self._saved[self._next] = self._latest[id(tensor.untyped_storage())] = saved
        self._next += 1
        saved.on_device = _OnDevice(saved, alias, work)
        self._newest.append(saved.on_device)
        taken = sum(held.nbytes for held in self._newest)
        while taken > self._limits.window and len(self._newest) > 1:
            oldest = self._newest.popleft()
            taken -= oldest.nbytes
            oldest.give_back()
        return saved

    # ------------------------------------------------------------------------------------------------------ backward

    def _unpack(self, kept: _Moved | _Stayed) -> Tensor:
        if isinstance(kept, _Stayed):
            return kept.read()
        with self._lock, torch.no_grad():
            kept.saved.unchanged.check()
            self._give_back_unused()
            read = kept.view(self._read(kept))
            self._fetch_before(kept.saved.number)
            return read

    def _read(self, kept: _Moved) -> Tensor:
        saved = kept.saved
        held = saved.on_device
        if held is None or held.source is None:
            held = self._fetch(saved)
        if held in self._ahead:
            self._ahead.remove(held)
            held.work.wait()
        source = held.source
        assert source is not None
        if kept.fetch != saved.fetches:
            kept.fetch, saved.left = saved.fetches, saved.left - 1
        if saved.left <= 0 and held not in self._newest:
            saved.on_device = None  # all have it: it lives as long as they want
        return source

    def _fetch(self, saved: _Saved) -> _OnDevice:
        saved.on_device = _OnDevice(saved, *self._copies.fetch(saved.copy))
        saved.fetches += 1
        saved.left = saved.readers
        self._ahead.append(saved.on_device)
        return saved.on_device

    def _fetch_before(self, number: int) -> None:
        """Fetch what was saved before, so far as there is room, and one storage at least."""
        waiting = [held for held in (*self._newest, *self._ahead) if held.source is not None]
        taken = sum(held.nbytes for held in waiting)
        any_next = any((owner := held.owner()) is not None and owner.number < number for held in waiting)
        for earlier in range(number - 1, self._first - 1, -1):
            saved = self._saved.get(earlier)
            if saved is None or (saved.on_device is not None and saved.on_device.source is not None):
                continue
            if any_next and taken + saved.nbytes > self._limits.window:
                return
            any_next, taken = True, taken + saved.nbytes
            self._fetch(saved)


class NoOffload:
    """Leaves activations where they are."""

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """See :class:`ActivationOffload`."""
        return contextlib.nullcontext()

    def end_backward(self) -> None:
        """See :class:`ActivationOffload`."""


def make_activations(
    device: torch.device, executor: Executor, limits: ActivationLimits | None, stay: Callable[[], Iterable[Tensor]]
) -> ActivationOffload | NoOffload:
    """The activations of a training on ``device``; those of one that takes the host's memory stay where they are.

    Args:
        device: that computes.
        executor: that copies.
        limits: ``None``: nothing is moved.
        stay: see :class:`ActivationOffload`.
    """
    if limits is None or device_type(device).shares_host_memory:
        return NoOffload()
    return ActivationOffload(device, PinnedCopies(device, executor), limits, stay)
