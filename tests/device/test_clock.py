"""Virtual time and faults of the simulated device."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from device import sim

from lightning_zero.storage.accelerators import device_type
from lightning_zero.storage.work_log import WorkLog

pytestmark = pytest.mark.simulated

MIB = 2**20


def set_rates(c: Any) -> None:
    """Of round numbers: a millisecond for a MiB over the bus, a tenth of that in the device's memory."""
    costs = c.costs()
    costs.launch, costs.to_device, costs.to_host = 0.0, 1000 * MIB, 1000 * MIB
    costs.memory, costs.flops = 10_000 * MIB, 1e12


def overlapped(device: torch.device, *, overlap: bool) -> float:
    """Milliseconds for a copy to the device and work that does not need it."""
    host, there = torch.ones(MIB, dtype=torch.uint8).pin_memory(), torch.empty(MIB, dtype=torch.uint8, device=device)
    x = torch.zeros(4 * MIB, dtype=torch.uint8, device=device)
    side = torch.Stream(device=device) if overlap else torch.accelerator.current_stream()
    torch.accelerator.synchronize()
    start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    start.record()
    with side:
        there.copy_(host, non_blocking=True)
    x.add_(1)  # reads and writes 4 MiB
    torch.accelerator.current_stream().wait_stream(side)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@pytest.mark.device("eager", "lazy", "random5")
def test_virtual_time_knows_overlap_and_no_schedule(device: torch.device) -> None:
    c = sim.install()
    set_rates(c)
    assert overlapped(device, overlap=False) == pytest.approx(1.8)
    assert overlapped(device, overlap=True) == pytest.approx(1.0)


@pytest.mark.device
def test_the_packages_clock_waits_for_the_end_of_a_span(device: torch.device) -> None:
    clock, x = device_type(device).clock(device), torch.zeros(MIB, device=device)
    start = clock.now()
    x.add_(1)
    assert clock.between(start, clock.now()) > 0.0


@pytest.mark.device
def test_a_log_ends_when_the_device_has_reached_its_marks(device: torch.device) -> None:
    """Also those of a stream that comes before the one that computes."""
    log, side = WorkLog(), torch.Stream(device=device)
    recording = log.start(device, "forward")
    with side, log.work("h2d", "a copy", on_device=True):
        torch.zeros(MIB, device=device)
    assert {span.track for span in recording.stop()} == {"h2d", "training"}


@pytest.mark.device
def test_a_trace_shows_lanes_and_what_the_host_waited_for(device: torch.device, tmp_path: Path) -> None:
    c = sim.install()
    set_rates(c)
    c.reset_clock()
    c.reset_counters()
    c.trace(True)
    x = torch.ones(64, 64, device=device)
    c.host_works(0.5)
    (x @ x).cpu()
    assert c.now() > 0.5
    assert c.stalls()["blocking copy to the host"] == pytest.approx(c.now() - 0.5)
    sim.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    product = next(event for event in events if event["name"] == "aten::mm")
    assert product["dur"] == pytest.approx(max(2 * 64**3 / 1e6, 3 * 64 * 64 * 4 / (10_000 * MIB) * 1e6))
    assert product["ts"] >= 0.5e6
    assert [event["name"] for event in events][-1] == "copy to the host"


@pytest.mark.device
def test_a_copy_that_fails_is_an_error_at_the_next_wait(device: torch.device) -> None:
    sim.install().fault("copy to the host", 1, False)
    x, host = torch.ones(4, device=device), torch.empty(4).pin_memory()
    host.copy_(x, non_blocking=True)
    host.copy_(x, non_blocking=True)  # this one
    with pytest.raises(RuntimeError, match="copy to the host: an injected fault"):
        torch.accelerator.synchronize()
    assert x.cpu().eq(1).all()


@pytest.mark.device
def test_a_stream_that_does_not_end_holds_up_who_waits_for_it_only(device: torch.device) -> None:
    c = sim.install()
    c.hang_limit(0.05)
    side, x = torch.Stream(device=device), torch.ones(4, device=device)
    torch.accelerator.synchronize()
    c.fault("aten::mul", 0, True)
    with side:
        y = x * 2
    assert (x + 1).cpu().eq(2).all()
    with pytest.raises(RuntimeError, match=r"has not ended .*aten::mul.* within 0.05 s"):
        side.synchronize()
    c.hang_limit(60)
    threading.Timer(0.05, c.clear_faults).start()  # it goes on after all
    side.synchronize()
    assert y.cpu().eq(2).all()


@pytest.mark.device
def test_a_thread_may_have_a_clock_of_its_own(device: torch.device) -> None:
    """What it asks for begins then, and nobody else's time is moved; an event is seen by those who are as late."""
    c = sim.install()
    set_rates(c)
    c.clocked(True)
    host, there = torch.ones(MIB, dtype=torch.uint8).pin_memory(), torch.empty(MIB, dtype=torch.uint8, device=device)
    side, seen = torch.Stream(device=device), []
    c.reset_clock()

    def work() -> None:
        c.host_apart(0.25)
        c.host_works(0.25)
        with side:
            there.copy_(host, non_blocking=True)
            seen.append(side.record_event())
        seen.append(c.now())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    copied, later = seen
    assert later == 0.5
    assert c.now() == 0
    assert not copied.query()
    copied.synchronize()
    assert c.now() == pytest.approx(0.501)
    assert copied.query()
