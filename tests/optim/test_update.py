"""Updaters over shards: shells, state and the native kernel."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from engine import driver
from engine.driver import Session, Setup, assert_close, assert_equal
from helpers import models
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import CPUAdamW, ops
from lightning_zero.checkpoint import load_optimizer_state_dict, optimizer_state_dict
from lightning_zero.sharding import Bucket, Mesh, MixedPrecisionPolicy, Run
from lightning_zero.sharding.held import local_grad
from lightning_zero.sharding.masters import CopyMaster
from lightning_zero.storage.rested import Resident
from lightning_zero.update import NativeUpdater, ShardState, TorchUpdater, make_updater, shell, updaters
from lightning_zero.update import whole as whole_parameters
from lightning_zero.update.loading import keeping_digits
from lightning_zero.update.newton_schulz import BatchedMuon
from lightning_zero.update.rules import ELEMENT_WISE, Traits
from lightning_zero.update.shell import ShellGroup, StepCall, run_step

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FP32 = torch.float32
KINDS = sorted({*ELEMENT_WISE, torch.optim.Muon, BatchedMuon}, key=lambda kind: kind.__name__)
NO_TRAITS = Traits((), frozenset())


def start(setup: Setup, optimizer: str = "adamw", model: str = "mlp", **options: Any) -> Session:
    make = models.optimizer_factory(optimizer, **options)
    return driver.start(models.make_model(model), make, setup, Mesh.single())


def step(session: Session, index: int = 0) -> None:
    driver.run_step(session, [models.make_batches(index + 1, 1, 1)[index][0][0]])


def take_over(session: Session, halfway: driver.Trained, **more: Any) -> None:
    """Load weights and state of another session, with some values replaced."""
    for name, parameter in session.model.named_parameters():
        bucket = session.engine.bucket_of(parameter)
        assert bucket is not None
        index = bucket.index[id(parameter)]
        bucket.load({index: halfway.weights[name]})
        session.updater.load(bucket, index, halfway.optimizer_state[name] | more)


def hyperparameters_of(optimizer: Optimizer, group: int = 0) -> dict[str, Any]:
    return {k: v for k, v in optimizer.param_groups[group].items() if k != "params"}


class Recording(torch.optim.SGD):
    """Notes what its step saw."""

    seen: list[Any]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.seen.append((self, copy.deepcopy(self.param_groups)))
        return super().step(closure)


def test_a_shell_has_the_optimizers_class_and_attributes_but_other_groups() -> None:
    optimizer = Recording([nn.Parameter(torch.ones(3))], lr=0.1)
    optimizer.seen = []
    tensor = torch.zeros(2)
    tensor.grad = torch.ones(2)
    hyperparameters = hyperparameters_of(optimizer) | {"lr": 0.5}
    run_step(optimizer, [ShellGroup([tensor], hyperparameters)], {})
    ((shell, groups),) = optimizer.seen
    assert type(shell) is Recording
    assert shell is not optimizer
    assert groups[0]["lr"] == 0.5
    assert tensor.tolist() == [-0.5, -0.5]
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["params"][0].tolist() == [1.0] * 3


def test_a_shell_fires_no_hooks() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    tensor = torch.zeros(2)
    tensor.grad = torch.ones(2)
    run_step(
        optimizer, [ShellGroup([tensor], {k: v for k, v in optimizer.param_groups[0].items() if k != "params"})], {}
    )
    assert fired == []
    assert tensor.ne(0).all()


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("name", ["adamw", "adagrad", "momentum"])
def test_an_update_never_touches_live_groups(name: str, native: driver.NativeOptimizer) -> None:
    session = start(Setup(2, offload=True, native=native), name)
    groups = session.optimizer.param_groups
    before = [hyperparameters_of(session.optimizer, index) for index in range(2)]
    parameters = [id(p) for group in groups for p in group["params"]]
    step(session)
    assert session.optimizer.param_groups is groups
    assert [hyperparameters_of(session.optimizer, index) for index in range(2)] == before
    assert [id(p) for group in groups for p in group["params"]] == parameters
    assert all(local_grad(p) is None for group in groups for p in group["params"])
    assert not session.optimizer.state


def test_the_gradient_survives_a_scaled_update() -> None:
    """Out of place: gradients belong to the user until zero_grad."""
    session = start(Setup(2))
    loss = models.next_token_loss(session.model, models.make_batches(1, 1, 1)[0][0][0])
    driver.backward(session.engine, loss)
    (bucket, *_) = session.engine.buckets
    sharded = session.engine.gradients_of(bucket).sharded
    before = sharded.read(0, bucket.layout.shard_numel).clone()
    session.engine.clip_grad_norm_(session.optimizer, 1e-3)
    session.optimizer.step()
    assert torch.equal(sharded.read(0, bucket.layout.shard_numel), before)


class Layers(nn.Module):
    """Layers that a step may pass over; all parameters lie next to each other, apart from those of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, n) for n in (16, 16, 32, 16, 5, 16)])

    def loss(self, layers: range) -> Tensor:
        return torch.stack([self.layers[n](torch.linspace(-1, 2, 16)).square().sum() for n in layers]).sum()


@pytest.mark.parametrize(("optimizer", "one"), [(torch.optim.NAdam, True), (Recording, False)])
def test_what_torch_updates_as_one_tensor_becomes_what_torch_makes_of_parameters(
    optimizer: type[Optimizer], one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only of torch's own classes it is known that an element's bits do not depend on the tensor it is in."""
    sizes: list[int] = []

    def recorded(
        rule: Optimizer, groups: list[ShellGroup], state: dict[Tensor, dict[str, Any]], call: StepCall
    ) -> Optimizer:
        sizes.extend(tensor.numel() for group in groups for tensor in group.tensors)
        return run_step(rule, groups, state, call)

    for module in (updaters, whole_parameters):
        monkeypatch.setattr(module, "run_step", recorded)
    monkeypatch.setattr(updaters, "_HOST_TILE", 300)
    monkeypatch.setattr(Recording, "seen", [], raising=False)
    model, plain = Layers(), Layers()
    plain.load_state_dict(model.state_dict())
    session = driver.start(model, lambda m: optimizer(m.parameters(), lr=0.01), Setup(2), Mesh.single())
    reference = optimizer(plain.parameters(), lr=0.01)
    for layers in (range(6), range(2, 6), range(6)):  # afterwards the first ones are a step behind
        driver.run_step(session, [torch.zeros(1)], lambda m, _, used=layers: m.loss(used))
        reference.zero_grad()
        plain.loss(layers).backward()
        reference.step()
    pieces = driver.assemble(driver.state_pieces(session.engine, session.updater))
    for name, parameter in plain.named_parameters():
        assert torch.equal(session.model.get_parameter(name), parameter)
        assert pieces.get(name, {}).keys() == reference.state[parameter].keys()
        for key, value in reference.state[parameter].items():
            assert torch.equal(pieces[name][key], value)
    whole = [segment.numel for bucket in session.engine.buckets for segment in bucket.segments]
    # Up to the gap behind the bias of 5 elements there are 1445.
    assert sizes[:6] == ([300, 300, 300, 300, 245, 272] if one else whole[:6])


def test_a_step_count_that_is_a_number_goes_on() -> None:
    """As torch before 1.12 saved it. ``load_state_dict`` makes it a tensor."""
    first, other, through = (start(Setup(2)) for _ in range(3))
    for index in range(3):
        step(first, index)
    halfway = driver.combine([driver.finish(first)])
    take_over(other, halfway, step=3)
    for index in (3, 4):
        step(other, index)
    for index in range(5):
        step(through, index)
    expected, got = (driver.combine([driver.finish(one)]) for one in (through, other))
    for name, weight in expected.weights.items():
        assert torch.equal(got.weights[name], weight)
        assert got.optimizer_state[name]["step"] == expected.optimizer_state[name]["step"] == 5


def test_reading_makes_no_state() -> None:
    session = start(Setup(2), "adamw")
    (form, *_) = session.updater.describe_state(session.engine.buckets)
    assert form == ({}, {})
    for bucket in session.engine.buckets:
        assert session.updater.gather_state(bucket) == {}
        state = session.updater.state_of(bucket)
        assert state.read("exp_avg", torch.float32, 2, 5).tolist() == [0.0] * 3
        assert state.nbytes == 0
        assert session.updater.state_of(bucket) is not state  # it was not kept
    step(session)
    for bucket in session.engine.buckets:
        assert session.updater.state_of(bucket) is session.updater.state_of(bucket)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("first", ["optimizer", "engine"])
def test_state_of_the_constructor_moves_into_shards(first: str, offload: bool) -> None:
    """Adagrad makes its sums, here not zeros, before the first step; the engine may exist by then."""
    model = models.make_model("mlp")

    def adagrad() -> Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.25)

    optimizer = adagrad() if first == "optimizer" else None
    engine = driver.make_engine(model, Setup(3, offload=offload), Mesh.single())
    optimizer = optimizer or adagrad()
    assert len(optimizer.state) == len(list(model.parameters()))
    updater = make_updater(optimizer, engine)
    engine.attach([updater])
    assert not optimizer.state
    for bucket in engine.buckets:
        for segment in bucket.segments:
            state = updater.state_of(bucket).get(Run.of(segment))
            assert torch.equal(state["sum"], torch.full((segment.numel,), 0.25))
            assert float(state["step"]) == 0


@pytest.mark.parametrize(
    ("setup", "optimizer", "options", "native"),
    [
        (Setup(2, offload=True, native="auto"), "adamw", {}, True),
        (Setup(3, offload=True, native="auto"), "adam", {}, True),
        (Setup(2, offload=True, native="auto", precision=BF16), "adamw", {}, True),
        (Setup(2, offload=True, native="off"), "adamw", {}, False),
        (Setup(2, offload=False, native="auto"), "adamw", {}, False),
        (Setup(2, offload=True, native="auto"), "amsgrad", {}, True),
        (Setup(2, offload=True, native="auto"), "adamw", {"maximize": True}, True),
        (Setup(2, offload=True, native="auto"), "momentum", {}, True),
        (Setup(2, offload=True, native="auto"), "adagrad", {}, True),
        (Setup(2, offload=False, native="auto"), "momentum", {}, False),
        (Setup(2, offload=True, native="auto"), "nadam", {}, False),
    ],
)
def test_the_native_kernel_runs_where_it_computes_the_same(
    setup: Setup, optimizer: str, options: dict[str, Any], native: bool
) -> None:
    session = start(setup, optimizer, **options)
    assert type(session.updater) is (NativeUpdater if native else TorchUpdater)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["nadam", "radam"])
def test_a_rule_has_the_form_that_torch_takes_on_the_device_that_trains(
    name: str, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever its state rests. Here a CPU stands for a device on which torch updates several tensors at a time."""
    monkeypatch.setattr(shell, "foreach_devices", lambda: frozenset({"cpu"}))
    session = start(Setup(2, offload=offload), name)
    results = {}
    for foreach in (True, False):
        model = models.make_model("mlp")
        optimizer = models.make_optimizer(name, model, foreach=foreach)
        for index in range(4):
            optimizer.zero_grad()
            models.next_token_loss(model, models.make_batches(index + 1, 1, 1)[index][0][0]).backward()
            optimizer.step()
        results[foreach] = model.state_dict()
    for index in range(4):
        step(session, index)
    trained = driver.combine([driver.finish(session)]).weights
    assert_equal(trained, results[True])
    assert any(not torch.equal(value, results[False][key]) for key, value in trained.items())


def test_a_subclass_of_adam_is_not_taken_for_adam() -> None:
    class Mine(torch.optim.AdamW):
        pass

    model = models.make_model("mlp")
    engine = driver.make_engine(model, Setup(2, offload=True), Mesh.single())
    assert isinstance(make_updater(Mine(model.parameters()), engine), TorchUpdater)


def test_doubles_are_left_to_torch() -> None:
    model = models.make_model("mlp", dtype=torch.float64)
    engine = driver.make_engine(model, Setup(2, offload=True), Mesh.single())
    assert type(make_updater(torch.optim.AdamW(model.parameters()), engine)) is TorchUpdater


def test_a_step_on_the_host_is_in_no_graph_of_the_device() -> None:
    """Torch refuses `capturable=True` for tensors in host memory, where the parameters of a GPU may be updated."""
    trained = []
    for capturable in (False, True):
        session = start(Setup(2, offload=True), "rmsprop")
        session.optimizer.param_groups[0]["capturable"] = capturable
        step(session)
        trained.append(driver.combine([driver.finish(session)]).weights)
    assert_equal(*trained)


def test_a_group_that_the_kernel_cannot_update_is_an_error() -> None:
    session = start(Setup(2, offload=True, native="auto"))
    session.optimizer.param_groups[1]["differentiable"] = True
    with pytest.raises(ValueError, match=r"differentiable=True in .* native_optimizer='off'"):
        step(session)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_one_native_step_is_within_the_kernels_bound(optimizer: str) -> None:
    """2^-21 of the update and 1 ulp of the parameter, 2 where torch rounds its decay apart; the moments are equal."""
    initial = models.make_model("transformer").state_dict()
    trained = []
    for native in ("auto", "off"):
        session = start(Setup(2, offload=True, native=native), optimizer, "transformer")
        step(session)
        trained.append(driver.combine([driver.finish(session)]))
    native_one, torch_one = trained
    for name, expected in torch_one.weights.items():
        ulp = torch.nextafter(expected.abs(), torch.tensor(torch.inf)) - expected.abs()
        bound = ulp * (2 if optimizer == "adamw" else 1) + (expected - initial[name]).abs() * 2**-21
        assert ((native_one.weights[name] - expected).abs() <= bound).all(), name
    for name, state in torch_one.optimizer_state.items():
        assert_equal(
            {k: native_one.optimizer_state[name][k] for k in ("exp_avg", "exp_avg_sq")},
            {k: state[k] for k in ("exp_avg", "exp_avg_sq")},
        )


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_native_state_has_torchs_names_types_and_shapes(optimizer: str) -> None:
    states = []
    for native in ("auto", "off"):
        session = start(Setup(2, offload=True, native=native), optimizer)
        step(session)
        states.append(driver.combine([driver.finish(session)]).optimizer_state)
    native_state, torch_state = states
    assert native_state.keys() == torch_state.keys()
    for name, state in torch_state.items():
        described = {k: (v.dtype, v.shape, v.device) for k, v in state.items()}
        assert {k: (v.dtype, v.shape, v.device) for k, v in native_state[name].items()} == described


def test_the_kernel_goes_on_from_torchs_state() -> None:
    """Loaded state of any origin: three steps of torch and one of the kernel are near four of torch."""
    session, other = start(Setup(2, offload=True, native="off")), start(Setup(2, offload=True, native="auto"))
    for index in range(3):
        step(session, index)
    halfway = driver.combine([driver.finish(session)])
    take_over(other, halfway)
    step(other, 3)
    through = start(Setup(2))
    for index in range(4):
        step(through, index)
    expected, got = driver.combine([driver.finish(through)]), driver.combine([driver.finish(other)])
    assert_close(got.weights, expected.weights, rtol=1e-6, atol=1e-7)
    assert {float(s["step"]) for s in got.optimizer_state.values()} == {4.0}


def test_segments_whose_steps_differ_keep_them_apart() -> None:
    """A parameter unused for a while has its own bias correction."""
    session = start(Setup(2, offload=True, native="auto"), "adamw", "optional")
    batches = models.make_batches(3, 1, 1, flagged=models.only_in_step_1)
    for (micro,) in batches:
        driver.run_step(session, micro)
    state = driver.combine([driver.finish(session)]).optimizer_state
    assert {name: float(s["step"]) for name, s in state.items()} == {
        name: 1.0 if "adapter" in name else 3.0 for name in state
    }


def test_masters_are_published_in_16_bits() -> None:
    for native in ("auto", "off"):
        session = start(Setup(2, offload=True, native=native, precision=BF16), "adamw", "transformer")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step(session)
        result = driver.finish(session)
        for name, seen in result.seen.items():
            assert torch.equal(seen, result.weights[name].to(seen.dtype))


def test_torchs_updates_round_halves_as_the_kernels_do() -> None:
    """Away from zero; and whichever way a shard was rounded, it is that of its master."""
    highs = torch.tensor([0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F00, 0x8001, 0xBF80, 0xBF81, 0xFF00])
    bits = (highs[:, None] << 16) + torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    values = bits.flatten().to(torch.int32).view(torch.float32)
    shard, high = (torch.empty(values.numel(), dtype=torch.bfloat16) for _ in range(2))
    master = CopyMaster(Resident(shard), Resident(values.clone()), ties="away")
    master.write(0, values.numel())
    ops.split_(values, high, torch.empty_like(high, dtype=torch.int16))
    assert torch.equal(shard.view(torch.int16), high.view(torch.int16))
    assert not torch.equal(shard, values.to(shard))
    for rounded in (high, values.to(shard)):
        shard.copy_(rounded)
        master.derive(0, values.numel())
        assert torch.equal(master.read(0, values.numel()).view(torch.int32), values.view(torch.int32))
    nan = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    CopyMaster(Resident(shard[:3]), Resident(nan), ties="away").write(0, 3)
    assert shard[:3].isnan().all()


@pytest.fixture
def bucket() -> Bucket:
    engine = driver.make_engine(models.make_model("mlp"), Setup(2, offload=True), Mesh.single())
    return engine.buckets[0]


def test_state_comes_back_as_it_was_put(bucket: Bucket) -> None:
    state = ShardState(bucket, frozenset({"average"}))
    first, second = bucket.segments[:2]
    average = torch.arange(float(first.numel))
    state.put(Run.of(first), {"average": average, "step": torch.tensor(2.0), "flag": True})
    assert first in state
    assert second not in state
    assert state.get(Run.of(second)) == {}
    got = state.get(Run.of(first))
    assert (got["step"].item(), got["flag"]) == (2.0, True)
    assert torch.equal(got["average"], average)
    assert got["average"].data_ptr() != average.data_ptr()
    assert state.scalars(first).keys() == {"step", "flag"}


def test_state_is_updated_in_place(bucket: Bucket) -> None:
    state = ShardState(bucket, frozenset({"average"}))
    segment = bucket.segments[1]
    state.put(Run.of(segment), {"average": torch.zeros(segment.numel)})
    view = state.get(Run.of(segment))["average"]
    view.add_(3.0)
    state.put(Run.of(segment), {"average": view})
    average = state.read("average", torch.float32, 0, bucket.layout.shard_numel)
    assert torch.equal(average[segment.start : segment.stop], torch.full((segment.numel,), 3.0))
    assert average.sum() == 3.0 * segment.numel  # nobody else's elements
    assert state.nbytes == bucket.layout.shard_numel * 4


def test_a_rank_takes_its_part_of_a_full_state(bucket: Bucket) -> None:
    state = ShardState(bucket, frozenset({"average"}))
    segment = bucket.segments[0]
    whole = torch.arange(float(segment.numel)).view_as(bucket.parameters[0])
    step = torch.tensor(5.0)
    state.put_slice(segment, {"average": whole, "step": step}, torch.float32, frozenset())
    step += 1
    assert torch.equal(state.get(Run.of(segment))["average"], whole.view(-1))
    assert state.get(Run.of(segment))["step"] == 5.0


def test_cleared_state_is_that_of_a_new_optimizer() -> None:
    """Cleared, or loaded from before the first step."""
    session = start(Setup(2, offload=True))
    none = copy.deepcopy(optimizer_state_dict(session.engine, session.updater))
    for forget in (session.updater.clear, lambda: load_optimizer_state_dict(session.engine, session.updater, none)):
        step(session)
        forget()
        assert driver.state_pieces(session.engine, session.updater) == []
    step(session, 1)
    assert {float(p.scalars["step"]) for p in driver.state_pieces(session.engine, session.updater)} == {1.0}


def test_a_learning_rate_that_is_a_tensor_works() -> None:
    def weights(lr: float | Tensor, native: driver.NativeOptimizer) -> dict[str, Tensor]:
        session = start(Setup(2, offload=True, native=native), lr=lr)
        step(session)
        return driver.finish(session).weights

    for native in ("auto", "off"):
        assert_close(weights(torch.tensor(0.01), native), weights(0.01, native), rtol=1e-6, atol=1e-7)


def in_default_dtype(kind: type[Optimizer], dtype: torch.dtype) -> list[Tensor]:
    """The parameter and its state after some steps in which `dtype` is torch's default."""
    before, parameter = torch.get_default_dtype(), nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))
    optimizer = kind([parameter], lr=0.01)
    torch.set_default_dtype(dtype)
    try:
        for number in range(3):
            parameter.grad = torch.full_like(parameter, 0.1 + number)
            optimizer.step()
    finally:
        torch.set_default_dtype(before)
    return [parameter.detach(), *(value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_updates_that_may_run_in_any_default_dtype_are_the_same_there(kind: type[Optimizer]) -> None:
    updater, expected = TorchUpdater(kind([nn.Parameter(torch.ones(2, 2))]), NO_TRAITS), in_default_dtype(kind, FP32)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        if updater.alike_under({FP32, dtype}):
            found = in_default_dtype(kind, dtype)
            assert [value.dtype for value in found] == [value.dtype for value in expected]
            assert all(map(torch.equal, found, expected))
    assert updater.alike_under({FP32, torch.bfloat16}) == (kind is not torch.optim.ASGD)


def test_state_that_a_class_has_made_of_what_it_loads_stays_so() -> None:
    """Zeros are equal in any dtype."""
    parameter = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    optimizer = CPUAdamW([parameter], state_dtype=torch.int8)
    saved = {name: torch.zeros(300) for name in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(1.0)}
    with keeping_digits(optimizer):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": {0: saved}})
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.int8


def test_state_that_is_loaded_keeps_its_digits_without_a_copy() -> None:
    """State with fewer digits than the parameter gets the parameter's dtype, as torch has it."""
    half, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    for dtype, kept, expected in ((bf16, fp32, fp32), (half, bf16, bf16), (fp32, bf16, fp32)):
        parameter, moment = nn.Parameter(torch.ones(3, dtype=dtype)), torch.full((3,), 0.5, dtype=kept)
        optimizer = torch.optim.Adam([parameter])
        saved = {"exp_avg": moment, "exp_avg_sq": moment, "step": torch.tensor(1.0)}
        with keeping_digits(optimizer):
            optimizer.load_state_dict(optimizer.state_dict() | {"state": {0: saved}})
        found = optimizer.state[parameter]["exp_avg"]
        assert found.dtype == expected
        assert (found.data_ptr() == moment.data_ptr()) == (kept == expected)


def test_those_attached_stay_where_others_cannot_be() -> None:
    """With their state, and without a trace in the others."""
    session = start(Setup())
    step(session)
    other = make_updater(torch.optim.SGD(session.model.parameters()), session.engine)
    own = vars(other.optimizer).copy()
    with (
        mock.patch.object(other, "master_layout", side_effect=ValueError("not these shards")),
        pytest.raises(ValueError, match="not these shards"),
    ):
        session.engine.attach([session.updater, other])
    assert session.engine.updaters == [session.updater]
    assert vars(other.optimizer) == own
    step(session, 1)
    state = optimizer_state_dict(session.engine, session.updater)["state"]
    assert {float(values["step"]) for values in state.values()} == {2.0}


def test_state_that_is_cleared_before_optimizers_are_attached_again_is_gone() -> None:
    """As between two fits with the same optimizer."""
    session = start(Setup())
    step(session)
    step(session, 1)
    session.optimizer.state.clear()
    session.engine.attach([session.updater])
    step(session, 2)
    state = optimizer_state_dict(session.engine, session.updater)["state"]
    assert {float(values["step"]) for values in state.values()} == {1.0}
