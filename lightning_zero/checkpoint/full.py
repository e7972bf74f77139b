"""The default container: one file as :func:`torch.save` writes it, which all ranks write together.

Rank 0 writes the skeleton under a temporary name, then every rank its own slices of the tensors at their places, a tile
at a time. When all of it is on the disk, rank 0 completes the checksums and renames the file. Whatever happens before
that, the previous file is untouched; what is left over has a name that nobody loads, and the next save removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.storage import UntypedStorage
from zlib_ng.zlib_ng import crc32, crc32_combine

from lightning_zero.checkpoint.archive import (
    TILE,
    Record,
    checksum_of,
    data_of,
    host_copies,
    read_records,
    storages_of,
    write_at,
    write_checksums,
    write_skeleton,
)
from lightning_zero.checkpoint.errors import CheckpointError
from lightning_zero.checkpoint.lazy import LazyTensor, StoredTensor, placeholders
from lightning_zero.checkpoint.mapped import load_mapped
from lightning_zero.checkpoint.saving import INCOMPLETE, Draft, on_first, together
from lightning_zero.checkpoint.shards import Key, ShardedValues, follow_first, source_of
from lightning_zero.engine import Engine, Group


class _Sharded(NamedTuple):
    """A record that all ranks write: where it is, and what belongs there."""

    record: Record
    key: Key
    param: int


class _Piece(NamedTuple):
    """What a rank is to write into a record, from a byte on: 1-D tensors, one after the other."""

    record: Record
    offset: int
    tiles: Iterable[Tensor]


class _Part(NamedTuple):
    """A run of a record's bytes, and its CRC-32."""

    record: str
    start: int  # in the file
    nbytes: int
    crc: int


def begin(checkpoint: Any, path: Path, engine: Engine | None, world: Group, checksums: bool = True) -> FullSave | None:
    """Begin to write rank 0's ``checkpoint`` to the file ``path``. Collective.

    Args:
        checkpoint: anything that :func:`torch.save` takes, with lazy tensors in it.
        path: what is there is replaced when the new file is complete and on the disk.
        engine: holds the values of the lazy tensors; ``None``: there are none.
        world: all ranks.
        checksums: complete the CRC-32 of every record, which :func:`torch.save` writes too.

    Returns:
        What writes it; ``None``, with nothing written, where some rank does not see the files of rank 0.

    Raises:
        CheckpointError: on all ranks, if one of them fails.
    """
    with contextlib.ExitStack() as stack:
        skeleton = None

        def make() -> tuple[Path, list[_Sharded]]:
            nonlocal skeleton
            draft = stack.enter_context(contextlib.closing(Draft(path)))
            skeleton = _Skeleton(draft, checkpoint)
            return draft.temporary, skeleton.sharded(engine)

        temporary, sharded = on_first(world, make, f"begin the checkpoint {path}")
        if not all(together(world, temporary.exists, f"look for {temporary}")):
            return None
        stack.pop_all()
        return FullSave(path, temporary, sharded, engine, skeleton, checksums)


def write_alone(checkpoint: Any, path: Path) -> None:
    """Write ``checkpoint`` from one process, with its checksums, in memory for a tile of its stored tensors.

    Raises:
        CheckpointError: it cannot be written; nothing has changed then.
    """
    alone = Group()
    save = begin(checkpoint, path, None, alone)
    assert save is not None
    save.write(alone)


class FullSave:
    """A save that has begun; see :class:`~lightning_zero.checkpoint.saving.Save`."""

    spread = False

    def __init__(
        self,
        path: Path,
        temporary: Path,
        sharded: Sequence[_Sharded],
        engine: Engine | None,
        skeleton: _Skeleton | None,
        checksums: bool,
    ) -> None:
        self.path, self._temporary, self._skeleton, self._checksums = path, temporary, skeleton, checksums
        self._pieces = [*_sharded_pieces(sharded, engine), *(skeleton.own_pieces() if skeleton is not None else ())]

    def hold(self) -> None:
        self._pieces = [piece._replace(tiles=host_copies(piece.tiles)) for piece in self._pieces]

    def write(self, world: Group) -> None:
        def write() -> list[_Part]:
            # Not for reading too: a network file system would write back whole pages, others' bytes among them.
            file = os.open(self._temporary, os.O_WRONLY)
            try:
                parts = [_write(file, piece, self._checksums) for piece in self._pieces]
                os.fsync(file)
            finally:
                os.close(file)
            return parts

        def complete() -> None:
            if self._skeleton is not None:
                self._skeleton.complete([part for written in parts for part in written], self._checksums)

        try:
            parts = together(world, write, f"write the checkpoint {self.path}")
            together(world, complete, f"complete the checkpoint {self.path}")
        finally:
            self.abandon()

    def abandon(self) -> None:
        if self._skeleton is not None:
            self._skeleton.draft.close()


class _Skeleton:
    """Rank 0's part: the file with room for the values of tensors."""

    def __init__(self, draft: Draft, checkpoint: Any) -> None:
        self.draft = draft
        self._missing = write_skeleton(draft.temporary, checkpoint)

    def sharded(self, engine: Engine | None) -> list[_Sharded]:
        """What all ranks write."""
        return [
            _Sharded(record, source_of(tensor, engine).key, tensor.param)
            for record, tensor in self._missing.items()
            if isinstance(tensor, LazyTensor) and not isinstance(tensor, StoredTensor)
        ]

    def own_pieces(self) -> list[_Piece]:
        """What only rank 0 has: buffers, and what user code has put there, also of another checkpoint."""
        pieces = []
        for record, values in self._missing.items():
            if isinstance(values, UntypedStorage):
                whole = torch.empty(0, dtype=torch.uint8, device=values.device).set_(values)
                pieces.append(_Piece(record, 0, whole.split(TILE)))
            elif isinstance(values, StoredTensor):
                pieces.append(_Piece(record, 0, values.tiles(TILE)))
        return pieces

    def complete(self, parts: Iterable[_Part], checksums: bool) -> None:
        """Write the checksums, and give the file its name."""
        by_record: dict[str, list[_Part]] = {record.name: [] for record in self._missing}
        for part in parts:
            by_record[part.record].append(part)
        for record in self._missing:
            _check_whole(record, sorted(by_record[record.name], key=lambda part: part.start))
        if checksums:
            sums = {record: _combined(by_record[record.name]) for record in self._missing}
            write_checksums(self.draft.file, sums)
            os.fsync(self.draft.file)
        self.draft.complete()


def _sharded_pieces(sharded: Iterable[_Sharded], engine: Engine | None) -> Iterator[_Piece]:
    """This rank's slices of the records that all ranks write."""
    for record, key, param in sharded:
        assert engine is not None
        values, width = ShardedValues(engine, key), key.dtype.itemsize
        for first, start, stop in values.slices(param):
            yield _Piece(record, first * width, values.tiles(start, stop))


def _write(file: int, piece: _Piece, checksums: bool) -> _Part:
    record, offset, pieces = piece
    start, position, crc = record.start + offset, record.start + offset, 0
    for data in data_of(pieces):
        write_at(file, data, position)
        crc = crc32(data, crc) if checksums else 0
        position += data.nbytes
    return _Part(record.name, start, position - start, crc)


def _check_whole(record: Record, parts: list[_Part]) -> None:
    """Raise unless ``parts``, in ascending order, make up the record."""
    position = record.start
    for part in parts:
        if part.start != position:
            break
        position += part.nbytes
    if position != record.stop:
        raise ValueError(
            f"no rank has written byte {position - record.start} of the {record.nbytes} of {record.name}; "
            "do all ranks hold the same optimizers?"
        )


def _combined(parts: Iterable[_Part]) -> int:
    """The CRC-32 of adjacent parts, in any order."""
    crc = 0
    for part in sorted(parts, key=lambda part: part.start):
        crc = crc32_combine(crc, part.crc, part.nbytes)
    return crc


def lazy_tensors(checkpoint: Any) -> list[LazyTensor]:
    """Those that nobody has fetched, wherever they are in ``checkpoint``."""
    with placeholders() as lazy:
        storages_of(checkpoint)
        return lazy.tensors()


def fetch_for_first(checkpoint: Any, engine: Engine) -> None:
    """Give rank 0 the values of all lazy tensors in its ``checkpoint``, for another writer than ours. Collective."""
    if engine.placement.mesh.world.rank == 0:
        sources: dict[Key, list[tuple[ShardedValues, LazyTensor]]] = {}
        for tensor in lazy_tensors(checkpoint):
            if isinstance(tensor.source, ShardedValues) and not tensor.source.live:
                sources.setdefault(tensor.source.key, []).append((tensor.source, tensor))
        for key, found in sources.items():
            full = follow_first(engine, key)
            assert full is not None
            for source, tensor in found:
                tensor.fetched = source.cut(full, tensor.param)
    follow_first(engine)


def whole_on_first(state: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """A state dict of ordinary tensors. Collective.

    Returns:
        On rank 0 all of it; elsewhere without the tensors that this rank does not hold whole.
    """
    fetch_for_first(state, engine)
    first = engine.placement.mesh.world.rank == 0

    def resolve(tree: Any) -> Any:
        if isinstance(tree, dict):
            wanted = {k: v for k, v in tree.items() if first or not isinstance(v, LazyTensor) or v.source.live}
            return {key: resolve(value) for key, value in wanted.items()}
        return tree.fetch() if isinstance(tree, LazyTensor) else tree

    resolved: dict[str, Any] = resolve(state)
    return resolved


def load(path: Path, world: Group, weights_only: bool = True, checksums: bool = True) -> Any:
    """Read a file that :func:`save` or :func:`torch.save` wrote. Collective.

    Args:
        path: of the file.
        world: all ranks; each verifies its share.
        weights_only: see :func:`torch.load`.
        checksums: read everything once and compare its checksums, where the file has them.

    Returns:
        The checkpoint on the CPU; tensors are mapped, so that each rank reads only what it uses.

    Raises:
        CheckpointError: on all ranks, where the file is incomplete or damaged, or some do not see it.
        FileNotFoundError: on all ranks, where none sees it.
    """
    what = f"read the checkpoint {path}"
    if path.name.endswith(INCOMPLETE):
        raise CheckpointError(f"could not {what}: it was never completed; load the last complete one beside it")
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


def verify(path: Path, world: Group, weights_only: bool = True) -> None:
    """Compare the checksums of an archive's records with its directory; ranks share the reading. Collective.

    Args:
        path: of what :func:`torch.save` or :func:`save` wrote.
        world: all ranks.
        weights_only: how to load it to name a damaged tensor.

    Raises:
        CheckpointError: on all ranks, where a record is not what was written.
    """
    what = f"verify the checkpoint {path}"
    with path.open("rb") as archive:
        records = read_records(archive)

    def sums() -> list[_Part]:
        total = sum(record.nbytes for record in records)
        low, high = (total * rank // world.size for rank in (world.rank, world.rank + 1))
        parts, begins = [], 0
        with path.open("rb") as file:
            for record in records:
                start, stop = (record.start + min(max(edge - begins, 0), record.nbytes) for edge in (low, high))
                if start < stop:
                    crc = checksum_of(file.fileno(), start, stop)
                    parts.append(_Part(record.name, start, stop - start, crc))
                begins += record.nbytes
        return parts

    found: dict[str, list[_Part]] = {record.name: [] for record in records}
    for part in (part for parts in together(world, sums, what) for part in parts):
        found[part.record].append(part)
    # 0 stands for none: a writer may leave them out.
    damaged = [record for record in records if record.crc and _combined(found[record.name]) != record.crc]
    if damaged:
        names = ", ".join(_tensor_name(path, record, weights_only) for record in damaged[:3])
        more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        raise CheckpointError(
            f"{path} is damaged: the checksum of {names}{more} does not match. Use an earlier checkpoint; "
            "checksums=False in the strategy loads this one all the same"
        )


def _tensor_name(path: Path, record: Record, weights_only: bool) -> str:
    """What the tree calls the first tensor that a record holds, else what the archive calls the record."""
    kind, _, number = record.name.partition("/")
    if kind != "data":
        return record.name
    try:
        tree = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
        return f"{record.name} (whose name is unreadable: {type(error).__name__})"
    storage = storages_of(tree)[int(number)]
    return next(
        (
            "".join(f"[{key!r}]" for key in keys)
            for keys, leaf in _leaves(tree)
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata == storage._cdata
        ),
        record.name,
    )


def _leaves(tree: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What is not a dictionary or a list, with the keys that lead to it."""
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, (*keys, key))
    else:
        yield keys, tree
