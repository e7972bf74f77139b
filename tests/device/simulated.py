"""`pytest --simulated lazy tests/engine tests/strategy`: tests that are made for CPU ranks run on the simulated device.

Nothing is changed in them: where they train is `helpers.place`, which is that device then, in pytest's process and in
its ranks. A race in the package gives other numbers than the reference that a test compares with, or an error. What
cannot run there is in `not_simulated.py`, each with the reason, and is skipped by it.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from device import build, not_simulated, sim, where
from helpers import place
from helpers.ranks import RankPool
from lightning.fabric.utilities import distributed
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

PATIENCE = 4.0  # a task for each operator takes longer than a call
OWN_HOOK = "ignore:Using .torch.compile.module.. when there are global hooks"  # that of `training_there`
FOLDERS = ("tests/engine/", "tests/strategy/")


class Simulated:
    """A plugin of pytest: every test runs by a schedule of the device, which this process has for its life."""

    def __init__(self, schedule: str) -> None:
        try:
            self.schedule = sim.Schedule.parse(schedule)
        except ValueError as error:
            raise pytest.UsageError(f"--simulated {schedule}: {error}") from error
        build.library()
        where.prepare_rank()

    def make_pool(self, world_size: int, *args: Any) -> RankPool:
        return SimulatedPool(self.schedule, world_size, *args, **where.rank_options(sim.DEVICE, world_size))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if not item.nodeid.startswith(FOLDERS):
                raise pytest.UsageError(f"--simulated runs tests of {' and '.join(FOLDERS)} alone, not {item.nodeid}")
            if (reason := not_simulated.reason(item.nodeid)) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
            item.add_marker(pytest.mark.filterwarnings(OWN_HOOK))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        with training_there(self.schedule):
            return (yield)


class SimulatedPool(RankPool):
    """A rank pool whose ranks train on the simulated device; what they return is in host memory."""

    def __init__(self, schedule: sim.Schedule, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._schedule = schedule

    def run_within(self, seconds: float, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        return super().run_within(PATIENCE * seconds, function, *args, **kwargs)

    def _job(self, seconds: float, function: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
        self.check(function)
        return super()._job(seconds, run_there, (self._schedule, function, args, kwargs), {})


@contextlib.contextmanager
def training_there(schedule: sim.Schedule) -> Iterator[None]:
    """Inside, trainings of this process run on the device, by a schedule; modules take inputs from host memory, too.

    A Trainer moves batches to its device. Tests of the engine call models themselves. Random numbers are the host's:
    the references of tests begin with the weights that a seed gives there.
    """
    averages = mock.patch.object(distributed, "_sync_ddp", average)
    with sim.scheduled(schedule) as c, place.trainings_on(sim.DEVICE), averages:
        c.draws_as_host(True)
        handle = register_module_forward_pre_hook(inputs_there)
        try:
            yield
        finally:
            handle.remove()


def inputs_there(module: nn.Module, inputs: Any) -> Any:
    """The inputs of a module that has parameters on the device; in a graph there is nothing to see of it."""
    if torch.compiler.is_compiling():
        return inputs
    own = next(module.parameters(), None)
    return place.moved(inputs, own.device) if own is not None and own.device.type == sim.DEVICE else inputs


def average(result: Tensor, *args: Any, sync: Callable[..., Tensor] = distributed._sync_ddp, **options: Any) -> Tensor:
    """Of Lightning, which takes whatever group is not gloo's for one that averages integers of the host."""
    gloo = mock.patch.object(dist, "get_backend", return_value="gloo")
    with gloo if result.device.type == "cpu" else contextlib.nullcontext():
        return sync(result, *args, **options)


def run_there(schedule: sim.Schedule, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """On a rank."""
    with training_there(schedule):
        return on_host(function(*args, **kwargs))


def on_host(value: Any) -> Any:
    """A copy, with the tensors of the device in host memory, wherever they are in it."""
    written = io.BytesIO()
    _ToHost(written).dump(value)
    return pickle.loads(written.getvalue())


class _ToHost(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == sim.DEVICE:
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented
