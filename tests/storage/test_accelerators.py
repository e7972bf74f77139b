"""Types of devices: what the package asks of one, with a type that stands in for one that torch does not know."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_zero import limits
from lightning_zero.checkpoint import rng
from lightning_zero.sharding import Group
from lightning_zero.storage import HostStore, RandomState, Timers, accelerators, device_type, register_device_type
from lightning_zero.storage.host import pinned_bytes
from lightning_zero.storage.work_log import WorkLog

DEVICE = torch.device("privateuseone", 1)


class Recorded(accelerators.Accelerator):
    """Pins nothing, and notes what it is asked for."""

    can_pin = True

    def __init__(self) -> None:
        super().__init__(DEVICE.type)
        self.calls: list[tuple[Any, ...]] = []
        self.generator = torch.Generator()
        self.time = self.busy = 0.0

    def pin(self, address: int, nbytes: int) -> None:
        self.calls.append(("pin", address, nbytes))

    def unpin(self, address: int) -> None:
        self.calls.append(("unpin", address))

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(("synchronize", device))
        self.busy = 0.0

    def random_state(self, device: torch.device) -> RandomState | None:
        return RandomState(self.generator.get_state, self.generator.set_state, self.generator.manual_seed)

    def clock(self, device: torch.device) -> accelerators.Clock:
        return self  # type: ignore[return-value]

    def now(self) -> float:
        self.time += 1.0
        return self.time + self.busy

    def reached(self, mark: float) -> bool:
        return False

    def between(self, start: float, end: float) -> float:
        return end - start


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    with monkeypatch.context() as patch:
        patch.setattr(accelerators, "_TYPES", dict(accelerators._TYPES))
        made = Recorded()
        register_device_type(DEVICE.type, made)
        yield made


def test_memory_is_pinned_while_something_refers_to_it_and_until_copies_have_ended(recorded: Recorded) -> None:
    tensor = HostStore(pin_for=DEVICE).zeros(1000, torch.float32)
    address, view = tensor.data_ptr(), tensor[10:20]
    assert recorded.calls == [("pin", address, 4000)]
    assert not tensor.any()
    del tensor
    gc.collect()
    assert len(recorded.calls) == 1
    del view
    gc.collect()
    # Whoever copies to or from it may not have ended.
    assert recorded.calls[1:] == [("synchronize", DEVICE), ("unpin", address)]


def test_memory_that_could_not_be_pinned_is_not_unpinned(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(recorded, "pin", refuse)
    monkeypatch.setattr(limits, "locked_memory", lambda: 2**16)
    before = pinned_bytes()
    with pytest.raises(RuntimeError, match=r"40,000 bytes .* for privateuseone:1, .*no more.*65,536 bytes.*memlock=-1"):
        HostStore(pin_for=DEVICE).zeros(10_000, torch.float32)
    gc.collect()
    assert recorded.calls == []
    assert pinned_bytes() == before


def test_only_memory_that_crosses_is_pinned(recorded: Recorded) -> None:
    store, before = HostStore(pin_for=DEVICE), pinned_bytes()
    kept = [store.zeros(1000, torch.float32, crosses=False), store.rest(1000, torch.float32, "state")]
    assert recorded.calls == []
    shard = store.rest(1001, torch.bfloat16, "a shard", crosses=True)
    assert [call[2] for call in recorded.calls] == [2002]
    assert pinned_bytes() - before == 2002
    del shard, kept
    gc.collect()
    assert pinned_bytes() == before


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("xpu")])
def test_memory_is_plain_where_no_device_can_pin_it(device: torch.device | None, recorded: Recorded) -> None:
    tensor = HostStore(pin_for=device).zeros(mmap.PAGESIZE, torch.float32)
    assert not tensor.is_pinned()
    assert recorded.calls == []


def test_a_generator_of_any_device_is_saved_and_restored(recorded: Recorded) -> None:
    recorded.generator.manual_seed(3)
    saved = rng.gather(Group(), DEVICE)
    drawn = torch.rand(4, generator=recorded.generator)
    rng.restore(saved, 0, DEVICE)
    assert torch.equal(torch.rand(4, generator=recorded.generator), drawn)
    two_ranks = {DEVICE.type: torch.cat([saved[DEVICE.type], saved[DEVICE.type].flip(1)])}
    rng.restore(two_ranks, 2, DEVICE)  # a rank that had none: one of its own
    assert not torch.equal(torch.rand(4, generator=recorded.generator), drawn)


def test_steps_are_timed_by_the_clock_of_the_device(recorded: Recorded) -> None:
    timers = Timers()
    timers.start(DEVICE)
    timers.end_step()
    assert timers.take() == []  # the device is not there yet
    assert sum(timers.take(wait=True)[0].values()) == 1.0


def test_a_log_begins_when_the_device_has_nothing_to_do(recorded: Recorded) -> None:
    """So that its clock and the host's begin together."""
    recorded.busy = 10.0
    recording = WorkLog().start(DEVICE, "forward")
    recorded.synchronize(DEVICE)
    (span,) = recording.stop()
    assert (span.name, span.start, span.end) == ("forward", 0.0, 1.0)


def test_cpu_ranks_hold_no_memory_but_the_hosts(recorded: Recorded) -> None:
    assert device_type(torch.device("cpu")).shares_host_memory
    assert not device_type(DEVICE).shares_host_memory
    assert device_type(DEVICE) is recorded
