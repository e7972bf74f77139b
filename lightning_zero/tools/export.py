"""Exports the weights of a checkpoint as safetensors, the format that `transformers` and most other tools read.

A file consists of 8 bytes with the length of the header (little-endian), the header, and the elements of the tensors.
The header is JSON, `{"__metadata__": {"format": "pt"}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}`,
padded with spaces to a multiple of 8 bytes; offsets count from its end. See https://huggingface.co/docs/safetensors.
Files are written tile by tile, since the writer of the safetensors library needs all converted tensors in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_zero.checkpoint import archive_reader, folder_reader
from lightning_zero.checkpoint.errors import CheckpointError
from lightning_zero.checkpoint.lazy import StoredTensor
from lightning_zero.sharding import Group
from lightning_zero.sharding.compiled import plain_name
from lightning_zero.tools.contents import Opaque, cast, dtype_name, read_checkpoint, tied_names

Layout = Literal["safetensors", "hf"]

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_METADATA = {"format": "pt"}  # `transformers` refuses files without it
_TILE = 1 << 20  # number of elements that are converted at a time
_PARTIAL = ".partial"  # name of the folder with incomplete files
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write: its name, the mapped or lazy source, and the dtype in the file."""

    name: str
    source: Tensor
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.source.numel() * self.dtype.itemsize

    def tiles(self) -> Iterator[Tensor]:
        """The converted elements in order, as 1-D uint8 tensors.

        Raises:
            CheckpointError: a finite number is out of range of the dtype.
        """
        source = self.source.full() if isinstance(self.source, StoredTensor) else self.source.detach()
        # A tensor that is not contiguous is copied as a whole, so memory is bounded by the largest tensor.
        for tile in source.contiguous().reshape(-1).split(_TILE):
            yield cast(self.name, tile, self.dtype).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        files: names of the files in the folder, in the order of the weights, without index and configuration.
        tensors: number of tensors written.
        bytes: size of their elements.
        prefix: the prefix that was removed from the names.
        tied: maps each further name of a tied tensor, which is left out, to the name that was written.
        outside: names that are left out because they do not begin with the prefix.
        extra: names that are left out because they are no tensors.
        common_prefix: the longest prefix, up to a dot, that all written names share.
    """

    files: list[str]
    tensors: int
    bytes: int
    prefix: str
    tied: dict[str, str]
    outside: list[str]
    extra: list[str]
    common_prefix: str


def export(
    path: Path,
    directory: Path,
    layout: Layout = "safetensors",
    *,
    dtype: torch.dtype | None = None,
    strip_prefix: str = "",
    max_shard_bytes: int = 5 * 10**9,
    config: Path | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the weights of a checkpoint into a folder, and compare them bit by bit with the checkpoint.

    This needs memory for the largest tensor if the checkpoint is a folder or the tensor is not contiguous, otherwise
    for one tile. The files are in an inner folder of `directory` until everything is verified; then they are moved,
    the index or the only file last.

    Args:
        path: the checkpoint, a file or a folder.
        directory: folder for the files; it is created if needed. Other files in it are kept.
        layout: "hf" also writes `config.json`, so that `from_pretrained` of `transformers` loads the folder.
        dtype: dtype of floating-point tensors; ``None``: unchanged.
        strip_prefix: prefix to remove from names, such as "model."; names without it are left out. "auto" removes the
            longest common prefix up to a dot.
        max_shard_bytes: maximum size of the elements in one file; a larger tensor gets a file of its own.
        config: for "hf", a model configuration file or the folder of `config.json`; ``None``: the dict `config` with a
            `model_type` in the checkpoint's hyperparameters.
        overwrite: replace weights, and with "hf" the configuration, in a folder that is not empty.

    Returns:
        A summary of the written and the omitted tensors.

    Raises:
        CheckpointError: the checkpoint cannot be read, is damaged, lacks the prefix, or has a tensor that the format
            cannot store; or there is no configuration; or the folder is not empty; or a file does not read back equal.
        OSError: files cannot be read or written.
    """
    checkpoint, _ = read_checkpoint(path)
    (folder_reader if path.is_dir() else archive_reader).verify(path, Group())
    state, extra = _tensors(checkpoint["state_dict"])
    prefix = _prefix(list(state), strip_prefix)
    inside = {name: value for name, value in state.items() if name.startswith(prefix)}
    tied = {name.removeprefix(prefix): kept.removeprefix(prefix) for name, kept in tied_names(inside).items()}
    named = {name.removeprefix(prefix): value for name, value in inside.items()}
    entries = [_entry(name, value, dtype) for name, value in named.items() if name not in tied]
    settings = _config(checkpoint, config, entries) if layout == "hf" else None
    shards = _shards(entries, max_shard_bytes)
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; name a folder.")
    if not overwrite and directory.is_dir() and any(file.name != _PARTIAL for file in directory.iterdir()):
        raise CheckpointError(f"{directory} is not empty; name another folder, or replace its weights by --overwrite.")
    fresh = not directory.exists()
    partial = directory / _PARTIAL
    try:
        if partial.exists():  # a leftover of an export that was killed
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        if settings is not None:
            _write_json(partial / CONFIG, settings)
        for file, shard in shards.items():
            _write_shard(partial / file, shard)
        if len(shards) > 1:
            _write_json(partial / INDEX, _index(shards))
        _verify(partial, shards)
        _publish(partial, directory)
    finally:
        if partial.exists():  # something failed
            shutil.rmtree(directory if fresh else partial)
    return Exported(
        files=list(shards),
        tensors=len(entries),
        bytes=sum(entry.bytes for entry in entries),
        prefix=prefix,
        tied=tied,
        outside=[name for name in state if name not in inside],
        extra=extra,
        common_prefix=_common_prefix(list(named)),
    )


def _tensors(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors by their names in the uncompiled module, and the names of entries that are no tensors."""
    tensors: dict[str, Tensor] = {}
    extra = []
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[plain_name(name)] = value
        elif isinstance(value, Opaque) and not name.endswith("_extra_state"):
            raise CheckpointError(f"{name!r} is a {value!r}, which cannot be read: save it as an ordinary tensor.")
        else:
            extra.append(name)
    if not tensors:
        raise CheckpointError("The checkpoint's 'state_dict' has no tensors.")
    return tensors, extra


def _prefix(names: list[str], wanted: str) -> str:
    """The prefix to strip, with its dot."""
    if not wanted:
        return ""
    prefix = _common_prefix(names) if wanted == "auto" else f"{wanted.removesuffix('.')}."
    if not prefix or not any(name.startswith(prefix) for name in names):
        problem = f"No name begins with {prefix!r}" if prefix else "The names have no prefix in common"
        there = sorted({f"{name.partition('.')[0]}." for name in names if "." in name})
        raise CheckpointError(f"{problem}; prefixes are {', '.join(there)}" if there else f"{problem}, nor any at all")
    return prefix


def _common_prefix(names: list[str]) -> str:
    """The longest prefix that ends in a dot and that all names share; empty if there is none."""
    words = names[0].split(".")[:-1]
    prefixes = (".".join(words[:length]) + "." for length in range(len(words), 0, -1))
    return next((prefix for prefix in prefixes if all(name.startswith(prefix) for name in names)), "")


def _entry(name: str, value: Tensor, dtype: torch.dtype | None) -> Entry:
    dtype = dtype if dtype is not None and value.is_floating_point() else value.dtype
    if value.layout != torch.strided or dtype not in _DTYPES:
        kind = dtype_name(dtype) if value.layout == torch.strided else str(value.layout).removeprefix("torch.")
        raise CheckpointError(f"{name!r} is a tensor of kind {kind}, which safetensors does not store.")
    return Entry(name, value, dtype)


def _config(checkpoint: Mapping[str, Any], given: Path | None, entries: list[Entry]) -> dict[str, Any]:
    """The model's configuration, with the dtype of the weights, which `from_pretrained` uses."""
    if given is not None:
        file = given / CONFIG if given.is_dir() else given
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{file} is not JSON: {error}") from error
        place = f"{file} has"
    else:
        parameters = checkpoint.get("hyper_parameters")
        config = parameters.get("config") if isinstance(parameters, Mapping) else None
        place = "The checkpoint's hyperparameters have"
    if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"{place} no model configuration with a 'model_type', which from_pretrained needs: save it with "
            "model.config.save_pretrained(FOLDER) and give --config FOLDER, or export with --format safetensors."
        )
    config = {key: value for key, value in config.items() if key != "torch_dtype"}  # its older name
    floating = [entry.dtype for entry in entries if entry.dtype.is_floating_point]
    return config | ({"dtype": dtype_name(floating[0])} if floating else {})


def _shards(entries: list[Entry], limit: int) -> dict[str, list[Entry]]:
    """Distribute the entries, in order, over as few files of at most ``limit`` bytes as needed."""
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05}-of-{len(groups):05}.safetensors": group for n, group in enumerate(groups, start=1)}


def _write_shard(file: Path, entries: list[Entry]) -> None:
    # Tensors with wider elements come first, so that each tensor begins at a multiple of its element's size.
    entries = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header: dict[str, Any] = {"__metadata__": _METADATA}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.bytes
        header[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.source.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for entry in entries:
            for tile in entry.tiles():
                stream.write(tile.numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        try:
            stream.write(json.dumps(value, indent=2, sort_keys=True) + "\n")
        except TypeError as error:
            raise CheckpointError(f"{file.name} cannot be written: {error}; give --config FOLDER.") from error
        stream.flush()
        os.fsync(stream.fileno())


def _index(shards: Mapping[str, list[Entry]]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(entry.bytes for shard in shards.values() for entry in shard)},
        "weight_map": {entry.name: file for file, shard in shards.items() for entry in shard},
    }


def _verify(directory: Path, shards: Mapping[str, list[Entry]]) -> None:
    """Read everything back with the safetensors library and compare it."""
    for file, shard in shards.items():
        try:
            with safe_open(directory / file, framework="pt") as reader:
                if reader.metadata() != _METADATA or sorted(reader.keys()) != sorted(entry.name for entry in shard):
                    raise CheckpointError(f"{file} reads back with other names or metadata; nothing was kept.")
                for entry in shard:
                    if not _reads_back(entry, reader.get_tensor(entry.name)):
                        raise CheckpointError(f"{entry.name!r} in {file} reads back otherwise; nothing was kept.")
        except SafetensorError as error:
            raise CheckpointError(f"{file} cannot be read back; nothing was kept: {error}") from error


def _reads_back(entry: Entry, found: Tensor) -> bool:
    if (found.shape, found.dtype) != (entry.source.shape, entry.dtype):
        return False
    tiles = found.reshape(-1).split(_TILE)
    return all(torch.equal(a, b.view(torch.uint8)) for a, b in zip(entry.tiles(), tiles, strict=True))


def _publish(partial: Path, directory: Path) -> None:
    """Move the files into ``directory``, after removing an earlier export, so that the two are never mixed."""
    files = sorted(partial.iterdir(), key=lambda file: (file.name == INDEX, file.suffix == ".safetensors"))
    old = [directory / INDEX, directory / "model.safetensors", *directory.glob("model-*-of-*.safetensors")]
    for file in old:
        file.unlink(missing_ok=True)
    for file in files:
        file.replace(directory / file.name)
    partial.rmdir()
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
