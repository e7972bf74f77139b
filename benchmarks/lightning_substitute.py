"""A pytest plugin that trains with another strategy wherever a test leaves the choice to Lightning.

    PYTHONPATH=benchmarks LIGHTNING_STRATEGY=zero3 pytest -p lightning_substitute ...

``LIGHTNING_STRATEGY`` is a registered name. It stands in for the default, where one process runs on the CPU; one of
ours also for ``ddp_spawn`` and ``ddp_fork``, with the same way to start processes. Without it nothing is replaced.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator

import lightning_zero
from lightning_zero.integration.names import STRATEGIES

NAME = os.environ.get("LIGHTNING_STRATEGY")
START_METHODS = {"ddp_spawn": "spawn", "ddp_fork": "fork"}


def substitute(given: dict[str, Any], name: str) -> Any:
    """The strategy in the place of that of a Trainer's arguments.

    Args:
        given: the arguments.
        name: of the strategy that stands in.
    """
    strategy = given.get("strategy", "auto")
    on_cpu = given.get("accelerator", "auto") in ("auto", "cpu") or isinstance(given["accelerator"], CPUAccelerator)
    if strategy == "auto" and on_cpu:
        return name
    if isinstance(strategy, str) and strategy in START_METHODS and name in STRATEGIES:
        return lightning_zero.ZeroStrategy(**STRATEGIES[name], start_method=START_METHODS[strategy])
    return strategy


def pytest_configure() -> None:
    if NAME:
        own = Trainer.__init__

        @functools.wraps(own)
        def init(self: Trainer, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **kwargs | {"strategy": substitute(kwargs, NAME)})

        Trainer.__init__ = init  # type: ignore[method-assign]
