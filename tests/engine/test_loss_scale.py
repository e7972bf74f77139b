"""fp16 with a loss scale under sharding: exact updates, and skips that leave nothing behind.

The engine is compared with `train_reference`, bit for bit where the scales are powers of two: dividing by one is exact.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from engine import driver
from engine.cases import cast, describe, every_stage, stages_on
from engine.driver import Meshes, RankResult, Session, Setup, assert_close, assert_equal, assert_trained
from helpers import models, place
from helpers.ranks import RankPool, ranks
from helpers.reference import (
    Batches,
    Trained,
    all_finite,
    follow,
    rank_gradients,
    reduce_ranks,
    train_reference,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_zero.engine import Engine
from lightning_zero.sharding import Mesh, MixedPrecisionPolicy
from lightning_zero.update import DynamicLossScaler, LossScaleError, LossScaler, StaticLossScaler, make_updater

STAGES = (0, 1, 2, 3)
SCALE = 1024.0
CLIP = 0.3  # below all norms of this model's gradients
CLIP_VALUE = 0.01
TIMEOUT = 30.0  # a lost collective hangs: it should cost less than the pool's own limit
FP32 = MixedPrecisionPolicy()
MIXED = MixedPrecisionPolicy(param_dtype=torch.float16)  # norms in fp32, computed under autocast
TRUE = MixedPrecisionPolicy(param_dtype=torch.float16, keep_norms=False)
FAST = ((1, 2), (3, 2))  # stages and numbers of ranks of fast tests
CLIPS: tuple[dict[str, float], ...] = ({}, {"clip_norm": CLIP}, {"clip_value": CLIP_VALUE})

# Rank 0 says what it skips; the tests in this process would fail of it.
quiet = pytest.mark.filterwarnings("ignore:skipped a step", "ignore:gradients overflowed")


# ------------------------------------------------------------------------------------------------------- the model


class Plant(torch.autograd.Function):
    """The identity, but the last element of the gradient is `bad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: float) -> Tensor:
        ctx.bad = bad
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = ctx.bad
        return gradient, None


class PlantedLinear(nn.Linear):
    """A layer in whose bias a bad gradient can be planted, in one element and nowhere else."""

    bad: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.bad is None else Plant.apply(self.bias, self.bad)
        return functional.linear(x, self.weight, bias)


def make_model(seed: int = 0) -> models.TinyTransformer:
    """The transformer of the other tests, with a planted layer in its second block."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = models.TinyTransformer()
        model.blocks[1].down = PlantedLinear(13, models.WIDTH)
        return model


PLANTED = "blocks.1.down.bias"


def fp16_loss(model: Any, batch: Tensor, *, autocast: bool = False, bad: float = math.inf) -> Tensor:
    """The next token's cross entropy, in fp32; a flagged batch plants `bad`."""
    model.blocks[1].down.bad = bad if models.is_flagged(batch) else None
    with torch.autocast(place.device().type, dtype=torch.float16, enabled=autocast):
        logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten().to(logits.device))


class Place(NamedTuple):
    """A rank's micro-batch; as a function, whether a micro-batch is this one."""

    step: int
    micro: int
    rank: int

    def __call__(self, step: int, micro: int, rank: int) -> bool:
        return self == (step, micro, rank)


# ---------------------------------------------------------------------------------- trainings, here and on the ranks


@dataclasses.dataclass(frozen=True)
class Case:
    """One training. `window` and `hysteresis` are the scaler's; `window=None` is a static one."""

    setup: Setup
    optimizer: str = "momentum"
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    steps: int = 3
    scale: float = SCALE
    window: int | None = None
    hysteresis: int = 1
    planted: Place | None = None
    bad: float = math.inf
    without: int | None = None  # a step that is left out

    @property
    def loss_fn(self) -> Callable[[nn.Module, Tensor], Tensor]:
        return functools.partial(
            fp16_loss, autocast=self.setup.precision is not FP32 and keeps_norms(self), bad=self.bad
        )

    def make_scaler(self) -> LossScaler:
        if self.window is None:
            return StaticLossScaler(self.scale)
        return DynamicLossScaler(self.scale, window=self.window, hysteresis=self.hysteresis)

    def batches(self, world: int) -> Batches:
        batches = models.make_batches(self.steps, self.accumulate, world, flagged=self.planted or models.never)
        return [step for index, step in enumerate(batches) if index != self.without]


def keeps_norms(case: Case) -> bool:
    return case.setup.precision.param_dtype is not None and case.setup.precision.keep_norms


class Ran(NamedTuple):
    """What a training left on one rank, and what it saw on the way."""

    result: RankResult
    scales: list[float]  # of each step
    scaler_state: dict[str, float]
    skipped_steps: int


def train_cases(cases: Sequence[Case]) -> list[Ran]:
    meshes = Meshes()
    return [train_case(case, meshes) for case in cases]


def train_case(case: Case, meshes: Meshes) -> Ran:
    """Train this rank's part; a planted step must change nothing."""
    rank, world = dist.get_rank(), dist.get_world_size()
    scaler = case.make_scaler()
    make_optimizer = models.optimizer_factory(case.optimizer)
    session = driver.start(make_model(rank), make_optimizer, case.setup, meshes.of(case.setup), scaler=scaler)
    engine, norms, scales = session.engine, [], []
    for step, micro in enumerate(case.batches(world)):
        scales.append(engine.loss_scale)
        before = snapshot(session)
        norm = driver.run_step(
            session, [each[rank] for each in micro], case.loss_fn, clip_norm=case.clip_norm, clip_value=case.clip_value
        )
        norms += [] if norm is None else [norm]
        if case.planted is not None and step == case.planted.step:
            check_skipped(session, before)
        else:
            assert not engine.last_step(session.optimizer).skipped
    return Ran(driver.finish(session, norms), scales, scaler.state_dict(), engine.skipped_steps)


def snapshot(session: Session) -> dict[str, Tensor]:
    """Everything that a step may change on this rank, without a collective: parameters, masters, state."""
    values: dict[str, Tensor] = {}
    session.engine.await_updates()
    for bucket in session.engine.buckets:
        values[f"{bucket.names}.shard"] = bucket.shard.read(0, bucket.shard.numel).clone()
        values[f"{bucket.names}.master"] = bucket.master.read(0, bucket.layout.shard_numel).clone()
    for piece in driver.state_pieces(session.engine, session.updater):
        for key, value in (piece.elements | piece.scalars).items():
            for number, leaf in enumerate(tree_leaves(value)):  # Shampoo's is a list
                values[f"{piece.name}.{piece.start}.{key}.{number}"] = torch.as_tensor(leaf).clone()
    return values


def check_skipped(session: Session, before: dict[str, Tensor]) -> None:
    outcome = session.engine.last_step(session.optimizer)
    assert outcome.skipped
    assert not math.isfinite(outcome.grad_norm)
    assert_equal(snapshot(session), before)
    assert held_gradients(session.engine) == []


def held_gradients(engine: Engine) -> list[str]:
    """Where a gradient is left, unsharded, summed or sharded, or marked as received."""
    left = []
    for bucket in engine.buckets:
        gradients = engine.gradients_of(bucket)
        left += [f"{bucket.name}: {part.name}" for part in gradients.held]
        left += [f"{bucket.name}: received"] * any(gradients.received)
        left += [
            f"{bucket.name}: {n}" for n, p in zip(bucket.names, bucket.parameters, strict=True) if p.grad is not None
        ]
    return left


def reference_of(case: Case, world: int, scales: Sequence[float]) -> Trained:
    # What the reference does not depend on must not multiply its runs.
    setup = Setup(2 if case.setup.stage >= 2 else 1, precision=case.setup.precision)
    plain = dataclasses.replace(case, setup=setup, scale=1.0, window=None, hysteresis=1)
    return _reference_of(plain, world, tuple(scales))


@functools.cache
def _reference_of(case: Case, world: int, scales: tuple[float, ...]) -> Trained:
    precision = case.setup.precision
    low = precision.param_dtype
    return train_reference(
        make_model(),
        models.optimizer_factory(case.optimizer),
        case.batches(world),
        case.loss_fn,
        reduce_each=case.setup.stage >= 2,
        clip_norm=case.clip_norm,
        clip_value=case.clip_value,
        cast=None if low is None else functools.partial(cast, dtype=low, keep_norms=precision.keep_norms),
        reduce_dtype=precision.reduce_dtype,
        grad_dtype=precision.grad_dtype,
        loss_scale=scales,
        skip_nonfinite=True,
    )


def run_cases(pool: RankPool, cases: Sequence[Case]) -> list[tuple[Trained, Ran]]:
    """Each case's common result, and rank 0's notes, which are all ranks'."""
    return [agreed(each) for each in zip(*pool.run_within(TIMEOUT + 2 * len(cases), train_cases, cases), strict=True)]


def agreed(per_rank: Sequence[Ran]) -> tuple[Trained, Ran]:
    finite = [ran._replace(result=ran.result._replace(norms=as_finite(ran.result.norms))) for ran in per_rank]
    for ran in finite:
        assert ran[1:] == finite[0][1:]
    return driver.combine([ran.result for ran in finite]), finite[0]


def as_finite(norms: Sequence[float]) -> list[float]:
    """Comparable: -1 for what is not finite."""
    return [norm if math.isfinite(norm) else -1.0 for norm in norms]


Compare = Callable[[Trained, Trained], None]


def exactly(actual: Trained, expected: Trained) -> None:
    assert_trained(actual, expected)


def within(rtol: float, atol: float) -> Compare:
    close = functools.partial(assert_close, rtol=rtol, atol=atol)
    return lambda actual, expected: assert_trained(actual, expected, close)


def check_cases(
    pool: RankPool,
    cases: Sequence[Case],
    compare: Compare = exactly,
    traces: Callable[[Case], Sequence[float]] | None = None,
) -> None:
    """Every case gives the reference's result at the scales of `traces`; all that do not are listed."""
    wrong: list[str] = []
    for case, (trained, ran) in zip(cases, run_cases(pool, cases), strict=True):
        scales = [case.scale] * len(case.batches(1)) if traces is None else traces(case)
        try:
            assert ran.scales == list(scales)
            assert ran.skipped_steps == (case.planted is not None)
            expected = reference_of(case, pool.world_size, scales)
            compare(trained, expected)
            if case.clip_norm is not None:
                norms = as_finite(expected.norms)
                assert trained.norms == pytest.approx(norms, rel=1e-12 if compare is exactly else 1e-6)
                assert min(norm for norm in norms if norm >= 0) > case.clip_norm, "this case clips nothing"
        except AssertionError as error:
            wrong.append(f"{describe(case)}: {str(error)[:500]}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)} cases", *wrong[:5]])


def precisions(world: int) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """fp16 with and without fp32 norms.

    With more than two ranks the reference rounds each addition of fp16 values, the engine the sum only: in fp32 both
    are exact.
    """
    reduce_dtype = torch.float32 if world > 2 else None
    return (dataclasses.replace(MIXED, reduce_dtype=reduce_dtype), dataclasses.replace(TRUE, reduce_dtype=reduce_dtype))


# ------------------------------------------------------------------------------------------------------ the update


def matrix(stage: int, world: int) -> list[Case]:
    """Every combination at one stage; the scale grows after two steps."""
    return [
        Case(Setup(stage, offload, precision=precision), optimizer, accumulate, window=2, **clip)
        for precision, optimizer, offload, accumulate, clip in itertools.product(
            precisions(world), ("adamw", "momentum"), (False, True), (1, 3), CLIPS
        )
    ]


@pytest.mark.slow
@ranks(1, 2, 4)
def test_optimizers_of_whole_parameters_skip_an_overflow_in_fp16(pool: RankPool) -> None:
    """Where the last rank overflows in the second of three steps; masters are fp32.

    The numbers of ranks share the cases, so that each has every optimizer and every stage.
    """
    both, last = precisions(pool.world_size), pool.world_size - 1
    shares = {1: (0,), 2: (1, 2), 4: (3,)}[pool.world_size]
    cases = [
        Case(
            Setup(stage, offload=(stage + index) % 2 == 0, precision=both[(stage + index) // 2 % 2]),
            optimizer,
            accumulate=(1, 3)[index % 2],
            clip_norm=(None, CLIP)[(stage // 2 + index) % 2],
            planted=Place(1, 0, last),
        )
        for stage in STAGES
        for index, optimizer in enumerate(("muon_and_adamw", "adafactor", "lamb", "shampoo"))
        if (index + (0, 2, 1, 3)[stage]) % 4 in shares
    ]
    check_cases(pool, cases)


def sample(stage: int, world: int) -> list[Case]:
    """Some cases of the matrix, of which every stage has others: a step prime to its sides meets all settings.

    Two, where the fast tests do not run.
    """
    cases = matrix(stage, world)
    return cases[stage::11] if (stage, world) in FAST else cases[stage + 2 * world :: 29]


def grows_after_two(case: Case) -> list[float]:
    return [case.scale, case.scale, 2 * case.scale]


@stages_on(*FAST, slow=[(0, 2), (2, 4), (3, 1), (3, 4)])
def test_scaled_training_is_bitwise_equal(pool: RankPool, stage: int) -> None:
    check_cases(pool, sample(stage, pool.world_size), traces=grows_after_two)


@every_stage
def test_gradients_kept_or_reduced_in_another_dtype_are_bitwise_equal(pool: RankPool, stage: int) -> None:
    other = [
        dataclasses.replace(TRUE, reduce_dtype=torch.float32),
        dataclasses.replace(TRUE, grad_dtype=torch.float32),
        dataclasses.replace(TRUE, reduce_dtype=torch.float16, grad_dtype=torch.float16),
    ]
    cases = [
        Case(Setup(stage, offload=stage > 1, precision=precision), accumulate=accumulate, window=2, clip_norm=CLIP)
        for precision, accumulate in itertools.product(other, (1, 3))
    ]
    check_cases(pool, cases, traces=grows_after_two)


@every_stage
def test_a_scale_that_is_no_power_of_two_is_within_its_rounding(pool: RankPool, stage: int) -> None:
    """One step: 1/scale and its product are rounded to fp32, as is the reference's quotient: 1.5 ulp = 2^-23.4.

    Clipping by value rounds the scaled bound too, and the square of AdamW doubles it: 2^-21 is above all. More steps
    would tell less: a master at the border between two fp16 values makes a parameter that differs by 2^-11.
    """
    cases = [
        Case(Setup(stage, offload, precision=precision), optimizer, accumulate, steps=1, scale=1000.0, **clip)
        for (optimizer, precision, offload, accumulate), clip in itertools.product(
            (("adamw", MIXED, False, 1), ("momentum", TRUE, True, 3)), CLIPS
        )
    ]
    # Momentum holds gradient + decay x weight, which may cancel: atol for gradients of up to 0.2.
    check_cases(pool, cases, within(2.0**-21, 1e-7))


@every_stage
def test_clipping_by_norm_and_then_by_value_rounds_nothing_to_16_bits(pool: RankPool, stage: int) -> None:
    setups = [Setup(stage, offload, precision=precision) for offload, precision in ((False, MIXED), (True, TRUE))]
    cases = [Case(setup, window=2, clip_norm=CLIP, clip_value=CLIP_VALUE) for setup in setups]
    check_cases(pool, cases, traces=grows_after_two)


@stages_on((1, 2), (3, 2), slow=[(2, 2)])
def test_the_native_kernel_is_within_its_bound(pool: RankPool, stage: int) -> None:
    """Of one step: afterwards a master at the border between two fp16 values makes another parameter."""
    cases = [
        Case(
            Setup(stage, offload=True, native="auto", precision=precision), "adamw", micro, steps=1, scale=scale, **clip
        )
        for (precision, micro, scale), clip in itertools.product(((MIXED, 1, 1000.0), (TRUE, 3, SCALE)), CLIPS)
    ]
    check_cases(pool, cases, within(1e-6, 1e-7))


@every_stage
def test_the_update_of_a_growth_step_is_that_of_any_step(pool: RankPool, stage: int) -> None:
    native, plain = Setup(stage, offload=True, native="auto", precision=MIXED), Setup(stage, precision=TRUE)
    growing = [
        Case(setup, optimizer, accumulate, steps=1, window=1, **clip)
        for setup, optimizer, accumulate, clip in (
            (native, "adamw", 1, {}),
            (native, "adamw", 3, CLIPS[1]),
            (native, "adamw", 3, CLIPS[2]),
            (plain, "momentum", 3, CLIPS[1]),
        )
    ]
    never = [dataclasses.replace(case, window=None) for case in growing]
    results = run_cases(pool, growing + never)
    for (grown, ran), (constant, other) in zip(results[: len(growing)], results[len(growing) :], strict=True):
        assert ran.scaler_state == {"scale": 2 * SCALE, "clean_steps": 0, "overflows": 0}
        assert not other.scaler_state
        assert_trained(grown, constant)


# ------------------------------------------------------------------------------------------------------------ skips


def skips(stage: int, world: int) -> list[Case]:
    """A bad value in one rank's gradient of one micro-batch, in the step after which the scale would have grown."""
    options = itertools.product(
        (math.inf, math.nan), CLIPS, (False, True), (1, 2), precisions(world), ("adamw", "momentum"), range(3)
    )
    cases = [
        Case(
            Setup(stage, offload, precision=precision),
            optimizer,
            accumulate=3,
            steps=4,
            window=3,
            hysteresis=hysteresis,
            planted=Place(2, micro, (micro + stage + hysteresis) % world),
            bad=bad,
            **clip,
        )
        for bad, clip, offload, hysteresis, precision, optimizer, micro in options
    ]
    # A step prime to the 288 combinations walks through all settings.
    return cases[stage::59] if (stage, world) in FAST else cases[stage + 16 * world :: 149]


def falls_in_the_third(case: Case) -> list[float]:
    return [case.scale] * 3 + [case.scale / 2 if case.hysteresis == 1 else case.scale]


@stages_on(*FAST, slow=[(0, 2), (2, 4), (3, 1), (3, 4)])
def test_an_overflow_on_one_rank_changes_nothing_on_any(pool: RankPool, stage: int) -> None:
    check_cases(pool, skips(stage, pool.world_size), traces=falls_in_the_third)


@every_stage
def test_a_training_with_a_skipped_step_is_the_one_without_it(pool: RankPool, stage: int) -> None:
    """With the native kernel too, bit for bit, and any place of the bad value."""
    accumulate = 3 if stage % 2 else 1
    place = Place(step=1, micro=accumulate - 1, rank=stage % 2)
    skipping = [
        Case(
            Setup(stage, offload=native == "auto", native=native, precision=TRUE),
            optimizer,
            accumulate,
            window=100,
            hysteresis=2,
            planted=place,
            **clip,
        )
        for optimizer, native, clip in (
            ("adamw", "auto", {}),
            ("adamw", "auto", CLIPS[1]),
            ("momentum", "off", CLIPS[2]),
        )
    ]
    clean = [dataclasses.replace(case, planted=None, without=1) for case in skipping]
    results = run_cases(pool, skipping + clean)
    for (skipped, ran), (expected, _) in zip(results[: len(clean)], results[len(clean) :], strict=True):
        assert ran.skipped_steps == 1
        assert ran.scaler_state == {"scale": SCALE, "clean_steps": 1, "overflows": 1}
        assert_trained(skipped, expected)


@quiet
@settings(max_examples=30, deadline=None)
@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=12),
    window=st.integers(1, 3),
    hysteresis=st.integers(1, 3),
    stage=st.sampled_from(STAGES),
    offload=st.booleans(),
)
def test_the_scale_follows_the_overflows(
    overflows: list[bool], window: int, hysteresis: int, stage: int, offload: bool
) -> None:
    """Each backward has the scale of the scaler that saw the steps before, and the optimizer only the clean ones."""
    scaler = DynamicLossScaler(2.0**14, window=window, hysteresis=hysteresis, max_scale=2.0**16)
    alone = DynamicLossScaler(2.0**14, window=window, hysteresis=hysteresis, max_scale=2.0**16)
    setup = Setup(stage, offload, precision=MixedPrecisionPolicy(torch.float16))
    model = nn.Linear(3, 1, bias=False)
    weight = model.weight.detach().to(place.device(), copy=True)
    session = driver.start(
        model, lambda m: torch.optim.SGD(m.parameters(), lr=0.5), setup, Mesh.single(), scaler=scaler
    )
    for overflow in overflows:
        session.optimizer.zero_grad()
        factor = math.inf if overflow else 0.25
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = session.model(torch.ones(1, 3, dtype=torch.float16)).float().sum() * factor
            assert float(session.engine.scale_loss(torch.ones(()))) == alone.scale
            driver.backward(session.engine, loss)
            session.optimizer.step()
        weight -= 0.0 if overflow else 0.5 * 0.25
        alone.update(overflow)
        assert scaler.state_dict() == alone.state_dict()
    assert session.engine.skipped_steps == sum(overflows)
    session.engine.release()
    assert torch.equal(session.model.weight, weight)


class Part(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.float().sum()


class Sum(nn.Module):
    """Every parameter's gradient is 1, times whatever the loss is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self) -> Tensor:
        x = self.bias.float().sum()
        for part in self.parts:
            x = part(x)
        return x


def forty_thousand_twice(setups: Sequence[Setup], scale: float) -> list[tuple[set[float], int]]:
    """Two micro-batches whose fp16 gradients are 40000 times the scale's power on every rank: weights, and skips."""
    meshes, results = Meshes(), []
    for setup in setups:
        session = driver.start(
            Sum(),
            lambda m: torch.optim.SGD(m.parameters(), lr=2.0**-10),
            setup,
            meshes.of(setup),
            scaler=StaticLossScaler(scale),
        )
        for last in (False, True):
            driver.backward(session.engine, session.model() * (40000.0 / scale), last=last)
        session.optimizer.step()
        weights = driver.finish(session).weights
        results.append(({float(v) for weight in weights.values() for v in weight}, session.engine.skipped_steps))
    return results


def everywhere(precision: MixedPrecisionPolicy, **options: Any) -> list[Setup]:
    places = [(stage, offload) for stage in STAGES for offload in (False, True) if stage or not offload]
    return [Setup(stage, offload, precision=precision, **options) for stage, offload in places]


def test_micro_batches_that_exceed_fp16_together_do_not_overflow(pool2: RankPool) -> None:
    for results in pool2.run(forty_thousand_twice, everywhere(TRUE), 8.0):
        assert results == [({-10000.0 * 2.0**-10}, 0)] * 7


def test_nor_do_they_between_replicas(pool4: RankPool) -> None:
    setups = everywhere(TRUE, shard_size=2)[1:]
    for results in pool4.run(forty_thousand_twice, setups, 8.0):
        assert results == [({-10000.0 * 2.0**-10}, 0)] * 6


def test_they_overflow_everywhere_where_gradients_are_kept_in_fp16(pool2: RankPool) -> None:
    precision = dataclasses.replace(TRUE, grad_dtype=torch.float16)
    for results in pool2.run(forty_thousand_twice, everywhere(precision), 8.0):
        assert results == [({0.0}, 1)] * 7


# ------------------------------------------------------------------------------------ several optimizers, one scaler


def matrices_and_vectors(model: nn.Module) -> list[Optimizer]:
    """A and B, which share buckets; the planted bias is B's."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in (matrices, vectors)]


class Turns(NamedTuple):
    """Two passes, in each of which B steps first and changes the scale.

    `held`: A steps after the second pass only, with the gradients of both; otherwise after each, with those that B's
    step has left at the old scale.
    """

    precision: MixedPrecisionPolicy
    falls: bool
    held: bool
    clip_norm: float | None = None
    clip_value: float | None = None

    def batches(self, world: int) -> Batches:
        return models.make_batches(2, 1, world, flagged=Place(0, 0, world - 1) if self.falls else models.never)

    @property
    def scales(self) -> tuple[float, float]:
        return (SCALE, SCALE / 2 if self.falls else 2 * SCALE)

    @property
    def loss_fn(self) -> Callable[[nn.Module, Tensor], Tensor]:
        return functools.partial(fp16_loss, autocast=self.precision.param_dtype is not None)


def take_turns(turns: Turns, setup: Setup) -> tuple[dict[str, Tensor], list[float]]:
    """Weights, and the norms of A's gradients."""
    setup = dataclasses.replace(setup, precision=turns.precision)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model(rank)
    a, b = matrices_and_vectors(model)
    scaler = DynamicLossScaler(SCALE, window=1, hysteresis=1)
    engine = driver.make_engine(model, setup, Meshes().of(setup), optimizers=[a, b], scaler=scaler)
    engine.attach([make_updater(optimizer, engine, setup.native) for optimizer in (a, b)])
    norms = []
    for index, (micro,) in enumerate(turns.batches(world)):
        b.zero_grad()
        driver.backward(engine, turns.loss_fn(model, micro[rank]))
        assert scaler.scale == turns.scales[index]
        b.step()
        assert engine.last_step(b).skipped == (turns.falls and index == 0)
        assert scaler.scale == (turns.scales[1] if index == 0 else 2 * turns.scales[1])
        if index == 1 or not turns.held:
            if turns.clip_norm is not None:
                engine.clip_grad_norm_(a, turns.clip_norm)
            if turns.clip_value is not None:
                engine.clip_grad_value_(a, turns.clip_value)
            a.step()
            outcome = engine.last_step(a)
            assert not outcome.skipped
            norms.append(outcome.grad_norm)
            a.zero_grad()
    assert scaler.scale == 2 * turns.scales[1]  # once per backward, not per step
    engine.release()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, norms


def turns_in_torch(turns: Turns, world: int) -> tuple[dict[str, Tensor], list[float]]:
    """In one process; a scale has no effect but on what 16 bits round."""
    master, low = place.placed(make_model()), turns.precision.param_dtype
    working = master if low is None else cast(copy.deepcopy(master), low, turns.precision.keep_norms)
    a, b = matrices_and_vectors(master)
    of_a = [p for group in a.param_groups for p in group["params"]]
    held: dict[int, Tensor] = {}
    norms = []
    for index, (micro,) in enumerate(turns.batches(world)):
        scale = 1.0 if low is None else turns.scales[index]
        gradients = reduce_ranks([rank_gradients(working, batch, turns.loss_fn, 1, scale) for batch in micro], None)
        for parameter, gradient in zip(master.parameters(), gradients, strict=True):
            parameter.grad = gradient.float() / scale
        for parameter in of_a:
            if id(parameter) in held:
                parameter.grad = held[id(parameter)] + parameter.grad
        held = {id(p): p.grad for p in of_a} if turns.held else {}
        if all_finite(p.grad for group in b.param_groups for p in group["params"]):
            b.step()
        if index == 1 or not turns.held:
            norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in of_a)))
            for parameter in of_a:
                if turns.clip_norm is not None:
                    parameter.grad.mul_(min(1.0, turns.clip_norm / (norms[-1] + 1e-6)))
                if turns.clip_value is not None:
                    parameter.grad.clamp_(-turns.clip_value, turns.clip_value)
            a.step()
        follow(working, master)
    return {name: value.detach().clone() for name, value in master.state_dict().items()}, norms


@every_stage
@pytest.mark.parametrize("held", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["held", "each"])
@pytest.mark.parametrize("falls", [False, True], ids=["grows", "falls"])
def test_gradients_outlive_the_scale_they_were_made_with(pool: RankPool, stage: int, falls: bool, held: bool) -> None:
    for precision, clip in ((FP32, {}), (MIXED, CLIPS[1]), (MIXED, CLIPS[2])):
        turns = Turns(precision, falls, held, **clip)
        expected, expected_norms = turns_in_torch(turns, pool.world_size)
        setup = Setup(stage, offload=stage > 1)
        for weights, norms in pool.run_within(TIMEOUT, take_turns, turns, setup):
            assert norms == pytest.approx(expected_norms, rel=1e-12)
            assert_equal(weights, expected)


@quiet
@pytest.mark.parametrize("consecutive", [False, True])
def test_a_clean_optimizer_does_not_hide_that_the_other_overflows(consecutive: bool) -> None:
    """B's gradient, twice the scale, fits into fp16 below 2^15; A steps first, from the same backward."""
    model = nn.ModuleDict({name: nn.Linear(3, 1, bias=False) for name in "ab"})
    a, b = (torch.optim.SGD(part.parameters(), lr=1e-3) for part in model.values())
    scaler = DynamicLossScaler(2.0**16, hysteresis=2, consecutive_hysteresis=consecutive)
    setup = Setup(2, precision=MixedPrecisionPolicy(torch.float16))
    engine = driver.make_engine(model, setup, Mesh.single(), optimizers=[a, b], scaler=scaler)
    engine.attach([make_updater(optimizer, engine, "off") for optimizer in (a, b)])
    x = torch.ones(1, 3, dtype=torch.float16)
    for _ in range(10):
        a.zero_grad()
        b.zero_grad()
        driver.backward(engine, model["a"](x).float().sum() * 1e-3 + model["b"](x).float().sum() * 2)
        a.step()
        b.step()
    assert not engine.last_step(b).skipped
    assert scaler.scale <= 2.0**14


def test_an_overflow_that_is_cleared_one_by_one_skips_no_later_step() -> None:
    """As in a GAN without toggling, whose generator's loss reaches the discriminator."""
    model = nn.ModuleDict({name: nn.Linear(3, 1) for name in "gd"})
    g, d = (torch.optim.SGD(part.parameters(), lr=1e-3) for part in model.values())
    scaler = DynamicLossScaler(1024, hysteresis=1)
    engine = driver.make_engine(model, Setup(2), Mesh.single(), optimizers=[g, d], scaler=scaler)
    engine.attach([make_updater(optimizer, engine, "off") for optimizer in (g, d)])
    x = torch.ones(1, 3)
    driver.backward(engine, model["g"](x).sum() + model["d"](x).sum() * math.inf)
    for parameter in model["d"].parameters():
        parameter.grad = None
    g.step()  # its gradients stay until its next turn
    driver.backward(engine, model["d"](x).sum())
    d.step()
    assert (scaler.scale, engine.skipped_steps) == (1024, 0)


def test_growth_that_the_next_optimizers_overflow_undoes_is_no_backoff() -> None:
    """Nothing falls below the scale that the backward had: no warning (an error here) says so."""
    model = nn.ModuleDict({name: nn.Linear(3, 1, bias=False) for name in "ab"})
    a, b = (torch.optim.SGD(part.parameters(), lr=1e-3) for part in model.values())
    scaler = DynamicLossScaler(1024, window=1, hysteresis=2)
    engine = driver.make_engine(model, Setup(2), Mesh.single(), optimizers=[a, b], scaler=scaler)
    engine.attach([make_updater(optimizer, engine, "off") for optimizer in (a, b)])
    x = torch.ones(1, 3)
    driver.backward(engine, model["a"](x).sum() + model["b"](x).sum() * math.inf)
    a.step()
    assert scaler.scale == 2048
    b.step()
    assert (scaler.scale, engine.skipped_steps) == (1024, 1)


# ------------------------------------------------------------------------------------------------------- the engine


def started(setup: Setup, scaler: LossScaler | None, **options: Any) -> Session:
    make_optimizer = models.optimizer_factory("adamw")
    rank = dist.get_rank()
    return driver.start(make_model(rank), make_optimizer, setup, Meshes().of(setup), scaler=scaler, **options)


def one_batch(world: int, planted_rank: int | None = None) -> Tensor:
    flagged = models.never if planted_rank is None else Place(0, 0, planted_rank)
    return models.make_batches(1, 1, world, flagged=flagged)[0][0][dist.get_rank()]


def true_step(session: Session, planted_rank: int | None = None, bad: float = math.inf) -> None:
    batch = one_batch(dist.get_world_size(), planted_rank)
    driver.run_step(session, [batch], functools.partial(fp16_loss, bad=bad))


def check_unscaled_backward(stage: int) -> None:
    session = started(Setup(stage, precision=TRUE), StaticLossScaler(SCALE))
    with pytest.raises(RuntimeError, match="manual_backward"):
        fp16_loss(session.model, one_batch(dist.get_world_size())).backward()


@every_stage
def test_backward_of_an_unscaled_loss_raises(pool: RankPool, stage: int) -> None:
    pool.run(check_unscaled_backward, stage)


def plain_scaled_backward(setup: Setup, message: bool) -> dict[str, Tensor]:
    """A step as the message of an unscaled backward advises it, and as a strategy makes it."""
    session = started(setup, StaticLossScaler(SCALE))
    loss = fp16_loss(session.model, one_batch(dist.get_world_size()))
    if message:
        session.engine.scale_loss(loss).backward()
    else:
        driver.backward(session.engine, loss)
    session.optimizer.step()
    return driver.finish(session).weights


def test_backward_of_a_loss_scaled_by_hand_is_a_backward(pool2: RankPool) -> None:
    setup = Setup(3, precision=TRUE)
    for by_hand, driven in zip(
        pool2.run(plain_scaled_backward, setup, True), pool2.run(plain_scaled_backward, setup, False), strict=True
    ):
        assert_equal(by_hand, driven)


def test_without_a_scale_a_plain_backward_is_welcome(pool2: RankPool) -> None:
    pool2.run(check_plain_backward)


def check_plain_backward() -> None:
    session = started(Setup(2, precision=TRUE), StaticLossScaler(1.0))
    fp16_loss(session.model, one_batch(dist.get_world_size())).backward()
    session.optimizer.step()
    assert not session.engine.last_step(session.optimizer).skipped


def overflow_at_the_minimum(setup: Setup, on_min_scale: Any) -> dict[str, float]:
    """An overflow on the last rank, twice the hysteresis before anything is done about it."""
    planted = dist.get_world_size() - 1
    scaler = DynamicLossScaler(8.0, window=2, min_scale=8.0, hysteresis=2, on_min_scale=on_min_scale)
    session = started(setup, scaler)
    true_step(session)
    true_step(session, planted)  # tolerated
    before, state = snapshot(session), scaler.state_dict()
    raises = pytest.raises(LossScaleError, match=rf"bf16.*: the gradient of {PLANTED}$")
    with raises if on_min_scale == "raise" else contextlib.nullcontext():
        true_step(session, planted)
    assert_equal(snapshot(session), before)
    if on_min_scale == "raise":
        assert scaler.state_dict() == state
    else:
        check_skipped(session, before)
        assert scaler.scale == 8.0
        true_step(session)
        assert not session.engine.last_step(session.optimizer).skipped
        assert snapshot(session).keys() == before.keys()
        assert any(not torch.equal(value, before[name]) for name, value in snapshot(session).items())
    return {**scaler.state_dict(), "skipped": session.engine.skipped_steps}


@every_stage
@pytest.mark.parametrize("on_min_scale", ["raise", "continue"])
def test_an_overflow_at_the_smallest_scale(pool: RankPool, stage: int, on_min_scale: str) -> None:
    setup = Setup(stage, offload=stage > 1, native="auto", precision=TRUE)
    first, *others = pool.run(overflow_at_the_minimum, setup, on_min_scale)
    assert all(other == first for other in others)
    assert first["skipped"] == 2


def step_on_nonfinite(setup: Setup, scaled: bool, skip_nonfinite: bool, clip: float | None) -> tuple[bool, bool]:
    """Whether the step was skipped, and whether the planted parameter is still finite."""
    scaler = StaticLossScaler(SCALE) if scaled else None
    session = started(setup, scaler, skip_nonfinite=skip_nonfinite)
    loss_fn = functools.partial(fp16_loss, bad=math.nan)
    driver.run_step(session, [one_batch(dist.get_world_size(), 0)], loss_fn, clip_norm=clip)
    skipped = session.engine.last_step(session.optimizer).skipped
    assert session.engine.skipped_steps == skipped
    weights = driver.finish(session).weights
    others = [name for name, value in weights.items() if not value.isfinite().all() and name != PLANTED]
    assert others == []
    return skipped, bool(weights[PLANTED].isfinite().all())


@every_stage
def test_a_scaler_skips_whatever_skip_nonfinite_says(pool: RankPool, stage: int) -> None:
    for scaled, skip_nonfinite, precision, clip in (
        (False, False, FP32, CLIP),
        (False, True, TRUE, None),
        (True, False, FP32, None),
        (True, False, TRUE, CLIP),
    ):
        setup = Setup(stage, offload=stage > 1, precision=precision)
        results = pool.run(step_on_nonfinite, setup, scaled, skip_nonfinite, clip)
        skips = scaled or skip_nonfinite
        assert results == [(skips, skips)] * pool.world_size


def check_hooks(setup: Setup) -> None:
    """Step hooks run around an update and see what it wrote (whole parameters, where they are whole)."""
    session = started(setup, DynamicLossScaler(SCALE))
    fired: list[str] = []
    seen: dict[str, Tensor] = {}

    def after(*_: Any) -> None:
        fired.append("after")
        if setup.stage < 3:
            seen.update({name: value.to("cpu", copy=True) for name, value in session.model.state_dict().items()})

    session.optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    session.optimizer.register_step_post_hook(after)
    true_step(session, planted_rank=0)
    assert (fired, seen) == ([], {})
    start = driver.copy_of_parameters(session.engine)
    true_step(session)
    assert fired == ["before", "after"]
    if setup.stage < 3:
        assert_equal(seen, driver.copy_of_parameters(session.engine))
        assert not torch.equal(seen["tokens.weight"], start["tokens.weight"])


@every_stage
def test_step_hooks_run_where_a_step_is_made(pool: RankPool, stage: int) -> None:
    pool.run(check_hooks, Setup(stage, offload=stage > 1, precision=TRUE))


def calls_of_steps(setup: Setup, scaled: bool) -> list[Counter[str]]:
    """Collectives of a clean step, of a tolerated overflow, of one that lowers the scale, of another clean step."""
    mesh = Meshes().of(setup)
    scaler = DynamicLossScaler(SCALE, hysteresis=2) if scaled else None
    session = driver.start(make_model(), models.optimizer_factory("adamw"), setup, mesh, scaler=scaler)
    groups = list({id(group): group for group in (mesh.world, mesh.shard, mesh.replica)}.values())
    counted = []
    for planted_rank in (None, None, 0, 0, None):
        for group in groups:
            group.reset_counters()
        true_step(session, planted_rank)
        session.engine.settle()
        counted.append(sum((group.calls for group in groups), Counter()))
    return counted[1:]  # the first step's buckets are whole from the start


@every_stage
def test_an_overflow_costs_no_collective(pool: RankPool, stage: int) -> None:
    # One bucket per unit and dtype, so that fp16 has as many as fp32.
    setup = Setup(stage, bucket_size_mb=25.0)
    scaled = pool.run(calls_of_steps, dataclasses.replace(setup, precision=TRUE), True)
    (clean, tolerated, lowering, last), *others = scaled
    assert all(other == scaled[0] for other in others)
    assert clean == last == pool.run(calls_of_steps, setup, False)[0][0]
    assert clean["all_reduce"] == (2 if stage == 0 else 1)
    # What a skip spares are the gathers of new parameters; at stage 3 every pass gathers.
    spared = Counter() if stage in (0, 3) else Counter(all_gather=clean["all_gather"])
    assert tolerated == lowering == clean - spared


class Reads(TorchDispatchMode):
    """Counts how often the host reads one number of a tensor: on a device, each is a wait for it."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("offload", [False, True])
def test_gradients_that_are_not_finite_are_named_without_a_wait_for_each(offload: bool) -> None:
    setup = Setup(2, offload=offload)
    session = driver.start(models.make_model("transformer"), models.optimizer_factory("sgd"), setup, Mesh.single())
    named = dict(session.model.named_parameters())
    chosen = ["blocks.0.up.weight", "norm.weight"]
    driver.backward(session.engine, sum((named[name] * torch.inf).sum() for name in chosen))  # type: ignore[arg-type]
    assert session.engine.stats(session.optimizer).found_inf
    with Reads() as reads:
        names = session.engine._clipping.nonfinite_names(session.optimizer)
    assert set(names.split(", ")) == set(chosen)
    assert reads.count == 0
