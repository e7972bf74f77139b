"""Writes parts of the zip archive of :func:`torch.save`, whose uncompressed records are the storages of tensors.

``torch.serialization.skip_data`` writes an archive without the values and leaves room for them. The ranks that hold the
values write them there. Then their checksums are written into the archive, so that any zip tool can verify it.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.storage import UntypedStorage
from zlib_ng.zlib_ng import crc32_combine

from lightning_zero.checkpoint.lazy import LazyTensor, placeholders
from lightning_zero.checkpoint.tiles import FileObject, Readable, Writable, read_at, write_at, write_tiles
from lightning_zero.torch_private import storage_in, storage_number

# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT: sections 4.3.7, 4.3.9, 4.3.12
_LOCAL_HEADER, _CENTRAL_HEADER = 30, 46
_DESCRIPTOR = b"PK\x07\x08"
_DESCRIPTOR_CRC, _CENTRAL_CRC = 4, 16


class Record(NamedTuple):
    """An entry of the archive: the position of its bytes in the file, and their checksum."""

    name: str  # inside the archive's only folder: "data.pkl", "data/0"
    start: int  # first byte of the contents in the file
    nbytes: int
    crc: int  # CRC-32 of the contents
    central: int  # first byte of its entry in the central directory

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def moved(self, offset: int) -> Record:
        """The record in an archive that begins at ``offset``."""
        return self._replace(start=self.start + offset, central=self.central + offset)


class Entry(NamedTuple):
    """A record as the archive's central directory describes it: where its local header is, but not its contents."""

    name: str
    header: int  # first byte of the local header in the file
    nbytes: int
    crc: int
    central: int

    def record(self, file: Readable) -> Record:
        """The record, for which its local header is read from ``file``."""
        header = bytearray(_LOCAL_HEADER)
        read_at(file, memoryview(header), self.header)
        name, extra = struct.unpack_from("<HH", header, _LOCAL_HEADER - 4)
        return Record(self.name, self.header + _LOCAL_HEADER + name + extra, self.nbytes, self.crc, self.central)


def read_directory(file: IO[bytes]) -> list[Entry]:
    """All entries of an archive's central directory, which is at its end; nothing else is read.

    Raises:
        zipfile.BadZipFile: the directory at the end is damaged or missing.
    """
    with zipfile.ZipFile(file) as archive:
        entries, central = [], archive.start_dir
        for info in archive.infolist():
            _, _, inner = info.filename.partition("/")
            entries.append(Entry(inner, info.header_offset, info.file_size, info.CRC, central))
            file.seek(central)
            central += _CENTRAL_HEADER + sum(struct.unpack_from("<HHH", file.read(_CENTRAL_HEADER), 28))
        return entries


def read_records(file: IO[bytes]) -> list[Record]:
    """All records of an archive, in the order of its central directory.

    Raises:
        zipfile.BadZipFile: see :func:`read_directory`.
    """
    readable = FileObject(file)
    return [entry.record(readable) for entry in read_directory(file)]


def write_skeleton(path: Path, checkpoint: Any) -> dict[Record, UntypedStorage | LazyTensor]:
    """Write ``checkpoint`` to the file ``path`` without the values of its tensors.

    Returns:
        For every record without values: the storage with its contents, or the lazy tensor whose elements, in memory
        order, are its contents.

    Raises:
        ValueError: an object gives different tensors each time it is pickled.
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
            "an object in the checkpoint was pickled twice and gave different tensors; save its state, a dictionary, "
            "instead"
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
    """The archive of one tensor: all bytes before its values, the record of the values, all bytes after them."""

    before: bytes
    values: Record
    after: bytes


@lru_cache(maxsize=1024)
def archive_of_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> TensorArchive:
    """The archive of a dense tensor; the checksum of its values is missing."""
    memory = torch.UntypedStorage(math.prod(shape) * dtype.itemsize)  # never touched, so it takes no memory
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(memory, 0, shape, strides)
    # A file in memory; the values are a hole in it.
    with os.fdopen(os.memfd_create("tensor"), "w+b") as file, torch.serialization.skip_data():
        torch.save(tensor, file)
        (values,) = [record for record in read_records(file) if record.name == "data/0"]
        file.seek(0)
        before = file.read(values.start)
        file.seek(values.stop)
        return TensorArchive(before, values, file.read())


def storages_of(checkpoint: Any) -> list[UntypedStorage]:
    """All storages in ``checkpoint``, in the order in which :func:`torch.save`'s pickler meets and numbers them."""
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
    """Complete an archive by writing the checksums of records.

    Args:
        file: file descriptor, open for writing.
        checksums: CRC-32 of each record.
    """
    for record, crc in checksums.items():
        for place in _places_of_checksum(record):
            write_at(file, struct.pack("<I", crc), place)


def with_checksum(after: bytes, record: Record, crc: int) -> bytes:
    """Write a record's checksum into ``after``, the bytes of its archive from the record's end on."""
    completed = bytearray(after)
    for place in _places_of_checksum(record):
        struct.pack_into("<I", completed, place - record.stop, crc)
    return bytes(completed)


def _places_of_checksum(record: Record) -> list[int]:
    """The positions of a record's checksum in the file: after the values, if there are any, and in the directory."""
    descriptor = [record.stop + _DESCRIPTOR_CRC] if record.nbytes else []  # without values the CRC is 0
    return [*descriptor, record.central + _CENTRAL_CRC]


def stream(skeleton: Path, missing: Mapping[Record, Iterable[Tensor]], out: Writable, checksums: bool) -> None:
    """Write an archive sequentially: the bytes of a skeleton, with the missing values in their places.

    Args:
        skeleton: file written by :func:`write_skeleton`.
        missing: for each record without values, consecutive 1-D tensors with its contents. They are read in the order
            of the file.
        out: the file to write to.
        checksums: write the checksums of the missing records; otherwise 0 is written.

    Raises:
        ValueError: the values of a record have another size than the record.
    """
    completed: dict[int, int] = {}  # checksums by their position in the file
    with skeleton.open("rb") as file:
        for record in sorted(missing, key=lambda each: each.start):
            _copy(file, out, record.start, completed)
            nbytes, crc = write_tiles(out, missing[record], checksums)
            if nbytes != record.nbytes:
                raise ValueError(f"{record.name} has {nbytes} bytes, not {record.nbytes}")
            if checksums:
                completed |= dict.fromkeys(_places_of_checksum(record), crc)
            file.seek(record.stop)
        _copy(file, out, skeleton.stat().st_size, completed)


def _copy(file: IO[bytes], out: Writable, stop: int, checksums: dict[int, int]) -> None:
    """Copy ``file`` from its current position to ``stop``, and write ``checksums`` at their positions."""
    start = file.tell()
    data = bytearray(file.read(stop - start))
    for place in [place for place in checksums if start <= place < stop]:
        struct.pack_into("<I", data, place - start, checksums.pop(place))
    out.write(memoryview(data))


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


def by_record(records: Iterable[Record | Entry], checksums: Iterable[Checksum]) -> dict[str, list[Checksum]]:
    """The checksums of each record's slices, by its name."""
    found: dict[str, list[Checksum]] = {record.name: [] for record in records}
    for checksum in checksums:
        found[checksum.record].append(checksum)
    return found


# ------------------------------------------------------------------------------------------------ trees of a checkpoint


def lazy_tensors(checkpoint: Any) -> list[LazyTensor]:
    """Lazy tensors that have not been fetched, anywhere in ``checkpoint``."""
    with placeholders() as lazy:
        storages_of(checkpoint)
        return lazy.tensors()


def is_nested(tree: Any) -> bool:
    """Whether ``tree`` is a mapping, a list or a tuple."""
    return isinstance(tree, Mapping | list | tuple)


def leaves(
    tree: Any, opens: Callable[[Any], bool] = is_nested, keys: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of nested mappings and sequences, each with the keys that lead to it.

    Args:
        tree: the mapping or sequence.
        opens: whether to descend into a value; otherwise it is a leaf.
        keys: keys that lead to ``tree``.
    """
    if opens(tree):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(value, opens, (*keys, key))
    else:
        yield keys, tree
