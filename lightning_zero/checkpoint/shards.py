"""The shards of masters and optimizer state that ranks hold, to be gathered, or written in slices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.archive import lazy_tensors
from lightning_zero.checkpoint.errors import CheckpointError
from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.checkpoint.tiles import TILE, tiles
from lightning_zero.engine import Engine, Shadow
from lightning_zero.engine.runtime import ENGINES
from lightning_zero.sharding import Bucket
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.storage import Memory
from lightning_zero.update import BlockShardState, OwnedTensor, ScaleLayout, ShardUpdater

PIECE = 2 * TILE  # bytes of a part that is gathered apart


class Key(NamedTuple):
    """Names one value per element of a bucket: its masters, a shadow's, or an optimizer's state.

    Or the tensor ``owned`` of the state of a parameter that lies whole on one rank, or a ``part`` of state in blocks,
    "codes" or "scales". With ``piece`` only the one of this
    number is meant, as :meth:`SharedValues.gather_piece` counts them.
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
        """Elements of a piece, but for the last one."""
        return PIECE // self.dtype.itemsize


class Slice(NamedTuple):
    """A range of a parameter's elements, in the order of memory, which this rank owns."""

    first: int  # in the parameter
    start: int  # in this rank's shard
    stop: int


class _Held(NamedTuple):
    """This rank's shard of some values: how a range of it is read, and the memory in which it rests."""

    read: Callable[[int, int], Tensor]
    memory: Memory


@dataclass(frozen=True, eq=False)
class SharedValues(ABC):
    """Values that ranks hold together: a source of lazy tensors."""

    engine: Engine
    key: Key

    @property
    def bucket(self) -> Bucket:
        """The bucket whose parameters they belong to."""
        return self.engine.buckets[self.key.bucket]

    @property
    def live(self) -> bool:
        """Whether parameters that are unsharded on every rank are the values."""
        return False

    @abstractmethod
    def form(self, param: int) -> MemoryFormat:
        """Shape and strides of the tensor of parameter ``param``."""

    def tensor(self, param: int) -> LazyTensor:
        """The values of parameter ``param``, not looked up yet."""
        form = self.form(param)
        return LazyTensor(
            self, param, torch.empty_strided(form.shape, form.strides, dtype=self.key.dtype, device="meta")
        )

    def fetch(self, param: int) -> Tensor:
        """All values of parameter ``param``: the live tensor, or a copy on the CPU. Collective unless live."""
        full = follow_first([self.engine], across_ranks(self))
        assert full is not None
        return self.cut(full, param)

    @abstractmethod
    def cut(self, full: Tensor, param: int) -> Tensor:
        """A copy of the tensor of parameter ``param`` in what :meth:`gather` gave; on the CPU."""

    @abstractmethod
    def place(self, param: int) -> tuple[int, int]:
        """Where the elements for parameter ``param`` begin and end in what :meth:`gather` gives."""

    @abstractmethod
    def gather(self) -> Tensor:
        """All values; 1-D, on the device. Collective."""

    @torch.no_grad()
    def gather_piece(self, number: int) -> Tensor:
        """Those of :meth:`gather` in piece ``number``, :data:`PIECE` bytes or what is left; on the CPU. Collective."""
        first = number * self.key.piece_numel
        return self._gathered(first, min(first + self.key.piece_numel, self._ranges[-1][1])).to("cpu")

    def _gathered(self, first: int, stop: int) -> Tensor:
        """Elements ``[first, stop)`` of those of :meth:`gather`; on the device. Collective."""
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
        """Lists the part of what :meth:`gather` gives that each rank of the shard group holds, in rank order."""

    @abstractmethod
    def slices(self, param: int) -> Iterator[Slice]:
        """The slices of parameter ``param`` that this rank writes; replicas, which hold the same, share the work."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of what this rank holds, 1-D."""

    def tiles(self, start: int, stop: int) -> Iterator[Tensor]:
        """Read ``[start, stop)`` of what this rank holds a tile at a time."""
        for low, high in tiles(start, stop, TILE // self.key.dtype.itemsize):
            yield self.read(low, high)

    def _share(self, numel: int) -> tuple[int, int]:
        """The part of ``numel`` elements, which all replicas hold, that this one writes."""
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
        if self.live:  # with what a hook has changed in the parameters
            return _Held(bucket.shard.read, bucket.placement.shard_memory)
        if key.shadow is not None:
            shadow = self.engine.shadows[key.shadow]
            return _Held(lambda start, stop: shadow.shards[key.bucket][start:stop], shadow.memory_of(bucket))
        if key.optimizer is None:
            return _Held(bucket.master.read, bucket.master.memory)
        updater = self.engine.updaters[key.optimizer]
        assert isinstance(updater, ShardUpdater)
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
    """The 8-bit codes of optimizer state in blocks; of each parameter 1-D, in the order of its memory."""

    def form(self, param: int) -> MemoryFormat:
        return _one_dimensional(self.bucket.layout.numels[param])

    def cut(self, full: Tensor, param: int) -> Tensor:
        return full[slice(*self.place(param))].to("cpu", copy=True)

    @property
    def _held(self) -> _Held:
        state = _blocks_of(self)
        return _Held(partial(state.read_codes, self.key.state), state.memory)


class ScaleValues(SharedValues):
    """The scales of optimizer state in blocks, one for each that a segment touches; of each parameter 1-D."""

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
    """The state that codes and scales are read of."""
    assert values.key.optimizer is not None
    updater = values.engine.updaters[values.key.optimizer]
    assert isinstance(updater, ShardUpdater)
    state = updater.state_of(values.bucket)
    assert isinstance(state, BlockShardState)
    return state


def _one_dimensional(numel: int) -> MemoryFormat:
    return MemoryFormat(torch.Size([numel]), (1,))


class OwnedValues(SharedValues):
    """A tensor of the optimizer's state of a parameter that lies whole on one rank of the shard group."""

    @property
    def _owned(self) -> OwnedTensor:
        assert self.key.owned is not None
        return self.key.owned

    @property
    def _updater(self) -> ShardUpdater:
        assert self.key.optimizer is not None
        updater = self.engine.updaters[self.key.optimizer]
        assert isinstance(updater, ShardUpdater)
        return updater

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
    """The shards that hold the values of a tensor in a checkpoint of ``engines``.

    Raises:
        ValueError: from elsewhere.
    """
    source = tensor.source
    if not isinstance(source, SharedValues) or source.engine not in engines:
        raise ValueError(f"{tensor} belongs to another engine; put a clone into the checkpoint")
    return source


def across_ranks(values: SharedValues) -> Key:
    """The key by which other ranks know values: the engine is told by its place among those of its mesh."""
    return values.key._replace(engine=_on_mesh(values.engine).index(values.engine))


def values_of(key: Key, engines: Sequence[Engine]) -> SharedValues:
    """The values that a rank has named by :func:`across_ranks`.

    Args:
        key: that name.
        engines: of the checkpoint.
    """
    engine = _on_mesh(engines[0])[key.engine]
    parts = {"": ShardedValues, "codes": CodeValues, "scales": ScaleValues}
    kind = parts[key.part] if key.owned is None else OwnedValues
    return kind(engine, key._replace(engine=engine.number, piece=None))


def _on_mesh(engine: Engine) -> list[Engine]:
    """All engines of the mesh, in one order on all ranks, which may number them differently."""
    return [other for other in ENGINES.in_order() if other.placement.mesh is engine.placement.mesh]


def masters(engine: Engine, shadow: Shadow | None = None) -> list[ShardedValues]:
    """The full-precision weights, bucket by bucket, or what a shadow of the engine has in their place."""
    if shadow is None:
        keys = [Key(engine.number, number, bucket.master.dtype) for number, bucket in enumerate(engine.buckets)]
    else:
        shards = enumerate(shadow.shards)
        keys = [Key(engine.number, number, shard.dtype, shadow=shadow.number) for number, shard in shards]
    return [ShardedValues(engine, key) for key in keys]


def follow_first(engines: Sequence[Engine], wanted: Key | None = None) -> Tensor | None:
    """Gather what rank 0 reads of a checkpoint, until it reads what this rank wants, too. Collective.

    Hooks that add to a checkpoint may run on rank 0 alone. The other ranks wait for it before they write, and gather
    meanwhile what it asks for.

    Args:
        engines: hold the values; without any there is nothing to follow.
        wanted: what to return, gathered, as :func:`across_ranks` names it, or a piece of it; ``None``: rank 0 reads no
            more, the checkpoint is to be written.

    Raises:
        CheckpointError: on all ranks, where another rank reads what rank 0 does not.
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
    """Give rank 0 the values of all lazy tensors in its ``checkpoint``, for another writer than ours. Collective."""
    if engines and engines[0].placement.mesh.world.rank == 0:
        sources: dict[Key, list[tuple[SharedValues, LazyTensor]]] = {}
        for tensor in lazy_tensors(checkpoint):
            if isinstance(tensor.source, SharedValues) and not tensor.source.live:
                sources.setdefault(tensor.source.key, []).append((tensor.source, tensor))
        for found in sources.values():
            full = follow_first(engines, across_ranks(found[0][0]))
            assert full is not None
            for source, tensor in found:
                tensor.fetched = source.cut(full, tensor.param)
    follow_first(engines)


def full_on_first(state: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """A state dict of ordinary tensors. Collective.

    Returns:
        On rank 0 all of it; elsewhere without the tensors of which this rank holds a shard.
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
