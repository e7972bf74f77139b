"""The timers of a step's phases, with a clock that the test moves."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from lightning_zero.sharding import Mesh
from lightning_zero.storage import Phase, Timers
from lightning_zero.storage.timers import timed

CPU = torch.device("cpu")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def spent(timers: Timers) -> dict[str, float]:
    """The phases of the only step that has ended, without those that took no time."""
    (step,) = timers.take()
    return {phase.value: seconds for phase, seconds in step.items() if seconds}


def test_time_belongs_to_the_innermost_phase(clock: Clock) -> None:
    timers = Timers()
    timers.start(CPU)
    clock.now += 1
    with timers.phase(Phase.BACKWARD):
        clock.now += 2
        with timers.phase(Phase.REDUCE):
            clock.now += 4
            with timers.phase(Phase.WAIT):
                clock.now += 8
            clock.now += 16
        clock.now += 32
    timers.end_step()
    assert spent(timers) == {"other": 1, "backward": 34, "reduce": 20, "wait": 8}


def test_steps_follow_each_other_without_a_gap(clock: Clock) -> None:
    timers = Timers()
    timers.start(CPU)
    for seconds in (1, 2, 3):
        with timers.phase(Phase.FORWARD):
            clock.now += seconds
        timers.end_step()
        clock.now += 10
    assert [(step[Phase.FORWARD], step[Phase.OTHER]) for step in timers.take()] == [(1, 0), (2, 10), (3, 10)]
    assert timers.take() == []


def test_a_step_may_end_inside_a_phase(clock: Clock) -> None:
    timers = Timers()
    timers.start(CPU)
    with timers.phase(Phase.DATA):
        clock.now += 1
        timers.end_step()
        clock.now += 2
    timers.end_step()
    assert [step[Phase.DATA] for step in timers.take()] == [1, 2]


def test_some_time_belongs_to_no_step(clock: Clock) -> None:
    timers = Timers()
    timers.start(CPU)
    timers.begin(None)
    for _ in range(10):
        with timers.phase(Phase.FORWARD):
            clock.now += 5
    assert len(timers._marks) == 2  # however many phases a validation has, each of which is an event on a GPU
    timers.end()
    clock.now += 1
    timers.end_step()
    assert spent(timers) == {"other": 1}


def test_an_exception_closes_what_it_left_open(clock: Clock) -> None:
    timers = Timers()
    timers.start(CPU)
    with contextlib.suppress(ValueError), timers.phase(Phase.FORWARD):
        timers.begin(Phase.GATHER)
        clock.now += 1
        raise ValueError
    clock.now += 2
    timers.end_step()
    assert spent(timers) == {"gather": 1, "other": 2}


def test_nothing_is_measured_before_the_start_and_after_the_end(clock: Clock) -> None:
    timers = Timers()
    with timers.phase(Phase.FORWARD):
        timers.start(CPU)
        clock.now += 1
    timers.end_step()
    assert spent(timers) == {"other": 1}
    with timers.phase(Phase.FORWARD):
        timers.end_step()
        timers.stop()
        clock.now += 1
    timers.begin(Phase.DATA)
    timers.end()
    timers.end_step()
    assert timers.take(wait=True) == []


def test_methods_are_timed(clock: Clock) -> None:
    class Worker:
        timers = Timers()

        @timed(Phase.OPTIMIZER)
        def work(self, seconds: float) -> float:
            clock.now += seconds
            return seconds

    worker = Worker()
    assert worker.work(3) == 3
    worker.timers.start(CPU)
    assert worker.work(2) == 2
    worker.timers.end_step()
    assert spent(worker.timers) == {"optimizer": 2}


def test_the_groups_of_a_mesh_share_its_timers() -> None:
    mesh = Mesh.single()
    assert mesh.world.timers is mesh.shard.timers is mesh.replica.timers is mesh.timers
    assert Mesh.single().timers is not mesh.timers
