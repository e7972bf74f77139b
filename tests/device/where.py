"""Where a test marked `device` runs: on the simulated device, in a rank that has it, and on CUDA where there is one."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from device import accelerator, build, sim
from helpers.pairs import pairwise
from helpers.ranks import RankError, RankPool
from torch.utils._pytree import tree_map

T = TypeVar("T")
SETUP = {sim.DEVICE: "device.where:prepare_rank", "cuda": "device.where:choose_device"}  # of ranks, by device type
DEFAULT_SCHEDULES = ("lazy",)


@dataclasses.dataclass(frozen=True)
class Where:
    """A device type, and the schedule of the simulated one."""

    type: str
    schedule: sim.Schedule = sim.LAZY

    def __str__(self) -> str:
        return f"{self.type}-{self.schedule}" if self.simulated else self.type

    @property
    def simulated(self) -> bool:
        return self.type == sim.DEVICE

    @property
    def accelerator(self) -> str:
        """The name under which Lightning knows it."""
        return self.type if self.simulated else "gpu"


def cases(schedules: Iterable[str], cuda: bool) -> list[Any]:
    """The parameters of a test with the marker `device`, whose arguments are schedules, and which may run on CUDA."""
    simulated = [Where(sim.DEVICE, sim.Schedule.parse(name)) for name in schedules or DEFAULT_SCHEDULES]
    params = [pytest.param(where, id=str(where)) for where in simulated]
    if cuda and torch.cuda.is_available():
        params.append(pytest.param(Where("cuda"), id="cuda", marks=pytest.mark.gpu))
    return params


def every_case(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Runs a test for all combinations where there is a GPU; for the simulated device alone those of `pairwise` do."""
    if torch.cuda.is_available():
        return pytest.mark.parametrize(list(axes), list(itertools.product(*axes.values())))
    return pairwise(**axes)


class DevicePool:
    """A rank pool whose ranks have the device: `run` is the pool's, under the test's schedule."""

    def __init__(self, pool: RankPool, where: Where) -> None:
        self.pool, self.where = pool, where
        self.world_size = pool.world_size

    def under(self, schedule: sim.Schedule) -> DevicePool:
        """The same ranks, under another schedule."""
        return DevicePool(self.pool, Where(self.where.type, schedule))

    def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """The results on every rank, with tensors of the device moved to the host."""
        if not self.where.simulated:
            return self.pool.run(function, *args, **kwargs)
        self.pool.check(function)
        return self.pool.run(run_scheduled, self.where.schedule, function, args, kwargs)


@dataclasses.dataclass(frozen=True)
class OnRank:
    """In the place of the device of a test that a rank runs."""

    pool: RankPool
    where: Where


def rank_options(device: str, world_size: int) -> dict[str, str]:
    """Of a pool whose ranks have devices of a type; builds the simulated one where that has not been done.

    Ranks that share a GPU communicate by gloo: NCCL takes one rank for each.
    """
    if device == sim.DEVICE:
        build.library()
        return {"setup": SETUP[device], "backend": f"cpu:gloo,{device}:{sim.BACKEND}"}
    shared = torch.cuda.device_count() < world_size
    return {"setup": SETUP[device], "backend": "gloo" if shared else f"cpu:gloo,{device}:nccl"}


def prepare_rank() -> None:
    """Gives a forked rank the simulated device, for life."""
    # Gloo notes the Python stack of every collective: in a task, where collected garbage may wait for the device.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    sim.install()
    accelerator.register()


def choose_device() -> None:
    """Gives a rank its GPU, for life."""
    device_of_rank("cuda")


def device_of_rank(device: str) -> torch.device:
    """The rank's device of a type, which it may share; it becomes the current one."""
    index = int(os.environ["RANK"]) % torch.get_device_module(device).device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(device, index)


def run_scheduled(schedule: sim.Schedule, function: Callable[..., T], args: Any, kwargs: Any) -> T:
    with sim.scheduled(schedule):
        device_of_rank(sim.DEVICE)  # what a function measures before a fit is of the device that the fit takes
        result: T = tree_map(to_host, function(*args, **kwargs))
    return result


def to_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) and value.device.type == sim.DEVICE else value


# ---------------------------------------------------------------------------------------- a whole test, run by a rank

MADE_THERE = "monkeypatch"  # by the rank: it would change the wrong process


def run_test(on: OnRank, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Runs a test function, with the device for `device`, on the rank of a pool of one."""
    for name, value in arguments.items():
        if name not in (MADE_THERE, "device"):
            try:
                pickle.dumps(value)
            except Exception as error:
                raise TypeError(f"a test with `device` runs in another process, and {name} cannot go there") from error
    sent = {name: None if name in (MADE_THERE, "device") else value for name, value in arguments.items()}
    try:
        on.pool.run(run_scheduled, on.where.schedule, call_test, (function, sent), {})
    except RankError as error:
        failure = error.failures[error.rank]
        if failure.kind == "Skipped":
            pytest.skip(failure.message)
        raise


def call_test(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        there = {"device": torch.device(sim.DEVICE, 0), MADE_THERE: monkeypatch}
        function(**{name: there.get(name, value) for name, value in arguments.items()})
