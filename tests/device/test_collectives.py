"""`simccl`: collectives of device tensors with NCCL's semantics."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from device import sim
from device.test_overlap import Case, start
from device.where import DevicePool, device_of_rank
from engine import driver
from helpers import models
from helpers.ranks import RankError
from torch import Tensor

from lightning_zero import CollectiveError
from lightning_zero.sharding import Mesh
from lightning_zero.storage import make_executor

pytestmark = pytest.mark.simulated

LAST_NUMBER = Path("/proc/sys/kernel/ns_last_pid")
SCHEDULES = ("eager", "lazy", "random1", "random2")


def every_collective() -> dict[str, Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(sim.DEVICE, rank)
    torch.accelerator.set_device_index(rank)
    own = torch.arange(4.0, device=device) + 10 * rank
    found = {}

    def empty(numel: int) -> Tensor:
        return torch.empty(numel, device=device)

    found["all_reduce"] = own.clone()
    dist.all_reduce(found["all_reduce"])
    found["mean"] = own.to(torch.bfloat16)
    dist.all_reduce(found["mean"], dist.ReduceOp.AVG)
    found["maximum"] = own.clone()
    dist.all_reduce(found["maximum"], dist.ReduceOp.MAX)
    found["all_gather_into_tensor"] = empty(4 * world)
    dist.all_gather_into_tensor(found["all_gather_into_tensor"], own)
    parts = [empty(4) for _ in range(world)]
    dist.all_gather(parts, own)
    found["all_gather"] = torch.stack(parts)
    found["reduce_scatter_tensor"] = empty(4 // world)
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], own)
    found["reduce_scatter"] = empty(2)
    dist.reduce_scatter(found["reduce_scatter"], list(own.chunk(world)) if world > 1 else [own[:2]])
    found["broadcast"] = own.clone()
    dist.broadcast(found["broadcast"], src=world - 1)
    found["all_to_all_single"] = empty(4)
    dist.all_to_all_single(found["all_to_all_single"], own)
    swapped = [empty(4 // world) for _ in range(world)]
    dist.all_to_all(swapped, list(own.chunk(world)))
    found["all_to_all"] = torch.cat(swapped)
    found["coalesced"] = empty(8 * world)
    with dist._coalescing_manager(device=device, async_ops=True) as together:
        for half in found["coalesced"].chunk(2):
            dist.all_gather_into_tensor(half, own)
    together.wait()
    dist.barrier()
    return found


@pytest.mark.device(*SCHEDULES)
def test_collectives_give_what_they_should(device_pool2: DevicePool) -> None:
    assert_right(*device_pool2.run(every_collective))


def assert_right(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """What `every_collective` has returned on two ranks."""
    own = [torch.arange(4.0), torch.arange(4.0) + 10]
    both = {
        "all_reduce": own[0] + own[1],
        "mean": ((own[0] + own[1]) / 2).bfloat16(),
        "maximum": own[1],
        "all_gather_into_tensor": torch.cat(own),
        "all_gather": torch.stack(own),
        "broadcast": own[1],
        "coalesced": torch.cat(own * 2),
    }
    each = {
        "reduce_scatter_tensor": (own[0] + own[1]).chunk(2),
        "reduce_scatter": (own[0] + own[1]).chunk(2),
        "all_to_all_single": (torch.cat([own[0][:2], own[1][:2]]), torch.cat([own[0][2:], own[1][2:]])),
        "all_to_all": (torch.cat([own[0][:2], own[1][:2]]), torch.cat([own[0][2:], own[1][2:]])),
    }
    for name, expected in both.items():
        assert torch.equal(one[name], expected), name
        assert torch.equal(other[name], expected), name
    for name, (first, second) in each.items():
        assert torch.equal(one[name], first), name
        assert torch.equal(other[name], second), name


def host_waits(right: bool) -> tuple[dict[str, int], bool]:
    """How often the host waits in an asynchronous collective, and whether its result is right."""
    rank, c = dist.get_rank(), sim.install()
    x = torch.full((1000,), rank + 1.0, device=sim.DEVICE)
    dist.barrier()
    c.reset_counters()
    work = dist.all_reduce(x, async_op=True)
    if right:
        work.wait()
    y = x + 1
    waits = c.waits()
    result = bool(y.cpu().eq(4).all())
    work.wait()
    dist.barrier()
    return waits, result


@pytest.mark.device
def test_waiting_for_a_collective_lets_the_stream_wait_and_not_the_host(device_pool2: DevicePool) -> None:
    assert device_pool2.run(host_waits, right=True) == [({}, True)] * 2
    assert device_pool2.run(host_waits, right=False) == [({}, False)] * 2


def follows_its_caller() -> bool:
    """Another stream waits for the collective, and by it alone for what the caller's stream had to do before."""
    x, side = torch.full((1000,), dist.get_rank() + 1.0, device=sim.DEVICE), torch.Stream(device=sim.DEVICE)
    work = dist.all_reduce(x, async_op=True)
    with side:
        work.wait()
        right = bool(x.cpu().eq(3).all())
    torch.accelerator.synchronize()  # before its memory is freed
    return right


@pytest.mark.device
def test_a_collective_follows_what_its_caller_had_to_do(device_pool2: DevicePool) -> None:
    assert device_pool2.run(follows_its_caller) == [True, True]


def goes_on_beside_its_host() -> float:
    """Rank 1's host waits for rank 0's, and rank 0's for a collective that rank 1 has enqueued and not waited for."""
    x = torch.ones(4, device=sim.DEVICE)
    work = dist.all_reduce(x, async_op=True)
    note = torch.zeros(1)
    if dist.get_rank() == 0:
        work.wait()
        note[0] = x.sum().item()
    dist.broadcast(note, src=0)
    work.wait()
    return float(note)


@pytest.mark.device
def test_a_device_goes_on_while_its_host_waits_for_another_host(device_pool2: DevicePool) -> None:
    assert device_pool2.run(goes_on_beside_its_host) == [8.0, 8.0]


def collectives_of_two_groups() -> bool:
    """Each rank enqueues them in another order, and looks whether they have ended."""
    groups = [dist.new_group(backend=sim.BACKEND) for _ in range(2)]
    x = torch.ones(2, 4, device=sim.DEVICE)
    torch.accelerator.synchronize()
    order = [0, 1] if dist.get_rank() == 0 else [1, 0]
    works = [dist.all_reduce(x[number], group=groups[number], async_op=True) for number in order]
    while not all(work.is_completed() for work in works):
        time.sleep(0.02)
    for work in works:
        work.wait()
    return bool(x.eq(2).all())


@pytest.mark.device
def test_collectives_of_two_groups_run_beside_each_other(device_pool2: DevicePool) -> None:
    assert device_pool2.run(collectives_of_two_groups) == [True, True]


def goes_on_beside_threads_that_wait_for_python(fifo: Path) -> bool:
    """Rank 1's host keeps Python's lock until rank 0 has its result; threads that want the lock look every 5 ms."""
    x, ended = torch.ones(4, device=sim.DEVICE), threading.Event()
    pipe = os.open(fifo, os.O_RDWR)
    if dist.get_rank() == 0:
        dist.all_reduce(x)
        right = bool(x.eq(2).all())
        os.write(pipe, b"!")
        os.close(pipe)
        return right

    def use_the_device(number: int) -> None:
        torch.ones(1, device=sim.DEVICE)
        while not ended.wait(1e-4 * number):  # not all at once
            pass

    threads = [threading.Thread(target=use_the_device, args=(number,)) for number in range(1, 17)]
    for thread in threads:
        thread.start()
    dist.all_reduce(x)
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    os.close(pipe)
    ended.set()
    for thread in threads:
        thread.join()
    return bool(x.eq(2).all())


@pytest.mark.device
def test_a_device_goes_on_while_threads_wait_for_python(device_pool2: DevicePool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert device_pool2.run(goes_on_beside_threads_that_wait_for_python, tmp_path / "fifo") == [True, True]


def goes_on_beside_a_busy_thread() -> float:
    """The same, where a thread that never sleeps has the number of one that used the device and has ended."""
    if dist.get_rank() == 0:
        return goes_on_beside_its_host()
    used = threading.Thread(target=torch.ones, args=(1,), kwargs={"device": sim.DEVICE})
    used.start()
    used.join()
    assert used.native_id is not None
    while True:
        LAST_NUMBER.write_text(str(used.native_id - 1))
        ended = threading.Event()
        busy = threading.Thread(target=work_until, args=(ended,))
        busy.start()
        try:
            if busy.native_id == used.native_id:  # no other process was faster
                return goes_on_beside_its_host()
        finally:
            ended.set()
            busy.join()


def work_until(ended: threading.Event) -> None:
    while not ended.is_set():
        pass


@pytest.mark.skipif(not os.access(LAST_NUMBER, os.W_OK), reason="only root chooses the number of a thread")
@pytest.mark.device
def test_a_thread_that_has_ended_does_not_keep_a_host_awake(device_pool2: DevicePool) -> None:
    assert device_pool2.run(goes_on_beside_a_busy_thread) == [8.0, 8.0]


class Waits:
    """Garbage, as a cycle, whose end waits for the device: as pinned memory does before it is unpinned."""

    def __init__(self, ended: list[bool]) -> None:
        self.ended, self.itself = ended, self

    def __del__(self) -> None:
        torch.accelerator.synchronize()
        self.ended.append(True)


def collects_garbage_that_waits() -> int:
    ended: list[bool] = []
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(5):
            gc.disable()
            x = torch.ones(4, device=sim.DEVICE)
            dist.all_reduce(x)
            Waits(ended)
            read = x.cpu
            gc.enable()  # what the collective, which runs here, allocates in Python lets it be collected
            y = read()
            assert y.eq(2).all()
    finally:
        gc.set_threshold(*before)
        gc.enable()
    gc.collect()
    return len(ended)


@pytest.mark.device
def test_a_collective_may_run_while_garbage_is_collected(device_pool2: DevicePool) -> None:
    assert device_pool2.run(collects_garbage_that_waits) == [5, 5]


def collectives_of_a_group() -> list[list[float]]:
    """Each is read before anything else waits; ranks compare what they ask for before it."""
    device, mesh = device_of_rank(sim.DEVICE), Mesh.create()
    group, flat = mesh.world, torch.full((4,), dist.get_rank() + 1.0)
    mesh.check(True)
    gathered = flat.to(device)
    group.all_gather_(gathered, "gather")
    found = [gathered.tolist()]
    found.append(group.reduce_scatter(flat.to(device), "reduce").tolist())
    found.append(group.all_reduce_(flat.to(device), "sum").tolist())
    found.append(group.broadcast_(flat.to(device), "show", src=1).tolist())
    return found


@pytest.mark.device
def test_who_asks_a_group_can_read_the_result(device_pool2: DevicePool) -> None:
    expected = [[1.0, 1.0, 2.0, 2.0], [3.0, 3.0], [3.0] * 4, [2.0] * 4]
    assert device_pool2.run(collectives_of_a_group) == [expected] * 2


def misses_a_rank() -> str:
    group = dist.new_group(backend=sim.BACKEND)
    group.set_timeout(timedelta(seconds=0.5))  # not before: ranks may come to the group apart
    x, message = torch.ones(4, device=sim.DEVICE), ""
    if dist.get_rank() == 0:
        dist.all_reduce(x, group=group)
        with pytest.raises(RuntimeError, match="all-reduce") as caught:
            x.cpu()
        message = str(caught.value)
    dist.all_reduce(torch.zeros(1))  # until then the other rank is there
    return message


@pytest.mark.device
def test_a_missing_rank_ends_by_the_timeout(device_pool2: DevicePool) -> None:
    message, _ = device_pool2.run(misses_a_rank)
    assert "imed out" in message or "timeout" in message.lower(), message


def takes_a_host_tensor() -> None:
    group = dist.new_group(backend=sim.BACKEND)
    dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.device
def test_a_host_tensor_is_refused(device_pool2: DevicePool) -> None:
    with pytest.raises(RankError, match="cpu"):
        device_pool2.run(takes_a_host_tensor)


def backward_alone(checked: bool) -> str:
    """The error of rank 0 in a backward that the other rank does not come to; the host learns it when it waits."""
    mesh = Mesh.create()
    executor, device = make_executor(torch.device(sim.DEVICE), overlap=True), torch.device(sim.DEVICE, dist.get_rank())
    torch.accelerator.set_device_index(device.index)
    session = start(Case(2, host=False), executor, device, mesh=mesh)
    mesh.check(checked)
    batch, message = models.make_batches(1, 1, 1)[0][0][0].to(device), ""
    with session.engine.forward_context():
        loss = models.next_token_loss(session.model, batch)
    dist.barrier()
    for group in (mesh.world, mesh.shard):
        assert group.process_group is not None
        group.process_group.set_timeout(timedelta(seconds=0.5))
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveError) as caught:
            driver.backward(session.engine, loss)
        message = str(caught.value)
    dist.all_reduce(torch.zeros(1))  # until then the other rank is there
    return message


@pytest.mark.device
def test_a_collective_that_fails_on_the_device_is_explained(device_pool2: DevicePool) -> None:
    """Where headers are compared, and where the step's flags are read, which wait for all that came before."""
    compared, read = device_pool2.run(backward_alone, True)[0], device_pool2.run(backward_alone, False)[0]
    for message, what in ((compared, "reduce"), (read, "sum up norms and flags")):
        assert message.startswith(f"rank 0 of 2 could not {what}"), message
        assert "failed, or does something else than this one" in message
        assert "imed out" in message or "timeout" in message.lower(), message
