"""Updates that begin in backward: what would make them another step is an error, and the weights are torn after it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine import driver
from engine.driver import Session, Setup
from helpers import models, place
from helpers.ranks import RankPool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_zero.engine import Engine
from lightning_zero.sharding import Mesh, MixedPrecisionPolicy
from lightning_zero.update import TornStepError, make_updater

STAGES = (1, 3)


def start(
    stage: int,
    model: nn.Module | None = None,
    optimizers: int = 1,
    precision: MixedPrecisionPolicy = driver.UNCHANGED,
    **options: Any,
) -> Session:
    setup, model = Setup(stage, offload=True, precision=precision), model or models.make_model("transformer")
    parameters = [*model.parameters()]
    mesh = Mesh.create() if torch.distributed.is_initialized() else Mesh.single()
    made = [torch.optim.AdamW(parameters[number::optimizers], lr=1e-2) for number in range(optimizers)]
    engine = Engine(
        model,
        driver.make_placement(setup, mesh),
        bucket_size_mb=setup.bucket_size_mb,
        check_steps=0,
        skip_nonfinite=False,
        update_in_backward=True,
        **options,
    )
    updaters = [make_updater(optimizer, engine, "auto") for optimizer in made]
    engine.attach(updaters)
    return Session(model, engine, made[0], updaters[0])


def closure_of(
    session: Session, after_backward: Callable[[], Any] = lambda: None, micro: int = 1
) -> Callable[[], Tensor]:
    (batches,) = models.make_batches(1, micro, 1)

    def closure() -> Tensor:
        session.optimizer.zero_grad()
        for number, (batch,) in enumerate(batches, start=1):
            with session.engine.forward_context():
                loss = models.next_token_loss(session.model, batch)
            driver.backward(session.engine, loss, last=number == micro)
        after_backward()
        return loss

    return closure


def in_last_hook(session: Session, act: Callable[[], Any]) -> None:
    """Have backward call a function when only the embedding's gradient is missing."""
    next(session.model.parameters()).register_hook(lambda _: act() and None)


def change_rate(session: Session) -> None:
    session.optimizer.param_groups[0]["lr"] = 0.5


def clear_state(session: Session) -> None:
    session.optimizer.state.clear()


def clip(session: Session) -> None:
    session.engine.clip_grad_norm_(session.optimizer, 1e-3)


@torch.no_grad()
def halve(session: Session) -> None:
    for parameter in session.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def clear(session: Session) -> None:
    session.optimizer.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("act", "words"),
    [
        (change_rate, "hyperparameters or state of AdamW were changed"),
        (clear_state, "hyperparameters or state of AdamW were changed"),
        (clip, "gradients cannot be clipped, because updates begin in backward"),
        (halve, "gradients were changed after"),
        (clear, "gradients were changed after"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_changes_the_step_after_its_first_update_is_an_error(
    stage: int, act: Callable[[Session], None], words: str
) -> None:
    session = start(stage)
    with pytest.raises(TornStepError, match=words) as caught:
        session.optimizer.step(closure_of(session, lambda: act(session)))
    assert "The step is torn" in str(caught.value)
    for again in (lambda: session.optimizer.step(closure_of(session)), session.engine.in_backward.check):
        with pytest.raises(TornStepError):
            again()


def test_clipping_is_refused_also_before_the_first_update() -> None:
    """By the norm and by the value."""
    session = start(2)
    session.optimizer.step(closure_of(session))
    for act in (clip, lambda session: session.engine.clip_grad_value_(session.optimizer, 0.1)):
        with pytest.raises(ValueError, match=r"gradients cannot be clipped, because updates begin in backward"):
            act(session)


def assert_no_bit_changes(
    make: Callable[[], Session], use: Callable[[Session], Any] = lambda _: None, micro: int = 1, least: int = 1
) -> None:
    """Two steps; `use` is called before them, and at least so many updates begin in backward."""
    left = []
    for early in (False, True):
        session, begun = make(), []
        session.engine.in_backward._enabled = early
        use(session)

        def note(session: Session = session, begun: list[int] = begun) -> None:
            begun.append(len(session.engine.in_backward._begun))

        for _ in range(2):
            session.optimizer.step(closure_of(session, note, micro))
            session.optimizer.param_groups[0]["lr"] *= 0.1
        assert min(begun) >= least if early else max(begun) == 0
        left.append(driver.finish(session))
    driver.assert_equal(left[1].weights, left[0].weights)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rate_that_changes_before_the_backward_is_the_steps(stage: int) -> None:
    assert_no_bit_changes(
        lambda: start(stage), lambda session: session.model.register_forward_hook(lambda *_: change_rate(session))
    )


def drop_gradient(parameter: nn.Parameter) -> None:
    """For a hook that sees the gradient before the engine."""
    parameter.grad = None


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "without",
    [
        lambda parameter: parameter.requires_grad_(False),
        lambda parameter: parameter.register_post_accumulate_grad_hook(drop_gradient),
    ],
    ids=["frozen", "dropped"],
)
def test_a_parameter_without_a_gradient_waits_for_the_step(stage: int, without: Callable[[nn.Parameter], Any]) -> None:
    """Where others of its bucket have one: an update would decay it."""
    torch.manual_seed(0)
    model = models.TinyTransformer(depth=4)
    assert_no_bit_changes(
        lambda: start(stage, copy.deepcopy(model)), lambda session: without(session.model.blocks[-1].down.weight)
    )


class Tuned(models.TinyTransformer):
    """A frozen layer of the last block is computed again when the gradients of the layers above it have come."""

    def forward(self, tokens: Tensor) -> Tensor:
        block = self.blocks[-1]
        x = checkpoint(block.project, self.blocks[0](self.tokens(tokens)), use_reentrant=False)
        return self.head(block.down(F.gelu(block.up(block.norm2(x)))))


def test_frozen_parameters_are_computed_with_again() -> None:
    """The optimizer does not have them, but others of their bucket."""

    def freeze(session: Session) -> None:
        block, (group,) = session.model.blocks[-1], session.optimizer.param_groups
        for module in (block.norm1, block.qkv, block.project):
            module.requires_grad_(False)
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        session.engine.attach([session.updater])

    torch.manual_seed(0)
    model = Tuned()
    # On a device the first bucket waits for the next forward, and so does the other one, which has frozen parameters.
    assert_no_bit_changes(lambda: start(1, copy.deepcopy(model)), freeze, least=place.accelerator() == "cpu")


class Twice(models.TinyTransformer):
    """The first of two blocks computes again after the second."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = block(x)
        return self.head(x)


def test_a_unit_that_is_called_twice_is_updated_after_its_last_backward() -> None:
    """In a step of two micro-batches its parameters have gradients before the last one."""
    torch.manual_seed(0)
    model = Twice(depth=2)
    assert_no_bit_changes(lambda: start(3, copy.deepcopy(model)), micro=2)


def test_edits_before_the_backward_are_taken_over() -> None:
    precision = MixedPrecisionPolicy(torch.bfloat16, keep_norms=False)

    @torch.no_grad()
    def edit(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.mul_(0.75)

    assert_no_bit_changes(
        lambda: start(2, precision=precision), lambda session: session.model.register_forward_pre_hook(edit)
    )


def test_what_a_context_holds_gathered_waits_for_the_step() -> None:
    """User code may read it after backward."""
    session, seen = start(3), list[Tensor]()
    parameters = [*session.model.parameters()]
    before = [session.engine.full_param(parameter) for parameter in parameters]
    with session.engine.gathered(parameters):
        session.optimizer.step(closure_of(session, lambda: seen.extend(p.detach().clone() for p in parameters)))
    assert all(map(torch.equal, seen, before))
    assert len(seen) == len(before)
    assert not any(map(torch.equal, map(session.engine.full_param, parameters), before))


def test_autograd_refuses_what_it_has_saved_of_an_updated_parameter() -> None:
    """An operator that takes a weight as a constant, before one that learns it."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    session = start(1, model, units=["2", "1"])

    def closure() -> Tensor:
        with session.engine.forward_context():
            x = F.linear(model[0](torch.ones(2, 16)), model[2].weight.detach())
            loss = model[2](model[1](x)).sum()
        driver.backward(session.engine, loss)
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        session.optimizer.step(closure)
    with pytest.raises(TornStepError):
        session.engine.in_backward.check()


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_was_updated_is_not_read_in_the_same_backward(stage: int) -> None:
    """Nor does a unit compute with it."""
    for use in (
        lambda block, session: block(torch.ones(2, 4, block.down.in_features)),
        lambda block, session: block.down.weight.sum(),
    ):
        session = start(stage)
        block = [m for m in session.model.modules() if isinstance(m, models.Block)][-1]
        in_last_hook(session, lambda block=block, session=session, use=use: use(block, session))
        with pytest.raises((TornStepError, RuntimeError), match=r"read in a backward after its update|which is freed"):
            session.optimizer.step(closure_of(session))


class Shared(nn.Module):
    """Two segments of reentrant checkpointing use one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.shared, self.first(x), use_reentrant=True)
        return checkpoint(self.shared, x.tanh(), use_reentrant=True)


def test_a_weight_that_reentrant_checkpointing_shares_is_an_error() -> None:
    """It would be computed with again when it has been updated."""
    session = start(1, Shared(), units=["shared"])

    def closure() -> Tensor:
        with session.engine.forward_context():
            loss = session.model(torch.ones(2, 16)).sum()
        driver.backward(session.engine, loss)
        return loss

    with pytest.raises(TornStepError, match=r"read in a backward after its update.*use_reentrant=False"):
        session.optimizer.step(closure)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_come_in_parts_are_an_error_that_names_the_parameter(stage: int) -> None:
    """By a backward inside backward, which needs no values."""
    session, other = start(stage), list[Tensor]()
    block = [m for m in session.model.modules() if isinstance(m, models.Block)][-1]
    block.down.register_forward_hook(lambda *_: other.append(block.down.weight.sum()))
    in_last_hook(session, lambda: other.pop().backward())
    with pytest.raises(TornStepError, match=r"another gradient of 'blocks.1.down.weight' has arrived"):
        session.optimizer.step(closure_of(session))


class SharedByTurns(nn.Module):
    """Some batches use a unit twice, in segments of reentrant checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.shared, x.tanh(), use_reentrant=True)
        return x


def comes_late_on_rank_1() -> tuple[int, str]:
    torch.manual_seed(0)
    session = start(1, SharedByTurns(), units=["shared"])
    # It lies on rank 1, where its bucket therefore waits for the step.
    session.model.shared.bias.register_post_accumulate_grad_hook(drop_gradient)
    times = 1 + torch.distributed.get_rank()

    def closure() -> Tensor:
        with session.engine.forward_context():
            loss = session.model(torch.ones(2, 16), times).sum()
        driver.backward(session.engine, loss)
        return loss

    with pytest.raises(TornStepError) as caught:
        session.optimizer.step(closure)
    return len(session.engine.in_backward._begun), str(caught.value)


def test_a_late_gradient_of_another_rank_is_an_error_on_all(pool2: RankPool) -> None:
    """On rank 0 its bucket is updated by then, and on rank 1 it waits for the step."""
    for begun, (number, said) in zip((2, 1), pool2.run(comes_late_on_rank_1), strict=True):
        assert number == begun
        assert "another gradient of a parameter of shared" in said


@pytest.mark.parametrize("last", [False, True])
def test_an_update_that_fails_tears_the_weights(last: bool) -> None:
    """In backward and in the step: it may have written some values. Nothing stays held by who asked for them then."""
    session, calls = start(1), itertools.count(1)
    [m for m in session.model.modules() if isinstance(m, models.Block)][-1].down.weight.requires_grad_(False)
    number, own = len(session.engine.buckets) if last else 1, session.updater.update

    def update(view: Any) -> None:
        own(view)
        if next(calls) == number:
            raise MemoryError

    session.updater.update = update  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        session.optimizer.step(closure_of(session))
    assert next(calls) == number + 1
    for read in (
        session.engine.in_backward.check,
        lambda: session.engine.gathered(session.model.parameters()),
        lambda: session.engine.full_param(next(session.model.parameters())),
        lambda: session.optimizer.step(closure_of(session)),
    ):
        with pytest.raises(TornStepError, match=r"^The step is torn: it has updated"):
            read()
    assert not any(bucket.pins for bucket in session.engine.buckets)


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_backward_in_the_closure_is_an_error(stage: int) -> None:
    session = start(stage)
    ((batch,),), *_ = models.make_batches(1, 1, 1)

    def closure() -> Tensor:
        with session.engine.forward_context():
            losses = [models.next_token_loss(session.model, batch) for _ in range(2)]
        for loss in losses:
            driver.backward(session.engine, loss)
        return losses[0]

    with pytest.raises(TornStepError, match=r"^another backward begins in the closure.*Add the losses"):
        session.optimizer.step(closure)


def test_hyperparameters_that_stay_need_not_equal_themselves() -> None:
    """As nan does; and whether a pair of tensors is another one is not their truth."""

    def note(session: Session) -> None:
        session.optimizer.param_groups[0] |= {"target": float("nan"), "pair": (torch.ones(2), 1.0)}

    assert_no_bit_changes(lambda: start(1), note)


def test_optimizers_that_cannot_are_refused() -> None:
    with pytest.raises(ValueError, match="there are 2 optimizers; expected one"):
        start(1, optimizers=2)


def test_torn_weights_are_given_out_with_a_warning() -> None:
    session = start(1)
    with pytest.raises(TornStepError):
        session.optimizer.step(closure_of(session, lambda: change_rate(session)))
    with pytest.warns(UserWarning, match="the module gets torn weights back"):
        session.engine.release()
    assert all(type(parameter) is nn.Parameter for parameter in session.model.parameters())


def test_a_backward_without_a_step_updates_nothing() -> None:
    session = start(1)
    before = {name: value.clone() for name, value in session.model.state_dict().items()}
    closure_of(session)()
    session.engine.in_backward.check()
    driver.assert_equal(session.model.state_dict(), before)
