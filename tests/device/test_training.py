"""Lightning trains on the simulated device: in every schedule to the same bits, and as CPU ranks do."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from device import sim
from device.sim import Schedule
from device.where import DevicePool
from helpers.pairs import pairwise
from helpers.ranks import RankPool
from lightning import Callback, Trainer
from strategy.fits import NAMES, Fitted, Lit, Recipe, fit
from torch import Tensor

from lightning_zero import ZeroPrecision, ZeroStrategy
from lightning_zero.integration.names import STRATEGIES

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
# Autocast keeps other operators in 16 bits on the device than on the host. Without it operators are the same code.
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
EAGER, LAZY = Schedule("eager"), Schedule("lazy")
SEEDS = 20
simulated = pytest.mark.device("eager")  # each test chooses its schedules itself
Digests = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Training:
    """One of all that is trained."""

    name: str
    precision: str
    world: int
    recipe: Recipe

    def __str__(self) -> str:
        return f"{self.name}, {self.precision}, {self.world} ranks"

    def fit(self, accelerator: str) -> Fitted:
        # By a plugin: on CPU ranks Lightning makes bf16 of the flag 16-mixed.
        plugin = ZeroPrecision(self.precision)  # type: ignore[arg-type]
        fitted = fit(self.name, self.recipe, accelerator=accelerator, plugins=plugin, gradient_clip_val=0.3)
        assert fitted.steps == self.recipe.steps
        return fitted


def train_on_cpu(training: Training) -> Fitted:
    return training.fit("cpu")


def digests(fitted: Fitted) -> Digests:
    """One per tensor, by what it is."""
    found = {f"weight {name}": value for name, value in fitted.weights.items()}
    for state in fitted.optimizer_states:
        for name, values in state.items():
            found |= {f"{key} of {name}": value for key, value in values.items() if isinstance(value, Tensor)}
    return {what: digest(value) for what, value in found.items()}


def digest(value: Tensor) -> str:
    return hashlib.blake2b(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def train(training: Training, schedules: Sequence[Schedule]) -> tuple[Fitted, list[Digests]]:
    """On the device: the first fit, and the digests of all."""
    fits = []
    for schedule in schedules:
        with sim.scheduled(schedule):
            fits.append(training.fit(sim.DEVICE))
    return fits[0], [digests(fitted) for fitted in fits]


def differences(training: Training, found: dict[str, Digests], expected: Digests, reference: str) -> list[str]:
    """A line for each schedule that gave other bits, with the first tensor that differs."""
    lines = []
    for schedule, actual in found.items():
        assert actual.keys() == expected.keys(), f"{training}, {schedule}"
        if differing := [what for what, value in expected.items() if actual[what] != value]:
            first = f"{differing[0]} and {len(differing) - 1} more of {len(expected)} tensors"
            lines.append(f"{training}, {schedule}: {first} differ from {reference}")
    return lines


def within_rounding(training: Training, fitted: Fitted, here: Fitted) -> list[str]:
    """Lines for weights that differ by more than a rounding to 16 bits of what the weights have moved by."""
    initial = training.recipe.make_model().state_dict()
    moved = max((here.weights[name] - value).abs().max().item() for name, value in initial.items())
    bound = torch.finfo(AUTOCAST[training.precision]).eps * moved
    found = {name: (fitted.weights[name] - value).abs().max().item() for name, value in here.weights.items()}
    return [
        f"{training}: {name} differs from CPU ranks by {difference:.1e}, more than {bound:.1e}"
        for name, difference in found.items()
        if not difference <= bound
    ]


@pytest.mark.simulated
@simulated
@pytest.mark.parametrize("name", ["zero1", "zero2_offload", "zero3_offload"])
def test_training_gives_the_bits_of_cpu_ranks(
    device_pool1: DevicePool, device_pool2: DevicePool, rank_pools: Callable[..., RankPool], name: str
) -> None:
    """Lazily and at random; under autocast within its rounding, and the same bits lazily as eagerly."""
    wrong = []
    for number, precision in enumerate(PRECISIONS, NAMES.index(name)):
        pool = (device_pool1, device_pool2)[number % 2]
        # AdamW makes a whole step of whatever a gradient of zero is rounded to.
        recipe = Recipe(steps=2, micro=2, optimizer="momentum" if precision in AUTOCAST else "adamw")
        training = Training(name, precision, pool.world_size, recipe)
        here = rank_pools(pool.world_size).run(train_on_cpu, training)[0]
        schedules = [EAGER if precision in AUTOCAST else Schedule("random", number), LAZY]
        fitted, found = pool.run(train, training, schedules)[0]
        if precision in AUTOCAST:
            wrong += differences(training, {str(LAZY): found[1]}, found[0], "eager")
            wrong += within_rounding(training, fitted, here)
        else:
            wrong += differences(training, dict(zip(map(str, schedules), found, strict=True)), digests(here), "the CPU")
    assert not wrong, "\n".join(wrong)


def train_on(device: str, default: str, name: str, path: Path) -> Digests:
    """Trains on a device, with this or another default for new tensors; resumes from a checkpoint in each container."""

    def module(recipe: Recipe) -> Lit:
        lit = Lit(recipe)  # with the host's random numbers
        torch.set_default_device(default)
        return lit

    flags: dict[str, Any] = {"accelerator": device, "gradient_clip_val": 0.3}
    options = STRATEGIES[name] | ({"nvme_path": str(path)} if "nvme" in name else {})
    checkpoint = None
    try:
        for epochs, container in enumerate(("full", "sharded", "full"), 1):
            strategy, saved = ZeroStrategy(**options, checkpoint_format=container), path / f"{epochs}.ckpt"
            flags |= {"max_epochs": epochs, "callbacks": [SaveAtEnd(saved)]}
            fitted = fit(strategy, Recipe(steps=2, micro=2), module, ckpt_path=checkpoint, **flags)
            checkpoint = str(saved)
        assert fitted.steps == 6
        return digests(fitted)
    finally:
        torch.set_default_device(None)


class SaveAtEnd(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.device
@pytest.mark.parametrize("name", ["zero2_offload", "zero3", "zero3_nvme"])
def test_a_default_device_changes_nothing(device_pool1: DevicePool, tmp_path: Path, name: str) -> None:
    """`torch.set_default_device` moves what users make, and nothing of the engine's."""
    device = device_pool1.where.type
    there, here = (device_pool1.run(train_on, device, default, name, tmp_path)[0] for default in (device, "cpu"))
    assert there == here


@pytest.mark.simulated
@pytest.mark.slow
@simulated
@pairwise(world=[1, 2], precision=PRECISIONS, name=NAMES)
def test_every_schedule_gives_the_same_bits(
    device_pool1: DevicePool,
    device_pool2: DevicePool,
    rank_pools: Callable[..., RankPool],
    name: str,
    precision: str,
    world: int,
) -> None:
    pool = (device_pool1, device_pool2)[world - 1]
    training = Training(name, precision, world, Recipe(steps=2, micro=2, scheduled=True))
    schedules = [EAGER, LAZY, *(Schedule("random", seed) for seed in range(world - 1, 4, 2))]
    found = dict(zip(map(str, schedules), pool.run(train, training, schedules)[0][1], strict=True))
    if precision in AUTOCAST:
        expected, reference = found[str(EAGER)], "eager"
        rounded = dataclasses.replace(training, recipe=dataclasses.replace(training.recipe, optimizer="momentum"))
        here = rank_pools(world).run(train_on_cpu, rounded)[0]
        wrong = within_rounding(rounded, pool.run(train, rounded, [LAZY])[0][0], here)
    else:
        expected, reference, wrong = digests(rank_pools(world).run(train_on_cpu, training)[0]), "CPU ranks", []
    wrong += differences(training, found, expected, reference)
    assert not wrong, "\n".join(wrong)


@pytest.mark.simulated
@pytest.mark.slow
@simulated
@pytest.mark.parametrize("name", ["zero2_offload", "zero3", "zero3_offload"])
def test_muon_has_the_bits_of_cpu_ranks(
    device_pool2: DevicePool, rank_pools: Callable[..., RankPool], name: str
) -> None:
    """Whole matrices, and AdamW of the rest: by the native kernel where state rests on the host."""
    for precision in ("32-true", "bf16-true"):
        training = Training(name, precision, 2, Recipe(steps=3, micro=2, optimizer="muon_and_adamw"))
        schedules = [EAGER, LAZY, *(Schedule("random", seed) for seed in range(3))]
        expected = digests(rank_pools(2).run(train_on_cpu, training)[0])
        found = dict(zip(map(str, schedules), device_pool2.run(train, training, schedules)[0][1], strict=True))
        assert not differences(training, found, expected, "CPU ranks")
