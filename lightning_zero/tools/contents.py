"""Reads the contents of a checkpoint on any machine, without a GPU, the module or the classes of its objects.

The checkpoint may come from this package or from Lightning with another strategy, and be a file or a folder.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, Self

import torch
from torch import Tensor

from lightning_zero.checkpoint.archive import leaves
from lightning_zero.checkpoint.commit import is_sharded, recover
from lightning_zero.checkpoint.errors import CheckpointError, shortened
from lightning_zero.checkpoint.folder_reader import APART, Folder, as_one
from lightning_zero.checkpoint.lazy import StoredTensor
from lightning_zero.checkpoint.remote import Location
from lightning_zero.update import state_as_kept

# Errors that `torch.load` raises for a file that is truncated, changed, or was written by another program.
UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    UnpicklingError,
    ValueError,
    struct.error,
)
_PICKLED = (
    "To read it nevertheless, and only if you trust its author: load it with torch.load(path, weights_only=False), "
    "replace these objects by plain numbers, strings, lists and dicts, and torch.save it."
)


class Opaque:
    """A placeholder for an object of a class not known to be safe; no code of the class is imported or called."""

    name = ""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the `state_dict`.

    Attributes:
        name: name of the parameter or buffer.
        shape: its sizes.
        dtype: torch's name of the dtype, such as "float32".
        bytes: size of its elements.
        same_as: for tied weights, the earlier name of the same tensor; otherwise None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    same_as: str | None


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A parameter group: its parameters, by name or by torch's index, and plain hyperparameters."""

    parameters: list[str | int]
    hyperparameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StateInfo:
    """The state that an optimizer keeps under one name, such as "exp_avg".

    Attributes:
        name: name of the state.
        parameters: number of parameters that have it.
        dtypes: dtypes of its tensors; "number" for values that are no tensors.
        bytes: size of all its tensors.
    """

    name: str
    parameters: int
    dtypes: list[str]
    bytes: int


@dataclass(frozen=True, slots=True)
class OptimizerInfo:
    """The parameter groups and the state of an optimizer."""

    groups: list[ParameterGroup]
    state: list[StateInfo]


@dataclass(frozen=True, slots=True)
class Contents:
    """A summary of a checkpoint.

    Attributes:
        file: path of the checkpoint.
        file_bytes: size of the file, or of all files in the folder.
        global_step, epoch: Lightning's counters; None if there are none.
        lightning_version: version of Lightning that wrote it.
        written_by: version and world size of this package's run; None for other writers.
        loss_scale: scale of the fp16 loss scaler; None without one.
        skipped_steps: number of optimizer steps without an update so far; None if it was not counted.
        tensors: the tensors of the `state_dict`.
        weights_bytes: size of these tensors; tied weights count once.
        other_entries: names in the `state_dict` that are no tensors, such as extra state.
        optimizers: one entry for each optimizer.
        optimizer_bytes: size of the optimizers' state.
        callbacks: names of the callbacks with state.
        keys: all keys of the checkpoint.
        opaque: classes and functions of objects that were not read.
    """

    file: str
    file_bytes: int
    global_step: int | None
    epoch: int | None
    lightning_version: str | None
    written_by: dict[str, Any] | None
    loss_scale: float | None
    skipped_steps: int | None
    tensors: list[TensorInfo]
    weights_bytes: int
    other_entries: list[str]
    optimizers: list[OptimizerInfo]
    optimizer_bytes: int
    callbacks: list[str]
    keys: list[str]
    opaque: list[str]


def read_checkpoint(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read a checkpoint; its tensors are mapped or lazy, and take memory only when they are used.

    No pickled code runs: objects that `torch.load(weights_only=True)` would refuse become :class:`Opaque`.

    Returns:
        The checkpoint, and the names of the classes and functions that were replaced by :class:`Opaque`.

    Raises:
        CheckpointError: it is not a Lightning checkpoint, is damaged, or cannot be read safely.
        OSError: it cannot be opened.
    """
    recover(path)
    if path.is_dir():
        folder = open_folder(path)
        assert isinstance(folder.meta, Path)  # as `path` is
        _check_archive(folder.meta)
        meta, opaque = _read_file(folder.meta)

        def read(file: IO[bytes]) -> Any:
            value, more = _read_safely(file)
            opaque.extend(more)
            return value

        with explained(path):
            checkpoint = as_one(folder.entries(read), meta)
    else:
        check_file(path)
        checkpoint, opaque = _read_file(path)
    if isinstance(checkpoint, dict) and "state_dict" not in checkpoint and isinstance(checkpoint.get("model"), Mapping):
        checkpoint["state_dict"] = checkpoint.pop("model")  # as users of Fabric call it
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), Mapping):
        found = ", ".join(map(str, checkpoint)) if isinstance(checkpoint, dict) else type(checkpoint).__name__
        raise CheckpointError(
            f"{path} is not a Lightning checkpoint: it has no 'state_dict', but {found[:200] or 'nothing'}. Bare "
            "weights can be wrapped: torch.save({'state_dict': weights}, path)."
        )
    return checkpoint, sorted(set(opaque))


def open_folder(path: Path) -> Folder:
    """Open a checkpoint that is a folder.

    Raises:
        CheckpointError: it is no checkpoint, or damaged, or files of it are missing.
    """
    folder = Folder(path)
    if missing := sorted(folder.missing_files()):
        raise CheckpointError(f"{path} is incomplete, without {shortened(missing)}. {APART}.")
    return folder


def check_file(path: Path) -> None:
    """Check that a file is a whole archive of :func:`torch.save`, and no part of a folder.

    Raises:
        CheckpointError: it is not.
        OSError: it cannot be opened.
    """
    if path.is_file() and is_sharded(path.parent):
        raise CheckpointError(f"{path} is a part of the checkpoint {path.parent}; give the path of this folder.")
    _check_archive(path)


def _check_archive(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            raise CheckpointError(
                f"{path} is not a checkpoint: torch.save writes zip archives. A file in the format of torch before 1.6 "
                "must be loaded and saved again."
            )
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is damaged: the end of the archive is missing, as after an interrupted copy or save. "
            "Copy it again, or use another checkpoint."
        )


def _read_file(path: Path) -> tuple[Any, list[str]]:
    with explained(path):
        return _read_safely(os.fspath(path), mmap=True)


def _read_safely(file: str | IO[bytes], mmap: bool = False) -> tuple[Any, list[str]]:
    """Load a file of :func:`torch.save`; also returns the names of what was replaced by :class:`Opaque`."""
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if not isinstance(file, str):
        file.seek(0)
    stand_ins: list[Any] = [(type("Opaque", (Opaque,), {"name": name}), name) for name in refused]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=True), refused


@contextmanager
def explained(path: Location) -> Iterator[None]:
    """A context that turns torch's errors into a :class:`CheckpointError` that says what is wrong."""
    try:
        yield
    except CheckpointError:
        raise
    except UnpicklingError as error:
        _, _, reason = str(error).rpartition("WeightsUnpickler error: ")  # the rest is advice for programmers
        reason = reason.strip().partition("\n")[0]
        raise CheckpointError(f"{path} holds objects that cannot be read safely: {reason}. {_PICKLED}") from error
    except UNREADABLE as error:
        if "unable to mmap" in str(error):
            raise CheckpointError(
                f"The system refuses to map {path} into memory. If the file is larger than memory and swap, set "
                "`sysctl vm.overcommit_memory=1` or use another machine; a higher `ulimit -v` may help, too."
            ) from error
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}: {str(error).partition(chr(10))[0]}). "
            "If it is one, it is damaged: copy it again, or use another checkpoint."
        ) from error


def tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Maps each further name of a tied tensor to its first name in ``state``."""
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.layout == torch.strided and value.numel():
            stored = isinstance(value, StoredTensor)  # a tied lazy tensor is one object
            place = id(value) if stored else (value.data_ptr(), value.dtype, value.shape, value.stride())
            kept = first.setdefault(place, name)
            if kept != name:
                tied[name] = kept
    return tied


def describe(path: Path) -> Contents:
    """Summarize a checkpoint; the only tensors that are read are hyperparameters of one element.

    Raises:
        CheckpointError, OSError: see :func:`read_checkpoint`.
    """
    checkpoint, opaque = read_checkpoint(path)
    state = checkpoint["state_dict"]
    tied = tied_names(state)
    tensors = [
        TensorInfo(name, tuple(value.shape), dtype_name(value.dtype), _bytes(value), tied.get(name))
        for name, value in state.items()
        if isinstance(value, Tensor)
    ]
    try:
        optimizers = [_describe_optimizer(saved) for saved in optimizer_states(checkpoint)]
    except (AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: 'optimizer_states' is not in torch's format ({error!r}).") from error
    precision = _mapping(checkpoint.get("ZeroPrecision"))
    written_by = _mapping(checkpoint.get("lightning_zero"))
    # The Trainer's by this package and by Lightning, and Fabric's.
    scalers = precision.get("scaler"), checkpoint.get("MixedPrecision"), written_by.get("loss_scaler")
    scaler = next((mapping for mapping in map(_mapping, scalers) if mapping), {})
    files = path.rglob("*") if path.is_dir() else [path]
    return Contents(
        file=str(path),
        file_bytes=sum(file.stat().st_size for file in files if file.is_file()),
        global_step=plain(checkpoint.get("global_step")),
        epoch=plain(checkpoint.get("epoch")),
        lightning_version=plain(checkpoint.get("pytorch-lightning_version")),
        written_by=plain(checkpoint.get("lightning_zero")),
        loss_scale=plain(scaler.get("scale")),
        skipped_steps=plain(precision.get("skipped_steps")),
        tensors=tensors,
        weights_bytes=sum(tensor.bytes for tensor in tensors if tensor.same_as is None),
        other_entries=[name for name, value in state.items() if not isinstance(value, Tensor)],
        optimizers=optimizers,
        optimizer_bytes=sum(entry.bytes for optimizer in optimizers for entry in optimizer.state),
        callbacks=[str(name) for name in _mapping(checkpoint.get("callbacks"))],
        keys=[str(key) for key in checkpoint],
        opaque=opaque,
    )


def optimizer_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    """The states of the optimizers, which users of Fabric may save under any name, with and without a list."""
    return [
        each
        for name, value in checkpoint.items()
        for each in (value if isinstance(value, list | tuple) else [value])
        if name == "optimizer_states" or (isinstance(each, Mapping) and {"state", "param_groups"} <= each.keys())
    ]


def _describe_optimizer(saved: Mapping[str, Any]) -> OptimizerInfo:
    groups = [
        ParameterGroup(
            list(group.get("param_names", group["params"])),
            {k: plain(v) for k, v in group.items() if k not in ("params", "param_names")},
        )
        for group in saved["param_groups"]
    ]
    found: dict[str, list[Any]] = {}
    for entries in saved["state"].values():
        for name, value in state_as_kept(entries).items():
            found.setdefault(str(name), []).append(value)
    state = []
    for name, values in found.items():
        found_in = [leaf for value in values for _, leaf in leaves(value)]  # state may be lists and dicts of tensors
        dtypes = {dtype_name(leaf.dtype) if isinstance(leaf, Tensor) else "number" for leaf in found_in}
        size = sum(_bytes(leaf) for leaf in found_in if isinstance(leaf, Tensor))
        state.append(StateInfo(name, len(values), sorted(dtypes), size))
    return OptimizerInfo(groups, state)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # `nbytes` raises for sparse tensors


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without the module: "float32"."""
    return str(dtype).removeprefix("torch.")


def cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the values of the tensor ``name`` to another dtype.

    Raises:
        CheckpointError: a finite number is out of range of the dtype.
    """
    converted = values.to(dtype)
    if converted is not values and bool(values[converted.isinf()].isfinite().any()):
        raise CheckpointError(f"{name!r} has numbers that are infinite in {dtype_name(dtype)}; choose another dtype.")
    return converted


def plain(value: Any) -> Any:
    """Convert a value to JSON's types: a tensor of one element becomes a number, an unknown object its `repr`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, Tensor):
        return plain(value.item()) if value.numel() == 1 else f"<tensor of shape {tuple(value.shape)}>"
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return repr(value)
