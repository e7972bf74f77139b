"""Access to the shards of masters and optimizer state on all ranks, to gather them or to write them in slices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.archive import lazy_tensors
from lightning_zero.checkpoint.errors import CheckpointError, on_first
from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.checkpoint.tiles import TILE, split_range
from lightning_zero.engine import Engine, Shadow
from lightning_zero.engine.runtime import ENGINES
from lightning_zero.sharding import Bucket, Mesh
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.storage import Memory
from lightning_zero.update import BlockShardState, OwnedTensor, ScaleLayout, Updater

PIECE = 2 * TILE  # bytes of a part that :meth:`SharedValues.gather_piece` gathers


class Key(NamedTuple):
    """Identifies values that ranks hold together, normally one value for each element of a bucket.

    These are the bucket's masters, the values of a ``shadow``, or the ``state`` of an ``optimizer``. With ``owned`` it
    is a tensor in the optimizer state of parameter ``param``, which lies entirely on one rank. With ``part`` it is a
    part of 8-bit optimizer state: "codes" or "scales". With ``piece`` it is only the piece of this number, as
    :meth:`SharedValues.gather_piece` counts them.
    """

    engine: int
    bucket: int
    dtype: torch.dtype
    optimizer: int | None = None
    state: str = ""
    shadow: int | None = None
    param: int = 0
    owned: OwnedTensor | None = None
    piece: int | None = None
    part: str = ""

    @property
    def piece_numel(self) -> int:
        """Number of elements of a piece; the last piece may be shorter."""
        return PIECE // self.dtype.itemsize


class Slice(NamedTuple):
    """A range of a parameter's elements, in memory order, that this rank owns."""

    first: int  # first element in the parameter
    start: int  # first element in this rank's shard
    stop: int  # the element after the last in this rank's shard


class _Held(NamedTuple):
    """This rank's shard of some values."""

    read: Callable[[int, int], Tensor]  # returns elements [start, stop) of the shard
    memory: Memory  # in which they are read


@dataclass(frozen=True, eq=False)
class SharedValues(ABC):
    """Values that ranks hold together; a source of lazy tensors."""

    engine: Engine
    key: Key

    @property
    def bucket(self) -> Bucket:
        """The bucket with the parameters that the values belong to."""
        return self.engine.buckets[self.key.bucket]

    @property
    def live(self) -> bool:
        """Whether the values are parameters that are unsharded on every rank, so that reading them needs no gather."""
        return False

    @abstractmethod
    def form(self, param: int) -> MemoryFormat:
        """Shape and strides of the tensor of parameter ``param``."""

    def tensor(self, param: int) -> LazyTensor:
        """A lazy tensor with the values of parameter ``param``."""
        form = self.form(param)
        return LazyTensor(
            self, param, torch.empty_strided(form.shape, form.strides, dtype=self.key.dtype, device="meta")
        )

    def fetch(self, param: int) -> Tensor:
        """The full values of parameter ``param``: the live tensor, or a copy on the CPU. Collective unless live."""
        full = follow_first([self.engine], across_ranks(self))
        assert full is not None
        return self.cut(full, param)

    @abstractmethod
    def cut(self, full: Tensor, param: int) -> Tensor:
        """Copy the tensor of parameter ``param`` from ``full``, the result of :meth:`gather`, to the CPU."""

    @abstractmethod
    def place(self, param: int) -> tuple[int, int]:
        """Start and stop of the elements for parameter ``param`` in the result of :meth:`gather`."""

    @abstractmethod
    def gather(self) -> Tensor:
        """Gather all values: 1-D, on the device. Collective."""

    @torch.no_grad()
    def gather_piece(self, number: int) -> Tensor:
        """Gather piece ``number`` of :meth:`gather`'s result: at most :data:`PIECE` bytes, on the CPU. Collective."""
        first = number * self.key.piece_numel
        return self._gathered(first, min(first + self.key.piece_numel, self._ranges[-1][1])).to("cpu")

    def _gathered(self, first: int, stop: int) -> Tensor:
        """Gather elements ``[first, stop)`` of the result of :meth:`gather`: 1-D, on the device. Collective."""
        placement, held, ranges = self.bucket.placement, self._held, self._ranges
        piece = torch.empty(stop - first, dtype=self.key.dtype, device=placement.device)
        shard = placement.mesh.shard
        for rank, (begin, end) in enumerate(ranges):
            low, high = max(begin, first), min(end, stop)
            if low < high:
                target = piece[low - first : high - first]
                if rank == shard.rank:
                    values = held.read(low - begin, high - begin)
                    placement.copy(target, values, (held.memory, "device"), self.bucket.name)
                shard.broadcast_(target, f"gather state of {self.bucket.name}", rank)
        return piece

    @property
    @abstractmethod
    def _held(self) -> _Held:
        """The shard of this rank."""

    @property
    @abstractmethod
    def _ranges(self) -> list[tuple[int, int]]:
        """Lists, by rank of the shard group, the range of the result of :meth:`gather` that the rank holds."""

    @abstractmethod
    def slices(self, param: int) -> Iterator[Slice]:
        """The slices of parameter ``param`` that this rank writes; replicas with the same values share the work."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of this rank's shard, 1-D."""

    def tiles(self, start: int, stop: int) -> Iterator[Tensor]:
        """Read elements ``[start, stop)`` of this rank's shard in tiles."""
        for low, high in split_range(start, stop, TILE // self.key.dtype.itemsize):
            yield self.read(low, high)

    def _share(self, numel: int) -> tuple[int, int]:
        """Start and stop of the part of ``numel`` elements, which all replicas hold, that this replica writes."""
        replica = self.bucket.placement.mesh.replica
        return numel * replica.rank // replica.size, numel * (replica.rank + 1) // replica.size


class ShardedValues(SharedValues):
    """One value for every element of a bucket, of which each rank holds a shard."""

    @property
    def live(self) -> bool:
        weights = self.key.optimizer is None and self.key.shadow is None
        return weights and not self.bucket.shards_params and self.bucket.dtype == self.key.dtype

    def form(self, param: int) -> MemoryFormat:
        return self.bucket.formats[param]

    def tensor(self, param: int) -> LazyTensor:
        if self.live:
            return LazyTensor(self, param, self.bucket.parameters[param].detach())
        return super().tensor(param)

    def fetch(self, param: int) -> Tensor:
        return self.bucket.parameters[param].detach() if self.live else super().fetch(param)

    def place(self, param: int) -> tuple[int, int]:
        layout = self.bucket.layout
        return layout.offsets[param], layout.offsets[param] + layout.numels[param]

    def cut(self, full: Tensor, param: int) -> Tensor:
        return self.bucket.view(full, param).to("cpu", copy=True)

    @torch.no_grad()
    def gather(self) -> Tensor:
        held = self._held
        return self.bucket.gather_read(held.read, self.key.dtype, held.memory)

    def read(self, start: int, stop: int) -> Tensor:
        return self._held.read(start, stop)

    @property
    def _held(self) -> _Held:
        bucket, key = self.bucket, self.key
        bucket.await_update()
        if self.live:  # the shard includes edits that a hook has made in the parameters
            return _Held(bucket.shard.read, bucket.placement.shard_memory)
        if key.shadow is not None:
            shadow = self.engine.shadows[key.shadow]
            return _Held(lambda start, stop: shadow.shards[key.bucket][start:stop], shadow.memory_of(bucket))
        if key.optimizer is None:
            bucket.await_master()
            return _Held(bucket.master.read, bucket.master.memory)
        updater = self.engine.updaters[key.optimizer]
        return _Held(partial(updater.read_flat, bucket, key.state, key.dtype), updater.state_of(bucket).memory)

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        layout = self.bucket.layout
        return [layout.shard_range(rank) for rank in range(layout.shards)]

    def slices(self, param: int) -> Iterator[Slice]:
        low, high = self._share(self.bucket.layout.shard_numel)
        for segment in self.bucket.segments:
            start, stop = max(segment.start, low), min(segment.stop, high)
            if segment.param == param and start < stop:
                yield Slice(segment.param_start + start - segment.start, start, stop)


class CodeValues(ShardedValues):
    """The 8-bit codes of optimizer state in blocks; for each parameter a 1-D tensor in the parameter's memory order."""

    def form(self, param: int) -> MemoryFormat:
        return _one_dimensional(self.bucket.layout.numels[param])

    def cut(self, full: Tensor, param: int) -> Tensor:
        return full[slice(*self.place(param))].to("cpu", copy=True)

    @property
    def _held(self) -> _Held:
        state = _blocks_of(self)
        return _Held(partial(state.read_codes, self.key.state), state.memory)


class ScaleValues(SharedValues):
    """The scales of optimizer state in blocks; for each parameter a 1-D tensor, one scale per block."""

    @property
    def _layout(self) -> ScaleLayout:
        return ScaleLayout.of(self.bucket.layout)

    def form(self, param: int) -> MemoryFormat:
        start, stop = self.place(param)
        return _one_dimensional(stop - start)

    def place(self, param: int) -> tuple[int, int]:
        return self._layout.place(param)

    def cut(self, full: Tensor, param: int) -> Tensor:
        return full[slice(*self.place(param))].to("cpu", copy=True)

    @torch.no_grad()
    def gather(self) -> Tensor:
        return self._gathered(0, self._ranges[-1][1])

    @property
    def _held(self) -> _Held:
        return _Held(self.read, _blocks_of(self).memory)

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        return self._layout.ranges

    def slices(self, param: int) -> Iterator[Slice]:
        layout, rank = self._layout, self.bucket.placement.mesh.shard.rank
        begin, end = layout.ranges[rank]
        low, high = self._share(end - begin)
        for piece in layout.pieces[param]:
            start, stop = max(piece.first - begin, low), min(piece.first - begin + piece.blocks, high)
            if piece.rank == rank and start < stop:
                yield Slice(begin + start - layout.place(param)[0], start, stop)

    def read(self, start: int, stop: int) -> Tensor:
        return _blocks_of(self).read_scales(self.key.state, start, stop)


def _blocks_of(values: SharedValues) -> BlockShardState:
    """This rank's optimizer state in blocks, from which codes and scales are read."""
    assert values.key.optimizer is not None
    state = values.engine.updaters[values.key.optimizer].state_of(values.bucket)
    assert isinstance(state, BlockShardState)
    return state


def _one_dimensional(numel: int) -> MemoryFormat:
    return MemoryFormat(torch.Size([numel]), (1,))


class OwnedValues(SharedValues):
    """A tensor in the optimizer state of a parameter that lies entirely on one rank of the shard group."""

    @property
    def _owned(self) -> OwnedTensor:
        assert self.key.owned is not None
        return self.key.owned

    @property
    def _updater(self) -> Updater:
        assert self.key.optimizer is not None
        return self.engine.updaters[self.key.optimizer]

    def form(self, param: int) -> MemoryFormat:
        return self._owned.form

    def place(self, param: int) -> tuple[int, int]:
        return 0, self._owned.form.shape.numel()

    def cut(self, full: Tensor, param: int) -> Tensor:
        return self._owned.form.view(full.to("cpu", copy=True))

    @torch.no_grad()
    def gather(self) -> Tensor:
        return self._updater.gather_owned(self.bucket, self.key.param, self._owned)

    @property
    def _held(self) -> _Held:
        return _Held(self.read, self._updater.state_of(self.bucket).memory)

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        layout, (first, stop) = self.bucket.layout, self.place(self.key.param)
        owner = layout.owner(self.key.param)
        return [(first if rank <= owner else stop, first if rank < owner else stop) for rank in range(layout.shards)]

    def slices(self, param: int) -> Iterator[Slice]:
        if self.bucket.layout.owner(self.key.param) == self.bucket.placement.mesh.shard.rank:
            low, high = self._share(self._owned.form.shape.numel())
            if low < high:
                yield Slice(low, low, high)

    def read(self, start: int, stop: int) -> Tensor:
        return self._updater.owned(self.bucket, self.key.param, self._owned, start, stop)


def source_of(tensor: LazyTensor, engines: Sequence[Engine]) -> SharedValues:
    """The source of a lazy tensor in a checkpoint of ``engines``.

    Raises:
        ValueError: the tensor belongs to none of these engines.
    """
    source = tensor.source
    if not isinstance(source, SharedValues) or source.engine not in engines:
        raise ValueError(f"{tensor} belongs to another engine; put a clone into the checkpoint")
    return source


def across_ranks(values: SharedValues) -> Key:
    """The key of ``values`` that is the same on all ranks: it gives the engine's number among those of its mesh."""
    return values.key._replace(engine=values.engine.shared_number)


def values_of(key: Key, engines: Sequence[Engine]) -> SharedValues:
    """The values that a rank has identified by :func:`across_ranks`.

    Args:
        key: the key.
        engines: the engines of the checkpoint.

    Raises:
        CheckpointError: this rank no longer has the engine.
    """
    engine = _on_mesh(engines[0].placement.mesh, key.engine)
    parts = {"": ShardedValues, "codes": CodeValues, "scales": ScaleValues}
    kind = parts[key.part] if key.owned is None else OwnedValues
    return kind(engine, key._replace(engine=engine.number, piece=None))


def _on_mesh(mesh: Mesh, shared_number: int) -> Engine:
    """The engine with this number on the mesh.

    Neither its position nor its number in the process would do: ranks may have engines on meshes of their own, and they
    lose one that was dropped at different times, when their cyclic garbage collectors run.
    """
    for engine in ENGINES.in_order():
        if engine.placement.mesh is mesh and engine.shared_number == shared_number:
            return engine
    raise CheckpointError(
        f"rank {mesh.world.rank} no longer has the values of sharded module {shared_number}, which the checkpoint of "
        "rank 0 holds: give all ranks the same modules to save, and release none before the save has ended"
    )


def masters(engine: Engine, shadow: Shadow | None = None) -> list[ShardedValues]:
    """The full-precision weights of each bucket, or the values of ``shadow`` instead of them."""
    if shadow is None:
        keys = [Key(engine.number, number, bucket.master.dtype) for number, bucket in enumerate(engine.buckets)]
    else:
        shards = enumerate(shadow.shards)
        keys = [Key(engine.number, number, shard.dtype, shadow=shadow.number) for number, shard in shards]
    return [ShardedValues(engine, key) for key in keys]


def follow_first(engines: Sequence[Engine], wanted: Key | None = None) -> Tensor | None:
    """Take part in the gathers that rank 0 requests, until it requests what this rank wants, too. Collective.

    Hooks that change a checkpoint may run on rank 0 only. The other ranks call this before they write, and so take part
    in gathering the values that the hooks read.

    Args:
        engines: the engines that hold the values; if there are none, nothing happens.
        wanted: key of the values, or of a piece of them, by :func:`across_ranks`; ``None``: rank 0 ends the gathers,
            other ranks wait for that end.

    Returns:
        The gathered values of ``wanted``, 1-D; ``None`` if it is ``None``.

    Raises:
        CheckpointError: a rank reads values that rank 0 does not read; raised on all ranks.
    """
    while engines:
        intents = engines[0].placement.mesh.world.all_gather_object(wanted, "read a checkpoint")
        first = intents[0]
        if first is None:
            if others := [rank for rank, key in enumerate(intents) if key is not None]:
                raise CheckpointError(
                    f"rank {others[0]} reads sharded values of the checkpoint, {intents[others[0]]}, which rank 0 does "
                    "not: read them on rank 0 alone, or on all ranks in one order. See `on_save_checkpoint`"
                )
            return None
        values = values_of(first, engines)
        gathered = values.gather() if first.piece is None else values.gather_piece(first.piece)
        if first == wanted:
            return gathered
    return None


def fetch_for_first(checkpoint: Any, engines: Sequence[Engine]) -> None:
    """Gather the values of all lazy tensors in rank 0's ``checkpoint`` on rank 0. Collective.

    This is for writers that do not know lazy tensors.

    Raises:
        CheckpointError: rank 0's checkpoint cannot be pickled; raised on all ranks.
    """
    if not engines:
        return
    sources: dict[Key, list[tuple[SharedValues, LazyTensor]]] = {}

    def find() -> None:
        for tensor in lazy_tensors(checkpoint):
            if isinstance(tensor.source, SharedValues) and not tensor.source.live:
                sources.setdefault(tensor.source.key, []).append((tensor.source, tensor))

    on_first(engines[0].placement.mesh.world, find, "find the tensors in a checkpoint")
    for found in sources.values():  # none on other ranks
        full = follow_first(engines, across_ranks(found[0][0]))
        assert full is not None
        values: dict[int, Tensor] = {}  # by parameter, of which there may be several tensors
        for source, tensor in found:
            if tensor.param not in values:
                values[tensor.param] = source.cut(full, tensor.param)
            tensor.fetched = values[tensor.param]
    follow_first(engines)


def full_on_first(state: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """Convert a state dict with lazy tensors to one with ordinary tensors on rank 0. Collective.

    Returns:
        The full state dict on rank 0; on other ranks it lacks the tensors that are sharded.
    """
    fetch_for_first(state, [engine])
    first = engine.placement.mesh.world.rank == 0

    def resolve(tree: Any) -> Any:
        if isinstance(tree, dict):
            wanted = {k: v for k, v in tree.items() if first or not isinstance(v, LazyTensor) or v.source.live}
            return {key: resolve(value) for key, value in wanted.items()}
        return tree.fetch() if isinstance(tree, LazyTensor) else tree

    resolved: dict[str, Any] = resolve(state)
    return resolved
