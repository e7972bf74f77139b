"""The simulated device notices what goes wrong on a real one, and what is right is right in every schedule."""

from __future__ import annotations

import ctypes
import math
import os
import signal
from collections.abc import Callable

import pytest
import torch
from device import sim

pytestmark = pytest.mark.simulated

N = 1000
SEEDS = range(20)
SCHEDULES = [sim.Schedule("eager"), sim.Schedule("lazy"), *(sim.Schedule("random", seed) for seed in SEEDS)]
D = sim.DEVICE


def pinned(value: float) -> torch.Tensor:
    return torch.full((N,), value).pin_memory()


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


# Each is a piece of a program: right, or with one thing left out. It returns whether the result is right.


def reads_what_has_arrived(right: bool) -> bool:
    host = pinned(2.0)
    host.copy_(torch.full((N,), 2.0, device=D), non_blocking=True)
    if right:
        torch.accelerator.synchronize()
    return bool(host.eq(2).all())


def overwrites_a_source_that_was_copied(right: bool) -> bool:
    host, device = pinned(1.0), torch.empty(N, device=D)
    device.copy_(host, non_blocking=True)
    if right:
        current().synchronize()
    host.fill_(5)
    return bool(device.eq(1).all())


def reads_another_stream(right: bool) -> bool:
    side, x = torch.Stream(device=D), torch.full((N,), 3.0, device=D)
    event = current().record_event()
    with side:
        if right:
            side.wait_event(event)
        host = (x * 2).cpu()
    return bool(host.eq(6).all())


def is_read_by_another_stream(right: bool) -> bool:
    """The other way round: what follows a side stream's result."""
    side, x = torch.Stream(device=D), torch.full((N,), 3.0, device=D)
    y = torch.empty(N, device=D)
    side.wait_event(current().record_event())
    with side:
        torch.mul(x, 2, out=y)
        event = side.record_event()
    if right:
        current().wait_event(event)
    return bool((y + 1).cpu().eq(7).all())


def frees_what_another_stream_reads(right: bool) -> bool:
    side, x = torch.Stream(device=D), torch.full((N,), 3.0, device=D)
    side.wait_event(current().record_event())
    with side:
        y = x * 2
    if right:
        x.record_stream(side)
    del x
    current().synchronize()
    with side:
        host = y.cpu()
    return bool(host.eq(6).all())


def reuses_a_staging_buffer(right: bool) -> bool:
    """Two gradients through one pinned buffer."""
    side, host = torch.Stream(device=D), pinned(0.0)
    total = torch.zeros(N)
    for value in (1.0, 2.0):
        gradient = torch.full((N,), value, device=D)
        side.wait_event(current().record_event())
        gradient.record_stream(side)
        with side:
            host.copy_(gradient, non_blocking=True)
            event = side.record_event()
        if right:
            event.synchronize()
        total += host
    return bool(total.eq(3).all())


def fills_what_it_allocates(right: bool) -> bool:
    x = torch.empty(N, device=D)
    if right:
        x.zero_()
    return not math.isnan(x.sum().item())


def pins_what_it_copies_asynchronously(right: bool) -> bool:
    sim.install().pageable_is_error(True)
    try:
        torch.empty(N, device=D).copy_(pinned(1.0) if right else torch.ones(N), non_blocking=True)
    except RuntimeError as error:
        assert "not pinned" in str(error)  # noqa: PT017
        return False
    finally:
        sim.install().pageable_is_error(False)
    return True


def computes_on_one_device(right: bool) -> bool:
    try:
        torch.ones(N, device=D) + torch.ones(N, device=D if right else "cpu")
    except RuntimeError as error:
        assert "same device" in str(error)  # noqa: PT017
        return False
    return True


def unpins_after_the_copy(right: bool) -> bool:
    host = torch.ones(N)
    torch.sim.host_register(host.data_ptr(), host.nbytes)
    torch.empty(N, device=D).copy_(host, non_blocking=True)
    if right:
        torch.accelerator.synchronize()
    try:
        torch.sim.host_unregister(host.data_ptr())
    except RuntimeError as error:
        assert "unpinned under a copy" in str(error)  # noqa: PT017
        return False
    return True


def follows_a_copy_of_pageable_memory(right: bool) -> bool:
    """The host goes on once the driver has the values, and they may be on their way."""
    side, there = torch.Stream(device=D), torch.zeros(N, device=D)
    there.copy_(torch.ones(N), non_blocking=True)
    event = current().record_event()
    with side:
        if right:
            side.wait_event(event)
        host = there.cpu()
    current().synchronize()
    return bool(host.eq(1).all())


RACES = (
    reads_what_has_arrived,
    overwrites_a_source_that_was_copied,
    reads_another_stream,
    is_read_by_another_stream,
    frees_what_another_stream_reads,
    reuses_a_staging_buffer,
    unpins_after_the_copy,
    follows_a_copy_of_pageable_memory,
)
MISTAKES = (fills_what_it_allocates, pins_what_it_copies_asynchronously, computes_on_one_device)  # in every schedule


def outcomes(program: Callable[[bool], bool], right: bool) -> dict[str, bool]:
    """By schedule: whether the result was right."""
    found = {}
    for schedule in SCHEDULES:
        sim.install().schedule(schedule.mode, schedule.seed)
        found[str(schedule)] = program(right)
        torch.accelerator.synchronize()
    return found


@pytest.mark.device
@pytest.mark.parametrize("program", RACES, ids=lambda program: program.__name__)
def test_a_missing_wait_is_found(device: torch.device, program: Callable[[bool], bool]) -> None:
    assert all(outcomes(program, right=True).values())
    wrong = outcomes(program, right=False)
    assert not wrong["lazy"]
    assert sum(not wrong[f"random{seed}"] for seed in SEEDS) >= 4


@pytest.mark.device
@pytest.mark.parametrize("program", MISTAKES, ids=lambda program: program.__name__)
def test_a_mistake_is_found_in_every_schedule(device: torch.device, program: Callable[[bool], bool]) -> None:
    assert all(outcomes(program, right=True).values())
    assert not any(outcomes(program, right=False).values())


@pytest.mark.device
def test_a_blocking_copy_is_its_own_wait(device: torch.device) -> None:
    host = torch.empty(N)
    host.copy_(torch.full((N,), 2.0, device=device))
    arrived = bool(host.eq(2).all())
    torch.accelerator.synchronize()  # before its memory is freed
    assert arrived


def signal_of_child(touch: Callable[[], object]) -> int:
    """How a forked child ends that does this: the signal, or 0."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        touch()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.device
def test_the_host_cannot_touch_the_devices_memory(device: torch.device) -> None:
    address = torch.ones(4, device=device).data_ptr()

    def read() -> float:
        return ctypes.c_float.from_address(address).value

    assert signal_of_child(read) == signal.SIGSEGV
    sim.install().protect(False)
    try:
        assert signal_of_child(read) == 0
    finally:
        sim.install().protect(True)
