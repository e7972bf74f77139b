"""Races in the package, planted in copies of its functions, are found by the lazy schedule and by random ones."""

from __future__ import annotations
import __future__

import contextlib
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from device import sim
from device.accelerator import SimDevices
from device.sim import Schedule
from device.test_training import EAGER, LAZY, SEEDS, Training, digests
from device.where import DevicePool
from strategy.fits import Recipe

from lightning_zero.sharding.backend_collectives import BackendCollectives
from lightning_zero.sharding.bucket import Bucket
from lightning_zero.sharding.gradients import BucketGradients
from lightning_zero.sharding.sharded_gradient import LentGradient, ShardedGradient
from lightning_zero.storage import HostStore
from lightning_zero.storage.host import _PinnedMapping
from lightning_zero.storage.staging import Staging
from lightning_zero.storage.streams import StreamExecutor

pytestmark = pytest.mark.simulated

RANDOM = [Schedule("random", seed) for seed in range(SEEDS)]


@dataclasses.dataclass(frozen=True)
class Race:
    """What goes wrong where a function has `lost` in the place of `kept`, and a training that goes wrong by it."""

    what: str
    owner: type
    method: str
    kept: str
    lost: str = "pass"
    name: str = "zero3_offload"
    world: int = 1
    precision: str = "32-true"

    def __str__(self) -> str:
        return self.what.replace(" ", "-")

    def source(self) -> str:
        source = textwrap.dedent(inspect.getsource(getattr(self.owner, self.method)))
        assert source.count(self.kept) == 1, f"{self.method} has no {self.kept!r} any more, or several"
        return source.replace(self.kept, self.lost)


BLOCKING = "_reduce_scatter_flat(out, flat, group=self._group.process_group)"
# fmt: off
TRAININGS = (
    Race("forward reads before it is gathered", Bucket, "_end_unshard",
         "self._await_shards()", name="zero3", world=2),
    Race("a unit reads before its turn's gather has ended", Bucket, "_end_unshard",
         "self._await_shards()", name="zero2_offload", world=2),
    Race("a shard is gathered before it has come", Bucket, "_gather_beside",
         "what, [after])", "what, [after] if lane is Lane.COMM else [])", world=2),
    Race("memory is freed while it is reduced", BucketGradients, "_reduce_scatter",
         "self._placement.executor.keep(gradients)", name="zero2", world=2),
    Race("a norm is read before the reduction", ShardedGradient, "await_reduction",
         "self.reduced.wait()", name="zero2", world=2),
    Race("a slice is used before it is reduced", BackendCollectives, "reduce_scatter",
         BLOCKING, BLOCKING.replace(")", ", async_op=True)"), name="zero2", world=2),
    Race("a gradient is read before it has come", ShardedGradient, "_arrive",
         "self._placement.await_host(work)", name="zero2_offload", precision="bf16-true"),
    Race("a micro-batch is added before it has come", StreamExecutor, "receive",
         "(*after, arrived)", "after"),
    Race("a copy begins before its source is there", StreamExecutor, "_on_stream",
         "stream.wait_event(mark.event)"),
    Race("a freed gradient is still being copied", StreamExecutor, "_on_stream",
         "kept = [*on_device, *_RUNNING.kept]", "kept = _RUNNING.kept"),
    Race("a staging buffer is used again too early", Staging, "_choose",
         " if given.work.done()", "", name="zero2_offload", precision="bf16-true"),
    Race("an update reads a gradient before it has come", LentGradient, "read",
         "self.arriving.synchronize()", name="zero1_offload"),
    Race("forward reads before the update has come", Bucket, "_await_update",
         "self.moving.wait()", name="zero2_offload"),
)
# fmt: on
UNPIN = Race("unpinned under a copy", _PinnedMapping, "__del__", "device_type(device).synchronize(device)")


@contextlib.contextmanager
def planted(race: Race) -> Iterator[None]:
    """The race in this process."""
    function = inspect.unwrap(getattr(race.owner, race.method))
    file = inspect.getsourcefile(function) or ""
    code = compile(race.source(), file, "exec", __future__.annotations.compiler_flag)
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)  # noqa: S102
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race.owner, race.method, made[race.method])
        yield


def planted_if(race: Race, wrong: bool) -> contextlib.AbstractContextManager[None]:
    return planted(race) if wrong else contextlib.nullcontext()


def train(race: Race, wrong: bool, schedules: Sequence[Schedule]) -> dict[str, str]:
    """What each schedule shows: digests of the result, or an error."""
    training = Training(race.name, race.precision, race.world, Recipe(optimizer="momentum", steps=2, micro=2))
    shown = {}
    for schedule in schedules:
        try:
            with planted_if(race, wrong), sim.scheduled(schedule):
                shown[str(schedule)] = str(digests(training.fit(sim.DEVICE)))
        except RuntimeError as error:
            shown[str(schedule)] = repr(error)
    return shown


def unpin(race: Race, wrong: bool, schedules: Sequence[Schedule]) -> dict[str, str]:
    """Frees a pinned tensor on its way to the device."""
    shown = {}
    for schedule in schedules:
        with pytest.MonkeyPatch.context() as patch, planted_if(race, wrong), sim.scheduled(schedule):
            errors: list[str] = []
            patch.setattr(SimDevices, "unpin", functools.partialmethod(note_unpinned, SimDevices.unpin, errors))
            device = torch.device(sim.DEVICE, 0)
            source, there = HostStore(pin_for=device).zeros(1000, torch.float32), torch.empty(1000, device=device)
            there.copy_(source, non_blocking=True)
            torch.accelerator.current_stream().record_event()
            del source
        shown[str(schedule)] = str(errors)
    return shown


def note_unpinned(self: SimDevices, plain: Callable[..., None], errors: list[str], address: int) -> None:
    try:
        plain(self, address)
    except RuntimeError as error:
        errors.append(repr(error))
        torch.accelerator.synchronize()  # before the memory is gone


def found_by(
    pool: DevicePool, program: Callable[..., dict[str, str]], race: Race, schedules: Sequence[Schedule], enough: int
) -> list[str]:
    """The schedules, until there are enough, that show something else than the eager one without the race."""
    (right,) = pool.run(program, race, False, [EAGER])[0].values()
    assert "Error" not in right
    found: list[str] = []
    for begin in range(0, len(schedules), enough):
        if len(found) < enough:  # decided here for all ranks, which may be shown different things
            wrong = pool.run(program, race, True, schedules[begin : begin + enough])[0]
            found += [schedule for schedule, shown in wrong.items() if shown != right]
    return found


RACES = [*((train, race) for race in TRAININGS), (unpin, UNPIN)]
every_race = pytest.mark.parametrize(("program", "race"), [pytest.param(*row, id=str(row[1])) for row in RACES])


@every_race
@pytest.mark.device("eager")
def test_a_planted_race_is_found_lazily(
    device_pool1: DevicePool, device_pool2: DevicePool, program: Callable[..., dict[str, str]], race: Race
) -> None:
    pool = (device_pool1, device_pool2)[race.world - 1]
    assert found_by(pool, program, race, [LAZY], 1) == ["lazy"]


@pytest.mark.slow
@every_race
@pytest.mark.device("eager")
def test_a_planted_race_is_found_at_random(
    device_pool1: DevicePool, device_pool2: DevicePool, program: Callable[..., dict[str, str]], race: Race
) -> None:
    pool = (device_pool1, device_pool2)[race.world - 1]
    assert len(found_by(pool, program, race, RANDOM, 4)) >= 4
