"""The benchmark of exposed time: the model's scale does not show, and what a step waits for is what cannot overlap."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.benchmark import load, run_printing
from helpers.ranks import RankPool


@pytest.fixture
def benchmark(new_ranks: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, whose cells run in new ranks in the place of new interpreters."""

    def run(command: list[str], env: dict[str, str], **options: Any) -> SimpleNamespace:
        (printed,) = new_ranks(1).run(run_printing, command[command.index("-P") + 1 :], env)
        return SimpleNamespace(returncode=0, stdout=printed)

    benchmark = load("exposed")
    monkeypatch.setattr(benchmark, "subprocess", SimpleNamespace(run=run))
    return benchmark


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "strategy", "variant", "limit"),
    [
        ("4090", "zero3_offload", "all", 1.05),
        ("h100", "zero2_offload", "in backward", 1.05),
    ],
)
def test_a_step_takes_little_more_than_what_has_to_come_one_after_another(
    benchmark: Any, gpu: str, strategy: str, variant: str, limit: float
) -> None:
    """The update of the first unit before the forward, and what of the others outlasts the forward.

    With updates in backward nothing has to: a step is the longest of computing, update and copies.
    """
    found = benchmark.measure(benchmark.job_of(gpu, 100e9, 128, strategy, benchmark.VARIANTS[variant]))
    assert 1 <= found["ratio_to_exact"] <= limit
    assert found["steps"][-1] == pytest.approx(found["steps"][-2])
    assert found["step"] == pytest.approx(found["on_device"] + sum(found["exposed"].values()), rel=0.01)
    fetched = {"zero2_offload": 2, "zero3_offload": 4}[strategy]
    assert found["copied_bytes_per_parameter"] == pytest.approx({"D2H": 2, "H2D": fetched}, rel=0.02)
    assert found["host"] == pytest.approx(found["parameters"] * (28 + 2 + fetched) / 100e9, rel=0.03)
