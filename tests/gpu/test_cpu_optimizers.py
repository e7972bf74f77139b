"""The CPU optimizers under a model on a GPU: masters and state on the host, a master's high half in both places."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool, ranks
from strategy.fits import Fitted, Lit, Recipe, fit, reference

from lightning_zero import CPUSGD, CPUAdam, CPUAdamW, CPULion

pytestmark = pytest.mark.gpu

OFFLOADED = ("zero1_offload", "zero2_offload", "zero3_offload")


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
            held = [*bucket.master.tensors(0, 1), *state.flat.values()]
            places = {value.device.type for value in held if isinstance(value, torch.Tensor)}
            self.notes.append((bucket.flat.device.type, places))


def trained(name: str, precision: str, kind: type[CPUAdam], device: str = "gpu", **options: Any) -> Fitted:
    module = functools.partial(Ours, kind=kind, options=options)
    return fit(name, Recipe(), module, accelerator=device, precision=precision)


@ranks(1)
@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("kind", [CPUAdamW, CPULion, CPUSGD])
def test_fp32_training_is_near_one_cpu_process(pool: RankPool, name: str, kind: type[CPUAdam]) -> None:
    (result,) = pool.run(trained, name, "32-true", kind, lr=1e-2)
    (expected,) = pool.run(trained, name, "32-true", kind, "cpu", lr=1e-2)
    assert set(map(str, result.notes)) == {str(("cuda", {"cpu"}))}
    # Lion follows the sign of what two devices round differently.
    tolerance = 3e-2 if kind is CPULion else 1e-3
    torch.testing.assert_close(result.weights, expected.weights, rtol=tolerance, atol=tolerance)


@ranks(1)
@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_a_split_master_has_its_high_half_on_the_host(pool: RankPool, name: str, precision: str, state: str) -> None:
    (result,) = pool.run(trained, name, precision, CPUAdamW, lr=1e-3, master_layout="split", state_dtype=state)
    assert set(map(str, result.notes)) == {str(("cuda", {"cpu"}))}
    expected = reference(name, Recipe(optimizer="adamw"), 1).weights
    torch.testing.assert_close(result.weights, expected, rtol=5e-2, atol=5e-2)


@ranks(1)
def test_layouts_of_the_master_differ_in_ties_only(pool: RankPool) -> None:
    """A copied master rounds ties to even, a split one away from zero: one bf16 in 2^17."""
    whole, split = (
        pool.run(trained, "zero2_offload", "bf16-true", CPUSGD, lr=1e-3, master_layout=layout)[0].weights
        for layout in ("fp32", "split")
    )
    torch.testing.assert_close(whole, split, rtol=1e-4, atol=1e-5)


@ranks(1)
@pytest.mark.parametrize("offload", ["zero2", "zero3"])
def test_masters_on_the_device_are_refused(pool: RankPool, offload: str) -> None:
    with pytest.raises(Exception, match="its masters are not in host memory"):
        pool.run(trained, offload, "32-true", CPUAdamW)
