"""`EMA` on a device: where its shards rest, and what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device.where import DevicePool
from helpers.ranks import slow_unless
from lightning import LightningModule, Trainer
from strategy.fits import NAMES, Lit, Recipe, make_trainer, state_of
from torch import Tensor

from lightning_zero.callbacks import EMA

STEPS = 4


class Followed(EMA):
    """Keeps, after every step, the weights and where each shard of the average rests."""

    def __init__(self) -> None:
        super().__init__(decay=0.75)
        self.weights: list[dict[str, Tensor]] = []
        self.places: set[tuple[str, bool]] = set()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        assert self._shards is not None
        self.weights.append(state_of(trainer))
        self.places |= {(shard.device.type, shard.is_pinned()) for shard in self._shards.shadow.shards}


class Grows(Lit):
    """Its buffer is longer after every batch, in validation too, as a cache of masks or positions is."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.register_buffer("cache", torch.ones(1))

    def grow(self) -> None:
        self.cache = torch.cat([self.cache, torch.ones(1, device=self.device)])

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        self.grow()
        return super().training_step(batch, index)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.grow()
        super().validation_step(batch, index)


def follow(name: str, precision: str, accelerator: str) -> tuple[list[dict[str, Tensor]], Any, dict[str, Tensor]]:
    """The weights after every step, where the average was, and the weights at the end."""
    average = Followed()
    flags = {"limit_val_batches": 1, "val_check_interval": 1, "precision": precision, "accelerator": accelerator}
    trainer = make_trainer(name, callbacks=[average], **flags)
    trainer.fit(Grows(Recipe(optimizer="momentum", steps=STEPS)))
    return average.weights, average.places, state_of(trainer)


@pytest.mark.device("lazy")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", slow_unless(["zero3_offload"], NAMES))
def test_an_average_on_a_device_follows_the_weights(device_pool1: DevicePool, name: str, precision: str) -> None:
    where = device_pool1.where
    weights, places, end = device_pool1.run(follow, name, precision, where.accelerator)[0]
    assert places == {("cpu" if "offload" in name else where.type, False)}  # it never leaves where masters are
    expected = {key: value for key, value in weights[0].items() if key != "cache"}
    for step in weights[1:]:
        expected = {key: 0.75 * value + 0.25 * step[key] for key, value in expected.items()}
    torch.testing.assert_close({key: end[key] for key in expected}, expected, rtol=1e-6, atol=1e-7)
