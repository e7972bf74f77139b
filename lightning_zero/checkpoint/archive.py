"""The file that :func:`torch.save` writes, in parts: a zip archive whose records, uncompressed, are the storages.

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
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage
from zlib_ng.zlib_ng import crc32

from lightning_zero.checkpoint.lazy import LazyTensor, placeholders
from lightning_zero.engine.stores import HostStore

TILE = 1 << 23  # bytes that are read or written at a time
_CACHED = 1 << 19  # bytes that are read to be summed up: they are still in the core's cache then
_MAPPED = 1 << 20  # bytes of a copy that has a mapping of its own: there may be only so many

# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT: sections 4.3.7, 4.3.9, 4.3.12
_LOCAL_HEADER, _CENTRAL_HEADER = 30, 46
_DESCRIPTOR = b"PK\x07\x08"
_DESCRIPTOR_CRC, _CENTRAL_CRC = 4, 16


class Record(NamedTuple):
    """Where a record's bytes lie in the file, and its checksum."""

    name: str  # inside the archive's only folder: "data.pkl", "data/0"
    start: int
    nbytes: int
    crc: int
    central: int  # where its entry in the central directory begins

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def moved(self, offset: int) -> Record:
        """The same in an archive that begins at ``offset``."""
        return self._replace(start=self.start + offset, central=self.central + offset)


def read_records(file: IO[bytes]) -> list[Record]:
    """All records of an archive, in the order of its directory.

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
    """What :func:`torch.save` writes for one tensor: all bytes before its values, these, all bytes after them."""

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
            storage = obj._untyped_storage if isinstance(obj, TypedStorage) else obj
            if not isinstance(storage, UntypedStorage):
                return None
            found.setdefault(storage._cdata, storage)
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


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    data = memoryview(data)
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def read_at(file: int, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` from ``offset`` on.

    Raises:
        EOFError: the file ends before.
    """
    while buffer:
        read = os.preadv(file, [buffer], offset)
        if not read:
            raise EOFError(f"the file ends at {offset}")
        buffer, offset = buffer[read:], offset + read


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous 1-D tensor on the CPU."""
    return values.detach().view(torch.uint8).numpy().data


def data_of(tiles: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of 1-D tensors on any device, one after the other."""
    for tile in tiles:
        yield bytes_of(tile.detach().to("cpu").contiguous())


def host_copies(tiles: Iterable[Tensor]) -> list[Tensor]:
    """What they are now, on the CPU."""
    return [_host_copy(tile.detach()) for tile in tiles]


def _host_copy(tile: Tensor) -> Tensor:
    if tile.nbytes < _MAPPED:
        return tile.to("cpu", copy=True)
    # The C allocator might keep the memory of a freed copy of the whole state.
    return HostStore().zeros(tile.numel(), tile.dtype).copy_(tile)


def checksum_of(file: int, start: int, stop: int) -> int:
    """CRC-32 of the file's bytes ``[start, stop)``."""
    crc, buffer = 0, bytearray(min(_CACHED, stop - start))
    view = memoryview(buffer)
    while start < stop:
        read = os.preadv(file, [view[: stop - start]], start)
        if not read:
            raise EOFError(f"the file ends at {start}, before {stop}")
        crc, start = crc32(view[:read], crc), start + read
    return crc


def tiles(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` in pieces of at most ``size``."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)
