"""Manual optimization with one and two optimizers equals the loop that a PyTorch user writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import models
from helpers.ranks import RankPool
from lightning import LightningModule
from strategy.fits import (
    Fitted,
    Lit,
    Recipe,
    assert_close,
    assert_same,
    every_name,
    fit,
    halve,
    is_native,
    make_trainer,
    observe,
    one_or_two_ranks,
    reference,
)
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Optimizer
from torch.utils.data import DataLoader


class Manual(Lit):
    """One optimizer; accumulates, clips and steps the scheduler by hand."""

    clip: float | None = None

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        micro = self.recipe.micro
        if index % micro == 0:
            optimizer.zero_grad()
        with optimizer.toggle_model(sync_grad=(index + 1) % micro == 0):
            self.manual_backward(models.next_token_loss(self.model, batch) / micro)
        if (index + 1) % micro == 0:
            self.clip_by_hand(optimizer)
            optimizer.step()
            if self.recipe.scheduled:
                self.lr_schedulers().step()

    def clip_by_hand(self, optimizer: Optimizer) -> None:
        pass


class ManualClipped(Manual):
    def clip_by_hand(self, optimizer: Optimizer) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


class ManualValueClipped(Manual):
    def clip_by_hand(self, optimizer: Optimizer) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")


@one_or_two_ranks
@every_name
@pytest.mark.parametrize("micro", [1, 2])
def test_one_optimizer_by_hand(pool: RankPool, name: str, micro: int) -> None:
    recipe = Recipe(micro=micro, scheduled=True)
    results = pool.run(fit, name, recipe, Manual, accumulate_grad_batches=1)
    native = is_native(name, recipe)
    assert_same(results[0].weights, reference(name, recipe, pool.world_size).weights, native=native)
    assert results[0].steps == recipe.steps


@one_or_two_ranks
@every_name
@pytest.mark.parametrize(
    ("module", "options"), [(ManualClipped, {"clip_norm": 0.3}), (ManualValueClipped, {"clip_value": 0.02})]
)
def test_gradients_may_be_clipped_by_hand(
    pool: RankPool, name: str, module: type[Lit], options: dict[str, float]
) -> None:
    recipe = Recipe(optimizer="momentum")
    results = pool.run(fit, name, recipe, module)
    assert_same(results[0].weights, reference(name, recipe, pool.world_size, **options).weights)


class PlainBackward(Manual):
    """Calls `loss.backward()` itself, as nobody should but some do."""

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        models.next_token_loss(self.model, batch).backward()
        optimizer.step()


@one_or_two_ranks
@every_name
def test_a_plain_backward_call_trains_too(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum")
    results = pool.run(fit, name, recipe, PlainBackward)
    assert_same(results[0].weights, reference(name, recipe, pool.world_size).weights)


class WithClosure(Manual):
    """Hands the whole computation to the optimizer's step."""

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = models.next_token_loss(self.model, batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@one_or_two_ranks
@every_name
def test_a_closure_may_be_given_by_hand(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum")
    results = pool.run(fit, name, recipe, WithClosure)
    assert_same(results[0].weights, reference(name, recipe, pool.world_size).weights)


class Uneven(Manual):
    """Backward twice before a step, without saying so: the gradients of both calls count."""

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            self.manual_backward(models.next_token_loss(self.model, batch) / 2)
        optimizer.step()


@one_or_two_ranks
@every_name
def test_several_backwards_add_up(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum")
    results = pool.run(fit, name, recipe, Uneven)
    # A half and a half is the whole, exactly.
    assert_same(results[0].weights, reference(name, recipe, pool.world_size).weights)


# ------------------------------------------------------------------------------------------------------------------ GAN

FEATURES, LATENT, STEPS = 7, 3, 4


class Gan(LightningModule):
    """A generator and a discriminator. `toggle` is Lightning's way; without it each backward reaches both networks.

    Args:
        toggle: switch off gradients of the other network during each backward.
        dtype: of parameters and data.
    """

    def __init__(self, toggle: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle = toggle
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            self.generator = nn.Sequential(nn.Linear(LATENT, 9), nn.Tanh(), nn.Linear(9, FEATURES)).to(dtype)
            self.discriminator = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
        self.notes: list[Any] = []

    def generator_loss(self, z: Tensor, real: Tensor) -> Tensor:
        score = self.discriminator(self.generator(z))
        return binary_cross_entropy_with_logits(score, torch.ones_like(score))

    def discriminator_loss(self, z: Tensor, real: Tensor) -> Tensor:
        true, false = self.discriminator(real), self.discriminator(self.generator(z).detach())
        return binary_cross_entropy_with_logits(true, torch.ones_like(true)) + binary_cross_entropy_with_logits(
            false, torch.zeros_like(false)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        generator, discriminator = self.optimizers()
        schedulers = self.lr_schedulers()
        for optimizer, loss, scheduler in zip(
            (generator, discriminator), (self.generator_loss, self.discriminator_loss), schedulers, strict=True
        ):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            value = loss(*batch)
            optimizer.zero_grad()
            self.manual_backward(value)
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)
            scheduler.step()
            self.notes.append(value.item())

    def configure_optimizers(self) -> Any:
        optimizers = make_optimizers(self)
        return optimizers, [torch.optim.lr_scheduler.LambdaLR(optimizer, halve) for optimizer in optimizers]

    def train_dataloader(self) -> Any:
        dtype = next(self.parameters()).dtype
        batches = [ranks_of[dist.get_rank()] for ranks_of in gan_batches(dist.get_world_size(), dtype)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def make_optimizers(gan: Gan) -> list[Optimizer]:
    """Two different rules, so that a mixed-up state would show."""
    return [
        torch.optim.SGD(gan.generator.parameters(), lr=0.5, momentum=0.9),
        torch.optim.Adagrad(gan.discriminator.parameters(), lr=0.1),
    ]


def gan_batches(world: int, dtype: torch.dtype) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(2)

    def batch() -> tuple[Tensor, Tensor]:
        return (
            torch.randn(4, LATENT, generator=generator, dtype=dtype),
            torch.randn(4, FEATURES, generator=generator, dtype=dtype),
        )

    return [[batch() for _ in range(world)] for _ in range(STEPS)]


def plain_gan(world: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The loop of PyTorch's own tutorial, on the batches of all ranks."""
    gan = Gan(toggle=False, dtype=dtype)
    optimizers = make_optimizers(gan)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, halve) for optimizer in optimizers]
    for step in gan_batches(world, dtype):
        losses: list[Callable[..., Tensor]] = [gan.generator_loss, gan.discriminator_loss]
        for optimizer, loss, scheduler in zip(optimizers, losses, schedulers, strict=True):
            optimizer.zero_grad()
            for batch in step:
                (loss(*batch) / world).backward()
            optimizer.step()
            scheduler.step()
    return {name: value.detach() for name, value in gan.state_dict().items()}


def fit_gan(name: str, toggle: bool, dtype: torch.dtype) -> Fitted:
    gan = Gan(toggle, dtype)
    trainer = make_trainer(name)
    trainer.fit(gan)
    return observe(trainer, gan)  # type: ignore[arg-type]


@one_or_two_ranks
@every_name
@pytest.mark.parametrize("toggle", [True, False])
def test_a_gan_trains_as_in_plain_pytorch(pool: RankPool, name: str, toggle: bool) -> None:
    dtype = torch.float64 if pool.world_size > 1 else torch.float32
    results = pool.run(fit_gan, name, toggle, dtype)
    expected = plain_gan(pool.world_size, dtype)
    if pool.world_size == 1:
        assert_same(results[0].weights, expected)
    else:
        assert_close(results[0].weights, expected)
    generator, discriminator = results[0].optimizer_states
    assert all(name.startswith("generator") for name in generator)
    assert all(values.keys() == {"step", "sum"} for values in discriminator.values())
    assert results[0].steps == 2 * STEPS
