"""The timers on a device: times of the stream, read without a wait."""

from __future__ import annotations

import pytest
import torch
from device import sim

from lightning_zero.storage import Phase, Timers

CYCLES = 200_000_000  # a tenth of a second, about


@pytest.mark.gpu
def test_phases_have_the_time_of_the_stream() -> None:
    device = torch.device("cuda")
    torch.ones(1, device=device).add_(1)
    torch.cuda.synchronize()
    timers = Timers()
    timers.start(device)
    with timers.phase(Phase.BACKWARD):
        torch.cuda._sleep(2 * CYCLES)
        with timers.phase(Phase.REDUCE):
            torch.cuda._sleep(CYCLES)
    timers.end_step()
    assert timers.take() == []  # the host is ahead, and does not wait
    (step,) = timers.take(wait=True)
    assert step[Phase.BACKWARD] == pytest.approx(2 * step[Phase.REDUCE], rel=0.2)
    assert step[Phase.OTHER] < 0.1 * step[Phase.REDUCE]


@pytest.mark.device("lazy")
def test_phases_of_a_device_are_timed_by_its_events(device: torch.device) -> None:
    matrix = torch.ones(256, 256, device=device)
    timers = Timers()
    timers.start(device)
    with timers.phase(Phase.BACKWARD):
        for _ in range(20):
            matrix = (matrix @ matrix).clamp_(-1, 1)
    timers.end_step()
    if device.type == sim.DEVICE:  # a GPU may have done so little by now
        assert timers.take() == []
    (step,) = timers.take(wait=True)
    assert step[Phase.BACKWARD] > step[Phase.FORWARD] == 0
