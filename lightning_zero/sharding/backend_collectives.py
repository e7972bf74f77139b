"""A transport of collectives: the backend's own collectives, for devices and backends that do not exchange messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.sharding.pieces import Pieces

if TYPE_CHECKING:
    from lightning_zero.sharding.collectives import Group

# torch 2.13 renamed the flat collectives. Versions 2.10 to 2.12 have the old names only.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class BackendCollectives:
    """The backend's own collectives."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def padding(self, numel: int) -> int:
        return 0

    def scratch(self, part: int, dtype: torch.dtype, in_pieces: bool, out: bool) -> int:
        return part

    def begin_all_gather(self, data: Tensor, what: str) -> Callable[[], None]:
        group, own = self._group, data.chunk(self._group.size)[self._group.rank]
        with group.calling_backend(what):
            work = _all_gather_flat(data, own, group=group.process_group, async_op=True)

        def wait() -> None:
            with group.calling_backend(what):
                work.wait()

        return wait

    def reduce_scatter(self, flat: Tensor | Pieces, what: str, factor: float, out: Tensor | None, add: bool) -> Tensor:
        assert isinstance(flat, Tensor)
        assert out is None
        out = flat.new_empty(flat.numel() // self._group.size)
        if factor != 1:
            flat.mul_(factor)
        with self._group.calling_backend(what):
            _reduce_scatter_flat(out, flat, group=self._group.process_group)
        return out

    def all_reduce_(self, flat: Tensor, what: str) -> None:
        with self._group.calling_backend(what):
            dist.all_reduce(flat, group=self._group.process_group)

    def gather_headers(self, table: Tensor, header: Tensor, what: str, tag: int) -> None:
        with self._group.calling_backend(what):
            _all_gather_flat(table.view(-1), header, group=self._group.process_group)
