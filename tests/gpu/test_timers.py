"""The timers on a device: times of the stream, read without a wait."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.storage import Phase, Timers

CYCLES = 200_000_000  # of a GPU: a tenth of a second, about


def keep_busy(device: torch.device, times: int) -> None:
    """Work of a length, on the current stream."""
    if device.type == "cuda":
        torch.cuda._sleep(times * CYCLES)
        return
    matrix = torch.ones(256, 256, device=device)
    for _ in range(20 * times):
        matrix = (matrix @ matrix).clamp_(-1, 1)


@pytest.mark.device("lazy")
def test_phases_have_the_time_of_the_stream(device: torch.device) -> None:
    torch.ones(1, device=device).add_(1)
    torch.accelerator.synchronize()
    timers = Timers()
    timers.start(device)
    with timers.phase(Phase.BACKWARD):
        keep_busy(device, 2)
        with timers.phase(Phase.REDUCE):
            keep_busy(device, 1)
    timers.end_step()
    assert timers.take() == []  # the host is ahead, and does not wait
    (step,) = timers.take(wait=True)
    assert step[Phase.BACKWARD] == pytest.approx(2 * step[Phase.REDUCE], rel=0.2)
    assert step[Phase.OTHER] < 0.1 * step[Phase.REDUCE]
    assert step[Phase.FORWARD] == 0
