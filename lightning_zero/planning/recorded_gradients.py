"""The gradients of a bucket in a planned step: tensors that have only a size and a place."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_zero import ops
from lightning_zero.planning.account import NOTHING, Account, Bytes
from lightning_zero.planning.lanes import RecordedLanes, RecordedTensor
from lightning_zero.sharding.forms import BucketForm
from lightning_zero.sharding.reduction import Reduction
from lightning_zero.sharding.sharded_gradient import notes_squares, sharded_gradient_dtype, squares_known
from lightning_zero.storage.disk_file import aligned
from lightning_zero.storage.nvme import tiles_at_work


class RecordedPieces(RecordedTensor):
    """Gradients that are not collected in one tensor."""


class RecordedGradients(Reduction[RecordedTensor, RecordedPieces]):
    """The gradients of one bucket, from their accumulation until they are cleared; see ``BucketGradients``.

    Attributes:
        reduction: the most bytes that a reduction has taken, for its buffer and the collective.
        known_squares: whether the squares of the sharded gradient were computed when it arrived.
    """

    def __init__(self, form: BucketForm, account: Account, lanes: RecordedLanes) -> None:
        super().__init__(form.dtype, form.placement)
        self.reduction = 0
        self.known_squares = False
        self._form = form
        self._account = account
        self._lanes = lanes
        self._unsharded: dict[int, RecordedTensor] = {}  # by index of the parameter: its `grad`
        self._sharded: RecordedTensor | None = None  # the reduced slice
        self._empty = True  # no slice has arrived since the gradients were cleared
        self._reducing = False  # whether a reduction is being submitted that goes on beside the training

    @property
    def sharded(self) -> Bytes:
        """Memory of the sharded gradient, which is kept for all steps."""
        return NOTHING if self._sharded is None else self._sharded.amount

    @property
    def sharded_dtype(self) -> torch.dtype | None:
        """Dtype of the sharded gradient; ``None`` before the first reduction."""
        return None if self._sharded is None else self._sharded.dtype

    @property
    def expected(self) -> int:
        """The number of gradients that a backward computes for parameters that an optimizer may update."""
        return sum(p.requires_grad for p in self._form.parameters) if self._form.spec.optimized else 0

    def arrive(self, index: int) -> None:
        """Notes that the backward of parameter ``index`` has run."""
        gradient = RecordedTensor(self._form.parameters[index].numel(), self._dtype)
        if index in self._unsharded:  # it is added to that of an earlier micro-batch
            self._account.touch(gradient.amount)
        else:
            self._unsharded[index] = self._take(gradient)

    def clear(self) -> None:
        """Forgets the sharded gradient; its memory is kept for the next step."""
        self._empty = True

    def _beside(self, job: Callable[[], None]) -> None:
        self._reducing = self._is_beside
        job()
        if self._is_beside:
            self._lanes.end_reduction()
        self._reducing = False

    def _make_room(self, dtype: torch.dtype, more: bool) -> None:
        self._make_sharded(dtype, not self._empty or (more and self._placement.rests_gradients))

    def _zeros(self, dtype: torch.dtype) -> RecordedTensor:
        return self._take(RecordedTensor(self._form.layout.padded_numel, dtype))

    def _add_unsharded(self, total: RecordedTensor) -> None:
        for gradient in self._unsharded.values():
            self._give(gradient)
        self._unsharded = {}

    def _take_unsharded(self, dtype: torch.dtype) -> RecordedTensor:
        if not self._placement.reduces_pieces:
            buffer = self._zeros(dtype)
            self._add_unsharded(buffer)
            return buffer
        pieces = RecordedPieces(sum(gradient.numel for gradient in self._unsharded.values()), self._dtype)
        self._unsharded = {}
        return self._convert(pieces, dtype)

    def _merge(self, total: RecordedTensor, values: RecordedTensor) -> RecordedTensor:
        self._let_go(values)
        return total

    def _convert(self, values: RecordedTensor, dtype: torch.dtype) -> RecordedTensor:
        if values.dtype == dtype:
            return values
        converted = self._take(values._replace(dtype=dtype))  # both are there for a moment
        self._let_go(values)
        return converted

    def _reduce_scatter(self, gradients: RecordedTensor) -> RecordedTensor:
        dtype = gradients.dtype
        self._exchange(gradients, out=False)
        return self._take(RecordedTensor(self._form.layout.shard_numel, dtype))

    def _exchange(self, gradients: RecordedTensor, out: bool) -> None:
        shard, dtype, layout = self._placement.mesh.shard, gradients.dtype, self._form.layout
        nbytes = layout.padded_numel * dtype.itemsize
        in_pieces = isinstance(gradients, RecordedPieces)
        scratch = shard.scratch(nbytes, dtype, self._placement.device, in_pieces, out)
        in_place = in_pieces and dtype == self._dtype
        self.reduction = max(self.reduction, scratch + (0 if in_place else gradients.nbytes))
        shard.count("reduce_scatter", nbytes)
        self._account.touch(Bytes(device=scratch))
        if self._is_beside and self._form.layout.shards > 1:
            self._lanes.keep(gradients)
        else:
            self._give(gradients)  # with one shard it becomes the slice

    def _reduce_to_sharded(self, gradients: RecordedTensor) -> None:
        self._make_sharded(gradients.dtype, summed=not self._empty)
        self._exchange(gradients, out=True)
        self.known_squares = self._empty = False

    def _sum_replicas(self, shard: RecordedTensor) -> None:
        replica, device = self._placement.mesh.replica, self._placement.device
        replica.count("all_reduce", shard.nbytes + replica.padding(shard.numel, device) * shard.dtype.itemsize)
        self._account.touch(Bytes(device=replica.scratch(shard.nbytes, shard.dtype, device, out=True)))

    def _keep(self, shard: RecordedTensor, more: bool) -> None:
        """Adds a reduced slice to the sharded gradient; see ``ShardedGradient``."""
        placement, store = self._placement, self._placement.optimizer_store
        sharded = self._make_sharded(shard.dtype, not self._empty or (more and placement.rests_gradients))
        if not self._empty and store.device != self._placement.device:
            self._lanes.add_up(shard, sharded)
        passes = notes_squares(placement, sharded.dtype, not self._empty, more)
        self.known_squares = squares_known(placement, not self._empty, more) or passes
        if passes and not self._empty and sharded.memory == "disk":  # a piece of the sum may lie in two tiles
            self._account.touch(Bytes(host=min(ops.SQUARES_PIECE, shard.numel) * sharded.dtype.itemsize))
        self._move_tiles(reads=not self._empty)
        moved = (sharded if self._empty else shard).nbytes  # it is converted before, or when it is added
        if placement.executor.overlaps and store.memory == "host" and moved != shard.nbytes:
            tile = store.tile if sharded.memory == "disk" and store.tile else shard.numel
            self._account.touch(Bytes(device=min(tile, shard.numel) * sharded.dtype.itemsize))  # by the device
        self._empty = False
        if store.memory == "host":
            self._lanes.let_go(shard, moved)
        else:
            self._let_go(shard)

    def _make_sharded(self, values: torch.dtype, summed: bool) -> RecordedTensor:
        """The sharded gradient, allocated or converted for ``values``; see ``sharded_gradient_dtype``."""
        placement = self._placement
        dtype = sharded_gradient_dtype(placement.precision.grad_dtype, values, summed)
        if self._sharded is None:
            numel, pins = self._form.layout.shard_numel, placement.optimizer_store.pins
            self._sharded = self._take(RecordedTensor(numel, dtype, placement.gradient_memory, pins))
            self._lanes.rest(self._sharded.amount.disk)
        elif torch.promote_types(self._sharded.dtype, dtype) != self._sharded.dtype:
            before = self._sharded.amount.disk
            self._sharded = self._convert(self._sharded, dtype)
            self._lanes.rest(self._sharded.amount.disk - before)
        return self._sharded

    def clamp(self) -> None:
        """Notes that the sharded gradient, if any has arrived, becomes at least fp32 and is changed in place."""
        if self._sharded is not None and not self._empty:
            self._make_sharded(torch.float32, summed=False)
            self._move_tiles(reads=True)

    def read_squares(self) -> None:
        """Notes that the sharded gradient is read for its norm, if it rests on a disk."""
        if (tile := self.tile) is not None:
            piece = min(ops.SQUARES_PIECE, self._form.layout.shard_numel)
            self._account.touch(Bytes(host=piece * tile.dtype.itemsize))
            self._move_tiles(reads=True, writes=False)

    def _move_tiles(self, reads: bool, writes: bool = True) -> None:
        """Notes that all tiles of the sharded gradient are moved, if it rests on a disk."""
        if (tile := self.tile) is not None:
            number = tiles_at_work(tile.numel, self._form.layout.shard_numel) if reads else 1
            self._lanes.sum_tiles(number, aligned(tile.nbytes), (reads + writes) * self.sharded.disk)

    @property
    def tile(self) -> RecordedTensor | None:
        """A tile of the sharded gradient, if it rests on a disk."""
        size = self._placement.optimizer_store.tile
        if size is None or self._sharded is None or not self.sharded.disk:
            return None
        return self._sharded._replace(numel=min(size, self._sharded.numel), memory="host")

    def _take(self, tensor: RecordedTensor) -> RecordedTensor:
        self._account.take(tensor.amount)
        return tensor

    def _let_go(self, tensor: RecordedTensor) -> None:
        """Gives memory back; with one shard a reduction beside the training keeps what it has collected."""
        (self._lanes.keep if self._reducing and self._form.layout.shards == 1 else self._give)(tensor)

    def _give(self, tensor: RecordedTensor) -> None:
        self._account.give(tensor.amount)
