"""A checkpoint file that one process writes, from tensors that lie in pieces of others, a tile at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.storage import UntypedStorage

from lightning_zero.checkpoint.archive import TILE, Record, bytes_of, write_at, write_checksums, write_skeleton
from lightning_zero.checkpoint.full import INCOMPLETE, remove_leftovers
from lightning_zero.checkpoint.lazy import LazyTensor


@dataclass(frozen=True, eq=False)
class Pieces:
    """The source of one lazy tensor: its elements in order, in pieces.

    Attributes:
        key: tells it from all others in the checkpoint.
        pieces: 1-D, of any dtype.
        form: a tensor on the meta device with the shape and dtype of the whole.
    """

    key: Hashable
    pieces: Sequence[Tensor]
    form: Tensor
    live: ClassVar[bool] = False

    def tensor(self) -> LazyTensor:
        """The whole, not put together yet."""
        return LazyTensor(self, 0, self.form)

    def fetch(self, param: int) -> Tensor:
        """The whole, put together; contiguous, on the CPU."""
        whole = torch.empty(self.form.shape, dtype=self.form.dtype)
        return whole if not whole.numel() else torch.cat(list(self.pieces), out=whole.view(-1)).view(self.form.shape)

    def tiles(self) -> Iterator[Tensor]:
        """The elements in order and in their dtype, as 1-D tensors of at most :data:`TILE` bytes."""
        for piece in self.pieces:
            for tile in piece.split(TILE // self.form.itemsize):
                yield tile.to(self.form.dtype)


def write(checkpoint: Any, path: Path) -> None:
    """Write ``checkpoint`` as :func:`torch.save` does, with its checksums; the file gets its name when it is complete.

    Args:
        checkpoint: may hold lazy tensors of :class:`Pieces`.
        path: of the file; its folder is made.

    Raises:
        OSError: it cannot be written; nothing is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    name = os.fsdecode(os.fsencode(path.name)[:200])  # bytes: file systems take 255 of them
    temporary = path.with_name(f".{name}.{secrets.token_hex(4)}{INCOMPLETE}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as long as it is open, it is no leftover
        missing = write_skeleton(temporary, checkpoint)
        checksums = {record: _write(file, record, _tiles(values)) for record, values in missing.items()}
        write_checksums(file, checksums)
        os.fsync(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # it has another name when it is complete
        os.close(file)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _tiles(values: UntypedStorage | LazyTensor) -> Iterator[Tensor]:
    if isinstance(values, LazyTensor):
        assert isinstance(values.source, Pieces)
        return values.source.tiles()
    whole: Tensor = torch.empty(0, dtype=torch.uint8).set_(values)
    return iter(whole.split(TILE))


def _write(file: int, record: Record, tiles: Iterable[Tensor]) -> int:
    """Write a record's values; returns their CRC-32."""
    position, crc = record.start, 0
    for tile in tiles:
        data = bytes_of(tile.contiguous())
        write_at(file, data, position)
        position, crc = position + data.nbytes, zlib.crc32(data, crc)
    assert position == record.stop
    return crc
