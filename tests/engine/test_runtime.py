"""What the engine sends, keeps and frees, and how it looks to user code."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine import driver
from engine.cases import every_stage, every_stage_and_rank, make_model, stages_on
from engine.driver import Meshes, Session, Setup, assert_close, assert_equal
from helpers import models, place
from helpers.ranks import RankPool, ranks
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.engine import Engine, engines_of, gathered_parameters
from lightning_zero.sharding import Bucket, BucketState, FreedParameter, Mesh, MixedPrecisionPolicy, bucket_map
from lightning_zero.sharding.held import local_grad
from lightning_zero.storage import HostStore
from lightning_zero.update import make_updater
from lightning_zero.update.view import UpdateView

STAGES = (0, 1, 2, 3)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def started(
    setup: Setup,
    model: str = "transformer",
    optimizer: str = "momentum",
    mesh: Mesh | None = None,
    **options: Any,
) -> Session:
    """A session over all ranks of the job; only rank 0 has the weights that count."""
    module = make_model(model, seed=dist.get_rank(), **options)
    return driver.start(module, models.optimizer_factory(optimizer), setup, mesh or Meshes().of(setup))


def alone(setup: Setup, model: str = "transformer", optimizer: str = "momentum", **options: Any) -> Session:
    """A session in this process, without a process group."""
    module = make_model(model, **options)
    return driver.start(module, models.optimizer_factory(optimizer), setup, Mesh.single())


def batch(step: int = 0, rank: int = 0) -> Tensor:
    return models.make_batches(step + 1, 1, rank + 1)[step][0][rank]


def forward_backward(session: Session, step: int = 0, *, last: bool = True) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    loss = models.next_token_loss(session.model, batch(step, rank))
    driver.backward(session.engine, loss, last=last)


def flat_bytes(bucket: Bucket) -> int:
    return bucket.layout.padded_numel * bucket.dtype.itemsize


def is_freed(bucket: Bucket) -> bool:
    return bucket.flat.untyped_storage().size() == 0


# -------------------------------------------------------------------------------------------------- gradient memory


@pytest.mark.parametrize(("stage", "precision"), [(1, BF16), (2, driver.UNCHANGED)])
def test_full_gradients_are_freed_once_reduced(stage: int, precision: MixedPrecisionPolicy) -> None:
    session = alone(Setup(stage, precision=precision))
    with torch.autocast(place.device().type, dtype=torch.bfloat16, enabled=precision is BF16):
        forward_backward(session, last=False)
        kept = [p for p in session.model.parameters() if local_grad(p) is not None]
        forward_backward(session)
    # Stages 0 and 1 wait for the last micro-batch, with sums of 16-bit gradients in fp32.
    assert {p.dtype for p in kept} == ({torch.float32} if stage < 2 else set())
    assert all(local_grad(p) is None for p in session.model.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_reduction_overlaps_with_backward(stage: int) -> None:
    session = alone(Setup(stage))
    engine = session.engine
    loss = models.next_token_loss(session.model, batch())
    engine.begin_backward()
    loss.backward()
    reduced = [bucket for bucket in engine.buckets if not engine.gradients_of(bucket).sharded.empty]
    assert len(reduced) >= len(engine.buckets) - 1 >= 2
    engine.flush()


# ------------------------------------------------------------------------------------------------- stage 3's memory


def check_freed_between_passes() -> None:
    session = started(Setup(3))
    engine, optimizer = session.engine, session.optimizer
    for step in range(2):
        assert all(map(is_freed, engine.buckets))
        loss = models.next_token_loss(session.model, batch(step, dist.get_rank()))
        units = [b for b in engine.buckets if "(root)" not in b.name]
        assert len(units) == 2
        assert all(map(is_freed, units))
        driver.backward(engine, loss)
        assert all(map(is_freed, engine.buckets))
        optimizer.step()
        engine.settle()
    with torch.no_grad(), engine.forward_context():
        session.model(batch()[:, :-1])
    assert all(map(is_freed, engine.buckets))


def test_parameters_are_freed_outside_forward_and_backward(pool2: RankPool) -> None:
    pool2.run(check_freed_between_passes)


class Deep(nn.Module):
    """Many small blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.embed(x))


def test_few_units_are_unsharded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    session = driver.start(Deep(), lambda m: torch.optim.SGD(m.parameters()), Setup(3), Mesh.single())
    live: list[int] = []
    unshard = Bucket.unshard

    def observed(bucket: Bucket) -> None:
        unshard(bucket)
        live.append(sum(b.flat.untyped_storage().size() for b in session.engine.buckets))

    monkeypatch.setattr(Bucket, "unshard", observed)
    root, *units = session.engine.buckets
    driver.backward(session.engine, session.model(torch.ones(2, 3)).sum())
    assert len(units) == 8
    assert max(live) <= flat_bytes(root) + 2 * flat_bytes(units[0])


def test_a_unit_whose_forward_raises_is_freed() -> None:
    session = alone(Setup(3))
    for with_gradient in (False, True):
        with torch.set_grad_enabled(with_gradient), pytest.raises(RuntimeError, match="shape"):
            session.model.blocks[1](torch.ones(2, 3, 5))
        if with_gradient:  # at the latest when a backward would have ended
            session.engine.flush()
        assert all(is_freed(b) for b in session.engine.buckets)


def test_a_unit_whose_forward_was_interrupted_computes_no_more() -> None:
    """For such an error torch calls no hook of the module."""
    session = alone(Setup(3))
    engine, block = session.engine, session.model.blocks[0]
    with driver.interrupting(block.down, "forward", 1), engine.forward_context():
        session.model(batch()[:, :-1])
    with engine.forward_context():
        loss = models.next_token_loss(session.model, batch())
    assert [is_freed(b) for b in engine.buckets if "(root)" not in b.name] == [True, True]
    driver.backward(engine, loss)
    x = torch.ones(1, 2, models.WIDTH)
    assert torch.equal(block.up(x), place.placed(make_model("transformer")).blocks[0].up(x))


def test_what_is_freed_counts_as_freed_at_once() -> None:
    """Ctrl-C comes when the memory of a unit has just been freed."""
    session = alone(Setup(3))
    block, x = session.model.blocks[0], torch.ones(1, 2, models.WIDTH)
    resize = torch.UntypedStorage.resize_

    def interrupted(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        if not size:
            raise KeyboardInterrupt

    with torch.no_grad():
        with mock.patch.object(torch.UntypedStorage, "resize_", interrupted), pytest.raises(KeyboardInterrupt):
            block(x)
        assert {bucket.state for bucket in session.engine.buckets} == {BucketState.SHARDED}
        assert torch.equal(block(x), place.placed(make_model("transformer")).blocks[0](x))


class DetachedUse(nn.Module):
    """A block that reads its weight once without a gradient, before the use that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(nn.functional.linear(x, self.linear.weight.detach())))


def detached_uses() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), DetachedUse(), DetachedUse())


def train_detached() -> dict[str, Tensor]:
    session = driver.start(detached_uses(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), Setup(3))
    driver.backward(session.engine, session.model(torch.ones(2, 4)).square().sum())
    session.optimizer.step()
    return driver.finish(session).weights


def test_a_unit_stays_unsharded_until_all_its_backward_is_done(pool1: RankPool) -> None:
    model = detached_uses()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    assert_close(pool1.run_within(20, train_detached)[0], model.state_dict(), rtol=1e-6)


# ------------------------------------------------------------------------------------------------- freed parameters


@pytest.fixture
def freed() -> Iterator[Session]:
    session = alone(Setup(3))
    yield session
    session.engine.release()


def test_a_freed_parameter_raises_by_name(freed: Session) -> None:
    for use in (
        torch.sum,
        torch.clone,
        copy.deepcopy,
        lambda p: p + 1,
        lambda p: p.detach(),
        lambda p: p.data,
        lambda p: p[0],
        lambda p: p.tolist(),
        lambda p: p.mul_(2),
        lambda p: torch.cat([torch.ones(3), p]),
        lambda p: torch.empty(3).copy_(p),
        lambda p: p.cpu().numpy(),
        lambda p: nn.functional.linear(torch.ones(13), p),
    ):
        with pytest.raises(RuntimeError, match=r"'blocks\.1\.down\.weight', which is freed.*gathered_parameters"):
            use(freed.model.blocks[1].down.weight)


def test_copies_of_a_freed_module_raise(freed: Session) -> None:
    for use in (copy.deepcopy, nn.Module.state_dict):
        with pytest.raises(RuntimeError, match=r"'tokens\.weight', which is freed"):
            use(freed.model)


def test_metadata_of_a_freed_parameter_is_right(freed: Session) -> None:
    plain = make_model("transformer").blocks[1].down.weight
    parameter = freed.model.blocks[1].down.weight
    assert isinstance(parameter, FreedParameter)
    assert isinstance(parameter, Parameter)
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "grad"):
        assert getattr(parameter, name) == getattr(plain, name)
    assert (parameter.numel(), parameter.size(0), parameter.stride()) == (plain.numel(), 6, plain.stride())
    assert len(parameter) == 6
    assert "blocks.1.down.weight" in repr(parameter)
    assert len({parameter, parameter}) == 1
    assert torch.zeros_like(parameter).shape == plain.shape
    count = sum(p.numel() for p in freed.model.parameters())
    assert count == sum(p.numel() for p in make_model("transformer").parameters())


class Special(Parameter):
    """A user's own class of parameters."""


def test_the_class_of_a_parameter_comes_back() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight = Special(torch.ones(3, 3))
    engine = driver.make_engine(model, Setup(3), Mesh.single())
    weight, bias = model[0].weight, model[0].bias
    assert isinstance(weight, FreedParameter)
    assert isinstance(weight, Special)
    with gathered_parameters(model):
        assert isinstance(weight, Special)
        assert not isinstance(weight, FreedParameter)
        assert (repr(weight), repr(bias)) == (repr(Special(weight.data)), repr(Parameter(bias.data)))
    assert isinstance(weight, FreedParameter)
    engine.release()
    assert (type(weight), type(bias)) == (Special, Parameter)


# ----------------------------------------------------------------------------------------------- gathered parameters


def check_gathered() -> None:
    expected = place.placed(make_model("transformer")).state_dict()
    session = started(Setup(3))
    engine, model = session.engine, session.model
    weight, other = model.blocks[0].up.weight, model.blocks[1].up.weight
    with gathered_parameters(weight):
        assert torch.equal(weight, expected["blocks.0.up.weight"])
        assert isinstance(other, FreedParameter)
        with gathered_parameters([weight, other]):
            assert torch.equal(other, expected["blocks.1.up.weight"])
        assert torch.equal(weight, expected["blocks.0.up.weight"])  # the outer context still holds it
        assert isinstance(other, FreedParameter)
    assert isinstance(weight, FreedParameter)
    with gathered_parameters(model):
        assert_equal(model.state_dict(), expected)
        for _ in range(dist.get_rank() + 1):  # no collectives inside
            model(batch()[:, :-1])
            model.blocks[0](torch.ones(1, 2, models.WIDTH))
    assert all(map(is_freed, engine.buckets))
    with pytest.raises(KeyError, match="inside"), gathered_parameters(model):
        raise KeyError("inside")
    assert all(map(is_freed, engine.buckets))


def test_gathered_parameters_are_unsharded_inside_the_context(pool2: RankPool) -> None:
    pool2.run(check_gathered)


def check_a_gather_that_fails(full_precision: bool) -> None:
    session = started(Setup(3, precision=BF16))
    engine, gather = session.engine, "gather_master" if full_precision else "unshard"
    third = engine.buckets[2]
    with mock.patch.object(third, gather, side_effect=MemoryError("no room")), pytest.raises(MemoryError):
        engine.gathered(session.model.parameters(), full_precision=full_precision).__enter__()
    assert all(map(is_freed, engine.buckets))
    assert all(isinstance(parameter, FreedParameter) for parameter in session.model.parameters())
    with gathered_parameters(session.model):
        assert not any(map(is_freed, engine.buckets))
    assert all(map(is_freed, engine.buckets))


@ranks(2)
@pytest.mark.parametrize("full_precision", [False, True])
def test_where_memory_runs_out_nothing_stays_gathered(pool: RankPool, full_precision: bool) -> None:
    """User code may catch the error and train on."""
    pool.run(check_a_gather_that_fails, full_precision)


def check_edits(setup: Setup) -> None:
    """Edits that the version counter sees, and with `writeback` all of rank 0's, reach the masters."""
    session = started(setup)
    expected = make_model("transformer").state_dict()
    seen, hidden, ranked = "blocks.0.up.weight", "blocks.0.up.bias", "blocks.1.up.bias"
    parameters = dict(session.model.named_parameters())
    with torch.no_grad(), gathered_parameters(session.model):
        parameters[seen].clamp_(-0.1, 0.1)
    expected[seen].clamp_(-0.1, 0.1)
    with gathered_parameters([parameters[hidden], parameters[ranked]], writeback=True):
        parameters[hidden].data.fill_(0.5)
        parameters[ranked].data.fill_(1.0 + dist.get_rank())
    expected[hidden].fill_(0.5)
    expected[ranked].fill_(1.0)
    assert_equal(driver.copy_of_parameters(session.engine), expected)
    session.optimizer.zero_grad()
    assert_equal(driver.finish(session).weights, expected)


@every_stage_and_rank
def test_edits_of_gathered_parameters_are_kept(pool: RankPool, stage: int) -> None:
    for offload in (False, True):
        pool.run(check_edits, Setup(stage, offload=offload))


def check_nested(setup: Setup, outer: bool, inner: bool) -> None:
    session = started(setup)
    expected = make_model("transformer").state_dict()
    before, ranked, after = "blocks.0.up.bias", "blocks.0.up.weight", "blocks.0.down.bias"
    parameters = dict(session.model.named_parameters())
    with torch.no_grad(), session.engine.gathered(parameters.values(), full_precision=outer):
        parameters[before].fill_(0.5)
        session.model(batch()[:, :-1])
        with session.engine.gathered([parameters[ranked]], writeback=True, full_precision=inner):
            parameters[ranked].data.fill_(1.0 + dist.get_rank())
        assert parameters[ranked].eq(1).all()
        assert parameters[before].eq(0.5).all()
        parameters[after].fill_(0.25)
    for name, value in ((before, 0.5), (ranked, 1.0), (after, 0.25)):
        expected[name].fill_(value)
    assert_equal(driver.finish(session).weights, expected)


@pytest.mark.parametrize("setup", [Setup(3), Setup(3, precision=BF16), Setup(1, offload=True, precision=BF16)])
@pytest.mark.parametrize(("outer", "inner"), [(True, True), (True, False), (False, True)])
def test_a_context_takes_edits_over_inside_another(pool2: RankPool, setup: Setup, outer: bool, inner: bool) -> None:
    """`outer` and `inner`: whether they show masters, as around hooks of callbacks."""
    pool2.run(check_nested, setup, outer, inner)


def read_in(model: nn.Module, part: nn.Module, reader: str, full_precision: bool) -> None:
    """Gather all parameters inside the forward or backward of a block."""

    def read(*_: Any) -> None:
        with gathered_parameters(model, full_precision=full_precision):
            assert all(bool(p.isfinite().all()) for p in model.parameters())

    if reader == "gradient":
        part.weight.register_post_accumulate_grad_hook(read)
    else:
        getattr(part, f"register_{reader}_hook")(read)


def check_reader(precision: MixedPrecisionPolicy) -> None:
    trained = []
    for reader in (None, "forward_pre", "forward", "full_backward", "gradient"):
        session = started(Setup(3, precision=precision))
        if reader is not None:
            read_in(session.model, session.model.blocks[0].up, reader, full_precision=precision is BF16)
        for step in range(2):
            driver.run_step(session, [batch(step, dist.get_rank())])
            assert all(map(is_freed, session.engine.buckets))
        trained.append(driver.finish(session).weights)
    for weights in trained[1:]:
        assert_equal(weights, trained[0])


@ranks(2)
@pytest.mark.parametrize("precision", [driver.UNCHANGED, BF16])
def test_a_unit_that_computes_is_not_freed_by_a_context(pool: RankPool, precision: MixedPrecisionPolicy) -> None:
    pool.run(check_reader, precision)


def check_backward_after_a_context(full_precision: bool) -> None:
    """Of a graph that a context has made before a forward, and of one that has run backward once; not of others."""
    session = started(Setup(3, precision=BF16))
    engine, tokens = session.engine, batch()

    def penalty() -> Tensor:
        with engine.gathered(session.model.blocks.parameters(), full_precision=full_precision):
            return sum(p.square().sum() for p in session.model.blocks.parameters())  # type: ignore[return-value]

    before = penalty()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()
    losses = []
    for _ in range(2):
        with engine.forward_context():
            losses.append(models.next_token_loss(session.model, tokens))
    after = penalty()
    for loss in (losses[0] + after, losses[1]):
        engine.begin_backward()
        loss.backward(retain_graph=True)
        engine.flush()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after.backward()
    session.optimizer.step()
    with mock.patch.object(Bucket, "load", side_effect=AssertionError("reading is no edit")):
        penalty()


@ranks(2)
@pytest.mark.parametrize("full_precision", [False, True])
def test_backward_that_would_read_freed_parameters_is_an_error(pool: RankPool, full_precision: bool) -> None:
    pool.run(check_backward_after_a_context, full_precision)


def check_hidden_edits_are_lost(setup: Setup) -> None:
    session = started(setup)
    with gathered_parameters(session.model):
        session.model.norm.weight.data.fill_(7.0)
    assert_equal(driver.finish(session).weights, make_model("transformer").state_dict())


@pytest.mark.parametrize("setup", [Setup(1, offload=True), Setup(2, offload=True), Setup(3)])
def test_edits_through_data_need_writeback(pool2: RankPool, setup: Setup) -> None:
    pool2.run(check_hidden_edits_are_lost, setup)


def check_hidden_edits_are_found(setup: Setup) -> None:
    session = started(setup)
    expected = make_model("transformer").state_dict()
    session.model.norm.weight.data.fill_(7.0)
    expected["norm.weight"].fill_(7.0)
    assert_equal(driver.finish(session).weights, expected)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_edits_through_data_are_found_on_demand(pool2: RankPool, stage: int) -> None:
    pool2.run(check_hidden_edits_are_found, Setup(stage, offload=stage > 0, detect_data_edits=True))


def check_edits_derive_only_their_masters() -> None:
    """An edited 16-bit parameter gives its master a new value; others keep what 16 bits cannot hold."""
    session = started(Setup(dist.get_world_size() + 1, precision=BF16))
    expected = make_model("transformer").state_dict()
    with torch.no_grad(), gathered_parameters(session.model):
        session.model.blocks[0].up.weight.fill_(0.3)
    expected["blocks.0.up.weight"].fill_(torch.tensor(0.3, dtype=torch.bfloat16).item())
    assert_equal(driver.finish(session).weights, expected)


@ranks(1, 2)
def test_masters_of_unedited_parameters_are_not_rebuilt(pool: RankPool) -> None:
    pool.run(check_edits_derive_only_their_masters)


def check_edit_after_step(stage: int) -> dict[str, Tensor]:
    """Weight clamping as of a Wasserstein GAN's critic."""
    session = started(Setup(stage), optimizer="sgd")
    for step in range(2):
        driver.run_step(session, [batch(step)])
        session.engine.settle()
        with torch.no_grad(), gathered_parameters(session.model):
            for parameter in session.model.parameters():
                parameter.clamp_(-0.2, 0.2)
    return driver.finish(session).weights


@every_stage_and_rank
def test_weights_may_be_clamped_after_each_step(pool: RankPool, stage: int) -> None:
    model = make_model("transformer")
    optimizer = models.make_optimizer("sgd", model)
    for step in range(2):
        optimizer.zero_grad()
        models.next_token_loss(model, batch(step)).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
    for weights in pool.run(check_edit_after_step, stage):
        assert_close(weights, model.state_dict(), rtol=1e-5, atol=1e-6)


def test_modules_without_an_engine_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    with gathered_parameters(model):
        assert engines_of(model) == []
    assert engines_of(alone(Setup(2)).model) != []


# --------------------------------------------------------------------------------------------------- construction


def check_broadcast(stage: int) -> None:
    """Parameters and buffers are rank 0's everywhere, whatever the other ranks had; later, buffers are again."""
    rank = dist.get_rank()
    model = nn.Sequential(make_model("transformer", seed=rank), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(rank + 1.0)
    model[1].num_batches_tracked.fill_(rank + 5)
    for name in ("strided", "strided_too"):  # another tensor on the way, which both get
        model[1].register_buffer(name, model[1].running_mean.expand(2, 3))
    model[1].strided_too = model[1].strided
    engine = driver.make_engine(model, Setup(stage))
    expected = make_model("transformer", seed=0).state_dict()
    got = driver.copy_of_parameters(engine)
    assert_equal({name: got[f"0.{name}"] for name in expected}, expected)
    assert got["1.running_mean"].tolist() == [1.0] * 3
    assert got["1.num_batches_tracked"].item() == 5
    assert model[1].strided_too is model[1].strided
    transposed = torch.arange(6.0).view(2, 3).T
    model[1].register_buffer("table", (transposed + rank).T.contiguous().T)
    engine.sync_buffers()
    assert torch.equal(model[1].table, transposed)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_and_buffers_are_those_of_rank_0(pool: RankPool, stage: int) -> None:
    pool.run(check_broadcast, stage)


def test_tied_parameters_stay_tied() -> None:
    model = alone(Setup(3)).model
    assert model.head.weight is model.tokens.weight


def test_a_bucket_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bucket_size_mb=0\.0 must be greater than 0"):
        driver.make_engine(make_model("mlp"), Setup(2, bucket_size_mb=0.0), Mesh.single())


@pytest.mark.parametrize("stage", [4, -1, True, "2", 2.5])
def test_an_unknown_stage_is_refused(stage: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a ZeRO stage; expected one of 0, 1, 2, 3"):
        driver.make_engine(make_model("mlp"), Setup(stage), Mesh.single())


def create_mesh(shard_size: int) -> None:
    Mesh.create(shard_size)


def test_a_shard_size_must_divide_the_world(pool2: RankPool) -> None:
    with pytest.raises(Exception, match=r"shard_size=3 does not divide the world size 2; choose one of \[1, 2\]"):
        pool2.run(create_mesh, 3)


def test_an_optimizer_with_a_foreign_parameter_is_refused() -> None:
    engine = driver.make_engine(make_model("mlp"), Setup(2), Mesh.single())
    optimizer = torch.optim.SGD([*engine.module.parameters(), Parameter(torch.ones(7, 2))], lr=0.1)
    updater = make_updater(optimizer, engine)
    with pytest.raises(ValueError, match=r"SGD holds a parameter of shape \(7, 2\) that is not registered"):
        engine.attach([updater])


def test_a_refused_optimizer_changes_nothing_for_those_before() -> None:
    session = alone(Setup(2))
    driver.run_step(session, [batch()])
    foreign = torch.optim.SGD([*session.engine.module.parameters(), Parameter(torch.ones(7, 2))], lr=0.1)
    with pytest.raises(ValueError, match="not registered"):
        session.engine.attach([make_updater(foreign, session.engine)])
    assert session.engine.updaters == [session.updater]
    before = [p.clone() for p in session.engine.module.parameters()]
    driver.run_step(session, [batch()])
    assert not any(torch.equal(p, b) for p, b in zip(session.engine.module.parameters(), before, strict=True))


def test_a_group_with_a_foreign_parameter_is_refused() -> None:
    session = alone(Setup(2))
    session.optimizer.add_param_group({"params": [Parameter(torch.ones(7, 2))]})
    with pytest.raises(ValueError, match=r"parameter of shape \(7, 2\)"):
        driver.run_step(session, [batch()])


# ------------------------------------------------------------------------------------- the loops of PyTorch users
#
# Each script runs as it stands on plain torch, whose loss is the mean of the ranks' losses, and on an engine.


@dataclasses.dataclass
class Loop:
    """A model, its optimizers and what differs between plain torch and an engine."""

    model: Any
    optimizers: list[Optimizer]
    world: int
    rank: int | None = None  # None: all ranks' batches
    engine: Engine | None = None

    def loss(self, step: int, model: nn.Module | None = None) -> Tensor:
        chosen = range(self.world) if self.rank is None else [self.rank]
        losses = [models.next_token_loss(model or self.model, batch(step, rank)) for rank in chosen]
        return sum(losses, torch.zeros((), dtype=torch.float64)) / len(losses)

    def backward(self, loss: Tensor, **options: Any) -> None:
        if self.engine is not None:
            self.engine.begin_backward()
        loss.backward(**options)
        if self.engine is not None:
            self.engine.flush()

    def clip_norm(self, max_norm: float) -> float:
        if self.engine is None:
            return float(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))
        return self.engine.clip_grad_norm_(self.optimizers[0], max_norm)

    def clip_value(self, value: float) -> None:
        if self.engine is None:
            nn.utils.clip_grad_value_(self.model.parameters(), value)
        else:
            self.engine.clip_grad_value_(self.optimizers[0], value)


def zero_by_optimizer(loop: Loop) -> None:
    (optimizer,) = loop.optimizers
    for step in range(3):
        loop.backward(loop.loss(step))
        optimizer.step()
        optimizer.zero_grad()


def zero_by_module(loop: Loop) -> None:
    for step in range(3):
        loop.model.zero_grad()
        loop.backward(loop.loss(step))
        loop.optimizers[0].step()


def zero_a_submodule(loop: Loop) -> None:
    """What is cleared between backward and step is not updated."""
    for step in range(3):
        loop.optimizers[0].zero_grad()
        loop.backward(loop.loss(step))
        loop.model.blocks[step % 2].zero_grad()
        loop.model.norm.zero_grad()
        loop.optimizers[0].step()


def zero_a_submodule_between_micro_batches(loop: Loop) -> None:
    for step in range(3):
        loop.optimizers[0].zero_grad()
        with loop.engine.no_sync() if loop.engine is not None else contextlib.nullcontext():
            loop.backward(loop.loss(step))
        loop.model.norm.zero_grad()
        loop.backward(loop.loss(step + 1))
        loop.optimizers[0].step()


def zero_to_zeros(loop: Loop) -> None:
    """Zero gradients are applied: momentum and decay go on."""
    for step in range(3):
        loop.backward(loop.loss(step))
        loop.optimizers[0].step()
        loop.optimizers[0].zero_grad(set_to_none=False)
        loop.optimizers[0].step()
        loop.model.zero_grad(set_to_none=False)
        loop.optimizers[0].step()


def never_cleared(loop: Loop) -> None:
    for step in range(3):
        loop.backward(loop.loss(step))
        loop.optimizers[0].step()


def accumulate_on_clipped(loop: Loop) -> None:
    for step in range(3):
        loop.backward(loop.loss(step))
        loop.clip_norm(0.2)
        loop.optimizers[0].step()


def accumulate_on_clipped_values(loop: Loop) -> None:
    for step in range(3):
        loop.backward(loop.loss(step))
        loop.clip_value(0.01)
        loop.optimizers[0].step()


def clip_at_times(loop: Loop) -> None:
    """A factor belongs to one step's gradients."""
    for step in range(4):
        loop.optimizers[0].zero_grad()
        loop.backward(loop.loss(step))
        if step % 2 == 0:
            loop.clip_norm(0.2)
        loop.optimizers[0].step()


def clip_twice(loop: Loop) -> None:
    for step in range(2):
        loop.optimizers[0].zero_grad()
        loop.backward(loop.loss(step))
        loop.clip_norm(0.2)
        loop.clip_norm(0.4)
        loop.optimizers[0].step()


def clip_value_then_norm(loop: Loop) -> None:
    for step in range(2):
        loop.optimizers[0].zero_grad()
        loop.backward(loop.loss(step))
        loop.clip_value(0.02)
        loop.clip_norm(0.1)
        loop.optimizers[0].step()


def clip_norm_then_value(loop: Loop) -> None:
    for step in range(2):
        loop.optimizers[0].zero_grad()
        loop.backward(loop.loss(step))
        loop.clip_norm(0.3)
        loop.clip_value(0.01)
        loop.optimizers[0].step()


def two_backwards(loop: Loop) -> None:
    for step in (0, 2):
        loop.optimizers[0].zero_grad()
        loop.backward(loop.loss(step))
        loop.backward(loop.loss(step + 1))
        loop.optimizers[0].step()


def two_losses_first(loop: Loop) -> None:
    """Both forwards before both backwards."""
    for step in (0, 2):
        loop.optimizers[0].zero_grad()
        first, second = loop.loss(step), loop.loss(step + 1)
        loop.backward(first)
        loop.backward(second)
        loop.optimizers[0].step()


def retain_graph(loop: Loop) -> None:
    for step in range(2):
        loop.optimizers[0].zero_grad()
        loss = loop.loss(step)
        loop.backward(loss, retain_graph=True)
        loop.backward(loss)
        loop.optimizers[0].step()


def called_twice(loop: Loop) -> None:
    for step in (0, 2):
        loop.optimizers[0].zero_grad()
        loop.backward(loop.loss(step) + loop.loss(step + 1))
        loop.optimizers[0].step()


def plain_backward(loop: Loop) -> None:
    """Backward without the engine's calls around it: the step reduces."""
    for step in range(3):
        loop.optimizers[0].zero_grad()
        loop.loss(step).backward()
        loop.optimizers[0].step()


def closure(loop: Loop) -> None:
    for step in range(3):

        def compute(step: int = step) -> Tensor:
            loop.optimizers[0].zero_grad()
            loss = loop.loss(step)
            loop.backward(loss)
            return loss

        assert loop.optimizers[0].step(compute) is not None


def scheduled(loop: Loop) -> None:
    """The rate of a step is the one that held when it was called."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizers[0], 0.5)
    for step in range(4):
        loop.optimizers[0].zero_grad()
        loop.backward(loop.loss(step))
        loop.optimizers[0].step()
        scheduler.step()


def frozen_later(loop: Loop) -> None:
    """`requires_grad` may change between steps."""
    for step in range(4):
        loop.model.blocks[1].requires_grad_(step % 2 == 0)
        loop.optimizers[0].zero_grad()
        loop.backward(loop.loss(step))
        loop.optimizers[0].step()


def step_without_gradients(loop: Loop) -> None:
    loop.optimizers[0].step()
    loop.backward(loop.loss(0))
    loop.optimizers[0].zero_grad()
    loop.optimizers[0].step()
    loop.backward(loop.loss(1))
    loop.optimizers[0].step()


SCRIPTS: list[Callable[[Loop], None]] = [
    zero_by_optimizer,
    zero_by_module,
    zero_a_submodule,
    zero_a_submodule_between_micro_batches,
    zero_to_zeros,
    never_cleared,
    accumulate_on_clipped,
    accumulate_on_clipped_values,
    clip_at_times,
    clip_twice,
    clip_value_then_norm,
    clip_norm_then_value,
    two_backwards,
    two_losses_first,
    retain_graph,
    called_twice,
    plain_backward,
    closure,
    scheduled,
    frozen_later,
    step_without_gradients,
]


def run_scripts(setup: Setup) -> dict[str, dict[str, Tensor]]:
    results, meshes = {}, Meshes()
    for script in SCRIPTS:
        session = started(setup, dtype=torch.float64, mesh=meshes.of(setup))
        loop = Loop(session.model, [session.optimizer], dist.get_world_size(), dist.get_rank(), session.engine)
        script(loop)
        session.model.requires_grad_(True)
        results[script.__name__] = driver.finish(session).weights
    return results


def plain_script(script: Callable[[Loop], None], world: int) -> dict[str, Tensor]:
    model = make_model("transformer", dtype=torch.float64)
    script(Loop(model, [models.make_optimizer("momentum", model)], world))
    return model.state_dict()


@stages_on((1, 2), (3, 2), slow=[(2, 2), (3, 1)])
def test_a_loop_does_what_it_does_in_torch(pool: RankPool, stage: int) -> None:
    ours, wrong = pool.run_within(60, run_scripts, Setup(stage, offload=stage > 1)), []
    for script in SCRIPTS:
        expected = plain_script(script, pool.world_size)
        assert not torch.equal(expected["tokens.weight"], make_model("transformer").tokens.weight.double())
        try:
            for weights in ours:
                assert_close(weights[script.__name__], expected)
        except AssertionError as error:
            wrong.append(f"{script.__name__}: {str(error)[:500]}")
    assert not wrong, "\n".join(wrong)


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.critic = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def adversaries() -> Adversaries:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Adversaries().double()


def adversarial(loop: Loop, *, toggle: bool) -> None:
    """Generator and critic in turns; the generator's backward leaves gradients in the critic."""
    generator, critic = loop.model.generator, loop.model.critic
    for step in range(4):
        for optimizer, network, sign in zip(loop.optimizers, (generator, critic), (1.0, -1.0), strict=True):
            if toggle:
                loop.model.requires_grad_(False)
                network.requires_grad_(True)
            optimizer.zero_grad()
            loop.backward(sign * critic(generator(noise(loop, step))).square().mean())
            optimizer.step()
    loop.model.requires_grad_(True)


def noise(loop: Loop, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(loop.world, 3, 4, generator=generator, dtype=torch.float64)
    return values.flatten(0, 1) if loop.rank is None else values[loop.rank]


def two_optimizers(model: Any) -> list[Optimizer]:
    first = torch.optim.Adam(model.generator.parameters(), lr=0.01)
    return [first, torch.optim.SGD(model.critic.parameters(), lr=0.1, momentum=0.5)]


def train_adversaries(setup: Setup, toggle: bool) -> dict[str, Tensor]:
    model = adversaries()
    optimizers = two_optimizers(model)
    engine = driver.make_engine(model, setup, optimizers=optimizers)
    engine.attach([make_updater(optimizer, engine, "off") for optimizer in optimizers])
    adversarial(Loop(model, optimizers, dist.get_world_size(), dist.get_rank(), engine), toggle=toggle)
    engine.release()
    return model.state_dict()


@every_stage
def test_optimizers_take_turns_as_in_torch(pool: RankPool, stage: int) -> None:
    for toggle in (True, False):
        model = adversaries()
        adversarial(Loop(model, two_optimizers(model), pool.world_size), toggle=toggle)
        setup = Setup(stage, units=("generator", "critic"), bucket_size_mb=1e-6)
        for weights in pool.run_within(20, train_adversaries, setup, toggle):
            assert_close(weights, model.state_dict())


def growing(loop: Loop, *, clear: bool) -> None:
    """A part of the model joins the optimizer later; it has had gradients before."""
    (optimizer,) = loop.optimizers
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(loop.model.critic.parameters()), "lr": 0.02})
        (loop.model if clear else optimizer).zero_grad()
        loop.backward(loop.model.critic(loop.model.generator(noise(loop, step))).square().mean())
        optimizer.step()


def train_growing(setup: Setup, clear: bool) -> dict[str, Tensor]:
    model = adversaries()
    optimizer = torch.optim.Adam(model.generator.parameters(), lr=0.01)
    engine = driver.make_engine(model, setup, optimizers=[optimizer])
    engine.attach([make_updater(optimizer, engine, "off")])
    growing(Loop(model, [optimizer], dist.get_world_size(), dist.get_rank(), engine), clear=clear)
    engine.release()
    return model.state_dict()


@every_stage
def test_a_part_may_join_the_optimizer_later(pool: RankPool, stage: int) -> None:
    for clear in (True, False):
        model = adversaries()
        growing(Loop(model, [torch.optim.Adam(model.generator.parameters(), lr=0.01)], pool.world_size), clear=clear)
        setup = Setup(stage, offload=stage > 1, units=("generator", "critic"), bucket_size_mb=1e-6)
        for weights in pool.run_within(20, train_growing, setup, clear):
            assert_close(weights, model.state_dict())


def penalized(loop: Loop) -> None:
    """A penalty on the critic's gradient with respect to its input: a backward through a backward."""
    (optimizer,) = loop.optimizers
    for step in range(3):
        optimizer.zero_grad()
        x = noise(loop, step).requires_grad_()
        scores = loop.model.critic(loop.model.generator(x))
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        loop.backward(scores.mean() + slope.square().sum(1).mean())
        optimizer.step()


def train_penalized(setup: Setup) -> dict[str, Tensor]:
    session = driver.start(adversaries(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), setup)
    penalized(Loop(session.model, [session.optimizer], dist.get_world_size(), dist.get_rank(), session.engine))
    return driver.finish(session).weights


@every_stage_and_rank
def test_gradients_of_gradients_are_as_in_torch(pool: RankPool, stage: int) -> None:
    model = adversaries()
    penalized(Loop(model, [torch.optim.SGD(model.parameters(), lr=0.1)], pool.world_size))
    setup = Setup(stage, units=("generator", "critic"), bucket_size_mb=1e-6)
    for weights in pool.run_within(20, train_penalized, setup):
        assert_close(weights, model.state_dict())


# -------------------------------------------------------------------------------------------------------- the step


def test_hooks_of_the_optimizer_fire_once() -> None:
    session = alone(Setup(2))
    fired: list[str] = []
    session.optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    session.optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    forward_backward(session)
    session.optimizer.step()
    assert fired == ["before", "after"]


def test_schedulers_see_that_the_optimizer_stepped() -> None:
    session = alone(Setup(2))  # warnings are errors here
    scheduler = torch.optim.lr_scheduler.ExponentialLR(session.optimizer, 0.5)
    forward_backward(session)
    session.optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in session.optimizer.param_groups] == [0.05, 0.05]


def test_the_users_optimizer_stays_what_it_is() -> None:
    session = alone(Setup(3), optimizer="adamw")
    groups = session.optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    forward_backward(session)
    session.optimizer.step()
    assert session.optimizer.param_groups is groups
    assert {id(p) for p in parameters} == {id(p) for p in session.model.parameters()}
    assert type(session.optimizer) is torch.optim.AdamW
    assert not session.optimizer.state  # it is in the shards


def test_hyperparameters_are_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that begins after the scheduler's step must not see the new rate."""
    session = alone(Setup(2), optimizer="sgd")
    seen: list[float] = []
    update = type(session.updater).update

    def delayed(self: Any, view: UpdateView) -> None:
        for group in session.optimizer.param_groups:
            group["lr"] = 99.0
        seen.extend(group["lr"] for group in view.groups.values())
        update(self, view)

    monkeypatch.setattr(type(session.updater), "update", delayed)
    forward_backward(session)
    session.optimizer.step()
    assert set(seen) == {0.1}


def check_skip(setup: Setup, bad: float) -> None:
    """One rank's gradient is not finite: nobody updates, and the next step is as if nothing had been."""
    session = started(setup, optimizer="adamw")
    driver.run_step(session, [batch(0, dist.get_rank())])
    session.engine.settle()
    weights, pieces = driver.copy_of_parameters(session.engine), driver.state_pieces(session.engine, session.updater)
    factor = bad if dist.get_rank() == 1 else 1.0
    driver.run_step(session, [batch(1, dist.get_rank())], lambda m, b: models.next_token_loss(m, b) * factor)
    session.engine.settle()
    assert session.engine.skipped_steps == 1
    assert_equal(driver.copy_of_parameters(session.engine), weights)
    after = driver.state_pieces(session.engine, session.updater)
    assert [p.scalars for p in after] == [p.scalars for p in pieces]
    for new, old in zip(after, pieces, strict=True):
        assert_equal(new.elements, old.elements)
    driver.backward(session.engine, models.next_token_loss(session.model, batch(2, dist.get_rank())))
    session.optimizer.step()  # no zero_grad: the skip has cleared what was not finite
    assert session.engine.skipped_steps == 1
    assert all(values.isfinite().all() for values in driver.finish(session).weights.values())


@every_stage
@pytest.mark.filterwarnings("ignore:skipped a step")
@pytest.mark.parametrize("bad", [math.inf, pytest.param(math.nan, marks=pytest.mark.slow)])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(pool: RankPool, stage: int, bad: float) -> None:
    pool.run(check_skip, Setup(stage, offload=stage > 1, native="auto"), bad)


@pytest.mark.filterwarnings("ignore:skipped a step")
def test_only_the_optimizer_with_a_bad_gradient_is_skipped() -> None:
    model = adversaries()
    optimizers = two_optimizers(model)
    engine = driver.make_engine(model, Setup(2), Mesh.single(), optimizers=optimizers)
    engine.attach([make_updater(optimizer, engine, "off") for optimizer in optimizers])
    before = driver.copy_of_parameters(engine)
    x = torch.ones(2, 4, dtype=torch.float64)
    driver.backward(engine, model.generator(x).sum() + model.critic(x).sum() * math.nan)
    for optimizer in optimizers:
        optimizer.step()
    after = driver.copy_of_parameters(engine)
    assert {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])} == {"generator"}
    assert engine.skipped_steps == 1


@pytest.mark.filterwarnings("ignore:skipped a step")
def test_a_skip_leaves_the_gradients_that_another_optimizer_applies() -> None:
    """Those of the parameters that both have; its own are cleared."""
    model = nn.ModuleDict({name: nn.Linear(3, 1, bias=False) for name in ("a", "b", "shared")})
    optimizers = [
        torch.optim.SGD([*model[name].parameters(), *model["shared"].parameters()], lr=0.1) for name in ("a", "b")
    ]
    engine = driver.make_engine(model, Setup(2), Mesh.single(), optimizers=optimizers)
    engine.attach([make_updater(optimizer, engine, "off") for optimizer in optimizers])
    before = driver.copy_of_parameters(engine)
    x = torch.ones(1, 3)
    driver.backward(engine, (model["a"](x) * math.nan + model["b"](x) + model["shared"](x)).sum())
    for optimizer in optimizers:
        optimizer.step()
    after = driver.copy_of_parameters(engine)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"b.weight", "shared.weight"}
    assert engine.skipped_steps == 1
    assert model["a"].weight.grad is None


def norm_of(stage: int) -> float:
    session = started(Setup(stage))
    forward_backward(session)
    stats = session.engine.stats(session.optimizer)
    assert session.engine.stats(session.optimizer) is stats  # no second all-reduce
    return stats.norm


@ranks(1, 2, 4)
def test_the_norm_is_the_same_on_all_ranks_and_at_all_stages(pool: RankPool) -> None:
    model = make_model("transformer")
    losses = [models.next_token_loss(model, batch(0, rank)) for rank in range(pool.world_size)]
    (sum(losses) / pool.world_size).backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf))
    norms = [pool.run(norm_of, stage) for stage in STAGES]
    assert all(len(set(each)) == 1 for each in norms)
    assert [each[0] for each in norms] == pytest.approx([expected] * 4, rel=1e-6)


# --------------------------------------------------------------------------------------------------- calling parts


def check_direct_call(with_gradient: bool) -> None:
    """As `module.net.generate()` in a callback: parts of the model work by themselves."""
    session = started(Setup(3))
    model, plain = session.model, place.placed(make_model("transformer"))
    x = torch.ones(1, 2, models.WIDTH)
    with torch.set_grad_enabled(with_gradient):
        for name in ("blocks.1", "blocks.1.up", "norm", "head"):
            assert torch.equal(model.get_submodule(name)(x), plain.get_submodule(name)(x))
    session.engine.flush()
    assert all(map(is_freed, session.engine.buckets))


@ranks(1, 2)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_parts_of_a_sharded_model_can_be_called(pool: RankPool, with_gradient: bool) -> None:
    pool.run(check_direct_call, with_gradient)


def gradients_of_a_part(model: Any, run: Callable[[Tensor], None]) -> list[Tensor | None]:
    """A part of a block is called and differentiated by itself, and called again for an input of its block."""
    block = model.blocks[1]
    first, second = (torch.full((1, 2, models.WIDTH), x, device=place.device(), requires_grad=True) for x in (1.0, 2.0))
    (slope,) = torch.autograd.grad(block.project(first).sum(), first)
    run(block(block.project(second)).square().sum())
    return [slope, second.grad]


def check_a_part_by_itself() -> None:
    session, plain = started(Setup(3)), place.placed(make_model("transformer"))
    expected = gradients_of_a_part(plain, Tensor.backward)
    found = gradients_of_a_part(session.model, lambda loss: driver.backward(session.engine, loss))
    torch.testing.assert_close(found, expected)
    for (name, mine), theirs in zip(session.model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(session.engine.full_grad(mine), theirs.grad, msg=name)
    assert all(map(is_freed, session.engine.buckets))


def test_a_part_may_be_differentiated_by_itself(pool1: RankPool) -> None:
    pool1.run(check_a_part_by_itself)


def check_values_after_step(stage: int) -> None:
    """What forward reads after a step is new, without a call to settle."""
    session = started(Setup(stage))
    before = session.model(batch()[:, :-1]).detach().clone()
    driver.run_step(session, [batch(0, dist.get_rank())])
    after = session.model(batch()[:, :-1]).detach().clone()
    session.engine.settle()
    assert torch.equal(session.model(batch()[:, :-1]), after)
    assert not torch.equal(before, after)


@every_stage_and_rank
def test_forward_reads_what_the_last_step_wrote(pool: RankPool, stage: int) -> None:
    pool.run(check_values_after_step, stage)


# --------------------------------------------------------------------------------------------------------- release


@pytest.mark.parametrize(("stage", "precision"), [(1, BF16), (3, driver.UNCHANGED), (3, BF16)])
def test_release_leaves_an_ordinary_module(stage: int, precision: MixedPrecisionPolicy) -> None:
    session = alone(Setup(stage, precision=precision))
    model, optimizer = session.model, session.optimizer
    session.engine.release()
    assert_equal(model.state_dict(), make_model("transformer").state_dict())
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == len(list(model.parameters()))
    assert all(type(p) is Parameter for p in model.parameters())
    assert not any("zero_grad" in module.__dict__ or module._forward_pre_hooks for module in model.modules())
    assert "step" not in optimizer.__dict__
    assert engines_of(model) == []
    models.next_token_loss(model, batch()).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(model.norm.bias, torch.zeros_like(model.norm.bias))
    copy.deepcopy(model)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_frozen_fp16_base_keeps_its_digits_in_bf16(stage: int) -> None:
    """Checkpoints and merged adapters have them, and what is trained later continues from them."""
    model = make_model("mlp").half()
    frozen = model.layers[0].weight.requires_grad_(False)
    expected = frozen.detach().float()
    assert not torch.equal(expected.bfloat16().float(), expected)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = driver.make_engine(model, Setup(stage, precision=BF16), Mesh.single(), optimizers=[optimizer])
    engine.release()
    assert torch.equal(frozen.cpu(), expected)


def test_an_engine_can_follow_another() -> None:
    session = alone(Setup(3))
    driver.run_step(session, [batch()])
    session.engine.release()
    expected = {name: value.clone() for name, value in session.model.state_dict().items()}
    second = driver.make_engine(session.model, Setup(2), Mesh.single())
    assert_equal(driver.copy_of_parameters(second), expected)


@pytest.mark.parametrize(("owner", "name"), [(bucket_map, "make_bucket"), (Bucket, "reshard")])
@pytest.mark.parametrize("stage", [2, 3])
def test_where_the_set_up_is_interrupted_one_rank_gives_all_values_back(stage: int, owner: Any, name: str) -> None:
    model = make_model("transformer")
    with driver.interrupting(owner, name, 2):
        driver.make_engine(model, Setup(stage, precision=BF16), Mesh.single())
    assert_equal(model.state_dict(), make_model("transformer").state_dict())
    assert all(type(p) is Parameter for p in model.parameters())
    engine = driver.make_engine(model, Setup(stage, precision=BF16), Mesh.single())
    assert_equal(engine_values(engine), make_model("transformer").state_dict())


def engine_values(engine: Engine) -> dict[str, Tensor]:
    """The masters by name."""
    with engine.gathered(engine.module.parameters(), full_precision=True):
        return {name: value.clone() for name, value in engine.module.state_dict().items()}


def check_interrupted_set_ups() -> None:
    expected, mesh = make_model("transformer").state_dict(), Meshes().of(Setup())
    for setup, message in (
        (Setup(2), ""),
        (Setup(2, precision=BF16), r"'tokens.weight' was cast to torch.bfloat16.*in a set-up that did not end"),
        (Setup(3), r"'tokens.weight' is freed.*ended the set-up.*Make the module again"),
    ):
        model = make_model("transformer")
        with driver.interrupting(bucket_map, "make_bucket", 2):
            driver.make_engine(model, setup, mesh)
        if message:
            with pytest.raises(ValueError, match=message):
                driver.make_engine(model, setup, mesh)
        else:
            assert_equal(model.state_dict(), expected)
            assert_equal(driver.copy_of_parameters(driver.make_engine(model, setup, mesh)), expected)


@ranks(2)
def test_where_the_set_up_is_interrupted_nothing_is_lost_in_silence(pool: RankPool) -> None:
    """Where several ranks had the masters or the parameters in shards, the next engine says so."""
    pool.run(check_interrupted_set_ups)


def test_an_optimizer_that_outlives_its_engine_says_so() -> None:
    session = alone(Setup(2))
    optimizer = session.optimizer
    del session
    gc.collect()
    with pytest.raises(RuntimeError, match="attached to an engine that no longer exists"):
        optimizer.step()


# ----------------------------------------------------------------------------------------------------- host memory


@pytest.mark.parametrize(
    ("numel", "dtype"), [(1, torch.float32), (1000, torch.float64), ((1 << 20) + 1, torch.bfloat16)]
)
def test_host_tensors_take_what_was_asked_for(numel: int, dtype: torch.dtype) -> None:
    tensor = HostStore().zeros(numel, dtype)
    assert (tensor.shape, tensor.dtype) == ((numel,), dtype)
    assert tensor.untyped_storage().nbytes() == numel * dtype.itemsize
    assert not tensor.any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_host_memory_returns_when_its_tensor_dies() -> None:
    size = 64 << 20
    before = resident_bytes()
    tensor = HostStore().zeros(size // 4, torch.float32)
    assert resident_bytes() - before < size // 8  # untouched pages take nothing
    tensor.fill_(1.0)
    assert resident_bytes() - before == pytest.approx(size, rel=0.1)
    del tensor
    assert resident_bytes() - before < size // 8


class CountingStore(HostStore):
    """Adds up what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def zeros(self, numel: int, dtype: torch.dtype, *, crosses: bool = True) -> Tensor:
        self.asked += numel * dtype.itemsize
        return super().zeros(numel, dtype, crosses=crosses)


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize(
    ("precision", "per_element"),
    [(driver.UNCHANGED, 4 + 8 + 4), (MixedPrecisionPolicy(torch.bfloat16, keep_norms=False), 4 + 8 + 2)],
    ids=["fp32", "bf16"],
)
def test_host_memory_is_the_master_the_moments_and_the_gradient(
    native: driver.NativeOptimizer, precision: MixedPrecisionPolicy, per_element: int
) -> None:
    store = CountingStore()
    setup = Setup(2, offload=True, precision=precision)
    model = make_model("transformer")
    engine = Engine(model, driver.make_placement(setup, Mesh.single())._replace(optimizer_store=store))
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach([make_updater(optimizer, engine, native)])
    session = Session(model, engine, optimizer, engine.updaters[0])
    forward_backward(session)
    optimizer.step()
    driver.run_step(session, [batch(1)])
    assert store.asked == sum(b.layout.shard_numel for b in engine.buckets) * per_element
