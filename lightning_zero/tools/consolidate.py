"""Consolidates a checkpoint into one ordinary file, on any machine, with memory for one tile of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint import CheckpointError, load
from lightning_zero.checkpoint.commit import recover
from lightning_zero.checkpoint.decoding import decoded_lazily
from lightning_zero.checkpoint.file import write_alone
from lightning_zero.checkpoint.lazy import StoredSource, StoredTensor
from lightning_zero.sharding import Group
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.tools.contents import cast, check_file, explained, open_folder, optimizer_states, tied_names
from lightning_zero.update import holds_compact


@dataclass(frozen=True, slots=True)
class Consolidated:
    """The result of a consolidation.

    Attributes:
        tensors: number of entries in the `state_dict`, or in `model` if there is none.
        optimizers: number of optimizers with state.
        bytes: size of the file.
    """

    tensors: int
    optimizers: int
    bytes: int


def consolidate(source: Path, path: Path, *, dtype: torch.dtype | None = None, overwrite: bool = False) -> Consolidated:
    """Write a checkpoint as one file that any strategy and torch's optimizers load.

    Args:
        source: the folder of a checkpoint in the format of ``torch.distributed.checkpoint``, from this package or FSDP;
            or a file with 8-bit optimizer state in compact form.
        path: path of the new file; it appears when it is complete.
        dtype: dtype of floating-point weights; ``None``: unchanged. Optimizer state keeps its dtype, except 8-bit state
            in compact form, which is converted to fp32 without loss.
        overwrite: replace an existing file.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or contains pickled objects; or it is a file without
            compact state; or the new file exists; or a weight would be infinite in ``dtype``.
        OSError: files cannot be read or written.
    """
    if path.exists() and not overwrite:
        raise CheckpointError(f"{path} already exists; name another file, or replace it by --overwrite.")
    recover(source)
    with explained(source):
        checkpoint = decoded_lazily((_load_folder if source.is_dir() else _load_file)(source))
    named = checkpoint.get("state_dict", checkpoint.get("model"))  # users of Fabric call it so; it may be a list
    weights: dict[str, Any] = named if isinstance(named, dict) else {}
    if dtype is not None:
        tied = tied_names(weights)  # they stay tied
        for name, value in weights.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
                weights[name] = weights[tied[name]] if name in tied else _convert(name, value, dtype)
    write_alone(checkpoint, path)
    return Consolidated(len(weights), len(optimizer_states(checkpoint)), path.stat().st_size)


def _load_folder(path: Path) -> Any:
    with explained(open_folder(path).meta):  # the file whose objects may be refused
        return load(path, Group())


def _load_file(path: Path) -> Any:
    check_file(path)
    if not holds_compact(load(path, Group(), checksums=False)):
        raise CheckpointError(
            f"{path} is no folder, and has no 8-bit state in compact form; it needs no consolidation."
        )
    return load(path, Group())


def _convert(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.layout != torch.strided:
        return cast(name, value, dtype)
    form = MemoryFormat(value.shape, value.stride()) if isinstance(value, StoredTensor) else MemoryFormat.of(value)
    like = torch.empty_strided(form.shape, form.strides, dtype=dtype, device="meta")
    source, param = (value.source, value.param) if isinstance(value, StoredTensor) else (_Mapped(value), 0)
    assert isinstance(source, StoredSource)
    return StoredTensor(_Cast(source, name, value.dtype, dtype), param, like)


@dataclass(frozen=True, eq=False)
class _Mapped:
    """A source of one lazy tensor, whose values lie in a file that is mapped."""

    values: Tensor
    live = True

    @property
    def key(self) -> Any:
        return self

    def fetch(self, param: int) -> Tensor:
        return self.values

    def read_slice(self, param: int, form: MemoryFormat, start: int, into: Tensor) -> None:
        form.read(self.values, start, into)


@dataclass(frozen=True, slots=True)
class _Cast:
    """A source of lazy tensors that converts the values of another source to another dtype."""

    source: StoredSource
    name: str
    stored: torch.dtype
    dtype: torch.dtype
    live = False

    @property
    def key(self) -> Any:
        return self.source.key, self.dtype

    def fetch(self, param: int) -> Tensor:
        return cast(self.name, self.source.fetch(param), self.dtype)

    def read_slice(self, param: int, form: MemoryFormat, start: int, into: Tensor) -> None:
        values = torch.empty(into.numel(), dtype=self.stored, device="cpu")
        self.source.read_slice(param, form, start, values)
        into.copy_(cast(self.name, values, self.dtype))
