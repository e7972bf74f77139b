"""The executor whose lanes are streams and threads: its contract on a device."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
import torch
from device import sim
from storage.test_executor import Deferred
from torch import Tensor

from lightning_zero import ops
from lightning_zero.sharding import BucketPlacement, Mesh, MixedPrecisionPolicy, ShardedGradient, ShardingPolicy
from lightning_zero.sharding.layout import Segment
from lightning_zero.sharding.masters import StoreHome
from lightning_zero.storage import DeviceStore, DiskStore, HostStore, Lane, StreamExecutor
from lightning_zero.storage.run_folder import RunFolder
from lightning_zero.storage.staging import staged_size
from lightning_zero.storage.streams import _Work
from lightning_zero.storage.threads import FILE_LANES, in_lane

N = 1000


def host(device: torch.device, value: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return HostStore(pin_for=device).zeros(N, dtype).fill_(value)


def memory(device: torch.device) -> int:
    return int(torch.accelerator.memory_stats(device)["allocated_bytes.all.current"])


@pytest.mark.device("eager", "lazy", "random1", "random4")
def test_work_follows_what_it_comes_after(device: torch.device) -> None:
    """Each result is read where nobody else has waited for what it needs."""
    executor, arrived, back, again = StreamExecutor(device), host(device), torch.zeros(N, device=device), host(device)
    # The device converts what leaves it; the host what goes there.
    left = executor.commit(arrived, torch.full((N,), 3.0, dtype=torch.bfloat16, device=device), "a")
    doubled = executor.submit(lambda: arrived.mul_(2), Lane.HOST, "a", after=[left])
    fetched = executor.fetch(back, arrived, "a", after=[doubled])
    executor.receive(torch.full((N,), 0.5, device=device), arrived.add_, "a", after=[doubled, fetched]).synchronize()
    assert arrived.eq(6.5).all()
    assert back.cpu().eq(6).all()
    came = executor.commit(again, torch.full((N,), 0.25, device=device), "a")
    narrow, other = (torch.zeros(N, dtype=torch.bfloat16, device=device) for _ in range(2))
    converted = executor.fetch(narrow, again, "a", after=[came])
    executor.fetch(other, arrived, "a")  # the first copy may still read what it was converted to
    executor.commit(again, narrow, "a", after=[converted]).synchronize()
    assert again.eq(0.25).all()
    assert not executor.blocked


@pytest.mark.simulated
@pytest.mark.device("lazy", "random1", "random4")
def test_the_ticket_of_a_job_stands_for_what_it_submits(device: torch.device) -> None:
    executor, target, half = StreamExecutor(device, 0, 0), torch.zeros(N, device=device), host(device, 0.5)
    narrow = torch.zeros(N, dtype=torch.bfloat16, device=device)

    def job() -> None:
        assert in_lane()
        assert not torch.is_grad_enabled()
        executor.fetch(target, half, "a").wait()
        for value in (1.0, 2.0):  # one buffer after the other has room
            with executor.filling(narrow, "a") as filled:
                filled.fill_(value)

    with sim.counted() as counts:
        executor.submit(job, Lane.HOST, "a").wait()
        total = target + narrow
    assert total.cpu().eq(2.5).all()
    with executor.filling(narrow, "a") as filled:
        filled.fill_(3)
    assert narrow.cpu().eq(3).all()
    assert not counts.waits
    assert counts.beside.total() == 1  # for the buffer


@pytest.mark.device("lazy")
def test_staging_memory_comes_back_from_what_fails(device: torch.device) -> None:
    executor, narrow, wide = StreamExecutor(device), torch.zeros(N, dtype=torch.bfloat16, device=device), host(device)

    def fill() -> None:
        with executor.filling(narrow, "a"):
            raise MemoryError

    for _ in range(2):
        with pytest.raises(MemoryError):
            fill()
        with mock.patch.object(executor, "_copy", side_effect=MemoryError):
            for use in (lambda: executor.fetch(narrow, wide, "a"), lambda: executor.receive(narrow, len, "a")):
                with pytest.raises(MemoryError):
                    use()
    assert executor.staged_bytes == 2 * staged_size(narrow.nbytes)  # a buffer for each direction


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_the_ticket_of_a_computation_stands_for_the_copies_that_it_submits(device: torch.device) -> None:
    executor, arrived, back = StreamExecutor(device), host(device), torch.zeros(N, device=device)

    def job() -> None:
        executor.commit(arrived, torch.full((N,), 7.0, device=device), "a")

    executor.fetch(back, arrived, "a", after=[executor.submit(job, Lane.COMPUTE, "a")]).wait()
    assert back.cpu().eq(7).all()


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_jobs_of_a_thread_that_cannot_be_prepared_fail(device: torch.device) -> None:
    """And do not hang. The cores of a container may change, for one."""
    executor = StreamExecutor(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "work_beside", lambda: os.sched_setaffinity(0, {4095}))
        for _ in range(2):
            with pytest.raises(OSError, match="Invalid argument"):
                executor.submit(lambda: None, Lane.HOST, "a").synchronize()
    executor.submit(lambda: None, Lane.HOST, "a").synchronize()


@pytest.mark.device("lazy", "random1", "random4")
@pytest.mark.parametrize("alone", [False, True])
def test_a_lane_with_a_stream_follows_jobs_copies_and_the_training(device: torch.device, alone: bool) -> None:
    """And so do those who wait for it."""
    executor, half, seven = StreamExecutor(device), host(device), host(device, 7)
    fetched, target, total = (torch.zeros(N, device=device) for _ in range(3))
    updated = executor.submit(lambda: half.fill_(0.5), Lane.HOST, "a")
    came = executor.fetch(fetched, seven, "a")
    trained = torch.ones(N, device=device) * 3

    def job() -> None:
        stream = torch.accelerator.current_stream(device)
        assert stream != training
        total.copy_(trained)
        if alone:  # before anything else has the device do what this comes after
            stream.record_event().synchronize()
        executor.fetch(target, half, "a").wait()
        total.add_(target).add_(fetched)
        if alone:
            stream.record_event().synchronize()

    training = torch.accelerator.current_stream(device)
    executor.submit(job, Lane.COMM, "a", after=[updated, came]).wait()
    assert (total * 2).cpu().eq(21).all()


@pytest.mark.device("lazy", "random1", "random4")
def test_what_a_job_submits_follows_what_it_has_waited_for(device: torch.device) -> None:
    executor, passing, target = StreamExecutor(device), host(device), torch.zeros(N, device=device)
    arrived = executor.commit(passing, torch.full((N,), 7.0, device=device), "a")

    def job() -> None:
        arrived.wait()
        executor.fetch(target, passing, "b").synchronize()

    executor.submit(job, Lane.HOST, "b").wait()
    assert target.cpu().eq(7).all()
    again = executor.commit(passing, torch.full((N,), 8.0, device=device), "a")
    executor.submit(again.wait, Lane.HOST, "b").synchronize()  # nor does anyone else who waits for the job
    assert passing.eq(8).all()
    executor.submit(
        lambda: executor.fetch(target, passing, "b"), Lane.HOST, "b"
    ).wait()  # and what it has not waited for
    assert target.cpu().eq(8).all()


@pytest.mark.device("lazy", "random1", "random4")
def test_who_waits_for_a_job_of_many_copies_waits_once(device: torch.device) -> None:
    """And has waited for all of them, since their stream does them in order."""
    executor, values = StreamExecutor(device), [host(device, float(value)) for value in range(5)]
    targets = [torch.zeros(N, device=device) for _ in values]

    def job() -> None:
        for target, value in zip(targets, values, strict=True):
            executor.fetch(target, value, "a").wait()

    work = executor.submit(job, Lane.HOST, "a")
    work.wait()
    assert torch.stack(targets)[:, -1].tolist() == [0, 1, 2, 3, 4]
    assert len(cast("_Work", work).marks()) == 1


@pytest.mark.device("lazy")
def test_a_copy_follows_what_it_comes_after_in_one_memory_and_between_two(device: torch.device) -> None:
    executor, store = StreamExecutor(device), DeviceStore(device)
    policy = ShardingPolicy.from_stage(2)
    placement = BucketPlacement(Mesh.single(), policy, MixedPrecisionPolicy(), device, store, store, executor)
    there, target = torch.zeros(N, device=device), torch.zeros(N, device=device)
    seven, passing, nine = host(device, 7), host(device), host(device, 9)  # kept: unpinning waits for the device
    came = executor.fetch(there, seven, "a")
    placement.move(target, there, ("device", "device"), "a", after=[came])
    assert target.cpu().eq(7).all()
    left = placement.move(passing, torch.full((N,), 8.0, device=device), ("device", "host"), "a")
    placement.move(target, passing, ("host", "device"), "a", after=[left]).wait()
    assert target.cpu().eq(8).all()
    came = executor.fetch(there, nine, "a")
    placement.accumulate(target, there, "device", "a", after=[came])
    assert target.cpu().eq(17).all()


@pytest.mark.device("lazy")
def test_who_asks_for_a_copy_on_the_host_gets_it_when_it_has_come(device: torch.device) -> None:
    """By any executor, not only by streams, which copy to memory that is not pinned while the host waits."""
    policy, precision = ShardingPolicy.from_stage(2), MixedPrecisionPolicy()
    stores = HostStore(pin_for=device), DeviceStore(device)
    placement = BucketPlacement(Mesh.single(), policy, precision, device, *stores, Deferred())
    values = torch.arange(float(N))
    assert placement.on_host(values.to(device), "a").equal(values)
    assert StoreHome(placement, "a").taken(values.to(device) + 1).equal(values + 1)


@pytest.mark.device("lazy", "random1", "random4")
def test_a_gradient_is_written_to_a_disk_when_it_has_come(device: torch.device, tmp_path: Path) -> None:
    executor, values = StreamExecutor(device), torch.arange(3 * 4096 + 5, dtype=torch.float32)
    store = DiskStore.in_folder(RunFolder(tmp_path, "run", 0), executor, 1, pin_for=device)
    placement = BucketPlacement(
        Mesh.single(),
        ShardingPolicy.from_stage(2),
        MixedPrecisionPolicy(),
        device,
        store,
        DeviceStore(device),
        executor,
        gradients_rest=True,
    )
    gradient = ShardedGradient("a", len(values), placement, [])
    for times in (1, 2):
        gradient.add(values.to(device))
        assert gradient.read(0, len(values)).equal(times * values)
    assert (gradient.memory, gradient.nbytes) == ("disk", values.nbytes)


@pytest.mark.device("lazy", "random1", "random4")
def test_squares_are_summed_when_the_host_adds_the_last_values(device: torch.device) -> None:
    """With the bits of a sum over the result."""
    executor, policy, precision = StreamExecutor(device), ShardingPolicy.from_stage(2), MixedPrecisionPolicy()
    store, parameters, numel = HostStore(pin_for=device), DeviceStore(device), 2 * ops.SQUARES_ROW + 200
    placement = BucketPlacement(Mesh.single(), policy, precision, device, store, parameters, executor)
    segments = [Segment(0, 3, 70, 0), Segment(1, 100, numel - 107, 0)]
    gradient, values = ShardedGradient("a", numel, placement, segments), torch.randn(numel)
    for more in (True, True, False):
        gradient.add(values.to(device), more)
    noted = [gradient.squares_of(segment.start, segment.stop) for segment in segments]
    assert noted == [ops.sum_of_squares(gradient.read(segment.start, segment.stop)) for segment in segments]
    assert gradient.read(0, numel).equal(values + values + values)
    gradient.change(0, 1, Tensor.zero_)
    assert gradient.squares_of(3, 73) is None


@pytest.mark.device("lazy")
def test_a_sum_in_host_memory_begins_after_what_it_names(device: torch.device) -> None:
    executor, store, parameters = StreamExecutor(device), HostStore(pin_for=device), DeviceStore(device)
    policy, precision = ShardingPolicy.from_stage(2), MixedPrecisionPolicy()
    placement = BucketPlacement(Mesh.single(), policy, precision, device, store, parameters, executor)
    total, begins = store.zeros(N, torch.float32), threading.Event()

    def read() -> None:
        assert begins.wait(10)
        total.fill_(5)

    has_read = executor.submit(read, Lane.READ, "a read")
    added = placement.accumulate(total, torch.full((N,), 2.0, device=device), "host", "a", [has_read])
    threading.Timer(0.2, begins.set).start()
    added.synchronize()
    assert total.eq(7).all()


@pytest.mark.device("lazy")
def test_gradients_that_were_cleared_stay_until_they_have_been_read(device: torch.device) -> None:
    """By an update; the next one finds zeros."""
    executor, store, values = StreamExecutor(device), HostStore(pin_for=device), torch.arange(5.0)
    policy = ShardingPolicy.from_stage(2)
    parameters = DeviceStore(device)
    placement = BucketPlacement(
        Mesh.single(), policy, MixedPrecisionPolicy(), device, store, parameters, executor
    )  # fmt: skip
    gradient, seen = ShardedGradient("a", len(values), placement, []), list[Tensor]()
    gradient.add(values.to(device))
    lent, begins = gradient.lend(), threading.Event()

    def update() -> None:
        assert begins.wait(10)
        seen.append(lent.read(0, len(values)).clone())

    gradient.lent_to(executor.submit(update, Lane.HOST, "an update"))
    gradient.clear()
    threading.Timer(0.2, begins.set).start()
    assert not gradient.lend().read(0, len(values)).any()
    begins.set()
    executor.submit(lambda: None, Lane.HOST, "what follows").synchronize()
    assert seen[0].equal(values)


@pytest.mark.device("lazy", "random1", "random4")
def test_collectives_of_a_thread_follow_the_stream_that_submitted_them(device: torch.device) -> None:
    """Read by a third stream, which waits for them alone."""
    executor, side, values = StreamExecutor(device), torch.Stream(device=device), torch.zeros(N, device=device)
    torch.accelerator.synchronize()
    values.fill_(2)
    doubled = executor.submit(lambda: values.mul_(2), Lane.COMM, "a")
    with side:
        doubled.wait()
        host = values.cpu()
    assert host.eq(4).all()


@pytest.mark.simulated
@pytest.mark.device("lazy", "random1", "random4")
def test_memory_that_leaves_is_bounded_without_a_wait_of_the_host(device: torch.device) -> None:
    gc.collect()
    torch.accelerator.synchronize()
    executor, targets, before = StreamExecutor(device, in_flight_bytes=2 * 4 * N), [], memory(device)
    with sim.counted() as counts:
        for value in range(5):
            targets.append(host(device))
            executor.commit(targets[-1], torch.full((N,), float(value), device=device), "a")
            assert memory(device) - before <= 2 * 4096
    assert not counts.waits
    torch.accelerator.synchronize()
    assert [target[0].item() for target in targets] == [0, 1, 2, 3, 4]
    executor.release()
    assert memory(device) == before


@pytest.mark.simulated
@pytest.mark.device("lazy", "random1")
def test_memory_of_a_lanes_stream_is_not_used_again_while_it_leaves(device: torch.device) -> None:
    executor, targets = StreamExecutor(device, in_flight_bytes=0), list[Tensor]()

    def reduce(value: float, collected: Tensor) -> None:
        executor.keep(collected)
        targets.append(host(device))
        executor.commit(targets[-1], torch.full((N,), value, device=device), "a")

    for value in range(4):
        work = executor.submit(partial(reduce, float(value), torch.zeros(N, device=device)), Lane.REDUCE, "a")
    work.synchronize()  # the lane's stream, and nobody else, goes on
    torch.accelerator.synchronize()
    assert [target[0].item() for target in targets] == [0, 1, 2, 3]


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_nobody_waits_for_the_copy_that_has_just_begun(device: torch.device) -> None:
    """However large it is: what is computed next overlaps with it, and only the copy after it makes that wait."""
    executor = StreamExecutor(device, in_flight_bytes=0)
    first, second = (executor.commit(host(device), torch.ones(N, device=device), "a") for _ in range(2))
    torch.accelerator.current_stream().synchronize()
    assert first.done()
    assert not second.done()


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_memory_that_cannot_be_pinned_is_copied_all_the_same_and_counted(device: torch.device) -> None:
    executor, there, back = StreamExecutor(device), torch.zeros(N, device=device), torch.zeros(N)
    sim.install().pageable_is_error(True)
    executor.fetch(there, torch.ones(N), "the weights").wait()
    executor.commit(back, there, "the gradient").synchronize()
    assert back.eq(1).all()
    assert executor.blocked == {"the weights": 4 * N, "the gradient": 4 * N}


@pytest.mark.device("lazy")
def test_what_a_failed_job_reads_is_not_used_again_before(device: torch.device) -> None:
    executor, target = StreamExecutor(device), torch.zeros(N, device=device)

    def fail(values: Tensor) -> None:
        target.copy_(values)
        raise ValueError("out of range")

    with pytest.raises(ValueError, match="out of range"):
        executor.submit(partial(fail, torch.ones(N, device=device)), Lane.REDUCE, "the gradients of head")
    other = torch.full((N,), 2.0, device=device)  # in the same memory
    assert other.cpu().eq(2).all()
    torch.accelerator.synchronize()
    assert target.cpu().eq(1).all()


@pytest.mark.device("lazy")
def test_a_job_that_fails_raises_at_every_wait_and_names_itself(device: torch.device) -> None:
    executor, ran, target = StreamExecutor(device), [], torch.zeros(N, device=device)

    def fail() -> None:
        raise ValueError("out of range")

    failed = executor.submit(fail, Lane.HOST, "the update of head")
    after = executor.submit(lambda: ran.append(1), Lane.HOST, "what follows", after=[failed])
    for wait in (failed.wait, failed.synchronize, after.wait, after.synchronize):
        with pytest.raises(ValueError, match="out of range") as caught:
            wait()
        assert caught.value.__notes__ == ["The work that failed was the update of head, in the lane HOST."]
        assert "fail" in {entry.name for entry in caught.traceback}
    with pytest.raises(ValueError, match="out of range"):
        executor.fetch(target, host(device), "the parameters", after=[after])
    assert not ran
    executor.submit(lambda: ran.append(2), Lane.HOST, "the next").synchronize()
    assert ran == [2]
    with pytest.raises(RuntimeError) as caught:
        executor.fetch(target, host(device)[:5], "another shape")
    assert caught.value.__notes__ == ["The work that failed was another shape, in the lane H2D."]


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_a_copy_that_the_device_fails_names_who_waited(device: torch.device) -> None:
    executor, target = StreamExecutor(device), host(device)
    sim.install().fault("copy to the host", 0, False)
    ticket = executor.commit(target, torch.ones(N, device=device), "the gradient of head")
    with pytest.raises(RuntimeError, match="injected fault") as caught:
        ticket.synchronize()
    assert caught.value.__notes__ == ["The host was waiting for the gradient of head, in the lane D2H."]


@pytest.mark.device("lazy")
def test_nobody_waits_for_a_lane_that_hangs_when_all_ends(device: torch.device) -> None:
    executor, release, before = StreamExecutor(device), threading.Event(), set(threading.enumerate())
    executor.submit(release.wait, Lane.WRITE, "what hangs")
    lanes = set(threading.enumerate()) - before
    assert len(lanes) == FILE_LANES[Lane.WRITE]
    assert all(lane.daemon for lane in lanes)
    gone = weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is None  # the threads do not keep it
    release.set()
    for lane in lanes:
        lane.join(timeout=15)
        assert not lane.is_alive()
