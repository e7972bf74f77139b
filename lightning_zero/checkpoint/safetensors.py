"""Files in the safetensors format (https://huggingface.co/docs/safetensors). Each rank reads only the slices it owns.

A file consists of the length of the header in eight bytes, the header, which is JSON with an entry for each tensor's
name, and the values. All numbers are little-endian.
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
    """The tensors of a file. Only the header is read at once; values are read when they are needed.

    Attributes:
        digest: a checksum of the header and the size of the file in bytes, to tell files apart.

    Args:
        path: the file.
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
        """A tensor of the file, on the CPU and in the file's shape and dtype; ``None`` if its dtype is not supported.

        Raises:
            KeyError: the file has no tensor with this name.
        """
        entry = self._entries[name]
        if entry["dtype"] not in _DTYPES:
            return None
        dtype, (first, _) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        shape, on_host = torch.Size(entry["shape"]), torch.device("cpu")
        return _tensor(_Values(self._file, self._start + first, shape, dtype, dtype, on_host))


@dataclass(frozen=True)
class _Values:
    """The values of one tensor; a :class:`~lightning_zero.checkpoint.lazy.StoredSource`.

    Attributes:
        file: the file that has the values.
        offset: position of the first value in the file, in bytes.
        shape: shape of the tensor. The values are in row-major order.
        dtype: dtype of the values in the file.
        cast: the dtype to which values are cast.
        device: the device to which :meth:`fetch` moves the tensor.
    """

    file: Readable
    offset: int
    shape: torch.Size
    dtype: torch.dtype
    cast: torch.dtype
    device: torch.device
    live = False

    @property
    def key(self) -> Hashable:
        return self

    def fetch(self, param: int) -> Tensor:
        full = torch.empty(self.shape, dtype=self.cast, device="cpu")  # user code may have set another default device
        self.read_slice(param, MemoryFormat.of(full), 0, full.view(-1))
        return full.to(self.device)

    def read_slice(self, param: int, form: MemoryFormat, start: int, into: Tensor) -> None:
        if form.order != tuple(range(len(self.shape))):  # the file has another order
            into.copy_(form.flatten(self.fetch(param))[start : start + into.numel()])
            return
        straight = into.device.type == "cpu" and into.is_contiguous() and into.dtype == self.dtype == self.cast
        values = into if straight else torch.empty(into.numel(), dtype=self.dtype, device="cpu")
        if values.numel():
            read_at(self.file, bytes_of(values), self.offset + start * self.dtype.itemsize)
        if values is not into:
            into.copy_(values.to(self.cast))


class _SafetensorsTensor(StoredTensor):
    """A tensor of a file. ``to`` casts it and changes its device without reading its values."""

    source: _Values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and isinstance(args[0], cls) and args[0].fetched is None:
            source = args[0].source
            if (wanted := _moved(source, args[1:], kwargs or {})) is not None:
                return args[0] if wanted == source else _tensor(wanted)
        return super().__torch_function__(func, types, args, kwargs)


def _moved(values: _Values, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Values | None:
    """The values after a call of ``Tensor.to`` with these arguments; ``None`` if the call needs the values now."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if kwargs.keys() - {"device", "dtype", "non_blocking"}:
        return None
    for given in args:
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, torch.device | str) or type(given) is int:
            device = given
        else:
            return None
    if device is not None:
        device = torch.empty(
            0, dtype=torch.uint8, device=device
        ).device  # with its index, as in the attribute of tensors
        if device.type == "meta":
            return None
    return replace(values, cast=dtype or values.cast, device=device or values.device)


def _tensor(values: _Values) -> _SafetensorsTensor:
    like = torch.empty(values.shape, dtype=values.cast, device="meta")
    return _SafetensorsTensor(values, 0, like, values.device)
