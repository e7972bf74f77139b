"""Manual optimization with one and two optimizers equals the loop that a PyTorch user writes."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import models, place
from helpers.ranks import RankPool, ranks, slow_unless
from helpers.reference import reduce_ranks
from lightning import LightningModule
from strategy.fits import (
    Fitted,
    Lit,
    Recipe,
    assert_same,
    assert_same_states,
    fit,
    halve,
    is_native,
    main_names,
    make_trainer,
    observe,
    reference,
)
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_zero import DynamicLossScaler, ZeroPrecision, gathered_parameters
from lightning_zero.sharding.freed import FreedParameter
from lightning_zero.update import LossScaler


class Manual(Lit):
    """One optimizer; accumulates and steps the scheduler by hand."""

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
            optimizer.step()
            if self.recipe.scheduled:
                self.lr_schedulers().step()


@ranks(2)
@main_names
def test_one_optimizer_by_hand(pool: RankPool, name: str) -> None:
    recipe = Recipe(micro=2, scheduled=True)
    results = pool.run(fit, name, recipe, Manual, accumulate_grad_batches=1)
    native = is_native(name, recipe)
    assert_same(results[0].weights, reference(name, recipe, pool.world_size).weights, native=native)
    assert results[0].steps == recipe.steps


@ranks(2)
@main_names
def test_a_step_by_hand_in_16_bits_is_one_of_the_loop(pool: RankPool, name: str) -> None:
    """It is made where tensors without a stated dtype have 16 bits."""
    by_hand, by_loop = (pool.run(fit, name, Recipe(), module, precision="bf16-true")[0] for module in (Manual, Lit))
    assert_same(by_hand.weights, by_loop.weights)
    assert_same_states(by_hand.optimizer_states[0], by_loop.optimizer_states[0])


class Plateau:
    """A scheduler that has a state, and which user code moves on by a method of another name."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def advance(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert not state_dict


class OwnScheduler(Manual):
    def configure_optimizers(self) -> Any:
        optimizer = self.recipe.make_optimizer(self.model)
        return [optimizer], [Plateau(optimizer)]

    def training_step(self, batch: Tensor, index: int) -> None:
        super().training_step(batch, index)
        self.lr_schedulers().advance()


@ranks(2)
@main_names
def test_a_scheduler_without_a_step_is_the_users_affair(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum", scheduled=True)
    results = pool.run(fit, name, dataclasses.replace(recipe, scheduled=False), OwnScheduler)
    assert_same(results[0].weights, reference(name, recipe, pool.world_size).weights)


class Functional(Manual):
    """Computes with a weight outside all units as a tensor, and runs several backwards in a step."""

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.model.tokens(batch)
        for block in self.model.blocks:
            hidden = block(hidden)
        return (hidden @ self.model.tokens.weight.T).square().mean()

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer, weight = self.optimizers(), self.model.tokens.weight
        optimizer.zero_grad()
        first, second = self.loss(batch), self.loss(batch.flip(-1))
        with gathered_parameters(self):
            self.notes.append(weight.norm().item())
        self.manual_backward(first, retain_graph=True)
        self.notes.append(weight.norm().item())
        self.manual_backward(second)
        self.manual_backward(first)
        optimizer.step()
        self.notes.append(weight.norm().item())

    def on_train_batch_end(self, *_: Any) -> None:
        self.freed = isinstance(self.model.tokens.weight, FreedParameter)


def fit_functional(name: str) -> tuple[Fitted, bool]:
    lit = Functional(Recipe())
    trainer = make_trainer(name)
    trainer.fit(lit)
    return observe(trainer, lit), lit.freed


@ranks(2)
def test_weights_outside_all_units_can_be_used_throughout_a_step(pool: RankPool) -> None:
    """After a backward, too, and after a context that gathers them."""
    (expected, freed), *_ = pool.run(fit_functional, "zero2")
    assert not freed
    for actual, freed in pool.run(fit_functional, "zero3"):
        assert actual.notes == expected.notes
        assert freed
        if actual.weights:
            assert_same(actual.weights, expected.weights)


# ------------------------------------------------------------------------------------------------------------------ GAN

FEATURES, LATENT, STEPS = 7, 3, 4


class Gan(LightningModule):
    """A generator and a discriminator. `toggle` is Lightning's way; without it each backward reaches both networks."""

    def __init__(self, toggle: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle = toggle
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            self.generator = nn.Sequential(nn.Linear(LATENT, 9), nn.Tanh(), nn.Linear(9, FEATURES))
            self.discriminator = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))
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
        batches = [ranks_of[dist.get_rank()] for ranks_of in gan_batches(dist.get_world_size())]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def make_optimizers(gan: Gan) -> list[Optimizer]:
    """Two different rules, so that a mixed-up state would show."""
    return [
        torch.optim.SGD(gan.generator.parameters(), lr=0.5, momentum=0.9),
        torch.optim.Adagrad(gan.discriminator.parameters(), lr=0.1),
    ]


def gan_batches(world: int, steps: int = STEPS) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(2)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(4, LATENT, generator=generator), torch.randn(4, FEATURES, generator=generator)

    return [[batch() for _ in range(world)] for _ in range(steps)]


def plain_gan(world: int) -> dict[str, Tensor]:
    """The loop of PyTorch's own tutorial, on the batches of all ranks."""
    gan = Gan(toggle=False)
    optimizers = make_optimizers(gan)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, halve) for optimizer in optimizers]
    for step in gan_batches(world):
        losses: list[Callable[..., Tensor]] = [gan.generator_loss, gan.discriminator_loss]
        for optimizer, loss, scheduler in zip(optimizers, losses, schedulers, strict=True):
            optimizer.zero_grad()
            for batch in step:
                (loss(*batch) / world).backward()
            optimizer.step()
            scheduler.step()
    return {name: value.detach() for name, value in gan.state_dict().items()}


class RawGan(Gan):
    """Calls the optimizers themselves, which Lightning does not notice."""

    def optimizers(self, use_pl_optimizer: bool = False) -> Any:
        return super().optimizers(use_pl_optimizer)


class NestedGan(Gan):
    """Calls one optimizer itself in the closure of the other's step."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        (generator, discriminator), schedulers = self.optimizers(), self.lr_schedulers()

        def closure() -> None:
            for optimizer, loss in ((generator, self.generator_loss), (discriminator, self.discriminator_loss)):
                value = loss(*batch)
                optimizer.zero_grad()
                self.manual_backward(value)
                if optimizer is generator:
                    generator.optimizer.step()

        discriminator.step(closure)
        for scheduler in schedulers:
            scheduler.step()


def fit_gan(name: str, module: type[Gan] = Gan) -> Fitted:
    gan = module(toggle=False)
    trainer = make_trainer(name)
    trainer.fit(gan)
    return observe(trainer, gan)  # type: ignore[arg-type]


@ranks(2)
@main_names
def test_a_gan_trains_as_in_plain_pytorch(pool: RankPool, name: str) -> None:
    results = pool.run(fit_gan, name)
    assert_same(
        results[0].weights, plain_gan(pool.world_size), native="offload" in name
    )  # the sum of two has one order
    generator, discriminator = results[0].optimizer_states
    assert all(name.startswith("generator") for name in generator)
    assert all(values.keys() == {"step", "sum"} for values in discriminator.values())
    assert results[0].steps == 2 * STEPS


@ranks(2)
@pytest.mark.parametrize("name", slow_unless(("zero1",), ("zero1", "zero2", "zero3", "zero1_offload")))
def test_a_step_of_the_optimizer_itself_shows_at_once(pool: RankPool, name: str) -> None:
    """The second network computes with the first one, which has just been updated, also in a closure."""
    for module in (RawGan, NestedGan):
        results = pool.run(fit_gan, name, module)
        assert_same(results[0].weights, plain_gan(pool.world_size), native="offload" in name)


# --------------------------------------------------------------------------------------------------- loss scaled GAN

GENERATOR, DISCRIMINATOR = 0, 1
ROUNDS = 8
START, WINDOW, HYSTERESIS = 2.0**10, 4, 2
# Planted overflows (round, network). The generator's two lower the scale; the first of the discriminator's comes after
# the growth and is free; each network goes on where the other is skipped.
OVERFLOWS = ((1, GENERATOR), (2, GENERATOR), (6, DISCRIMINATOR))


class ScaledGan(Gan):
    """Plants overflows; notes the scale after every step of either optimizer."""

    def __init__(self, toggle: bool, overflows: Sequence[tuple[int, int]] = OVERFLOWS) -> None:
        super().__init__(toggle)
        self.overflows = overflows

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        schedulers = self.lr_schedulers()
        for network, (optimizer, scheduler) in enumerate(zip(self.optimizers(), schedulers, strict=True)):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            # On the last rank alone.
            overflows = (index, network) in self.overflows and dist.get_rank() == dist.get_world_size() - 1
            value = scaled_gan_loss(self, network, batch, overflows)
            optimizer.zero_grad()
            self.manual_backward(value)
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)
            scheduler.step()
            strategy = self.trainer.strategy
            self.notes.append((strategy.loss_scale, strategy.last_step_skipped(optimizer), scheduler.last_epoch))

    def train_dataloader(self) -> Any:
        batches = [ranks_of[dist.get_rank()] for ranks_of in gan_batches(dist.get_world_size(), ROUNDS)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def scaled_gan_loss(gan: Gan, network: int, batch: tuple[Tensor, Tensor], overflows: bool) -> Tensor:
    loss = (gan.generator_loss if network == GENERATOR else gan.discriminator_loss)(*batch)
    return loss * math.inf if overflows else loss


class PlainScale:
    """The rules of dynamic loss scaling, once more."""

    def __init__(self) -> None:
        self.value, self.good, self.bad = START, 0, 0

    def judge(self, overflow: bool) -> None:
        if overflow:
            self.good, self.bad = 0, self.bad + 1
            self.value *= 0.5 if self.bad >= HYSTERESIS else 1.0
        else:
            self.good += 1
            if self.good == WINDOW:
                self.value, self.good, self.bad = self.value * 2, 0, 0


def plain_scaled_gan(world: int, fp16: bool) -> tuple[dict[str, Tensor], list[tuple[float, bool, int]]]:
    """A PyTorch loop with loss scaling: fp32 masters and, for fp16, a working copy under autocast.

    A rank's gradient is divided by the number of ranks in the dtype that it has, and ranks are added in order.
    """
    master = Gan(toggle=False).to(place.device())
    working = copy.deepcopy(master).half() if fp16 else master
    optimizers = make_optimizers(master)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, halve) for optimizer in optimizers]
    scale, notes = PlainScale(), []
    for index, step in enumerate(place.moved(gan_batches(world, ROUNDS), place.device())):
        for network, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
            used, per_rank = scale.value, []
            for rank, batch in enumerate(step):
                working.zero_grad()
                with torch.autocast(place.device().type, torch.float16, enabled=fp16):
                    overflows = (index, network) in OVERFLOWS and rank == world - 1
                    loss = scaled_gan_loss(working, network, batch, overflows)
                (loss.float() * used).backward()
                per_rank.append([parameter.grad for parameter in working.parameters()])
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            gradients = [
                g for g, p in zip(reduce_ranks(per_rank, None), master.parameters(), strict=True) if id(p) in own
            ]
            overflow = not all(bool(gradient.isfinite().all()) for gradient in gradients)
            if not overflow:
                for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
                    parameter.grad = gradient.float() / used
                optimizer.step()
                scheduler.step()
                with torch.no_grad():
                    for low, high in zip(working.parameters(), master.parameters(), strict=True):
                        low.copy_(high)
            scale.judge(overflow)
            notes.append((scale.value, overflow, scheduler.last_epoch))
    return {name: value.detach() for name, value in master.state_dict().items()}, notes


def fit_scaled_gan(name: str, toggle: bool, precision: str, scaler: LossScaler | None) -> Fitted:
    gan = ScaledGan(toggle, OVERFLOWS if scaler is not None else ())
    trainer = make_trainer(name, plugins=[ZeroPrecision(precision, scaler=scaler)])
    trainer.fit(gan)
    return observe(trainer, gan)  # type: ignore[arg-type]


@ranks(2)
@main_names
@pytest.mark.parametrize(
    ("toggle", "precision"), [(True, "16-mixed"), pytest.param(False, "32-true", marks=pytest.mark.slow)]
)
def test_a_gan_with_loss_scaling_is_a_plain_loop_with_loss_scaling(
    pool: RankPool, name: str, toggle: bool, precision: str
) -> None:
    scaler = DynamicLossScaler(init_scale=START, window=WINDOW, hysteresis=HYSTERESIS)
    results = pool.run(fit_scaled_gan, name, toggle, precision, scaler)
    weights, notes = plain_scaled_gan(pool.world_size, fp16=precision == "16-mixed")
    for result in results:
        assert result.notes == notes
    assert_same(results[0].weights, weights, native="offload" in name)
    scales = [scale for scale, _, _ in notes]
    assert sum(skipped for _, skipped, _ in notes) == len(OVERFLOWS)
    assert min(scales) == START / 2  # it fell
    assert scales[-1] > min(scales)  # and grew again
    assert results[0].steps == 2 * ROUNDS


class ByEpoch(Manual):
    """Overflows in the last step of every epoch; the scheduler is stepped by hand after the epoch."""

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = models.next_token_loss(self.model, batch)
        self.manual_backward(loss * math.inf if index == self.recipe.steps - 1 else loss)
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        assert self.trainer.strategy.last_step_skipped(self.trainer.optimizers[0])
        self.lr_schedulers().step()
        self.notes.append(self.trainer.optimizers[0].param_groups[0]["lr"])


@ranks(2)
def test_a_scheduler_stepped_by_hand_after_the_epoch_ignores_skips(pool: RankPool) -> None:
    recipe = Recipe(steps=2, scheduled=True, optimizer="momentum", options={"lr": 1.0})
    results = pool.run(fit, "zero3", recipe, ByEpoch, max_epochs=3)
    assert [result.notes for result in results] == [[0.5, 0.25, 0.125]] * pool.world_size
