"""Reads the zip archive of :func:`torch.save` so that only the parts of tensors that are used take memory.

A local file is mapped, and tensors lie on its pages. :func:`torch.load` maps a file in a way that makes the system
reserve memory for the whole file, in case its pages are changed, and fails for files larger than memory and swap. The
mapping here reserves nothing, and pages can be given back after they were read. A remote file is read in ranges when
its tensors are used.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import pickle
import weakref
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.checkpoint.archive import Checksum, Record, by_record, combined, leaves, read_directory, storages_of
from lightning_zero.checkpoint.copies import find_copies
from lightning_zero.checkpoint.errors import NAMED, CheckpointError, damaged, together
from lightning_zero.checkpoint.lazy import LazyTensor, StoredTensor, loaded_from
from lightning_zero.checkpoint.remote import Location, RemotePath, readable
from lightning_zero.checkpoint.tiles import TILE, bytes_of, checksum_of, read_at, split_range
from lightning_zero.sharding import Group
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.torch_private import file_offset, storage_number

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python before 3.13 does not name Linux's number
_SMALL = 1 << 16  # bytes; tensors of a remote file up to this size are read immediately, others when they are used
_CHECKED = 1 << 26  # bytes of a mapped file that are checked for changes at a time
_PAGEMAP_ENTRY = 8  # bytes for each page
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Size, torch.dtype, torch.device)


def load(path: Location, world: Group, weights_only: bool = True, checksums: bool = True) -> Any:
    """Read a file; tensors of an archive are mapped, or read by ranges. See :func:`lightning_zero.checkpoint.load`."""
    what = f"read the checkpoint {path}"
    if not any(together(world, path.exists, what)):
        raise FileNotFoundError(errno.ENOENT, "Checkpoint file not found", str(path))  # Lightning's message
    first, *others = together(world, lambda: _directory(path), what)
    if other := next((rank for rank, found in enumerate(others, start=1) if found != first), None):
        raise CheckpointError(
            f"could not {what}: rank {other} sees the file of another save than rank 0. Copy one of them to every node"
        )
    zipped = first is not None
    if zipped and checksums:
        verify(path, world, weights_only)
    if isinstance(path, RemotePath):
        return load_by_ranges(path) if zipped and weights_only else _load_remote(path, weights_only)
    if zipped and weights_only:
        return load_mapped(path)
    return torch.load(path, map_location="cpu", mmap=zipped, weights_only=weights_only)


def _load_remote(path: RemotePath, weights_only: bool) -> Any:
    """Load all of a remote file."""
    with path.open(block=TILE) as file:
        return torch.load(file, map_location="cpu", weights_only=weights_only)


def _directory(path: Location) -> str | None:
    """A digest of a zip archive's directory; ``None`` for a file in the format of torch before version 1.6.

    Raises:
        ValueError: it is empty, or an archive without the directory at its end.
    """
    with path.open("rb") as file:
        if not b"PK\x03\x04".startswith(file.read(4)):  # a shorter or empty file is truncated
            return None
        try:
            entries = read_directory(file)
        except zipfile.BadZipFile as error:
            raise ValueError(
                f"{path} is truncated or damaged: it has no directory at its end ({error}). Copy it again, or use an "
                "earlier checkpoint"
            ) from error
    return hashlib.sha256(repr(entries).encode()).hexdigest()


def verify(path: Location, world: Group, weights_only: bool = True) -> None:
    """Verify the checksums of an archive's records; each rank reads a part of the copy that it sees. Collective.

    Args:
        path: path of the archive.
        world: the group of all ranks.
        weights_only: see :func:`torch.load`; used if the archive is damaged, to find the names of damaged tensors.

    Raises:
        CheckpointError: a checksum does not match; raised on all ranks.
    """
    copies = find_copies(path, world)
    with path.open("rb") as archive:
        entries = read_directory(archive)

    def sums() -> list[Checksum]:
        total = sum(entry.nbytes for entry in entries)
        low, high = (total * rank // copies.size for rank in (copies.rank, copies.rank + 1))
        found, begins, file = [], 0, readable(path)
        for entry in entries:
            first, last = (min(max(edge - begins, 0), entry.nbytes) for edge in (low, high))
            if first < last:
                begin = entry.record(file).start
                start, stop = begin + first, begin + last
                found.append(Checksum(entry.name, start, stop - start, checksum_of(file, start, stop)))
            begins += entry.nbytes
        return found

    every = together(world, sums, f"verify the checkpoint {path}")
    for number, ranks in enumerate(copies.ranks):
        found = by_record(entries, (checksum for rank in ranks for checksum in every[rank]))
        # 0 means no checksum: writers may leave them out.
        wrong = [entry for entry in entries if entry.crc and combined(found[entry.name]) != entry.crc]
        if wrong:
            first, rest = wrong[:NAMED], wrong[NAMED:]
            names = [_tensor_name(path, entry.record(readable(path)), weights_only) for entry in first]
            raise damaged(path, names + [entry.name for entry in rest], copies.place(number))


def _tensor_name(path: Location, record: Record, weights_only: bool) -> str:
    """The name in the checkpoint of the first tensor in a record, or the record's name if there is no tensor."""
    kind, _, number = record.name.partition("/")
    if kind != "data":
        return record.name
    try:
        if isinstance(path, RemotePath):
            with path.open() as file:
                tree = torch.load(file, map_location="meta", weights_only=weights_only)
        else:
            tree = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
        return f"{record.name} (whose name is unreadable: {type(error).__name__})"
    tensors = [(keys, leaf) for keys, leaf in leaves(tree) if isinstance(leaf, Tensor)]
    if isinstance(path, RemotePath):
        found = [keys for keys, leaf in tensors if file_offset(leaf.untyped_storage()) == record.start]
    else:
        storage = storage_number(storages_of(tree)[int(number)])
        found = [keys for keys, leaf in tensors if storage_number(leaf.untyped_storage()) == storage]
    return "".join(f"[{key!r}]" for key in found[0]) if found else record.name


# -------------------------------------------------------------------------------------------------------------- mapping


class _File(mmap.mmap):
    """A private mapping of a file: changes of tensors on it stay in this process."""

    address: int


_FILES: weakref.WeakSet[_File] = weakref.WeakSet()  # each file lives as long as a tensor lies on it


class _NotPlainError(Exception):
    """Raised if the checkpoint contains an object of unknown type, which may hold tensors."""


def load_mapped(path: Path) -> Any:
    """Load an archive as ``torch.load(path, map_location="cpu", mmap=True, weights_only=True)`` does."""
    try:
        return _MappedTensors(path).of(torch.load(path, map_location="meta", weights_only=True))
    except (_NotPlainError, NotImplementedError):  # some kinds of tensors cannot be on the meta device
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


class _Tensors(ABC):
    """Replaces tensors that :func:`torch.load` made on the meta device by tensors with values."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}  # by id of the meta tensor, so that tied tensors stay tied
        self._sources: list[Any] = []  # keeps the meta tensors alive, so that ids are not reused

    def of(self, tree: Any) -> Any:
        """Replace the tensors in ``tree``; its dictionaries and lists stay the same objects.

        Raises:
            _NotPlainError: ``tree`` contains an object of unknown type.
        """
        try:
            return self._of(tree)
        finally:  # tensors keep their source alive, which must not keep the others
            self._made.clear()
            self._sources.clear()

    def _of(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            if id(tree) not in self._made:
                self._made[id(tree)] = self._tensor(tree)
                self._sources.append(tree)
            return self._made[id(tree)]
        if isinstance(tree, dict):
            for key, value in tree.items():
                tree[key] = self._of(value)
        elif isinstance(tree, list):
            tree[:] = map(self._of, tree)
        elif type(tree) is tuple:
            return tuple(map(self._of, tree))
        elif not isinstance(tree, _PLAIN):
            raise _NotPlainError
        return tree

    def _tensor(self, source: Tensor) -> Tensor:
        if type(source) is Parameter:
            return Parameter(self._tensor(source.detach()), source.requires_grad)
        plain = type(source) is Tensor and source.layout is torch.strided and source.is_meta
        if not plain or source.is_conj() or source.is_neg():
            raise _NotPlainError
        if (offset := file_offset(source.untyped_storage())) is None:
            raise _NotPlainError
        tensor = self._at(offset, source)
        return tensor.requires_grad_() if source.requires_grad else tensor

    @abstractmethod
    def _at(self, offset: int, source: Tensor) -> Tensor:
        """A tensor with shape, strides and dtype of ``source``, whose storage begins at ``offset`` in the file."""


class _MappedTensors(_Tensors):
    """Makes tensors that lie on the pages of a mapped file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        with path.open("rb") as file:
            flags, access = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self._file = _File(file.fileno(), 0, flags=flags, prot=access)
        self._file.address = torch.frombuffer(self._file, dtype=torch.uint8).data_ptr()
        _FILES.add(self._file)
        self._records: dict[tuple[int, torch.dtype], Tensor] = {}  # by offset in the file

    def _at(self, offset: int, source: Tensor) -> Tensor:
        record = self._record(offset, source.untyped_storage().nbytes(), source.dtype)
        return record.as_strided(source.size(), source.stride(), source.storage_offset())

    def _record(self, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        if (offset, dtype) not in self._records:
            # `frombuffer` refuses an empty buffer.
            data = torch.frombuffer(self._file, dtype=torch.uint8, offset=offset, count=nbytes) if nbytes else None
            self._records[offset, dtype] = (
                torch.empty(0, dtype=dtype, device="cpu") if data is None else data.view(dtype)
            )
        return self._records[offset, dtype]


def give_back_pages(tensor: Tensor) -> None:
    """Free the pages of a tensor of :func:`load_mapped`; the next use reads them again. Other tensors are ignored.

    Pages that were changed stay.
    """
    if isinstance(tensor, LazyTensor) or tensor.layout != torch.strided:
        return  # it holds no memory, or is not one range of pages
    start = tensor.untyped_storage().data_ptr()
    stop = start + tensor.untyped_storage().nbytes()
    for file in _FILES:
        if file.address <= start < file.address + len(file):
            # `madvise` would round the borders outwards.
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
            for low, high in split_range(first, last, _CHECKED):
                if not _may_be_changed(low, high):
                    file.madvise(mmap.MADV_DONTNEED, low - file.address, high - low)


def _may_be_changed(start: int, stop: int) -> bool:
    """Whether there may be pages in ``[start, stop)``, addresses in a mapped file, that are no longer the file's.

    A page that was changed is a copy of this process. The version counters of tensors do not tell, since changes by
    ``tensor.data`` or ``tensor.numpy()`` do not count. Without Linux's list of the pages the answer is True.
    """
    try:
        with Path("/proc/self/pagemap").open("rb") as pagemap:
            pagemap.seek(start // mmap.PAGESIZE * _PAGEMAP_ENTRY)
            entries = pagemap.read((stop - start) // mmap.PAGESIZE * _PAGEMAP_ENTRY)
    except OSError:
        return True
    # https://docs.kernel.org/admin-guide/mm/pagemap.html: the bits from 61 on are "a file's", "swapped" and "present".
    kinds = torch.frombuffer(bytearray(entries), dtype=torch.int64) >> 61 & 7
    return bool(((kinds > 1) & (kinds % 2 == 0)).any())


# ---------------------------------------------------------------------------------------------------- reading by ranges


def load_by_ranges(path: RemotePath) -> Any:
    """Load an archive; larger tensors are lazy, and only the parts of them that are used are read."""
    try:
        with path.open() as file:
            return _RangedTensors(path).of(torch.load(file, map_location="meta", weights_only=True))
    except (_NotPlainError, NotImplementedError):  # as above
        return _load_remote(path, weights_only=True)


class _Range(NamedTuple):
    """The position of a tensor's elements in a file."""

    offset: int  # first byte of the storage
    form: Tensor  # on the meta device: shape, strides, dtype and offset in the storage


class _RangedTensors(_Tensors):
    """Makes lazy tensors of a remote file; it is their source, and reads ranges of the file."""

    live = False

    def __init__(self, path: RemotePath) -> None:
        super().__init__()
        self._url = str(path)
        self._file = readable(path)
        self._ranges: list[_Range] = []

    @property
    def key(self) -> Hashable:
        return self  # not the path: a save may replace the file

    def _at(self, offset: int, source: Tensor) -> Tensor:
        self._ranges.append(_Range(offset, source))
        number = len(self._ranges) - 1
        # Small tensors, such as counters and random states, are often kept or copied as a whole. Of a tensor with gaps
        # the elements do not follow each other in the file, as those of a lazy one must.
        if source.nbytes <= _SMALL or MemoryFormat.of(source).strides != source.stride():
            return self.fetch(number)
        return loaded_from(self._url, StoredTensor(self, number, source))

    def fetch(self, param: int) -> Tensor:
        """See :class:`~lightning_zero.checkpoint.lazy.Source`."""
        offset, form = self._ranges[param]
        last = sum((size - 1) * stride for size, stride in zip(form.shape, form.stride(), strict=True))
        memory = torch.empty(1 + last if form.numel() else 0, dtype=form.dtype, device="cpu")
        read_at(self._file, bytes_of(memory), offset + int(form.storage_offset()) * form.itemsize)
        return memory.as_strided(form.size(), form.stride())

    def read_slice(self, param: int, form: MemoryFormat, start: int, into: Tensor) -> None:
        """See :class:`~lightning_zero.checkpoint.lazy.StoredSource`."""
        offset, stored = self._ranges[param]
        if stored.stride() != form.strides:  # in another order, or with gaps
            form.read(self.fetch(param), start, into)
            return
        straight = into.device.type == "cpu" and into.dtype == stored.dtype and into.is_contiguous()
        values = into if straight else torch.empty(into.numel(), dtype=stored.dtype, device="cpu")
        read_at(self._file, bytes_of(values), offset + (int(stored.storage_offset()) + start) * stored.itemsize)
        if values is not into:
            into.copy_(values)
