"""Buffers that training changes are rank 0's in the next step, as under torch's DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from engine import driver
from engine.driver import Setup, assert_equal
from helpers.ranks import RankPool, ranks
from torch import Tensor, nn
from torch import __future__ as future
from torch.nn.parallel import DistributedDataParallel

from lightning_zero.checkpoint import module_state_dict
from lightning_zero.sharding import Mesh, MixedPrecisionPolicy
from lightning_zero.sharding.buffers import convert_buffers

STEPS = 5
MANY = 16  # tensors, of which some get the address of one that is gone
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_buffers=True)
CHANGING = ("counts", "table", "mean")


class Codebook(nn.Module):
    """Buffers are changed in place, through ``data`` and by assignment; one stays, and statistics gather."""

    counts: Tensor
    table: Tensor
    mean: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        for name, shape in (("counts", (6,)), ("table", (3, 6)), ("mean", (6,)), ("mask", (5, 6))):
            self.register_buffer(name, torch.ones(shape))
        self.seen: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.seen.append({name: getattr(self, name).clone() for name in CHANGING})
        hidden = self.norm(self.layer(x)) * self.counts.clone() + self.mean + self.table.sum(0) * self.mask[0]
        if not torch.is_grad_enabled():
            return hidden
        with torch.no_grad():
            self.counts.lerp_(x.mean(0), 0.1)
            self.table.data.lerp_(x[:3], 0.1)
            self.mean = 0.9 * self.mean + 0.1 * hidden.mean(0)
        return hidden


def compare(setup: Setup) -> None:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 6, generator=generator) for _ in range(STEPS)]
    torch.manual_seed(0)
    model = Codebook()
    reference = DistributedDataParallel(copy.deepcopy(model))
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        reference(batch).square().mean().backward()
        optimizer.step()
    session = driver.start(model, lambda module: torch.optim.SGD(module.parameters(), 0.1), setup)
    for _ in range(setup.check_steps):  # no steps: the checksums begin after them
        with torch.no_grad(), session.engine.forward_context():
            model(batches[0])
    world = session.engine.placement.mesh.world
    shared = sum(getattr(model, name).nbytes for name in CHANGING)
    for number, batch in enumerate(batches):
        session.optimizer.zero_grad()
        if number == setup.check_steps:
            model.mask.data[1] = 2  # for the first time, after the last checksum
        if number == 3:
            with torch.inference_mode():  # as in a validation of Lightning's; such a tensor counts as changed
                model.mask = model.mask.clone()
            shared += model.mask.nbytes
        world.sent.clear()
        with session.engine.forward_context():
            loss = model(batch).square().mean()
        driver.backward(session.engine, loss)
        # Neither a mask that stays nor the statistics of the normalization, which each rank gathers alone.
        assert world.sent["broadcast"] == (0 if rank else shared), number
        session.optimizer.step()
    assert len(model.seen) == len(reference.module.seen) == STEPS
    for ours, theirs in zip(model.seen, reference.module.seen, strict=True):
        assert_equal(ours, theirs)
    got = driver.copy_of_parameters(session.engine)
    trained = {name: parameter.detach() for name, parameter in reference.module.named_parameters()}
    assert_equal({name: got[name] for name in trained}, trained)


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_that_training_changes_are_those_of_rank_0(pool: RankPool, stage: int) -> None:
    # What `data` changes is known after two steps.
    pool.run(compare, Setup(stage, units=("Linear",), check_steps=2))


class Caching(nn.Module):
    """Caches by the length of its input, which differs between ranks."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("bias", None)
        if counts:
            self.register_buffer("table", torch.zeros(2), persistent=False)
            self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        rank, length = dist.get_rank(), len(x)
        self.bias = torch.full((length,), float(rank), device=x.device)
        if hasattr(self, "count"):
            self.table = torch.full((length, 2), float(rank), device=x.device)
            self.count = self.count + 1 + rank
            if rank:
                self.register_buffer("only", torch.full((4,), float(rank), device=x.device))
        return self.layer(x) + self.bias[:, None]


def cache(setup: Setup, counts: bool) -> None:
    rank, model = dist.get_rank(), Caching(counts)
    session = driver.start(model, lambda module: torch.optim.SGD(module.parameters(), 0.1), setup)
    own = {"bias": torch.full((3 + rank,), float(rank))}
    if counts:
        own["table"] = torch.full((3 + rank, 2), float(rank))
        own |= {"only": torch.full((4,), float(rank))} if rank else {}
    for step in range(3):
        session.optimizer.zero_grad()
        with session.engine.forward_context():
            loss = model(torch.ones(3 + rank, 6)).square().mean()
        driver.backward(session.engine, loss)
        session.optimizer.step()
        expected = own | ({"count": torch.tensor(step + 1.0)} if counts else {})
        assert_equal(dict(model.named_buffers()), expected)
        session.engine.sync_buffers()
        saved = module_state_dict(session.engine)
        assert saved.keys() == expected.keys() - {"table"} | {"layer.weight", "layer.bias"}
        assert_equal(dict(model.named_buffers()), expected)
    session.engine.release()


@ranks(2)
@pytest.mark.parametrize("counts", [True, False])
def test_buffers_whose_shapes_differ_are_each_ranks_own(pool: RankPool, counts: bool) -> None:
    """So are those that not all ranks have. The others are shared as ever."""
    pool.run(cache, Setup(2, check_steps=2), counts)


class Statistics(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for number in range(MANY):
            self.register_buffer(f"of{number}", torch.full((6,), number, dtype=dtype))


class Metric(Statistics):
    """Moves its state itself, as metrics of torchmetrics do, and into new tensors, as a move to a device does."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Metric:
        super()._apply(fn, recurse)
        self._buffers = {name: fn(buffer).clone() for name, buffer in self._buffers.items() if buffer is not None}
        return self


def test_converted_buffers_stay_apart() -> None:
    """Also from those that are made when others are gone."""
    statistics, metric = Statistics(torch.float32), Metric(torch.int64)
    convert_buffers(nn.ModuleList([statistics, metric]), driver.make_placement(Setup(precision=BF16), Mesh.single()))
    for module, dtype in ((statistics, torch.bfloat16), (metric, torch.int64)):
        assert [b.tolist() for b in module.buffers()] == [[number] * 6 for number in range(MANY)]
        assert {b.dtype for b in module.buffers()} == {dtype}


@pytest.mark.parametrize("flag", ["overwrite_module_params", "swap_module_params"])
def test_parameters_of_a_metric_stay_the_same_objects(flag: str) -> None:
    """Whatever torch is told to do with parameters of modules that move."""
    metric = Metric(torch.int64)
    metric.network = nn.Linear(3, 3)
    before = [(p, p.data_ptr()) for p in metric.parameters()]
    getattr(future, f"set_{flag}_on_conversion")(True)
    try:
        convert_buffers(metric, driver.make_placement(Setup(), Mesh.single()))
        assert getattr(future, f"get_{flag}_on_conversion")()
    finally:
        getattr(future, f"set_{flag}_on_conversion")(False)
    for now, (parameter, address) in zip(metric.parameters(), before, strict=True):
        assert now is parameter
        assert now.data_ptr() == address
