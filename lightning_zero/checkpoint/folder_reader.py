"""Reads a folder in the format of ``torch.distributed.checkpoint`` (DCP); each rank reads only the slices that it owns.

The folder may come from this package or from Lightning's FSDP strategy.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import re
import weakref
import zipfile
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata
from typing_extensions import Buffer

from lightning_zero.checkpoint import archive, archive_reader
from lightning_zero.checkpoint.boxes import Box, boxes_of_slice, view_as_box
from lightning_zero.checkpoint.commit import INCOMPLETE, META, METADATA
from lightning_zero.checkpoint.copies import Copies, find_copies
from lightning_zero.checkpoint.errors import CheckpointError, damaged, shortened, together
from lightning_zero.checkpoint.lazy import StoredTensor, loaded_from
from lightning_zero.checkpoint.remote import Location, RemoteFile, RemotePath, nbytes_of
from lightning_zero.checkpoint.tiles import OpenFile, Readable, bytes_of, checksum_of, read_at
from lightning_zero.sharding import Group
from lightning_zero.sharding.memory_format import MemoryFormat

# An entry of every checkpoint that the Trainer can load. In folders of these, as FSDP writes them, the weights are
# "model" and the states of the optimizers "optimizer_0" ...; Fabric's folders have the names that the user gave.
OF_TRAINER = "pytorch-lightning_version"
OPTIMIZER = re.compile(r"optimizer_(\d+)")
# The names that may occur in the pickle `.metadata`; others are neither imported nor called.
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
APART = (  # what to do where files are missing
    "If each node has written a folder of its own, copy the files of all these folders into each, or into one; files "
    "of another save do not count"
)


def load(path: Location, world: Group, weights_only: bool = True, checksums: bool = True) -> dict[str, Any]:
    """Read the folder ``path``; see :func:`lightning_zero.checkpoint.load`. Collective.

    Returns:
        The checkpoint in the same form as from one file; its tensors are lazy.
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
    """Verify all checksums in a folder; each rank reads a part. Collective.

    Raises:
        CheckpointError: a checksum does not match, or a file is missing; raised on all ranks.
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
        raise CheckpointError(
            f"could not {what}: ranks see folders of several saves; copy the files of one save to every node, or use "
            "an earlier checkpoint"
        )
    if lost := sorted(set.intersection(*missing)):
        raise CheckpointError(f"could not {what}: {len(lost)} of its files are missing: {shortened(lost)}. {APART}")
    return folders[0]


def _verify(folder: Folder, world: Group) -> None:
    copies = find_copies(folder.path / METADATA, world)
    found = together(world, lambda: folder.damaged(copies), f"verify {folder.path}")
    for number, ranks in enumerate(copies.ranks):
        if names := sorted({name for rank in ranks for name in found[rank]}):
            raise damaged(folder.path, names, copies.place(number))


def as_one(entries: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    """Combine the result of :meth:`Folder.entries` and the contents of ``meta.pt`` to the form of one file."""
    if OF_TRAINER not in meta:
        return meta | entries
    weights = {"state_dict": entries.pop("model")} if "model" in entries else {}
    numbered = sorted((int(match[1]), key) for key in entries if (match := OPTIMIZER.fullmatch(key)))
    states = [entries.pop(key) for _, key in numbered]
    return meta | entries | weights | ({"optimizer_states": states} if states else {})


class _Stored(NamedTuple):
    """A tensor in the folder, which consists of boxes."""

    shape: torch.Size
    dtype: torch.dtype
    boxes: list[tuple[Box, Any]]  # each with DCP's storage info: file, offset and length


class Folder:
    """A folder in DCP's format; it is a source of lazy tensors.

    Raises:
        CheckpointError: the folder is no checkpoint, or is damaged, or was never completed.
    """

    live = False

    def __init__(self, path: Location) -> None:
        self.path = path
        if not (path / METADATA).is_file():
            raise CheckpointError(
                f"{path} is no checkpoint: a folder by torch.distributed.checkpoint has {METADATA}{_instead(path)}"
            )
        with (path / METADATA).open("rb") as file:
            try:
                self._header = _MetadataUnpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{path / METADATA} is damaged ({type(error).__name__}: {error}). Use an earlier checkpoint"
                ) from error
        if not self.meta.is_file():
            raise CheckpointError(
                f"{path} has no {META}, which is written last: it was never completed, or not copied as a whole, or is "
                "no folder of Lightning. Copy all of it again, or use another checkpoint"
            )
        self._stored: list[_Stored] = []
        self._layouts: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}  # by file and offset of a box
        self._open = functools.partial(_open_remote, path) if isinstance(path, RemotePath) else _OpenFolder(path)
        self._files: dict[str, Readable] = {}
        self._forms: dict[bytes, tuple[int, tuple[int, ...]]] = {}  # by the bytes of an archive before the values
        if isinstance(path, Path):
            _LOCAL.add(self)

    @property
    def key(self) -> Hashable:
        return self  # not the path: a save may replace the folder

    @functools.cached_property
    def meta(self) -> Location:
        """Path of ``meta.pt``, which has everything but tensors: in the inner folder of the save, or in the folder."""
        own = self.path / (self.save_id or "") / META
        return own if own.is_file() else self.path / META

    @property
    def save_id(self) -> str | None:
        """Identifies the save that wrote the folder; ``None`` if another program wrote it."""
        return self._header.storage_meta.save_id if self._header.storage_meta is not None else None

    def missing_files(self) -> set[str]:
        """Names of files of the checkpoint that do not exist.

        Raises:
            CheckpointError: a file is truncated.
        """
        ends: dict[str, int] = {}
        for info in self._header.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        missing = set()
        for name, end in ends.items():
            if (size := nbytes_of(self.path / name)) is None:
                missing.add(name)
            elif size < end:
                raise CheckpointError(
                    f"{self.path / name} is truncated: it has {size} of {end} bytes. Copy it again, or use an earlier "
                    "checkpoint"
                )
        return missing

    def open_files(self) -> None:
        """Open all files that exist; they can then be read after they were removed."""
        for info in {info.relative_path: info for info in self._header.storage_data.values()}.values():
            with contextlib.suppress(CheckpointError, OSError):  # who reads it gets this error
                self._file(info)

    def damaged(self, copies: Copies) -> list[str]:
        """Names of entries whose checksums do not match, among this rank's part of the entries in existing files.

        Args:
            copies: the copies of the folder that ranks see.
        """
        stored = self._header.storage_data.items()
        once = {(info.relative_path, info.offset): (index, info) for index, info in stored}
        ordered = sorted(once.values(), key=lambda entry: -entry[1].length)
        # Entries in descending size go to the ranks in order and back, so that all ranks read about the same amount.
        order = [*range(copies.size), *reversed(range(copies.size))]
        return [
            index.fqn
            for number, (index, info) in enumerate(ordered)
            if order[number % len(order)] == copies.rank
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
        """Rebuild the tree that was written; its tensors are lazy, except scalars.

        Args:
            read: unpickles an entry that is no tensor, as written by :func:`torch.save`.
        """
        tree: dict[str, Any] = {}
        tensors: dict[Any, Tensor] = {}  # by position in the files, so that tied tensors become one again
        paths = self._header.planner_data or {name: (name,) for name in self._header.state_dict_metadata}
        for name, path in paths.items():
            form = self._header.state_dict_metadata[name]
            if isinstance(form, BytesStorageMetadata):
                info = self._header.storage_data[MetadataIndex(name)]
                with self._view(info) as file:
                    value = read(file)
            else:
                value = self._tensor(name, form, tensors)
            _put(tree, path, value)
        return tree

    def _tensor(self, name: str, form: TensorStorageMetadata, tensors: dict[Any, Tensor]) -> Tensor:
        infos = [self._header.storage_data[MetadataIndex(name, chunk.offsets)] for chunk in form.chunks]
        place = tuple((info.relative_path, info.offset) for info in infos)
        if place not in tensors:
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in form.chunks]
            self._stored.append(_Stored(form.size, form.properties.dtype, list(zip(boxes, infos, strict=True))))
            number = len(self._stored) - 1
            like = torch.empty(form.size, dtype=form.properties.dtype, device="meta")
            tensors[place] = self._lazy(number, like) if form.size else self.fetch(number)
        return tensors[place]

    def _lazy(self, number: int, like: Tensor) -> StoredTensor:
        tensor = StoredTensor(self, number, like)
        return loaded_from(str(self.path), tensor) if isinstance(self.path, RemotePath) else tensor

    def fetch(self, param: int) -> Tensor:
        stored = self._stored[param]
        full = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self.read_slice(param, MemoryFormat.of(full), 0, full.view(-1))
        return full

    def read_slice(self, param: int, form: MemoryFormat, start: int, into: Tensor) -> None:
        """See :class:`~lightning_zero.checkpoint.lazy.StoredSource`."""
        stored = self._stored[param]
        # Read directly into `into` if it can hold the bytes without conversion.
        straight = into.device.type == "cpu" and into.dtype == stored.dtype and into.is_contiguous()
        values, position = into if straight else torch.empty(into.numel(), dtype=stored.dtype, device="cpu"), 0
        for box in boxes_of_slice(form, start, start + into.numel()):
            wanted = view_as_box(values[position : position + box.numel], box, form)
            position += box.numel
            for other, info in stored.boxes:
                if both := box.intersection(other):
                    self._read(info, both.within(other), both.within(box).of(wanted))
        if values is not into:
            into.copy_(values)

    def _read(self, info: Any, box: Box, into: Tensor) -> None:
        """Read ``box``, a part of a stored box, into a tensor of its sizes and the stored dtype."""
        start, strides = self._layout(info)
        first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
        span = 1 + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
        in_order = torch.empty_strided(box.sizes, strides, device="meta").is_contiguous() and into.is_contiguous()
        values = into.view(-1) if in_order else torch.empty(span, dtype=into.dtype, device="cpu")
        read_at(self._file(info), bytes_of(values), start + first * into.itemsize)
        if not in_order:
            into.copy_(values.as_strided(box.sizes, strides))

    def _layout(self, info: Any) -> tuple[int, tuple[int, ...]]:
        """The first byte of a stored box's values in its file, and their strides."""
        place = info.relative_path, info.offset
        if place not in self._layouts:
            begins = bytearray(min(max(map(len, self._forms), default=0), info.length))
            read_at(self._file(info), memoryview(begins), info.offset)
            form = next((form for before, form in self._forms.items() if begins.startswith(before)), None)
            before, strides = self._read_layout(info) if form is None else form
            self._layouts[place] = info.offset + before, strides
        return self._layouts[place]

    def _read_layout(self, info: Any) -> tuple[int, tuple[int, ...]]:
        """The first byte of a stored box's values in its archive, and their strides."""
        with self._view(info) as file:
            records = {record.name: record for record in archive.read_records(file)}
            file.seek(0)
            tensor = torch.load(file, map_location="meta", weights_only=True)
            start, pickled = records["data/0"].start, records["data.pkl"]
            layout = start + tensor.storage_offset() * tensor.element_size(), tensor.stride()
            if pickled.stop < start:  # archives that begin with the same bytes have the same layout
                file.seek(0)
                self._forms[file.read(start)] = layout
        return layout

    def _view(self, info: Any) -> IO[bytes]:
        """A file object for one of the archives in a file."""
        return cast("IO[bytes]", io.BufferedReader(_ArchiveFile(self._file(info), info.offset, info.length)))

    def _file(self, info: Any) -> Readable:
        name = info.relative_path
        if name not in self._files:
            try:
                self._files[name] = self._open(name)
            except FileNotFoundError as error:
                raise CheckpointError(f"{self.path / name} is missing. {APART}") from error
        return self._files[name]


_LOCAL: weakref.WeakSet[Folder] = weakref.WeakSet()  # local folders; each lives as long as a tensor is read from it


def open_local_files() -> None:
    """Open the files of local folders that may still be read: a save may be about to replace one of these.

    User code may keep a lazy tensor of a checkpoint. Not all files are opened when a folder is loaded, since many ranks
    write many files, and a rank needs few of them.
    """
    for folder in [*_LOCAL]:
        folder.open_files()


def _instead(path: Location) -> str:
    """The rest of a sentence on a folder that has no ``.metadata``: what is in it, and what to do."""
    if path.name.endswith(INCOMPLETE):
        return "; it was never completed: load the last complete one beside it"
    children = (path.iterdir() if isinstance(path, Path) else path.children()) if path.is_dir() else ()
    names = sorted(child.name for child in children)
    if any(name.endswith(DEFAULT_SUFFIX) for name in names):
        return f". Its other files are there: copy {METADATA} as well, which a shell's * leaves out"
    if inner := [name for name in names if name.endswith(".ckpt") or (path / name / METADATA).is_file()]:
        return f". There are checkpoints in it: give the path of one, {shortened(inner)}"
    if "latest" in names or any(name.endswith("_states.pt") for name in names):
        return f". If DeepSpeed wrote it, `lightning-zero convert-deepspeed {path} OUT` makes a checkpoint of it"
    return ". Give the path of one"


class _OpenFolder:
    """Opens files of a local folder, also after another folder has taken its name."""

    def __init__(self, path: Path) -> None:
        self._folder = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._folder)

    def __call__(self, name: str) -> Readable:
        return OpenFile(name, self._folder)


def _open_remote(folder: RemotePath, name: str) -> Readable:
    return RemoteFile(folder / name)


class _ArchiveFile(io.RawIOBase):
    """A range of a file, which contains an archive, as a file object."""

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
    """Put ``value`` into nested dictionaries (for string keys) and lists (for integer keys) along ``path``."""
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
