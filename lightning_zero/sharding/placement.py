"""Places and forms of a bucket's tensors, and how they move.

Decided here and nowhere else: buckets make their tensors by it, and :func:`lightning_zero.planning.plan` counts them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.sharding.layout import FlatLayout, WholeLayout
from lightning_zero.sharding.mesh import Mesh
from lightning_zero.sharding.policies import MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.storage import (
    DONE,
    Executor,
    InlineExecutor,
    Lane,
    Memory,
    ResidentStore,
    TensorStore,
    Ticket,
)
from lightning_zero.storage.nvme import tiles_ahead
from lightning_zero.storage.staged import staged_tile
from lightning_zero.storage.timers import Phase

_CACHE_LINE = 64  # bytes; the alignment of torch's own CPU allocations


class MasterForm(NamedTuple):
    """The form in which the full-precision values of a shard are kept.

    Attributes:
        dtype: of the values.
        device: where they can be computed on.
        pieces: dtypes of the tensors of the shard's length that they take in the optimizer's store, beside the shard;
            none where the shard is its own master.
        tile: elements of the shard that come to the host together, in passing, as a part of the values; 0: none do.
        crosses: whether they are in host memory and copied to a shard on the device as they are, in one dtype; others
            are converted on their way into memory in passing.
    """

    dtype: torch.dtype
    device: torch.device
    pieces: tuple[torch.dtype, ...] = ()
    tile: int = 0
    crosses: bool = False


class BucketPlacement(NamedTuple):
    """Groups, policies, device, stores and executor that the buckets of one engine share.

    Where ``whole``, each parameter lies whole in one shard; a bucket may have that for itself. Until something
    ``trains`` there are no masters: parameters rest in the dtype in which they are computed with, and nowhere else. No
    shard border cuts a block of ``block`` elements of a parameter: optimizers may keep state by block. Of the elements
    that optimizers update, ``offload_fraction`` rest in the stores, in whole buckets; the others are resident. Where
    masters may be split, ``split_masters`` says whether those of optimizers are that have no opinion of their own.
    ``gradients_rest`` says whether sharded gradients rest on the disk where optimizer state does; ``None``: where those
    of a rank do not fit the memory that tiles pass through.
    """

    mesh: Mesh
    sharding: ShardingPolicy
    precision: MixedPrecisionPolicy
    device: torch.device  # where the model computes
    optimizer_store: TensorStore
    param_store: TensorStore
    executor: Executor = InlineExecutor()
    whole: bool = False
    trains: bool = True
    block: int = 1
    offload_fraction: float = 1.0
    split_masters: bool = False
    gradients_rest: bool | None = None

    def persistent(self) -> BucketPlacement:
        """The placement of parameters that stay unsharded although the stage shards them."""
        return self._replace(sharding=dataclasses.replace(self.sharding, shard_params=False))

    def resident(self) -> BucketPlacement:
        """The placement of parameters whose state stays on the device although that of others is offloaded."""
        store = ResidentStore(self.device)
        return self._replace(optimizer_store=store, param_store=store)

    def layout(self, numels: tuple[int, ...], dtype: torch.dtype) -> FlatLayout:
        """Offsets and padding of parameters with these numbers of elements."""
        kind = WholeLayout if self.whole else FlatLayout
        shards = self.mesh.shard.size
        multiple = math.lcm(self.mesh.world.size, shards * self.block)
        return kind(numels, shards, multiple, math.lcm(_CACHE_LINE // dtype.itemsize, self.block))

    def move(
        self,
        target: Tensor,
        source: Tensor,
        memories: tuple[Memory, Memory],
        what: str,
        after: Sequence[Ticket] = (),
    ) -> Ticket:
        """Begin to copy ``source`` to ``target``; see :class:`~lightning_zero.storage.executor.Executor`.

        Args:
            target: of the shape of ``source``.
            source: in any dtype.
            memories: in which ``source`` and ``target`` rest; on CPU ranks their devices would not tell.
            what: what it is for.
            after: work on either of them.
        """
        with self._copying(memories):
            if memories == ("host", "device"):
                return self.executor.fetch(target, source, what, after)
            if memories == ("device", "host"):
                return self.executor.commit(target, source, what, after)
            for ticket in after:
                ticket.synchronize()
            target.copy_(source)  # by whoever computes there
        return DONE

    def copy(self, target: Tensor, source: Tensor, memories: tuple[Memory, Memory], what: str) -> None:
        """Copy ``source`` to ``target``; the host may read and change both then; see :meth:`move`."""
        self.await_host(self.move(target, source, memories, what))

    def await_host(self, work: Ticket) -> None:
        """Have the host wait for what moves from or to its memory."""
        with self.mesh.timers.phase(Phase.HOST_COPY):
            work.synchronize()

    def accumulate(
        self,
        target: Tensor,
        source: Tensor,
        memory: Memory,
        what: str,
        after: Sequence[Ticket] = (),
        lane: Lane = Lane.HOST,
    ) -> Ticket:
        """Begin to add ``source``, on the device, to ``target`` in ``memory``, in a lane there.

        ``after``: work on ``target``.
        """
        if memory == "device":
            target.add_(source)
            return DONE
        with self._copying(("device", memory)):
            if source.device == target.device:
                return self.executor.submit(partial(target.add_, source), lane, what, after)
            return self.executor.receive(source, target.add_, what, after, lane)

    def on_host(self, values: Tensor, what: str) -> Tensor:
        """``values`` on the CPU, where they may be already."""
        if values.device.type == "cpu":
            return values
        copy = torch.empty_like(values, device="cpu")
        self.copy(copy, values, ("device", "host"), what)
        return copy

    def _copying(self, memories: tuple[Memory, Memory]) -> AbstractContextManager[None]:
        return self.mesh.timers.phase(Phase.HOST_COPY) if "host" in memories else nullcontext()

    def tiles_ahead(self, dtype: torch.dtype) -> int:
        """Tiles of a parameter shard of ``dtype`` that are fetched from a disk long before they are gathered."""
        store = self.param_store
        return 0 if store.tile is None else tiles_ahead(store.passing_bytes, dtype.itemsize)

    @property
    def updates_apart(self) -> bool:
        """Whether updates are computed in another memory than the model: in the host's, and the device has its own."""
        return self.optimizer_store.device.type != self.device.type

    @property
    def rests_gradients(self) -> bool:
        """Whether sharded gradients rest on a disk, as far as that has been decided."""
        return bool(self.gradients_rest) and self.optimizer_store.tile is not None

    @property
    def gradient_memory(self) -> Memory:
        """The memory in which sharded gradients rest."""
        return self.optimizer_store.resting_memory if self.rests_gradients else self.optimizer_store.memory

    def widest_gradient(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that sharded gradients of parameters of ``dtype`` have in the end."""
        return self.precision.grad_dtype or self.sum_dtype(dtype)

    @property
    def shard_memory(self) -> Memory:
        """The memory in which parameter shards are read and written."""
        return self.param_store.memory if self.sharding.shard_params else "device"

    @property
    def update_lane(self) -> Lane:
        """The lane in which shards are updated."""
        return Lane.HOST if self.optimizer_store.memory == "host" else Lane.COMPUTE

    @property
    def shard_device(self) -> torch.device:
        """The device on which parameter shards can be computed on."""
        return self.param_store.device if self.sharding.shard_params else self.device

    def master(self, initial: torch.dtype, dtype: torch.dtype, optimized: bool) -> MasterForm:
        """The master of a shard.

        Args:
            initial: dtype that the parameters had before the engine.
            dtype: dtype of the shard.
            optimized: whether an optimizer may update it.
        """
        if not self.trains:
            return MasterForm(dtype, self.shard_device)
        store = self.optimizer_store
        # A frozen parameter keeps its full precision too: it is what a checkpoint holds.
        cast = self.precision.needs_master(dtype) and (optimized or initial.itemsize > dtype.itemsize)
        # Shards that rest in the memory that the optimizer's store computes in, as exactly as there, are where they
        # should be.
        shards = self.param_store
        beside = shards is store or (shards.exact and shards.memory == store.memory)
        moved = (store.device != self.shard_device or store.exact) and not (self.sharding.shard_params and beside)
        if cast or (optimized and moved):
            values = torch.float32 if cast else dtype
            crosses = values == dtype and (store.memory, self.shard_memory) == ("host", "device")
            return MasterForm(values, store.device, (values,), crosses=crosses)
        return MasterForm(dtype, self.shard_device)

    def rounds(self, initial: torch.dtype, dtype: torch.dtype) -> bool:
        """Whether a cast loses what a training would keep in masters."""
        return not self.trains and initial != dtype and self.precision.needs_master(dtype)

    def split_master(self, dtype: torch.dtype) -> MasterForm:
        """The split master of a 16-bit shard: remainders; the high part is the shard.

        What rests on a disk beside a shard that does not has a high part of its own: its tiles are read ahead.
        """
        values, host = torch.float32, torch.device("cpu")
        if ops.runs_on(self.shard_device):
            return MasterForm(values, host, (torch.int16,))
        if self.optimizer_store.tile is not None:
            return MasterForm(values, host, (torch.int16, dtype))
        return MasterForm(values, host, (torch.int16,), staged_tile(self.executor, dtype))

    def reduce_dtype(self, dtype: torch.dtype, summed: bool) -> torch.dtype:
        """The dtype in which gradients of parameters of ``dtype`` are sent.

        Args:
            dtype: of the parameters.
            summed: whether unsharded gradients of several micro-batches were added up (see :meth:`sum_dtype`).
        """
        # What was summed in fp32 is sent in fp32: two finite fp16 micro-batches may add up to more than fp16 holds.
        return self.precision.reduce_dtype or (self.sum_dtype(dtype) if summed else dtype)

    @staticmethod
    def sum_dtype(dtype: torch.dtype) -> torch.dtype:
        """The dtype in which micro-batches add up: fp32 at least."""
        return torch.promote_types(dtype, torch.float32)
