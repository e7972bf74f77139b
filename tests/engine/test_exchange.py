"""Messages between ranks of a node: read where they lie, or sent."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import RankPool, ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_zero import ops
from lightning_zero.cli.machine import read_machine
from lightning_zero.limits import process_name
from lightning_zero.sharding import CollectiveError, Mesh, exchange
from lightning_zero.sharding import pieces as pieces_module
from lightning_zero.sharding.cross_memory import Slot, SlotBoard
from lightning_zero.sharding.exchange import Channel
from lightning_zero.sharding.pieces import Pieces

pytestmark = pytest.mark.skipif(
    (found := read_machine(ops=ops).cross_memory) != "yes", reason=f"can ranks read each other's memory? {found}"
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LATE = 0.3  # seconds: longer than a rank's patience


def cut(values: Tensor, draw: torch.Generator) -> Pieces:
    """Some of the values, in pieces that lie anywhere."""
    borders = torch.randint(values.numel() + 1, (int(torch.randint(40, (), generator=draw)) * 2,), generator=draw)
    borders = borders.unique()  # sorted
    ranges = [(start, stop) for start, stop in pairwise(borders.tolist()) if torch.rand((), generator=draw) < 0.7]
    return Pieces(values.numel(), values.dtype, [(start, values[start:stop].clone()) for start, stop in ranges])


def collect(mesh: Mesh, seed: int) -> list[Tensor]:
    """The results of collectives of random sizes and dtypes; gathers go on beside the others."""
    alike = torch.Generator().manual_seed(seed)  # on all ranks
    own = torch.Generator().manual_seed(seed * 100 + dist.get_rank())
    results: list[Tensor] = []
    waits: list[Any] = []
    for number in range(12):
        size, kind, dtype = (int(torch.randint(n, (), generator=alike)) for n in (3000, 4, len(DTYPES)))
        flat = torch.randn(size * mesh.shard.size, generator=own).to(DTYPES[dtype])
        if kind == 0:
            waits.append(mesh.shard.begin_all_gather_(flat, f"gather {number}"))
            results.append(flat)
        elif kind == 1:
            pieces = cut(flat, own)
            found = mesh.shard.reduce_scatter(pieces, f"reduce pieces of {number}", 0.3)
            results.append(mesh.shard.reduce_scatter(pieces.join(), f"reduce {number}", 0.3))
            assert torch.equal(found, results[-1])
        elif kind == 2:
            results.append(mesh.world.all_reduce_(flat, f"sum {number}"))
        elif waits:
            waits.pop()()
    for wait in waits:
        wait()
    return results


def collect_in_both_ways(seeds: Sequence[int], shard_size: int | None, without: int = -1, blind: bool = False) -> None:
    """But for the rank ``without``, which sends and receives: it wants to, or is ``blind`` while others read it."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == without and blind:
            patch.setattr(SlotBoard, "find_neighbors", lambda *_: {})
        elif dist.get_rank() == without:
            patch.setenv("LIGHTNING_ZERO_CMA", "off")
        mesh, read = Mesh.create(shard_size), ops.RemoteMessage.read
    readers = [rank for rank in range(mesh.world.size) if rank != without]
    expected_reads = mesh.world.rank in readers and len(readers) > 1
    assert [*mesh.world.neighbors] == [rank for rank in readers if expected_reads and rank != mesh.world.rank]
    reads: list[int] = []

    def counted(message: ops.RemoteMessage, start: int, target: Tensor) -> None:
        reads.append(start)
        read(message, start, target)

    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "_TILE", 5000)
            patch.setattr(ops.RemoteMessage, "read", counted)
            found = collect(mesh, seed)
            begun = len(reads)
            for group in (mesh.world, mesh.shard, mesh.replica):
                patch.setattr(group, "_channels", [Channel({}, 0)] * 2)
            expected = collect(mesh, seed)
        assert all(map(torch.equal, found, expected))
        assert len(reads) == begun
        assert any(reads) == expected_reads  # also tiles after the first


@ranks(2, 4)
def test_messages_that_are_read_have_the_bits_of_those_that_are_sent(pool: RankPool) -> None:
    pool.run(collect_in_both_ways, range(4), None)
    if pool.world_size == 4:
        pool.run(collect_in_both_ways, range(4, 6), 2)
        for blind in (False, True):
            pool.run_within(20, collect_in_both_ways, [6 + blind], None, 1, blind)


def sum_under(late: int | None, slow: int | None, refusing: Sequence[int], readable: int = 0) -> list[float]:
    """Sums twice while a rank comes late or reads slowly; senders change their memory at once.

    Some ranks cannot read more than a number of bytes.
    """
    mesh, read = Mesh.create(), ops.RemoteMessage.read
    rank = mesh.world.rank

    def reading(message: ops.RemoteMessage, start: int, target: Tensor) -> None:
        if rank == slow and not start:
            time.sleep(LATE)
        if rank in refusing and start + target.nbytes > readable:
            raise OSError(errno.EFAULT, "planted")
        read(message, start, target)

    sums = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.RemoteMessage, "read", reading)
        patch.setattr(exchange, "_TILE", 1600)
        for number in range(2):
            if rank == late:
                time.sleep(LATE)
            values = torch.full([1000 * mesh.world.size], float(10**rank + number))
            part = torch.zeros(1000)  # a tile that was added twice would be seen
            mesh.world.reduce_scatter(values, f"sum {number}", out=part, add=True)
            values.fill_(torch.nan)
            assert part.unique().numel() == 1
            sums.append(float(part[0]))
    return sums


@ranks(2)
def test_late_ranks_and_memory_that_cannot_be_read(pool: RankPool) -> None:
    """Ranks that wait for long fall asleep and are woken, and a message that cannot be read is sent."""
    cases = [(None, None, [0]), (0, None, []), (0, None, [0, 1]), (None, 0, []), (1, 0, [1])]
    in_the_midst = [(None, None, [0], 2000), (None, None, [0, 1], 3500)]
    for case in [*cases, *in_the_midst]:
        assert pool.run_within(20, sum_under, *case) == [[11.0, 13.0]] * 2, case


def fail_to_sum() -> list[float]:
    """Rank 0 cannot sum the second of three tiles. Returns the sums after that."""
    mesh, add_up, calls = Mesh.create(), ops.sum_in_order_, list[int]()

    def failing(total: Tensor, *args: Any) -> None:
        calls.append(len(calls))
        if mesh.world.rank == 0 and len(calls) == 2:
            raise RuntimeError("planted")
        add_up(total, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_TILE", 1600)
        patch.setattr(ops, "sum_in_order_", failing)
        planted = pytest.raises(RuntimeError, match="planted") if mesh.world.rank == 0 else nullcontext()
        with planted as error:
            mesh.world.reduce_scatter(torch.ones(2000), "sum")
        assert calls == [0, 1, 2]
    assert not error or not isinstance(error.value, CollectiveError)
    return mesh.world.reduce_scatter(torch.ones(2000), "sum again").unique().tolist()


def test_a_sum_that_fails_is_no_error_of_another_rank(pool2: RankPool) -> None:
    assert pool2.run_within(20, fail_to_sum) == [[2.0]] * 2


def wait_in_another_order() -> float:
    mesh = Mesh.create()
    flat = torch.full([2 * 1000], float(mesh.world.rank))
    if mesh.world.rank == 1:
        time.sleep(LATE)
    wait = mesh.world.begin_all_gather_(flat, "gather")
    if mesh.world.rank == 0:
        wait()
    total = mesh.world.all_reduce_(torch.ones(1000), "sum")
    wait()
    return float(flat.sum() + total.sum())


def test_a_gather_goes_on_without_the_thread_that_began_it(pool2: RankPool) -> None:
    """Or ranks that wait for it in different orders would stop each other."""
    assert pool2.run_within(20, wait_in_another_order) == [3000.0] * 2


def gather_from_a_late_rank() -> float:
    mesh = Mesh.create()
    flat = torch.full([2 * 1000], float(mesh.world.rank))
    if mesh.world.rank == 1:
        time.sleep(LATE)
    mesh.world.all_gather_(flat, "gather")
    return float(flat.sum())


def test_a_gather_has_ended_for_whoever_does_not_begin_it_apart(pool2: RankPool) -> None:
    assert pool2.run_within(20, gather_from_a_late_rank) == [1000.0] * 2


def gather_different_sizes() -> str:
    """The second gather's message; it would fit."""
    mesh = Mesh.create()
    sizes = 1000 * (1 + mesh.world.rank), 1000
    exchange._kept.clear()
    waits = [mesh.world.begin_all_gather_(torch.ones(2 * size), "gather") for size in sizes]
    with pytest.raises(CollectiveError) as first:
        waits[0]()
    with pytest.raises(CollectiveError, match="an exchange before it has failed: "):
        waits[1]()
    assert "an exchange" not in str(first.value)
    assert exchange._kept  # another rank may still read it
    exchange._kept.clear()
    return str(first.value)


def test_a_message_of_another_size_is_an_error_at_once(pool2: RankPool) -> None:
    for rank, message in enumerate(pool2.run_within(20, gather_different_sizes)):
        own, other = 4000 * (1 + rank), 4000 * (2 - rank)
        start = f"rank {rank} of 2 could not gather, because rank {1 - rank} does something else: "
        assert message.startswith(f"{start}{other} bytes where {own} were expected. Before it, this rank had asked for")


def test_only_processes_that_can_be_read_are_neighbors() -> None:
    names = [process_name()] * 2
    own, other = SlotBoard(2, 3), SlotBoard(2, 3)
    offers = [own.offer(), other.offer()]
    found, back = own.find_neighbors(names, offers, 0), other.find_neighbors(names, offers, 1)
    assert [*found] == [1]
    assert found[1].process == os.getpid()
    slot, seen = found[1].slots[2], back[0].own_slots[2]
    message = torch.ones(7)
    table = slot.write(Pieces(9, message.dtype, [(0, message[:1]), (3, message[1:])]), 1 << 30)
    assert table.tolist() == [[0, message.data_ptr(), 4], [12, message.data_ptr() + 4, 24]]
    assert not slot.posted.announce(1)
    assert seen.posted.wait(1, 0.0)
    assert seen.read() == (table.ctypes.data, 2, 36, 1 << 30)
    read = torch.full([9], torch.nan)
    ops.RemoteMessage(os.getpid(), table.ctypes.data, 2, 36).read(0, read)
    assert read.tolist() == [1, 0, 0, 1, 1, 1, 1, 1, 1]
    assert not any(each.posted.wait(1, 0.0) for each in (*back[0].own_slots[:2], *back[0].slots, *found[1].own_slots))
    with Path(os.devnull).open() as file:
        wrong = [
            None,  # it does without
            offers[1]._replace(secret=b"another"),  # another process with this number
            offers[1]._replace(address=8),
            offers[1]._replace(file=12345),
            offers[1]._replace(file=file.fileno()),
            offers[1]._replace(file=offers[0].file),
            SlotBoard(3, 3).offer(),
        ]
        assert not any(own.find_neighbors(names, [offers[0], offer], 0) for offer in wrong)
    # Another machine, or another namespace of processes.
    assert not own.find_neighbors([names[0], f"elsewhere {names[1]}"], offers, 0)
    files = len([*Path("/proc/self/fd").iterdir()])
    own.close()
    other.close()
    assert len([*Path("/proc/self/fd").iterdir()]) == files - 2
    assert not own.find_neighbors(names, offers, 0)
    assert seen.posted.wait(1, 0.0)


def test_strided_memory_is_refused() -> None:
    strided = torch.ones(8)[::2]
    with pytest.raises(ValueError, match=r"the message has strides \(2,\)"):
        Slot(np.zeros(64, dtype=np.uint8)).write(Pieces(4, strided.dtype, [(0, strided)]), 1)
    with pytest.raises(ValueError, match=r"the target has shape \(4,\) and strides \(2,\)"):
        ops.read_memory(os.getpid(), strided.data_ptr(), strided)
    table = np.array([[0, strided.data_ptr(), 4], [4, strided.data_ptr(), 4]])
    message = ops.RemoteMessage(os.getpid(), table.ctypes.data, 2, 8)
    with pytest.raises(ValueError, match=r"the target has shape \(4,\) and strides \(2,\)"):
        message.read(0, strided)


def test_messages_other_than_described_are_refused() -> None:
    values, process = torch.ones(2), os.getpid()
    table = np.array([[4, values.data_ptr(), 4], [0, values.data_ptr(), 4]])
    with pytest.raises(ValueError, match="has no 2 pieces of 8 bytes, in order, at "):
        ops.RemoteMessage(process, table.ctypes.data, 2, 8)
    with pytest.raises(ValueError, match="has no 2000000000000 pieces of 8 bytes, in order, at "):
        ops.RemoteMessage(process, table.ctypes.data, 2 * 10**12, 8)
    with pytest.raises(OSError, match=f"memory of process {process}"):
        ops.RemoteMessage(process, 8, 1, 8)
    message = ops.RemoteMessage(process, table.ctypes.data, 1, 8)
    for start in (-4, 4):
        with pytest.raises(ValueError, match=f"the message has 8 bytes; expected 8 from byte {start} on"):
            message.read(start, values)


@given(st.data(), st.integers(1, 60))
def test_ranges_of_a_message_are_read(data: st.DataObject, numel: int) -> None:
    pieces = cut(torch.rand(numel), torch.Generator().manual_seed(data.draw(st.integers(0, 1000))))
    table = Slot(np.zeros(64, dtype=np.uint8)).write(pieces, 1)
    message = ops.RemoteMessage(os.getpid(), table.ctypes.data, len(table), pieces.nbytes)
    start = data.draw(st.integers(0, numel))
    target = torch.full([data.draw(st.integers(0, numel - start))], torch.nan)
    message.read(4 * start, target)
    assert torch.equal(target, pieces.join()[start : start + target.numel()])


@given(st.data(), st.integers(1, 5), st.integers(1, 40))
def test_pieces_are_cut_and_joined(data: st.DataObject, number: int, size: int) -> None:
    flat = torch.zeros(number * size, dtype=torch.float64)
    parts = []
    for start, stop in pairwise(sorted(data.draw(st.sets(st.integers(0, flat.numel()))))):
        if data.draw(st.booleans()):
            flat[start:stop] = torch.rand(stop - start, dtype=flat.dtype)
            parts.append((start, flat[start:stop].clone()))
    pieces = Pieces(flat.numel(), flat.dtype, parts)
    for each, whole in ((pieces, flat), *zip(pieces.chunk(number), flat.chunk(number), strict=True)):
        joined = each.join()
        with mock.patch.object(pieces_module, "_SMALL", 64):
            blocks = [*each.blocks()]
        assert joined.dtype == flat.dtype
        assert torch.equal(joined, whole)
        assert torch.equal(torch.cat([block for _, block in blocks]), whole)
        assert [start for start, _ in blocks] == [0, *accumulate(block.numel() for _, block in blocks)][:-1]
        assert all(block.nbytes < 128 or any(block is part for _, part in each.parts) for _, block in blocks)
        assert all(block.nbytes + after.nbytes >= 64 for (_, block), (_, after) in pairwise(blocks))
    assert Pieces.of(flat).join().data_ptr() == flat.data_ptr()
    assert [each.parts[0][1].data_ptr() for each in Pieces.of(flat).chunk(number)] == [
        each.data_ptr() for each in flat.chunk(number)
    ]


def test_the_environment_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_ZERO_CMA", raising=False)
    assert not ops.cma_refusal()
    monkeypatch.setenv("LIGHTNING_ZERO_CMA", "off")
    assert ops.cma_refusal() == "LIGHTNING_ZERO_CMA=off"
    monkeypatch.setenv("LIGHTNING_ZERO_CMA", "no")
    with pytest.raises(ValueError, match="LIGHTNING_ZERO_CMA='no' must be 'off', or unset"):
        ops.cma_refusal()
    monkeypatch.delenv("LIGHTNING_ZERO_CMA")
    monkeypatch.setattr("sys.platform", "darwin")
    assert "Linux" in ops.cma_refusal()
