"""Every kind of model in `zoo`, trained sharded, against plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import driver, zoo
from engine.driver import Meshes, RankResult, Setup, assert_close, assert_equal
from helpers import models, place
from helpers.ranks import RankPool, ranks
from helpers.reference import Batches, Trained, train_reference
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import checkpoint
from lightning_zero.engine import gathered_parameters
from lightning_zero.sharding import Mesh

STAGES = (1, 2, 3)
STEPS = 4
MICRO = 2
OPTIMIZER = models.optimizer_factory("adamw")


def model_and_batches(name: str, world: int, seed: int = 0) -> tuple[nn.Module, Batches]:
    """In float64 where results are close only."""
    model = zoo.make(name, seed)
    if zoo.KINDS[name].exact:
        return model, zoo.make_batches(STEPS, MICRO, world)
    return model.double(), zoo.make_batches(STEPS, MICRO, world, torch.float64)


def train_kind(name: str, setups: Sequence[Setup]) -> list[tuple[RankResult, dict[str, Tensor]]]:
    """What training left with each set-up, and this rank's own buffers before it took rank 0's."""
    rank, meshes, results = dist.get_rank(), Meshes(), []
    for setup in setups:
        model, batches = model_and_batches(name, dist.get_world_size(), seed=rank)
        session = driver.start(model, OPTIMIZER, setup, meshes.of(setup))
        for step in batches:
            driver.run_step(session, [micro[rank] for micro in step], zoo.loss_of)
        own = zoo.own_buffers(session.model)
        session.engine.sync_buffers()
        results.append((driver.finish(session), own))
    return results


@functools.cache
def reference_of(name: str, world: int, reduce_each: bool) -> Trained:
    model, batches = model_and_batches(name, world)
    trained = train_reference(model, OPTIMIZER, batches, zoo.loss_of, reduce_each=reduce_each)
    # A parameter without elements has no state on any shard.
    state = {name: state for name, state in trained.optimizer_state.items() if trained.weights[name].numel()}
    return dataclasses.replace(trained, optimizer_state=state)


def check(pool: RankPool, name: str, stages: Sequence[int], offload: bool = False) -> None:
    setups = [Setup(stage, offload=offload, units=zoo.KINDS[name].units) for stage in stages]
    compare = assert_equal if zoo.KINDS[name].exact else assert_close
    for setup, per_rank in zip(setups, zip(*pool.run_within(20, train_kind, name, setups), strict=True), strict=True):
        expected = reference_of(name, pool.world_size, setup.stage >= 2)
        driver.assert_trained(driver.combine([result for result, _ in per_rank]), expected, compare)
        for (_, own), plain in zip(per_rank, expected.buffers, strict=True):
            compare(own, plain)


def moved(name: str, world: int) -> bool:
    """Whether training changed anything at all."""
    initial = zoo.make(name).state_dict()
    return any(not torch.equal(value, initial[key]) for key, value in reference_of(name, world, True).weights.items())


# Kinds that meet code of ours which no other of these does; the rest is slow.
TYPICAL = (
    "TiedFrozen",
    "OwnedByRoot",
    "Dtypes",
    "Strided",
    "ChannelsLast",
    "UnusedUnit",
    "Experts",
    "Lstm",
    "Attention",
    "Parametrizations",
    "Returns",
    "Odd",
    "Checkpointing",
    "Functions",
    "Hooked",
    "Buffers",
)


@pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in TYPICAL else pytest.mark.slow) for name in zoo.KINDS]
)
def test_trains_as_in_torch(pool2: RankPool, name: str) -> None:
    assert moved(name, pool2.world_size)
    check(pool2, name, (1, 3) if name in TYPICAL else (3,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Tied", "UnusedUnit", "Strided"])
def test_trains_as_in_torch_on_more_ranks_and_with_state_on_the_host(pool4: RankPool, name: str) -> None:
    check(pool4, name, (2,))
    check(pool4, name, (1, 3), offload=True)


# ------------------------------------------------------------------------------------------ what happens between steps


@dataclasses.dataclass
class Training:
    """A script's view of training: on plain torch with the batches of all ranks, or on an engine with its own."""

    model: Any
    optimizer: Optimizer
    world: int
    session: driver.Session | None = None
    seen: list[Tensor] = dataclasses.field(default_factory=list)  # what all ranks and plain torch must see

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.session else 0

    def step(self, number: int, loss_of: Callable[[nn.Module, Tensor], Tensor] = zoo.loss_of) -> None:
        batches = zoo.make_batches(number + 1, 1, self.world, torch.float64)[number][0]
        self.optimizer.zero_grad()
        if self.session:
            driver.backward(self.session.engine, loss_of(self.model, batches[self.rank]))
        else:
            losses = [loss_of(self.model, batch) for batch in batches]
            (sum(losses, torch.zeros(())) / self.world).backward()
        self.optimizer.step()
        if self.session:
            self.session.engine.settle()

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        return gathered_parameters(self.model)


PROBE = zoo.make_batches(1, 1, 1, torch.float64)[0][0][0]


def evaluating(training: Training) -> None:
    """Evaluation between steps, without gradients in both ways that torch has."""
    for step in range(3):
        training.step(step)
        training.model.eval()
        with torch.no_grad():
            training.seen.append(training.model(PROBE))
        with torch.inference_mode():
            training.seen.append(training.model(PROBE).clone())
        training.model.train()


def ragged(training: Training) -> None:
    """Another number of forward passes on each rank, as in validation on uneven data or in generation."""
    for step in range(3):
        training.step(step)
        with training.gathered(), torch.inference_mode():
            x = probe = place.placed(PROBE)
            for _ in range(1 + 2 * training.rank):
                x = torch.cat([training.model(x), probe[:, zoo.WIDTH :]], dim=1)
            training.seen.append(training.model(PROBE).clone())


def functional(training: Training) -> None:
    """Stateless calls with other parameters, and gradients of single rows by `vmap`."""
    for step in range(3):
        training.step(step)
        with training.gathered():
            doubled = {name: 2.0 * p.detach() for name, p in training.model.named_parameters()}
            training.seen.append(torch.func.functional_call(training.model, doubled, (PROBE,)).detach())

            def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
                return torch.func.functional_call(training.model.blocks[0], parameters, (row,)).square().sum()

            own = {name: p.detach() for name, p in training.model.blocks[0].named_parameters()}
            gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(own, PROBE[:, : zoo.WIDTH])
            training.seen += gradients.values()


def functional_loss(training: Training) -> None:
    """The loss is a stateless call with parameters computed from the model's own."""

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        scaled = {name: 1.5 * p for name, p in model.named_parameters()}
        return torch.func.functional_call(model, scaled, (batch,)).square().mean()

    for step in range(3):
        with training.gathered():
            training.step(step, loss_of)


def unfreezing(training: Training) -> None:
    """Blocks are frozen and in no optimizer; the first joins it later, is frozen again, and thaws."""
    training.model.blocks.requires_grad_(False)
    first = list(training.model.blocks[0].parameters())
    for group in training.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
    training.step(0)
    training.model.blocks[0].requires_grad_(True)
    training.step(1)
    training.optimizer.add_param_group({"params": first, "lr": 0.02})
    training.step(2)
    training.model.blocks[0].requires_grad_(False)
    training.step(3)
    training.model.blocks[0].requires_grad_(True)
    training.step(4)
    training.seen += [p.grad for p in training.model.blocks[1].parameters() if p.grad is not None]


SCRIPTS = (evaluating, ragged, functional, functional_loss, unfreezing)


def play(script: Callable[[Training], None], name: str, setups: Sequence[Setup]) -> list[tuple[RankResult, Any]]:
    meshes, results = Meshes(), []
    for setup in setups:
        model = zoo.make(name).double()
        session = driver.start(model, models.optimizer_factory("momentum"), setup, meshes.of(setup))
        training = Training(model, session.optimizer, dist.get_world_size(), session)
        script(training)
        results.append((driver.finish(session), training.seen))
    return results


def check_script(pool: RankPool, script: Callable[[Training], None], name: str, stages: Sequence[int]) -> None:
    model = place.placed(zoo.make(name).double())
    plain = Training(model, models.make_optimizer("momentum", model), pool.world_size)
    script(plain)
    setups = [Setup(stage, units=zoo.KINDS[name].units) for stage in stages]
    for results in pool.run_within(20, play, script, name, setups):
        for trained, seen in results:
            assert_close(trained.weights, model.state_dict())
            torch.testing.assert_close(seen, place.moved(plain.seen, "cpu"), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("script", SCRIPTS)
def test_between_steps_a_model_is_as_in_torch(pool2: RankPool, script: Callable[[Training], None]) -> None:
    stages = (1, 2) if script is functional_loss else STAGES
    check_script(pool2, script, "OtherOrder", stages)


@pytest.mark.parametrize("name", ["Attention", "AttentionInRoot", "EncoderDecoder", "ViT", "Lstm"])
@pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:.*nested tensor")
def test_evaluation_takes_the_fast_paths_of_torch(pool2: RankPool, name: str) -> None:
    """Encoder layers read all parameters of their children at once, without calling them."""
    check_script(pool2, evaluating, name, (1, 3))


# ---------------------------------------------------------------------------------------- what cannot work at stage 3


def read_unit(model: Any) -> None:
    """The root reads a parameter of a unit that it does not call."""
    model.blocks[0].up.weight.sum()


def call_forward(model: Any) -> None:
    """Past the hooks of the unit, which gather."""
    model.blocks[0].up.forward(PROBE[:, : zoo.WIDTH])


def late_hook(model: Any) -> None:
    """A hook that comes after the engine's sees the unit freed."""
    model.blocks[0].register_forward_hook(lambda module, args, output: output * module.up.weight.sum())
    model(PROBE)


def functional_call(model: Any) -> None:
    scaled = {name: 2.0 * p for name, p in model.named_parameters()}
    torch.func.functional_call(model, scaled, (PROBE,))


MISUSES = (read_unit, call_forward, late_hook, functional_call)


def misuse() -> dict[str, str]:
    setup = Setup(3, units=zoo.KINDS["OtherOrder"].units)
    messages = {}
    for use in MISUSES:
        model = zoo.make("OtherOrder").double()
        driver.start(model, OPTIMIZER, setup, Meshes().of(setup))
        with pytest.raises(RuntimeError) as raised:
            use(model)
        messages[use.__name__] = str(raised.value)
    return messages


@ranks(1, 2)
def test_reading_a_freed_parameter_is_an_error_that_names_it(pool: RankPool) -> None:
    for messages in pool.run_within(20, misuse):
        for use, message in messages.items():
            assert "on parameter 'blocks.0.up.weight'" in message or "on parameter 'first.weight'" in message, use
            assert "which is freed" in message, use
            assert "gathered_parameters(module)" in message, use


# ---------------------------------------------------------------------------------------------------- memory formats


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["Strided", "ChannelsLast", "OwnedByRoot"])
def test_parameters_keep_shape_and_strides(name: str, stage: int) -> None:
    """Dense ones; what was expanded or cut out becomes contiguous, as in a copy."""
    setup = Setup(stage, units=zoo.KINDS[name].units)
    model = zoo.make(name)
    expected = {key: (p.shape, p.clone().stride()) for key, p in model.named_parameters()}
    session = driver.start(model, OPTIMIZER, setup, Mesh.single())
    assert {key: (p.shape, p.stride()) for key, p in model.named_parameters()} == expected
    driver.finish(session)
    assert {key: (p.shape, p.stride()) for key, p in model.named_parameters()} == expected
    assert {key: (v.shape, v.stride()) for key, v in model.state_dict().items() if key in expected} == expected


def resume_kinds(setups: dict[str, Setup]) -> list[tuple[RankResult, RankResult]]:
    meshes = Meshes()
    return [resume(name, setup, meshes) for name, setup in setups.items()]


def resume(name: str, setup: Setup, meshes: Meshes) -> tuple[RankResult, RankResult]:
    """Training that goes on, and training from what another saved, with the shards of its own layout."""
    mesh, rank = meshes.of(setup), dist.get_rank()
    batches = [[micro[rank] for micro in step] for step in zoo.make_batches(4, 1, dist.get_world_size())]
    first, second = (driver.start(zoo.make(name, seed), OPTIMIZER, setup, mesh) for seed in (0, 1))
    for step in batches[:2]:
        driver.run_step(first, step, zoo.loss_of)
    weights = copy.deepcopy(checkpoint.module_state_dict(first.engine))
    state = copy.deepcopy(checkpoint.optimizer_state_dict(first.engine, first.updater))
    # A file of plain PyTorch may hold any strides.
    weights = {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in weights.items()}
    checkpoint.load_module_state_dict(second.engine, weights)
    checkpoint.load_optimizer_state_dict(second.engine, second.updater, state)
    for session in (first, second):
        for step in batches[2:]:
            driver.run_step(session, step, zoo.loss_of)
        session.engine.sync_buffers()
    return driver.finish(first), driver.finish(second)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_checkpoints_do_not_depend_on_strides(pool2: RankPool, stage: int) -> None:
    setups = {name: Setup(stage, units=zoo.KINDS[name].units) for name in ("Strided", "ChannelsLast", "OwnedByRoot")}
    for per_rank in zip(*pool2.run_within(20, resume_kinds, setups), strict=True):
        first, second = (driver.combine(results) for results in zip(*per_rank, strict=True))
        driver.assert_trained(second, first)
