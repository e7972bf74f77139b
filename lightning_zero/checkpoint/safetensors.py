"""Files of safetensors (https://huggingface.co/docs/safetensors), of which each rank reads the slices that it owns.

Eight bytes of the header's length, a JSON header by name of the tensor, and the values, all little-endian.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.lazy import StoredTensor
from lightning_zero.checkpoint.tiles import OpenFile, Readable, bytes_of, read_at
from lightning_zero.sharding.memory_format import MemoryFormat

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFile:
    """The tensors of a file, none of which is read before somebody needs it.

    Attributes:
        digest: the same for files with the same header and size.
    """

    def __init__(self, path: Path) -> None:
        self._file = OpenFile(path)
        size, length = path.stat().st_size, bytearray(8)
        read_at(self._file, memoryview(length), 0)
        header = bytearray(min(int.from_bytes(length, "little"), size))
        read_at(self._file, memoryview(header), len(length))
        self.digest = zlib.crc32(header), size
        self._start = len(length) + len(header)
        self._entries: dict[str, Any] = json.loads(header)

    def tensor(self, name: str) -> StoredTensor | None:
        """A tensor of the file on the CPU; ``None`` where torch has no such numbers."""
        entry = self._entries[name]
        if entry["dtype"] not in _DTYPES:
            return None
        dtype, (first, _) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        return _tensor(_Values(self._file, self._start + first, torch.Size(entry["shape"]), dtype, dtype))


@dataclass(frozen=True)
class _Values:
    """The values of one tensor; a :class:`~lightning_zero.checkpoint.lazy.StoredSource`.

    Attributes:
        file: has them.
        offset: in bytes, of the first value.
        shape: of the tensor, row by row.
        dtype: in the file.
        cast: to which values are cast.
    """

    file: Readable
    offset: int
    shape: torch.Size
    dtype: torch.dtype
    cast: torch.dtype
    live = False

    @property
    def key(self) -> Hashable:
        return self

    def fetch(self, param: int) -> Tensor:
        full = torch.empty(self.shape, dtype=self.cast)
        self.read_slice(param, MemoryFormat.of(full), 0, full.view(-1))
        return full

    def read_slice(self, param: int, form: MemoryFormat, start: int, into: Tensor) -> None:
        if form.order != tuple(range(len(self.shape))):  # another order than the file's
            into.copy_(form.flatten(self.fetch(param))[start : start + into.numel()])
            return
        straight = into.device.type == "cpu" and into.is_contiguous() and into.dtype == self.dtype == self.cast
        values = into if straight else torch.empty(into.numel(), dtype=self.dtype)
        if values.numel():
            read_at(self.file, bytes_of(values), self.offset + start * self.dtype.itemsize)
        if values is not into:
            into.copy_(values.to(self.cast))


class _SafetensorsTensor(StoredTensor):
    """A tensor that ``to`` casts without reading it."""

    source: _Values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and len(args) == 1 and kwargs.keys() <= {"device", "dtype"}:
            device, dtype = kwargs.get("device"), kwargs.get("dtype")
            tensor = args[0]
            if tensor.fetched is None and (device is None or torch.device(device).type == "cpu"):
                return tensor if dtype in (None, tensor.dtype) else _tensor(replace(tensor.source, cast=dtype))
        return super().__torch_function__(func, types, args, kwargs)


def _tensor(values: _Values) -> _SafetensorsTensor:
    return _SafetensorsTensor(values, 0, torch.empty(values.shape, dtype=values.cast, device="meta"))
