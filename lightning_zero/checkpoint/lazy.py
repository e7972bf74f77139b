"""Tensors whose values are looked up when someone reads them, of which a checkpoint consists before it is written.

Hooks of user code see an ordinary tensor: its shape and dtype cost nothing, anything else fetches the values first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.torch_private import (
    make_wrapper,
    no_subclass_functions,
    pickled_tensor,
    storage_number,
    tree_map,
)


class Source(Protocol):
    """Holds, or knows who holds, the values of many lazy tensors.

    Attributes:
        key: tells it from all others.
    """

    @property
    def key(self) -> Hashable: ...

    @property
    def live(self) -> bool:
        """Whether :meth:`fetch` gives the tensors that someone else uses, not copies."""
        ...

    def fetch(self, param: int) -> Tensor:
        """All values of its tensor ``param``; perhaps from other ranks, which must fetch them too."""
        ...


@runtime_checkable
class StoredSource(Source, Protocol):
    """A checkpoint on the disk."""

    def read_slice(self, param: int, form: MemoryFormat, start: int, into: Tensor) -> None:
        """Fill ``into`` (1-D) with the elements of its tensor ``param`` from ``start`` on, in the order of ``form``."""
        ...


class LazyTensor(Tensor):
    """A tensor with the shape, strides, dtype and device of the values that ``source`` will give.

    Once fetched a copy stays, so that changes in place do: the file gets it as it is then.

    Args:
        source: has the values.
        param: which of its tensors this is.
        like: shape, strides, dtype and device, and no more than that.
        device: of the values that ``source`` gives; default: that of ``like``, or the CPU where that is a meta tensor.
    """

    source: Source
    param: int
    fetched: Tensor | None

    @staticmethod
    def __new__(cls, source: Source, param: int, like: Tensor, device: torch.device | None = None) -> Self:
        tensor = make_wrapper(cls, like, device or (torch.device("cpu") if like.is_meta else like.device))
        tensor.source, tensor.param, tensor.fetched = source, param, None
        return tensor

    def __init__(self, source: Source, param: int, like: Tensor, device: torch.device | None = None) -> None:
        """Everything is done by ``__new__``, as for every tensor."""

    def fetch(self) -> Tensor:
        """The values: an ordinary tensor, which shares its memory at every call."""
        if self.fetched is not None:
            return self.fetched
        values = self.source.fetch(self.param)
        if not self.source.live:
            self.fetched = values
        return values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with no_subclass_functions():
                return func(*args, **kwargs or {})
        return func(*tree_map(_fetched, args), **tree_map(_fetched, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map(_fetched, args), **tree_map(_fetched, kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        placeholders = _PLACEHOLDERS.get()
        if placeholders is not None and self.fetched is None:
            return placeholders.reduce(self)
        # Live tensors are cut out of a larger storage, which is not to be pickled with them.
        values = self.fetch().clone() if self.source.live else self.fetch()
        return values.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def _fetched(value: Any) -> Any:
    return value.fetch() if isinstance(value, LazyTensor) else value


_ATTRIBUTES = "shape dtype device layout ndim is_meta requires_grad is_leaf grad grad_fn itemsize nbytes".split()
_METHODS = (
    "size stride dim numel nelement element_size is_contiguous is_floating_point is_complex __len__ __hash__ __repr__"
).split()
# Attributes and functions that need no values.
_METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(Tensor, name) for name in _METHODS),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ]
)


class StoredTensor(LazyTensor):
    """A lazy tensor of a checkpoint that is loaded: the engine reads its slices, and nothing of them stays here."""

    def read_slice(self, form: MemoryFormat, start: int, into: Tensor) -> None:
        """See :class:`~lightning_zero.sharding.memory_format.ReadableInSlices`."""
        if self.fetched is not None:
            form.read(self.fetched, start, into)
        else:
            assert isinstance(self.source, StoredSource)
            self.source.read_slice(self.param, form, start, into)

    def tiles(self, nbytes: int) -> Iterator[Tensor]:
        """The values in the order of memory, 1-D, so many bytes at a time."""
        form, size = MemoryFormat(self.shape, self.stride()), max(1, nbytes // self.element_size())
        for start in range(0, self.numel(), size):
            tile = torch.empty(min(size, self.numel() - start), dtype=self.dtype, device="cpu")
            self.read_slice(form, start, tile)
            yield tile

    def full(self) -> Tensor:
        """All values, of which nothing stays here."""
        return self.source.fetch(self.param) if self.fetched is None else self.fetched

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and isinstance(args[1], StoredTensor):
            # A module loads this way: all of its values would stay, one tensor after the other.
            args = (args[0], args[1].full(), *args[2:])
        return super().__torch_function__(func, types, args, kwargs)


class Placeholders:
    """Storages without memory, with which lazy tensors are pickled, and the tensors that they stand for."""

    def __init__(self) -> None:
        self._storages: dict[tuple[Hashable, int], torch.UntypedStorage] = {}
        self._tensors: dict[int, LazyTensor] = {}  # by the storage

    def reduce(self, tensor: LazyTensor) -> Any:
        """Reduce ``tensor`` as an ordinary tensor on the CPU reduces itself."""
        key = (tensor.source.key, tensor.param)
        if key not in self._storages:
            self._storages[key] = torch.UntypedStorage(tensor.nbytes, device="meta")
            self._tensors[storage_number(self._storages[key])] = tensor
        return pickled_tensor(self._storages[key], tensor)

    def tensors(self) -> list[LazyTensor]:
        """All lazy tensors that were pickled, each once."""
        return list(self._tensors.values())

    def tensor(self, storage: torch.UntypedStorage) -> LazyTensor | None:
        """The tensor that ``storage`` stands for; ``None``: it is an ordinary storage."""
        return self._tensors.get(storage_number(storage))


_PLACEHOLDERS: ContextVar[Placeholders | None] = ContextVar("placeholders", default=None)


@contextmanager
def placeholders() -> Iterator[Placeholders]:
    """Inside, lazy tensors that nobody has fetched are pickled without their values."""
    token = _PLACEHOLDERS.set(Placeholders())
    try:
        found = _PLACEHOLDERS.get()
        assert found is not None
        yield found
    finally:
        _PLACEHOLDERS.reset(token)
