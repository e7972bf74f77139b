"""The package's public surface."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.ranks import RankPool
from lightning.pytorch.strategies import StrategyRegistry

import lightning_zero
from lightning_zero.integration import registration

NAMES = ["zero0", "zero1", "zero2", "zero3"]
NAMES = sorted([*NAMES, "zero_auto", *(f"{name}{place}" for name in NAMES[1:] for place in ("_offload", "_nvme"))])


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)


def test_all_is_importable() -> None:
    assert all(hasattr(lightning_zero, name) for name in lightning_zero.__all__)


def test_importing_registers_the_strategies() -> None:
    assert sorted(n for n in StrategyRegistry.available_strategies() if n.startswith("zero")) == NAMES


def test_each_class_registers_its_names() -> None:
    """As Lightning's own classes do."""
    fixed = [name for name in NAMES if name != "zero_auto"]
    classes = (lightning_zero.ZeroStrategy, lightning_zero.ZeroAutoStrategy, lightning_zero.ZeroFabricStrategy)
    for class_, names in zip(classes, (fixed, ["zero_auto"], NAMES), strict=True):
        registry = type(StrategyRegistry)()
        class_.register_strategies(registry)
        assert sorted(registry) == names


def test_importing_the_package_imports_no_engine() -> None:
    """Which keeps it fast: milliseconds after `lightning`, of which the strategies need the rest anyway."""
    code = "import lightning, lightning_zero, sys; print([m for m in sys.modules if m.startswith('lightning_zero.')])\n"
    use = "print(lightning_zero.schedulers.WarmupLR, lightning_zero.callbacks.EMA, lightning_zero.engine.Engine)"
    before, after = run_python(code + use).stdout.splitlines()
    assert before == str(
        [
            "lightning_zero.integration",
            "lightning_zero.advice",
            "lightning_zero.integration.advice",
            "lightning_zero.integration.names",
            "lightning_zero.integration.registration",
            "lightning_zero.version",
        ]
    )
    assert after.count("<class 'lightning_zero.") == 3


def test_every_folder_is_an_attribute() -> None:
    """Without an import of its own."""
    package = Path(lightning_zero.__file__).parent
    parts = {path.parent.name for path in package.glob("*/__init__.py")} | {"schedulers"}
    assert parts - {"conf"} == lightning_zero._MODULES
    assert {*lightning_zero.__all__, *parts} - {"conf"} <= set(dir(lightning_zero))


def ask_pytorch_lightning() -> None:
    """Where it is imported after the package, and then as if it had been imported before."""
    assert "pytorch_lightning" not in sys.modules
    import pytorch_lightning as pl

    for register in (lambda: None, registration.register):
        register()
        with pytest.raises(ImportError, match=r"import lightning\.pytorch as pl"):
            pl.Trainer(strategy="zero2", accelerator="cpu")
        pl.strategies.StrategyRegistry.remove("zero2")


@pytest.mark.slow
def test_pytorch_lightning_is_told_what_to_import(new_ranks: Callable[[int], RankPool]) -> None:
    new_ranks(1).run(ask_pytorch_lightning)


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="ZeroStrateegy"):
        _ = lightning_zero.ZeroStrateegy


def test_the_error_of_a_disk_can_be_caught_by_its_name() -> None:
    assert lightning_zero.DiskError is lightning_zero.storage.DiskError
