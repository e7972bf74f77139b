"""Whole parameters, gradients and optimizer state of a sharded module, as user code asks for them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import driver
from engine.cases import describe, make_model
from engine.driver import Meshes, Setup
from helpers import models, place
from helpers.ranks import RankPool, ranks
from helpers.reference import clip_gradients, rank_gradients, reduce_then_sum, set_gradients, sum_then_reduce
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_zero import full_grad, full_optimizer_state, full_param, gathered_parameters
from lightning_zero.checkpoint import module_state_dict
from lightning_zero.engine import engines_of
from lightning_zero.sharding import Mesh, MixedPrecisionPolicy
from lightning_zero.update import StaticLossScaler

STEPS = 2
MICRO = 2
CLIP = 0.5
SETUPS = [
    Setup(stage, offload=offload, persistence_numel=kept)
    for stage in (0, 1, 2, 3)
    for offload in ((False, True) if stage else (False,))
    for kept in ((0, 10) if stage == 3 else (0,))
]
Seen = list[dict[str, Any]]


def batches(world: int) -> Any:
    return models.make_batches(STEPS, MICRO, world, flagged=models.only_in_step_1)


def look(setup: Setup, scaled: bool) -> Seen:
    """What a rank sees in each step, before and after it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    scaler = StaticLossScaler(256.0) if scaled else None
    model = make_model("optional")
    session = driver.start(model, models.optimizer_factory("adamw"), setup, Meshes().of(setup), scaler=scaler)
    seen: Seen = []
    for step in batches(world):
        session.optimizer.zero_grad()
        for index, micro in enumerate(step, start=1):
            with session.engine.forward_context():
                loss = models.next_token_loss(model, micro[rank]) / MICRO
            driver.backward(session.engine, loss, last=index == MICRO)
        named = dict(model.named_parameters())
        before = {name: full_grad(p) for name, p in named.items()}
        session.engine.clip_grad_norm_(session.optimizer, CLIP)
        clipped = {name: full_grad(p) for name, p in named.items()}
        session.optimizer.step()
        seen.append(
            {
                "gradients": before,
                "clipped": clipped,
                "weights": {name: full_param(p) for name, p in named.items()},
                "states": {name: full_optimizer_state(p) for name, p in named.items()},
            }
        )
    return seen


def expected(stage: int, world: int) -> Seen:
    model = make_model("optional")
    optimizer = models.optimizer_factory("adamw")(model)
    reduce = reduce_then_sum if stage >= 2 else sum_then_reduce
    seen: Seen = []
    for step in batches(world):
        micro = [[rank_gradients(model, batch, models.next_token_loss, MICRO) for batch in each] for each in step]
        set_gradients(model, reduce(micro, None, None))
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        clip_gradients(model, CLIP, None)
        clipped = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        states = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in model.named_parameters()}
        seen.append({"gradients": gradients, "clipped": clipped, "weights": weights, "states": states})
    return seen


def assert_same(ours: Any, theirs: Any, path: str) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), path
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{path}.{key}")
    else:
        assert type(ours) is type(theirs), path
        assert theirs is None or torch.equal(ours, theirs), path


@ranks(2)
@pytest.mark.parametrize(
    ("setup", "scaled"),
    [
        pytest.param(setup, index % 2 == 0, marks=[] if index in (1, 6) else pytest.mark.slow)
        for index, setup in enumerate(SETUPS)
    ],
    ids=lambda value: describe(value) if isinstance(value, Setup) else str(value),
)
def test_all_ranks_see_what_one_process_would(pool: RankPool, setup: Setup, scaled: bool) -> None:
    theirs = expected(setup.stage, pool.world_size)
    assert any(value is None for value in theirs[0]["gradients"].values())
    for ours in pool.run(look, setup, scaled):
        for step in range(STEPS):
            assert_same(ours[step], theirs[step], str(step))


def started(setup: Setup) -> driver.Session:
    return driver.start(make_model("mlp"), models.optimizer_factory("adamw"), setup, Mesh.single())


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_of_16_bits_are_seen_at_full_precision(stage: int) -> None:
    weights = place.placed(make_model("mlp")).state_dict()
    session = started(Setup(stage, precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    for name, parameter in session.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(full_param(parameter), weights[name])


@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_rounding_for_want_of_a_master_is_told_once(stage: int, writeback: bool) -> None:
    """Where user code writes at full precision; reading is no reason, nor are parameters that have masters."""
    for master_weights in (True, False):
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, master_weights=master_weights)
        session = started(Setup(stage, precision=precision))
        name, parameter = next(session.model.named_parameters())
        told = []
        for full_precision, writes in ((True, False), (False, True), (True, True), (True, True)):
            with warnings.catch_warnings(record=True) as caught, torch.no_grad():
                warnings.simplefilter("always")
                with gathered_parameters(session.model, writeback and writes, full_precision):
                    parameter.mul_(0.999) if writes else parameter.sum()
            told.append([warning for warning in caught if "master" in str(warning.message)])
        assert [len(each) for each in told] == [0, 0, 0 if master_weights else 1, 0]
    (warning,) = told[2]
    assert f"into {name!r} was rounded to torch.bfloat16" in str(warning.message)
    assert "unless master_weights=False" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("setup", [Setup(0), Setup(2, offload=True), Setup(3)], ids=describe)
def test_what_is_returned_is_a_copy(setup: Setup) -> None:
    session = started(setup)
    parameter = next(session.model.parameters())
    driver.backward(session.engine, models.next_token_loss(session.model, batches(1)[0][0][0]))
    before = full_param(parameter), full_grad(parameter)
    for read in (full_param, full_grad):
        value = read(parameter)
        assert value is not None
        value.fill_(7.0)
    assert torch.equal(full_param(parameter), before[0])
    assert torch.equal(full_grad(parameter), before[1])  # type: ignore[arg-type]
    session.optimizer.step()
    full_optimizer_state(parameter)["exp_avg"].fill_(7.0)
    assert not bool((full_optimizer_state(parameter)["exp_avg"] == 7.0).any())


@pytest.mark.parametrize("stage", [1, 3])
def test_edits_are_seen(stage: int) -> None:
    session = started(Setup(stage))
    parameter = next(session.model.parameters())
    with session.engine.gathered([parameter]), torch.no_grad():
        parameter.fill_(3.0)
    assert bool((full_param(parameter) == 3.0).all())


def test_a_checkpoint_has_an_edit_just_before_it() -> None:
    session = started(Setup(1, precision=MixedPrecisionPolicy(torch.bfloat16)))
    name, parameter = next(session.model.named_parameters())
    with torch.no_grad():
        parameter.fill_(3.0)  # its master is another tensor
    assert bool((module_state_dict(session.engine)[name] == 3.0).all())


def test_without_an_engine_parameters_are_what_they_are() -> None:
    parameter = Parameter(torch.ones(2))
    assert full_grad(parameter) is None
    parameter.sum().backward()
    gradient = full_grad(parameter)
    assert gradient is not None
    assert torch.equal(gradient, torch.ones(2))
    assert gradient is not parameter.grad
    assert torch.equal(full_param(parameter), torch.ones(2))
    with pytest.raises(ValueError, match="no engine holds this parameter"):
        full_optimizer_state(parameter)


def test_state_of_a_parameter_that_no_or_several_optimizers_update() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[1].weight.requires_grad_(False)
    optimizers = [torch.optim.SGD([model[0].weight], momentum=0.9), torch.optim.AdamW(model[0].parameters())]
    engine = driver.make_engine(model, Setup(2), Mesh.single(), optimizers=optimizers)
    engine.attach([driver.make_updater(optimizer, engine, "off") for optimizer in optimizers])
    assert full_optimizer_state(model[0].weight, optimizers[0]) == {}
    driver.backward(engine, model(torch.ones(1, 2)).sum())
    for optimizer in optimizers:
        optimizer.step()
    assert set(full_optimizer_state(model[0].weight, optimizers[0])) == {"momentum_buffer"}
    assert set(full_optimizer_state(model[0].weight, optimizers[1])) == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(ValueError, match=r"2 optimizers that are attached update '0\.weight', not one; say which"):
        full_optimizer_state(model[0].weight)
    with pytest.raises(ValueError, match=r"0 optimizers that are attached update '1\.weight'"):
        full_optimizer_state(model[1].weight)
    assert full_grad(model[1].weight) is None


def read_before_the_last_micro_batch(stage: int) -> tuple[Tensor | None, Tensor | None]:
    session = driver.start(make_model("mlp"), models.optimizer_factory("sgd"), Setup(stage), Meshes().of(Setup(stage)))
    step, rank = batches(dist.get_world_size())[0], dist.get_rank()
    parameter = next(session.model.parameters())
    read = []
    for index, micro in enumerate(step, start=1):
        driver.backward(session.engine, models.next_token_loss(session.model, micro[rank]), last=index == MICRO)
        read.append(full_grad(parameter))
    return read[0], read[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_may_be_read_between_micro_batches(pool2: RankPool, stage: int) -> None:
    model = make_model("mlp")
    step = batches(2)[0]
    micro = [[rank_gradients(model, batch, models.next_token_loss, 1) for batch in each] for each in step]
    after_one, after_two = (reduce_then_sum(micro[:n], None, None)[0] for n in (1, 2))
    for first, second in pool2.run(read_before_the_last_micro_batch, stage):
        assert torch.equal(first, after_one)
        assert torch.equal(second, after_two)


def clip_some_in_16_bits() -> list[Tensor | None]:
    """One optimizer's parameters all lie in the first rank's slice of a bucket that another shares."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), *(nn.Linear(2, 40, bias=False) for _ in range(4)))
    optimizers = [torch.optim.SGD(model[0].parameters()), torch.optim.SGD(model[1:].parameters())]
    setup = Setup(2, precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16), bucket_size_mb=25)
    engine = driver.make_engine(model, setup, optimizers=optimizers)
    engine.attach([driver.make_updater(optimizer, engine, "off") for optimizer in optimizers])
    assert len(engine.buckets) == 1
    x = model[0](torch.ones(1, 2, dtype=torch.bfloat16))
    driver.backward(engine, sum(layer(x).sum() for layer in model[1:]))
    engine.clip_grad_value_(optimizers[0], 1e-3)
    return [full_grad(p) for p in model.parameters()]


def test_clipping_by_one_optimizer_of_several_leaves_gradients_readable(pool2: RankPool) -> None:
    for clipped, *others in pool2.run(clip_some_in_16_bits):
        assert clipped is not None
        assert clipped.abs().max() <= 1e-3
        assert all(gradient is not None and gradient.abs().max() > 1e-3 for gradient in others)


def gather_of_two_engines() -> list[int]:
    engines = [driver.make_engine(make_model("mlp"), Setup(3)) for _ in range(4)]
    parameters = [p for engine in reversed(engines) for p in engine.module.parameters()]
    with gathered_parameters(parameters):
        assert all(bool(p.isfinite().all()) for p in parameters)
    return [engines.index(engine) for engine in engines_of(nn.ModuleList(engine.module for engine in engines))]


def test_several_engines_gather_in_one_order(pool2: RankPool) -> None:
    assert pool2.run(gather_of_two_engines) == [[0, 1, 2, 3]] * 2
