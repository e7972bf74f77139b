"""Writes a folder in the format of ``torch.distributed.checkpoint`` (DCP), to which every rank adds a file.

No rank needs to see the files of another one. Tensors are in DCP's files, as in folders of Lightning's FSDP strategies:
those of the Trainer under ``model`` and ``optimizer_0``, ``optimizer_1`` ..., those of Fabric under the names of their
entries. Everything else is in ``meta.pt``, which is written last. Planning and format are DCP's. Tensors are written
tile by tile, errors are exchanged and the folder is renamed as for a checkpoint in one file.
"""

from __future__ import annotations

import dataclasses
import io
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter
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
from typing_extensions import override

from lightning_zero.checkpoint.archive import Record, archive_of_tensor, lazy_tensors, leaves, with_checksum
from lightning_zero.checkpoint.boxes import Box, boxes_of_slice, view_as_box
from lightning_zero.checkpoint.commit import METADATA, Save
from lightning_zero.checkpoint.destination import Destination, make_destination
from lightning_zero.checkpoint.errors import on_first, together
from lightning_zero.checkpoint.folder_reader import OF_TRAINER, OPTIMIZER
from lightning_zero.checkpoint.lazy import LazyTensor, StoredTensor
from lightning_zero.checkpoint.remote import Location
from lightning_zero.checkpoint.shards import Key, SharedValues, across_ranks, fetch_for_first, source_of, values_of
from lightning_zero.checkpoint.tiles import TILE, Writable, copy_to_host, write_tiles
from lightning_zero.engine import Engine
from lightning_zero.sharding import Group
from lightning_zero.storage import Executor
from lightning_zero.torch_private import StorageInfo

KeyPath = tuple[str | int, ...]  # the keys and indices that lead to an entry of the checkpoint


def begin(
    checkpoint: Mapping[str, Any], path: Location, engines: Sequence[Engine], world: Group, checksums: bool = True
) -> FolderSave:
    """Begin to write the folder ``path``; see :func:`lightning_zero.checkpoint.begin`. Collective."""
    what = f"begin the checkpoint {path}"
    contents, meta = _Contents(), b""

    def sort_out() -> None:
        nonlocal contents, meta
        contents = _Contents.of(checkpoint)
        meta = contents.pickled_meta()

    on_first(world, sort_out, what)
    # Rank 0 alone writes entries that are no tensors, with all tensors inside them.
    fetch_for_first([leaf for leaf in contents.entries.values() if not isinstance(leaf, Tensor)], engines)
    folder = make_destination(path, world)
    try:
        if folder.spread:  # the ranks that complete other folders write `meta.pt` into them
            meta = on_first(world, lambda: meta, what)
        sharded, aliases = on_first(world, lambda: (contents.take_sharded(engines), contents.aliases), what)
        for name, key, param in sharded:
            contents.entries[name] = _OwnBoxes(values_of(key, engines), param)
        planner = _Planner(contents, coordinator=world.rank == 0)
        plans = together(world, planner.create_local_plan, what)

        def plan_all() -> tuple[list[SavePlan], Metadata, str]:
            every, metadata = planner.create_global_plan(plans)
            tensors = metadata.state_dict_metadata
            tensors |= {other: tensors[name] for other, name in aliases.items()}
            return every, metadata, folder.save_id

        every, metadata, folder.save_id = on_first(world, plan_all, what)
        items = planner.items(every[world.rank])
        return FolderSave(path, folder, items, metadata, aliases, meta, checksums)
    except BaseException:
        folder.close()
        raise


@dataclasses.dataclass
class FolderSave(Save):
    """A save into a folder.

    Attributes:
        folder: the folder that this rank writes to.
        items: the items that this rank writes.
        metadata: DCP's metadata of all ranks' items.
        aliases: for the other names of tied tensors, the name under which the tensor is written.
        meta: contents of ``meta.pt``.
        checksums: write checksums.
    """

    path: Location
    folder: Destination
    items: Iterable[_Item]
    metadata: Metadata
    aliases: Mapping[str, str]
    meta: bytes
    checksums: bool

    def __post_init__(self) -> None:
        self.spread = self.folder.spread

    @override
    def hold(self, executor: Executor) -> None:
        self.items = [item._replace(tiles=copy_to_host(item.tiles, executor)) for item in self.items]

    @override
    def _write(self, rank: int) -> list[WriteResult]:
        name = self.folder.name_of(f"__{rank}_0{DEFAULT_SUFFIX}")
        with self.folder.create(name) as file:
            return list(_write_items(self.items, file, name, self.checksums))

    @override
    def _complete(self, written: Sequence[Sequence[WriteResult]]) -> None:
        if self.folder.is_mine:
            results = [*map(list, written), self._copies(written)]
            files = {result.storage_data.relative_path for each in results for result in each}
            self.folder.complete(_pickled_metadata(self.metadata, results, self.folder.save_id), self.meta, files)

    def _copies(self, written: Sequence[Sequence[WriteResult]]) -> list[WriteResult]:
        """The write results of tied tensors, which are written once, repeated for their other names."""
        return [
            dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=other))
            for other, name in self.aliases.items()
            for results in written
            for result in results
            if result.index.fqn == name
        ]

    @override
    def abandon(self) -> None:
        self.folder.close()


@dataclasses.dataclass
class _Contents:
    """A checkpoint divided into DCP's entries and the contents of ``meta.pt``.

    Attributes:
        entries: by DCP's names; on ranks other than 0 only sharded tensors.
        paths: by DCP's names, the keys that lead to the entry in the checkpoint.
        aliases: for the other names of tied tensors, the name under which the tensor is written.
        meta: everything else.
    """

    entries: dict[str, Any] = dataclasses.field(default_factory=dict)
    paths: dict[str, KeyPath] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any]) -> _Contents:
        """Divide a checkpoint: DCP gets weights, optimizer state, and other entries with sharded tensors.

        Raises:
            ValueError: two tensors would get the same name in DCP, or an entry has a name that is reserved.
        """
        contents = cls(meta=dict(checkpoint))
        stored = [key for key, value in checkpoint.items() if _is_stored(key, value)]
        trees = {key: contents.meta.pop(key) for key in stored}
        if OF_TRAINER in contents.meta:
            trees = _as_fsdp_names(trees)
        first: dict[Any, str] = {}
        for path, leaf in (found for key, tree in trees.items() for found in leaves(tree, _is_opened, (key,))):
            name = ".".join(map(str, path))
            if name in contents.paths:
                raise ValueError(
                    f"{contents.paths[name]} and {path} in the checkpoint would both be stored as {name!r}; rename one"
                )
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

    def take_sharded(self, engines: Sequence[Engine]) -> list[tuple[str, Key, int]]:
        """Find the tensors that all ranks write, and return name, key and parameter of each.

        Other lazy tensors are replaced by ordinary ones, and what is no plain tensor by its pickle.
        """
        sharded = []
        for name, leaf in self.entries.items():
            if isinstance(leaf, LazyTensor):
                if isinstance(leaf, StoredTensor):  # it comes from another checkpoint
                    self.entries[name] = leaf.full()
                elif leaf.fetched is not None:
                    self.entries[name] = leaf.fetched
                elif not leaf.numel():  # no rank has a slice of it
                    self.entries[name] = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
                else:
                    sharded.append((name, across_ranks(source_of(leaf, engines)), leaf.param))
            elif not (isinstance(leaf, Tensor) and _is_plain(leaf)):
                self.entries[name] = _Pickled.of(leaf)
        return sharded


def _is_stored(key: str, value: Any) -> bool:
    """Whether the tensors of an entry of the checkpoint are in DCP's files."""
    return key == "state_dict" or (key == "optimizer_states" and bool(value)) or bool(lazy_tensors(value))


def _as_fsdp_names(trees: Mapping[str, Any]) -> dict[str, Any]:
    """Name weights and optimizer states of the Trainer as in folders of Lightning's FSDP strategy."""
    named: dict[str, Any] = {}
    for key, tree in trees.items():
        if key == "model" or OPTIMIZER.fullmatch(key):
            raise ValueError(
                f"the checkpoint's entry {key!r} has a name that a folder needs for the weights or the optimizer "
                f"state, since there is the entry {OF_TRAINER!r}; give it another name"
            )
        if key == "optimizer_states" and isinstance(tree, list | tuple):  # with Fabric it may be that of one optimizer
            named |= {f"optimizer_{n}": state for n, state in enumerate(tree)}
        else:
            named["model" if key == "state_dict" else key] = tree
    return named


def _is_opened(tree: Any) -> bool:
    """Whether the elements of ``tree`` become entries of DCP: it must be a dictionary or list that contains tensors."""
    if isinstance(tree, Mapping):
        return all(isinstance(key, str) for key in tree) and _holds_tensors(tree)
    return isinstance(tree, list) and _holds_tensors(tree)


def _holds_tensors(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for _, leaf in leaves(tree, lambda value: isinstance(value, Mapping | list)))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is fully described by its values, shape and dtype."""
    return type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided and not tensor.is_quantized


@dataclasses.dataclass
class _Pickled:
    """An object that is no plain tensor: the contents of its archive."""

    contents: memoryview

    @classmethod
    def of(cls, leaf: Any) -> _Pickled:
        buffer = io.BytesIO()
        torch.save(leaf, buffer)
        return cls(buffer.getbuffer())


class _OwnBoxes:
    """The boxes of a sharded tensor that this rank writes; implements DCP's protocol of checkpointable objects."""

    def __init__(self, values: SharedValues, param: int) -> None:
        self._values, self._form = values, values.form(param)
        self._boxes: dict[torch.Size, tuple[Box, int]] = {}  # by offsets, with the first element in this rank's shard
        for first, start, stop in values.slices(param):
            for box in boxes_of_slice(self._form, first, first + stop - start):
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
        """The item to write for one of the boxes."""
        assert index.offset is not None
        box, start = self._boxes[index.offset]
        form = view_as_box(torch.empty(box.numel, dtype=self._values.key.dtype, device="meta"), box, self._form)
        return _Item.of(index, form, self._values.tiles(start, start + box.numel))


class _Item(NamedTuple):
    """An archive in a rank's file, under one of DCP's names: a box of a tensor, or a pickled object.

    Attributes:
        name: name of the entry, with the offsets of the box.
        before: the bytes of the archive before the values.
        values: the record with the contents of ``tiles``; ``None``: the whole archive is in ``before``.
        tiles: consecutive 1-D tensors with the values.
        after: the bytes of the archive after the values.
    """

    name: MetadataIndex
    before: bytes | memoryview
    values: Record | None = None
    tiles: Iterable[Tensor] = ()
    after: bytes = b""

    @classmethod
    def of(cls, name: MetadataIndex, form: Tensor, tiles: Iterable[Tensor]) -> _Item:
        """Make an item for a tensor with the shape, strides and dtype of ``form``."""
        archive = archive_of_tensor(tuple(form.shape), form.stride(), form.dtype)
        return cls(name, archive.before, archive.values, tiles, archive.after)


class _Planner(DefaultSavePlanner):
    """DCP's planner, adapted to entries that are already named, among them boxes of sharded tensors."""

    def __init__(self, contents: _Contents, coordinator: bool) -> None:
        super().__init__()
        self.state_dict, self.mappings, self.is_coordinator = contents.entries, contents.paths, coordinator

    def items(self, plan: SavePlan) -> Iterator[_Item]:
        """The items that ``plan`` writes; each is looked up only when it is reached."""
        for planned in plan.items:
            entry, index = self.state_dict[planned.index.fqn], planned.index
            if isinstance(entry, _OwnBoxes):
                yield entry.item(index)
            elif isinstance(entry, _Pickled):
                yield _Item(index, entry.contents)
            else:
                assert isinstance(entry, Tensor)
                values = entry.detach().resolve_conj().resolve_neg().contiguous()
                yield _Item.of(index, values, values.view(-1).split(TILE // values.itemsize))


def _write_items(items: Iterable[_Item], file: Writable, name: str, checksums: bool) -> Iterator[WriteResult]:
    """Append ``items`` to ``file``, whose name is ``name``; yields the position of each as DCP's write result.

    Raises:
        ValueError: the values of an item have another size than its record.
    """
    end = 0
    for item in items:
        start, after = end, item.after
        file.write(item.before)
        end += len(item.before)
        if item.values is not None:
            nbytes, crc = write_tiles(file, item.tiles, checksums)
            if nbytes != item.values.nbytes:
                raise ValueError(f"{item.name.fqn} has {nbytes} bytes, not {item.values.nbytes}")
            end += nbytes
            after = with_checksum(after, item.values, crc) if checksums else after
        file.write(after)
        end += len(after)
        yield WriteResult(item.name, end - start, StorageInfo(name, start, end - start))


def _pickled_metadata(metadata: Metadata, results: list[list[WriteResult]], save_id: str) -> bytes:
    """The contents of ``.metadata``, made by DCP's own writer, so that they fit the installed version of DCP."""
    with tempfile.TemporaryDirectory() as scratch:
        writer = _MetadataWriter(scratch)
        writer.save_id = save_id
        writer.finish(metadata, results)
        return (Path(scratch) / METADATA).read_bytes()


class _MetadataWriter(FileSystemWriter):
    """DCP's writer, which notes only the save's id about the folder, not its temporary path."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)
