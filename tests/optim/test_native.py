"""Kernels over shards: torch's optimizers and the CPU optimizers, for any stage, layout and number of ranks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engine import driver
from engine.cases import describe
from engine.driver import Meshes, RankResult, Session, Setup, assert_close, assert_equal
from helpers import models
from helpers.pairs import pairwise
from helpers.ranks import RankPool, ranks, slow_unless
from helpers.reference import Trained
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR

from lightning_zero import CPUSGD, CPUAdagrad, CPUAdam, CPUAdamW, CPULion
from lightning_zero.checkpoint.state import (
    FullPrecision,
    load_module_state_dict,
    load_optimizer_state_dict,
    module_state_dict,
)
from lightning_zero.checkpoint.state import optimizer_state_dict as saved_optimizer
from lightning_zero.engine import Engine
from lightning_zero.ops import BLOCK, join_
from lightning_zero.sharding import Mesh, MixedPrecisionPolicy
from lightning_zero.sharding.masters import SplitMaster
from lightning_zero.storage import DeviceStore
from lightning_zero.storage.rested import Resident
from lightning_zero.update import CPUOptimizer, NativeUpdater, TorchUpdater, make_updater

FP32, BF16, FP16, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
STAGES = (0, 1, 2, 3)
LAYOUTS = ("fp32", "split")
STEPS = 4
UNCHANGED = MixedPrecisionPolicy()
POLICIES = {
    BF16: MixedPrecisionPolicy(param_dtype=BF16, keep_norms=False),
    # In fp16 the smallest gradients would not survive a division by the number of ranks.
    FP16: MixedPrecisionPolicy(param_dtype=FP16, keep_norms=False, reduce_dtype=FP32),
}

CLASSES: dict[str, Callable[..., Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "cpu_adam": CPUAdam,
    "cpu_adamw": CPUAdamW,
    "cpu_adagrad": CPUAdagrad,
    "cpu_lion": CPULion,
    "cpu_sgd": CPUSGD,
}
Options = tuple[tuple[str, Any], ...]


def make_optimizer(model: nn.Module, name: str, options: Options) -> Optimizer:
    """Two groups: matrices have weight decay, the rest none."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return CLASSES[name](groups, **dict(options))


@dataclasses.dataclass(frozen=True)
class Job:
    """One training, whose batches are the same on every rank."""

    setup: Setup
    optimizer: str
    options: Options = ()
    model: str = "mlp"
    flagged: Callable[[int, int, int], bool] = models.never
    steps: int = STEPS

    @property
    def dtype(self) -> torch.dtype:
        return self.setup.precision.param_dtype or FP32

    def make_model(self) -> nn.Module:
        """In fp32, with weights that 16 bits hold."""
        return models.make_model(self.model).to(self.dtype).float()

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        return make_optimizer(model, self.optimizer, self.options)

    def batches(self, steps: range | None = None) -> list[Tensor]:
        made = models.make_batches(2 * STEPS, 1, 1, flagged=self.flagged)
        return [made[step][0][0] for step in steps or range(self.steps)]

    def start(self, meshes: Meshes | None = None) -> Session:
        mesh = Mesh.single() if meshes is None else meshes.of(self.setup)
        return driver.start(self.make_model(), self.make_optimizer, self.setup, mesh)


def train_job(job: Job, meshes: Meshes | None) -> RankResult:
    session = job.start(meshes)
    assert type(session.updater) is (
        TorchUpdater if job.setup.native == "off" and "cpu_" not in job.optimizer else NativeUpdater
    ), job
    for batch in job.batches():
        driver.run_step(session, [batch])
    return driver.finish(session)


def train_jobs(jobs: Sequence[Job]) -> list[RankResult]:
    meshes = Meshes()
    return [train_job(job, meshes) for job in jobs]


def run_jobs(pool: RankPool, jobs: Sequence[Job]) -> list[Trained]:
    per_rank = pool.run_within(60.0 + len(jobs), train_jobs, jobs)
    return [driver.combine(results) for results in zip(*per_rank, strict=True)]


@functools.cache
def alone(job: Job) -> Trained:
    """The same training by the optimizer itself, on one plain model."""
    model = job.make_model().to(job.dtype)
    optimizer = job.make_optimizer(model)
    for batch in job.batches():
        optimizer.zero_grad()
        models.next_token_loss(model, batch).backward()
        optimizer.step()
    weights, states = {}, {}
    masters: dict[int, Tensor] = {}
    kept: Any = optimizer.state.items()
    kept = dict(optimizer.portable(kept) if isinstance(optimizer, CPUOptimizer) else kept)
    for name, p in model.named_parameters():
        state = dict(kept.get(p, {}))
        masters[id(p)] = master_of(p.detach(), state)
        state = {k: v for k, v in state.items() if k not in ("master", "remainder")}
        if state:
            states[name] = state
    for name, value in model.state_dict(keep_vars=True).items():
        weights[name] = masters[id(value)]
    return Trained(weights, states, [])


def master_of(p: Tensor, state: dict[str, Tensor]) -> Tensor:
    if "remainder" in state:
        whole = torch.empty(p.numel())
        join_(whole, p.contiguous().view(-1), state["remainder"].view(-1))
        return whole.view(p.shape)
    return state.get("master", p).float().clone()


def like_alone(job: Job) -> Job:
    """What the standalone optimizer does not depend on."""
    return dataclasses.replace(job, setup=Setup(precision=job.setup.precision))


def check(pool: RankPool, jobs: Sequence[Job]) -> None:
    """Every job gives the standalone optimizer's bits; all that do not are listed."""
    wrong = []
    for job, trained in zip(jobs, run_jobs(pool, jobs), strict=True):
        try:
            driver.assert_trained(trained, alone(like_alone(job)))
        except AssertionError as error:
            wrong.append(f"{describe(job)}: {str(error)[:300]}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(jobs)} jobs", *wrong[:6]])


def options(**given: Any) -> Options:
    return tuple(given.items())


# ------------------------------------------------------------------------------------------ torch's own, by the kernels

TORCHS = [
    ("adam", options(lr=1e-2)),
    ("adam", options(lr=1e-2, amsgrad=True, maximize=True)),
    ("adamw", options(lr=1e-2, betas=(0.9, 0.95))),
    ("adamw", options(lr=1e-2, amsgrad=True)),
    ("adamw", options(lr=1e-2, maximize=True)),
    ("adagrad", options(lr=1e-1)),
    ("adagrad", options(lr=1e-1, initial_accumulator_value=0.3, lr_decay=0.1, maximize=True)),
    ("sgd", options(lr=1e-1)),
    ("sgd", options(lr=1e-1, maximize=True)),
    ("sgd", options(lr=1e-1, momentum=0.9)),
    ("sgd", options(lr=1e-1, momentum=0.9, nesterov=True)),
    ("sgd", options(lr=1e-1, momentum=0.9, dampening=0.5)),
]


def native_and_off(job: Job) -> list[Job]:
    return [dataclasses.replace(job, setup=dataclasses.replace(job.setup, native=n)) for n in ("auto", "off")]


def check_torchs(pool: RankPool, jobs: Sequence[Job]) -> None:
    """Within the kernels' bound of torch's own step, SGD bit for bit; state described alike."""
    trained = run_jobs(pool, [each for job in jobs for each in native_and_off(job)])
    for job, native, off in zip(jobs, trained[::2], trained[1::2], strict=True):
        compare = assert_equal if job.optimizer == "sgd" else functools.partial(assert_close, rtol=1e-5, atol=1e-7)
        driver.assert_trained(native, off, compare)
        for name, state in off.optimizer_state.items():
            described = {k: (v.dtype, v.shape, v.device) for k, v in state.items()}
            assert {k: (v.dtype, v.shape, v.device) for k, v in native.optimizer_state[name].items()} == described


@ranks(2)
@pytest.mark.parametrize("stage", slow_unless((1, 3), STAGES))
def test_torchs_optimizers_run_by_kernels(pool: RankPool, stage: int) -> None:
    check_torchs(pool, [Job(Setup(stage, offload=True), name, given) for name, given in TORCHS[stage % 2 :: 2]])


def torchs_jobs() -> list[Job]:
    """Every optimizer at one stage, where some have either dtype and some either model."""
    jobs = []
    for stage in STAGES:
        for number, (name, given) in enumerate(TORCHS[stage::4]):
            dtype = (FP32, BF16)[(number + stage) % 2]
            setup = Setup(stage, offload=True, precision=POLICIES.get(dtype, UNCHANGED))
            used = (("transformer", models.never), ("optional", models.only_in_step_1))[(number + stage // 2) % 2]
            # In bf16 one step: a last bit of a master may decide how it is rounded, and so the next gradient.
            jobs.append(Job(setup, name, given, *used, STEPS if dtype == FP32 else 1))
    return jobs


@pytest.mark.slow
@ranks(2, 4)
def test_all_of_torchs_optimizers_run_by_kernels(pool: RankPool) -> None:
    jobs = torchs_jobs()
    check_torchs(pool, jobs if pool.world_size == 2 else jobs[::4] + jobs[1::4])


@ranks(2)
@pytest.mark.parametrize(
    ("stage", "flagged"),
    [
        (1, models.not_in_step_1),
        pytest.param(3, models.only_in_step_1, marks=pytest.mark.slow),
    ],
)
def test_a_parameter_that_rests_keeps_its_own_step(
    pool: RankPool, stage: int, flagged: Callable[[int, int, int], bool]
) -> None:
    setup = Setup(stage, offload=True)
    check_torchs(pool, [Job(setup, name, given, "optional", flagged) for name, given in TORCHS[2::4]])
    cpu = [Job(setup, name, given, "optional", flagged) for name, given in CPUS[:3]]
    bf16 = Setup(stage, offload=True, precision=POLICIES[BF16])
    cpu += [Job(bf16, "cpu_adamw", options(master_layout="split", state_dtype=BF16), "optional", flagged)]
    check(pool, cpu)


# --------------------------------------------------------------------------- the CPU optimizers: the same bits as alone

CPUS = [
    ("cpu_adamw", options(lr=1e-2)),
    ("cpu_adam", options(lr=1e-2, amsgrad=True)),
    ("cpu_adagrad", options(lr=1e-1, initial_accumulator_value=0.3, lr_decay=0.1)),
    ("cpu_lion", options(lr=1e-3)),
    ("cpu_sgd", options(lr=1e-1)),
    ("cpu_sgd", options(lr=1e-1, momentum=0.9, dampening=0.5)),
]


def cpu_jobs(setup: Setup, layout: str, state_dtype: torch.dtype, model: str = "mlp") -> list[Job]:
    numbers = options(master_layout=layout, state_dtype=state_dtype, seed=11)
    return [Job(setup, name, given + numbers, model) for name, given in CPUS]


@ranks(2, slow=(1,))
@pytest.mark.parametrize("stage", STAGES)
def test_shards_have_the_bits_of_the_optimizer_alone(pool: RankPool, stage: int) -> None:
    """bf16 parameters with split masters, where both round alike; half of them with bf16 state."""
    setup = Setup(stage, offload=True, precision=POLICIES[BF16])
    jobs = cpu_jobs(setup, "split", BF16)[::2] + cpu_jobs(setup, "split", FP32)[1::2]
    check(pool, jobs + cpu_jobs(Setup(stage, offload=stage % 2 == 0), "fp32", BF16)[stage % 2 :: 2])


@ranks(2, slow=(1, 4))
def test_shards_in_blocks_have_the_bits_of_the_optimizer_alone(pool: RankPool) -> None:
    """8 bits an element; shard borders cut parameters, and no block."""
    jobs = []
    for stage, dtype, layout in ((1, BF16, "split"), (2, FP32, "fp32"), (3, BF16, "split"), (3, FP16, "fp32")):
        numbers = options(master_layout=layout, state_dtype=INT8, seed=11)
        setup = Setup(stage, offload=True, precision=POLICIES.get(dtype, UNCHANGED))
        jobs += [Job(setup, name, given + numbers, "wide") for name, given in (CPUS[0], CPUS[3])]
    check(pool, jobs)


@ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_fp32_masters_have_the_bits_of_the_optimizer_alone(pool: RankPool, stage: int) -> None:
    setup = Setup(stage, offload=True, precision=POLICIES[BF16])
    check(pool, cpu_jobs(setup, "fp32", FP32))


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_shards_have_the_bits_of_the_optimizer_alone(pool: RankPool, stage: int) -> None:
    setup = Setup(stage, offload=True, precision=POLICIES[FP16])
    jobs = [cpu_jobs(setup, layout, state)[:3] for layout, state in itertools.product(LAYOUTS, (FP32, BF16))]
    check(pool, [job for some in jobs for job in some])


@pytest.mark.slow
@ranks(2, 4)
def test_all_shards_have_the_bits_of_the_optimizer_alone(pool: RankPool) -> None:
    """A job for every stage and dtype, each with another optimizer, layout and dtype of state."""
    some = []
    for number, (stage, dtype) in enumerate(itertools.product(STAGES, (FP32, BF16, FP16))):
        offload = (number + stage + pool.world_size // 2) % 2 == 0
        setup = Setup(stage, offload=offload, precision=POLICIES.get(dtype, UNCHANGED))
        layouts = LAYOUTS if dtype != FP32 else LAYOUTS[stage % 2 :][:1]  # fp32 parameters are their own masters
        numbers = itertools.product(layouts, (FP32, BF16))
        jobs = [job for layout, state in numbers for job in cpu_jobs(setup, layout, state, "transformer")]
        some.append(jobs[(5 * number + 7 * (pool.world_size == 4)) % len(jobs)])
    check(pool, some)


@pairwise(layout=LAYOUTS, stage=STAGES)
def test_halfway_values_round_as_the_optimizer_alone(stage: int, layout: str) -> None:
    """1 + 2^-8 is halfway between two bf16 numbers: both layouts and the optimizer alone agree."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    setup = Setup(stage, offload=True, precision=POLICIES[BF16])
    session = driver.start(
        model,
        lambda m: CPUSGD(m.parameters(), lr=1.0, master_layout=layout),  # type: ignore[arg-type]
        setup,
        Mesh.single(),
    )
    batch = torch.full((1, 1), -(2.0**-8), dtype=BF16)
    driver.run_step(session, [batch], lambda m, x: m(x).sum())
    result = driver.finish(session)
    assert result.weights["weight"].item() == 1 + 2.0**-8
    assert result.seen["weight"].item() == 1 + 2.0**-7


@pytest.mark.parametrize("stage", STAGES)
def test_a_first_weight_halfway_rounds_alike_in_both_layouts(stage: int) -> None:
    seen = []
    for layout in LAYOUTS:
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(1 + 2.0**-8)
        setup = Setup(stage, offload=True, precision=POLICIES[BF16])
        make = functools.partial(CPUSGD, lr=0.0, master_layout=layout)
        session = driver.start(model, lambda m, make=make: make(m.parameters()), setup, Mesh.single())
        seen.append(driver.finish(session).seen["weight"].item())
    assert seen[0] == seen[1]


# ----------------------------------------------------------------------------------------------------- saved and loaded


def start_late(job: Job) -> Session:
    """On an engine that was made before the optimizer was known."""
    model = job.make_model()
    engine = driver.make_engine(model, job.setup)
    optimizer = job.make_optimizer(model)
    updater = make_updater(optimizer, engine)
    engine.attach([updater])
    return Session(model, engine, optimizer, updater)


def save(
    job: Job, steps: range, saved: dict[str, Any] | None = None, *, several: bool = True, late: bool = False
) -> dict[str, Any]:
    """Train, from a saved state or from the start, and take the state; whole on rank 0."""
    session = start_late(job) if late else job.start(Meshes() if several else None)
    if saved is not None:
        load_module_state_dict(session.engine, saved["model"])
        load_optimizer_state_dict(session.engine, session.updater, saved["optimizer"])
    for batch in job.batches(steps):
        driver.run_step(session, [batch])
    return copy.deepcopy(
        {"model": module_state_dict(session.engine), "optimizer": saved_optimizer(session.engine, session.updater)}
    )


def assert_same_saved(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_equal(actual["model"], expected["model"])
    assert actual["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    for name, state in expected["optimizer"]["state"].items():
        got = actual["optimizer"]["state"][name]
        assert {k: v.dtype for k, v in got.items()} == {k: v.dtype for k, v in state.items()}
        assert_equal(got, state)


@pytest.mark.parametrize(
    ("stages", "layouts"), [((1, 3), ("split", "split")), ((3, 0), ("split", "fp32")), ((2, 2), ("fp32", "split"))]
)
@pytest.mark.parametrize("dtype", [FP32, pytest.param(BF16, marks=pytest.mark.slow)])
def test_state_moves_across_ranks_stages_and_layouts(
    pool2: RankPool, pool4: RankPool, stages: tuple[int, int], layouts: tuple[str, str], dtype: torch.dtype
) -> None:
    check_move(pool2, pool4, stages, layouts, dtype, BF16, "mlp")


def check_move(
    pool2: RankPool,
    pool4: RankPool,
    stages: tuple[int, int],
    layouts: tuple[str, str],
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    model: str,
) -> None:
    def job(index: int, **given: Any) -> Job:
        setup = Setup(stages[index], offload=True, precision=POLICIES.get(dtype, UNCHANGED))
        numbers = options(lr=1e-2, master_layout=layouts[index], state_dtype=state_dtype, seed=2)
        return Job(setup, "cpu_adamw", numbers, model, **given)

    saved = pool2.run(save, job(0), range(3))[0]
    whole = pool2.run(save, job(0), range(6))[0]
    resumed = pool4.run(save, job(1), range(3, 6), saved)[0]
    assert_same_saved(resumed, whole)


def test_state_in_blocks_moves_across_ranks(pool2: RankPool, pool4: RankPool) -> None:
    check_move(pool2, pool4, (1, 3), ("split", "fp32"), BF16, INT8, "wide")


def check_resume(job: Job) -> None:
    saved, whole = save(job, range(3), several=False), save(job, range(6), several=False)
    assert_same_saved(save(job, range(3, 6), saved, several=False), whole)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "given"), CPUS)
def test_a_resumed_run_has_the_same_bits(
    name: str, given: Options, layout: str, state_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    setup = Setup(3, offload=True, precision=POLICIES.get(dtype, UNCHANGED))
    check_resume(Job(setup, name, given + options(master_layout=layout, state_dtype=state_dtype)))


@pytest.mark.parametrize("name", ["cpu_adamw", "cpu_lion"])
def test_a_resumed_run_in_blocks_has_the_same_bits(name: str) -> None:
    setup, numbers = Setup(3, offload=True, precision=POLICIES[BF16]), options(master_layout="split", state_dtype=INT8)
    check_resume(Job(setup, name, options(lr=1e-2) + numbers, "wide"))


def cuts_blocks(job: Job) -> bool:
    buckets = start_late(job).engine.buckets
    return any(segment.param_start % BLOCK for bucket in buckets for segment in bucket.segments)


@ranks(2)
def test_blocks_that_a_shard_cuts_have_a_scale_on_both_sides(pool: RankPool) -> None:
    job = Job(Setup(2, offload=True), "cpu_adamw", options(lr=1e-2, state_dtype=INT8, seed=11), "wide")
    assert pool.run(cuts_blocks, job) == [False, True]
    saved, whole = (pool.run(save, job, range(stop), late=True)[0] for stop in (3, 6))
    resumed = pool.run(save, job, range(3, 6), saved, late=True)[0]
    assert_same_saved(resumed, whole)


@pytest.mark.parametrize(("name", "given"), TORCHS)
def test_torchs_optimizers_resume_with_the_same_bits(name: str, given: Options) -> None:
    check_resume(Job(Setup(2, offload=True, native="auto"), name, given))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_optimizers_own_state_dict_is_loaded_into_shards(stage: int, layout: str) -> None:
    """From plain training of a 16-bit model, whose masters are in the optimizer's state: nothing else is kept of it."""
    job = Job(
        Setup(stage, offload=True, precision=POLICIES[BF16]),
        "cpu_adamw",
        options(lr=1e-2, master_layout=layout, state_dtype=BF16),
    )
    model = job.make_model().to(BF16)
    optimizer = job.make_optimizer(model)
    for batch in job.batches(range(3)):
        optimizer.zero_grad()
        models.next_token_loss(model, batch).backward()
        optimizer.step()
    session = job.start()
    load_module_state_dict(session.engine, model.state_dict())
    load_optimizer_state_dict(session.engine, session.updater, optimizer.state_dict())
    saved = saved_optimizer(session.engine, session.updater)["state"]
    assert {key for state in saved.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}
    for name, p in model.named_parameters():
        assert torch.equal(saved[name]["exp_avg"], optimizer.state[p]["exp_avg"])
    driver.run_step(session, [job.batches(range(3, 4))[0]])
    held = {name for b in session.engine.buckets for name in session.updater.state_of(b).flat}
    assert held == {"exp_avg", "exp_avg_sq"}


def test_a_state_dict_of_shards_is_loaded_by_the_optimizer_alone() -> None:
    job = Job(Setup(2, offload=True), "cpu_adamw", options(lr=1e-2))
    saved, whole = save(job, range(3), several=False), save(job, range(6), several=False)
    model = job.make_model()
    model.load_state_dict(saved["model"])
    optimizer = job.make_optimizer(model)
    optimizer.load_state_dict(saved["optimizer"])
    for batch in job.batches(range(3, 6)):
        optimizer.zero_grad()
        models.next_token_loss(model, batch).backward()
        optimizer.step()
    assert_equal({n: p.detach() for n, p in model.named_parameters()}, whole["model"])


def test_amsgrad_that_comes_with_the_checkpoint_keeps_every_maximum() -> None:
    """The groups change when state is loaded, so that names of state known before are not all there are."""

    def session(amsgrad: bool) -> Session:
        model = nn.Linear(1, 1)  # one element each: of the shape of no other thing than a scalar
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        make = functools.partial(CPUAdamW, lr=0.1, amsgrad=amsgrad)
        return driver.start(model, lambda m: make(m.parameters()), Setup(2, offload=True), Mesh.single())

    def step(session: Session, size: float) -> None:
        driver.run_step(session, [torch.full((1, 1), size)], lambda m, x: m(x).sum() * x.sum())

    first, second = session(True), session(False)
    step(first, 100.0)
    state = copy.deepcopy(saved_optimizer(first.engine, first.updater))
    assert state["state"]["weight"]["max_exp_avg_sq"].shape == (1, 1)
    load_module_state_dict(second.engine, module_state_dict(first.engine))
    load_optimizer_state_dict(second.engine, second.updater, state)
    for _ in range(2):
        step(first, 0.5)
        step(second, 0.5)
    one, other = (saved_optimizer(s.engine, s.updater)["state"] for s in (first, second))
    for name in one:
        assert_equal(other[name], one[name])


def load_halfway() -> list[float]:
    """The values of all ranks' shards, as this rank sees them."""
    model = nn.Linear(4, 4, bias=False).bfloat16()
    with FullPrecision() as loaded:
        model.load_state_dict({"weight": torch.full((4, 4), 1 + 2.0**-8)})
    setup = Setup(1, offload=True, precision=POLICIES[BF16])
    session = driver.start(model, lambda m: CPUSGD(m.parameters(), lr=0.0), setup, Mesh.create())
    loaded.give_to(session.engine)
    return model.weight.detach().float().unique().tolist()  # type: ignore[no-any-return]


@ranks(2)
def test_all_ranks_see_how_a_loaded_halfway_value_is_rounded(pool: RankPool) -> None:
    """By the optimizer's rule, and not as the copy rounded it that filled the parameters before there were masters."""
    assert pool.run(load_halfway) == [[1 + 2.0**-7]] * 2


def test_an_edit_just_before_other_parameters_are_loaded_stays() -> None:
    setup = Setup(2, precision=POLICIES[BF16])
    session = driver.start(nn.Linear(2, 2), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), setup, Mesh.single())
    with torch.no_grad():
        session.model.get_parameter("bias").fill_(3.0)
    load_module_state_dict(session.engine, {"weight": torch.ones(2, 2)}, strict=False)
    assert_equal(driver.finish(session).weights, {"weight": torch.ones(2, 2), "bias": torch.full((2,), 3.0)})


def test_cleared_sums_are_those_of_a_new_optimizer() -> None:
    """Adagrad's sums start from its initial value."""
    job = Job(Setup(2, offload=True), "cpu_adagrad", options(lr=0.1, initial_accumulator_value=0.5))
    session = job.start()
    session.updater.clear()
    driver.run_step(session, job.batches(range(1)))
    fresh = job.start()
    driver.run_step(fresh, job.batches(range(1)))
    assert_equal(driver.finish(session).weights, driver.finish(fresh).weights)


# -------------------------------------------------------------------------------------------------------------- masters

VALUES = (1.0, -1.5, 1 + 2.0**-9 + 2.0**-20, 3.1415927, 2.0**-24 * 0.7, -(2.0**-27), 0.0, -0.0, 60000.1, 1e-3, -7.7e-5)


def split_master(dtype: torch.dtype, apart: bool) -> tuple[SplitMaster, Tensor]:
    shard = torch.zeros(len(VALUES), dtype=dtype)
    high = Resident(torch.zeros_like(shard)) if apart else None
    master = SplitMaster(Resident(shard), high, Resident(torch.zeros(len(VALUES), dtype=torch.int16)))
    master.keep(0, torch.tensor(VALUES))
    master.write(0, len(VALUES))
    return master, shard


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("apart", [False, True], ids=["one place", "shard elsewhere"])
def test_a_split_master_that_looks_at_its_shard_keeps_what_is_unchanged(apart: bool, dtype: torch.dtype) -> None:
    master, shard = split_master(dtype, apart)
    before = master.read(0, len(VALUES))
    master.derive(0, len(VALUES))
    assert torch.equal(master.read(0, len(VALUES)), before)
    shard[:2] = torch.tensor([0.0, 8.0])
    master.derive(0, len(VALUES))
    after = master.read(0, len(VALUES))
    assert torch.equal(after[2:], before[2:])
    torch.testing.assert_close(after[:2], torch.tensor([0.0, 8.0]), rtol=2.0**-8, atol=1e-7)


@pairwise(value=[0.0, -0.0, 1.0, -2.0, 6e4, 6e-8, torch.inf, -torch.inf], dtype=[BF16, FP16], apart=[False, True])
def test_a_split_master_takes_any_value_over(apart: bool, dtype: torch.dtype, value: float) -> None:
    master, shard = split_master(dtype, apart)
    shard.fill_(value)
    master.derive(0, len(VALUES))
    torch.testing.assert_close(master.read(0, len(VALUES)), shard.float(), rtol=2.0**-8, atol=2.0**-24)


# --------------------------------------------------------------------------------------------------------- users' edits


def edit(session: Session, how: str) -> None:
    parameters = list(session.model.parameters())
    engine: Engine = session.engine
    if how == "writeback":
        with engine.gathered(parameters, writeback=True):
            for p in parameters:
                p.data.fill_(0.5)
        return
    with torch.no_grad(), engine.gathered(parameters):
        for p in parameters:
            {
                "zeroed": p.zero_,
                "scaled": lambda p=p: p.mul_(3),
                "clamped": lambda p=p: p.clamp_(-0.1, 0.1),
                "data": lambda p=p: p.data.fill_(0.5),
                "data zeroed": lambda p=p: p.data.zero_(),
                "one element": lambda p=p: p.view(-1)[-1].fill_(4.0),
            }[how]()


def train_edited(job: Job, how: str) -> tuple[dict[str, Tensor], RankResult]:
    """Trained, edited and trained a little more."""
    session = job.start(Meshes())
    for batch in job.batches():
        driver.run_step(session, [batch])
    session.engine.settle()
    edit(session, how)
    for group in session.optimizer.param_groups:
        group["lr"] = 1e-5
    edited = driver.copy_of_parameters(session.engine)
    for batch in job.batches(range(STEPS, STEPS + 2)):
        driver.run_step(session, [batch])
    return edited, driver.finish(session)


EDITS = ("zeroed", "scaled", "clamped", "data", "data zeroed", "writeback", "one element")


@ranks(2)
@pytest.mark.parametrize(
    ("dtype", "stage", "layout"),
    [
        (BF16, 3, "split"),
        (FP16, 1, "fp32"),
        pytest.param(BF16, 1, "split", marks=pytest.mark.slow),
        pytest.param(BF16, 3, "fp32", marks=pytest.mark.slow),
        pytest.param(FP16, 3, "split", marks=pytest.mark.slow),
    ],
)
def test_edits_reach_the_master(pool: RankPool, dtype: torch.dtype, stage: int, layout: str) -> None:
    wrong = []
    for how in EDITS:
        if stage == 3 and how.startswith("data"):
            continue  # needs writeback=True: documented
        hidden = how.startswith("data")
        setup = Setup(stage, offload=True, precision=POLICIES[dtype], detect_data_edits=hidden)
        job = Job(setup, "cpu_adamw", options(lr=1e-2, master_layout=layout, state_dtype=BF16))
        results = pool.run(train_edited, job, how)
        trained = driver.combine([result for _, result in results])
        for name, expected in results[0][0].items():
            try:
                torch.testing.assert_close(trained.weights[name], expected.float(), rtol=2.0**-7, atol=1e-3)
            except AssertionError as error:
                wrong.append(f"{how}, {dtype}, {name}: {error}")
    assert not wrong, "\n".join([str(len(wrong)), *wrong[:4]])


# ---------------------------------------------------------------------------------------- which updater, and its memory


@pairwise(native=["auto", "off"], offload=[False, True], stage=STAGES)
def test_the_cpu_optimizers_always_run_by_kernels(stage: int, offload: bool, native: driver.NativeOptimizer) -> None:
    session = Job(Setup(stage, offload=offload, native=native), "cpu_adamw").start()
    assert type(session.updater) is NativeUpdater


@pytest.mark.parametrize("name", ["adamw", "sgd", "cpu_adamw"])
def test_a_scheduler_may_end_a_rounding_error_below_zero(name: str) -> None:
    session = Job(Setup(2, offload=True, native="auto"), name, options(lr=1e-3)).start()
    scheduler = LinearLR(session.optimizer, start_factor=0.1, end_factor=0.0, total_iters=4)
    for micro in models.make_batches(6, 1, 1):
        driver.run_step(session, micro[0])
        scheduler.step()
    assert -1e-18 < session.optimizer.param_groups[0]["lr"] < 0


def test_a_group_without_momentum_needs_no_nesterov() -> None:
    """torch's step ignores it there."""

    def make(model: nn.Module) -> Optimizer:
        parameters = list(model.parameters())
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "momentum": 0.0}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)

    trained = []
    for native in ("auto", "off"):
        setup = Setup(2, offload=True, native=native)  # type: ignore[arg-type]
        session = driver.start(models.make_model("mlp"), make, setup, Mesh.single())
        for micro in models.make_batches(3, 1, 1):
            driver.run_step(session, micro[0])
        trained.append(driver.combine([driver.finish(session)]))
    driver.assert_trained(*trained)


class Frozen(CPUAdamW):
    """Its own step clears gradients first."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.zero_()
        return super().step(closure)


def test_a_subclass_with_a_step_of_its_own_is_not_silently_run_without_it() -> None:
    """As for subclasses of torch's: its step runs on the shards, or it is refused."""
    model = models.make_model("mlp")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        make: Any = functools.partial(Frozen, lr=0.1, weight_decay=0.0)
        session = driver.start(model, lambda m: make(m.parameters()), Setup(2, offload=True), Mesh.single())
    except ValueError:
        return
    driver.run_step(session, [models.make_batches(1, 1, 1)[0][0][0]])
    assert_equal(driver.finish(session).weights, before)


@pytest.mark.parametrize("initial", [0.0, 0.5])
def test_a_group_that_joins_later_starts_as_alone(initial: float) -> None:
    """Adagrad's sums from their initial value."""

    def trained(sharded: bool) -> dict[str, Tensor]:
        model = models.make_model("mlp")
        parameters = list(model.parameters())
        optimizer = CPUAdagrad(parameters[:2], lr=0.1, initial_accumulator_value=initial)
        if sharded:
            engine = driver.make_engine(model, Setup(2, offload=True), Mesh.single())
            updater = make_updater(optimizer, engine)
            engine.attach([updater])
            session = Session(model, engine, optimizer, updater)
        for step, (micro,) in enumerate(models.make_batches(3, 1, 1)):
            if step == 1:
                optimizer.add_param_group({"params": parameters[2:]})
            if sharded:
                driver.run_step(session, micro)
            else:
                model.zero_grad()
                models.next_token_loss(model, micro[0]).backward()
                optimizer.step()
        return driver.finish(session).weights if sharded else model.state_dict()

    assert_equal(trained(True), trained(False))


def test_a_store_elsewhere_is_a_clear_error() -> None:
    setup = Setup(2)
    placement = driver.make_placement(setup, Mesh.single())._replace(optimizer_store=DeviceStore(torch.device("meta")))
    model = models.make_model("mlp")
    engine = Engine(model, placement)
    with pytest.raises(ValueError, match=r"CPUAdamW cannot update these shards: .*offload_optimizer='cpu'"):
        make_updater(CPUAdamW(model.parameters()), engine)


@pytest.mark.parametrize("make", [CPUAdamW, CPUAdagrad])
def test_doubles_are_a_clear_error(make: Any) -> None:
    model = models.make_model("mlp", dtype=torch.float64)
    engine = driver.make_engine(model, Setup(2, offload=True), Mesh.single())
    with pytest.raises(ValueError, match=r"cannot update these shards: kernels need fp32 masters .*torch.float64"):
        make_updater(make(model.parameters()), engine)


def test_a_16_bit_model_without_masters_is_a_clear_error() -> None:
    model = models.make_model("mlp", dtype=BF16)
    engine = driver.make_engine(model, Setup(2, offload=True), Mesh.single())
    with pytest.raises(ValueError, match=r"kernels need fp32 masters .*torch.bfloat16"):
        make_updater(CPUAdamW(model.parameters()), engine)


@pytest.mark.parametrize("name", ["adam", "adagrad", "sgd"])
def test_doubles_are_left_to_torch(name: str) -> None:
    model = models.make_model("mlp", dtype=torch.float64)
    engine = driver.make_engine(model, Setup(2, offload=True), Mesh.single())
    assert type(make_updater(make_optimizer(model, name, options(lr=0.1)), engine)) is TorchUpdater


@pytest.mark.parametrize(
    ("dtype", "layout", "state_dtype", "expected"),
    [
        (FP32, "fp32", FP32, {0: 12, 3: 8}),  # at stage 3 the shard itself rests on the host: it is the master
        (FP32, "split", BF16, {0: 8, 3: 4}),
        (BF16, "fp32", FP32, {0: 12, 3: 12}),
        (BF16, "split", FP32, {0: 10, 3: 10}),
        (BF16, "fp32", BF16, {0: 8, 3: 8}),
        (BF16, "split", BF16, {0: 6, 3: 6}),
        (FP16, "split", BF16, {0: 6, 3: 6}),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_bytes_an_element_beside_the_shard(
    stage: int, dtype: torch.dtype, layout: str, state_dtype: torch.dtype, expected: dict[int, int]
) -> None:
    setup = Setup(stage, offload=True, precision=POLICIES.get(dtype, UNCHANGED))
    session = Job(setup, "cpu_adamw", options(master_layout=layout, state_dtype=state_dtype)).start()
    for batch in models.make_batches(2, 1, 1):
        driver.run_step(session, batch[0])
    for bucket in session.engine.buckets:
        held = bucket.master.nbytes + session.updater.state_of(bucket).nbytes
        assert held == expected[stage] * bucket.layout.shard_numel


@pytest.mark.parametrize("stage", [0, 3])
def test_bytes_an_element_in_blocks(stage: int) -> None:
    """A remainder of two bytes, two states of one, and two scales a block."""
    setup = Setup(stage, offload=True, precision=POLICIES[BF16])
    session = Job(setup, "cpu_adamw", options(master_layout="split", state_dtype=INT8), "wide").start()
    for batch in models.make_batches(2, 1, 1):
        driver.run_step(session, batch[0])
    for bucket in session.engine.buckets:
        held = bucket.master.nbytes + session.updater.state_of(bucket).nbytes
        scales = sum(-(-numel // BLOCK) for numel in bucket.layout.numels)
        assert held == 4 * bucket.layout.shard_numel + 2 * scales
        assert scales <= bucket.layout.shard_numel / BLOCK


# --------------------------------------------------------------------------------------------------------------- frozen


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_unfrozen_later_starts_then(stage: int, dtype: torch.dtype) -> None:
    setup = Setup(stage, offload=True, precision=POLICIES.get(dtype, UNCHANGED))
    job = Job(setup, "cpu_adamw", options(lr=1e-2, master_layout="split", state_dtype=BF16), "transformer")

    def freeze(model: Any, frozen: bool) -> None:
        model.blocks[0].requires_grad_(not frozen)
        model.positions.requires_grad_(not frozen)

    session = job.start()
    plain = job.make_model().to(job.dtype)
    optimizer = job.make_optimizer(plain)
    for step, batch in enumerate(job.batches()):
        for model in (session.model, plain):
            freeze(model, step < 2)
        driver.run_step(session, [batch])
        optimizer.zero_grad()
        models.next_token_loss(plain, batch).backward()
        optimizer.step()
    result = driver.combine([driver.finish(session)])
    assert float(result.optimizer_state["blocks.0.up.weight"]["step"]) == 2
    for name, p in plain.named_parameters():
        expected = master_of(p.detach(), dict(optimizer.state[p]))
        assert torch.equal(result.weights[name], expected), name


# -- what an attached optimizer finds and leaves --


def attach(session: Session, optimizer: Optimizer) -> Session:
    updater = make_updater(optimizer, session.engine)
    session.engine.attach([updater])
    return session._replace(optimizer=optimizer, updater=updater)


def start_offloaded(dtype: torch.dtype, optimizer: str = "adamw", options: Options = ()) -> Session:
    setup = Setup(2, offload=True, precision=POLICIES[dtype], detect_data_edits=True)
    return Job(setup, optimizer, options).start()


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_edits_before_an_optimizer_is_attached_are_kept(dtype: torch.dtype, layout: str, hidden: bool) -> None:
    session = start_offloaded(dtype)
    batch = models.make_batches(1, 1, 1)[0][0][0]
    driver.run_step(session, [batch])
    session.engine.settle()
    parameter = next(p for p in session.model.parameters() if p.dim() == 2)
    with torch.no_grad():
        (parameter.data if hidden else parameter).fill_(0.25)
    session = attach(session, CPUAdamW(session.model.parameters(), lr=0.0, master_layout=layout))  # type: ignore[arg-type]
    driver.run_step(session, [batch])
    session.engine.settle()
    assert (parameter == 0.25).all()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_that_joins_later_has_its_masters_laid_out_alike(stage: int, layout: str) -> None:
    model = models.make_model("mlp").bfloat16().float()
    setup = Setup(stage, offload=True, precision=POLICIES[BF16])
    first, *others = model.parameters()
    optimizer = CPUAdamW([first], master_layout=layout)  # type: ignore[arg-type]
    engine = driver.make_engine(model, setup, Mesh.single(), optimizers=[optimizer])
    session = attach(Session(model, engine, optimizer, None), optimizer)  # type: ignore[arg-type]
    batches = [models.make_batches(2, 1, 1)[step][0][0] for step in range(2)]
    driver.run_step(session, [batches[0]])
    optimizer.add_param_group({"params": others})
    driver.run_step(session, [batches[1]])
    kinds = {(type(b.master), getattr(b.master, "ties", "away")) for b in engine.buckets}
    assert len(kinds) == 1
    assert (SplitMaster in {kind for kind, _ in kinds}) == (layout == "split")


def test_a_group_without_masters_that_joins_a_kernel_is_refused_by_name() -> None:
    model = models.make_model("mlp")
    policy = dataclasses.replace(POLICIES[BF16], master_weights=False)
    engine = driver.make_engine(model, Setup(2, offload=True, precision=policy), Mesh.single())
    with pytest.raises(ValueError, match=r"CPUAdamW cannot update these shards: kernels need fp32 masters"):
        make_updater(CPUAdamW(model.parameters()), engine)


@ranks(2)
def test_a_wrong_hyperparameter_is_an_error_on_every_rank(pool: RankPool) -> None:
    """Also on one that owns no element of the group, before anything is written."""
    assert (
        pool.run(step_with_wrong_betas)
        == [("betas=(1.5, 0.9) is out of range; expected two numbers in [0, 1)", True)] * 2
    )


def step_with_wrong_betas() -> tuple[str, bool]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    setup = Setup(2, offload=True, native="auto")
    session = driver.start(model, lambda m: torch.optim.AdamW(m.parameters(), lr=1.0), setup)
    before = model.weight.detach().clone()
    session.optimizer.param_groups[0]["betas"] = (1.5, 0.9)
    driver.backward(session.engine, model(torch.ones(1, 1)).sum())
    try:
        session.optimizer.step()
    except ValueError as error:
        session.engine.settle()
        return str(error), torch.equal(model.weight, before)
    return "no error", False


def test_bf16_state_resumes_under_torchs_own_optimizer() -> None:
    first = start_offloaded(BF16, "cpu_adamw", (("state_dtype", BF16),))
    batches = [models.make_batches(2, 1, 1)[step][0][0] for step in range(2)]
    driver.run_step(first, [batches[0]])
    saved = saved_optimizer(first.engine, first.updater)
    assert {v.dtype for s in saved["state"].values() for k, v in s.items() if k != "step"} == {BF16}
    second = Job(Setup(2, native="off", precision=POLICIES[BF16]), "adamw").start()
    load_optimizer_state_dict(second.engine, second.updater, saved)
    driver.run_step(second, [batches[1]])
    loaded = saved_optimizer(second.engine, second.updater)
    assert {v.dtype for s in loaded["state"].values() for v in s.values()} == {FP32}


@pytest.mark.parametrize("name", ["adamw", "cpu_adamw"])
def test_adamw_stays_decoupled_whatever_checkpoint_it_loads(name: str) -> None:
    adam, adamw = start_offloaded(BF16, "cpu_adam"), start_offloaded(BF16, name)
    driver.run_step(adam, [models.make_batches(1, 1, 1)[0][0][0]])
    load_optimizer_state_dict(adamw.engine, adamw.updater, saved_optimizer(adam.engine, adam.updater))
    assert all(group["decoupled_weight_decay"] for group in adamw.optimizer.param_groups)
