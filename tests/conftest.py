"""Rank pools as fixtures, and the rules that keep the suite fast.

With workers, the process that hands tests out to them reads this file, too, and they wait for it: what takes seconds to
import is imported where it is used.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers import rank_worker
from helpers.processes import Stopwatch
from helpers.ranks import REPRODUCIBLE, ForkServer, RankPool

if TYPE_CHECKING:
    import torch
    from device import where

REPOSITORY = Path(__file__).resolve().parents[1]
# Seconds for the call phase of a test without one of the markers below, on cores that nobody else uses. The work of
# other workers is subtracted, but not that they use the disk and the caches.
CALL_LIMIT = 5.0 * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
UNTIMED = ("slow", "launch", "gpu")
MAX_LAUNCH = 18
SIMULATED = "simulated"  # the plugin
# Node ids without parameters that the limit does not apply to.
MAY_BE_SLOW = frozenset(
    # It imports lightning in a process of its own, and so torchmetrics, and so transformers where that is installed.
    ["tests/test_public.py::test_importing_the_package_imports_no_engine"]
)


class TooSlowError(pytest.fail.Exception):
    """A test has passed, but not in time."""


AGAIN = pytest.mark.flaky(reruns=1, only_rerun=TooSlowError)  # whoever else used the machine may be gone by then


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--simulated",
        metavar="SCHEDULE",
        help="run tests/engine and tests/strategy on the simulated device: lazy, eager, or random with a seed: random3",
    )


def pytest_configure(config: pytest.Config) -> None:
    # The reference is compared with what ranks compute, bit by bit: same threads, same arithmetic.
    os.environ.update(REPRODUCIBLE)  # MKL reads its variable at its first call, which is still to come
    if not (hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"):
        return  # the workers run the tests
    import hypothesis
    import torch

    torch.set_num_threads(1)
    # A busy machine is no failure.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("untimed")
    if schedule := config.getoption("simulated"):
        from device.simulated import Simulated

        config.pluginmanager.register(Simulated(schedule), SIMULATED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    launching = [item.nodeid for item in items if item.get_closest_marker("launch")]
    if len(launching) > MAX_LAUNCH:
        listed = "\n  ".join(launching)
        raise pytest.UsageError(
            f"{len(launching)} tests are marked launch, at most {MAX_LAUNCH} may be: use a rank pool instead "
            f"(fixtures pool1, pool2, pool4)\n  {listed}"
        )
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
        if is_limited(item):
            item.add_marker(AGAIN)


def is_limited(item: pytest.Item) -> bool:
    if item.config.getoption("simulated"):
        return False
    return item.nodeid.split("[")[0] not in MAY_BE_SLOW and not any(map(item.get_closest_marker, UNTIMED))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test whose call takes too long twice; neither fixtures, which start ranks, nor others' work count."""
    stopwatch = Stopwatch()
    result = yield
    took, lost = stopwatch.read()
    if is_limited(item) and took - lost > CALL_LIMIT:
        raise TooSlowError(
            f"{item.nodeid} took {took:.2f} s, the limit is {CALL_LIMIT:g} s (and {lost:.2f} s in which the cores did "
            "the work of others): make it smaller or mark it slow",
            pytrace=False,
        )
    return result


@pytest.fixture(autouse=True)
def _seeds() -> None:
    rank_worker.seed()


@pytest.fixture(autouse=True)
def _loggers() -> Iterator[None]:
    """Gives Lightning's loggers back as they were: programs of Hydra that tests run in this process configure them."""
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "lightning.fabric")]
    before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The process that all ranks are forked from."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def rank_pools(pytestconfig: pytest.Config, fork_server: ForkServer) -> Iterator[Callable[..., RankPool]]:
    """Running pools by world size and the type of device that their ranks have, which all tests share."""
    from device import where

    server, plugin = fork_server, pytestconfig.pluginmanager.get_plugin(SIMULATED)
    pools: dict[tuple[int, str], RankPool] = {}

    def running(world_size: int, device: str = "") -> RankPool:
        key = (world_size, device)
        if key not in pools:
            if device:
                pools[key] = RankPool(world_size, server, **where.rank_options(device, world_size))
            else:
                pools[key] = (RankPool if plugin is None else plugin.make_pool)(world_size, server)
        pools[key].start()
        return pools[key]

    yield running
    for pool in pools.values():
        pool.close()


@pytest.fixture
def new_ranks(fork_server: ForkServer) -> Iterator[Callable[[int], RankPool]]:
    """Makes pools of new ranks, without a process group, for programs that are else started as processes.

    They have a launcher's variables, and what the fork server has imported; only this test uses them.
    """
    pools: list[RankPool] = []

    def make(world_size: int) -> RankPool:
        pools.append(RankPool(world_size, fork_server, timeout=240.0, backend=""))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session")
def pool1(rank_pools: Callable[[int], RankPool]) -> RankPool:
    return rank_pools(1)


@pytest.fixture(scope="session")
def pool2(rank_pools: Callable[[int], RankPool]) -> RankPool:
    return rank_pools(2)


@pytest.fixture(scope="session")
def pool4(rank_pools: Callable[[int], RankPool]) -> RankPool:
    return rank_pools(4)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest, rank_pools: Callable[[int], RankPool]) -> RankPool:
    """A pool of the world sizes that `helpers.ranks.ranks` gives."""
    return rank_pools(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "on_device" in metafunc.fixturenames:
        from device import where

        marker = metafunc.definition.get_closest_marker("device")
        if marker is None:
            raise pytest.UsageError(f"{metafunc.definition.nodeid} uses a device: mark it with pytest.mark.device")
        cuda = metafunc.definition.get_closest_marker("simulated") is None
        metafunc.parametrize("on_device", where.cases(marker.args, cuda))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Have a test of the simulated device run by a rank that has it; pytest's own process never does."""
    device = pyfuncitem.funcargs.get("device")
    if device is None:
        return None  # before an import of lightning
    from device import where

    if not isinstance(device, where.OnRank):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    where.run_test(device, pyfuncitem.obj, arguments)
    return True


@pytest.fixture
def device(on_device: where.Where, rank_pools: Callable[..., RankPool]) -> torch.device | where.OnRank:
    """The device of a test marked `device`. The simulated one is in a rank of its own, which runs the whole test."""
    import torch
    from device import where

    if on_device.simulated:
        return where.OnRank(rank_pools(1, on_device.type), on_device)
    return torch.device(on_device.type, 0)


@pytest.fixture
def device_pool1(on_device: where.Where, rank_pools: Callable[..., RankPool]) -> where.DevicePool:
    """A pool of one rank that has a device, for a test marked `device` that runs here."""
    from device import where

    return where.DevicePool(rank_pools(1, on_device.type), on_device)


@pytest.fixture
def device_pool2(on_device: where.Where, rank_pools: Callable[..., RankPool]) -> where.DevicePool:
    from device import where

    return where.DevicePool(rank_pools(2, on_device.type), on_device)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real text and images, where this machine has them."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the shared data folder beside the repository")
    return folder
