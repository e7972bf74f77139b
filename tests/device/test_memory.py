"""The simulated device's memory: what is counted, where it ends, and what copies cost."""

from __future__ import annotations

import pytest
import torch
from device import sim

pytestmark = pytest.mark.simulated

KIB, MIB = 2**10, 2**20


@pytest.mark.device
def test_memory_is_counted_with_its_peak(device: torch.device) -> None:
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    first = torch.zeros(10 * KIB, dtype=torch.uint8, device=device)
    second = torch.zeros(KIB + 1, dtype=torch.uint8, device=device)  # rounded to 512 bytes, as on CUDA
    assert torch.accelerator.memory_allocated(device) - before == 10 * KIB + 1536
    del first
    assert torch.accelerator.memory_allocated(device) - before == 1536
    assert torch.accelerator.max_memory_allocated(device) - before == 10 * KIB + 1536
    torch.accelerator.reset_peak_memory_stats(device)
    assert torch.accelerator.max_memory_allocated(device) - before == 1536
    assert second.cpu().count_nonzero() == 0
    assert torch.accelerator.memory_allocated(1) == 0  # each device has its own


@pytest.mark.device
def test_a_small_device_runs_out_of_memory(device: torch.device) -> None:
    used = torch.accelerator.memory_allocated(device)
    sim.install().set_limit(0, used + 64 * MIB)
    held = torch.ones(48 * MIB, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError, match=r"32\.00 MiB were asked for, 16\.00 MiB of .* are free"):
        torch.empty(32 * MIB, dtype=torch.uint8, device=device)
    # What another stream still uses is waited for before that.
    side = torch.Stream(device=device)
    side.wait_event(torch.accelerator.current_stream().record_event())
    with side:
        copied = held[:MIB].clone()
    held.record_stream(side)
    del held
    assert torch.empty(47 * MIB, dtype=torch.uint8, device=device).numel() == 47 * MIB
    with side:
        assert copied.cpu().eq(1).all()


@pytest.mark.device
def test_a_parameter_of_the_host_may_get_data_of_the_device(device: torch.device) -> None:
    """As with CUDA, and unlike other devices that torch does not know."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.data = torch.full((3,), 2.0, device=device)
    assert parameter.device == device
    parameter.square().sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.cpu().tolist() == [4.0] * 3
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight
    assert layer.to(device).weight is weight


def copy_all(device: torch.device) -> None:
    fast = torch.ones(8).pin_memory()
    there = torch.empty(8, device=device)
    there.copy_(fast, non_blocking=True)
    fast.copy_(there, non_blocking=True)  # pinned: nothing is counted
    there.copy_(torch.ones(8), non_blocking=True)
    there.copy_(fast.double().pin_memory(), non_blocking=True)  # the host converts, into pageable memory
    fast.half().pin_memory().copy_(there, non_blocking=True)  # the device converts
    there[::2].cpu()
    there.sum().item()


@pytest.mark.device
def test_waits_and_pageable_bytes_are_counted_by_call_site(device: torch.device) -> None:
    with sim.counted() as counts:
        copy_all(device)
    site = "tests:copy_all"
    assert counts.pageable == {
        (site, "copy to the device"): 32,
        (site, "copy to the device, converted"): 32,
        (site, "copy to the host"): 16,
    }
    assert counts.waits == {
        (site, "blocking copy to the device"): 2,
        (site, "blocking copy to the host"): 1,
        (site, "item"): 1,
    }


@pytest.mark.device
def test_freed_pinned_memory_is_kept_until_copies_have_read_it(device: torch.device) -> None:
    there = torch.empty(100, device=device)
    there.copy_(torch.full((100,), 3.0).pin_memory(), non_blocking=True)  # nothing else refers to the source
    assert sim.install().pending()
    assert there.cpu().eq(3).all()
