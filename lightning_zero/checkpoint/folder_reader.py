"""Reading a folder by ``torch.distributed.checkpoint`` (DCP): each rank reads the slices that it owns, and no more.

Folders are this package's, and those that Lightning's FSDP strategy writes.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata
from typing_extensions import Buffer

from lightning_zero.checkpoint import archive, archive_reader
from lightning_zero.checkpoint.boxes import Box, boxes_of_slice, view_as_box
from lightning_zero.checkpoint.commit import META, METADATA
from lightning_zero.checkpoint.errors import NAMED, CheckpointError, damaged, together
from lightning_zero.checkpoint.lazy import StoredTensor
from lightning_zero.checkpoint.remote import Location, RemoteFile, RemotePath, nbytes_of
from lightning_zero.checkpoint.tiles import OpenFile, Readable, bytes_of, checksum_of, read_at
from lightning_zero.sharding import Group
from lightning_zero.sharding.memory_format import MemoryFormat

OPTIMIZER = re.compile(r"optimizer_(\d+)")  # entries with the state of an optimizer; the weights are "model"
# Names in `.metadata`, a pickle; nothing else is called or imported.
_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size", "device", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
}
_APART = "Where nodes have written into folders of their own, copy the files of all of them into each, or into one"


def load(path: Location, world: Group, weights_only: bool = True, checksums: bool = True) -> dict[str, Any]:
    """Read the folder ``path``; see :func:`lightning_zero.checkpoint.load`. Collective.

    Returns:
        The checkpoint, as from one file; its tensors are read when they are used.
    """
    folder = _open(path, world)
    meta: dict[str, Any] = archive_reader.load(folder.meta, world, weights_only, checksums)
    if checksums:
        _verify(folder, world)
    entries: dict[str, Any] = {}
    read = functools.partial(torch.load, map_location="cpu", weights_only=weights_only)
    together(world, lambda: entries.update(folder.entries(read)), f"read the checkpoint {path}")
    return as_one(entries, meta)


def verify(path: Location, world: Group) -> None:
    """Compare all checksums in a folder; ranks share the reading. Collective.

    Raises:
        CheckpointError: on all ranks, where something is not as it was written.
    """
    folder = _open(path, world)
    archive_reader.verify(folder.meta, world)
    _verify(folder, world)


def _open(path: Location, world: Group) -> Folder:
    what = f"read the checkpoint {path}"
    folders: list[Folder] = []

    def open_folder() -> set[str]:
        folders.append(Folder(path))
        return folders[0].missing_files()

    missing = together(world, open_folder, what)
    if len(set(together(world, lambda: folders[0].save_id, what))) > 1:
        raise CheckpointError(f"could not {what}: ranks see folders of several saves; use an earlier checkpoint")
    if lost := sorted(set.intersection(*missing)):
        raise CheckpointError(
            f"could not {what}: {len(lost)} of its files are not there: {', '.join(lost[:NAMED])}. {_APART}"
        )
    return folders[0]


def _verify(folder: Folder, world: Group) -> None:
    same_files = not any(together(world, folder.missing_files, f"read the checkpoint {folder.path}"))
    found = together(world, lambda: folder.damaged(world if same_files else Group()), f"verify {folder.path}")
    if names := sorted({name for own in found for name in own}):
        raise damaged(folder.path, names)


def as_one(entries: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint as from one file, of the result of :meth:`Folder.entries` and the contents of ``meta.pt``."""
    weights = {"state_dict": entries.pop("model")} if "model" in entries else {}
    numbered = sorted((int(match[1]), key) for key in entries if (match := OPTIMIZER.fullmatch(key)))
    states = [entries.pop(key) for _, key in numbered]
    return meta | entries | weights | ({"optimizer_states": states} if states else {})


class _Stored(NamedTuple):
    """A tensor in the folder, in boxes."""

    shape: torch.Size
    dtype: torch.dtype
    boxes: list[tuple[Box, Any]]  # with DCP's note of where each is


class Folder:
    """A folder that DCP has written: a source of lazy tensors.

    Raises:
        CheckpointError: it is no checkpoint, or was never completed.
    """

    live = False

    def __init__(self, path: Location) -> None:
        self.path = path
        if not (path / METADATA).is_file():
            raise CheckpointError(f"{path} is no checkpoint: a folder by torch.distributed.checkpoint has {METADATA}")
        with (path / METADATA).open("rb") as file:
            try:
                self._metadata = _MetadataUnpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise CheckpointError(f"{path / METADATA} is damaged ({type(error).__name__}: {error})") from error
        if not self.meta.is_file():
            raise CheckpointError(f"{path} was never completed: it has no {META}. Use another checkpoint")
        self._stored: list[_Stored] = []
        self._layouts: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}  # by where a box is
        self._open = functools.partial(_open_remote, path) if isinstance(path, RemotePath) else _OpenFolder(path)
        self._files: dict[str, Readable] = {}
        self._forms: dict[bytes, tuple[int, tuple[int, ...]]] = {}  # within an archive, by its bytes before the values

    @property
    def key(self) -> Location:
        return self.path

    @functools.cached_property
    def meta(self) -> Location:
        """Where everything is that is no tensor: in the folder, or with the other files of its save."""
        own = self.path / (self.save_id or "") / META
        return own if own.is_file() else self.path / META

    @property
    def save_id(self) -> str | None:
        """The same on all ranks in one save; ``None`` where another program wrote it."""
        return self._metadata.storage_meta.save_id if self._metadata.storage_meta is not None else None

    def missing_files(self) -> set[str]:
        """Names of files that are not there.

        Raises:
            CheckpointError: one is shorter than it should be.
        """
        ends: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        missing = set()
        for name, end in ends.items():
            if (size := nbytes_of(self.path / name)) is None:
                missing.add(name)
            elif size < end:
                raise CheckpointError(f"{self.path / name} is truncated: it has {size} of {end} bytes")
        return missing

    def damaged(self, world: Group) -> list[str]:
        """Names of entries whose checksums do not match, among this rank's share of those that are there."""
        stored = self._metadata.storage_data.items()
        once = {(info.relative_path, info.offset): (index, info) for index, info in stored}
        ordered = sorted(once.values(), key=lambda entry: -entry[1].length)
        # Back and forth, so that all ranks read about as much.
        order = [*range(world.size), *reversed(range(world.size))]
        return [
            index.fqn
            for number, (index, info) in enumerate(ordered)
            if order[number % len(order)] == world.rank
            and nbytes_of(self.path / info.relative_path) is not None
            and not self._is_intact(info)
        ]

    def _is_intact(self, info: Any) -> bool:
        file = self._file(info)
        try:
            return all(
                not record.crc or record.crc == checksum_of(file, info.offset + record.start, info.offset + record.stop)
                for record in archive.read_records(self._view(info))
            )
        except (zipfile.BadZipFile, EOFError, OSError):
            return False

    def entries(self, read: Callable[[IO[bytes]], Any]) -> dict[str, Any]:
        """The tree that was written; its tensors are lazy, but for scalars.

        Args:
            read: unpickles what :func:`torch.save` has written of anything but a tensor.
        """
        tree: dict[str, Any] = {}
        tensors: dict[Any, Tensor] = {}  # by where they are: tied ones are one again
        paths = self._metadata.planner_data or {name: (name,) for name in self._metadata.state_dict_metadata}
        for name, path in paths.items():
            form = self._metadata.state_dict_metadata[name]
            if isinstance(form, BytesStorageMetadata):
                info = self._metadata.storage_data[MetadataIndex(name)]
                with self._view(info) as file:
                    value = read(file)
            else:
                value = self._tensor(name, form, tensors)
            _put(tree, path, value)
        return tree

    def _tensor(self, name: str, form: TensorStorageMetadata, tensors: dict[Any, Tensor]) -> Tensor:
        infos = [self._metadata.storage_data[MetadataIndex(name, chunk.offsets)] for chunk in form.chunks]
        place = tuple((info.relative_path, info.offset) for info in infos)
        if place not in tensors:
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in form.chunks]
            self._stored.append(_Stored(form.size, form.properties.dtype, list(zip(boxes, infos, strict=True))))
            number = len(self._stored) - 1
            like = torch.empty(form.size, dtype=form.properties.dtype, device="meta")
            tensors[place] = StoredTensor(self, number, like) if form.size else self.fetch(number)
        return tensors[place]

    def fetch(self, param: int) -> Tensor:
        stored = self._stored[param]
        full = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_slice(param, MemoryFormat.of(full), 0, full.view(-1))
        return full

    def read_slice(self, param: int, form: MemoryFormat, start: int, into: Tensor) -> None:
        """See :class:`~lightning_zero.checkpoint.lazy.StoredSource`."""
        stored = self._stored[param]
        # Straight into memory of the host that takes the bytes as they are.
        straight = into.device.type == "cpu" and into.dtype == stored.dtype and into.is_contiguous()
        values, position = into if straight else torch.empty(into.numel(), dtype=stored.dtype), 0
        for box in boxes_of_slice(form, start, start + into.numel()):
            wanted = view_as_box(values[position : position + box.numel], box, form)
            position += box.numel
            for other, info in stored.boxes:
                if both := box.intersection(other):
                    self._read(info, both.within(other), both.within(box).of(wanted))
        if values is not into:
            into.copy_(values)

    def _read(self, info: Any, box: Box, into: Tensor) -> None:
        """Copy a box inside one that is stored; ``into`` has its sizes and the stored dtype."""
        start, strides = self._layout(info)
        first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
        span = 1 + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
        in_order = torch.empty_strided(box.sizes, strides, device="meta").is_contiguous() and into.is_contiguous()
        values = into.view(-1) if in_order else torch.empty(span, dtype=into.dtype)
        read_at(self._file(info), bytes_of(values), start + first * into.itemsize)
        if not in_order:
            into.copy_(values.as_strided(box.sizes, strides))

    def _layout(self, info: Any) -> tuple[int, tuple[int, ...]]:
        """Where in its file the values of a stored box begin, and their strides."""
        place = info.relative_path, info.offset
        if place not in self._layouts:
            begins = bytearray(min(max(map(len, self._forms), default=0), info.length))
            read_at(self._file(info), memoryview(begins), info.offset)
            form = next((form for before, form in self._forms.items() if begins.startswith(before)), None)
            before, strides = self._read_layout(info) if form is None else form
            self._layouts[place] = info.offset + before, strides
        return self._layouts[place]

    def _read_layout(self, info: Any) -> tuple[int, tuple[int, ...]]:
        """Where in the archive of a box its values begin, and their strides."""
        with self._view(info) as file:
            records = {record.name: record for record in archive.read_records(file)}
            file.seek(0)
            tensor = torch.load(file, map_location="meta", weights_only=True)
            start, pickled = records["data/0"].start, records["data.pkl"]
            layout = start + tensor.storage_offset() * tensor.element_size(), tensor.stride()
            if pickled.stop < start:  # archives that begin like this one have their values at the same place
                file.seek(0)
                self._forms[file.read(start)] = layout
        return layout

    def _view(self, info: Any) -> IO[bytes]:
        """One of the archives in a file, as a file."""
        return cast("IO[bytes]", io.BufferedReader(_ArchiveFile(self._file(info), info.offset, info.length)))

    def _file(self, info: Any) -> Readable:
        name = info.relative_path
        if name not in self._files:
            try:
                self._files[name] = self._open(name)
            except FileNotFoundError as error:
                raise CheckpointError(f"{self.path / name} is not there. {_APART}") from error
        return self._files[name]


class _OpenFolder:
    """Opens files of a folder of this machine, which stays the folder it is when another takes its name.

    User code may keep a tensor, and another checkpoint then take the name.
    """

    def __init__(self, path: Path) -> None:
        self._folder = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._folder)

    def __call__(self, name: str) -> Readable:
        return OpenFile(name, self._folder)


def _open_remote(folder: RemotePath, name: str) -> Readable:
    return RemoteFile(folder / name)


class _ArchiveFile(io.RawIOBase):
    """One of the archives in a file, as a file of its own."""

    def __init__(self, file: Readable, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        room = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        read = self._file.read_into(room, self._offset + self._position) if room else 0
        self._position += read
        return read


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _METADATA_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of DCP's format")
        return super().find_class(module, name)


def _put(tree: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Put ``value`` where ``path`` leads to in nested dictionaries and, for numbers, lists."""
    here: Any = tree
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(here, list) and isinstance(key, int):
            here += [None] * (key + 1 - len(here))
            inner = here[key]
        else:
            inner = here.get(key)
        if following is None:
            inner = value
        elif inner is None:
            inner = [] if isinstance(following, int) else {}
        here[key] = inner
        here = inner
