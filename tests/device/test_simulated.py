"""`pytest --simulated`: tests of CPU ranks train on the device, and fail where the package has a race."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from device import not_simulated, sim, where
from device.simulated import FOLDERS, SimulatedPool
from device.test_planted_races import TRAININGS, Race, planted
from engine import cases, driver
from engine.cases import Case
from engine.driver import RankResult, Setup
from helpers import models, place
from helpers.ranks import ForkServer
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
RACE = next(race for race in TRAININGS if race.what == "a slice is used before it is reduced")
CASES = [Case(Setup(2), "momentum"), Case(Setup(3, offload=True, native="auto"), "momentum")]


@pytest.fixture(scope="module")
def simulated_pool(fork_server: ForkServer) -> Iterator[SimulatedPool]:
    pool = SimulatedPool(sim.LAZY, 2, fork_server, **where.rank_options(sim.DEVICE, 2))
    yield pool
    pool.close()


def parameters_of_an_engine() -> tuple[str, list[Tensor]]:
    """Where they are, and they themselves."""
    session = driver.start(models.make_model("mlp"), models.optimizer_factory("sgd"), Setup(2))
    parameters = [*session.model.parameters()]
    return str(parameters[0].device), parameters


def train(race: Race | None, cases_of: Sequence[Case]) -> list[RankResult]:
    with contextlib.nullcontext() if race is None else planted(race):
        return cases.train_cases(cases_of)


@pytest.mark.slow
def test_a_race_fails_a_test_of_cpu_ranks(simulated_pool: SimulatedPool) -> None:
    for device, parameters in simulated_pool.run(parameters_of_an_engine):
        assert device == "sim:0"
        assert {parameter.device for parameter in parameters} == {torch.device("cpu")}
    expected = [cases.reference_of(case, 2) for case in CASES]
    for race in (None, RACE):
        differ = []
        for results, reference in zip(zip(*simulated_pool.run(train, race, CASES), strict=True), expected, strict=True):
            try:
                driver.assert_trained(driver.combine(results), reference)
            except AssertionError:
                differ.append(True)
        assert any(differ) == (race is not None)


def drawn() -> list[Tensor]:
    """Random numbers of every kind, of which one operator reads values."""
    torch.manual_seed(5)
    with place.device():
        weight, strided = nn.Linear(7, 5).weight.detach(), torch.rand(4, 6).t().exponential_()
        numbers = [weight, strided, torch.randn(50), torch.randperm(9), F.dropout(torch.ones(50))]
        return [*numbers, torch.full((50,), 0.5).bernoulli()]


def test_random_numbers_are_those_of_a_cpu_rank(simulated_pool: SimulatedPool) -> None:
    *expected, _ = drawn()
    for *numbers, of_the_device in simulated_pool.run(drawn):
        assert all(map(torch.equal, numbers, expected))
        assert sorted(of_the_device.unique().tolist()) == [0.0, 1.0]


def test_what_is_skipped_there_exists() -> None:
    for nodeid in not_simulated.REASONS:
        file, _, test = nodeid.partition("::")
        assert nodeid.startswith(FOLDERS)
        text = (ROOT / file).read_text()
        assert not test or re.search(rf"^def {re.escape(test.partition('[')[0])}\b", text, re.MULTILINE), nodeid
    assert not_simulated.reason("tests/engine/test_none.py::test_none") is None
