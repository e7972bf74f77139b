"""A pytest plugin that uses another strategy wherever a test leaves the choice to Lightning.

    PYTHONPATH=benchmarks LIGHTNING_STRATEGY=zero3 pytest -p lightning_substitute ...

``LIGHTNING_STRATEGY`` is a registered name. It replaces the default strategy of Trainer and Fabric on the CPU; a
strategy of this package also replaces ``ddp_spawn`` and ``ddp_fork``, with the same way to start processes. Without the
variable nothing is replaced. With ``LIGHTNING_ONE_PROCESS=1``, tests that start ranks or scripts are skipped.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any, NoReturn

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator

import lightning_zero
from lightning_zero.integration.names import STRATEGIES

NAME = os.environ.get("LIGHTNING_STRATEGY")
ONE_PROCESS = os.environ.get("LIGHTNING_ONE_PROCESS") == "1"
START_METHODS = {"ddp_spawn": "spawn", "ddp_fork": "fork"}


def substitute(given: dict[str, Any], name: str, own: type[Any] = lightning_zero.ZeroStrategy) -> Any:
    """The strategy in the place of that of a Trainer's or a Fabric's arguments.

    Args:
        given: the arguments.
        name: of the strategy that stands in.
        own: class of our strategies.
    """
    strategy = given.get("strategy", "auto")
    on_cpu = given.get("accelerator", "auto") in ("auto", "cpu") or isinstance(given["accelerator"], CPUAccelerator)
    if strategy == "auto" and on_cpu:
        return name
    if isinstance(strategy, str) and strategy in START_METHODS and name in STRATEGIES:
        return own(**STRATEGIES[name], start_method=START_METHODS[strategy])
    return strategy


def pytest_configure() -> None:
    if NAME:
        _replace_in(Trainer, NAME, lightning_zero.ZeroStrategy)
        _replace_in(Fabric, NAME, lightning_zero.ZeroFabricStrategy)
    if ONE_PROCESS:
        _skip_what_starts_processes()


def _replace_in(user: type[Any], name: str, own: type[Any]) -> None:
    """Let all objects of a class be made with another strategy."""
    made = user.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs | {"strategy": substitute(kwargs, name, own)})

    user.__init__ = init  # type: ignore[method-assign,misc]


def _skip_what_starts_processes() -> None:
    """End tests that start ranks, or Python by a command, as skipped; workers of data loaders may start."""
    run = subprocess.Popen.__init__

    def skip(*args: Any, **kwargs: Any) -> NoReturn:
        pytest.skip("it starts processes")

    @functools.wraps(run)
    def init(self: Any, args: Any, *others: Any, **kwargs: Any) -> None:
        if not isinstance(args, str | bytes | os.PathLike) and args[0] == sys.executable:
            skip()
        run(self, args, *others, **kwargs)

    torch.multiprocessing.start_processes = skip
    # It sleeps for 5 s before it finds that it has nothing to watch, and Lightning's tests wait for it.
    _ChildProcessObserver.__init__.__defaults__ = (0.01,)
    subprocess.Popen.__init__ = init  # type: ignore[method-assign]
