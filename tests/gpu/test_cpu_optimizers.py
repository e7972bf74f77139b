"""The CPU optimizers under a model on a device: masters and state on the host, a master's high half in both places."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from device.where import DevicePool
from helpers.ranks import slow_unless
from strategy.fits import Fitted, Lit, Recipe, fit, reference

from lightning_zero import CPUSGD, CPUAdam, CPUAdamW, CPULion

OFFLOADED = ("zero1_offload", "zero2_offload", "zero3_offload")
on_device = pytest.mark.device("lazy")


class Ours(Lit):
    """Trained by one of the CPU optimizers; notes where masters and state lie."""

    def __init__(self, recipe: Recipe, kind: type[CPUAdam], options: dict[str, Any]) -> None:
        super().__init__(recipe)
        self.kind, self.options = kind, options

    def configure_optimizers(self) -> Any:
        return self.kind(self.model.parameters(), **self.options)

    def on_train_batch_end(self, *_: Any) -> None:
        strategy = self.trainer.strategy
        for bucket in strategy.engine.buckets:
            state = strategy.engine.updaters[0].state_of(bucket)
            held = [bucket.master.read(0, 1), *(flat.read(0, 1) for flat in state.flat.values())]
            places = {value.device.type for value in held}
            self.notes.append((bucket.flat.device.type, places))


def trained(name: str, precision: str, kind: type[CPUAdam], device: str, **options: Any) -> Fitted:
    module = functools.partial(Ours, kind=kind, options=options)
    return fit(name, Recipe(), module, accelerator=device, precision=precision)


@on_device
@pytest.mark.parametrize("name", slow_unless(["zero3_offload"], OFFLOADED))
@pytest.mark.parametrize("kind", [CPUAdamW, CPULion, CPUSGD])
def test_fp32_training_is_near_one_cpu_process(device_pool1: DevicePool, name: str, kind: type[CPUAdam]) -> None:
    (result,) = device_pool1.run(trained, name, "32-true", kind, device_pool1.where.accelerator, lr=1e-2)
    (expected,) = device_pool1.run(trained, name, "32-true", kind, "cpu", lr=1e-2)
    assert set(map(str, result.notes)) == {str((device_pool1.where.type, {"cpu"}))}
    # Lion follows the sign of what two devices round differently.
    tolerance = 3e-2 if kind is CPULion else 1e-3
    torch.testing.assert_close(result.weights, expected.weights, rtol=tolerance, atol=tolerance)


@on_device
@pytest.mark.parametrize("name", slow_unless(["zero2_offload"], OFFLOADED))
@pytest.mark.parametrize("precision", slow_unless(["bf16-true"], ["bf16-mixed", "bf16-true"]))
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_split_masters_are_updated_on_the_host(device_pool1: DevicePool, name: str, precision: str, state: str) -> None:
    options = {"lr": 1e-3, "master_layout": "split", "state_dtype": state}
    (result,) = device_pool1.run(trained, name, precision, CPUAdamW, device_pool1.where.accelerator, **options)
    assert set(map(str, result.notes)) == {str((device_pool1.where.type, {"cpu"}))}
    expected = reference(name, Recipe(optimizer="adamw"), 1).weights
    torch.testing.assert_close(result.weights, expected, rtol=5e-2, atol=5e-2)


@on_device
def test_layouts_of_the_master_differ_in_ties_only(device_pool1: DevicePool) -> None:
    """A copied master rounds ties to even, a split one away from zero: one bf16 in 2^17."""
    whole, split = (
        device_pool1.run(
            trained, "zero2_offload", "bf16-true", CPUSGD, device_pool1.where.accelerator, lr=1e-3, master_layout=layout
        )[0].weights
        for layout in ("fp32", "split")
    )
    torch.testing.assert_close(whole, split, rtol=1e-4, atol=1e-5)


@on_device
@pytest.mark.parametrize("offload", ["zero2", "zero3"])
def test_masters_on_the_device_are_refused(device_pool1: DevicePool, offload: str) -> None:
    with pytest.raises(Exception, match="its masters are not in host memory"):
        device_pool1.run(trained, offload, "32-true", CPUAdamW, device_pool1.where.accelerator)
