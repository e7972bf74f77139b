"""The container of one file at a URL, which rank 0 writes sequentially.

Files at URLs can only be written from beginning to end, so ranks cannot share the work. Rank 0 gathers the state in the
order of the file, one piece at a time, and holds only a few pieces in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.storage import UntypedStorage
from typing_extensions import override

from lightning_zero.checkpoint.archive import Record, stream, write_skeleton
from lightning_zero.checkpoint.commit import Save
from lightning_zero.checkpoint.errors import together
from lightning_zero.checkpoint.lazy import LazyTensor, StoredTensor, fetch_loaded
from lightning_zero.checkpoint.remote import RemotePath
from lightning_zero.checkpoint.shards import Key, across_ranks, follow_first, source_of
from lightning_zero.checkpoint.tiles import TILE
from lightning_zero.engine import Engine
from lightning_zero.sharding import Group
from lightning_zero.storage import Executor

_RECENT = 6  # number of pieces to keep; consecutive records of a parameter alternate between kinds of state


def begin(
    checkpoint: Any, path: RemotePath, engines: Sequence[Engine], world: Group, checksums: bool = True
) -> RemoteFileSave:
    """Begin to write the file ``path``; see :func:`lightning_zero.checkpoint.begin`. Collective."""

    def look() -> None:
        if world.rank == 0 and path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; remove it, or save under another name")
        fetch_loaded(str(path))

    together(world, look, f"begin the checkpoint {path}")
    return RemoteFileSave(path, checkpoint, engines, checksums)


@dataclass
class RemoteFileSave(Save):
    """A save into one file at a URL.

    An error of rank 0's upload is raised on all ranks. One in a gather is raised at once on the rank that has it, as in
    training: the others are inside of that gather, and end when this rank does.

    Attributes:
        checkpoint: rank 0's checkpoint.
        engines: the engines that hold the values of its lazy tensors.
        checksums: write checksums.
    """

    path: RemotePath
    checkpoint: Any
    engines: Sequence[Engine]
    checksums: bool
    in_background = False
    _error: Exception | None = field(default=None, init=False)  # of the upload
    _gathering: bool = field(default=False, init=False)

    @override
    def hold(self, executor: Executor) -> None:
        raise NotImplementedError("this save cannot run in the background: all ranks gather for it")

    @override
    def write(self, world: Group) -> None:
        # Before `together`, which keeps an error back until all ranks have come.
        self._error = self._upload() if world.rank == 0 else None
        follow_first(self.engines)  # other ranks take part in rank 0's gathers here, until its last one
        super().write(world)

    @override
    def _write(self, rank: int) -> None:
        if self._error is not None:
            raise self._error

    def _upload(self) -> Exception | None:
        """Send the file; returns the error of this, and raises one of a gather."""
        try:
            self._stream()
        except Exception as error:
            if self._gathering:
                raise
            return error
        except BaseException:
            if not self._gathering:
                follow_first(self.engines)  # an interrupt of rank 0 alone frees the others
            raise
        return None

    def _stream(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            skeleton = Path(folder) / "archive"  # a file with holes
            missing = write_skeleton(skeleton, self.checkpoint)
            with self.path.writing() as out:
                stream(skeleton, _Values(missing, self.engines, self._gather), out, self.checksums)

    def _gather(self, key: Key) -> Tensor:
        """Gather a piece of sharded values; other ranks take part by :func:`follow_first`."""
        self._gathering = True  # and so it stays after an error
        gathered = follow_first(self.engines, key)
        self._gathering = False
        assert gathered is not None
        return gathered

    @override
    def _complete(self, written: Sequence[Any]) -> None:
        """Does nothing: the file became visible when all of it had arrived."""

    @override
    def abandon(self) -> None:
        """Does nothing: an incomplete file is never visible."""


class _Values(Mapping[Record, Iterator[Tensor]]):
    """Maps records to their values, which ``gather`` gathers when they are read."""

    def __init__(
        self,
        missing: Mapping[Record, UntypedStorage | LazyTensor],
        engines: Sequence[Engine],
        gather: Callable[[Key], Tensor],
    ) -> None:
        self._missing = missing
        self._engines = engines
        self._gather = gather
        self._recent: dict[Key, Tensor] = {}  # pieces; consecutive small records lie in the same piece

    def __iter__(self) -> Iterator[Record]:
        return iter(self._missing)

    def __len__(self) -> int:
        return len(self._missing)

    def __getitem__(self, record: Record) -> Iterator[Tensor]:
        found = self._missing[record]
        if isinstance(found, UntypedStorage):
            data = torch.empty(0, dtype=torch.uint8, device=found.device).set_(found)
            return iter(data.split(TILE))
        if isinstance(found, StoredTensor):
            return found.tiles(TILE)
        values = source_of(found, self._engines)
        return self._gathered(across_ranks(values), *values.place(found.param))

    def _gathered(self, key: Key, start: int, stop: int) -> Iterator[Tensor]:
        """Elements ``[start, stop)`` of the values with the :func:`across_ranks` key ``key``: 1-D parts on the CPU."""
        while start < stop:
            number, inside = divmod(start, key.piece_numel)
            part = self._piece(key._replace(piece=number))[inside : inside + stop - start]
            yield part
            start += len(part)

    def _piece(self, key: Key) -> Tensor:
        if key not in self._recent:
            while len(self._recent) >= _RECENT:  # drop the piece that was gathered first
                del self._recent[next(iter(self._recent))]
            self._recent[key] = self._gather(key)
        return self._recent[key]
