"""The zip archive that :func:`torch.save` writes, in parts: its records, uncompressed, are the storages of tensors.

``torch.serialization.skip_data`` writes everything but the values and leaves room for them. Who has the values writes
them there, and their checksums into the archive, so that any tool can verify it.

An archive is read with its tensors on the pages of the file: what nobody reads takes no memory. :func:`torch.load` maps
a file so that the system reserves memory for all of it, in case it is changed, and refuses files larger than memory and
swap. Here nothing is reserved, and pages that have been read can be given back.
"""

from __future__ import annotations

import errno
import io
import math
import mmap
import os
import pickle
import struct
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.storage import UntypedStorage
from zlib_ng.zlib_ng import crc32_combine

from lightning_zero.checkpoint.errors import NAMED, damaged, together
from lightning_zero.checkpoint.lazy import LazyTensor, placeholders
from lightning_zero.checkpoint.tiles import checksum_of, write_at
from lightning_zero.sharding import Group
from lightning_zero.torch_private import file_offset, storage_in, storage_number, version_of

# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT: sections 4.3.7, 4.3.9, 4.3.12
_LOCAL_HEADER, _CENTRAL_HEADER = 30, 46
_DESCRIPTOR = b"PK\x07\x08"
_DESCRIPTOR_CRC, _CENTRAL_CRC = 4, 16

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python before 3.13 does not name Linux's number
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.Size, torch.dtype, torch.device)


class Record(NamedTuple):
    """An entry of the archive: where its bytes lie in the file, and their checksum."""

    name: str  # inside the archive's only folder: "data.pkl", "data/0"
    start: int
    nbytes: int
    crc: int
    central: int  # where its entry in the central directory begins

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def moved(self, offset: int) -> Record:
        """The record in an archive that begins at ``offset``."""
        return self._replace(start=self.start + offset, central=self.central + offset)


def read_records(file: IO[bytes]) -> list[Record]:
    """All records of an archive, in the order of its central directory.

    Raises:
        zipfile.BadZipFile: the directory at the end is damaged or missing.
    """
    with zipfile.ZipFile(file) as archive:
        records, central = [], archive.start_dir
        for info in archive.infolist():
            file.seek(info.header_offset)
            name, extra = struct.unpack_from("<HH", file.read(_LOCAL_HEADER), _LOCAL_HEADER - 4)
            start = info.header_offset + _LOCAL_HEADER + name + extra
            _, _, inner = info.filename.partition("/")
            records.append(Record(inner, start, info.file_size, info.CRC, central))
            file.seek(central)
            central += _CENTRAL_HEADER + sum(struct.unpack_from("<HHH", file.read(_CENTRAL_HEADER), 28))
        return records


def write_skeleton(path: Path, checkpoint: Any) -> dict[Record, UntypedStorage | LazyTensor]:
    """Write ``checkpoint`` without the values of its tensors.

    Returns:
        For every record that is missing: the storage that belongs there, or the lazy tensor whose values do, in the
        order of memory.
    """
    with placeholders() as lazy, torch.serialization.skip_data():
        storages = storages_of(checkpoint)
        torch.save(checkpoint, path)
    with path.open("rb") as file:
        records = {record.name: record for record in read_records(file)}
    missing: dict[Record, UntypedStorage | LazyTensor] = {}
    numbered = [records.get(f"data/{number}") for number in range(len(storages) + 1)]
    found = [record.nbytes for record in numbered if record is not None]
    if numbered[-1] is not None or found != [storage.nbytes() for storage in storages]:
        raise ValueError(
            "an object in the checkpoint pickles other tensors the second time than the first; save its state instead"
        )
    for record, storage in zip(numbered, storages, strict=False):
        assert record is not None
        stands_for = lazy.tensor(storage)
        missing[record] = storage if stands_for is None else stands_for
    with path.open("rb") as file:
        for record in missing:
            file.seek(record.stop)
            assert not record.nbytes or file.read(len(_DESCRIPTOR)) == _DESCRIPTOR
    return missing


class TensorArchive(NamedTuple):
    """The archive of one tensor: all bytes before its values, where these are, all bytes after them."""

    before: bytes
    values: Record
    after: bytes


@lru_cache(maxsize=1024)
def archive_of_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> TensorArchive:
    """The archive of a tensor that fills its memory; the checksum of its values is missing."""
    memory = torch.UntypedStorage(math.prod(shape) * dtype.itemsize)  # nobody touches it
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(memory, 0, shape, strides)
    # A file with a hole, which is in memory.
    with os.fdopen(os.memfd_create("tensor"), "w+b") as file, torch.serialization.skip_data():
        torch.save(tensor, file)
        (values,) = [record for record in read_records(file) if record.name == "data/0"]
        file.seek(0)
        before = file.read(values.start)
        file.seek(values.stop)
        return TensorArchive(before, values, file.read())


def storages_of(checkpoint: Any) -> list[UntypedStorage]:
    """All storages in the order in which :func:`torch.save` numbers them: that in which the pickler meets them."""
    found: dict[int, UntypedStorage] = {}

    class Finder(pickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            if (storage := storage_in(obj)) is None:
                return None
            found.setdefault(storage_number(storage), storage)
            return "storage"

    Finder(io.BytesIO(), protocol=torch.serialization.DEFAULT_PROTOCOL).dump(checkpoint)
    return list(found.values())


def write_checksums(file: int, checksums: dict[Record, int]) -> None:
    """Complete the archive with the checksums of records that were missing.

    Args:
        file: descriptor, open for writing.
        checksums: CRC-32 of each.
    """
    for record, crc in checksums.items():
        if record.nbytes:  # else there is no descriptor, and the sum is 0
            write_at(file, struct.pack("<I", crc), record.stop + _DESCRIPTOR_CRC)
        write_at(file, struct.pack("<I", crc), record.central + _CENTRAL_CRC)


# ------------------------------------------------------------------------------------------------ trees of a checkpoint


def lazy_tensors(checkpoint: Any) -> list[LazyTensor]:
    """Lazy tensors that nobody has fetched, wherever they are in ``checkpoint``."""
    with placeholders() as lazy:
        storages_of(checkpoint)
        return lazy.tensors()


def is_nested(tree: Any) -> bool:
    """Whether ``tree`` is a mapping, a list or a tuple."""
    return isinstance(tree, Mapping | list | tuple)


def leaves(
    tree: Any, opens: Callable[[Any], bool] = is_nested, keys: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Everything in nested mappings and sequences that ``opens`` refuses, with the keys that lead to it."""
    if opens(tree):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(value, opens, (*keys, key))
    else:
        yield keys, tree


# -------------------------------------------------------------------------------------------------------------- reading


def load(path: Path, world: Group, weights_only: bool = True, checksums: bool = True) -> Any:
    """Read a file, with its tensors mapped where it is an archive; see :func:`lightning_zero.checkpoint.load`."""
    what = f"read the checkpoint {path}"
    if not any(together(world, path.exists, what)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    zipped, *_ = together(world, lambda: _is_zip(path), what)
    if zipped and checksums:
        verify(path, world, weights_only)
    if zipped and weights_only:
        return load_mapped(path)
    return torch.load(path, map_location="cpu", mmap=zipped, weights_only=weights_only)


def _is_zip(path: Path) -> bool:
    """Whether a file is an archive; others are what torch wrote before version 1.6."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
        try:
            read_records(file)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path} is truncated or damaged: it has no directory at its end ({error})") from error
    return True


class Checksum(NamedTuple):
    """The CRC-32 of a slice of a record's bytes."""

    record: str
    start: int  # in the file
    nbytes: int
    crc: int


def combined(checksums: Iterable[Checksum]) -> int:
    """The CRC-32 of adjacent slices, in any order."""
    crc = 0
    for checksum in sorted(checksums, key=lambda each: each.start):
        crc = crc32_combine(crc, checksum.crc, checksum.nbytes)
    return crc


def by_record(records: Iterable[Record], checksums: Iterable[Checksum]) -> dict[str, list[Checksum]]:
    """The checksums of each record's slices, by its name."""
    found: dict[str, list[Checksum]] = {record.name: [] for record in records}
    for checksum in checksums:
        found[checksum.record].append(checksum)
    return found


def verify(path: Path, world: Group, weights_only: bool = True) -> None:
    """Compare the checksums of an archive's records with its directory; ranks share the reading. Collective.

    Raises:
        CheckpointError: on all ranks, where a record is not as it was written; ``weights_only`` tells how to load the
            archive to name the damaged tensors.
    """
    with path.open("rb") as archive:
        records = read_records(archive)

    def sums() -> list[Checksum]:
        total = sum(record.nbytes for record in records)
        low, high = (total * rank // world.size for rank in (world.rank, world.rank + 1))
        found, begins = [], 0
        with path.open("rb") as file:
            for record in records:
                start, stop = (record.start + min(max(edge - begins, 0), record.nbytes) for edge in (low, high))
                if start < stop:
                    found.append(Checksum(record.name, start, stop - start, checksum_of(file.fileno(), start, stop)))
                begins += record.nbytes
        return found

    every = together(world, sums, f"verify the checkpoint {path}")
    found = by_record(records, (checksum for checksums in every for checksum in checksums))
    # 0 stands for none: a writer may leave them out.
    wrong = [record for record in records if record.crc and combined(found[record.name]) != record.crc]
    if wrong:
        first, rest = wrong[:NAMED], wrong[NAMED:]
        names = [_tensor_name(path, record, weights_only) for record in first]
        raise damaged(path, names + [record.name for record in rest])


def _tensor_name(path: Path, record: Record, weights_only: bool) -> str:
    """The name in the tree of the first tensor that a record holds, else the record's own."""
    kind, _, number = record.name.partition("/")
    if kind != "data":
        return record.name
    try:
        tree = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
        return f"{record.name} (whose name is unreadable: {type(error).__name__})"
    storage = storage_number(storages_of(tree)[int(number)])
    for keys, leaf in leaves(tree):
        if isinstance(leaf, Tensor) and storage_number(leaf.untyped_storage()) == storage:
            return "".join(f"[{key!r}]" for key in keys)
    return record.name


# -------------------------------------------------------------------------------------------------------------- mapping


class _File(mmap.mmap):
    """A private mapping: changes of tensors stay in this process."""

    address: int


_FILES: weakref.WeakSet[_File] = weakref.WeakSet()  # each as long as a tensor is on it


class _NotPlainError(Exception):
    """The checkpoint has an object that may hold tensors."""


def load_mapped(path: Path) -> Any:
    """Load an archive as ``torch.load(path, map_location="cpu", mmap=True, weights_only=True)`` does."""
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
        """Put values into ``tree``; its dictionaries and lists stay the same objects."""
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
        if (offset := file_offset(source.untyped_storage())) is None:
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
        return  # it keeps nothing, or is no range of pages
    if version_of(tensor):
        return  # somebody has changed it: the file does not have these values
    start = tensor.untyped_storage().data_ptr()
    stop = start + tensor.untyped_storage().nbytes()
    for file in _FILES:
        if file.address <= start < file.address + len(file):
            first, last = start - file.address, stop - file.address
            first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                file.madvise(mmap.MADV_DONTNEED, first, last - first)
