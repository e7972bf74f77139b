"""The CPU optimizers as ordinary torch optimizers, without any strategy."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from helpers.pairs import pairwise
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR
from torch.utils.data import DataLoader

from lightning_zero import CPUSGD, CPUAdagrad, CPUAdam, CPUAdamW, CPULion, ops
from lightning_zero.update.cpu import CPUOptimizer

FP32, BF16, FP16, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
SHAPES = ((5, 7), (3,), (33, 2), (1,))
LAYOUTS = ("fp32", "split")
STATES = (FP32, BF16)
Make = Callable[..., Optimizer]

# Name: ours, torch's, arguments of both.
PAIRS: dict[str, tuple[type[CPUOptimizer], type[Optimizer], dict[str, Any]]] = {
    "adam": (CPUAdam, torch.optim.Adam, {"lr": 1e-2, "betas": (0.8, 0.95)}),
    "adam_l2": (CPUAdam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "amsgrad": (CPUAdam, torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "eps": 1e-3}),
    "adam_decoupled": (CPUAdam, torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw": (CPUAdamW, torch.optim.AdamW, {"lr": 1e-2}),
    "adamw_amsgrad": (CPUAdamW, torch.optim.AdamW, {"amsgrad": True, "maximize": True, "weight_decay": 0.3}),
    "adagrad": (CPUAdagrad, torch.optim.Adagrad, {"lr": 1e-1}),
    "adagrad_all": (
        CPUAdagrad,
        torch.optim.Adagrad,
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-3, "maximize": True},
    ),
    "sgd": (CPUSGD, torch.optim.SGD, {"lr": 1e-1}),
    "sgd_decay": (CPUSGD, torch.optim.SGD, {"lr": 1e-1, "weight_decay": 0.1, "maximize": True}),
    "momentum": (CPUSGD, torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.1}),
    "dampening": (CPUSGD, torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": (CPUSGD, torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
}
# One of each class with state worth resuming.
OURS: dict[str, Make] = {
    "adamw": lambda params, **options: CPUAdamW(params, lr=1e-2, **options),
    "amsgrad": lambda params, **options: CPUAdam(params, lr=1e-2, amsgrad=True, weight_decay=0.1, **options),
    "adagrad": lambda params, **options: CPUAdagrad(params, lr=1e-1, initial_accumulator_value=0.1, **options),
    "lion": lambda params, **options: CPULion(params, lr=1e-2, weight_decay=0.1, **options),
    "momentum": lambda params, **options: CPUSGD(params, lr=1e-1, momentum=0.9, dampening=0.5, **options),
    "sgd": lambda params, **options: CPUSGD(params, lr=1e-1, **options),
}
every_pair = pytest.mark.parametrize("name", PAIRS)
every_class = pytest.mark.parametrize("name", OURS)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    ops.set_num_threads(None)


def parameters(dtype: torch.dtype = FP32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(params: Sequence[Tensor], step: int, scale: float = 1.0) -> None:
    """The gradients of a step, whatever the parameters are."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def train(optimizer: Optimizer, params: Sequence[Tensor], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def assert_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == e.dtype
        assert torch.equal(a.detach(), e.detach()), f"{number}: {(a - e).abs().max()}"


def assert_same_state(actual: Optimizer, expected: Optimizer) -> None:
    """Bit for bit, by position."""
    one, other = actual.state_dict()["state"], expected.state_dict()["state"]
    assert one.keys() == other.keys()
    for key, values in other.items():
        assert one[key].keys() == values.keys()
        for name, value in values.items():
            assert one[key][name].dtype == value.dtype, name
            assert torch.equal(one[key][name], value), name


def assert_within_bound(actual: Tensor, expected: Tensor, before: Tensor, ulps: int = 2) -> None:
    """The stated bound against torch's own rounding: ulps of the parameter, and 2^-20 of the update's terms."""
    ulp = torch.nextafter(expected.abs(), torch.tensor(torch.inf)) - expected.abs()
    bound = ulp * ulps + (expected - before).abs() * 2**-20 + before.abs() * 2**-23
    assert ((actual - expected).abs() <= bound).all(), ((actual - expected).abs() - bound).max()


# -------------------------------------------------------------------------------------------------- equality with torch


@every_pair
def test_every_step_is_torchs(name: str) -> None:
    """From torch's parameters: state bitwise, parameters within the bound (SGD bitwise)."""
    ours, theirs, options = PAIRS[name]
    mine, other = parameters(), parameters()
    one, two = ours(mine, **options), theirs(other, **options, foreach=False)
    for step in range(200):
        before = [p.detach().clone() for p in other]
        with torch.no_grad():
            for m, b in zip(mine, before, strict=True):
                m.copy_(b)
        scale = 10.0 ** (step % 7 - 3)
        give_gradients(mine, step, scale)
        give_gradients(other, step, scale)
        one.step()
        two.step()
        for m, o, b in zip(mine, other, before, strict=True):
            assert one.state.get(m, {}).keys() == two.state.get(o, {}).keys()
            for key, value in two.state.get(o, {}).items():
                assert one.state[m][key].dtype == value.dtype
                assert torch.equal(one.state[m][key], value), (step, key)
            if ours is CPUSGD:
                assert torch.equal(m, o), step
            else:
                assert_within_bound(m.detach(), o.detach(), b)


@every_pair
def test_many_steps_stay_with_torch(name: str) -> None:
    ours, theirs, options = PAIRS[name]
    mine, other = parameters(), parameters()
    train(ours(mine, **options), mine, range(100))
    train(theirs(other, **options), other, range(100))
    for m, o in zip(mine, other, strict=True):
        if ours is CPUSGD:
            assert torch.equal(m, o)
        torch.testing.assert_close(m, o, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "adagrad"])
def test_steps_are_counted_in_any_default_dtype(name: str) -> None:
    """16-bit modes of Lightning change it around a step by hand."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        params = [Parameter(torch.zeros(3, dtype=FP32))]
        optimizer = OURS[name](params)
        for _ in range(258):
            params[0].grad = torch.ones_like(params[0])
            optimizer.step()
    finally:
        torch.set_default_dtype(before)
    assert optimizer.state_dict()["state"][0]["step"].item() == 258


def test_lion_is_its_formula() -> None:
    mine = parameters()
    ps, ms = [p.detach().double() for p in mine], [torch.zeros(p.shape, dtype=torch.float64) for p in mine]
    optimizer = CPULion(mine, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, maximize=True)
    for step in range(50):
        give_gradients(mine, step)
        optimizer.step()
        for i, p in enumerate(mine):
            g = -p.grad.double()
            ps[i] = ps[i] - 1e-2 * (torch.sign(0.9 * ms[i] + 0.1 * g) + 0.1 * ps[i])
            ms[i] = 0.99 * ms[i] + 0.01 * g
    for p, expected, m in zip(mine, ps, ms, strict=True):
        torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), m, rtol=1e-5, atol=1e-6)


@pairwise(dtype=[BF16, FP16], name=OURS)
def test_16_bit_parameters_follow_their_fp32_master(name: str, dtype: torch.dtype) -> None:
    """The master is what fp32 training gives with the same gradients; the parameter is its rounded copy."""
    low, whole = parameters(dtype), [Parameter(p.detach().float()) for p in parameters(dtype)]
    one, two = OURS[name](low), OURS[name](whole)
    for step in range(50):
        give_gradients(low, step)
        for p, w in zip(low, whole, strict=True):
            w.grad = p.grad.float()
        one.step()
        two.step()
    assert_bits([one.state[p]["master"] for p in low], whole)
    for p, w in zip(low, whole, strict=True):
        torch.testing.assert_close(p.float(), w.detach(), rtol=2.0**-8 if dtype == BF16 else 2.0**-11, atol=1e-7)


def test_groups_keep_their_own_hyperparameters() -> None:
    def groups(params: list[Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": params[:2], "weight_decay": 0.0, "lr": 1e-3},
            {"params": params[2:3], "betas": (0.5, 0.6), "amsgrad": True},
            {"params": params[3:], "maximize": True, "eps": 1e-2},
        ]

    mine, other = parameters(), parameters()
    train(CPUAdamW(groups(mine), lr=1e-2), mine, range(20))
    train(torch.optim.AdamW(groups(other), lr=1e-2), other, range(20))
    for m, o in zip(mine, other, strict=True):
        torch.testing.assert_close(m, o, rtol=1e-5, atol=1e-6)


def test_a_group_without_momentum_needs_no_nesterov() -> None:
    """torch's step ignores it there."""
    trained = []
    for make in (CPUSGD, torch.optim.SGD):
        params = parameters()
        groups = [{"params": params[:2]}, {"params": params[2:], "momentum": 0.0}]
        train(make(groups, lr=0.1, momentum=0.9, nesterov=True), params, range(3))
        trained.append(params)
    assert_bits(*trained)


@every_class
def test_a_group_that_joins_starts_from_the_beginning(name: str) -> None:
    """Its bias correction and first momentum are its own."""
    mine, late = parameters(), parameters()
    optimizer = OURS[name](mine[:2])
    train(optimizer, mine[:2], range(5))
    optimizer.add_param_group({"params": mine[2:]})
    train(optimizer, mine, range(5, 10))
    fresh = OURS[name](late)
    train(fresh, late, range(5, 10))
    assert_bits(mine[2:], late[2:])


@pytest.mark.parametrize("state_dtype", STATES)
def test_momentum_that_begins_later_starts_from_its_first_gradient(state_dtype: torch.dtype) -> None:
    """As torch's; also where steps are counted for the rounding."""
    mine, other = parameters(), parameters()
    one, two = CPUSGD(mine, lr=0.1, state_dtype=state_dtype), torch.optim.SGD(other, lr=0.1)
    for params, optimizer in ((mine, one), (other, two)):
        train(optimizer, params, range(2))
        optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
        train(optimizer, params, range(2, 3))
    for m, o in zip(mine, other, strict=True):
        torch.testing.assert_close(m, o, rtol=1e-2, atol=1e-2)


@every_pair
def test_gradients_that_are_not_finite_do_what_they_do_in_torch(name: str) -> None:
    ours, theirs, options = PAIRS[name]
    mine, other = [Parameter(torch.ones(5))], [Parameter(torch.ones(5))]
    one, two = ours(mine, **options), theirs(other, **options)
    for params, optimizer in ((mine, one), (other, two)):
        for _ in range(3):
            params[0].grad = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1e30])
            optimizer.step()
    torch.testing.assert_close(mine[0], other[0], equal_nan=True)
    for key, value in two.state.get(other[0], {}).items():
        assert torch.equal(one.state[mine[0]][key].nan_to_num(7.0), value.nan_to_num(7.0)), key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_16_bit_parameter_may_have_an_fp32_gradient(layout: str) -> None:
    p, whole = Parameter(torch.ones(5, dtype=BF16)), Parameter(torch.ones(5))
    p.grad_dtype = FP32
    one, two = CPUAdam([p], master_layout=layout), CPUAdam([whole])  # type: ignore[arg-type]
    for optimizer, q in ((one, p), (two, whole)):
        q.grad = torch.linspace(0.1234567, 1, 5)
        optimizer.step()
    assert torch.equal(one.state[p]["exp_avg"], two.state[whole]["exp_avg"])


def test_named_parameters_are_taken() -> None:
    model = models.make_model("mlp")
    optimizer = CPUAdamW(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    models.next_token_loss(model, models.make_batches(1, 1, 1)[0][0][0]).backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_one_cycle_moves_betas_and_momentum(name: str) -> None:
    ours, theirs, options = PAIRS[name]
    trained = []
    for make in (ours, theirs):
        params = parameters()
        optimizer = make(params, **options)
        scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
        seen = []
        for step in range(19):
            train(optimizer, params, range(step, step + 1))
            scheduler.step()
            seen.append(optimizer.param_groups[0].get("betas", optimizer.param_groups[0].get("momentum")))
        assert len(set(seen)) > 5
        trained.append(params)
    for m, o in zip(*trained, strict=True):
        torch.testing.assert_close(m, o, rtol=1e-5, atol=1e-6)
        if ours is CPUSGD:
            assert torch.equal(m, o)


@every_class
def test_a_scheduler_may_end_a_rounding_error_below_zero(name: str) -> None:
    """This one ends at -5.6e-21, which torch's optimizers take."""
    params = parameters()
    optimizer = OURS[name]([{"params": params, "lr": 1e-3}])
    scheduler = LinearLR(optimizer, start_factor=0.1, end_factor=0.0, total_iters=4)
    for step in range(6):
        train(optimizer, params, range(step, step + 1))
        scheduler.step()
    assert -1e-18 < optimizer.param_groups[0]["lr"] < 0


def test_a_learning_rate_that_is_a_tensor_works() -> None:
    mine, other = parameters(), parameters()
    optimizer = CPUAdamW(mine, lr=torch.tensor(0.01))
    scheduler = CosineAnnealingLR(optimizer, 10)
    usual = CPUAdamW(other, lr=float(torch.tensor(0.01)))
    other_scheduler = CosineAnnealingLR(usual, 10)
    for step in range(5):
        train(optimizer, mine, range(step, step + 1))
        train(usual, other, range(step, step + 1))
        scheduler.step()
        other_scheduler.step()
    for m, o in zip(mine, other, strict=True):
        torch.testing.assert_close(m, o, rtol=1e-6, atol=1e-7)
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)


# ---------------------------------------------------------------------------------------------- the Optimizer's manners


def test_a_closure_runs_with_gradients_and_its_loss_comes_back() -> None:
    (p,) = parameters(shapes=((3,),))
    optimizer = CPUSGD([p], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    before = p.detach().clone()
    loss = optimizer.step(closure)
    assert loss.item() == before.square().sum().item()
    torch.testing.assert_close(p.detach(), 0.8 * before)
    assert CPUSGD([p]).step() is None


def test_hooks_fire() -> None:
    params = parameters()
    optimizer = CPUAdamW(params)
    fired: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: fired.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda *_: fired.append("loaded"))
    train(optimizer, params, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert fired == ["before", "after", "saved", "loaded"]


def test_a_pre_hook_may_replace_the_state_dict() -> None:
    params, others = parameters(BF16), parameters(BF16)
    optimizer, other = CPUAdamW(params), CPUAdamW(others)
    train(optimizer, params, range(3))
    other.register_load_state_dict_pre_hook(lambda _, given: given["inner"])
    other.load_state_dict({"inner": optimizer.state_dict()})
    assert_same_state(other, optimizer)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(to_none: bool) -> None:
    params = parameters()
    optimizer = CPUAdamW(params)
    train(optimizer, params, range(1))
    optimizer.zero_grad(set_to_none=to_none)
    assert all(p.grad is None if to_none else not p.grad.any() for p in params)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    if to_none:
        assert_bits(params, before)
    assert {float(s["step"]) for s in optimizer.state.values()} == {1.0 if to_none else 2.0}


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_backward_through_a_graph_from_before_the_step_is_an_error(dtype: torch.dtype) -> None:
    weight = Parameter(torch.ones(3, 3, dtype=dtype))
    optimizer = CPUAdamW([weight])
    x = torch.ones(3, 3, dtype=dtype, requires_grad=True)
    loss = (x @ weight).sum()
    weight.grad = torch.ones_like(weight)
    before = weight._version
    optimizer.step()
    assert weight._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_without_a_gradient_are_left_alone() -> None:
    mine, other = parameters(), parameters()
    one, two = CPUAdamW(mine), torch.optim.AdamW(other)
    mine[0].requires_grad_(False)
    other[0].requires_grad_(False)
    for step in range(6):
        for params, optimizer in ((mine, one), (other, two)):
            give_gradients(params, step)
            params[0].grad = None
            if step % 2:
                params[1].grad = None
            optimizer.step()
    assert mine[0]._version == 0
    assert mine[0] not in one.state
    assert float(one.state[mine[1]]["step"]) == 3
    for m, o in zip(mine, other, strict=True):
        torch.testing.assert_close(m, o, rtol=1e-5, atol=1e-6)


def test_a_step_without_any_gradient_does_nothing() -> None:
    params = parameters()
    optimizer = CPUAdamW(params)
    optimizer.step()
    assert not optimizer.state


def test_tied_parameters_are_updated_once() -> None:
    model = models.make_model("transformer")
    optimizer = CPUAdamW(model.parameters())
    models.next_token_loss(model, models.make_batches(1, 1, 1)[0][0][0]).backward()
    optimizer.step()
    assert model.head.weight is model.tokens.weight
    assert float(optimizer.state[model.tokens.weight]["step"]) == 1


@pairwise(dtype=[FP32, BF16, FP16], layout=LAYOUTS, name=OURS)
def test_any_strides_give_the_same_values(name: str, layout: str, dtype: torch.dtype) -> None:
    """channels_last, transposed and strided parameters, an expanded gradient, a scalar and nothing at all."""
    generator = torch.Generator().manual_seed(3)
    usual = [
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, 3, 4, 5), (4, 6), (5, 3), (3, 4), (), (0, 3))
    ]
    plain = [Parameter(t.clone()) for t in usual]
    storage = torch.zeros(10, 3, dtype=dtype)
    odd = [
        Parameter(usual[0].clone().to(memory_format=torch.channels_last)),
        Parameter(usual[1].t().contiguous().t()),
        Parameter(storage[::2].copy_(usual[2])),
        *(Parameter(t.clone()) for t in usual[3:]),
    ]
    assert not any(p.is_contiguous() for p in odd[:3])
    one, two = OURS[name](plain, master_layout=layout), OURS[name](odd, master_layout=layout)
    for step in range(4):
        give_gradients(plain, step)
        plain[3].grad = torch.full((), 0.5, dtype=dtype).expand(3, 4)
        for p, o in zip(plain, odd, strict=True):
            o.grad = torch.empty_like(o).copy_(p.grad) if o is not odd[3] else p.grad
        one.step()
        two.step()
    assert_bits(odd, plain)
    assert not storage[1::2].any()
    assert [p.stride() for p in odd[:2]] == [(60, 1, 15, 3), (1, 4)]
    assert_same_state(two, one)


def test_a_large_parameter_takes_huge_pages_and_goes_through_a_file(tmp_path: Path) -> None:
    """From 2 MiB on state lies in a mapping of its own: saving and copying it must not know."""
    (p,) = parameters(BF16, shapes=((1030, 1021),))
    optimizer = CPUAdamW([p])
    train(optimizer, [p], range(1))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < p.numel() * 12 + 10_000
    other = copy.deepcopy(p)
    loaded = CPUAdamW([other])
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same_state(loaded, optimizer)
    assert_same_state(copy.deepcopy(optimizer), optimizer)
    train(optimizer, [p], range(1, 2))
    train(loaded, [other], range(1, 2))
    assert_bits([other], [p])


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(bad: Parameter, error: type[Exception], match: str, layout: str = "fp32") -> None:
    """An error, before anything is written."""
    good = parameters(BF16)
    optimizer = CPUAdamW([*good, bad], master_layout=layout)  # type: ignore[arg-type]
    give_gradients(good, 0)
    before = [p.detach().clone() for p in good]
    versions = [p._version for p in good]
    with pytest.raises(error, match=match):
        optimizer.step()
    assert_bits(good, before)
    assert not optimizer.state
    assert [p._version for p in good] == versions


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    bad = Parameter(torch.ones(3, dtype=dtype))
    bad.grad = torch.ones(3, dtype=dtype)
    refused(bad, TypeError, rf"has dtype {dtype}; expected torch.float32, torch.bfloat16 or torch.float16.*torch.optim")


def test_other_devices_are_refused() -> None:
    bad = Parameter(torch.ones(3, device="meta"))
    bad.grad = torch.ones(3, device="meta")
    refused(bad, ValueError, r"shape \(3,\) is on device meta; .*zero2_offload")


@pytest.mark.device
def test_a_parameter_on_a_device_is_refused(device: torch.device) -> None:
    bad = Parameter(torch.ones(3, device=device))
    bad.grad = torch.ones(3, device=device)
    refused(bad, ValueError, f"is on device {device}")


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    refused(embedding.weight, TypeError, "sparse=False in embeddings")


def test_a_group_with_a_wrong_hyperparameter_is_refused_before_anything_is_written() -> None:
    params = parameters()
    optimizer = CPUAdamW([{"params": params[:2]}, {"params": params[2:]}])
    optimizer.param_groups[1]["eps"] = -1.0
    give_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"eps=-1.0 is out of range"):
        optimizer.step()
    assert_bits(params, before)


@pytest.mark.parametrize(
    ("make", "arguments", "match"),
    [
        (CPUAdam, {"lr": -1.0}, "lr=-1.0"),
        (CPUAdam, {"lr": float("nan")}, "lr=nan"),
        (CPUAdam, {"eps": -1.0}, "eps=-1.0"),
        (CPUAdamW, {"betas": (0.9, 1.0)}, "betas="),
        (CPUAdamW, {"betas": (-0.1, 0.9)}, "betas="),
        (CPUAdamW, {"betas": (0.9,)}, "betas="),
        (CPUAdamW, {"weight_decay": -1.0}, "weight_decay=-1.0"),
        (CPUAdagrad, {"lr_decay": -1.0}, "lr_decay=-1.0"),
        (CPUAdagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value=-1.0"),
        (CPUAdagrad, {"eps": -1.0}, "eps=-1.0"),
        (CPULion, {"betas": (0.9, 0.99, 0.999)}, "betas="),
        (CPULion, {"lr": float("inf")}, "lr=inf"),
        (CPUSGD, {"momentum": -0.1}, "momentum=-0.1"),
        (CPUSGD, {"nesterov": True}, "nesterov"),
        (CPUSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov"),
        (CPUSGD, {"dampening": float("nan"), "momentum": 0.9}, "dampening=nan"),
        (CPUAdam, {"master_layout": "half"}, "master_layout='half' is unknown"),
        (CPULion, {"state_dtype": torch.float16}, "state_dtype=torch.float16 is unknown"),
        (CPUAdagrad, {"state_dtype": "bf16"}, "state_dtype='bf16' is unknown"),
        (CPUAdagrad, {"state_dtype": "int8"}, "state_dtype=torch.int8 with the state 'sum'; 8 bits are for Adam"),
        (CPUAdamW, {"state_dtype": "int8", "amsgrad": True}, "with the state 'max_exp_avg_sq'; 8 bits are for Adam"),
        (CPUSGD, {"state_dtype": "int8"}, "with the state 'momentum_buffer'; 8 bits are for Adam"),
        (CPUSGD, {"seed": -1}, "seed=-1 is out of range"),
        (CPUSGD, {"seed": 2**64}, "seed=18446744073709551616 is out of range"),
        (CPUSGD, {"seed": 0.5}, "seed=0.5 is out of range"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(parameters(), **arguments)


def test_no_parameters_are_refused_as_by_torch() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        CPUAdamW([])


@pytest.mark.parametrize(("mode", "name"), [(True, "CPUAdamW"), (False, "CPUAdam")])
def test_deepspeeds_argument_is_taken_with_a_warning(mode: bool, name: str) -> None:
    with pytest.warns(UserWarning, match=rf"DeepSpeed's name; use {name} instead") as caught:
        optimizer = CPUAdam(parameters(), adamw_mode=mode)
    assert caught[0].filename == __file__
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is mode
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CPUAdam(parameters())
        CPUAdamW(parameters())


# ---------------------------------------------------------------------------------------------------------- state dicts


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("direction", ["to torch", "from torch"])
@every_pair
def test_state_dicts_are_exchanged_with_torch(name: str, direction: str) -> None:
    ours, theirs, options = PAIRS[name]
    first, second = (ours, theirs) if direction == "to torch" else (theirs, ours)
    params, whole = parameters(), parameters()
    optimizer = first(params, **options)
    train(optimizer, params, range(5))
    going_on = second(params, lr=0.5)  # the rest comes with the state
    going_on.load_state_dict(through_a_file(optimizer.state_dict()))
    train(going_on, params, range(5, 10))
    train(theirs(whole, **options), whole, range(10))
    for p, w in zip(params, whole, strict=True):
        torch.testing.assert_close(p, w, rtol=1e-5, atol=1e-6)
        if ours is CPUSGD:
            assert torch.equal(p, w)
    assert {float(s.get("step", 10)) for s in going_on.state.values()} <= {10.0}


@every_pair
def test_a_state_dict_has_torchs_keys(name: str) -> None:
    ours, theirs, options = PAIRS[name]
    described = []
    for make in (ours, theirs):
        params = parameters()
        optimizer = make(params, **options)
        train(optimizer, params, range(2))
        state = optimizer.state_dict()["state"]
        described.append({k: {n: (t.dtype, t.shape) for n, t in s.items()} for k, s in state.items()})
    assert described[0] == described[1]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_16_bit_states_are_exchanged_with_torch(dtype: torch.dtype) -> None:
    """torch keeps them in 16 bits; ours is fp32 afterwards, and back in torch 16 bits again."""
    params = parameters(dtype)
    theirs = torch.optim.AdamW(params)
    train(theirs, params, range(3))
    ours = CPUAdamW(params)
    ours.load_state_dict(theirs.state_dict())
    for p in params:
        assert ours.state[p]["exp_avg"].dtype == FP32
        assert torch.equal(ours.state[p]["exp_avg"], theirs.state[p]["exp_avg"].float())
        assert float(ours.state[p]["step"]) == 3
    train(ours, params, range(3, 6))
    back = torch.optim.AdamW(params)
    back.load_state_dict(ours.state_dict())
    train(back, params, range(6, 9))
    assert {float(s["step"]) for s in back.state.values()} == {9.0}
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loading_keeps_every_digit_of_16_bit_parameters(layout: str, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = CPUAdamW(params, master_layout=layout)  # type: ignore[arg-type]
    train(optimizer, params, range(5))
    saved = copy.deepcopy(optimizer.state_dict())
    other = CPUAdamW(params, master_layout=layout)  # type: ignore[arg-type]
    other.load_state_dict(saved)
    assert_same_state(other, optimizer)
    assert saved["state"].keys() == optimizer.state_dict()["state"].keys()
    for key, state in saved["state"].items():
        for name, value in state.items():
            assert torch.equal(value, optimizer.state_dict()["state"][key][name])
            assert value.data_ptr() != other.state_dict()["state"][key][name].data_ptr(), "the saved dict is shared"


def check_resume(
    make: Make,
    dtype: torch.dtype,
    order: str = "model first",
    *,
    then: dict[str, Any] | None = None,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    **options: Any,
) -> None:
    """Stopped, saved to a file and resumed in new objects: the same bits as training through."""
    params = parameters(dtype, shapes)
    optimizer = make(params, **options)
    train(optimizer, params, range(5))
    saved = [p.detach().clone() for p in params]
    state = through_a_file(optimizer.state_dict())
    train(optimizer, params, range(5, 10))
    others = [Parameter(torch.full_like(p, 0.75)) for p in params]
    resumed = make(others, **(options | (then or {})))

    def load_model() -> None:
        with torch.no_grad():
            for other, values in zip(others, saved, strict=True):
                other.copy_(values)

    if order == "model first":
        load_model()
    resumed.load_state_dict(state)
    if order == "optimizer first":
        load_model()
    train(resumed, others, range(5, 10))
    assert_bits(others, params)
    if then is None:
        assert_same_state(resumed, optimizer)


@pairwise(
    order=["model first", "optimizer first"], dtype=[FP32, BF16, FP16], state_dtype=STATES, layout=LAYOUTS, name=OURS
)
def test_a_resumed_run_has_the_same_bits(
    name: str, layout: str, state_dtype: torch.dtype, dtype: torch.dtype, order: str
) -> None:
    check_resume(OURS[name], dtype, order, master_layout=layout, state_dtype=state_dtype, seed=5)


@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize(("dtype", "layout"), [(FP32, "fp32"), (BF16, "split")])
def test_a_resumed_run_in_blocks_has_the_same_bits(name: str, dtype: torch.dtype, layout: str) -> None:
    """A state dict has 8-bit state in fp32, which is stored again without loss."""
    shapes = ((20, 70), (256,), (257,), (1,))
    check_resume(OURS[name], dtype, shapes=shapes, master_layout=layout, state_dtype=INT8, seed=5)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize(("before", "after"), [LAYOUTS, LAYOUTS[::-1]])
def test_a_bf16_run_resumes_in_the_other_layout(before: str, after: str, order: str) -> None:
    if (before, order) == ("split", "optimizer first"):
        pytest.skip("a remainder means nothing without its parameter: documented")
    check_resume(OURS["adamw"], BF16, order, master_layout=before, then={"master_layout": after})


@pytest.mark.parametrize(("before", "after"), [LAYOUTS, LAYOUTS[::-1]])
def test_an_fp16_run_resumes_in_the_other_layout(before: str, after: str) -> None:
    """Where weights are not tiny."""

    def make(params: Any, **options: Any) -> Optimizer:
        return CPUSGD(params, lr=1e-3, momentum=0.9, **options)

    check_resume(make, FP16, master_layout=before, then={"master_layout": after})


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiny_weights_resume_with_the_same_bits(layout: str, dtype: torch.dtype) -> None:
    """Biases that start at zero and a learning rate that warms up: their 16-bit values are zero for a while."""

    def run(resume: bool) -> list[Tensor]:
        p = Parameter(torch.zeros(64, dtype=dtype))
        optimizer = CPUSGD([p], lr=1e-9, master_layout=layout)  # type: ignore[arg-type]
        for step in range(40):
            if resume and step == 5:
                p = Parameter(p.detach().clone())
                other = CPUSGD([p], lr=1.0, master_layout=layout)  # type: ignore[arg-type]
                other.load_state_dict(through_a_file(optimizer.state_dict()))
                optimizer = other
            p.grad = torch.linspace(-1, 1, 64).to(dtype)
            optimizer.step()
        return [p, *(v for v in optimizer.state[p].values())]

    assert_bits(run(True), run(False))


def test_state_of_another_dtype_is_converted() -> None:
    for first, second in (STATES, STATES[::-1]):
        params = parameters()
        optimizer = CPUAdamW(params, state_dtype=first)
        train(optimizer, params, range(3))
        other = CPUAdamW(params, state_dtype=second)
        other.load_state_dict(optimizer.state_dict())
        for p in params:
            assert other.state[p]["exp_avg"].dtype == second
            assert torch.equal(other.state[p]["exp_avg"], optimizer.state[p]["exp_avg"].to(second))
            assert other.state[p]["step"].dtype == FP32
        train(other, params, range(3, 5))


def test_state_in_blocks_goes_to_torch_and_back() -> None:
    params = parameters(shapes=((30, 40), (5,)))
    optimizer = CPUAdamW(params, state_dtype="int8")
    train(optimizer, params, range(3))
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(optimizer.state_dict())
    back = CPUAdamW(params, state_dtype="int8")
    back.load_state_dict(theirs.state_dict())
    assert_same_state(theirs, optimizer)
    assert_same_state(back, optimizer)
    assert {s["exp_avg_sq"].dtype for s in theirs.state.values()} == {FP32}


@pairwise(dtype=[FP32, BF16], how=["deepcopy", "pickle"], layout=LAYOUTS, state_dtype=[BF16, INT8])
def test_a_copied_optimizer_goes_on_alike(layout: str, how: str, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = CPUAdamW(params, master_layout=layout, state_dtype=state_dtype, seed=3)  # type: ignore[arg-type]
    train(optimizer, params, range(3))
    both = (params, optimizer)
    others, copied = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert copied.param_groups[0]["params"][0] is others[0]
    assert copied.numbers == optimizer.numbers
    train(optimizer, params, range(3, 6))
    train(copied, others, range(3, 6))
    assert_bits(others, params)
    assert_same_state(copied, optimizer)


def test_a_state_dict_with_other_groups_is_refused_and_changes_nothing() -> None:
    params = parameters()
    optimizer = CPUAdamW(params)
    train(optimizer, params, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(CPUAdamW(params[:2]).state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(after["state"][key][name], value)


def test_state_of_another_shape_is_refused() -> None:
    """It must not be broadcast: torch's next step would fail."""
    small, large = Parameter(torch.ones(7)), Parameter(torch.ones(5, 7))
    optimizer, other = CPUAdamW([small]), CPUAdamW([large])
    train(optimizer, [small], range(1))
    with pytest.raises((ValueError, RuntimeError), match="shape"):
        other.load_state_dict(optimizer.state_dict())


def test_a_hook_after_loading_sees_the_state_as_it_is_kept() -> None:
    params = parameters(BF16)
    optimizer = CPUAdamW(params)
    train(optimizer, params, range(1))
    seen: list[torch.dtype] = []
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[params[0]]["exp_avg"].dtype))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [FP32]


def test_adamw_stays_decoupled_whatever_it_loads() -> None:
    params = parameters()
    optimizer = CPUAdamW(params)
    optimizer.load_state_dict(torch.optim.Adam(params).state_dict())
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
    optimizer.load_state_dict(CPUAdam(params).state_dict())
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


# ---------------------------------------------------------------------------------------- 16-bit parameters and masters


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "zeroed": lambda p: p.zero_(),
    "scaled": lambda p: p.mul_(3.0),
    "clamped": lambda p: p.clamp_(-0.25, 0.25),
    "filled": lambda p: p.fill_(1.5),
    "negated": lambda p: p.neg_(),
    "one element": lambda p: p.view(-1)[0].fill_(-7.0),
    "data, assigned": lambda p: setattr(p, "data", torch.full_like(p, 0.5)),
}


@pairwise(dtype=[FP32, BF16, FP16], layout=LAYOUTS, edit=EDITS)
def test_edits_of_parameters_are_taken_over(edit: str, layout: str, dtype: torch.dtype) -> None:
    """A small step from there: the parameter is near what the user wrote."""
    params = parameters(dtype)
    optimizer = CPUAdamW(params, lr=1e-2, master_layout=layout, weight_decay=0.0)  # type: ignore[arg-type]
    train(optimizer, params, range(3))
    with torch.no_grad():
        for p in params:
            EDITS[edit](p)
    expected = [p.detach().float().clone() for p in params]
    optimizer.param_groups[0]["lr"] = 1e-4
    train(optimizer, params, range(3, 5))
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().float(), e, rtol=2.0**-7, atol=5e-4)


def test_nothing_is_held_of_a_model_that_was_converted_to_fp32() -> None:
    parameter = Parameter(torch.ones(8, dtype=BF16))
    optimizer = CPUAdamW([parameter])
    for dtype in (BF16, FP32):
        parameter.data = parameter.data.to(dtype)
        parameter.grad = torch.ones(8, dtype=dtype)
        optimizer.step()
    assert not optimizer._seen
    assert optimizer.state[parameter].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_that_is_assigned_twice_is_taken_over(layout: str) -> None:
    """The allocator may give the second tensor the place that the first one had."""
    parameter = Parameter(torch.ones(1000, dtype=BF16))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = CPUSGD([parameter], lr=0.1, master_layout=layout)  # type: ignore[arg-type]
    optimizer.step()
    for _ in range(2):
        parameter.data = parameter.data * 0.5
    optimizer.step()
    assert (parameter == 0.25).all()


@pairwise(dtype=[FP32, BF16, FP16], layout=LAYOUTS, value=[0.0, -0.0, 0.5, torch.inf, torch.nan])
def test_an_edit_without_a_trace_makes_no_other_number(value: float, layout: str, dtype: torch.dtype) -> None:
    """Through `.data`, in place: nobody sees it. A master of its own undoes it, a split one takes it over."""
    params = parameters(dtype)
    optimizer = CPUAdamW(params, lr=1e-2, master_layout=layout, weight_decay=0.0)  # type: ignore[arg-type]
    train(optimizer, params, range(3))
    before = [p.detach().float().clone() for p in params]
    for p in params:
        p.data.fill_(value)
    optimizer.param_groups[0]["lr"] = 1e-4
    train(optimizer, params, range(3, 5))
    for p, b in zip(params, before, strict=True):
        expected = b if layout == "fp32" and dtype != FP32 else torch.full_like(b, value)
        torch.testing.assert_close(p.detach().float(), expected, rtol=2.0**-7, atol=5e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_edit_of_some_elements_leaves_the_digits_of_the_others(layout: str, dtype: torch.dtype) -> None:
    params, others = parameters(dtype), parameters(dtype)
    one, two = (CPUSGD(ps, lr=1e-3, momentum=0.9, master_layout=layout) for ps in (params, others))  # type: ignore[arg-type]
    train(one, params, range(20))
    train(two, others, range(20))
    with torch.no_grad():
        params[0][0].zero_()
    train(one, params, range(20, 40))
    train(two, others, range(20, 40))
    assert torch.equal(params[0][1:], others[0][1:])
    assert_bits(params[1:], others[1:])
    assert params[0].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loaded_model_is_taken_over(layout: str) -> None:
    model, other = (models.make_model("mlp", dtype=BF16, seed=seed) for seed in (0, 1))
    optimizer = CPUSGD(model.parameters(), lr=1e-6, master_layout=layout)  # type: ignore[arg-type]
    train(optimizer, list(model.parameters()), range(2))
    model.load_state_dict(other.state_dict())
    train(optimizer, list(model.parameters()), range(2, 3))
    for p, o in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, o, rtol=2.0**-7, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_is_converted_there_and_back_has_no_old_master(layout: str) -> None:
    model = models.make_model("mlp", dtype=BF16)
    params = list(model.parameters())
    optimizer = CPUSGD(params, lr=0.1, master_layout=layout)  # type: ignore[arg-type]
    train(optimizer, params, range(2))
    model.float()
    train(optimizer, params, range(2, 5))
    model.bfloat16()
    expected = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["lr"] = 1e-6
    train(optimizer, params, range(5, 6))
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), e, rtol=2.0**-7, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 3e38, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_value_that_is_written_is_the_masters(layout: str, value: float) -> None:
    """A learning rate of zero: what comes back is what was written."""
    p = Parameter(torch.linspace(-2, 2, 100).to(BF16))
    optimizer = CPUSGD([p], lr=1e-3, master_layout=layout)  # type: ignore[arg-type]
    train(optimizer, [p], range(3))
    with torch.no_grad():
        p.fill_(value)
    optimizer.param_groups[0]["lr"] = 0.0
    written = p.detach().clone()
    train(optimizer, [p], range(3, 5))
    assert torch.equal(p.detach().nan_to_num(7.0), written.nan_to_num(7.0))


@pairwise(dtype=[BF16, FP16], state_dtype=STATES, name=OURS)
def test_both_layouts_give_the_same_bits(name: str, state_dtype: torch.dtype, dtype: torch.dtype) -> None:
    trained = []
    for layout in LAYOUTS:
        params = [Parameter(p.detach() + 3 * p.detach().sign()) for p in parameters(dtype)]  # far from zero
        optimizer = OURS[name](params, master_layout=layout, state_dtype=state_dtype)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        train(optimizer, params, range(50))
        trained.append(params)
    assert_bits(*trained)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_small_model_trains_alike_with_both_layouts(dtype: torch.dtype) -> None:
    losses, trained = [], []
    for layout in LAYOUTS:
        model = models.make_model("mlp", dtype=dtype)
        if dtype == FP16:  # no bias that crosses zero, where the split master has fewer digits
            for name, p in model.named_parameters():
                p.requires_grad_("weight" in name)
        wanted = [p for p in model.parameters() if p.requires_grad]
        optimizer = CPUAdamW(wanted, lr=2e-3, master_layout=layout)  # type: ignore[arg-type]
        seen = []
        for (((batch,),),) in zip(models.make_batches(300, 1, 1), strict=True):
            optimizer.zero_grad()
            loss = models.next_token_loss(model, batch)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        losses.append(seen)
        trained.append(list(model.parameters()))
    assert losses[0] == losses[1]
    assert_bits(*trained)
    assert sum(losses[0][-20:]) < sum(losses[0][:20])


def test_halfway_values_round_alike_in_both_layouts() -> None:
    """1 + 2^-8 is halfway between two bf16 numbers."""
    trained = []
    for layout in LAYOUTS:
        p = Parameter(torch.tensor([1.0, -1.0, 1.0078125], dtype=BF16))
        optimizer = CPUSGD([p], lr=1.0, master_layout=layout)  # type: ignore[arg-type]
        p.grad = torch.tensor([-(2.0**-8), 2.0**-8, -(2.0**-8)], dtype=BF16)
        optimizer.step()
        trained.append(p)
    assert_bits([trained[0]], [trained[1]])
    assert trained[0].tolist() == [1.0078125, -1.0078125, 1.015625]


@pytest.mark.parametrize(
    ("layout", "state_dtype", "expected"),
    [
        ("fp32", FP32, 12),
        ("split", FP32, 10),
        ("fp32", BF16, 8),
        ("split", BF16, 6),
    ],
)
def test_bytes_an_element_beside_the_parameter(layout: str, state_dtype: torch.dtype, expected: int) -> None:
    (p,) = parameters(BF16, shapes=((50, 50),))
    optimizer = CPUAdamW([p], master_layout=layout, state_dtype=state_dtype)  # type: ignore[arg-type]
    train(optimizer, [p], range(2))
    assert sum(t.nbytes for t in optimizer.state[p].values() if t.dim()) == expected * p.numel()


# ----------------------------------------------------------------------------------------------------------- bf16 state


@every_class
def test_bf16_state_has_the_same_bits_for_any_threads(name: str) -> None:
    trained = []
    for threads in (1, 3, 1):
        ops.set_num_threads(threads)
        params = parameters(BF16, shapes=((301, 307), (3,)))
        optimizer = OURS[name](params, state_dtype=BF16, master_layout="split")
        train(optimizer, params, range(3))
        trained.append((params, optimizer))
    for params, optimizer in trained[1:]:
        assert_bits(params, trained[0][0])
        assert_same_state(optimizer, trained[0][1])


def test_another_seed_rounds_otherwise() -> None:
    states = []
    for seed in (0, 1, 2**64 - 1):
        params = parameters()
        optimizer = CPUAdamW(params, state_dtype=BF16, seed=seed)
        train(optimizer, params, range(3))
        states.append(optimizer.state[params[0]]["exp_avg"])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(states, 2))


def test_equal_parameters_round_apart() -> None:
    params = [Parameter(torch.ones(500)) for _ in range(2)]
    optimizer = CPUAdamW(params, state_dtype=BF16)
    for p in params:
        p.grad = torch.linspace(0.1, 1, 500)
    optimizer.step()
    assert not torch.equal(optimizer.state[params[0]]["exp_avg"], optimizer.state[params[1]]["exp_avg"])


def test_bf16_state_is_right_on_average() -> None:
    """A second moment of constant gradients, which rounding to nearest would stop far below its limit."""
    p = Parameter(torch.zeros(2000))
    optimizer = CPUAdam([p], lr=0.0, state_dtype=BF16)
    for _ in range(500):
        p.grad = torch.ones(2000)
        optimizer.step()
    expected = 1 - 0.999**500
    assert optimizer.state[p]["exp_avg_sq"].double().mean().item() == pytest.approx(expected, rel=0.01)


# ------------------------------------------------------------------------------------------------- together with others


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_grad_scaler_drives_it(dtype: torch.dtype) -> None:
    params, others = parameters(dtype), parameters(dtype)
    optimizer, usual = CPUSGD(params, lr=0.1), CPUSGD(others, lr=0.1)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=8.0)
    for step in range(3):
        give_gradients(params, step)
        give_gradients(others, step)
        scaler.scale(torch.ones(()))
        for p in params:
            p.grad.mul_(8.0)
        if step == 1:
            params[0].grad.view(-1)[0] = torch.inf
        else:
            usual.step()
        scaler.step(optimizer)
        scaler.update(8.0)
    assert_bits(params, others)


def test_gradients_are_clipped_before_it() -> None:
    params = parameters()
    optimizer = CPUSGD(params, lr=1.0)
    give_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    torch.nn.utils.clip_grad_norm_(params, 1e-3)
    optimizer.step()
    moved = torch.stack([(p - b).norm() for p, b in zip(params, before, strict=True)]).norm()
    assert moved.item() == pytest.approx(1e-3, rel=1e-2)


class Plain(LightningModule):
    """A module that knows nothing of strategies."""

    def __init__(self, options: dict[str, Any], seed: int = 0) -> None:
        super().__init__()
        self.model = models.make_model("mlp", seed=seed)
        self.options = options

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return models.next_token_loss(self.model, batch)

    def configure_optimizers(self) -> Any:
        optimizer = CPUAdamW(self.parameters(), lr=1e-2, **self.options)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": CosineAnnealingLR(optimizer, 10)}}

    def train_dataloader(self) -> Any:
        return DataLoader([b for ((b,),) in models.make_batches(3, 1, 1)], batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_plain_lightning_trains_and_resumes(precision: Any, tmp_path: Path) -> None:
    options = {"master_layout": "split", "state_dtype": BF16}
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "precision": precision,
        "gradient_clip_val": 0.5,
    }
    path = str(tmp_path / "half.ckpt")
    trainer = Trainer(max_epochs=2, **quiet)
    trainer.fit(Plain(options))
    trainer.save_checkpoint(path)
    whole, resumed = Plain(options), Plain(options, seed=7)
    trainer = Trainer(max_epochs=4, **quiet)
    trainer.fit(whole)
    other = Trainer(max_epochs=4, **quiet)
    other.fit(resumed, ckpt_path=path, weights_only=True)
    assert_bits(list(resumed.parameters()), list(whole.parameters()))
    assert_same_state(other.optimizers[0], trainer.optimizers[0])
