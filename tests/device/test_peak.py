"""The most memory that a training takes on the device is what its plan says."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from device.test_overlap import Late
from device.where import DevicePool
from lightning import Callback, LightningModule, Trainer
from strategy.fits import NAMES, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import Muon, ZeroStrategy
from lightning_zero.callbacks import EMA
from lightning_zero.integration import strategy as integration
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.storage import Executor, make_executor

pytestmark = pytest.mark.simulated

WIDTH, DEPTH, MICRO = 512, 6, 2
PRECISIONS = ("32-true", "bf16-true")
# The strategy's name, "0.5 of" it where a fraction is offloaded, "sums of" it where gradients are summed on the device;
# precision; overlap.
Case = tuple[str, str, bool]


class Deep(LightningModule):
    """Six MiB of fp32 parameters; activations are a thousandth of that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(2 * MICRO, WIDTH), batch_size=1)


class Orthogonal(Deep):
    """Trained by Muon; as many matrices as a bucket has go to the device together."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Muon(self.parameters(), lr=1e-3, ns_steps=2)  # further ones take the memory of these


class Planned(Callback):
    """Bytes on the device, by the plan."""

    held = peak = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, ZeroStrategy)
        assert trainer.strategy.memory is not None
        planned = trainer.strategy.memory.plan
        self.held, self.peak = planned.held.device, planned.peak.device


def measure(
    accelerator: str, cases: Sequence[Case], module: type[Deep] = Deep, in_backward: bool = False, clips: str = "norm"
) -> dict[Case, dict[str, float]]:
    """What is held after two steps, and the peak from before the set-up on, in units of what is planned."""
    figures: dict[Case, dict[str, float]] = {}
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    for name, precision, overlap in cases:
        before = _held(before)
        torch.accelerator.reset_peak_memory_stats()
        planned = Planned()
        plain, _, part = name.rpartition(" of ")[::-1]
        options = STRATEGIES[plain] | ({"offload_fraction": float(part)} if part not in ("", "sums") else {})
        options = options | {"accumulate_on_device": part == "sums"}
        if in_backward:
            options = options | {"update_in_backward": True, "skip_nonfinite": False}
        # So little is in flight that a step reaches the limit, also where Lightning waits between two micro-batches.
        sizes = {"bucket_size_mb": 2.0, "prefetch_mb": 2.1, "max_in_flight_mb": 1.1}
        strategy = ZeroStrategy(**options, **sizes, check_steps=1, overlap=overlap)
        # Gradients are clipped in every step: a plan expects it.
        clip = None if in_backward else 1e-6
        micro = MICRO if clips == "norm" else 1  # whose sum would be fp32 anyhow
        flags: dict[str, Any] = {"accumulate_grad_batches": micro, "gradient_clip_val": clip, "precision": precision}
        flags["gradient_clip_algorithm"] = clips
        averages = [EMA()] if clips == "value" else []
        trainer = make_trainer(strategy, accelerator=accelerator, callbacks=[planned, *averages], **flags)
        with mock.patch.object(integration, "make_executor", make_late):
            trainer.fit(module())
        torch.accelerator.synchronize()
        held = _held(before + planned.held) - before
        peak = (torch.accelerator.max_memory_allocated() - before) / planned.peak
        figures[name, precision, overlap] = {"held": held / planned.held, "peak": peak, "MiB": planned.peak / 2**20}
        del trainer, strategy, planned, averages
    return figures


def make_late(device: torch.device, overlap: bool, *limits: int) -> Executor:
    """Whose host jobs begin when somebody waits for them: then most is on its way at a time."""
    return Late(device, *limits) if overlap else make_executor(device, overlap, *limits)


def _held(expected: int) -> int:
    """Bytes on the device, once threads have let go of what they had last and garbage, that too, is collected."""
    end = time.monotonic() + 20.0
    while True:
        gc.collect()
        held = torch.accelerator.memory_allocated()
        if held <= expected or time.monotonic() > end:
            return held
        time.sleep(0.01)


def both(name: str, precision: str) -> list[Case]:
    """With overlap and without, where that makes a difference to the device's memory."""
    return [(name, precision, overlap) for overlap in ((False, True) if "offload" in name else (True,))]


FEW = [
    *(("zero1", "bf16-true"), ("zero2", "32-true"), ("zero3", "bf16-true"), ("zero3_offload", "32-true")),
    ("sums of zero2_offload", "bf16-true"),
]


@pytest.mark.device
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [case for few in FEW for case in both(*few)]),
        pytest.param(2, both("0.5 of zero2_offload", "bf16-true"), marks=pytest.mark.slow),
        pytest.param(2, both("0.5 of zero3_offload", "32-true"), marks=pytest.mark.slow),
        *(
            pytest.param(ranks, [case for name in NAMES for case in both(name, precision)], marks=pytest.mark.slow)
            for ranks in (1, 2)
            for precision in PRECISIONS
        ),
    ],
)
def test_the_peak_on_the_device_is_the_plans(
    device_pool1: DevicePool, device_pool2: DevicePool, ranks: int, cases: list[Case]
) -> None:
    """To the byte nearly, where copies overlap too."""
    assert_planned({1: device_pool1, 2: device_pool2}[ranks], cases)


@pytest.mark.slow
@pytest.mark.device
@pytest.mark.parametrize("few", [("zero2_offload", "bf16-true"), ("zero3_offload", "32-true")])
def test_the_peak_is_the_plans_where_muon_iterates_on_the_device(
    device_pool2: DevicePool, few: tuple[str, str]
) -> None:
    assert_planned(device_pool2, both(*few), Orthogonal)


@pytest.mark.device
@pytest.mark.parametrize(
    "names", [("zero2", "zero3_offload"), pytest.param((*NAMES, "0.5 of zero2_offload"), marks=pytest.mark.slow)]
)
def test_the_peak_is_the_plans_where_updates_begin_in_backward(device_pool2: DevicePool, names: Sequence[str]) -> None:
    """Within 1%, with no memory for scaled gradients, since no step clips."""
    cases = [case for name in names for precision in PRECISIONS for case in both(name, precision)]
    assert_planned(device_pool2, cases, in_backward=True)


@pytest.mark.device
def test_the_peak_is_the_plans_where_gradients_are_clipped_by_value_beside_an_average(device_pool2: DevicePool) -> None:
    """In fp32, which 16-bit gradients become then."""
    cases = [case for name in ("zero2", "zero3", "zero3_offload") for case in both(name, "bf16-true")]
    assert_planned(device_pool2, cases, clips="value")


def assert_planned(pool: DevicePool, cases: list[Case], *options: Any, **flags: Any) -> None:
    wrong = []
    for figures in pool.run(measure, pool.where.accelerator, cases, *options, **flags):
        for case, found in figures.items():
            print(*case, {what: round(figure, 4) for what, figure in found.items()})
            if not (0.99 <= found["held"] <= 1.01 and 0.99 <= found["peak"] <= 1.01):
                wrong.append((case, found))
    assert not wrong
