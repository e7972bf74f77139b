"""Sharded training against one plain process, over stages, stores, ranks, accumulation, clipping and optimizers.

On CPU the engine adds gradients in rank order, so stock optimizers give the reference's fp32 result bit for bit,
clipped or not: the norm is a float64 sum, whose order vanishes when the factor is rounded to fp32.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from engine.cases import Case, check_cases, every_stage, every_stage_and_rank, stages_on
from engine.driver import Setup, assert_close
from helpers import models
from helpers.ranks import RankPool, ranks, slow_unless
from torch import Tensor

from lightning_zero.sharding import Mesh, MixedPrecisionPolicy

STAGES = (0, 1, 2, 3)
CLIP = 0.3  # below all norms of these models' gradients
OPTIMIZERS = ("adamw", "momentum", "adagrad", "rmsprop")
BF16_MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BF16_TRUE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, keep_norms=False)


def sample(stage: int) -> list[Case]:
    """One case per optimizer, in which every two settings meet in some case of some stage."""
    return [
        Case(
            Setup(stage, offload=(index + stage) % 2 == 0),
            optimizer,
            accumulate=(1, 3)[(index // 2 + stage) % 2],
            clip_norm=(None, CLIP)[(index + index // 2 + stage // 2) % 2],
        )
        for index, optimizer in enumerate(OPTIMIZERS)
    ]


@ranks(2)
@pytest.mark.parametrize("stage", slow_unless((1, 3), STAGES))
def test_stock_optimizers_are_bitwise_equal(pool: RankPool, stage: int) -> None:
    check_cases(pool, sample(stage))


@pytest.mark.slow
@ranks(1, 4)
def test_so_they_are_on_other_numbers_of_ranks(pool: RankPool) -> None:
    """A case of each stage and optimizer; state rests in either place with and without accumulation and clipping."""
    check_cases(pool, [sample(stage)[index] for stage, index in zip(STAGES, (3, 2, 0, 1), strict=True)])


@ranks(2)
def test_float64_is_close(pool: RankPool) -> None:
    cases = [dataclasses.replace(sample(stage)[stage], dtype=torch.float64) for stage in STAGES]
    check_cases(pool, cases, assert_close)


@every_stage
def test_every_torch_optimizer_is_bitwise_equal(pool: RankPool, stage: int) -> None:
    others = [name for name in models.OPTIMIZERS if name not in OPTIMIZERS]
    check_cases(pool, [Case(Setup(stage, offload=stage > 1), name, model="mlp") for name in others])


@stages_on((1, 2), (3, 2), slow=[(2, 4)])
def test_whole_parameters_in_shards_are_bitwise_equal(pool: RankPool, stage: int) -> None:
    cases = [dataclasses.replace(case, setup=dataclasses.replace(case.setup, whole=True)) for case in sample(stage)]
    check_cases(pool, cases)


@every_stage
def test_one_unit_and_large_buckets_are_bitwise_equal(pool: RankPool, stage: int) -> None:
    large = Setup(stage, bucket_size_mb=25.0)
    check_cases(pool, [Case(large, accumulate=3), Case(large, model="mlp", accumulate=3)])


@every_stage
def test_clipping_by_value_is_bitwise_equal(pool: RankPool, stage: int) -> None:
    check_cases(pool, [Case(Setup(stage), optimizer, clip_value=0.01) for optimizer in ("adamw", "momentum")])


@ranks(2)
def test_parameters_may_stay_on_the_device_where_state_is_on_the_host(pool: RankPool) -> None:
    setup = Setup(3, offload=True, offload_params=False)
    check_cases(pool, [Case(setup, "momentum", accumulate=3), Case(setup, clip_norm=CLIP)])


@every_stage_and_rank
def test_activation_checkpointing_is_bitwise_equal(pool: RankPool, stage: int) -> None:
    cases = [
        Case(Setup(stage), "momentum", "checkpointed", like="transformer", accumulate=accumulate, clip_norm=CLIP)
        for accumulate in (1, 3)
    ]
    check_cases(pool, cases)


@every_stage
def test_modules_called_twice_are_bitwise_equal(pool: RankPool, stage: int) -> None:
    """One after the other, or one inside the other."""
    models = ("looped", "self_calling")
    check_cases(pool, [Case(Setup(stage), model=model, accumulate=n) for model in models for n in (1, 3)])


@stages_on((1, 2), (2, 2), slow=[(0, 2)])
@pytest.mark.parametrize("model", ["reentrant", "looped_reentrant"])
def test_gradients_that_arrive_twice_are_all_reduced(pool: RankPool, stage: int, model: str) -> None:
    like = {"reentrant": "transformer", "looped_reentrant": "looped"}[model]
    cases = [
        Case(Setup(stage), "momentum", model, like=like, accumulate=accumulate, dtype=torch.float64)
        for accumulate in (1, 3)
    ]
    check_cases(pool, cases, assert_close)


def hybrid(stage: int, size: int) -> list[Case]:
    """Every mixture at one stage, with shards over `size` ranks."""
    # bf16 sums: see `test_bf16_reduced_in_fp32_is_bitwise_equal`.
    bf16 = dataclasses.replace(BF16_MIXED, reduce_dtype=torch.float32)
    return [
        Case(
            Setup(stage, offload=offload, shard_size=size, precision=precision),
            "adamw" if accumulate > 1 else "momentum",
            accumulate=accumulate,
            clip_norm=CLIP if offload else None,
            autocast=precision is bf16,
        )
        for precision, accumulate, offload in itertools.product((MixedPrecisionPolicy(), bf16), (1, 3), (False, True))
    ]


@ranks(4)
@pytest.mark.parametrize(
    ("stage", "size"),
    [(2, 1), (3, 2), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(3, 4, marks=pytest.mark.slow)],
)
def test_hybrid_sharding_is_bitwise_equal(pool: RankPool, stage: int, size: int) -> None:
    """Two of the mixtures, which differ in everything."""
    index = (stage + size) % 4
    check_cases(pool, [case for i, case in enumerate(hybrid(stage, size)) if i in (index, 7 - index)])


@ranks(4)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_unused_on_some_replicas_are_as_in_one_process(pool: RankPool, stage: int) -> None:
    setup = Setup(stage, shard_size=2)
    check_cases(pool, [Case(setup, "momentum", "optional", accumulate=3, flagged=models.by_turns)])


@every_stage_and_rank
@pytest.mark.parametrize(("precision", "autocast"), [(BF16_MIXED, True), (BF16_TRUE, False)], ids=["mixed", "true"])
def test_bf16_with_masters_is_bitwise_equal(
    pool: RankPool, stage: int, precision: MixedPrecisionPolicy, autocast: bool
) -> None:
    setup = Setup(stage, offload=stage > 1, precision=precision)
    check_cases(
        pool,
        [
            Case(setup, optimizer, accumulate=accumulate, autocast=autocast)
            for optimizer, accumulate in (("momentum", 1), ("adamw", 3))
        ],
    )


@ranks(4)
def test_bf16_reduced_in_fp32_is_bitwise_equal(pool: RankPool) -> None:
    # With more than two ranks the reference rounds each addition of bf16 values, the engine the sum only.
    precision = dataclasses.replace(BF16_MIXED, reduce_dtype=torch.float32)
    check_cases(pool, [Case(Setup(stage, precision=precision), "momentum", autocast=True) for stage in (1, 3)])


def sum_of_ranks(values: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of the sum over ranks of multiples of `values`: the engine's, and one added in fp32."""
    group = Mesh.create().shard
    given = [values * (rank + 1) for rank in range(group.size)]
    total = torch.stack(given).float().cumsum(0)[-1].to(values.dtype)
    return group.reduce_scatter(given[group.rank], "sum"), total.chunk(group.size)[group.rank]


def test_16_bit_sums_are_rounded_once(pool4: RankPool) -> None:
    for ours, expected in pool4.run(sum_of_ranks, torch.randn(256).bfloat16()):
        assert torch.equal(ours, expected)


def test_the_native_kernel_is_within_its_bound(pool2: RankPool) -> None:
    """Per step 1 ulp and 2^-21 of the update (see `lightning_zero.ops.adamw_`), and what gradients make of it."""
    cases = [
        Case(Setup(stage, offload=True, native="auto"), optimizer, accumulate=accumulate, clip_norm=clip)
        for stage, optimizer, accumulate, clip in ((1, "adamw", 1, None), (2, "adamw", 3, CLIP), (3, "adam", 1, CLIP))
    ]
    check_cases(pool2, cases, functools.partial(assert_close, rtol=1e-6, atol=1e-7))
