"""Tensors in host memory, each in an anonymous mapping of its exact size.

The C allocator keeps memory that was freed, and fragments under tensors of a model's size. Torch's allocator of pinned
memory rounds sizes up to powers of two. A mapping per tensor takes the bytes asked for, rounded up to a page, and gives
them back when the tensor dies.

Only memory that copies to and from a device use directly is pinned. Optimizer state, remainders and masters of 16-bit
parameters never leave host memory, and are not: the system's limits may not allow to lock so much.

The child of a fork, such as a worker of a DataLoader, gets zeros for the memory that serves a device. Otherwise the
next update would copy all pages that it writes to, and the child keep the old ones. A child cannot use its parent's
device, and so has no way to this memory. On CPU ranks it has, and gets the values.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
import threading

import torch
from torch import Tensor

from lightning_zero import limits, ops
from lightning_zero.advice import Case, advice
from lightning_zero.storage.accelerators import device_type
from lightning_zero.storage.rested import Memory, Resident

HUGE_PAGE = 2 * 1024 * 1024
_TRIM_BYTES = 1 << 25  # freed memory that the C allocator may keep before it is asked to give it back
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
_freed_bytes = 0
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of its malloc.h
_KEPT_BYTES = 1 << 30  # at the end of the heap; activations and gradients of a micro-batch come from there
_LARGEST_BLOCK = 1 << 25  # bytes, the largest that glibc allows
_LARGEST_REUSED = _LARGEST_BLOCK - mmap.PAGESIZE  # glibc adds some bytes to a block
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
# Of Linux. Not MADV_DONTFORK: a child that frees its copy of the tensor would unmap what has come in the gap since.
_MADV_WIPEONFORK = 18
_madvise = None if _MADV_HUGEPAGE is None else ctypes.CDLL(None).madvise
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostStore:
    """Rests tensors in host memory.

    Args:
        pin_for: the device that the memory serves. What crosses (see
            :class:`~lightning_zero.storage.store.TensorStore`) is pinned for its asynchronous copies, where its type
            can. ``None``: nothing is pinned, and children of forks get the values.
    """

    device = torch.device("cpu")
    exact = True
    memory: Memory = "host"
    resting_memory: Memory = "host"
    tile: int | None = None
    passing_bytes = 0
    as_on_host = True

    def __init__(self, pin_for: torch.device | None = None) -> None:
        self._pin_for = pin_for if pin_for is not None and device_type(pin_for).can_pin else None
        self._for_children = pin_for is None or device_type(pin_for).shares_host_memory

    @property
    def pins(self) -> bool:
        return self._pin_for is not None

    def zeros(self, numel: int, dtype: torch.dtype, *, crosses: bool = True) -> Tensor:
        """See :class:`~lightning_zero.storage.store.TensorStore`.

        Raises:
            RuntimeError: the memory cannot be pinned. It states the bytes, what is pinned already, and the limit.
        """
        kind = _PinnedMapping if self.pins and crosses else mmap.mmap
        mapping = kind(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE)
        tensor = torch.frombuffer(mapping, dtype=dtype)  # keeps the mapping alive; anonymous pages start as zeros
        _ask_for_huge_pages(tensor)  # they save TLB misses: 8 to 14% of an optimizer step's time
        if not self._for_children and _madvise is not None:
            _madvise(tensor.data_ptr(), len(mapping), _MADV_WIPEONFORK)  # older systems ignore it
        if isinstance(mapping, _PinnedMapping):
            assert self._pin_for is not None
            # Pinning touches all pages, and would do so from this thread. The kernels' threads do it here, as they do
            # for memory that is not pinned, so that pages lie near the cores that use them.
            ops.zero_(tensor)
            mapping.pin(tensor.data_ptr(), self._pin_for)
        return tensor

    def close(self) -> None:
        """Do nothing: there is nothing outside of memory."""

    def rest(
        self, numel: int, dtype: torch.dtype, what: str, *, crosses: bool = False, apart: bool = False
    ) -> Resident:
        return Resident(self.zeros(numel, dtype, crosses=crosses), self.memory)


def reuse_freed_memory() -> None:
    """Let glibc's allocator keep up to 1 GiB of freed memory, in blocks of up to 32 MiB, for what is allocated next.

    By default it gives large blocks and the end of its heap back to the system when they are freed, so that every
    micro-batch gets its activations and gradients in fresh pages. See M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in
    mallopt(3). An environment that sets one of these keeps its own values. Other allocators ignore this.
    """
    tuned = " ".join(os.environ).lower() + os.environ.get("GLIBC_TUNABLES", "")
    if _mallopt is not None and not re.search("malloc[_.](mmap|trim)_threshold", tuned):
        _mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
        _mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def temporary_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate 1-D zeros that are freed soon, on any device.

    In host memory, fresh pages can cost more time than what is computed with them. The C allocator reuses memory of up
    to 32 MiB and mostly maps larger sizes anew, so these are in huge pages here.
    """
    if device.type == "cpu" and numel * dtype.itemsize > _LARGEST_REUSED:
        return HostStore().zeros(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=device)


def use_huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages for a tensor just allocated, if :func:`temporary_zeros` would use them; returns the tensor."""
    if tensor.device.type == "cpu" and tensor.nbytes > _LARGEST_REUSED:
        _ask_for_huge_pages(tensor)
    return tensor


def _ask_for_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages where they fit into the memory of a tensor on the CPU. A system without them ignores this."""
    begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    size = (tensor.data_ptr() + tensor.nbytes - begin) // HUGE_PAGE * HUGE_PAGE
    if size > 0 and _madvise is not None:
        _madvise(begin, size, _MADV_HUGEPAGE)


class _PinnedMapping(mmap.mmap):
    """A mapping that is pinned for a device, and unpinned before it is unmapped."""

    _pinned: tuple[int, torch.device] | None = None  # address, and for which device

    def pin(self, address: int, device: torch.device) -> None:
        try:
            device_type(device).pin(address, len(self))
        except RuntimeError as error:
            raise RuntimeError(_refusal(len(self), device, error)) from error
        self._pinned = address, device
        _PINNED.add(len(self))

    def __del__(self) -> None:
        if self._pinned is not None and not sys.is_finalizing():  # then torch may be gone, and the process frees all
            address, device = self._pinned
            # Streams may still copy to or from here, and it is not known which. Such memory is freed rarely.
            device_type(device).synchronize(device)
            device_type(device).unpin(address)
            _PINNED.add(-len(self))


class _Total:
    """A number of bytes that several threads change."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.RLock()  # the thread that holds it may collect garbage, which is unpinned

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


_PINNED = _Total()


def pinned_bytes() -> int:
    """The bytes of host memory that stores of this process have pinned now."""
    return _PINNED.nbytes


def _refusal(nbytes: int, device: torch.device, error: RuntimeError) -> str:
    limit = limits.locked_memory()
    allowed = f"{limit:,} bytes" if isinstance(limit, int) else limit or "unknown"
    return (
        f"{nbytes:,} bytes of host memory could not be pinned for {device}, beside {pinned_bytes():,} that are: "
        f"{error}. Expected: a limit of locked memory that allows both (ulimit -l, which is {allowed} here, or that of "
        "a container or driver). Raise it (ulimit -l unlimited, in a container --ulimit memlock=-1)"
        f"{advice(Case.NOT_PINNED, ', ')}"
    )


def note_freed(tensor: Tensor, nbytes: int) -> None:
    """Note that memory of ``tensor`` was freed. From time to time the C allocator is asked to give it back."""
    global _freed_bytes  # noqa: PLW0603  (there is one allocator)
    if tensor.device.type == "cpu" and _trim is not None:
        _freed_bytes += nbytes
        if _freed_bytes >= _TRIM_BYTES:
            _freed_bytes = 0
            _trim(0)
