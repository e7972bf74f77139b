"""The zip archive that :func:`torch.save` writes, in parts: its records, uncompressed, are the storages of tensors.

``torch.serialization.skip_data`` writes everything but the values and leaves room for them. Who has the values writes
them there, and their checksums into the archive, so that any tool can verify it.
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
from lightning_zero.checkpoint.tiles import Writable, write_at, write_tiles
from lightning_zero.torch_private import storage_in, storage_number

# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT: sections 4.3.7, 4.3.9, 4.3.12
_LOCAL_HEADER, _CENTRAL_HEADER = 30, 46
_DESCRIPTOR = b"PK\x07\x08"
_DESCRIPTOR_CRC, _CENTRAL_CRC = 4, 16


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
        for place in _places_of_checksum(record):
            write_at(file, struct.pack("<I", crc), place)


def with_checksum(after: bytes, record: Record, crc: int) -> bytes:
    """The bytes that follow a record in its archive, up to the end, with the record's checksum."""
    completed = bytearray(after)
    for place in _places_of_checksum(record):
        struct.pack_into("<I", completed, place - record.stop, crc)
    return bytes(completed)


def _places_of_checksum(record: Record) -> list[int]:
    """Where in the file a record's checksum stands: after the values, if there are any, and in the directory."""
    descriptor = [record.stop + _DESCRIPTOR_CRC] if record.nbytes else []  # without values the sum is 0
    return [*descriptor, record.central + _CENTRAL_CRC]


def stream(skeleton: Path, missing: Mapping[Record, Iterable[Tensor]], out: Writable, checksums: bool) -> None:
    """Write an archive from its beginning to its end: a skeleton, with the values that it lacks.

    Args:
        skeleton: by :func:`write_skeleton`.
        missing: the values of each record without any, 1-D tensors, one after the other. Asked for in the order of the
            file.
        out: where to.
        checksums: complete those of the missing records; otherwise they are 0.

    Raises:
        ValueError: values that are more or fewer than their record has room for.
    """
    completed: dict[int, int] = {}  # checksums by their place in the file
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
    """Copy from where ``file`` is up to ``stop``, with ``checksums`` at their places."""
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


def by_record(records: Iterable[Record], checksums: Iterable[Checksum]) -> dict[str, list[Checksum]]:
    """The checksums of each record's slices, by its name."""
    found: dict[str, list[Checksum]] = {record.name: [] for record in records}
    for checksum in checksums:
        found[checksum.record].append(checksum)
    return found


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
