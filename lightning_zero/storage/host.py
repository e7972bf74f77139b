"""Tensors in host memory, each in an anonymous mapping of its exact size.

The C allocator keeps freed blocks and fragments under tensors of model size, and torch's pinned allocator rounds up to
powers of two; a mapping of its own per tensor takes the bytes asked for (rounded to a page) and gives them back when
the tensor dies.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.storage.store import Memory

HUGE_PAGE = 2 * 1024 * 1024
_TRIM_BYTES = 1 << 25  # freed memory that the C allocator may keep before it is asked to give it back
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
_freed_bytes = 0


class HostStore:
    """State rests in host memory.

    Args:
        pin: lock the pages for asynchronous copies to and from a CUDA device.
    """

    device = torch.device("cpu")
    exact = True
    memory: Memory = "host"

    def __init__(self, pin: bool = False) -> None:
        self.pin = pin

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        mapping = (_PinnedMapping if self.pin else mmap.mmap)(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE)
        if len(mapping) >= HUGE_PAGE:
            # Fewer TLB misses: 8 to 14% of an optimizer step's time. A kernel without huge pages ignores the advice.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(mapping, dtype=dtype)  # keeps the mapping alive; anonymous pages start as zeros
        if isinstance(mapping, _PinnedMapping):
            # Pinning would touch every page from this thread. Otherwise pages are taken when they are first written,
            # state by the kernels' threads.
            ops.zero_(tensor)
            mapping.register(tensor.data_ptr())
        return tensor


class _PinnedMapping(mmap.mmap):
    """A mapping registered with CUDA; unregistered before it is unmapped."""

    address = 0

    def register(self, address: int) -> None:
        _check_cuda(
            torch.cuda.cudart().cudaHostRegister(address, len(self), 0), f"pin {len(self)} bytes of host memory"
        )
        self.address = address

    def __del__(self) -> None:
        if self.address:
            _check_cuda(torch.cuda.cudart().cudaHostUnregister(self.address), "unpin host memory")


def _check_cuda(result: object, action: str) -> None:
    if int(result) != 0:  # type: ignore[call-overload]
        raise RuntimeError(
            f"CUDA could not {action}: {result}; raise the memlock limit (ulimit -l) or use less host state"
        )


def note_freed(tensor: Tensor, nbytes: int) -> None:
    """Memory of ``tensor`` was freed: the C allocator, which would keep it, gives it back from time to time."""
    global _freed_bytes  # noqa: PLW0603  (there is one allocator)
    if tensor.device.type == "cpu" and _trim is not None:
        _freed_bytes += nbytes
        if _freed_bytes >= _TRIM_BYTES:
            _freed_bytes = 0
            _trim(0)
