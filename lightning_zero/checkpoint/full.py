"""The default container: one file as :func:`torch.save` writes it, which all ranks write together.

Rank 0 writes the skeleton under a temporary name, then every rank its own slices of the tensors at their places, a tile
at a time. When all of it is on the disk, rank 0 completes the checksums and renames the file. Whatever happens before
that, the previous file is untouched; what is left over has a name that nobody loads, and the next save removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import re
import secrets
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.storage import UntypedStorage

from lightning_zero.checkpoint.archive import (
    TILE,
    Record,
    bytes_of,
    checksum_of,
    read_records,
    storages_of,
    tiles,
    write_at,
    write_checksums,
    write_skeleton,
)
from lightning_zero.checkpoint.crc32 import combine
from lightning_zero.checkpoint.errors import CheckpointError
from lightning_zero.checkpoint.lazy import LazyTensor, placeholders
from lightning_zero.checkpoint.mapped import load_mapped
from lightning_zero.checkpoint.shards import Key, ShardedValues, follow_first
from lightning_zero.engine import Engine, Group

T = TypeVar("T")
INCOMPLETE = ".incomplete"  # how the name of a file ends until it is complete
_LEFTOVER = re.compile(rf"\..*\.[0-9a-f]{{8}}{re.escape(INCOMPLETE)}")


class _Sharded(NamedTuple):
    """A record that all ranks write: where it is, and what belongs there."""

    record: Record
    key: Key
    param: int


class _Part(NamedTuple):
    """A run of a record's bytes, and its CRC-32."""

    record: str
    start: int  # in the file
    nbytes: int
    crc: int


def save(checkpoint: Any, path: Path, engine: Engine | None, world: Group, checksums: bool = True) -> bool:
    """Write rank 0's ``checkpoint`` to ``path``. Collective.

    Args:
        checkpoint: anything that :func:`torch.save` takes, with lazy tensors in it.
        path: a file that is there is replaced when the new one is complete and on the disk.
        engine: holds the values of the lazy tensors; ``None``: there are none.
        world: all ranks.
        checksums: complete the CRC-32 of every record, which :func:`torch.save` writes too.

    Returns:
        False, with nothing written, where some rank does not see the files of rank 0.

    Raises:
        CheckpointError: on all ranks, if one of them fails; what was at ``path`` is still there then. (Where only the
            last flush fails, that of the folder, the new file is.)
    """
    with contextlib.ExitStack() as stack:
        draft = stack.enter_context(_Draft(path, engine)) if world.rank == 0 else None

        def begin() -> tuple[Path, list[_Sharded]] | None:
            return None if draft is None else draft.begin(checkpoint)

        plan, *_ = _together(world, begin, f"begin the checkpoint {path}")
        assert plan is not None
        temporary, sharded = plan
        if not all(_together(world, temporary.exists, f"look for {temporary}")):
            return False

        def write() -> list[_Part]:
            # Not for reading too: a network file system would write back whole pages, others' bytes among them.
            file = os.open(temporary, os.O_WRONLY)
            stack.callback(os.close, file)
            parts = list(_write_sharded(file, sharded, engine, checksums))
            if draft is not None:
                parts += draft.write_own(file, checksums)
            os.fsync(file)
            return parts

        parts = _together(world, write, f"write the checkpoint {path}")

        def complete() -> None:
            if draft is not None:
                draft.complete([part for written in parts for part in written], checksums)

        _together(world, complete, f"complete the checkpoint {path}")
    return True


class _Draft:
    """Rank 0's part: the file under its temporary name, removed at the end of the context unless it is complete."""

    def __init__(self, path: Path, engine: Engine | None) -> None:
        self._path = path
        name = os.fsdecode(os.fsencode(path.name)[:200])  # bytes: file systems take 255 of them
        self._temporary = path.with_name(f".{name}.{secrets.token_hex(4)}{INCOMPLETE}")
        self._engine = engine
        self._missing: dict[Record, UntypedStorage | LazyTensor] = {}
        self._file: int | None = None

    def __enter__(self) -> Self:
        return self

    def begin(self, checkpoint: Any) -> tuple[Path, list[_Sharded]]:
        """Write the skeleton; returns where it is and which records all ranks write."""
        if self._path.is_dir():
            raise IsADirectoryError(f"{self._path} is a folder; remove it, or save under another name")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._path.parent)
        self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        _lock(self._file)  # as long as it is open, it is no leftover
        self._missing = write_skeleton(self._temporary, checkpoint)
        sharded = []
        for record, tensor in self._missing.items():
            if isinstance(tensor, LazyTensor):
                if not isinstance(tensor.source, ShardedValues) or tensor.source.engine is not self._engine:
                    raise ValueError(f"{tensor} belongs to another Trainer's strategy; put a clone into the checkpoint")
                sharded.append(_Sharded(record, tensor.source.key, tensor.param))
        return self._temporary, sharded

    def write_own(self, file: int, checksums: bool) -> list[_Part]:
        """Write what only rank 0 has: buffers, and what user code has put there."""
        own = {record: s for record, s in self._missing.items() if isinstance(s, UntypedStorage)}
        return [
            _write(file, record, 0, torch.empty(0, dtype=torch.uint8, device=s.device).set_(s).split(TILE), checksums)
            for record, s in own.items()
        ]

    def complete(self, parts: Iterable[_Part], checksums: bool) -> None:
        """Write the checksums, and give the file its name."""
        assert self._file is not None
        by_record: dict[str, list[_Part]] = {record.name: [] for record in self._missing}
        for part in parts:
            by_record[part.record].append(part)
        for record in self._missing:
            _check_whole(record, sorted(by_record[record.name], key=lambda part: part.start))
        if checksums:
            write_checksums(self._file, {record: _combined(by_record[record.name]) for record in self._missing})
            os.fsync(self._file)
        self._temporary.replace(self._path)
        _sync_folder(self._path.parent)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._temporary.unlink(missing_ok=True)  # it has another name when it is complete
            os.close(self._file)


def _write_sharded(file: int, sharded: Iterable[_Sharded], engine: Engine | None, checksums: bool) -> Iterator[_Part]:
    """Write this rank's slices of the records that all ranks write."""
    for record, key, param in sharded:
        assert engine is not None
        values, width = ShardedValues(engine, key), key.dtype.itemsize
        for first, start, stop in values.slices(param):
            pieces = (values.read(a, b) for a, b in tiles(start, stop, TILE // width))
            yield _write(file, record, first * width, pieces, checksums)


def _write(file: int, record: Record, offset: int, pieces: Iterable[Tensor], checksums: bool) -> _Part:
    """Write 1-D tensors one after the other into a record, from ``offset`` on."""
    position, crc = record.start + offset, 0
    for piece in pieces:
        data = bytes_of(piece.detach().to("cpu").contiguous())
        write_at(file, data, position)
        crc = zlib.crc32(data, crc) if checksums else 0
        position += data.nbytes
    return _Part(record.name, record.start + offset, position - record.start - offset, crc)


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
        crc = combine(crc, part.crc, part.nbytes)
    return crc


def remove_leftovers(folder: Path) -> None:
    """Remove what saves have left behind that were killed; those that are going on hold a lock."""
    for leftover in folder.glob(f".*{INCOMPLETE}"):
        if _LEFTOVER.fullmatch(leftover.name) and leftover.is_file():
            # Another run was first, or it is another user's: nothing that a save should fail for.
            with contextlib.suppress(OSError):
                file = os.open(leftover, os.O_WRONLY)
                try:
                    if _lock(file):
                        leftover.unlink()
                finally:
                    os.close(file)


def _lock(file: int) -> bool:
    """Lock a file until it is closed; False where another process has it, or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _together(world: Group, act: Callable[[], T], what: str) -> list[T]:
    """Run ``act`` on all ranks; returns all results, in rank order. Collective.

    Raises:
        CheckpointError: on all ranks, where it failed on one.
    """
    result, caught = None, None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001  # it is raised below, when all ranks know
        caught = error
    message = None if caught is None else f"{type(caught).__name__}: {caught}"
    outcomes: list[tuple[Any, str | None]] = world.all_gather_object((result, message), what)
    failed = {rank: text for rank, (_, text) in enumerate(outcomes) if text is not None}
    if failed:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        raise CheckpointError(f"could not {what}. {said}") from caught
    return [result for result, _ in outcomes]


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
            assert isinstance(tensor.source, ShardedValues)
            if not tensor.source.live:
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
    if not any(_together(world, path.exists, what)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    zipped, *_ = _together(world, lambda: _is_zip(path), what)
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
        read_records(path)
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
    records = read_records(path)

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
    for part in (part for parts in _together(world, sums, what) for part in parts):
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
