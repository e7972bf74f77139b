"""Lightning fits for the tests of this folder and its neighbours: one small module, one Trainer, the reference.

Everything here runs inside the ranks of a pool: `pool.run(fit, "zero2", Recipe(...), clip_norm=...)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import models, place
from helpers.ranks import RankPool, slow_unless
from helpers.reference import Trained, train_reference
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.integration.names import STRATEGIES

NAMES = ("zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload")
FEW = ("zero2_offload", "zero3")
StrategyArgument = str | dict[str, Any] | Strategy  # a dictionary has the arguments of a ZeroStrategy


# What the integration does is the same under every name: the fast tests run with one, the slow ones with one more. A
# fit of every name is compared with one process in test_fit.py.
main_names = pytest.mark.parametrize("name", slow_unless(("zero3",), FEW))


def main_names_and(argument: str, value: Any, *others: Any) -> pytest.MarkDecorator:
    """`zero3` with the first value, fast, and the other name with each of the others, slow."""
    slow = [pytest.param("zero2_offload", other, marks=pytest.mark.slow) for other in others]
    return pytest.mark.parametrize(("name", argument), [("zero3", value), *slow])


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained, on what. Ranks and the reference make the same model and batches from it."""

    model: str = "transformer"
    optimizer: str = "adamw"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the optimizer
    steps: int = 3
    micro: int = 1
    tail: int = 0  # micro-batches of one more, incomplete step
    dtype: torch.dtype = torch.float32
    seed: int = 0  # of the weights
    scheduled: bool = False
    flagged: Callable[[int, int, int], bool] = models.never

    def batches(self, world: int) -> list[list[list[Tensor]]]:
        steps = self.steps + (self.tail > 0)
        made = models.make_batches(steps, self.micro, world, flagged=self.flagged)
        return [*made[:-1], made[-1][: self.tail]] if self.tail else made

    def make_model(self) -> nn.Module:
        return models.make_model(self.model, dtype=self.dtype, seed=self.seed)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        return models.make_optimizer(self.optimizer, model, **self.options)


MOMENTUM = Recipe(optimizer="momentum", steps=4)
DDP = "ddp_find_unused_parameters_true"


def halving(optimizer: Optimizer) -> LambdaLR:
    """A scheduler whose every step shows."""
    return LambdaLR(optimizer, halve)


def halve(step: int) -> float:
    return 0.5**step


class Lit(LightningModule):
    """A model of `helpers.models`; `notes` is whatever a subclass wants to show the test."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = recipe.make_model()
        self.notes: list[Any] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        return models.next_token_loss(self.model, batch)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", models.next_token_loss(self.model, batch), sync_dist=True)

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("test_loss", models.next_token_loss(self.model, batch), sync_dist=True)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.model(batch[:, :-1])

    def configure_optimizers(self) -> Any:
        optimizer = self.recipe.make_optimizer(self.model)
        if not self.recipe.scheduled:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halving(optimizer), "interval": "step"}}

    def loader(self) -> DataLoader[Tensor]:
        batches = models.rank_batches(self.recipe.batches(dist.get_world_size()), dist.get_rank())
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def train_dataloader(self) -> Any:
        return self.loader()

    val_dataloader = test_dataloader = predict_dataloader = loader


@dataclasses.dataclass
class Fitted:
    """What a rank saw. `weights` and `optimizer_states` are whole on rank 0 and may be empty elsewhere."""

    weights: dict[str, Tensor]
    optimizer_states: list[dict[str, dict[str, Tensor]]]
    steps: int
    epochs: int
    metrics: dict[str, float]
    notes: list[Any]


def make_strategy(strategy: StrategyArgument) -> str | Strategy:
    """By default small parameters stay whole at stage 3; of these models that is all. Here none does."""
    if isinstance(strategy, Strategy) or (isinstance(strategy, str) and not strategy.startswith("zero3")):
        return strategy
    options = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
    return ZeroStrategy(**({"persistence_numel": 0} | options))


def accelerator_of(strategy: StrategyArgument) -> str:
    """Lightning's own strategies, with which others are compared, do not know every device."""
    return place.accelerator() if not isinstance(strategy, str) or strategy.startswith("zero") else "cpu"


def make_trainer(strategy: StrategyArgument, **flags: Any) -> Trainer:
    """A quiet Trainer that uses the pool's ranks as they are."""
    quiet: dict[str, Any] = {
        "accelerator": accelerator_of(strategy),
        "devices": dist.get_world_size() if dist.is_initialized() else 1,
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(strategy=make_strategy(strategy), **(quiet | flags))


def fit(
    strategy: StrategyArgument,
    recipe: Recipe | None = None,
    module: Callable[[Recipe], Lit] = Lit,
    *,
    ckpt_path: str | None = None,
    **flags: Any,
) -> Fitted:
    """Fit a module with a Trainer that has these flags."""
    recipe = recipe or Recipe()
    lit = module(recipe)
    trainer = make_trainer(strategy, **({"accumulate_grad_batches": recipe.micro} | flags))
    trainer.fit(lit, ckpt_path=ckpt_path)
    return observe(trainer, lit)


def fit_each(
    strategy: StrategyArgument, recipe: Recipe, modules: Sequence[Callable[[Recipe], Lit]], **flags: Any
) -> list[Fitted]:
    """Several fits in one run."""
    return [fit(strategy, recipe, module, **flags) for module in modules]


def observe(trainer: Trainer, lit: Lit) -> Fitted:
    """What the strategy would save, in tensors of their own."""
    return Fitted(
        weights=state_of(trainer),
        optimizer_states=[optimizer_state(trainer, optimizer) for optimizer in trainer.optimizers],
        steps=trainer.global_step,
        epochs=trainer.current_epoch,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        notes=lit.notes,
    )


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """The module's whole state, with the names that the model has by itself."""
    state = trainer.strategy.lightning_module_state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}  # not extra state
    return {name.removeprefix("model."): value.detach().cpu().clone() for name, value in tensors.items()}


def optimizer_state(trainer: Trainer, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    state = trainer.strategy.optimizer_state(optimizer).get("state", {})  # Lightning's stand-in for none has no key
    return {str(name).removeprefix("model."): values for name, values in state.items()}


def reduces_each(strategy: StrategyArgument) -> bool:
    """Whether the strategy reduces every micro-batch, rather than a step's sum."""
    stage = strategy["stage"] if isinstance(strategy, dict) else int(strategy.removeprefix("zero")[0])
    return stage >= 2


def reference(strategy: StrategyArgument, recipe: Recipe, world: int, **options: Any) -> Trained:
    """What `fit` must equal."""
    return train_reference(
        options.pop("model", None) or recipe.make_model(),
        recipe.make_optimizer,
        options.pop("batches", None) or recipe.batches(world),
        options.pop("loss_fn", models.next_token_loss),
        reduce_each=reduces_each(strategy),
        accumulate=recipe.micro,
        make_scheduler=halving if recipe.scheduled else None,
        **options,
    )


def is_native(strategy: StrategyArgument, recipe: Recipe) -> bool:
    """Whether a native kernel makes the update that rounds otherwise than torch; SGD's does not."""
    offloaded = strategy.get("offload_optimizer") == "cpu" if isinstance(strategy, dict) else "offload" in strategy
    return offloaded and recipe.optimizer in ("adam", "adamw", "amsgrad", "adagrad") and recipe.dtype == torch.float32


# The native kernels fuse what torch rounds in between: up to a few units in the last place of each update.
NATIVE_RTOL = 1e-5
NATIVE_ATOL = 1e-6


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], *, native: bool = False) -> None:
    """Equal bit for bit, or within the bound of the native kernel, wherever they are."""
    assert list(actual) == list(expected)
    actual, expected = place.moved(dict(actual), "cpu"), place.moved(dict(expected), "cpu")
    if native:
        torch.testing.assert_close(actual, expected, rtol=NATIVE_RTOL, atol=NATIVE_ATOL)
        return
    differing = {
        n: (actual[n] - expected[n]).abs().max().item() for n in actual if not torch.equal(actual[n], expected[n])
    }
    assert not differing


def assert_same_states(
    actual: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]], *, native: bool = False
) -> None:
    """As `assert_same`, for optimizer states by parameter name."""
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name].keys() == values.keys()
        for key, value in values.items():
            rtol, atol = (1e-4, 1e-7) if native else (0.0, 0.0)
            torch.testing.assert_close(actual[name][key], value, rtol=rtol, atol=atol, msg=f"{name}.{key}")


def assert_as_ddp(
    pool: RankPool, name: StrategyArgument, module: Callable[[Recipe], Lit], recipe: Recipe = MOMENTUM, **flags: Any
) -> None:
    """Two ranks: the sum of two gradients has one order, so ddp is the reference bit for bit."""
    expected, actual = pool.run(fit, DDP, recipe, module, **flags), pool.run(fit, name, recipe, module, **flags)
    assert_same(actual[0].weights, expected[0].weights)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """For float64, where sums were made in another order."""
    torch.testing.assert_close(dict(actual), dict(expected), rtol=1e-9, atol=1e-12)


def full_batch_loss(weights: dict[str, Tensor], recipe: Recipe, batches: Sequence[Sequence[Sequence[Tensor]]]) -> float:
    """The mean loss over all batches of all ranks at these weights."""
    model = recipe.make_model()
    model.load_state_dict(weights)
    with torch.no_grad():
        losses = [models.next_token_loss(model, batch) for step in batches for micro in step for batch in micro]
    return torch.stack(losses).mean().item()
