"""The container of many files: a folder by ``torch.distributed.checkpoint`` (DCP), to which every rank adds its own.

No rank needs to see what another one writes. Tensors are in DCP's files, under ``model`` and ``optimizer_0``,
``optimizer_1`` ..., as Lightning's FSDP strategy has them; the rest is in ``meta.pt``, which is written last. Planning
and the format are DCP's; how tensors are written, a tile at a time, how ranks agree, and how the folder gets its name,
is as for the file.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.nn import Parameter
from zlib_ng.zlib_ng import crc32

from lightning_zero.checkpoint.archive import (
    TILE,
    Record,
    archive_of_tensor,
    data_of,
    host_copies,
    write_at,
    write_checksums,
)
from lightning_zero.checkpoint.boxes import Box, boxes_of_run, view_as_box
from lightning_zero.checkpoint.full import fetch_for_first, lazy_tensors
from lightning_zero.checkpoint.lazy import LazyTensor, StoredTensor
from lightning_zero.checkpoint.saving import META, OPTIMIZER, Draft, on_first, sync, together
from lightning_zero.checkpoint.shards import Key, ShardedValues, source_of
from lightning_zero.engine import Engine, Group

KeyPath = tuple[str | int, ...]  # the keys and indices that lead to an entry of the checkpoint


def begin(
    checkpoint: Mapping[str, Any], path: Path, engine: Engine | None, world: Group, checksums: bool = True
) -> ShardedSave:
    """Begin to write rank 0's ``checkpoint`` to the folder ``path``. Collective.

    Args:
        checkpoint: Lightning's, with lazy tensors in it.
        path: what is there is replaced when the new folder is complete and on the disk.
        engine: holds the values of the lazy tensors; ``None``: there are none.
        world: all ranks.
        checksums: write the CRC-32 of every tensor; otherwise it is 0.

    Returns:
        What writes it.

    Raises:
        CheckpointError: on all ranks, if one of them fails.
    """
    what = f"begin the checkpoint {path}"
    contents, meta = _Contents(), b""

    def sort_out() -> None:
        nonlocal contents, meta
        contents = _Contents.of(checkpoint)
        meta = contents.pickled_meta()

    on_first(world, sort_out, what)
    if engine is not None:
        # What is no dictionary or list rank 0 writes alone, with all that is in it.
        fetch_for_first([leaf for leaf in contents.entries.values() if not isinstance(leaf, Tensor)], engine)
    folder = _Folder(path, world)
    try:
        if folder.spread:  # the ranks that have made another folder write it, too
            meta = on_first(world, lambda: meta, what)
        shared, aliases = on_first(world, lambda: (contents.take_shared(engine), contents.aliases), what)
        for name, key, param in shared:
            assert engine is not None
            contents.entries[name] = _Parts(ShardedValues(engine, key), param)
        planner, writer = _Planner(contents, coordinator=world.rank == 0), _Writer(folder.path)
        plans = together(world, lambda: writer.prepare_local_plan(planner.create_local_plan()), what)

        def plan_all() -> tuple[list[SavePlan], Metadata, str]:
            every, metadata = planner.create_global_plan(plans)
            tensors = metadata.state_dict_metadata
            tensors |= {other: tensors[name] for other, name in aliases.items()}
            return writer.prepare_global_plan(every), metadata, writer.save_id

        every, metadata, writer.save_id = on_first(world, plan_all, what)
        items = planner.items(every[world.rank])
        return ShardedSave(path, folder, items, writer, metadata, aliases, meta, checksums)
    except BaseException:
        folder.close()
        raise


class ShardedSave:
    """A save that has begun; see :class:`~lightning_zero.checkpoint.saving.Save`."""

    def __init__(
        self,
        path: Path,
        folder: _Folder,
        items: Iterable[_Item],
        writer: _Writer,
        metadata: Metadata,
        aliases: Mapping[str, str],
        meta: bytes,
        checksums: bool,
    ) -> None:
        self.spread = folder.spread
        self.path, self._folder, self._items, self._meta = path, folder, items, meta
        self._writer, self._metadata, self._aliases, self._checksums = writer, metadata, aliases, checksums

    def hold(self) -> None:
        self._items = [item._replace(tiles=host_copies(item.tiles)) for item in self._items]

    def write(self, world: Group) -> None:
        def write() -> list[WriteResult]:
            return self._writer.write_items(self._items, f"__{world.rank}_0{DEFAULT_SUFFIX}", self._checksums)

        def complete() -> None:
            if (draft := self._folder.draft) is not None:
                self._writer.finish(self._metadata, [*results, self._copies(results)])
                unnamed = draft.temporary / f"{META}.tmp"
                unnamed.write_bytes(self._meta)
                sync(unnamed)
                sync(draft.temporary)
                unnamed.rename(draft.temporary / META)  # now it is complete
                sync(draft.temporary)
                draft.complete()

        try:
            results = together(world, write, f"write the checkpoint {self.path}")
            together(world, complete, f"complete the checkpoint {self.path}")
        finally:
            self.abandon()

    def _copies(self, results: Sequence[Sequence[WriteResult]]) -> list[WriteResult]:
        """Tied tensors are written once: where to find them under their other names."""
        return [
            dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=other))
            for other, name in self._aliases.items()
            for written in results
            for result in written
            if result.index.fqn == name
        ]

    def abandon(self) -> None:
        self._folder.close()


@dataclasses.dataclass
class _Contents:
    """A checkpoint as DCP sees it.

    Attributes:
        entries: by DCP's names; on all ranks but the first only what is sharded.
        paths: where they were.
        aliases: names of tensors that are another one, and the name of that.
        meta: what is not in ``entries``.
    """

    entries: dict[str, Any] = dataclasses.field(default_factory=dict)
    paths: dict[str, KeyPath] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any]) -> _Contents:
        """Tensors of weights and optimizers, and other entries with tensors that are sharded, are for DCP."""
        contents = cls(meta=dict(checkpoint))
        trees: dict[str, Any] = {}
        if "state_dict" in contents.meta:
            trees["model"] = contents.meta.pop("state_dict")
        if contents.meta.get("optimizer_states"):
            trees |= {f"optimizer_{n}": state for n, state in enumerate(contents.meta.pop("optimizer_states"))}
        for key in [key for key, value in contents.meta.items() if lazy_tensors(value)]:
            if key == "model" or OPTIMIZER.fullmatch(key):
                raise ValueError(f"the checkpoint's entry {key!r} has the name of weights or state; call it otherwise")
            trees[key] = contents.meta.pop(key)
        first: dict[Any, str] = {}
        for path, leaf in _leaves(trees, ()):
            name = ".".join(map(str, path))
            if name in contents.paths:
                raise ValueError(f"{contents.paths[name]} and {path} in the checkpoint have one name, {name!r}")
            contents.paths[name] = path
            tensor = (leaf.source.key, leaf.param) if isinstance(leaf, LazyTensor) else id(leaf)
            if isinstance(leaf, Tensor) and first.setdefault(tensor, name) != name:
                contents.aliases[name] = first[tensor]
            else:
                contents.entries[name] = leaf
        return contents

    def pickled_meta(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(self.meta, buffer)
        return buffer.getvalue()

    def take_shared(self, engine: Engine | None) -> list[tuple[str, Key, int]]:
        """Take out what all ranks write: names, and what is called so; the rest is ordinary then."""
        shared = []
        for name, leaf in self.entries.items():
            if isinstance(leaf, LazyTensor):
                if isinstance(leaf, StoredTensor):  # of another checkpoint
                    self.entries[name] = leaf.whole()
                elif leaf.fetched is not None:
                    self.entries[name] = leaf.fetched
                elif not leaf.numel():  # no rank has a part of it
                    self.entries[name] = torch.empty(leaf.shape, dtype=leaf.dtype)
                else:
                    shared.append((name, source_of(leaf, engine).key, leaf.param))
            elif isinstance(leaf, Tensor) and not _is_plain(leaf):
                self.entries[name] = _Whole(leaf)
        return shared


def _leaves(tree: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Tensors, and the largest parts of ``tree`` without any."""
    if path and not _holds_tensors(tree):
        yield path, tree
    elif isinstance(tree, Mapping) and all(isinstance(key, str) for key in tree):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _leaves(value, (*path, index))
    else:
        yield path, tree


def _holds_tensors(tree: Any) -> bool:
    if isinstance(tree, Mapping | list):
        return any(map(_holds_tensors, tree.values() if isinstance(tree, Mapping) else tree))
    return isinstance(tree, Tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is nothing but its values."""
    return type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided and not tensor.is_quantized


class _Whole:
    """A tensor that is pickled."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Parts:
    """What this rank writes of a sharded tensor; made for DCP's protocol of checkpointable objects."""

    def __init__(self, values: ShardedValues, param: int) -> None:
        self._values, self._form = values, values.bucket.formats[param]
        self._boxes: dict[torch.Size, tuple[Box, int]] = {}  # by offsets: which, and where in the shard
        for first, start, stop in values.slices(param):
            for box in boxes_of_run(self._form, first, first + stop - start):
                self._boxes[torch.Size(box.offsets)] = box, start
                start += box.numel

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(offsets, torch.Size(box.sizes)),
                    TensorProperties(dtype=self._values.key.dtype),
                    self._form.shape,
                ),
            )
            for offsets, (box, _) in self._boxes.items()
        ]

    def item(self, index: MetadataIndex) -> _Item:
        """What to write of one of the boxes."""
        assert index.offset is not None
        box, start = self._boxes[index.offset]
        form = view_as_box(torch.empty(box.numel, dtype=self._values.key.dtype, device="meta"), box, self._form)
        return _Item.of(index, form, self._values.tiles(start, start + box.numel))


class _Item(NamedTuple):
    """What is in a rank's file under one of DCP's names.

    Attributes:
        name: that one.
        before: the first bytes.
        values: where, counted from there, those of ``tiles`` are; ``None``: there are none.
        tiles: 1-D, one after the other.
        after: the last bytes.
    """

    name: MetadataIndex
    before: bytes | memoryview
    values: Record | None = None
    tiles: Iterable[Tensor] = ()
    after: bytes = b""

    @classmethod
    def of(cls, name: MetadataIndex, form: Tensor, tiles: Iterable[Tensor]) -> _Item:
        """A tensor with the shape, strides and dtype of ``form``."""
        archive = archive_of_tensor(tuple(form.shape), form.stride(), form.dtype)
        return cls(name, archive.before, archive.values, tiles, archive.after)


class _Planner(DefaultSavePlanner):
    """DCP's, for entries that have their names already, among them parts of sharded tensors."""

    def __init__(self, contents: _Contents, coordinator: bool) -> None:
        super().__init__()
        self.state_dict, self.mappings, self.is_coordinator = contents.entries, contents.paths, coordinator

    def lookup_object(self, index: MetadataIndex) -> Any:
        entry = self.state_dict[index.fqn]
        return entry.tensor if isinstance(entry, _Whole) else entry

    def items(self, plan: SavePlan) -> Iterator[_Item]:
        """What ``plan`` writes; each is looked up when its turn comes."""
        for planned in plan.items:
            entry, index = self.state_dict[planned.index.fqn], planned.index
            if isinstance(entry, _Parts):
                yield entry.item(index)
            elif isinstance(data := self.resolve_data(planned), Tensor):
                values = data.detach().resolve_conj().resolve_neg().contiguous()
                yield _Item.of(index, values, values.view(-1).split(TILE // values.itemsize))
            else:
                yield _Item(index, data.getbuffer())


class _Writer(FileSystemWriter):
    """DCP's, for files that are written as the one file is: a tile at a time, with checksums or without."""

    def write_items(self, items: Iterable[_Item], name: str, checksums: bool) -> list[WriteResult]:
        """Write ``items`` to the file ``name``, until they are on the disk; returns where they are."""
        written, sums, end = [], {}, 0
        file = os.open(Path(self.path) / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

        def write(data: bytes | memoryview) -> None:
            nonlocal end
            write_at(file, data, end)
            end += len(data)

        try:
            for item in items:
                start, crc = end, 0
                write(item.before)
                for data in data_of(item.tiles):
                    write(data)
                    crc = crc32(data, crc) if checksums else 0
                if item.values is not None:
                    values = item.values.moved(start)
                    if end != values.stop:
                        raise ValueError(f"{item.name.fqn} has {end - values.start} bytes, not {values.nbytes}")
                    sums[values] = crc
                write(item.after)
                written.append(WriteResult(item.name, end - start, _StorageInfo(name, start, end - start)))
            if checksums:
                write_checksums(file, sums)
            os.fsync(file)
        finally:
            os.close(file)
        return written

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def _nothing() -> None:
    """What the other ranks do."""


class _Folder:
    """Where this rank writes: the folder of rank 0 or, where that is on another file system, one that it sees.

    Attributes:
        path: under its temporary name.
        draft: for the rank that has made it.
        spread: whether there are several.
    """

    def __init__(self, path: Path, world: Group) -> None:
        self.draft: Draft | None = None
        self._found: Path | None = None
        seen = [False] * world.size
        try:
            while not all(seen):
                first = seen.index(False)
                self.spread = first > 0
                make = functools.partial(self._make, path) if world.rank == first else _nothing
                made = together(world, make, f"make a folder for {path}")[first]
                assert made is not None
                seen = together(world, functools.partial(self._sees, made), f"look for {made}")
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        assert self._found is not None
        return self._found

    def _make(self, path: Path) -> Path:
        self.draft = Draft(path, folder=True)
        return self.draft.temporary

    def _sees(self, made: Path) -> bool:
        if self._found is None and made.is_dir():
            self._found = made
        return self._found is not None

    def close(self) -> None:
        if self.draft is not None:
            self.draft.close()
