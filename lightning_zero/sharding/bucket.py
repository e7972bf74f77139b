"""A bucket: parameters that are gathered, reduced and updated together.

Tensors of one bucket on one rank (Ψ elements, padded to S shards):

    flat       1-D, Ψ, parameter dtype, device   read by forward and backward; parameters are views of it
    shard      1-D, Ψ/S, parameter dtype         the owned part: a slice of ``flat`` (stages 0-2), else its own tensor
    master     Ψ/S, full precision               in the optimizer's store, or the shard itself (see ``masters.py``)

``flat`` keeps one storage for its whole life. Resharding resizes this storage to zero bytes, so that views of it (also
those that autograd saved) do not keep the memory alive. After the next unshard the same views see the new values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from lightning_zero.sharding.edits import EditWatch
from lightning_zero.sharding.forms import BucketForm
from lightning_zero.sharding.held import hold_parameter
from lightning_zero.sharding.layout import Segment
from lightning_zero.sharding.masters import Master, NoMaster
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.sharding.pending import mark_freed, mark_ordinary, mark_pending
from lightning_zero.storage import DONE, Lane, Memory, Rested, Ticket, use_huge_pages
from lightning_zero.storage.rested import changing, pieces
from lightning_zero.storage.timers import Phase, timed


class BucketState(Enum):
    """States of a bucket's flat buffer: which parameter values a rank holds.

    ==========  =============  ========  =========  =======
    state       begin_unshard  unshard   an update  reshard
    ==========  =============  ========  =========  =======
    SHARDED     GATHERING      GATHERED  SHARDED    SHARDED
    GATHERING   GATHERING      GATHERED  STALE      SHARDED
    GATHERED    GATHERED       GATHERED  STALE      SHARDED
    STALE       REFRESHING     GATHERED  STALE      SHARDED
    REFRESHING  REFRESHING     GATHERED  STALE      SHARDED
    ==========  =============  ========  =========  =======

    Where the stage does not shard parameters, or while someone holds them, ``reshard`` changes nothing. If ``flat`` is
    the shard, as on one rank at stages 0 to 2, it is always GATHERED. :meth:`Bucket._become` shows a state to readers.
    """

    SHARDED = auto()  # the shard only: `flat` has no memory
    GATHERING = auto()  # the shards are being gathered into `flat`, which has no values before
    GATHERED = auto()  # `flat` holds the current values of all shards
    STALE = auto()  # `flat` holds values from before the last update of the shards
    REFRESHING = auto()  # as STALE, while the shards are being gathered into `flat`


GATHERS = (BucketState.GATHERING, BucketState.REFRESHING)  # a gather is under way


class Bucket:
    """Holds the tensors of one bucket and the state of its flat buffer; see the module's docstring.

    :func:`~lightning_zero.sharding.adoption.make_bucket` constructs it and fills it with values.

    Args:
        name: name of the unit, for messages.
        form: parameters, dtypes, flags and placement.
        detect_data_edits: detect edits through ``data`` at stages 0 to 2 by a checksum; see :meth:`hidden_edit`.
    """

    def __init__(self, name: str, form: BucketForm, detect_data_edits: bool = False) -> None:
        self.name = name
        self.names = tuple(spec.name for spec in form.spec.specs)
        self.parameters = form.parameters
        self.formats = tuple(MemoryFormat.of(p) for p in self.parameters)
        self.initial_dtype = form.spec.given
        self.dtype = form.dtype
        self.optimized = form.optimized  # if not, gradients are never reduced; `begin_to_optimize` changes it
        self._detect_data_edits = detect_data_edits
        self.placement = form.placement
        self.timers = self.placement.mesh.timers
        self.layout = form.layout
        self.segments = form.segments
        self.index = {id(p): i for i, p in enumerate(self.parameters)}
        self.edits = EditWatch(self.parameters, self.layout.offsets)
        self.state = BucketState.GATHERED
        self.pins = 0  # while there are any, `reshard` does nothing; see `pin`
        # Whether autograd may have saved parameters that no unit gathers again for its backward. While these are freed,
        # their version counters are higher by one: such a backward raises, and does not read freed memory.
        self.saved = False
        self._raised = False
        self.full: Tensor | None = None  # 1-D, Ψ, the master's dtype: see `show`
        self._flat_views: list[Tensor] = []  # the parameters' data while they are views of `full`
        self.flat: Tensor
        self.shard: Rested
        self.master: Master
        self.rounded: set[int] = set()  # indices of parameters that a cast rounded while there was no master
        # The last asynchronous work on the bucket's tensors in host memory: a fetch or a gather of the shard, or its
        # update. Waiting for it does not end its use: a stream that waits does not keep other lanes from overtaking.
        self.moving: Ticket = DONE
        # The last asynchronous work that reads the master. Code that changes the master must wait for it; updates need
        # not, since they run later in the same lane.
        self.reading: Ticket = DONE
        self.updating = False  # whether nobody has waited for the last update, which `moving` is or follows
        self._deferred: tuple[Callable[[], None], Callable[[], None]] | None = None  # see `defer`
        self._shown: tuple[bool, Callable[[], None] | None] | None = (False, None)  # see `_become`
        self._await_shards: Callable[[], None]  # waits for the gather that has begun

    @torch.no_grad()
    def begin(self, flat: Tensor, shard: Rested, master: Master) -> None:
        """Make the parameters views of ``flat``, which holds their values; at stage 3 only ``shard`` need hold them."""
        self.flat, self.shard, self.master = flat, shard, master
        for view, parameter in zip(self.views(flat), self.parameters, strict=True):
            parameter.data = view
            hold_parameter(parameter)
        self._note_values()
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

    # -------------------------------------------------------------------------------------------------- parameters

    @torch.no_grad()
    def begin_unshard(self) -> None:
        """Begin to gather the current values of all shards into ``flat``, unless this was done or begun before."""
        if self.state is not BucketState.GATHERED and self.state not in GATHERS:
            self._begin_unshard()

    @timed(Phase.GATHER)
    def _begin_unshard(self) -> None:
        if self.state is BucketState.SHARDED:
            self.flat.untyped_storage().resize_(self.layout.padded_numel * self.dtype.itemsize)
            use_huge_pages(self.flat)
        elif not self.shards_params:
            self.absorb_edits()  # the shard is a part of `flat`: user code may have edited it after the update
        alone = self.layout.shards == 1
        if self.updating:  # the lane of communication waits for the update, not the training thread
            self._gather_beside(Lane.COMM, self.moving)
        elif not alone and self.placement.executor.overlaps and self.placement.shard_memory == "host":
            self._gather_beside(Lane.GATHER, self._fetch_shard(follow=False))  # its stream waits for the copy
        else:  # alone there is no gather; code that reads `flat` waits for the fetch itself
            if (fetched := self._fetch_shard(follow=not alone)) is not DONE:
                self.moving = fetched
            self._await_shards = fetched.wait if alone else self._begin_gather()
        self._become(BucketState.GATHERING if self.state is BucketState.SHARDED else BucketState.REFRESHING)

    def expect_shard(self) -> None:
        """Begin to fetch the shard from a disk, as many tiles as temporary memory holds beside those of an update."""
        if self.state is BucketState.SHARDED and not self.updating:
            if tiles := self._tiles[: self.placement.tiles_ahead(self.dtype)]:
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

    def _gather_beside(self, lane: Lane, after: Ticket) -> None:
        """Let a lane gather the shards: COMM fetches this rank's after its update, GATHER begins after its fetch."""

        def gather() -> None:
            if lane is Lane.COMM:
                self._fetch_shard()
            self._begin_gather()()

        what = f"the gather of {self.name}"
        self.moving = self.placement.mesh.submit(self.placement.executor, gather, lane, what, [after])
        self._await_shards = self.moving.wait

    @torch.no_grad()
    def unshard(self) -> None:
        """Gather the current values of all shards into ``flat``, after a running update, unless it has them."""
        if self._deferred is not None:
            need, _ = self._deferred
            need()
        if self.state is not BucketState.GATHERED:
            self._end_unshard()
        else:
            self.await_update()

    @timed(Phase.GATHER)
    def _end_unshard(self) -> None:
        if self.state not in GATHERS:
            self.await_update()
        self.begin_unshard()
        self._await_shards()
        self.updating = False  # the gather ran after the update
        self._become(BucketState.GATHERED)
        if self.full is None:  # or edits of the masters that are shown would be forgotten
            self.edits.note_versions()  # gathering is no edit by user code

    def defer(self, need: Callable[[], None], read: Callable[[], None]) -> None:
        """Mark the parameters as pending and let two callbacks gather them, until :meth:`end_deferred`.

        Args:
            need: called by :meth:`unshard`; gathers this bucket, possibly with others, or raises.
            read: called before any code but a unit's forward reads a parameter.
        """
        self._deferred = need, read
        self._become(self.state)

    @property
    def deferred(self) -> bool:
        """Whether the gather of the bucket is deferred, from :meth:`defer` to :meth:`end_deferred`."""
        return self._deferred is not None

    def end_deferred(self, gather: bool = True) -> None:
        """Undo :meth:`defer`; with ``gather`` gather now, otherwise the next :meth:`unshard` does."""
        if gather:
            self.begin_unshard()
        self._deferred = None
        if gather:
            self.unshard()
        else:
            self._become(self.state)

    def pin(self) -> None:
        """Keep ``flat`` from being freed, for a ``gathered_parameters`` context or the root, until :meth:`unpin`."""
        self.pins += 1

    def unpin(self) -> None:
        """Undo one :meth:`pin`. After the last one :meth:`reshard` frees ``flat`` again."""
        self.pins -= 1

    @torch.no_grad()
    def reshard(self) -> None:
        """Free ``flat`` if the stage shards parameters and nobody pins it."""
        if not self.shards_params or self.pins or self.state is BucketState.SHARDED:
            return
        if self.state in GATHERS:
            self._await_shards()  # the gather must not write to freed memory
        elif self.state is BucketState.GATHERED:
            self.absorb_edits()
        self._become(BucketState.SHARDED)  # first: the state of freed memory must not be GATHERED, even after Ctrl-C
        self.flat.untyped_storage().resize_(0)

    def _become(self, state: BucketState) -> None:
        """Enter ``state``, and show the parameters as what they are: freed, pending or ordinary ones.

        They also depend on ``full``, ``updating`` and :attr:`deferred`; a change of one of these must end here, too.
        """
        self.state = state
        freed = state in (BucketState.SHARDED, BucketState.GATHERING) and self.full is None
        if self.saved and freed is not self._raised:
            self._raised = freed
            self.edits.shift_versions(1 if freed else -1)
        read = None  # gives a pending parameter its values
        if not freed and self._deferred is not None:
            _, read = self._deferred
        elif not freed and self.updating and not self.shards_params:  # the shard is a part of `flat`
            read = self.await_update
        if (freed, read) != self._shown:
            self._shown = None  # if this is interrupted, the next call marks all parameters anew
            for name, parameter in zip(self.names, self.parameters, strict=True):
                if freed:
                    mark_freed(parameter, name)
                elif read is not None:
                    mark_pending(parameter, read)
                else:
                    mark_ordinary(parameter)
            self._shown = freed, read

    def begin_update(self, update: Callable[[], object]) -> Ticket:
        """Begin to update the shard by a job in the lane of updates, and return its ticket.

        Whoever reads a parameter waits for the job. No gather, and no fetch by :meth:`expect_shard`, may be under way.
        :meth:`mark_updated` must follow.
        """
        lane, what = self.placement.update_lane, f"the update of {self.name}"
        self.moving = self.placement.executor.submit(update, lane, what, after=[self.moving])
        self.updating = self.moving is not DONE
        self._become(self.state)
        return self.moving

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
        self._become(self.state)

    def mark_updated(self, indices: Collection[int]) -> None:
        """Note that the shards have new values for the parameters ``indices``, so that ``flat`` may be stale."""
        if self.state in GATHERS:
            self.unshard()  # the values on their way are stale too
        # As an update in place does: backward through a graph from before the update must raise, not use new values.
        torch.autograd.graph.increment_version([self.parameters[i] for i in indices])
        self._note_values()
        # With one shard at stages 0 to 2, `flat` is the shard.
        if self.state is BucketState.GATHERED and (self.layout.shards > 1 or self.shards_params):
            self._become(BucketState.STALE)

    def _note_values(self) -> None:
        """Note the values of the parameters, by which edits by user code are found later."""
        # An edit through `data` does not change the version counter. If the master is another tensor, the next update
        # overwrites such an edit, unless it was made in `gathered_parameters(writeback=True)`. Checksums find these
        # edits, for two passes over the shard and one wait for the device per step; at stage 3 it would be per gather.
        watched = self._detect_data_edits and not isinstance(self.master, NoMaster) and not self.shards_params
        if watched:
            self.await_update()
        self.edits.note(self._own_part() if watched else None)

    def hidden_edit(self) -> Tensor | None:
        """Whether the shard's bits have changed since they were noted: 0-dim bool on the device; ``None``: unknown."""
        return self.edits.hidden(self._own_part)

    def _own_part(self) -> Tensor:
        return self.shard.read(0, self.shard.numel)  # a part of `flat`

    @torch.no_grad()
    def absorb_edits(self, everything: bool = False) -> None:
        """Take over edits of gathered parameters by user code, made in place or by assigning ``data``.

        Args:
            everything: take over all parameters, also those with an unchanged version counter (edits through ``data``).
        """
        # `take_masters` takes edits of masters. While an update or a gather is pending, any access waits for it.
        if self.full is not None or self.updating or self.deferred:
            return
        edited = self.edits.find(self.flat, self.view, everything)
        if not edited:
            return
        self.reading.synchronize()
        for segment in self.segments:
            if segment.param in edited:
                if self.shards_params:  # otherwise the shard is the same memory
                    self._take_edit(segment)
                self.master.derive(segment.start, segment.stop)
        self._note_values()

    def _take_edit(self, segment: Segment) -> None:
        memories: tuple[Memory, Memory] = "device", self.placement.shard_memory
        start = self.layout.offsets[segment.param] + segment.param_start
        source = self.flat[start : start + segment.numel]
        for low, high in pieces(self.shard.tile, segment.start, segment.stop):
            with changing(self.shard, low, high) as target:
                self.placement.copy(target, source[low - segment.start : high - segment.start], memories, self.name)

    @torch.no_grad()
    def show(self, full: Tensor | None) -> None:
        """Make the parameters views of ``full``, which has the layout of ``flat``; ``None``: of ``flat`` again.

        While they show another tensor, the bucket must be pinned.
        """
        if full is None:
            for view, parameter in zip(self._flat_views, self.parameters, strict=True):
                parameter.data = view
            self._flat_views, self.full = [], None
            self._become(self.state)
        else:
            self.full = full
            self._become(self.state)
            self._flat_views = [parameter.data for parameter in self.parameters]
            for view, parameter in zip(self.views(full), self.parameters, strict=True):
                parameter.data = view

    def await_moves(self) -> None:
        """Let the host wait for all work on the bucket's tensors in host memory, before the host changes them."""
        self.placement.await_host(self.moving)
        self.placement.await_host(self.reading)
        self.moving = self.reading = DONE
        self.shard.drop(0, self.shard.numel)

    def await_master(self) -> None:
        """Let the host wait until it can read the master."""
        self.await_update()
        if self.master.tile is not None:
            self.placement.await_host(self.reading)  # tiles have one reader at a time

    def publish(self, start: int, stop: int) -> None:
        """Update elements ``[start, stop)`` of the parameter shard from the master, after the master was changed."""
        self.placement.await_host(self.master.write(start, stop))

    def load(self, values: Mapping[int, Tensor]) -> None:
        """Overwrite parameters with full-precision values of their shapes, by index; ``flat`` may become stale."""
        for index, full in values.items():
            self._load(index, full)
        self.mark_updated(values)

    def _load(self, index: int, values: Tensor) -> None:
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
        with torch.inference_mode(False):  # an edit of an inference tensor, which parameters may show, leaves no trace
            full = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.placement.device)
        first, last = self.layout.shard_range(self.placement.mesh.shard.rank)
        for low, high in pieces(self.placement.optimizer_store.tile, 0, last - first):
            target = full[first + low : first + high]
            self.placement.copy(target, read(low, high), (memory, "device"), self.name)
        self.placement.mesh.shard.all_gather_(full, f"gather state of {self.name}")
        return full

    def gather_master(self) -> Tensor:
        """All-gather the full-precision values as :meth:`gather_read` does, in the master's dtype. Collective."""
        self.await_master()
        return self.gather_read(self.master.read, self.master.dtype, self.master.memory)


def absorb_edits(buckets: Sequence[Bucket]) -> None:
    """Takes over edits by user code, also those that only checksums show, with one wait for the device."""
    asked = [(bucket, edit) for bucket in buckets if (edit := bucket.hidden_edit()) is not None]
    answers = torch.stack([edit for _, edit in asked]).tolist() if asked else []
    hidden = {id(bucket) for (bucket, _), answer in zip(asked, answers, strict=True) if answer}
    for bucket in buckets:
        bucket.absorb_edits(everything=id(bucket) in hidden)
