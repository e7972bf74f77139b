"""Ordinary tensors on the pages of a checkpoint file: what nobody reads takes no memory.

:func:`torch.load` maps a file so that the system reserves memory for all of it, in case it is changed, and refuses
files larger than memory and swap. Here nothing is reserved, and pages that have been read can be given back.
"""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.checkpoint.lazy import LazyTensor

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python before 3.13 does not name Linux's number
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Size, torch.dtype, torch.device)


class _File(mmap.mmap):
    """A private mapping: changes of tensors stay in this process."""

    address: int


_FILES: weakref.WeakSet[_File] = weakref.WeakSet()  # each as long as a tensor is on it


class _NotPlainError(Exception):
    """It may hold tensors."""


def load_mapped(path: Path) -> Any:
    """As ``torch.load(path, map_location="cpu", mmap=True, weights_only=True)``."""
    try:
        return _Tensors(path).of(torch.load(path, map_location="meta", weights_only=True))
    except (_NotPlainError, NotImplementedError):  # some kinds of tensors have no form without values
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


class _Tensors:
    """Gives tensors that :func:`torch.load` made on the meta device their values."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            flags, access = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self._file = _File(file.fileno(), 0, flags=flags, prot=access)
        self._file.address = torch.frombuffer(self._file, dtype=torch.uint8).data_ptr()
        _FILES.add(self._file)
        self._records: dict[tuple[int, torch.dtype], Tensor] = {}  # by offset in the file
        self._made: dict[int, Any] = {}  # by id of what it was made of: tied tensors stay tied
        self._sources: list[Any] = []  # keeps these ids theirs

    def of(self, tree: Any) -> Any:
        """``tree`` with values; dictionaries and lists are the same objects."""
        if isinstance(tree, Tensor):
            if id(tree) not in self._made:
                self._made[id(tree)] = self._tensor(tree)
                self._sources.append(tree)
            return self._made[id(tree)]
        if isinstance(tree, dict):
            for key, value in tree.items():
                tree[key] = self.of(value)
        elif isinstance(tree, list):
            tree[:] = map(self.of, tree)
        elif type(tree) is tuple:
            return tuple(map(self.of, tree))
        elif not isinstance(tree, _PLAIN):
            raise _NotPlainError
        return tree

    def _tensor(self, source: Tensor) -> Tensor:
        if type(source) is Parameter:
            return Parameter(self._tensor(source.detach()), source.requires_grad)
        plain = type(source) is Tensor and source.layout is torch.strided and source.is_meta
        if not plain or source.is_conj() or source.is_neg():
            raise _NotPlainError
        # Versions of torch before 2.13 may not say where a storage is.
        if (offset := getattr(source.untyped_storage(), "_checkpoint_offset", None)) is None:
            raise _NotPlainError
        record = self._record(offset, source.untyped_storage().nbytes(), source.dtype)
        tensor = record.as_strided(source.size(), source.stride(), source.storage_offset())
        return tensor.requires_grad_() if source.requires_grad else tensor

    def _record(self, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        if (offset, dtype) not in self._records:
            # No bytes are no buffer.
            data = torch.frombuffer(self._file, dtype=torch.uint8, offset=offset, count=nbytes) if nbytes else None
            self._records[offset, dtype] = torch.empty(0, dtype=dtype) if data is None else data.view(dtype)
        return self._records[offset, dtype]


def give_back_pages(tensor: Tensor) -> None:
    """Let go of the memory behind a tensor of :func:`load_mapped`, to be read again at the next use; others stay."""
    if isinstance(tensor, LazyTensor) or tensor.layout != torch.strided:
        return  # it keeps nothing, or is no run of pages
    if tensor._version:
        return  # somebody has changed it: the file does not have these values
    start = tensor.untyped_storage().data_ptr()
    stop = start + tensor.untyped_storage().nbytes()
    for file in _FILES:
        if file.address <= start < file.address + len(file):
            first, last = start - file.address, stop - file.address
            first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                file.madvise(mmap.MADV_DONTNEED, first, last - first)
