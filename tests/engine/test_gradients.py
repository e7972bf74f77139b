"""How gradients are taken from where autograd has left them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from engine import memory
from engine.driver import Setup, backward, make_engine, make_placement
from helpers.ranks import RankPool, ranks
from torch import Tensor, nn
from torch.nn import functional

from lightning_zero.planning import plan
from lightning_zero.sharding import Mesh, MixedPrecisionPolicy, exchange
from lightning_zero.sharding.gradients import BucketGradients
from lightning_zero.sharding.held import local_grad, set_local_grad
from lightning_zero.sharding.sharded_gradient import ShardedGradient
from lightning_zero.storage import DONE

FORMS: list[Callable[[Tensor], Tensor | None]] = [
    torch.empty_like,  # strides of the parameter
    lambda p: torch.empty(p.shape, dtype=p.dtype),
    lambda p: torch.empty(p.shape[::-1], dtype=p.dtype).permute(tuple(reversed(range(p.dim())))),
    lambda p: torch.empty(*p.shape, 3, dtype=p.dtype)[..., 1],
    lambda p: torch.empty((), dtype=p.dtype).expand(p.shape),
    lambda p: torch.empty(p.shape, dtype=torch.cfloat).conj().imag if p.dtype == torch.float32 else None,
    lambda p: None,
]


class OfManyForms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        filters = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        values = [torch.ones(7, 5), torch.ones(5, 7).T, filters, torch.ones(3), torch.ones(0, 2), torch.tensor(1.0)]
        self.weights = nn.ParameterList(nn.Parameter(value) for value in values)


class Reading:
    """An update that reads a sharded gradient until somebody waits for it."""

    def __init__(self, gradient: ShardedGradient, numel: int) -> None:
        self.values = gradient.read(0, numel)
        self.expected = self.values.clone()
        self.ended = False
        gradient.lent_to(self)

    def wait(self) -> None:
        assert torch.equal(self.values, self.expected)
        self.ended = True

    synchronize = wait

    def done(self) -> bool:
        return self.ended


def add(values: list[Tensor]) -> Tensor:
    """Their sum, in order, rounded to 16 bits once."""
    dtype = values[0].dtype
    wide = (each.to(torch.promote_types(dtype, torch.float32)) for each in values)
    return functools.reduce(torch.add, wide).to(dtype)


def reduce_gradients_of_many_forms(setup: Setup, dtype: torch.dtype, seeds: int) -> None:
    setup = dataclasses.replace(setup, bucket_size_mb=1)
    buckets = make_engine(OfManyForms().to(dtype), setup).buckets
    assert len(buckets) == 1
    kept, world = BucketGradients(buckets[0]), dist.get_world_size()
    held = torch.tensor(0.0)  # the sum over micro-batches
    for seed in range(seeds):
        draw = torch.Generator().manual_seed(seed * world + dist.get_rank())
        bucket, dtype = kept.bucket, setup.precision.reduce_dtype or kept.bucket.dtype
        own, given = torch.zeros(bucket.layout.padded_numel, dtype=dtype), []
        for index, parameter in enumerate(bucket.parameters):
            make = FORMS[int(torch.randint(len(FORMS), (), generator=draw))]
            gradient = make(bucket.view(own, index).to(bucket.dtype))
            if gradient is not None:
                base = gradient if gradient._base is None else gradient._base
                torch.view_as_real(base).normal_(generator=draw) if base.is_complex() else base.normal_(generator=draw)
                bucket.view(own, index).copy_(gradient)
                given.append((gradient, gradient.clone()))
            set_local_grad(parameter, gradient)
        last = seed % 3 == 2 or bucket.placement.collects_slices
        reads = not kept.sharded.empty and bucket.placement.sums_where_kept(dtype)
        reading = Reading(kept.sharded, bucket.layout.shard_numel) if reads else DONE
        kept.reduce(last)
        assert reading.done()
        assert all(local_grad(parameter) is None for parameter in bucket.parameters)
        assert all(torch.equal(*both) for both in given)
        everybodys = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(everybodys, own)
        mesh, averages = bucket.placement.mesh, [each * (1 / world) for each in everybodys]
        sums = [add(averages[at : at + mesh.shard.size]) for at in range(0, world, mesh.shard.size)]
        held = held + add(sums).chunk(mesh.shard.size)[mesh.shard.rank].to(torch.promote_types(dtype, torch.float32))
        assert torch.equal(kept.sharded.read(0, bucket.layout.shard_numel).to(held.dtype), held)
        if last:
            kept.clear(range(len(bucket.parameters)))
            held = torch.tensor(0.0)


@ranks(2, slow=(1, 3, 4))
def test_gradients_in_any_memory_are_averaged(pool: RankPool) -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    whole = dataclasses.replace(half, reduce_dtype=torch.float32)
    for setup, dtype in [
        (Setup(1), torch.float32),
        (Setup(2, whole=True), torch.float64),
        (Setup(2, precision=half), torch.float32),
        (Setup(2, precision=whole), torch.float32),
        (Setup(1), torch.float16),
        (Setup(2, shard_size=1 + pool.world_size // 4), torch.float32),
    ]:
        pool.run(reduce_gradients_of_many_forms, setup, dtype, 15)


@pytest.mark.parametrize(("stage", "last"), [(0, False), (1, True), (3, True)])
def test_a_sparse_gradient_is_an_error_with_the_parameters_name(stage: int, last: bool) -> None:
    table = nn.Embedding(4, 3)
    engine = make_engine(nn.Sequential(table), Setup(stage), Mesh.single())
    with engine.forward_context():
        loss = functional.embedding(torch.tensor([1]), table.weight, sparse=True).sum()
    with pytest.raises(TypeError, match=r"parameter '0\.weight' has layout torch\.sparse_coo.*Use sparse=False"):
        backward(engine, loss, last=last)


def measure_reduction(reads: bool) -> tuple[float, float]:
    """Bytes that a reduction takes, measured and planned, to those of the gradients."""
    setup = Setup(2, bucket_size_mb=10)
    with pytest.MonkeyPatch.context() as patch, memory.only_new_objects():
        model = nn.Sequential(*(nn.Linear(500, 500) for _ in range(4)))
        patch.setattr(exchange, "_TILE", 1 << 18)
        patch.setenv("LIGHTNING_ZERO_CMA", "" if reads else "off")
        mesh = Mesh.create()
        patch.delenv("LIGHTNING_ZERO_CMA")  # what counts is how the ranks do it
        planned = plan(model, make_placement(setup, mesh), [torch.optim.SGD(model.parameters())])
        kept, peak, before = BucketGradients(make_engine(model, setup, mesh).buckets[0]), memory.Peak(), 0
        for last in (False, True):  # the sharded gradient is allocated in the first one
            gradients = [torch.ones_like(parameter) for parameter in kept.bucket.parameters]
            for parameter, gradient in zip(kept.bucket.parameters, gradients, strict=True):
                set_local_grad(parameter, gradient)
            before = memory.storage_bytes()
            with peak if last else nullcontext():
                kept.reduce(last=last)
        assert kept.sharded.read(0, kept.bucket.layout.shard_numel).max() == 2
    nbytes = sum(gradient.nbytes for gradient in gradients)
    return (peak.nbytes - before) / nbytes, planned.buckets[0].reduce_buffer.device / nbytes


@ranks(2)
def test_memory_of_reductions_is_as_planned(pool: RankPool) -> None:
    """A rank reads its half of the other's gradients in tiles, or receives it and joins the other half to send it."""
    for reads, times in ((True, 0.1), (False, 1.04)):
        for figures in pool.run(measure_reduction, reads):
            assert figures == pytest.approx((times, times), abs=0.02)
