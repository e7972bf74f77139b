"""What memory is taken: storages alive, host mappings, and the most there is of both."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
from helpers import place
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_zero.storage import host


class Mapping(mmap.mmap):
    """A mapping that is counted while it lives."""

    live = 0
    most = 0

    def __new__(cls, fileno: int, length: int, **options: Any) -> Self:
        mapping = super().__new__(cls, fileno, length, **options)
        Mapping.live += length
        Mapping.most = max(Mapping.most, Mapping.live)
        return mapping

    def __del__(self) -> None:
        Mapping.live -= len(self)
        getattr(super(), "__del__", lambda: None)()


class PinnedMapping(Mapping, host._PinnedMapping):
    """One that is pinned, where there is a device."""


@contextmanager
def counted_mappings() -> Iterator[type[Mapping]]:
    """Host stores map memory through `Mapping` inside; nothing is mapped at the beginning."""
    await_that(nothing_is_mapped)  # threads let go of earlier ones late
    Mapping.most = Mapping.live
    counting = SimpleNamespace(**{**vars(mmap), "mmap": Mapping})
    with mock.patch.multiple(host, mmap=counting, _PinnedMapping=PinnedMapping):
        yield Mapping


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Inside, `storage_bytes` counts only what was made inside, and is quick."""
    gc.collect()
    gc.freeze()  # the collector's lists begin anew
    try:
        yield
    finally:
        gc.unfreeze()


def storages() -> dict[int, torch.UntypedStorage]:
    """Those of all tensors alive but on `meta`, by address of the storage object."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, Tensor) and o.device.type != "meta"]
    with torch._C.DisableTorchFunctionSubclass():
        return {s._cdata: s for s in (t.untyped_storage() for t in tensors if t.layout is torch.strided)}


def storage_bytes() -> int:
    """Bytes of the storages of all tensors alive, each once."""
    return sum({s.data_ptr(): s.nbytes() for s in storages().values() if s.nbytes()}.values())


def await_release(most: float, seconds: float = 30.0) -> None:
    """Wait until no more than so many bytes are alive: gloo's threads let go of a collective's tensors late."""
    await_that(lambda: storage_bytes() <= most, seconds)


def nothing_is_mapped() -> bool:
    """By stores; garbage is collected."""
    gc.collect()
    return not Mapping.live


def await_that(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Look again and again whether something is so, for some time at most."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def peak(mappings: type[Mapping]) -> AbstractContextManager[SimpleNamespace | Peak]:
    """The most of both kinds of memory together: `nbytes`, after the context."""
    return Peak() if place.device().type == "cpu" else _device_peak(mappings)


@contextmanager
def _device_peak(mappings: type[Mapping]) -> Iterator[SimpleNamespace]:
    """As a device and its host are two, threads fill them, and each has the most at another time."""
    torch.accelerator.reset_peak_memory_stats()
    found = SimpleNamespace(nbytes=0)
    yield found
    asked = torch.accelerator.memory_stats()["requested_bytes.all.peak"]  # blocks are larger
    found.nbytes = asked + mappings.most


class Peak(TorchDispatchMode):
    """Looks at all storages alive after every operation that makes one.

    `nbytes` is the most there was, on device and host together. What an operation takes and gives back inside itself is
    not seen, nor are gloo's own buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._alive = {key: StorageWeakRef(storage) for key, storage in storages().items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if new := [storage for storage in found if storage._cdata not in self._alive]:
            self._alive.update((storage._cdata, StorageWeakRef(storage)) for storage in new)
            self.nbytes = max(self.nbytes, self._sum())
        return result

    def _sum(self) -> int:
        total = 0
        for key, reference in list(self._alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._alive[key]
            else:
                total += storage.nbytes()
        return total
