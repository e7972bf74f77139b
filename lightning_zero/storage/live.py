"""The bytes of tensors that operators make, as long as these live."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_zero.torch_private import TorchDispatchMode, tree_leaves


class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes of storages which operators make in it, while they live.

    Attributes:
        now: the bytes that live.
        most: the most bytes that have lived at a time, since :meth:`most_since` was called, if it was.

    Args:
        known: tensors whose storages are not counted.
        least: tensors with fewer elements are not counted.
    """

    def __init__(self, known: Iterable[Tensor], least: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._least = least
        self._known = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in known}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def most_since(self) -> int:
        """The most bytes since the last call of this method."""
        most, self.most = self.most, self.now
        return most

    def disown(self, tensor: Tensor) -> None:
        """Stops counting the storage of a tensor."""
        self._forget(id(tensor.untyped_storage()))

    def touch(self, nbytes: int) -> None:
        """Notes that an operator used ``nbytes`` of temporary memory."""
        self.most = max(self.most, self.now + nbytes)

    def see(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Counts a storage as ``nbytes`` from now on."""
        key = id(storage)  # the object lives as long as its memory would
        if key in self._known or key in self._alive or not nbytes:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._forget(key)), nbytes
        self.now += nbytes
        self.touch(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.layout is torch.strided and made.numel() >= self._least:
                self.see(made.untyped_storage(), made.untyped_storage().nbytes())
        return result

    def _forget(self, key: int) -> None:
        if (found := self._alive.pop(key, None)) is not None:
            self.now -= found[1]
