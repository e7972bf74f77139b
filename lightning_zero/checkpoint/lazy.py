"""Tensors that fetch their values only when someone reads them. A checkpoint consists of them before it is written.

For hooks of user code they are ordinary tensors. Reading the shape or dtype costs nothing; any operation that needs
values fetches them first.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
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
    """Gives the values of many lazy tensors.

    Attributes:
        key: identifies the source among all others; its tensors of the same number have the same values for ever.
    """

    @property
    def key(self) -> Hashable: ...

    @property
    def live(self) -> bool:
        """Whether :meth:`fetch` returns tensors that are in use elsewhere, and not copies of them."""
        ...

    def fetch(self, param: int) -> Tensor:
        """Return all values of tensor ``param`` of this source.

        They may come from other ranks. Then all ranks must make the same call.
        """
        ...


@runtime_checkable
class StoredSource(Source, Protocol):
    """A source that reads from a checkpoint in files."""

    def read_slice(self, param: int, form: MemoryFormat, start: int, into: Tensor) -> None:
        """Fill ``into`` with a range of the elements of tensor ``param`` of this source.

        Args:
            param: index of the tensor.
            form: the order in which elements are counted; has the shape of the tensor.
            start: first element of the range.
            into: is filled; 1-D, with as many elements as the range, of any dtype and device.
        """
        ...


class LazyTensor(Tensor):
    """A tensor with the shape, strides, dtype and device of values that ``source`` will give.

    A copy that was fetched is kept, so that changes in place persist: the file that is written has the changed values.
    If the source is live, nothing is kept, because :meth:`fetch` returns the tensor in use.

    Args:
        source: gives the values.
        param: index of this tensor in the source.
        like: gives shape, strides, dtype and device; its values are not used.
        device: device of the values that ``source`` gives; default: that of ``like``, or the CPU if ``like`` is a meta
            tensor.
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
        """Do nothing: ``__new__`` does everything, as for every tensor."""

    def fetch(self) -> Tensor:
        """The values as an ordinary tensor. All calls return tensors with the same memory."""
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
        # Live tensors are parts of a larger storage, which must not be pickled with them.
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
# The attributes and functions that need no values.
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
    """A lazy tensor of a checkpoint that is being loaded. The engine reads slices of it, which are not kept here."""

    def read_slice(self, form: MemoryFormat, start: int, into: Tensor) -> None:
        """See :class:`~lightning_zero.sharding.memory_format.ReadableInSlices`."""
        if self.fetched is not None:
            form.read(self.fetched, start, into)
        else:
            assert isinstance(self.source, StoredSource)
            self.source.read_slice(self.param, form, start, into)

    def tiles(self, nbytes: int) -> Iterator[Tensor]:
        """Yield the values in the order of memory, as 1-D tensors on the CPU of at most ``nbytes`` bytes.

        A tensor has at least one element.
        """
        form, size = MemoryFormat(self.shape, self.stride()), max(1, nbytes // self.element_size())
        for start in range(0, self.numel(), size):
            tile = torch.empty(min(size, self.numel() - start), dtype=self.dtype, device="cpu")
            self.read_slice(form, start, tile)
            yield tile

    def full(self) -> Tensor:
        """All values. Unlike :meth:`fetch`, this does not keep them here."""
        return self.source.fetch(self.param) if self.fetched is None else self.fetched

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and isinstance(args[1], StoredTensor):
            # Modules load parameters in this way. If values were kept, memory would fill with the whole checkpoint.
            args = (args[0], args[1].full(), *args[2:])
        return super().__torch_function__(func, types, args, kwargs)


_LOADED: defaultdict[str, weakref.WeakSet[StoredTensor]] = defaultdict(weakref.WeakSet)  # by URL


def loaded_from(url: str, tensor: StoredTensor) -> StoredTensor:
    """Return ``tensor``, whose values are at ``url``, and note this for :func:`fetch_loaded`."""
    _LOADED[url].add(tensor)
    return tensor


def fetch_loaded(url: str) -> None:
    """Fetch the values of all tensors in use that were loaded from ``url``: a save is about to replace them there.

    Args:
        url: URL of a file or folder.
    """
    for place in [known for known in _LOADED if known == url or known.startswith(f"{url}/")]:
        for tensor in [*_LOADED.pop(place)]:
            tensor.fetch()


class Placeholders:
    """Storages without memory that stand for the values of lazy tensors when these are pickled."""

    def __init__(self) -> None:
        self._storages: dict[tuple[Hashable, int], torch.UntypedStorage] = {}
        self._tensors: dict[int, LazyTensor] = {}  # by the number of the storage
        self._pickled: dict[int, LazyTensor] = {}  # by id; several may share a storage

    def reduce(self, tensor: LazyTensor) -> Any:
        """Return what pickle needs for ``tensor``, in the form of an ordinary tensor on the CPU."""
        self._pickled[id(tensor)] = tensor
        key = (tensor.source.key, tensor.param)
        if key not in self._storages:
            self._storages[key] = torch.UntypedStorage(tensor.nbytes, device="meta")
            self._tensors[storage_number(self._storages[key])] = tensor
        return pickled_tensor(self._storages[key], tensor)

    def tensors(self) -> list[LazyTensor]:
        """All lazy tensors that were pickled, without repetition."""
        return list(self._pickled.values())

    def tensor(self, storage: torch.UntypedStorage) -> LazyTensor | None:
        """The tensor for which ``storage`` stands; ``None`` for an ordinary storage."""
        return self._tensors.get(storage_number(storage))


_PLACEHOLDERS: ContextVar[Placeholders | None] = ContextVar("placeholders", default=None)


@contextmanager
def placeholders() -> Iterator[Placeholders]:
    """Surrounds code that pickles lazy tensors: those that were not fetched are pickled without their values."""
    token = _PLACEHOLDERS.set(Placeholders())
    try:
        found = _PLACEHOLDERS.get()
        assert found is not None
        yield found
    finally:
        _PLACEHOLDERS.reset(token)
