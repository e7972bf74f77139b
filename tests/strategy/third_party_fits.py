"""Fits of the models of `helpers.third_party` through `Trainer`, and the plain runs that they must equal."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from helpers import models
from helpers.reference import Trained, train_reference
from helpers.third_party import KINDS, Batch, make_batches
from lightning import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

STEPS = 5


class Lit(LightningModule):
    """A model of `KINDS`, trained and evaluated on its own batches."""

    def __init__(
        self,
        kind: str,
        *,
        steps: int = STEPS,
        dtype: torch.dtype = torch.float32,
        optimizer: str = "adamw",
    ) -> None:
        super().__init__()
        self.kind = kind
        self.steps = steps
        self.optimizer_name = optimizer
        self.batch_dtype = dtype
        self.model = KINDS[kind].make_model(dtype)

    def training_step(self, batch: Batch, index: int) -> Any:
        return self.model(**batch)  # a mapping with a loss, as Lightning accepts it

    def test_step(self, batch: Batch, index: int) -> None:
        self.log("test_loss", self.model(**batch)["loss"], sync_dist=True, batch_size=1)

    def predict_step(self, batch: Batch, index: int) -> Tensor:
        return self.model(**batch)["logits"]

    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self.optimizer_name, self.model)

    def loader(self) -> DataLoader[Batch]:
        batches = make_batches(KINDS[self.kind], self.steps, dist.get_world_size(), self.batch_dtype)
        return DataLoader(models.rank_batches(batches, dist.get_rank()), batch_size=None)  # type: ignore[arg-type]

    train_dataloader = test_dataloader = predict_dataloader = loader


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """For what is trainable, as those who freeze most of a model write it."""
    cls, options = models.OPTIMIZERS[name]
    return cls([parameter for parameter in model.parameters() if parameter.requires_grad], **options)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


class FirstRanksBuffers:
    """`loss_of` for a reference in which rank 0's batches alone move the statistics of a BatchNorm."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._calls = 0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        loss = loss_of(model, batch)
        if self._calls % self._world:
            for name, buffer in model.named_buffers():
                buffer.data.copy_(buffers[name])  # unseen by autograd, whose backward comes after this
        self._calls += 1
        return loss


def fits(
    kind: str, world: int, *, steps: int = STEPS, dtype: torch.dtype = torch.float32, optimizer: str = "adamw"
) -> Iterator[tuple[nn.Module, Trained]]:
    """The plain model after one fit, after two, ...: each with an optimizer of its own, as Lightning makes them."""
    model = KINDS[kind].make_model(dtype)
    batches = make_batches(KINDS[kind], steps, world, dtype)
    while True:
        make = functools.partial(make_optimizer, optimizer)
        trained = train_reference(
            model,
            make,
            batches,
            FirstRanksBuffers(world),
            reduce_each=True,  # type: ignore[arg-type]
        )
        model.load_state_dict(trained.weights)
        yield model, trained
