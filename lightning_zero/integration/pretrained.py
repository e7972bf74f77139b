"""Pretrained weights under sharded initialization: each rank reads the parts of safetensors files that it owns.

``from_pretrained`` of transformers (5.x) makes a model without memory, opens files by ``safetensors.safe_open``, and
makes a parameter of each tensor. Inside :func:`read_in_slices` these tensors are lazy.
:func:`~lightning_zero.sharding.sharded_init.sharded_init` turns each parameter into a shard, which reads only its own
part of the file. Transformers handles everything else (renamed, tied, missing and unexpected keys) as usual.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.checkpoint.safetensors import SafetensorsFile
from lightning_zero.sharding import Group

_OPENERS = ("safetensors", "transformers.modeling_utils")  # modules with their own reference to `safe_open`
_worlds: list[Group] = []  # of the open contexts


@contextlib.contextmanager
def read_in_slices(world: Group) -> Iterator[None]:
    """Make a context in which whole slices of files opened by ``safetensors.safe_open`` are read when they are used.

    Every rank opens the same files in the same order, each on its own file system.

    Args:
        world: of all ranks.
    """
    with contextlib.suppress(ImportError):  # without safetensors no such file is opened
        importlib.import_module("safetensors")  # modules that import `safe_open` from it later get ours
    modules: list[Any] = [sys.modules[name] for name in _OPENERS if name in sys.modules]
    found = [(module, module.safe_open) for module in modules]
    for module, opener in found:
        module.safe_open = opener if isinstance(opener, _Opener) else _Opener(opener)
    _worlds.append(world)
    handle = register_module_buffer_registration_hook(_buffer_in_memory)  # type: ignore[arg-type]  # it may return one
    try:
        yield
    finally:
        handle.remove()
        _worlds.pop()
        for module, opener in found:
            module.safe_open = opener


class _Opener:
    """Opens a file as ``safe_open`` does, lazily only inside the context: importers may keep it for longer."""

    def __init__(self, opener: Any) -> None:
        self._open = opener

    def __call__(self, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
        opened = self._open(filename, framework=framework, device=device, **options)
        if not _worlds or framework not in ("pt", "torch", "pytorch") or str(device) != "cpu":
            return opened
        file = SafetensorsFile(Path(filename))
        digests = _worlds[-1].all_gather_object(file.digest, "compare pretrained files")
        if len(set(digests)) > 1:
            rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            raise ValueError(
                f"{filename} on rank {rank} differs from that on rank 0 in its header or its size. Give all ranks the "
                "same pretrained files"
            )
        return _OpenFile(opened, file)


class _Delegate:
    """Passes attributes that it does not define on to another object."""

    def __init__(self, to: Any) -> None:
        self._to = to

    def __getattr__(self, name: str) -> Any:
        return getattr(self._to, name)


class _OpenFile(_Delegate):
    """The result of ``safe_open``, whose whole slices are lazy."""

    def __init__(self, opened: Any, file: SafetensorsFile) -> None:
        super().__init__(opened)
        self._file = file

    def __enter__(self) -> Self:
        self._to.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._to.__exit__(*error)

    def get_slice(self, name: str) -> Any:
        return _Slice(self._to.get_slice(name), self._file.tensor(name))


class _Slice(_Delegate):
    """A tensor of the file; the index ``...`` gives a lazy tensor, and any other index reads."""

    def __init__(self, opened: Any, whole: Tensor | None) -> None:
        super().__init__(opened)
        self._whole = whole

    def __getitem__(self, index: Any) -> Any:
        return self._whole if index is Ellipsis and self._whole is not None else self._to[index]


def _buffer_in_memory(module: nn.Module, name: str, buffer: Tensor) -> Tensor | None:
    """Reads a lazy buffer, since buffers are not sharded."""
    return buffer.fetch() if isinstance(buffer, LazyTensor) else None
