"""Keeps activations in host memory between forward and backward.

Tensors that autograd saves in forward are copied to pinned host memory, in the lane D2H, and their memory on the device
is freed. Before backward reads them, they are copied back, in the lane H2D. Values, shapes, strides and offsets are
restored exactly.

* A *storage* is moved as a whole and only once, however many nodes of the graph save it or views of it.
* The newest storages, up to a limit in bytes, stay on the device while they are copied, since backward reads them
  first. Older ones are freed after their copy has ended; the stream that computes waits for that, not the host.
* Backward reads in reverse order. Within the same limit, the storages that come next are copied back ahead of time.
* The following are not moved: parameters and their views, gathered or not; buffers of the module; leaves that require a
  gradient; small tensors; tensors on other devices, of subclasses, or with a layout other than strided; views of a
  small part of a storage; and tensors saved inside a backward, such as by recomputation, which are read soon.

Hooks for saved tensors disable torch's check for tensors that were changed in place before backward reads them. The
check is done here instead, also for tensors that are not moved; see :class:`_Unchanged`.

The moments when memory on the device is freed do not depend on timing; see :meth:`ActivationOffload.end_backward`.
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

_WHAT = "activations"  # description of the copies, for messages and traces
_MOST_AROUND = 16  # a storage is not moved for a view of less than this fraction (1/16) of it


@dataclass(frozen=True)
class ActivationLimits:
    """Limits that decide which saved tensors are moved, and how much device memory storages in transit may take.

    Attributes:
        least: minimum size of a storage that is moved, in bytes.
        window: maximum size on the device, in bytes, of storages in transit: of the newest ones in forward, and of
            those that backward reads next. One storage is always allowed, however large.
    """

    least: int = 1 << 20
    window: int = DEFAULT_BYTES


class Copy(Protocol):
    """The copy of a storage in host memory; it lives as long as this object."""


class Copies(Protocol):
    """Makes copies of storages in host memory."""

    def save(self, source: Tensor) -> tuple[Copy, Ticket]:
        """Begin to copy the whole storage of ``source``; the caller must keep it alive until the copy has ended."""
        ...

    def fetch(self, copy: Copy) -> tuple[Tensor, Ticket]:
        """Begin to copy a storage back to a new 1-D uint8 tensor, which the caller must keep alive likewise."""
        ...


class _Block:
    """A block of pinned memory, and the last work on it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory  # 1-D, uint8
        self.work: Ticket = DONE


class _HostCopy:
    """A copy in a block; the block is returned when this object is deleted."""

    __slots__ = ("_give", "block", "nbytes")

    def __init__(self, block: _Block, nbytes: int, give: Callable[[_Block], object]) -> None:
        self.block, self.nbytes, self._give = block, nbytes, give

    def __del__(self) -> None:
        self._give(self.block)


class PinnedCopies:
    """Copies storages to blocks of pinned memory, which later copies of about the same size reuse, in all steps.

    Args:
        device: the device that computes.
        executor: the executor that copies.
    """

    def __init__(self, device: torch.device, executor: Executor) -> None:
        self._device = device
        self._executor = executor
        self._store = HostStore(pin_for=device)
        self._free: dict[int, list[_Block]] = {}  # by size
        self._returned: deque[_Block] = deque()  # blocks returned, by any thread, since the last `_take`
        self.nbytes = 0  # total size of all blocks

    def save(self, source: Tensor) -> tuple[_HostCopy, Ticket]:
        whole = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source.untyped_storage())
        block = self._take(whole.nbytes)
        # After the block's last work: its previous copy may still be read.
        block.work = self._copy(block.memory[: whole.nbytes], whole, Lane.D2H, block)
        return _HostCopy(block, whole.nbytes, self._returned.append), block.work

    def fetch(self, copy: Copy) -> tuple[Tensor, Ticket]:
        assert isinstance(copy, _HostCopy)
        target = torch.empty(copy.nbytes, dtype=torch.uint8, device=self._device)
        copy.block.work = self._copy(target, copy.block.memory[: copy.nbytes], Lane.H2D, copy.block)
        return target, copy.block.work

    def _copy(self, target: Tensor, source: Tensor, lane: Lane, block: _Block) -> Ticket:
        """Submit a copy to a lane, after the last work on a block.

        This is a job and not one of the executor's own copies, because those keep tensors alive until the host notices
        their end, which may be long after the end itself.
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
        while room < size and (smaller := min(self._free, default=size)) < size:  # free blocks that are too small
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
    """A storage on the device that a copy reads or writes; its memory must not be freed before ``work`` has ended."""

    __slots__ = ("owner", "source", "work")

    def __init__(self, owner: _Saved, source: Tensor, work: Ticket) -> None:
        self.owner = weakref.ref(owner)
        self.source: Tensor | None = source  # any tensor of the storage; ``None`` after it was freed
        self.work = work

    @property
    def nbytes(self) -> int:
        """Size of the storage in bytes; 0 after it was freed."""
        return 0 if self.source is None else self.source.untyped_storage().nbytes()

    def give_back(self) -> None:
        """Free the storage, after the current stream has waited for the copy: its later work may reuse the memory."""
        self.work.wait()
        self.source = None


class _Unchanged:
    """Detects that a saved tensor was changed in place, as torch does without hooks for saved tensors.

    Args:
        counter: a tensor that shares the version counter of the saved tensor.
        dtype: dtype of the saved tensor, for the message.
        shape: shape of the saved tensor, for the message.
    """

    __slots__ = ("_count", "_counter", "_dtype", "_shape")

    def __init__(self, counter: Tensor, dtype: torch.dtype, shape: torch.Size) -> None:
        self._counter, self._count = counter, version_of(counter)
        self._dtype, self._shape = dtype, shape

    def check(self) -> None:
        """Raise a :class:`RuntimeError` if the tensor was changed."""
        if (now := version_of(self._counter)) != self._count:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of {self._dtype} and shape {tuple(self._shape)} is at version {now}; expected version "
                f"{self._count} instead. "
                "torch.autograd.set_detect_anomaly(True) shows the forward call that saved it"
            )

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which has the same base as the saved one, has the same version now."""
        return self._count == version_of(tensor)


class _Saved:
    """A storage that was moved; the handles that autograd keeps refer to it."""

    def __init__(self, number: int, tensor: Tensor, copy: Copy) -> None:
        storage = tensor.untyped_storage()
        self.number = number  # position in the order in which storages were saved
        self.copy = copy
        self.dtype = tensor.dtype
        self.nbytes = storage.nbytes()
        self.unchanged = _Unchanged(version_counter(tensor), tensor.dtype, tensor.shape)
        self.on_device: _OnDevice | None = None
        self.readers = 0  # number of handles
        self.fetches = 0
        self.left = 0  # number of handles that have not read since the last fetch
        self._storage, self._viewed = weakref.ref(storage), weakref.ref(base_of(tensor))

    def holds(self, tensor: Tensor) -> bool:
        """Whether the copy contains the values of ``tensor``, which may be another view of the storage."""
        return (
            self._storage() is tensor.untyped_storage()
            and self._viewed() is base_of(tensor)
            and self.dtype == tensor.dtype
            and self.unchanged.is_of(tensor)
        )


class _Moved:
    """The handle of a moved tensor, which autograd keeps instead of it."""

    __slots__ = ("_form", "fetch", "saved")

    def __init__(self, saved: _Saved, tensor: Tensor) -> None:
        self.saved = saved
        self.fetch = -1  # number of the fetch that it has read last; 0: the original storage; -1: nothing yet
        self._form = (tensor.shape, tensor.stride(), tensor.storage_offset())

    def view(self, source: Tensor) -> Tensor:
        """The tensor as a view of ``source``, a tensor whose storage has the values."""
        typed = source if source.dtype == self.saved.dtype else _typed(source, self.saved.dtype)
        return typed.as_strided(*self._form)


def _typed(whole: Tensor, dtype: torch.dtype) -> Tensor:
    return whole[: whole.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)


class _Stayed:
    """The handle of a tensor that was not moved, which autograd keeps instead of it.

    If autograd kept the tensor itself, a graph might contain a reference to itself.
    """

    __slots__ = ("_alias", "_unchanged")

    def __init__(self, tensor: Tensor) -> None:
        self._alias = tensor.detach()
        self._unchanged = _Unchanged(self._alias, tensor.dtype, tensor.shape)

    def read(self) -> Tensor:
        """An alias of the tensor; raises if the tensor was changed."""
        self._unchanged.check()
        return self._alias


class ActivationOffload:
    """Moves tensors that autograd saves to host memory and back; see the module's docstring.

    Args:
        device: the device that computes.
        copies: makes the copies in host memory.
        limits: see :class:`ActivationLimits`.
        stay: returns tensors whose storages are not moved; called in every forward.
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
        self._first = self._next = 0  # smallest number in use, and number of the next storage
        self._newest: deque[_OnDevice] = deque()  # the newest storages on the device, oldest first
        self._ahead: list[_OnDevice] = []  # storages that were fetched and not read yet
        self._lock = threading.RLock()  # backward runs in autograd's threads

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A context for a forward: tensors that autograd saves inside are moved."""
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
            self._give_back_all()  # there may be no backward
            raise

    def end_backward(self) -> None:
        """Free storages after a backward, except those that another backward of the same forward may read."""
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
        """Free storages that no graph refers to any more."""
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
            saved.on_device = None  # all handles have read it: it lives as long as their tensors
        return source

    def _fetch(self, saved: _Saved) -> _OnDevice:
        saved.on_device = _OnDevice(saved, *self._copies.fetch(saved.copy))
        saved.fetches += 1
        saved.left = saved.readers
        self._ahead.append(saved.on_device)
        return saved.on_device

    def _fetch_before(self, number: int) -> None:
        """Fetch storages that were saved before ``number``, at least one, and more within the limit."""
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
    """Leaves activations on the device."""

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """See :class:`ActivationOffload`."""
        return contextlib.nullcontext()

    def end_backward(self) -> None:
        """See :class:`ActivationOffload`."""


def make_activations(
    device: torch.device, executor: Executor, limits: ActivationLimits | None, stay: Callable[[], Iterable[Tensor]]
) -> ActivationOffload | NoOffload:
    """Makes the object that handles saved activations; on a device without its own memory they are not moved.

    Args:
        device: the device that computes.
        executor: the executor that copies.
        limits: which tensors are moved; ``None``: none.
        stay: see :class:`ActivationOffload`.
    """
    if limits is None or device_type(device).shares_host_memory:
        return NoOffload()
    return ActivationOffload(device, PinnedCopies(device, executor), limits, stay)
