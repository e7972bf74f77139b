"""`zero_auto` on a device with memory of its own: what does not fit there goes to host memory, and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device import sim
from device.where import DevicePool
from strategy.fits import assert_same, make_trainer
from strategy.test_auto import Assumed, Stack, options_of
from torch import Tensor

from lightning_zero import ZeroStrategy

pytestmark = pytest.mark.simulated


def fit(memory: int, micro_batches: int) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """The choice with so many MiB of the device, and the weights after a step with it and with the same by name."""
    auto = Assumed(device_memory_gb=memory / 2**10, max_in_flight_mb=0.0)
    trained = []
    for number in range(2):
        strategy = ZeroStrategy(**options_of(auto)) if number else auto
        torch.manual_seed(0)
        module = Stack()
        flags = {"accelerator": sim.DEVICE, "accumulate_grad_batches": micro_batches}
        make_trainer(strategy, limit_train_batches=micro_batches, **flags).fit(module)
        strategy.release()
        trained.append({name: value.cpu() for name, value in module.state_dict().items()})
    return options_of(auto), trained


@pytest.mark.device("lazy")
@pytest.mark.parametrize(("memory", "micro_batches", "part"), [(14, 1, 0.25), (9, 4, 0.75)])
def test_what_does_not_fit_the_device_goes_to_the_host(
    device_pool2: DevicePool, memory: int, micro_batches: int, part: float
) -> None:
    for options, (found, expected) in device_pool2.run(fit, memory, micro_batches):
        assert (options["offload_optimizer"], options["offload_fraction"]) == ("cpu", part)
        assert_same(found, expected)
