"""Decides the memory and dtype of each tensor of a bucket, and copies between memories.

This is the only place of these decisions: buckets make their tensors by them, and :func:`lightning_zero.planning.plan`
counts the tensors by the same decisions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
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
    device_type,
)
from lightning_zero.storage.nvme import tiles_ahead
from lightning_zero.storage.staged import staged_tile
from lightning_zero.storage.timers import Phase

_CACHE_LINE = 64  # bytes; the alignment of torch's own CPU allocations


class MasterForm(NamedTuple):
    """The form in which the full-precision values of a shard are kept.

    Attributes:
        dtype: dtype of the values.
        device: device on which updates compute with the values.
        pieces: dtypes of the tensors in the optimizer's store that hold the values, each of the shard's length; empty
            if the shard is its own master.
        tile: number of elements of the shard that are copied to the host together because they are the high part of
            the values; 0 if no such copy is needed.
        crosses: whether the values rest in host memory and are copied to a shard on the device without conversion.
            Otherwise copies to the device are converted in temporary host memory first.
    """

    dtype: torch.dtype
    device: torch.device
    pieces: tuple[torch.dtype, ...] = ()
    tile: int = 0
    crosses: bool = False


class BucketPlacement(NamedTuple):
    """Groups, policies, device, stores and executor that the buckets of one engine share.

    Attributes:
        mesh: process groups.
        sharding: which tensors are sharded.
        precision: dtypes.
        device: device on which the model computes.
        optimizer_store: store of masters, optimizer state and, unless they rest on a disk, sharded gradients.
        param_store: store of parameter shards at stage 3.
        executor: runs copies and updates.
        whole: whether each parameter lies entirely in one shard; single buckets may have this too.
        trains: whether there is training. Without it there are no masters: parameters exist only in the dtype in which
            they are computed with.
        block: number of elements in a block of optimizer state; no shard border cuts a block of a parameter.
        offload_fraction: of the elements that optimizers update, the fraction that rests in the stores, rounded up to
            whole buckets; the other buckets are resident on the device.
        split_masters: whether masters are split for optimizers that do not decide this themselves, where possible.
        gradients_rest: whether sharded gradients rest on a disk if the optimizer state does; ``None``: only if those
            of a rank do not fit into the store's memory for tiles in transit.
        accumulate_on_device: whether reduced gradients that rest elsewhere are summed over micro-batches on the device.
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
    accumulate_on_device: bool = False

    def persistent(self) -> BucketPlacement:
        """The placement of parameters that stay unsharded at stage 3."""
        return self._replace(sharding=dataclasses.replace(self.sharding, shard_params=False))

    def resident(self) -> BucketPlacement:
        """The placement of parameters whose state stays on the device while that of others is offloaded."""
        store = ResidentStore(self.device)
        return self._replace(optimizer_store=store, param_store=store)

    def layout(self, numels: tuple[int, ...], dtype: torch.dtype) -> FlatLayout:
        """The layout of a bucket whose parameters have these numbers of elements."""
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
            target: a tensor of the shape of ``source``, in any dtype.
            source: the tensor to copy.
            memories: the memories of ``source`` and ``target``; on CPU ranks their devices do not tell these apart.
            what: purpose of the copy, for messages and traces.
            after: tickets of work on either tensor that must end before.
        """
        with self._copying(memories):
            if memories == ("host", "device"):
                return self.executor.fetch(target, source, what, after)
            if memories == ("device", "host"):
                return self.executor.commit(target, source, what, after)
            for ticket in after:
                (ticket.wait if memories[1] == "device" else ticket.synchronize)()
            target.copy_(source)  # both are in one memory: the current thread or stream copies
        return DONE

    def copy(self, target: Tensor, source: Tensor, memories: tuple[Memory, Memory], what: str) -> None:
        """Copy ``source`` to ``target`` as :meth:`move` does, and wait until the host may read and change both."""
        self.await_host(self.move(target, source, memories, what))

    def await_host(self, work: Ticket) -> None:
        """Let the host wait for ``work``, a copy from or to its memory."""
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
        add: Callable[[Tensor, Tensor], object] = ops.accumulate_,
    ) -> Ticket:
        """Begin to add ``source`` to ``target``.

        Args:
            target: a tensor in ``memory``.
            source: a tensor of the same shape on the device.
            memory: as above; the sum is computed there.
            what: purpose, for messages and traces.
            after: tickets of work on ``target`` that must end before.
            lane: lane in which a sum in host memory is computed.
            add: adds its second argument, in the memory of ``target``, to ``target``, its first one.
        """
        if memory == "device":
            for ticket in after:
                ticket.wait()
            add(target, source)
            return DONE
        with self._copying(("device", memory)):
            if source.device == target.device:
                return self.executor.submit(partial(add, target, source), lane, what, after)
            return self.executor.receive(source, partial(add, target), what, after, lane)

    def on_host(self, values: Tensor, what: str) -> Tensor:
        """A copy of ``values`` on the CPU, or ``values`` itself if it is there."""
        if values.device.type == "cpu":
            return values
        copy = torch.empty_like(values, device="cpu")
        self.copy(copy, values, ("device", "host"), what)
        return copy

    def on_device(self, values: Tensor, what: str) -> Tensor:
        """A copy of ``values`` on the device where the model computes, or ``values`` itself if it is there."""
        if values.device.type == self.device.type:
            return values.to(self.device)
        copy = torch.empty_like(values, device=self.device)
        self.copy(copy, values, ("host", "device"), what)
        return copy

    def _copying(self, memories: tuple[Memory, Memory]) -> AbstractContextManager[None]:
        return self.mesh.timers.phase(Phase.HOST_COPY) if "host" in memories else nullcontext()

    def tiles_ahead(self, dtype: torch.dtype) -> int:
        """Number of tiles of a parameter shard of ``dtype`` to fetch from a disk ahead of its gather; 0 without one."""
        store = self.param_store
        return 0 if store.tile is None else tiles_ahead(store.passing_bytes, dtype.itemsize)

    @property
    def updates_apart(self) -> bool:
        """Whether updates are computed on another type of device than the model, namely on the host."""
        return self.optimizer_store.device.type != self.device.type

    @property
    def collects_slices(self) -> bool:
        """Whether slices of reduced gradients are summed over micro-batches before they become the sharded gradient."""
        leaves = self.optimizer_store.memory != "device" and not device_type(self.device).shares_host_memory
        return self.mesh.replica.size > 1 or (self.accumulate_on_device and leaves)

    @property
    def reduces_pieces(self) -> bool:
        """Whether unsharded gradients are reduced from where they lie."""
        return self.mesh.shard.takes_pieces(self.device)

    def sums_where_kept(self, dtype: torch.dtype) -> bool:
        """Whether gradients of ``dtype`` are added to the sharded gradient in the pass that sums over ranks."""
        kept = ops.sums_in_place(dtype) and self.precision.grad_dtype in (None, torch.float32)
        return kept and self.reduces_pieces and not (self.collects_slices or self.rests_gradients)

    @property
    def rests_gradients(self) -> bool:
        """Whether sharded gradients rest on a disk; False while ``gradients_rest`` is ``None``."""
        return bool(self.gradients_rest) and self.optimizer_store.tile is not None

    @property
    def gradient_memory(self) -> Memory:
        """The memory in which sharded gradients rest."""
        return self.optimizer_store.resting_memory if self.rests_gradients else self.optimizer_store.memory

    def widest_gradient(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of sharded gradients of parameters of ``dtype`` after several micro-batches."""
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
        """The device of parameter shards."""
        return self.param_store.device if self.sharding.shard_params else self.device

    def master(self, initial: torch.dtype, dtype: torch.dtype, optimized: bool) -> MasterForm:
        """The form of the master of a shard.

        Args:
            initial: dtype of the parameters in the user's module.
            dtype: dtype of the shard.
            optimized: whether an optimizer may update the shard.
        """
        if not self.trains:
            return MasterForm(dtype, self.shard_device)
        store = self.optimizer_store
        # A frozen parameter keeps its full precision too, since checkpoints contain it; bf16 does not hold fp16.
        rounds = torch.promote_types(initial, dtype) != dtype
        cast = self.precision.needs_master(dtype) and (optimized or rounds)
        # Updates can work on the shards directly if these rest in the memory in which the optimizer's store computes.
        shards = self.param_store
        beside = shards is store or (shards.exact and shards.memory == store.memory)
        moved = (store.device != self.shard_device or store.exact) and not (self.sharding.shard_params and beside)
        if cast or (optimized and moved):
            values = torch.float32 if cast else dtype
            crosses = values == dtype and (store.memory, self.shard_memory) == ("host", "device")
            return MasterForm(values, store.device, (values,), crosses=crosses)
        return MasterForm(dtype, self.shard_device)

    def rounds(self, initial: torch.dtype, dtype: torch.dtype) -> bool:
        """Whether the cast to ``dtype`` rounds values without a master to keep the originals."""
        return not self.trains and initial != dtype and self.precision.needs_master(dtype)

    def split_master(self, dtype: torch.dtype) -> MasterForm:
        """The form of the split master of a 16-bit shard, whose high part is the shard if possible.

        If the remainders rest on a disk and the shard does not rest where the host computes, the high part is a tensor
        of its own on the disk, so that its tiles can be read ahead.
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
            dtype: dtype of the parameters.
            summed: whether unsharded gradients of several micro-batches were summed (see :meth:`sum_dtype`).
        """
        # A sum in fp32 is sent in fp32, since the sum of two finite fp16 gradients may overflow fp16.
        return self.precision.reduce_dtype or (self.sum_dtype(dtype) if summed else dtype)

    @staticmethod
    def sum_dtype(dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of several micro-batches are summed: ``dtype``, but at least fp32."""
        return torch.promote_types(dtype, torch.float32)
