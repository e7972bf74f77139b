"""The collectives of ranks. Only this module, ``exchange`` and ``backend_collectives`` communicate.

A :class:`Group` has a process group of its own, so that its collectives never interleave with Lightning's. How its
ranks exchange data depends on its backend for the device. In host memory, with a backend that matches messages by tag,
every rank sends to every other rank directly, and sums are made in rank order. Then the result is the same on every
rank and in every run, with the same bits as if one process added the ranks' values in order. In all other cases the
backend's own collectives are used. Bytes are counted on the rank that sends them.

If ranks do not issue the same collectives, they hang, mix up their data, or abort (gloo, if sizes differ). To prevent
this, each group keeps a *digest* of the collectives that were issued. While :attr:`Group.checked` is set, ranks compare
their digests before every collective. Afterwards, messages carry the digest as their tag, so that only messages of the
same collective are matched. Others end by the timeout, or at once between ranks that read each other's messages, unless
only one of the two gathers. With a backend's own collectives, ``Mesh.check_digests`` compares them once a step.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero import ops
from lightning_zero.sharding.backend_collectives import BackendCollectives
from lightning_zero.sharding.board import Board
from lightning_zero.sharding.collective_errors import CollectiveError, Waiting, disagreement, failure
from lightning_zero.sharding.cross_memory import Neighbor
from lightning_zero.sharding.exchange import Channel, Exchange, UseTile, bytes_of_tile
from lightning_zero.sharding.pieces import Pieces, bytes_of_blocks
from lightning_zero.storage import DONE, Lane, Ticket, use_huge_pages
from lightning_zero.storage.accelerators import device_type
from lightning_zero.storage.threads import LaneThreads, in_lane
from lightning_zero.storage.timers import Phase, Timers
from lightning_zero.storage.work_log import named

_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # each sends (size - 1) / size of the data

_TAGGED = frozenset({"gloo", "mpi"})  # backends that match messages by tag
_HEADER = 128  # bytes: a digest, and the beginning of the text that says what the collective is for
_DATA_TAG = 1 << 30  # tags below this value are those of headers
_RECENT = 5  # number of collectives that an error lists

CHANNELS = 2  # of a group: one for exchanges that the calling thread waits for, one for those that go on beside it


class Group:
    """A set of ranks that communicate. A group of one rank needs no process group and sends nothing.

    The argument ``what`` of a collective says in words what it is for. It must be the same on all ranks, because checks
    compare it, and error messages contain it. Collectives raise :class:`CollectiveError` if ranks issue different ones,
    or if a rank is missing.

    Attributes:
        size: number of ranks.
        rank: this process's rank inside the group.
        strangers: number of ranks to which messages are sent in host memory, since they do not read them.
        checked: compare with the other ranks before each collective, which costs a small exchange.
        digest: a 32-bit checksum of the ``what`` of all collectives issued so far.
        sent: bytes that this rank has sent, by collective, in a ring or a direct exchange; checks are not counted.
        calls: number of collectives issued, by collective.
        timers: measure the time spent waiting for other ranks.
        board: notes of all ranks, for error messages.
        before: a function that runs before the next collective, on all ranks; see :meth:`Mesh.before_next`.
        issuing: ticket of the collectives that a lane issues before the next one of the thread that trains; see
            :meth:`Mesh.submit`.

    Args:
        process_group: the ranks; ``None``: this process alone.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.size = process_group.size() if process_group is not None else 1
        self.strangers = self.size - 1
        self.rank = process_group.rank() if process_group is not None else 0
        self.checked = False
        self.digest = 0
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.timers = Timers()
        self.board = Board()
        self.before: Callable[[], None] | None = None
        self.issuing: Ticket = DONE
        self._channels = [Channel({}, 0)] * CHANNELS
        self._reader: LaneThreads | None = None
        self.recent: deque[str] = deque(maxlen=_RECENT)
        self._headers = 0
        self._noted = ""
        self._world_ranks = [0] if process_group is None else dist.get_process_group_ranks(process_group)
        if process_group is None:
            self._backends = dict(dist.Backend.default_device_backend_map)  # by type of device
        else:
            pairs = dist.get_backend_config(process_group).split(",")
            self._backends = dict(pair.split(":", 1) for pair in pairs)

    @classmethod
    def create(cls, partition: Sequence[list[int]], timeout: timedelta | None = None) -> Group:
        """Create one process group for each list of ranks, and return the group that has this rank.

        Collective: all ranks of the world must pass the same lists, of equal lengths, in the same order.

        Args:
            partition: lists of world ranks.
            timeout: how long a collective may wait for other ranks; ``None``: torch's default.
        """
        if len(partition[0]) == 1:
            return cls()
        groups = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in partition]
        return next(cls(group) for ranks, group in groups if dist.get_rank() in ranks)

    @classmethod
    def for_thread(cls, timeout: timedelta | None = None) -> Group:
        """Create a further group of all ranks, for exchanges of objects outside of the training thread. Collective."""
        return cls(dist.new_group(backend="gloo", timeout=timeout)) if dist.get_world_size() > 1 else cls()

    @classmethod
    def imagined(cls, size: int, rank: int = 0) -> Group:
        """A group for planning, which has a size and cannot communicate. If it can be, all its ranks are neighbors."""
        group = cls()
        group.size, group.rank = size, rank
        group.strangers = size - 1 if ops.cma_refusal() else 0
        return group

    def meet(self, neighbors: Mapping[int, Neighbor], slots: Sequence[int]) -> None:
        """Let this rank and others of its node read each other's messages.

        Args:
            neighbors: by rank of the world.
            slots: which of their slots are for this group; as many as `CHANNELS`.
        """
        ranks = enumerate(self._world_ranks)
        found = {rank: neighbors[of_world] for rank, of_world in ranks if of_world in neighbors}
        self._channels = [Channel(found, index) for index in slots]
        self.strangers = self.size - 1 - len(found)

    @property
    def neighbors(self) -> Mapping[int, Neighbor]:
        """The ranks of the node whose memory this rank can read, and they its, by the group's rank.

        Messages between them are read where they lie; see :mod:`~lightning_zero.sharding.exchange`.
        """
        return self._channels[0].neighbors

    @property
    def exchanges_messages(self) -> bool:
        """Whether data in host memory is exchanged by messages, not by the backend's own collectives."""
        return self.process_group is not None and self._backends.get("cpu") in _TAGGED

    def count(self, collective: str, nbytes: int) -> None:
        """Counts an ``all_gather``, ``reduce_scatter`` or ``all_reduce`` of ``nbytes``, padding included.

        The collectives below call this themselves. Planning calls it for collectives that it does not issue.
        """
        if self.size > 1:
            self._count(collective, _ROUNDS[collective] * nbytes * (self.size - 1) // self.size)

    def _count(self, collective: str, sent: int) -> None:
        self.calls[collective] += 1
        self.sent[collective] += sent

    def _transport(self, device: torch.device) -> _Transport:
        """The transport for data in the memory of a device."""
        tagged = self._backends.get(device.type) in _TAGGED
        return _Messages(self) if tagged and device_type(device).shares_host_memory else BackendCollectives(self)

    def padding(self, numel: int, device: torch.device) -> int:
        """The number of elements by which :meth:`all_reduce_` pads a tensor of ``numel`` elements."""
        return self._transport(device).padding(numel)

    def scratch(
        self, nbytes: int, dtype: torch.dtype, device: torch.device, in_pieces: bool = False, out: bool = False
    ) -> int:
        """Bytes that :meth:`reduce_scatter` of ``nbytes`` allocates, including its result unless it gets ``out``."""
        return 0 if self.size == 1 else self._transport(device).scratch(nbytes // self.size, dtype, in_pieces, out)

    def reset_counters(self) -> None:
        self.sent.clear()
        self.calls.clear()

    # ------------------------------------------------------------------------------------------------- collectives

    def all_gather_(self, flat: Tensor, what: str) -> None:
        """Fill ``flat`` (1-D, of any dtype, a multiple of ``size`` elements) with every rank's own slice, in place."""
        self.begin_all_gather_(flat, what)()

    def begin_all_gather_(self, flat: Tensor, what: str) -> Callable[[], None]:
        """Begin :meth:`all_gather_`; returns a function that waits for its end, and that must be called.

        Until then nobody may touch ``flat`` or free its memory.
        """
        if self.size == 1:
            return DONE.wait
        self._announce(what, flat.device)
        self.count("all_gather", flat.nbytes)
        data = flat.view(torch.uint8)  # backends do not support every dtype
        return self._transport(flat.device).begin_all_gather(data, what)

    def takes_pieces(self, device: torch.device) -> bool:
        """Whether :meth:`reduce_scatter` takes a tensor in pieces, and a tensor for the result."""
        return self.size > 1 and device.type == "cpu" and self._backends.get("cpu") in _TAGGED

    def reduce_scatter(
        self, flat: Tensor | Pieces, what: str, factor: float = 1.0, out: Tensor | None = None, add: bool = False
    ) -> Tensor:
        """Sum ``flat`` times ``factor`` over the ranks; returns this rank's slice of the sum.

        The slice is 1-D and has the dtype of ``flat``, to which products are rounded. A direct exchange adds 16-bit
        values in fp32 and rounds once.

        Args:
            flat: 1-D, a multiple of ``size`` elements; may be overwritten, and the result may share its memory. If the
                group :meth:`takes_pieces`, it may lie in pieces, which can be others on each rank and are only read.
            what: see above.
            factor: the same on all ranks.
            out: if the group :meth:`takes_pieces`, where the slice is written, and what is returned; also fp32.
            add: add the slice to ``out``. An error of the exchange may leave a part of it added.
        """
        if self.size > 1:
            self._announce(what, flat.device)
            self.count("reduce_scatter", flat.nbytes)
            return self._transport(flat.device).reduce_scatter(flat, what, factor, out, add)
        assert isinstance(flat, Tensor)
        assert out is None
        return flat if factor == 1 else flat.mul_(factor)

    def all_reduce_(self, flat: Tensor, what: str) -> Tensor:
        """Sum ``flat`` (1-D, of any length) over the ranks, in place. Every rank gets the same bits."""
        if self.size == 1:
            return flat
        self._announce(what, flat.device)
        transport = self._transport(flat.device)
        padding = transport.padding(flat.numel())
        padded = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
        transport.all_reduce_(padded, what)
        self.count("all_reduce", padded.nbytes)
        if padding:
            flat.copy_(padded[: flat.numel()])
        return flat

    def broadcast_(self, tensor: Tensor, what: str, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` (contiguous, of any dtype) with the tensor of the group's rank ``src``."""
        if self.size > 1 and tensor.numel():
            self._announce(what, tensor.device)
            with self.calling_backend(what):
                dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.process_group, group_src=src)
            self._count("broadcast", tensor.nbytes if self.rank == src else 0)
        return tensor

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Gather every rank's ``value``, in rank order. Values must be small and picklable."""
        if self.size == 1:
            return [value]
        self.issue_preceding()
        values: list[Any] = [None] * self.size
        with self.calling_backend(what):
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def broadcast_object(self, value: Any, what: str) -> Any:
        """Return rank 0's ``value``, which must be picklable. The values of other ranks are ignored."""
        if self.size == 1:
            return value
        self.issue_preceding()
        values = [value]
        with self.calling_backend(what):
            dist.broadcast_object_list(values, group=self.process_group, group_src=0)
        return values[0]

    # ------------------------------------------------------------------------------------------------ between ranks

    def _exchange(
        self, outgoing: Sequence[Pieces], incoming: Sequence[Tensor], what: str, use: UseTile | None = None
    ) -> None:
        """Send ``outgoing[r]`` to every other rank r and receive ``incoming[r]`` from it, in host memory.

        With ``use``, it gets all messages in tiles, and those that are read are not in ``incoming``; see
        :meth:`Exchange.run_in_tiles`.
        """
        exchange = self._new_exchange(outgoing, incoming, self._data_tag, self._channels[0])
        self._perform(exchange.run if use is None else partial(exchange.run_in_tiles, use), exchange, what)

    def _exchange_beside(self, outgoing: Sequence[Pieces], incoming: Sequence[Tensor], what: str) -> Callable[[], None]:
        """Begin :meth:`_exchange`; returns a function that waits for its end, until which nobody may touch the tensors.

        The exchange goes on without this thread. Otherwise ranks that come to other waits first would stop each other
        for ever.
        """
        exchange = self._new_exchange(outgoing, incoming, self._data_tag, self._channels[1])
        self._perform(exchange.begin, exchange, what)
        finish: Callable[[], None] = exchange.finish
        if self.neighbors:
            self._reader = self._reader or LaneThreads(self, Lane.COMM)
            finish = self._reader.submit(finish).result
        return partial(self._perform, finish, exchange, what)

    def _new_exchange(
        self, outgoing: Sequence[Pieces], incoming: Sequence[Tensor], tag: int, channel: Channel | None = None
    ) -> Exchange:
        assert self.process_group is not None
        return Exchange(self.process_group, outgoing, incoming, tag, channel)

    @property
    def _data_tag(self) -> int:
        return _DATA_TAG | (self.digest & (_DATA_TAG - 1))

    def _perform(self, act: Callable[[], None], exchange: Exchange, what: str) -> None:
        with self.calling_backend(what) as waiting:
            try:
                act()
            finally:
                waiting.rank = exchange.awaited

    @contextmanager
    def calling_backend(self, what: str) -> Iterator[Waiting]:
        """Count the time of calls of the backend as waiting for other ranks, and explain their errors."""
        with self.explaining(what) as waiting, self.timers.phase(Phase.WAIT), named(what):
            yield waiting

    @contextmanager
    def explaining(self, what: str) -> Iterator[Waiting]:
        """Replace errors of the backend by ones that say what this rank was doing, had done before, and waited for.

        Results of a collective must be read inside this context, too: if it fails on a device, the host learns of that
        only when it waits for the device.

        Raises:
            CollectiveError: the backend has raised an error in a group of several ranks.
        """
        waiting = Waiting()
        try:
            yield waiting
        except (CollectiveError, torch.AcceleratorError):  # explained already, or an error of this rank's own device
            raise
        except RuntimeError as error:
            if self.size == 1:
                raise
            ranks = self._world_ranks
            waited = None if waiting.rank is None else ranks[waiting.rank]
            message = failure(what, error, self.board, ranks[self.rank], waited, self.recent)
            raise CollectiveError(message) from error

    # -------------------------------------------------------------------------------------------------- consistency

    def note(self, what: str) -> None:
        """Note an action without communication, so that the next collective checks that all ranks have done it."""
        self._noted = what

    def issue_preceding(self) -> None:
        """Issue what must precede a collective of the thread that trains, or wait until a lane has issued it."""
        if in_lane():  # a lane keeps its own order
            return
        if self.before is not None:
            self.before()
        issuing, self.issuing = self.issuing, DONE
        issuing.wait()

    def _announce(self, what: str, device: torch.device) -> None:
        """Note a collective that is about to be issued, and check whether all ranks are about to issue the same."""
        self.issue_preceding()
        if self._noted:
            what, self._noted = f"{what}, after {self._noted}", ""
        self.digest = zlib.crc32(what.encode(), self.digest)
        if self.checked:
            self._compare(what, device)
        self.recent.append(what)

    def _compare(self, what: str, device: torch.device) -> None:
        self._headers += 1
        own = self.digest.to_bytes(4) + what.encode()[: _HEADER - 4].ljust(_HEADER - 4)
        header = device_type(device).send(torch.frombuffer(bytearray(own), dtype=torch.uint8), device)
        table = header.new_empty(self.size, _HEADER)
        self._transport(device).gather_headers(table, header, what, self._headers % _DATA_TAG)
        with self.explaining(what):
            headers = [bytes(row) for row in table.tolist()]  # all at once, to wait for a device only once
        if any(header[:4] != own[:4] for header in headers):
            wants = [header[4:].decode(errors="replace").rstrip() for header in headers]
            raise CollectiveError(disagreement(dict(zip(self._world_ranks, wants, strict=True)), self.board))


class _Transport(Protocol):
    """Exchanges data between the ranks of a group of several ranks, in one kind of memory."""

    def padding(self, numel: int) -> int:
        """The number of elements by which ``numel`` elements must be padded for :meth:`all_reduce_`."""

    def scratch(self, part: int, dtype: torch.dtype, in_pieces: bool, out: bool) -> int:
        """See :meth:`Group.scratch`; a rank's part has ``part`` bytes."""

    def begin_all_gather(self, data: Tensor, what: str) -> Callable[[], None]:
        """See :meth:`Group.begin_all_gather_`; ``data`` is uint8."""

    def reduce_scatter(self, flat: Tensor | Pieces, what: str, factor: float, out: Tensor | None, add: bool) -> Tensor:
        """See :meth:`Group.reduce_scatter`."""

    def all_reduce_(self, flat: Tensor, what: str) -> None:
        """See :meth:`Group.all_reduce_`."""

    def gather_headers(self, table: Tensor, header: Tensor, what: str, tag: int) -> None:
        """Fill ``table`` (``[size, n]`` uint8) with every rank's ``header`` (``[n]`` uint8)."""


class _Messages:
    """A direct exchange in host memory: every rank sends to every other rank, and sums are made in rank order."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def padding(self, numel: int) -> int:
        return -numel % self._group.size

    def scratch(self, part: int, dtype: torch.dtype, in_pieces: bool, out: bool) -> int:
        # The parts from other ranks that are not read, and those joined for them; the sum takes the place of one.
        strangers, tile = self._group.strangers, bytes_of_tile(part)
        whole = strangers * (1 + in_pieces) + (not out and not strangers)
        tiles = self._group.size - 1 - strangers + 2 * (not ops.sums_in_place(dtype))
        return part * whole + tile * tiles + in_pieces * bytes_of_blocks(tile)

    def begin_all_gather(self, data: Tensor, what: str) -> Callable[[], None]:
        slices = data.chunk(self._group.size)
        return self._group._exchange_beside(self._to_all(slices), slices, what)

    def reduce_scatter(self, flat: Tensor | Pieces, what: str, factor: float, out: Tensor | None, add: bool) -> Tensor:
        group, pieces = self._group, Pieces.of(flat) if isinstance(flat, Tensor) else flat
        assert out is not None or not add
        parts, own = pieces.chunk(group.size), group.rank
        # Memory is needed only for what is not read in tiles.
        sizes = [0 if rank == own or rank in group.neighbors else part.numel for rank, part in enumerate(parts)]
        received = [use_huge_pages(torch.empty(size, dtype=flat.dtype, device=flat.device)) for size in sizes]
        if out is None:
            # A view of `flat` would keep all of it in memory. If a part was received, the sum takes its place.
            whole = [part for part in received if part.numel()]
            out = whole[-1] if whole else use_huge_pages(torch.empty(parts[own].numel, dtype=flat.dtype, device="cpu"))
        total, errors = out, list[Exception]()

        def add_up(at: int, tile: Pieces, others: Mapping[int, Tensor]) -> None:
            try:
                with group.timers.phase(Phase.REDUCE):
                    for start, block in tile.blocks():
                        stop = start + block.numel()
                        summands = [block if rank == own else others[rank][start:stop] for rank in range(group.size)]
                        ops.sum_in_order_(total[at + start : at + stop], summands, factor, add)
            except Exception as error:  # noqa: BLE001  (such as missing memory; the other ranks get their answers first)
                errors.append(error)

        group._exchange(parts, received, what, add_up)
        if errors:
            raise errors[0]
        return out

    def all_reduce_(self, flat: Tensor, what: str) -> None:
        slices = flat.chunk(self._group.size)
        self.reduce_scatter(flat, what, 1.0, slices[self._group.rank], add=False)
        self._group._exchange(self._to_all(slices), slices, what)

    def gather_headers(self, table: Tensor, header: Tensor, what: str, tag: int) -> None:
        group = self._group
        table[group.rank].copy_(header)
        exchange = group._new_exchange(self._to_all(list(table)), list(table), tag)
        group._perform(exchange.run, exchange, what)

    def _to_all(self, slices: Sequence[Tensor]) -> list[Pieces]:
        """This rank's slice, for every rank."""
        return [Pieces.of(slices[self._group.rank])] * self._group.size
