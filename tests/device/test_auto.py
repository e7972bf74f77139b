"""`zero_auto` on a device with memory of its own: what does not fit there goes to host memory."""

from __future__ import annotations

import pytest
from device import sim
from device.where import DevicePool
from strategy.fits import Fitted, Lit, Recipe, assert_same, make_trainer, observe
from strategy.test_auto import Assumed

from lightning_zero import ZeroStrategy
from lightning_zero.integration.options import CHOSEN, FREE


def fit(memory: int) -> tuple[str, Fitted, Fitted]:
    """The choice with so many KiB of the device, and the fits with it and with the same by name."""
    strategy = Assumed(device_memory_gb=memory / 2**20)
    fits = []
    for each in (strategy, None):
        options = {name: getattr(strategy, name) for name in (*CHOSEN, *FREE)}
        lit = Lit(Recipe(optimizer="momentum", steps=2))
        trainer = make_trainer(each or ZeroStrategy(**options), accelerator=sim.DEVICE)
        trainer.fit(lit)
        fits.append(observe(trainer, lit))
    return strategy.offload_optimizer, fits[0], fits[1]


@pytest.mark.device("lazy")
def test_what_does_not_fit_the_device_goes_to_the_host(device_pool2: DevicePool) -> None:
    for place, found, expected in device_pool2.run(fit, 14):
        assert place == "cpu"
        assert_same(found.weights, expected.weights)
