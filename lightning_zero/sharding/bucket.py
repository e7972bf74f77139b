"""A bucket: parameters that are gathered, reduced and updated together.

Tensors of one bucket on one rank (Ψ elements, padded to S shards):

    flat       1-D, Ψ, parameter dtype, device   read by forward and backward; parameters are views of it
    shard      1-D, Ψ/S, parameter dtype         the owned part: a slice of ``flat`` (stages 0-2), else its own tensor
    master     Ψ/S, full precision               in the optimizer's store, or the shard itself (see ``masters.py``)

``flat`` keeps one storage for its whole life. Resharding resizes this storage to zero bytes, so that views of it (also
those that autograd saved) do not keep the memory alive. After the next unshard the same views see the new values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.sharding.checksum import checksum
from lightning_zero.sharding.freed import mark_freed, mark_gathered
from lightning_zero.sharding.held import hold_parameter, release_parameter
from lightning_zero.sharding.layout import Segment
from lightning_zero.sharding.masters import Master, NoMaster
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.sharding.pending import end_pending, mark_pending
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.sharding.rounded import mark_rounded
from lightning_zero.storage import DONE, Memory, Rested, Ticket, use_huge_pages
from lightning_zero.storage.rested import changing, pieces
from lightning_zero.storage.timers import Phase, timed
from lightning_zero.torch_private import version_of


class BucketState(Enum):
    """States of a bucket's flat buffer: which parameter values a rank holds."""

    SHARDED = auto()  # the shard only; `flat` has no memory and its parameters are freed
    GATHERING = auto()  # shards are being gathered into `flat`; its parameters are still freed
    GATHERED = auto()  # `flat` holds the current values of all shards
    STALE = auto()  # `flat` holds values from before the last update of the shards


class ParameterSpec(NamedTuple):
    """A parameter and its name in the module tree (its first name if it is tied)."""

    name: str
    parameter: Parameter


class Bucket:
    """Holds the tensors of one bucket and the state of its flat buffer; see the module's docstring.

    :func:`~lightning_zero.sharding.adoption.make_bucket` constructs it and fills it with values.

    Args:
        name: name of the unit, for messages.
        specs: the parameters in module order, all of one dtype, at their initial full-precision values.
        dtype: dtype of the parameters in forward and backward.
        optimized: whether an optimizer may update the parameters; otherwise their gradients are never reduced.
        placement: groups, policies, device and stores.
        detect_data_edits: detect edits through ``data`` at stages 0 to 2 by a checksum; see :meth:`hidden_edit`.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[ParameterSpec],
        dtype: torch.dtype,
        optimized: bool,
        placement: BucketPlacement,
        detect_data_edits: bool = False,
    ) -> None:
        self.name = name
        self.names = tuple(spec.name for spec in specs)
        self.parameters = tuple(spec.parameter for spec in specs)
        self.formats = tuple(MemoryFormat.of(p) for p in self.parameters)
        self.initial_dtype = self.parameters[0].dtype
        self.dtype = dtype
        self.optimized = optimized
        self._detect_data_edits = detect_data_edits
        self.placement = placement
        self.timers = placement.mesh.timers
        self.layout = placement.layout(tuple(p.numel() for p in self.parameters), dtype)
        self.segments = self.layout.segments(placement.mesh.shard.rank)
        self.index = {id(p): i for i, p in enumerate(self.parameters)}
        self.state = BucketState.GATHERED
        self.pins = 0  # number of open `gathered_parameters` contexts; while there are any, `reshard` does nothing
        self._full: Tensor | None = None  # 1-D, Ψ, the master's dtype: see `unshard_full_precision`
        self._flat_views: list[Tensor] = []  # the parameters' data while they are views of `_full`
        self.flat: Tensor
        self.shard: Rested
        self.master: Master
        self.rounded: set[int] = set()  # indices of parameters that a cast rounded while there was no master
        self.moving: Ticket = DONE  # the last asynchronous work on the bucket's tensors in host memory
        # The last asynchronous work that reads the master. Code that changes the master must wait for it; updates need
        # not, since they run later in the same lane.
        self.reading: Ticket = DONE
        self.updating = False  # whether `moving` is an update that nobody has waited for
        self._need: Callable[[], None] | None = None  # if the gather was deferred: gathers the bucket in its turn
        self._await_shards: Callable[[], None]  # waits for the gather that has begun

    @torch.no_grad()
    def begin(self, flat: Tensor, shard: Rested, master: Master) -> None:
        """Make the parameters views of ``flat``, which holds their values; at stage 3 only ``shard`` need hold them."""
        self.flat, self.shard, self.master = flat, shard, master
        for view, parameter in zip(self.views(flat), self.parameters, strict=True):
            parameter.data = view
            hold_parameter(parameter)
        self._remember()
        self.reshard()

    def view(self, flat: Tensor, index: int) -> Tensor:
        """A view of parameter ``index``, of its shape, in ``flat``: any 1-D tensor with the flat buffer's layout."""
        offset = self.layout.offsets[index]
        return self.formats[index].view(flat[offset : offset + self.layout.numels[index]])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of all parameters in ``flat``; see :meth:`view`."""
        return [self.view(flat, index) for index in range(len(self.parameters))]

    @property
    def shards_params(self) -> bool:
        """Whether the parameters are freed outside the forward and backward of their unit."""
        return self.placement.sharding.shard_params

    def _range_of(self, segment: Segment) -> slice:
        """The segment's elements in the flat buffer."""
        start = self.layout.offsets[segment.param] + segment.param_start
        return slice(start, start + segment.numel)

    # -------------------------------------------------------------------------------------------------- parameters

    @torch.no_grad()
    def begin_unshard(self) -> None:
        """Begin to gather the current values of all shards into ``flat``, unless this was done or begun before."""
        if self.state not in (BucketState.GATHERED, BucketState.GATHERING):
            self._begin_unshard()

    @timed(Phase.GATHER)
    def _begin_unshard(self) -> None:
        if self.state is BucketState.SHARDED:
            self.flat.untyped_storage().resize_(self.layout.padded_numel * self.dtype.itemsize)
            use_huge_pages(self.flat)
        elif not self.shards_params:
            self.absorb_edits()  # the shard is a part of `flat`: user code may have edited it after the update
        if self.updating:  # the lane of communication waits for the update, not the training thread
            what, executor = f"the gather of {self.name}", self.placement.executor
            self.moving = self.placement.mesh.submit(executor, self._gather_updated, what, after=[self.moving])
            self._await_shards = self.moving.wait
        else:
            alone = self.layout.shards == 1  # there is no gather; code that reads `flat` waits for the fetch itself
            if (fetched := self._fetch_shard(follow=not alone)) is not DONE:
                self.moving = fetched
            self._await_shards = fetched.wait if alone else self._begin_gather()
        self.state = BucketState.GATHERING

    def expect_shard(self) -> None:
        """Begin to fetch the shard from a disk, as many tiles as temporary memory holds beside those of an update."""
        if self.state is BucketState.SHARDED and not self.updating:
            tiles = self._tiles[: self.placement.tiles_ahead(self.dtype)]
            if tiles:
                self.placement.await_host(self.reading)
            for tile in tiles:
                self.shard.expect(*tile)

    def _fetch_shard(self, follow: bool = True) -> Ticket:
        """Begin to copy the shard, which is not being updated, to this rank's part of ``flat``.

        Args:
            follow: let the current stream wait for the copy.
        """
        if not self.shards_params:  # the shard is a part of `flat`
            return DONE
        if self.shard.tile is not None:  # or tiles would be dropped below while another thread reads them
            self.placement.await_host(self.reading)
        memories: tuple[Memory, Memory] = self.placement.shard_memory, "device"
        first, stop = self.layout.shard_range(self.placement.mesh.shard.rank)
        target, tiles, fetched = self.flat[first:stop], self._tiles, DONE
        for number, (low, high) in enumerate(tiles):
            for tile in tiles[number : number + 2]:  # fetch the next tile while this one is copied
                self.shard.expect(*tile)
            source = self.shard.view(low, high)
            fetched = self.placement.move(target[low:high], source, memories, self.name)
            if follow:
                fetched.wait()
            self.shard.drop(low, high, after=fetched)
        return fetched

    @property
    def _tiles(self) -> list[tuple[int, int]]:
        return [*pieces(self.shard.tile, 0, self.shard.numel)]

    def _begin_gather(self) -> Callable[[], None]:
        return self.placement.mesh.shard.begin_all_gather_(self.flat, f"gather {self.name}")

    def _gather_updated(self) -> None:
        """Gather the shards; runs in the lane of communication after the update has ended."""
        self._fetch_shard()
        self._begin_gather()()

    @torch.no_grad()
    def unshard(self) -> None:
        """Gather the current values of all shards into ``flat``, after a running update, unless it has them."""
        if self._need is not None:
            self._need()
        if self.state is not BucketState.GATHERED:
            self._end_unshard()
        else:
            self.await_update()

    @timed(Phase.GATHER)
    def _end_unshard(self) -> None:
        if self.state is not BucketState.GATHERING:
            self.await_update()
        self.begin_unshard()
        self._await_shards()
        self.updating = False  # the gather ran after the update
        self.state = BucketState.GATHERED
        for parameter in self.parameters:
            mark_gathered(parameter)
            end_pending(parameter)
        self._versions = [version_of(p) for p in self.parameters]  # gathering is no edit by user code

    def defer(self, need: Callable[[], None], read: Callable[[], None]) -> None:
        """Mark the parameters as pending and let two callbacks gather them, until :meth:`end_deferred`.

        Args:
            need: called by :meth:`unshard`; gathers this bucket, possibly with others, or raises.
            read: called before any code but a unit's forward reads a parameter.
        """
        self._need = need
        for parameter in self.parameters:
            mark_pending(parameter, read)

    @property
    def deferred(self) -> bool:
        """Whether the gather of the bucket is deferred, from :meth:`defer` to :meth:`end_deferred`."""
        return self._need is not None

    def end_deferred(self, gather: bool = True) -> None:
        """Undo :meth:`defer`; with ``gather`` gather now, otherwise the next :meth:`unshard` does."""
        if gather:
            self.begin_unshard()
        self._need = None
        if gather:
            self.unshard()
            return
        for parameter in self.parameters:
            end_pending(parameter)
        self._mark_updating()

    @torch.no_grad()
    def reshard(self) -> None:
        """Free ``flat`` if the stage shards parameters and no ``gathered_parameters`` context is open."""
        if not self.shards_params or self.pins or self.state is BucketState.SHARDED:
            return
        if self.state is BucketState.GATHERING:
            self._await_shards()  # the gather must not write to freed memory
        elif self.state is BucketState.GATHERED:
            self.absorb_edits()
        self.flat.untyped_storage().resize_(0)
        self.state = BucketState.SHARDED
        self._mark_freed()

    def _mark_freed(self) -> None:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            mark_freed(parameter, name)

    def begin_update(self, update: Callable[[], object]) -> Ticket:
        """Begin to update the shard by a job in the lane of updates, and return its ticket.

        Whoever reads a parameter waits for the job. No gather, and no fetch by :meth:`expect_shard`, may be under way.
        :meth:`mark_updated` must follow.
        """
        lane, what = self.placement.update_lane, f"the update of {self.name}"
        self.moving = self.placement.executor.submit(update, lane, what, after=[self.moving])
        self.updating = self.moving is not DONE
        self._mark_updating()
        return self.moving

    def _mark_updating(self) -> None:
        if self.updating and not self.shards_params:
            for parameter in self.parameters:
                mark_pending(parameter, self.await_update)

    def await_update(self) -> None:
        """Wait for an asynchronous update: the host waits for its end, the current stream for its copies.

        Raises:
            Exception: the error that the update raised, with a note that names the bucket; again at every call.
        """
        if self.updating:
            self._await_update()

    @timed(Phase.OPTIMIZER)
    def _await_update(self) -> None:
        self.moving.wait()
        self.updating = False
        if self._need is None:  # otherwise the parameters are stale and stay pending
            for parameter in self.parameters:
                end_pending(parameter)

    def mark_updated(self, indices: Iterable[int]) -> None:
        """Note that the shards have new values for the parameters ``indices``, so that ``flat`` may be stale."""
        if self.state is BucketState.GATHERING:
            self.unshard()  # the values on their way are stale too
        # As an update in place does: backward through a graph from before the update must raise, not use new values.
        torch.autograd.graph.increment_version([self.parameters[i] for i in indices])
        self._remember()
        # With one shard at stages 0 to 2, `flat` is the shard.
        if self.state is BucketState.GATHERED and (self.layout.shards > 1 or self.shards_params):
            self.state = BucketState.STALE

    def _remember(self) -> None:
        """Note the versions and the checksum of the parameters, by which edits by user code are found later."""
        self._versions = [version_of(p) for p in self.parameters]
        # An edit through `data` does not change the version counter. If the master is another tensor, the next update
        # overwrites such an edit, unless it was made in `gathered_parameters(writeback=True)`. Checksums find these
        # edits, for two passes over the shard and one wait for the device per step; at stage 3 it would be per gather.
        watched = self._detect_data_edits and not isinstance(self.master, NoMaster) and not self.shards_params
        if watched:
            self.await_update()
        self._checksum = checksum(self._own_part()) if watched else None

    def hidden_edit(self) -> Tensor | None:
        """Whether the shard's bits have changed since they were noted: 0-dim bool on the device; ``None``: unknown."""
        return None if self._checksum is None else checksum(self._own_part()) != self._checksum

    def _own_part(self) -> Tensor:
        return self.shard.read(0, self.shard.numel)  # a part of `flat`

    @torch.no_grad()
    def absorb_edits(self, everything: bool = False) -> None:
        """Take over edits of gathered parameters by user code, made in place or by assigning ``data``.

        Args:
            everything: take over all parameters, also those with an unchanged version counter (edits through ``data``).
        """
        # `end_full_precision` takes over edits of full-precision parameters. While an update or a deferred gather is
        # pending there are no edits, since any access would have waited for it.
        if self._full is not None or self.updating or self.deferred:
            return
        edited = set()
        for index, parameter in enumerate(self.parameters):
            if self._reattach(self.flat, index) or everything or version_of(parameter) != self._versions[index]:
                edited.add(index)
        if not edited:
            return
        self.reading.synchronize()
        for segment in self.segments:
            if segment.param in edited:
                if self.shards_params:  # otherwise the shard is the same memory
                    self._take_edit(segment)
                self.master.derive(segment.start, segment.stop)
        self._remember()

    def _take_edit(self, segment: Segment) -> None:
        memories: tuple[Memory, Memory] = "device", self.placement.shard_memory
        source = self.flat[self._range_of(segment)]
        for low, high in pieces(self.shard.tile, segment.start, segment.stop):
            with changing(self.shard, low, high) as target:
                self.placement.copy(target, source[low - segment.start : high - segment.start], memories, self.name)

    def _reattach(self, flat: Tensor, index: int) -> bool:
        """If ``data`` was assigned (``module.double()``), copy it into ``flat``, make it a view again; return True."""
        parameter, start = self.parameters[index], self.layout.offsets[index] * flat.itemsize
        if parameter.data_ptr() == flat.data_ptr() + start or not parameter.numel():
            return False
        view = self.view(flat, index)
        view.copy_(parameter.data)
        parameter.data = view
        return True

    @torch.no_grad()
    def unshard_full_precision(self) -> bool:
        """Give the parameters the gathered values of the masters; resharding does not free them. Collective.

        Returns:
            Whether :meth:`end_full_precision` must follow, since they are views of another tensor than ``flat`` now.
        """
        if self._full is not None:
            return False
        if self.master.dtype == self.dtype and not self.shards_params:
            self.unshard()
            return False
        if self.state is BucketState.GATHERED:
            self.absorb_edits()
        self._full = self.gather_master()
        for view, parameter in zip(self.views(self._full), self.parameters, strict=True):
            mark_gathered(parameter)
            self._flat_views.append(parameter.data)
            parameter.data = view
        return True

    @torch.no_grad()
    def end_full_precision(self, writeback: bool) -> None:
        """Make the parameters views of ``flat`` again and take over their edits. Collective.

        Args:
            writeback: take over rank 0's values of all parameters on all ranks. Otherwise each rank takes over its own
                values of the parameters whose version counter has changed.
        """
        assert self._full is not None
        full, self._full = self._full, None
        edited = [
            index
            for index, parameter in enumerate(self.parameters)
            if self._reattach(full, index) or writeback or version_of(parameter) != self._versions[index]
        ]
        if writeback:
            self.placement.mesh.world.broadcast_(full, f"write back {self.name}")
        for view, parameter in zip(self._flat_views, self.parameters, strict=True):
            parameter.data = view
        self._flat_views = []
        for index in edited:
            self._load_master(index, self.view(full, index))
        if edited:
            self.mark_updated(edited)
        if self.state is BucketState.SHARDED:
            self._mark_freed()

    def await_moves(self) -> None:
        """Let the host wait for all work on the bucket's tensors in host memory, before the host changes them."""
        self.placement.await_host(self.moving)
        self.placement.await_host(self.reading)
        self.moving = self.reading = DONE
        self.shard.drop(0, self.shard.numel)

    def publish(self, start: int, stop: int) -> None:
        """Update elements ``[start, stop)`` of the parameter shard from the master, after the master was changed."""
        self.placement.await_host(self.master.write(start, stop))

    def load(self, index: int, values: Tensor) -> None:
        """Overwrite parameter ``index`` with full-precision ``values`` of its shape; ``flat`` may become stale."""
        self._load_master(index, values)
        self.mark_updated([index])

    def _load_master(self, index: int, values: Tensor) -> None:
        self.await_moves()
        for segment in self.segments:
            if segment.param == index:
                for low, high in pieces(self.master.tile, segment.start, segment.stop):
                    self.master.expect(low, high)
                    into = self.master.read(low, high)
                    self.formats[index].read(values, segment.param_start + low - segment.start, into)
                    self.master.keep(low, into)
                    self.publish(low, high)
                    self.master.commit(low, high)
        note = self.rounded.add if self.placement.rounds(values.dtype, self.dtype) else self.rounded.discard
        note(index)

    def gather_read(self, read: Callable[[int, int], Tensor], dtype: torch.dtype, memory: Memory) -> Tensor:
        """All-gather values with the layout of the shard: 1-D, padded, on the device. Collective.

        Args:
            read: returns elements ``[start, stop)`` of this rank's shard, 1-D.
            dtype: dtype of the elements.
            memory: memory in which ``read`` returns them.
        """
        full = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.placement.device)
        first, last = self.layout.shard_range(self.placement.mesh.shard.rank)
        for low, high in pieces(self.placement.optimizer_store.tile, 0, last - first):
            target = full[first + low : first + high]
            self.placement.copy(target, read(low, high), (memory, "device"), self.name)
        self.placement.mesh.shard.all_gather_(full, f"gather state of {self.name}")
        return full

    def gather_master(self) -> Tensor:
        """All-gather the full-precision values as :meth:`gather_read` does, in the master's dtype. Collective."""
        self.await_update()
        if self.master.tile is not None:
            self.placement.await_host(self.reading)  # tiles have one reader at a time
        return self.gather_read(self.master.read, self.master.dtype, self.master.memory)

    def release(self) -> None:
        """Give every parameter an ordinary tensor at full precision and forget the flat buffer. Collective."""
        if self.state is BucketState.GATHERED:
            self.absorb_edits()
        full = self.gather_master()
        for index, (view, parameter) in enumerate(zip(self.views(full), self.parameters, strict=True)):
            mark_gathered(parameter)
            release_parameter(parameter)
            if index in self.rounded:
                parameter.data = view.to(self.initial_dtype)
                mark_rounded(parameter, self.dtype)
            else:
                parameter.data = view.clone()
