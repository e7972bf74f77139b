"""Where the tensors of a bucket rest, and in which form.

Decided here and nowhere else: buckets make their tensors by it, and :func:`lightning_zero.engine.plan` counts them.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from lightning_zero.engine.collectives import Mesh
from lightning_zero.engine.layout import FlatLayout
from lightning_zero.engine.policies import MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.engine.stores import Store
from lightning_zero.engine.timers import Phase

_CACHE_LINE = 64  # bytes; the alignment of torch's own CPU allocations


class MasterForm(NamedTuple):
    """How the full-precision values of a shard are kept.

    Attributes:
        dtype: of the values.
        device: where they can be computed on.
        pieces: dtypes of the tensors of the shard's length that they take in the optimizer's store, beside the shard;
            none where the shard is its own master.
    """

    dtype: torch.dtype
    device: torch.device
    pieces: tuple[torch.dtype, ...] = ()


class Placement(NamedTuple):
    """What the buckets of one engine share."""

    mesh: Mesh
    sharding: ShardingPolicy
    precision: MixedPrecisionPolicy
    device: torch.device  # where the model computes
    optimizer_store: Store
    param_store: Store

    def persistent(self) -> Placement:
        """The placement of parameters that stay whole although the stage shards them."""
        return self._replace(sharding=dataclasses.replace(self.sharding, shard_params=False))

    def layout(self, numels: tuple[int, ...], dtype: torch.dtype) -> FlatLayout:
        """Offsets and padding of parameters with these numbers of elements."""
        return FlatLayout(numels, self.mesh.shard.size, self.mesh.world.size, _CACHE_LINE // dtype.itemsize)

    def copying(self, store: Store) -> AbstractContextManager[None]:
        """Around copies between the device and what rests in ``store``: timed as such where that is host memory."""
        return self.mesh.timers.phase(Phase.HOST_COPY) if store.memory == "host" else nullcontext()

    @property
    def shard_device(self) -> torch.device:
        """Where parameter shards rest."""
        return self.param_store.device if self.sharding.shard_params else self.device

    def master(self, initial: torch.dtype, dtype: torch.dtype, optimized: bool) -> MasterForm:
        """The master of a shard.

        Args:
            initial: dtype that the parameters had before the engine.
            dtype: dtype of the shard.
            optimized: whether an optimizer may update it.
        """
        store = self.optimizer_store
        # A frozen parameter keeps its full precision too: it is what a checkpoint holds.
        cast = self.precision.needs_master(dtype) and (optimized or initial.itemsize > dtype.itemsize)
        moved = store.device != self.shard_device or store.exact
        moved = moved and not (self.sharding.shard_params and self.param_store is store)
        if cast or (optimized and moved):
            values = torch.float32 if cast else dtype
            return MasterForm(values, store.device, (values,))
        return MasterForm(dtype, self.shard_device)

    def split_master(self, dtype: torch.dtype) -> MasterForm:
        """The split master of a 16-bit shard: remainders, and the high part where the shard is not on the host."""
        high = () if self.shard_device.type == "cpu" else (dtype,)
        return MasterForm(torch.float32, torch.device("cpu"), (torch.int16, *high))

    def reduce_dtype(self, dtype: torch.dtype, summed: bool) -> torch.dtype:
        """The dtype in which gradients of parameters of ``dtype`` are sent.

        Args:
            dtype: of the parameters.
            summed: whether whole gradients of several micro-batches were added up (see :meth:`sum_dtype`).
        """
        # What was summed in fp32 is sent in fp32: two finite fp16 micro-batches may add up to more than fp16 holds.
        return self.precision.reduce_dtype or (self.sum_dtype(dtype) if summed else dtype)

    @staticmethod
    def sum_dtype(dtype: torch.dtype) -> torch.dtype:
        """The dtype in which micro-batches add up: fp32 at least."""
        return torch.promote_types(dtype, torch.float32)
