"""The default container: one file in the format of :func:`torch.save`, which all ranks write together.

Rank 0 writes the archive without values under a temporary name. Then every rank writes its own slices of the tensors
into the file, tile by tile. When everything is on the disk, rank 0 writes the checksums and renames the file. If a save
fails before that, the previous file is unchanged; the leftover has a temporary name, and the next save removes it. If
some rank does not see the file, rank 0 gathers all values, and writes them in the same way alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.storage import UntypedStorage
from typing_extensions import override

from lightning_zero.checkpoint.archive import (
    Checksum,
    Record,
    by_record,
    combined,
    write_checksums,
    write_skeleton,
)
from lightning_zero.checkpoint.commit import Draft, Save
from lightning_zero.checkpoint.errors import on_first, together
from lightning_zero.checkpoint.lazy import LazyTensor, StoredTensor
from lightning_zero.checkpoint.shards import Key, across_ranks, fetch_for_first, source_of, values_of
from lightning_zero.checkpoint.tiles import TILE, Appending, copy_to_host, write_tiles
from lightning_zero.engine import Engine
from lightning_zero.sharding import Group
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.storage import Executor

Missing = Mapping[Record, UntypedStorage | LazyTensor]


class _ShardedRecord(NamedTuple):
    """A record that all ranks write together, and the parameter whose values are its contents."""

    record: Record
    key: Key
    param: int


class _RecordSlice(NamedTuple):
    """A slice of a record that this rank writes."""

    record: Record
    offset: int  # first byte of the slice in the record
    tiles: Iterable[Tensor]  # consecutive 1-D tensors with the contents


def begin(checkpoint: Any, path: Path, engines: Sequence[Engine], world: Group, checksums: bool = True) -> FileSave:
    """Begin to write the file ``path``; see :func:`lightning_zero.checkpoint.begin`. Collective."""
    draft: Draft | None = None
    missing: Missing = {}
    with contextlib.ExitStack() as stack:

        def make() -> tuple[Path, list[_ShardedRecord]]:
            nonlocal draft, missing
            draft = stack.enter_context(contextlib.closing(Draft(path)))
            missing = write_skeleton(draft.temporary, checkpoint)
            return draft.temporary, _sharded_records(missing, engines)

        temporary, sharded = on_first(world, make, f"begin the checkpoint {path}")
        if all(together(world, temporary.exists, f"look for {temporary}")):
            kind, slices = FileSave, [*_own_slices(sharded, engines), *_unsharded(missing)]
        else:
            fetch_for_first([value for value in missing.values() if isinstance(value, LazyTensor)], engines)
            kind, slices = GatheredFileSave, [*_gathered(missing), *_unsharded(missing)]
        stack.pop_all()
        return kind(path, temporary, slices, draft, missing, checksums)


def write_alone(checkpoint: Any, path: Path) -> None:
    """Write ``checkpoint`` from one process, with checksums; only one tile of its stored tensors is in memory.

    Raises:
        CheckpointError: it cannot be written; an older file at ``path`` is then unchanged.
    """
    alone = Group()
    begin(checkpoint, path, (), alone).write(alone)


@dataclass
class FileSave(Save):
    """A save into one file.

    Attributes:
        temporary: path of the draft.
        slices: the slices that this rank writes.
        draft: the draft on rank 0, ``None`` on other ranks.
        missing: the records without values on rank 0, empty on other ranks.
        checksums: write checksums.
    """

    path: Path
    temporary: Path
    slices: list[_RecordSlice]
    draft: Draft | None
    missing: Missing
    checksums: bool

    @override
    def hold(self, executor: Executor) -> None:
        self.slices = [own._replace(tiles=copy_to_host(own.tiles, executor)) for own in self.slices]

    @override
    def _write(self, rank: int) -> list[Checksum]:
        written = []
        # Write-only: with reading allowed, a network file system may write back whole pages, with other ranks' bytes.
        file = os.open(self.temporary, os.O_WRONLY)
        try:
            for record, offset, tiles in self.slices:
                start = record.start + offset
                written.append(
                    Checksum(record.name, start, *write_tiles(Appending(file, start), tiles, self.checksums))
                )
            os.fsync(file)
        finally:
            os.close(file)
        return written

    @override
    def _complete(self, written: Sequence[Sequence[Checksum]]) -> None:
        if self.draft is None:
            return
        found = by_record(self.missing, (checksum for checksums in written for checksum in checksums))
        for record in self.missing:
            _check_complete(record, sorted(found[record.name], key=lambda each: each.start))
        if self.checksums:
            write_checksums(self.draft.file, {record: combined(found[record.name]) for record in self.missing})
            os.fsync(self.draft.file)
        self.draft.complete()

    @override
    def abandon(self) -> None:
        if self.draft is not None:
            self.draft.close()


class GatheredFileSave(FileSave):
    """A save of rank 0 alone, which holds all values."""

    gathered = True
    in_background = False  # a copy of them would take as much host memory again

    @override
    def _write(self, rank: int) -> list[Checksum]:
        return [] if self.draft is None else super()._write(rank)


def _sharded_records(missing: Missing, engines: Sequence[Engine]) -> list[_ShardedRecord]:
    """The records that all ranks write together."""
    return [
        _ShardedRecord(record, across_ranks(source_of(tensor, engines)), tensor.param)
        for record, tensor in _sharded(missing)
    ]


def _sharded(missing: Missing) -> Iterator[tuple[Record, LazyTensor]]:
    for record, tensor in missing.items():
        if isinstance(tensor, LazyTensor) and not isinstance(tensor, StoredTensor):
            yield record, tensor


def _gathered(missing: Missing) -> Iterator[_RecordSlice]:
    """Sharded records, whole, of values that rank 0 has fetched."""
    for record, tensor in _sharded(missing):
        values = MemoryFormat(tensor.shape, tensor.stride()).flatten(tensor.fetch())
        yield _RecordSlice(record, 0, values.split(TILE // values.itemsize))


def _unsharded(missing: Missing) -> Iterator[_RecordSlice]:
    """The records that rank 0 writes alone: buffers, and tensors added by user code, also from another checkpoint."""
    for record, values in missing.items():
        if isinstance(values, UntypedStorage):
            data = torch.empty(0, dtype=torch.uint8, device=values.device).set_(values)
            yield _RecordSlice(record, 0, data.split(TILE))
        elif isinstance(values, StoredTensor):
            yield _RecordSlice(record, 0, values.tiles(TILE))


def _own_slices(sharded: Iterable[_ShardedRecord], engines: Sequence[Engine]) -> Iterator[_RecordSlice]:
    """This rank's slices of the records that all ranks write together."""
    for record, key, param in sharded:
        values, width = values_of(key, engines), key.dtype.itemsize
        for first, start, stop in values.slices(param):
            yield _RecordSlice(record, first * width, values.tiles(start, stop))


def _check_complete(record: Record, slices: list[Checksum]) -> None:
    """Raise ValueError unless ``slices``, in ascending order, make up the record."""
    position = record.start
    for each in slices:
        if each.start != position:
            break
        position += each.nbytes
    if position != record.stop:
        raise ValueError(
            f"no rank has written byte {position - record.start} of the {record.nbytes} of {record.name}; "
            "do all ranks hold the same optimizers?"
        )
