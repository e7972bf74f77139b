"""Records a training for :mod:`benchmarks.identity`: calls of process groups, values, and bytes of checkpoints."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickletools
import re
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 64  # alignment of records in torch's archives, in bytes
_SAVE_ID = re.compile(r"_[0-9a-f]{16}(?=\.distcp$)")  # in the names of files of a folder
LOCAL_HEADER = 30  # number of bytes before an entry's name in a zip archive

OPERATIONS = (
    "_allgather_base _reduce_scatter_base all_gather_single all_gather_single_coalesced all_to_all_single allgather "
    "allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall alltoall_base barrier "
    "broadcast gather monitored_barrier recv recv_anysource reduce reduce_scatter reduce_scatter_single "
    "reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter send"
).split()
OBJECTS = (
    "all_gather_object broadcast_object_list gather_object recv_object_list scatter_object_list send_object_list"
).split()


class Record:
    """Lines of text by part; values are represented by digests of their bytes."""

    def __init__(self) -> None:
        names = ("collectives", "messages", "norms", "losses", "weights", "states", "checkpoint")
        self.parts: dict[str, list[str]] = {name: [] for name in names}

    def add(self, part: str, *words: object) -> None:
        self.parts[part].append(" ".join(map(str, words)))

    def add_tree(self, part: str, name: str, value: Any) -> None:
        """Add a value, or one line for each value in a tree of dictionaries and lists."""
        if isinstance(value, Mapping):
            for key, inner in value.items():
                self.add_tree(part, f"{name}.{key}", inner)
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                self.add_tree(part, f"{name}.{number}", inner)
        elif isinstance(value, Tensor):
            self.add(part, name, value.dtype, tuple(value.shape), _of_tensor(value))
        else:
            self.add(part, name, repr(value))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _of_tensor(value: Tensor) -> str:
    copy = value.detach().clone(memory_format=torch.contiguous_format)  # memory that numpy has seen cannot be freed
    return sha256(copy.view(-1).view(torch.uint8).numpy().tobytes())


class Recorder:
    """Records all calls of process groups, by any code, inside the context ``active``.

    All functions of ``torch.distributed`` call methods of ``ProcessGroup``. Calls that send pickled objects are
    recorded without sizes, since these change with the names of classes and folders.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._inside = threading.local()
        self._groups: dict[str, dict[int, int]] = {}  # by thread: numbers of groups, in the order of first use
        self._kept: list[Any] = []  # keeps groups alive, so that their ids are not reused
        self._others: list[tuple[str, str]] = []  # the calls of threads other than the main one

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in OPERATIONS:
                if hasattr(dist.ProcessGroup, name):
                    stack.enter_context(_replaced(dist.ProcessGroup, name, self._operation))
            for name in OBJECTS:
                for module in (dist, dist.distributed_c10d):
                    stack.enter_context(_replaced(module, name, self._objects))
            yield
        # Sorted separately, since calls of background threads happen at varying times.
        for part, line in self._others:
            self._record.add(part, line)

    def _operation(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def operation(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not getattr(self._inside, "objects", False):
                given = [*args, *kwargs.values()]
                tensors = [f"{str(t.dtype).removeprefix('torch.')}[{t.numel()}]" for t in _tensors(given)]
                numbers = [value for value in given if isinstance(value, int)]
                self._add("collectives", group, name, *tensors, *numbers[:1])  # the peer
                if numbers[1:]:
                    self._add("messages", group, name, *numbers[1:])
            return own(group, *args, **kwargs)

        return operation

    def _objects(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def objects(*args: Any, **kwargs: Any) -> Any:
            outermost = not getattr(self._inside, "objects", False)
            if outermost:
                group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
                self._add("collectives", group or dist.group.WORLD, name)
            self._inside.objects = True
            try:
                return own(*args, **kwargs)
            finally:
                self._inside.objects = not outermost

        return objects

    def _add(self, part: str, group: Any, *words: object) -> None:
        main = threading.current_thread() is threading.main_thread()
        thread = "main" if main else "background"
        groups = self._groups.setdefault(thread, {})
        if id(group) not in groups:
            self._kept.append(group)
        number = groups.setdefault(id(group), len(groups))
        line = f"{thread} group {number} of {group.size()}: {' '.join(map(str, words))}"
        if main:
            self._record.add(part, line)
        else:
            self._others.append((part, line))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    before = vars(owner)[name]  # of a class of C++ `getattr` gives a function that would not be bound again
    setattr(owner, name, wrap(name, getattr(owner, name)))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def add_checkpoint(record: Record, name: str, path: Path) -> None:
    """Record all bytes of a file or folder, except the versions of packages and the time."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        inner = _SAVE_ID.sub("", f"{name}/{file.relative_to(path)}")
        if file.suffix in (".distcp", ".txt"):
            record.add("checkpoint", inner, sha256(file.read_bytes()))  # a row of archives, without the version
        elif zipfile.is_zipfile(file):
            _add_archive(record, inner, file)
        else:
            record.add("checkpoint", inner, of_pickle(file.read_bytes()))


def _add_archive(record: Record, name: str, file: Path) -> None:
    """Record every entry of the zip archive in order, with its position relative to torch's alignment.

    The following is left out: the name of the folder inside the archive, which is that of the temporary file; the
    identification that torch derives from all entries, including the version; and the checksum of the entry with the
    version.
    """
    content = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    for entry in entries:
        _, _, inner = entry.filename.partition("/")
        # Not by `archive.read`, which raises for an entry without a checksum.
        start = entry.header_offset + LOCAL_HEADER
        start += sum(struct.unpack_from("<HH", content, start - 4))
        data = content[start : start + entry.file_size]
        if inner == "data.pkl":
            record.add("checkpoint", name, inner, of_pickle(data))
        elif inner == ".data/serialization_id":
            record.add("checkpoint", name, inner)
        else:
            header = (start % ALIGNMENT, entry.CRC, entry.file_size, entry.compress_type, entry.flag_bits)
            record.add("checkpoint", name, inner, *header, sha256(data))


def of_pickle(data: bytes) -> str:
    """The operations of a pickle, without the version that wrote it and the random identification of the save."""
    operations, previous, ours = [], None, False
    for operation, value, _ in pickletools.genops(data):
        if isinstance(value, str):
            ours |= value == "lightning_zero"
            left_out = previous == "save_id" or (ours and previous == "version")
            ours &= not left_out
            previous, value = value, None if left_out else _SAVE_ID.sub("", value)
        operations.append(f"{operation.name} {value!r}")
    return sha256("\n".join(operations).encode())
