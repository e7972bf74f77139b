"""What user code reads and changes in `parameter.grad` before the step is the averaged gradient, as under ddp."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers import models
from helpers.ranks import RankError, RankPool, ranks, slow_unless
from lightning.pytorch.utilities import grad_norm
from strategy.fits import DDP, Lit, Recipe, StrategyArgument, fit
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer

from lightning_zero import DynamicLossScaler, StaticLossScaler, ZeroPrecision, full_grad, gathered_parameters
from lightning_zero.update import LossScaler

FAST = Recipe(optimizer="momentum", options={"lr": 0.5}, steps=3)
# Each place where gradients rest: whole, in shards, beside freed parameters, on the host.
PLACES = ("zero0", "zero2", "zero3", "zero2_offload")
places = pytest.mark.parametrize("name", PLACES)
some_places = pytest.mark.parametrize("name", slow_unless(("zero0", "zero3"), PLACES))


def assert_as_ddp(pool: RankPool, name: StrategyArgument, module: Any, recipe: Recipe = FAST) -> None:
    """The same weights, and the same numbers on every rank, but for the order of sums."""
    expected, actual = pool.run(fit, DDP, recipe, module), pool.run(fit, name, recipe, module)
    torch.testing.assert_close(actual[0].weights, expected[0].weights, rtol=1e-5, atol=1e-7)
    for result, wanted in zip(actual, expected, strict=True):
        assert wanted.notes
        assert [list(note) for note in result.notes] == [list(note) for note in wanted.notes]
        for seen, note in zip(result.notes, wanted.notes, strict=True):
            torch.testing.assert_close(to_floats(seen), to_floats(note), rtol=1e-4, atol=1e-6)


def to_floats(note: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in note.items()}


# ------------------------------------------------------------------------------------------------------ what works


class Changes(Lit):
    """Reads and changes gradients wherever Lightning lets it, in each of the ways that act on shards."""

    def on_after_backward(self) -> None:
        self.notes.append({name: p.grad is None for name, p in self.model.named_parameters()})
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.notes += [grad_norm(self, 2), grad_norm(self, "inf"), measures(self.model.tokens.weight)]
        with gathered_parameters(self):
            for number, parameter in enumerate(self.model.parameters()):
                self.change(number, parameter)
        self.notes.append({"clipped by torch": clip_grad_norm_(self.parameters(), 0.3)})

    def change(self, number: int, parameter: Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.full(parameter.shape, 0.01)
            return
        parameter.grad += 0.001
        parameter.grad.nan_to_num_().clamp_(min=-0.02)
        parameter.grad.add_(torch.linspace(-0.01, 0.01, parameter.numel()).view(parameter.shape), alpha=0.5)
        parameter.grad.add_(parameter, alpha=0.1)
        if number % 4 == 0:
            parameter.grad = parameter.grad * 2 - parameter.grad.sign() / 1000
        elif number % 4 == 1:
            parameter.grad = torch.full_like(parameter.grad, 0.003)
        elif number % 4 == 2:
            kept = parameter.grad.clone()
            parameter.grad.zero_()
            parameter.grad.data.copy_(kept)
        elif number % 8 == 3:
            parameter.grad = None

    def configure_gradient_clipping(self, optimizer: Optimizer, **_: Any) -> None:
        self.notes.append({"clipped": get_total_norm([p.grad for p in self.parameters() if p.grad is not None])})
        clip_grad_value_(self.parameters(), 0.02)
        clip_grad_norm_(self.parameters(), 0.2, norm_type=1.0)
        clip_grad_norm_(self.parameters(), 0.1, foreach=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.notes.append(grad_norm(self, 2))


def measures(parameter: Parameter) -> dict[str, Tensor]:
    gradient = parameter.grad
    assert gradient is not None
    return {
        "finite": torch.isfinite(gradient).all(),
        "any": torch.isnan(gradient).any(),
        "largest": gradient.abs().max(),
        "least": gradient.min(),
        "mean": gradient.mean(),
        "positive": (gradient > 0).sum(),
        "spread": ((gradient - gradient.mean()) ** 2).sum(),
        "sum of magnitudes": gradient.norm(1),
        "least magnitude": torch.linalg.vector_norm(gradient * 2, -torch.inf),
    }


@ranks(2)
@places
def test_what_is_done_to_gradients_counts(pool: RankPool, name: str) -> None:
    """Parameters are unused on one rank, or on both, by turns."""
    assert_as_ddp(pool, name, Changes, Recipe("optional", "momentum", {"lr": 0.5}, flagged=models.by_turns))


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_replicas(pool: RankPool, stage: int) -> None:
    """Each half of the ranks holds all slices. Before the last micro-batch the halves have not met."""
    hybrid = {"stage": stage, "shard_size": 2}
    assert_as_ddp(pool, hybrid, Changes, Recipe("optional", "momentum", {"lr": 0.5}, flagged=models.by_turns))
    with pytest.raises(RankError, match="is not complete: more micro-batches follow"):
        pool.run(fit, hybrid, Recipe(micro=2), HalvesEach)


class Kept(Lit):
    """Keeps results from step to step; first asks in inference mode; lists of tensors; a gradient of one element."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.scalar = torch.nn.Parameter(torch.tensor(0.7))
        self.average: dict[str, Tensor] = {}

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = super().training_step(batch, index)
        return None if loss is None else loss * self.model.scalar**2

    def on_after_backward(self) -> None:
        with torch.inference_mode():
            self.notes.append({"norm": get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])})

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        scalar = self.model.scalar.grad
        assert scalar is not None
        self.notes.append({"item": scalar.item(), "sign": bool(scalar > 0)})
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                parameter.grad = self.average.get(name)  # of a step in which it was used
                continue
            new = parameter.grad.clone()
            self.average[name] = self.average[name] * 0.9 + new if name in self.average else new
            mixed = (new > 0.01) ^ (self.average[name] > 0)
            parameter.grad = torch.where(mixed, parameter.grad, parameter.grad + self.average[name])
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_addcmul_(gradients, gradients, gradients, [0.1] * len(gradients))
        torch._foreach_mul_(gradients, 0.9)


@ranks(2)
@some_places
def test_what_was_kept_of_gradients(pool: RankPool, name: str) -> None:
    assert_as_ddp(pool, name, Kept, Recipe("optional", "momentum", {"lr": 0.5}, flagged=models.by_turns))


class HalvesEach(Lit):
    """Changes gradients after every micro-batch, and before the step before and after Lightning has clipped them."""

    complete = False

    def on_after_backward(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    def on_train_batch_start(self, *_: Any) -> None:
        self.complete = False

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.complete = True
        self.notes.append({"before": clip_grad_norm_(self.parameters(), 0.05)})
        self.notes.append(grad_norm(self, 2))

    def configure_gradient_clipping(self, optimizer: Optimizer, **_: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.04, gradient_clip_algorithm="norm")
        self.notes.append(grad_norm(self, 2))
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.5)

    def on_train_batch_end(self, *_: Any) -> None:
        self.notes.append({"after": grad_norm(self, 2)["grad_2.0_norm_total"] if self.complete else 0.0})


@ranks(2)
@some_places
def test_gradients_of_micro_batches(pool: RankPool, name: str) -> None:
    """Before the last one stages 0 and 1 show a rank's own sum, stages 2 and 3 the average: it is linear in both."""
    assert_as_ddp(pool, name, HalvesEach, Recipe(optimizer="momentum", options={"lr": 0.5}, micro=3, tail=2))


class Dropped(Lit):
    """Drops and replaces gradients before the last micro-batch, which comes after it."""

    def on_after_backward(self) -> None:
        first, second, *_ = self.model.parameters()
        first.grad, second.grad = None, torch.full(second.shape, 0.01)
        self.notes.append({"dropped": first.grad is None})


@ranks(2)
@some_places
def test_gradients_dropped_between_micro_batches(pool: RankPool, name: str) -> None:
    assert_as_ddp(pool, name, Dropped, Recipe(optimizer="momentum", options={"lr": 0.5}, micro=3))


class ByHand(Lit):
    """Two optimizers by turns, of which one sums two backward passes; torch clips."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, second = list(self.model.blocks.parameters()), list(self.model.parameters())[:2]
        return [torch.optim.SGD(p, 0.5, momentum=0.9) for p in (first, second)], []

    def training_step(self, batch: Tensor, index: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            self.manual_backward(models.next_token_loss(self.model, batch))
            if number == 0:
                self.manual_backward(models.next_token_loss(self.model, batch) * 0.5)
            own = [p for group in optimizer.param_groups for p in group["params"]]
            self.notes.append({"before": clip_grad_norm_(own, 0.1 * (number + 1), norm_type=1.0)})
            self.notes.append({"after": get_total_norm([p.grad for p in own if p.grad is not None])})
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None for p in own)
            self.untoggle_optimizer(optimizer)


@ranks(2)
@some_places
def test_manual_optimization(pool: RankPool, name: str) -> None:
    assert_as_ddp(pool, name, ByHand)


# -------------------------------------------------------------------------------------------------------- precision


class Scaled(Lit):
    """Clips the unscaled gradients by torch; an overflow is set to zero, and skips the step all the same."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0).add_(1.0).sub_(1.0).clamp_(-0.1, 0.1)
        self.notes.append({"norm": clip_grad_norm_(self.parameters(), 0.1)})

    def on_train_batch_end(self, *_: Any) -> None:
        self.notes.append({"skipped": self.trainer.strategy.skipped_steps})


def half(scaler: LossScaler) -> dict[str, Any]:
    return {"plugins": [ZeroPrecision("16-mixed", scaler=scaler)]}


@ranks(2)
@some_places
def test_gradients_are_unscaled(pool: RankPool, name: str) -> None:
    """Whatever the loss scale is; in the first two steps the largest one overflows."""
    small, large = (pool.run(fit, name, FAST, Scaled, **half(StaticLossScaler(scale)))[0] for scale in (64.0, 2048.0))
    torch.testing.assert_close(small.weights, large.weights, rtol=1e-3, atol=1e-4)
    norms = [note["norm"] for note in small.notes[::2]]
    torch.testing.assert_close(norms, [note["norm"] for note in large.notes[::2]], rtol=1e-2, atol=0)
    assert max(norms) > 0.1
    scaler = DynamicLossScaler(init_scale=2.0**40, hysteresis=1, backoff_factor=2.0**-15)
    with_overflow = pool.run(fit, name, FAST, Scaled, **half(scaler))
    assert [[note["skipped"] for note in result.notes[1::2]] for result in with_overflow] == [[1, 2, 2]] * 2


class Assigned(Lit):
    """Makes gradients itself, without a backward, for all parameters but the last of each two."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        for parameter in self.model.parameters():
            if parameter.grad is not None:  # zeros
                parameter.grad.copy_(torch.full(parameter.shape, 0.25))
                continue
            parameter.grad = torch.full(parameter.shape, 1.0)
            parameter.grad = None
            parameter.grad = torch.full(parameter.shape, 0.5)
        for parameter in list(self.model.parameters())[1::2]:
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=index != 1)


@ranks(2)
@some_places
def test_gradients_without_a_backward(pool: RankPool, name: str) -> None:
    """They count in a 16-bit dtype too; with a loss scale they would be taken for scaled ones."""
    recipe = Recipe(optimizer="momentum", options={"lr": 0.5}, steps=3)
    expected = pool.run(fit, DDP, recipe, Assigned)[0].weights
    assigned = pool.run(fit, name, recipe, Assigned, precision="bf16-mixed")[0].weights  # of fp32 masters
    torch.testing.assert_close(assigned, expected, rtol=1e-6, atol=1e-7)
    with pytest.raises(RankError, match="gradients have the loss scale 64 until then"):
        pool.run(fit, name, recipe, Assigned, **half(StaticLossScaler(64.0)))


class Mended(Scaled):
    """The loss of one batch is not finite on one rank."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = super().training_step(batch, index)
        assert loss is not None
        return loss * torch.nan if index == 1 and self.global_rank == 0 else loss


@ranks(2)
@some_places
def test_a_mended_gradient_is_not_skipped(pool: RankPool, name: str) -> None:
    """Without a loss scaler nobody else must know."""
    assert [[note["skipped"] for note in r.notes[1::2]] for r in pool.run(fit, name, FAST, Mended)] == [[0, 0, 0]] * 2


# ------------------------------------------------------------------------------------------------------ what is not


REFUSED: dict[str, Any] = {
    "select": lambda p: p.grad[0],
    "numpy()": lambda p: p.grad.numpy(),
    "tolist()": lambda p: p.grad.tolist(),
    "sum": lambda p: p.grad.sum(0),
    "view": lambda p: p.grad.view(-1),
    "histc": lambda p: p.grad.histc(3),
    "equal": lambda p: torch.equal(p.grad, p.grad),
    "add_ on an ordinary tensor": lambda p: torch.zeros(p.shape).add_(p.grad),
    "add with a tensor of shape (2, 11, 6)": lambda p: p.grad + torch.zeros(2, *p.shape),
    "normal_": lambda p: p.grad.normal_(),
}


class Refused(Lit):
    """Notes the message of everything that cannot work, and does without communication."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        parameter, other = self.model.tokens.weight, self.model.positions.weight
        for what, use in REFUSED.items():
            with pytest.raises(RuntimeError, match=re.escape(f"of it: {what} needs all of it.")) as caught:
                use(parameter)
            assert "lightning_zero.full_grad(parameter)" in str(caught.value)
        with pytest.raises(RuntimeError, match=r"tokens.weight.grad = .* each rank holds a slice of that gradient"):
            parameter.grad = other.grad
        with pytest.raises(RuntimeError, match=r"expected that of the parameter, \(11, 6\)"):
            parameter.grad = torch.zeros(3)
        whole = full_grad(parameter)
        assert whole is not None
        parameter.grad = whole * 2  # the remedy
        torch.testing.assert_close(full_grad(parameter), whole * 2)
        self.before = parameter.grad
        assert self.before is parameter.grad
        assert "AveragedGradient('model.tokens.weight', shape=(11, 6)" in repr(self.before)

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if index:
            self.optimizers().zero_grad()
            with pytest.raises(RuntimeError, match="is no longer there: it was cleared"):
                self.before.norm()


@ranks(2)
@pytest.mark.parametrize("name", ["zero0", "zero2", "zero3"])
def test_what_cannot_work_says_what_does(pool: RankPool, name: str) -> None:
    pool.run(fit, name, FAST, Refused)


class Early(Lit):
    """Looks before gradients are complete, averaged, or ever will be."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.model.blocks.parameters(), 0.1)

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer, parameter = self.optimizers(), self.model.blocks[0].up.weight
        models.next_token_loss(self.model, batch).backward()
        with pytest.raises(RuntimeError, match=r"blocks.0.norm1.weight' is not averaged yet.*self.manual_backward"):
            clip_grad_norm_(self.model.blocks.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(models.next_token_loss(self.model, batch))
        if isinstance(self.recipe.options["shown"], str):
            with pytest.raises(RuntimeError, match=r"blocks.0.up.weight' is not complete.*on_before_optimizer_step"):
                parameter.grad.norm()
        else:
            assert type(parameter.grad) is Tensor
        self.manual_backward(models.next_token_loss(self.model, batch))
        other = self.model.tokens.weight
        for requires, remedy in ((True, "Freeze it by"), (False, "Set it to None")):
            other.requires_grad_(requires)
            with pytest.raises(RuntimeError, match=rf"'model.tokens.weight' is not averaged.* no optimizer.* {remedy}"):
                clip_grad_norm_(self.parameters(), 0.1)
        other.grad = None
        assert other.grad is None
        assert clip_grad_norm_(self.model.blocks.parameters(), 0.1) > 0.1
        norm = get_total_norm([p.grad for p in self.model.blocks.parameters()])
        torch.testing.assert_close(norm, torch.tensor(0.1, device=self.device))
        optimizer.zero_grad()


@ranks(2)
@pytest.mark.parametrize(("name", "shown"), [("zero0", True), ("zero2", "error"), ("zero3", "error")])
def test_gradients_that_are_not_complete(pool: RankPool, name: str, shown: object) -> None:
    pool.run(fit, name, Recipe(options={"shown": shown}, steps=1), Early)
