"""The update rules against their formulas in double precision, step by step, and against torch.optim."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pairs import pairwise
from ops.problems import FLOATS, MASTERS, RULES, Layout, Rule, layouts, ordinary, same_bits, split
from torch import Tensor

from lightning_zero import ops

COUNT = 67
PRECISION = 2.0**-23
PLAIN = {"weight_decay": 0.0}
EVERYTHING = {"maximize": True, "grad_scale": 0.37}  # with the weight decay that all rules have

Array = np.ndarray[Any, np.dtype[np.float64]]


# ------------------------------------------------------------------------------------ formulas in double precision


def f32(x: float) -> float:
    """A hyperparameter as the kernels have it."""
    return float(np.float32(x))


def fused(a: Array | float, b: Array, c: Array) -> Array:
    """a * b + c for fp32 numbers, rounded to fp32 once: the sum is rounded to odd in between."""
    product = np.asarray(a * b)  # exact
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    inexact = (error != 0.0) & (bits % 2 == 0)
    bits = bits + np.where(inexact, np.where((error > 0.0) == (total > 0.0), 1, -1), 0)
    return bits.view(np.float64).astype(np.float32).astype(np.float64)


@dataclass(frozen=True)
class Steps:
    """A row for every step: what was stored before and after it, and the step's gradient in fp32."""

    t: Array  # [steps, 1], from 1
    p: Array
    old: dict[str, Array]
    new: dict[str, Array]
    g: Array


@dataclass(frozen=True)
class Expected:
    """The states' values with the sums of their terms' magnitudes, and the same of the update."""

    states: dict[str, tuple[Array, Array]]
    update: Array
    magnitude: Array
    certain: Array | bool = True


def per_step(t: Array, coefficient: Callable[[float], float]) -> Array:
    return np.array([[f32(coefficient(float(each)))] for each in t[:, 0]])


def adam(a: dict[str, Any], s: Steps) -> Expected:
    (beta1, beta2), lr = a["betas"], a["lr"]
    weight = f32(1 - beta1)
    m, v = s.old["exp_avg"], s.old["exp_avg_sq"]
    second = f32(beta2) * v + f32(1 - beta2) * s.g**2
    states = {
        "exp_avg": ((1 - weight) * m + weight * s.g, np.abs((1 - weight) * m) + np.abs(weight * s.g)),
        "exp_avg_sq": (second, second),
    }
    last = "exp_avg_sq"
    if "max_exp_avg_sq" in s.old:
        last = "max_exp_avg_sq"
        largest = np.maximum(s.old[last], second)
        states[last] = (largest, largest)
    correction = per_step(s.t, lambda t: math.sqrt(1 - math.pow(beta2, t)))
    step_size = per_step(s.t, lambda t: lr / (1 - math.pow(beta1, t)))
    update = -step_size * s.new["exp_avg"] / (np.sqrt(s.new[last]) / correction + f32(a["eps"]))
    decay = f32(-(lr * a["weight_decay"])) * s.p if a.get("decoupled", True) else np.zeros_like(s.p)
    return Expected(states, update + decay, np.abs(update) + np.abs(decay))


def adagrad(a: dict[str, Any], s: Steps) -> Expected:
    total = s.old["sum"] + s.g**2
    lr = per_step(s.t, lambda t: a["lr"] / (1 + (t - 1) * a["lr_decay"]))
    update = -lr * s.g / (np.sqrt(s.new["sum"]) + f32(a["eps"]))
    return Expected({"sum": (total, total)}, update, np.abs(update))


def lion(a: dict[str, Any], s: Steps) -> Expected:
    (beta1, beta2), m = a["betas"], s.old["exp_avg"]

    def mean(beta: float) -> tuple[Array, Array]:
        old, new = f32(beta) * m, f32(1 - beta) * s.g
        return old + new, np.abs(old) + np.abs(new)

    direction, magnitude = mean(beta1)
    certain = np.abs(direction) >= 2.0**-22 * magnitude
    update, decay = -f32(a["lr"]) * np.sign(direction), f32(-(a["lr"] * a["weight_decay"])) * s.p
    return Expected({"exp_avg": mean(beta2)}, update + decay, np.abs(update) + np.abs(decay), certain)


def sgd(a: dict[str, Any], s: Steps) -> Expected:
    lr, momentum = f32(a["lr"]), f32(a.get("momentum", 0.0))
    if momentum == 0.0:
        return Expected({}, -lr * s.g, np.abs(lr * s.g))
    old, new = momentum * s.old["momentum_buffer"], f32(1 - a.get("dampening", 0.0)) * s.g
    first = s.t == 1
    buffer = np.where(first, s.g, old + new), np.where(first, np.abs(s.g), np.abs(old) + np.abs(new))
    stored = s.new["momentum_buffer"]
    terms = [-lr * s.g, -lr * momentum * stored] if a.get("nesterov") else [-lr * stored]
    return Expected({"momentum_buffer": buffer}, sum(terms), sum(np.abs(term) for term in terms))  # type: ignore[arg-type]


FORMULAS = {ops.adamw_: adam, ops.adagrad_: adagrad, ops.lion_: lion, ops.sgd_: sgd}


# -------------------------------------------------------------------------------------------------------- accuracy


def bf16_neighbours(low: Array, high: Array) -> tuple[Array, Array]:
    """The largest bf16 numbers that are at most `low`, the smallest ones that are at least `high`."""

    def below(x: Array) -> Array:
        single = x.astype(np.float32)
        single = np.where(single > x, np.nextafter(single, np.float32(-np.inf)), single)
        truncated = (single.view(np.int32) & -0x10000).view(np.float32)  # towards zero
        away = ((single.view(np.int32) & -0x10000) + 0x10000).view(np.float32)
        return np.where(truncated <= single, truncated, away).astype(np.float64)

    return below(low), -below(-high)


def double(tensor: Tensor) -> Array:
    return tensor.double().numpy()


def ulp(x: Array) -> Array:
    """The distance from |x| to the next larger fp32 number."""
    single = np.abs(x).astype(np.float32)
    return np.nextafter(single, np.float32(np.inf)).astype(np.float64) - single


def gradients(dtype: torch.dtype, steps: int, generator: torch.Generator) -> Tensor:
    """Each element with a magnitude of its own, and a zero at times."""
    exponents = torch.linspace(-18, 3, COUNT).round()[torch.randperm(COUNT, generator=generator)]
    grads = torch.randn(steps, COUNT, generator=generator) * 2.0**exponents
    return (grads * (torch.rand(steps, COUNT, generator=generator) > 0.01)).to(dtype)


def updated(rule: Rule, layout: Layout, grads: Tensor, start: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors before the first step and after every step: [steps + 1, count]."""
    master = MASTERS[layout.master]
    begin: dict[str, Tensor] = {name: torch.zeros(COUNT, dtype=layout.state) for name in rule.states}
    if master.split is None:
        begin["param"] = start
    else:
        begin["param"], begin["remainder"] = split(start, master.split)
    if master.copy is not None:
        begin["copy_out"] = torch.zeros(COUNT, dtype=master.copy)
    rows = {name: tensor.repeat(len(grads) + 1, 1) for name, tensor in begin.items()}
    for t in range(1, len(grads) + 1):
        for tensor in rows.values():
            tensor[t] = tensor[t - 1]
        first = {"first": t == 1} if "momentum" in rule.arguments else {}
        tensors = {name: tensor[t] for name, tensor in rows.items()} | {"grad": grads[t - 1]}
        rule(tensors, step=t, seed=11, copy_ties=master.ties, **first, **options)
    return rows


def check_steps(rule: Rule, layout: Layout, options: dict[str, Any], count: int) -> None:
    generator = torch.Generator().manual_seed(8)
    grads = gradients(layout.grad, count, generator)
    start = torch.randn(COUNT, generator=generator) * 2.0 ** torch.randint(-30, 10, (COUNT,), generator=generator)
    start[::16] = 0.0
    rows = updated(rule, layout, grads, start, options)
    whole = rows["param"]
    if "remainder" in rows:
        whole = torch.empty(rows["param"].shape)
        ops.join_(whole.view(-1), rows["param"].view(-1), rows["remainder"].view(-1))
    p = double(whole)

    arguments = rule.arguments | options
    scale = f32(arguments.get("grad_scale", 1.0)) * (-1.0 if arguments.get("maximize") else 1.0)
    g = double(grads.float() * torch.tensor(scale))
    if arguments["weight_decay"] != 0.0 and not (
        rule.update is ops.lion_ or (rule.update is ops.adamw_ and arguments.get("decoupled", True))
    ):
        g = fused(f32(arguments["weight_decay"]), p[:-1], g)
    states = {name: double(rows[name]) for name in rule.states}
    steps = Steps(
        t=np.arange(1.0, count + 1)[:, None],
        p=p[:-1],
        old={name: state[:-1] for name, state in states.items()},
        new={name: state[1:] for name, state in states.items()},
        g=g,
    )
    expected = FORMULAS[rule.update](arguments, steps)

    for name, (value, magnitude) in expected.states.items():
        bound = PRECISION * magnitude + 2.0**-149
        low, high = value - bound, value + bound
        if layout.state is torch.bfloat16:
            low, high = bf16_neighbours(low, high)
        assert ((low <= steps.new[name]) & (steps.new[name] <= high)).all(), name

    bound = 0.5 * ulp(np.maximum(np.abs(p[:-1]), np.abs(p[1:]))) + 4 * PRECISION * expected.magnitude
    if layout.master == "split fp16":
        bound = bound + np.where(np.abs(p[1:]) <= 2.0**-16, 2.0**-40, 0.0)
        assert np.abs(p).max() < 65520
    close = np.abs(p[1:] - (p[:-1] + expected.update)) <= bound
    certain = np.broadcast_to(expected.certain, close.shape)
    assert close[certain].all()
    assert certain.mean() > 0.999
    assert np.abs(p[-1] - p[0]).max() > 0.0  # it moved

    if MASTERS[layout.master].copy is not None and MASTERS[layout.master].ties == "even":
        assert same_bits(rows["copy_out"][1:], whole[1:].to(rows["copy_out"].dtype))


@pytest.mark.parametrize("rule_name", RULES)
def test_every_step_is_as_accurate_as_promised(rule_name: str) -> None:
    """The rules share the layouts: each meets a fifth of them."""
    rule, first = RULES[rule_name], 1 + list(RULES).index(rule_name) % 5
    check_steps(rule, Layout(torch.float32, "fp32", torch.float32), PLAIN, 1000)
    for number, layout in enumerate(layouts(rule)[first::5]):
        check_steps(rule, layout, (EVERYTHING, PLAIN, {"weight_decay": 0.3})[number % 3], 100)


def test_ten_steps_match_the_paper_in_double_precision() -> None:
    """Loosely, but with nothing of the kernel's: exact coefficients, and errors that add up."""
    for decoupled in (True, False):
        generator = torch.Generator().manual_seed(4)
        param = torch.randn(257, generator=generator)
        exp_avg, exp_avg_sq = torch.zeros(257), torch.zeros(257)
        p, m, v = param.double(), exp_avg.double(), exp_avg_sq.double()
        lr, (beta1, beta2), eps, decay = 1e-2, (0.9, 0.99), 1e-8, 0.1
        settings: dict[str, Any] = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
        for t in range(1, 11):
            grad = torch.randn(257, generator=generator)
            ops.adamw_(param, exp_avg, exp_avg_sq, grad, step=t, decoupled=decoupled, **settings)
            g = grad.double()
            if decoupled:
                p = p * (1 - lr * decay)
            else:
                g = g + decay * p
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            p = p - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
        torch.testing.assert_close(param.double(), p, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(exp_avg.double(), m, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(exp_avg_sq.double(), v, rtol=1e-5, atol=1e-7)


def test_amsgrad_never_forgets_the_largest_moment() -> None:
    """Also rounded to bf16: both moments take the same random bits, so that their order stays."""
    generator = torch.Generator().manual_seed(5)
    param = torch.zeros(1003)
    exp_avg, exp_avg_sq, largest = (torch.zeros(1003, dtype=torch.bfloat16) for _ in range(3))
    for step in range(1, 101):
        grad, before = ordinary(1003, torch.float32, generator), largest.clone()
        states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "max_exp_avg_sq": largest}
        RULES["amsgrad"]({"param": param, "grad": grad, **states}, step=step, seed=9)
        assert (largest >= exp_avg_sq).all()
        assert (largest >= before).all()


# ----------------------------------------------------------------------------------------------------------- torch

needs_fused_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"}, reason="torch rounds without FMA here"
)
TORCH_STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def first_optimizer() -> None:
    """The first optimizer makes torch import its compiler: keep that out of the time of a test."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()


class Pair:
    """A parameter under torch's optimizer and the same one under a kernel."""

    def __init__(
        self, rule: Rule, optimizer: type[torch.optim.Optimizer], count: int = 10_007, **settings: Any
    ) -> None:
        self.generator = torch.Generator().manual_seed(2)
        self.reference = torch.nn.Parameter(torch.randn(count, generator=self.generator))
        self.param = self.reference.detach().clone()
        self.states = {name: torch.zeros(count) for name in rule.states}
        self.rule, self.settings = rule, settings
        given = {name: value for name, value in (rule.arguments | settings).items() if name not in NOT_TORCHS}
        self.optimizer = optimizer([self.reference], foreach=False, **given)
        self.t = 0

    def step(self, **options: Any) -> None:
        self.t += 1
        self.reference.grad = ordinary(self.param.numel(), torch.float32, self.generator)
        self.optimizer.step()
        tensors = {"param": self.param, "grad": self.reference.grad, **self.states}
        self.rule(tensors, step=self.t, **self.settings, **options)

    def states_are_torchs(self) -> bool:
        stored = self.optimizer.state[self.reference]
        return all(same_bits(state, stored[name]) for name, state in self.states.items())


NOT_TORCHS = {"decoupled", "momentum_buffer"}


def one_ulp(x: Tensor) -> Tensor:
    return torch.from_numpy(ulp(double(x)))


@needs_fused_torch
@pairwise(
    betas=[(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.0, 0.99)],
    weight_decay=[0.0, 0.1],
    rule_name=["adam", "adamw", "amsgrad", "amsgradw"],
)
def test_adam_matches_torch(betas: tuple[float, float], weight_decay: float, rule_name: str) -> None:
    """Moments bitwise; the parameter within 1 ulp of itself plus 2^-21 of its update.

    Torch rounds the parameter once more, and a factor near 1, where a decay is decoupled: one more ulp.
    """
    decoupled, amsgrad = rule_name.endswith("w"), "amsgrad" in rule_name
    optimizer = torch.optim.AdamW if decoupled else torch.optim.Adam
    pair = Pair(RULES[rule_name], optimizer, betas=betas, weight_decay=weight_decay)
    pair.optimizer.param_groups[0]["amsgrad"] = amsgrad
    ulps = 2 if decoupled and weight_decay else 1
    for _ in range(TORCH_STEPS):
        before = pair.reference.detach().clone()
        pair.step()
        after = pair.reference.detach()
        assert pair.states_are_torchs()
        bound = ulps * one_ulp(torch.maximum(before.abs(), after.abs())) + 2.0**-21 * (after - before).abs().double()
        assert ((pair.param - after).abs().double() <= bound).all()
        # The bound is one step's: both continue from the same parameter.
        pair.param.copy_(after)


@needs_fused_torch
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adagrad_matches_torch(weight_decay: float) -> None:
    pair = Pair(RULES["adagrad"], torch.optim.Adagrad, weight_decay=weight_decay)
    for _ in range(TORCH_STEPS):
        before = pair.reference.detach().clone()
        pair.step()
        after = pair.reference.detach()
        assert pair.states_are_torchs()
        bound = one_ulp(torch.maximum(before.abs(), after.abs())) + 2.0**-21 * (after - before).abs().double()
        assert ((pair.param - after).abs().double() <= bound).all()
        pair.param.copy_(after)


@needs_fused_torch
@pairwise(maximize=[False, True], weight_decay=[0.0, 0.1], rule_name=["sgd", "momentum", "nesterov", "dampening"])
def test_sgd_is_bitwise_torchs(rule_name: str, weight_decay: float, maximize: bool) -> None:
    pair = Pair(RULES[rule_name], torch.optim.SGD, weight_decay=weight_decay, maximize=maximize)
    for step in range(TORCH_STEPS):
        pair.step(first=step == 0) if pair.states else pair.step()
        assert same_bits(pair.param, pair.reference.detach())
        assert pair.states_are_torchs()


@pytest.mark.parametrize("rule_name", ["adam", "adamw", "adagrad"])
def test_thirty_steps_match_torch_without_correction(rule_name: str) -> None:
    optimizer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}[rule_name]
    pair = Pair(RULES[rule_name], optimizer, count=1003)
    for _ in range(30):
        pair.step()
    torch.testing.assert_close(pair.param, pair.reference.detach(), rtol=4e-6, atol=1e-7)


@pytest.mark.parametrize("grad_dtype", FLOATS)
def test_the_sign_of_nan_and_zero_is_zero_in_lion(grad_dtype: torch.dtype) -> None:
    param, grad = torch.ones(20), torch.tensor([math.nan, 0.0, -0.0, 1.0, -1.0] * 4).to(grad_dtype)
    for isa in ops.supported_isas():
        after = param.clone()
        ops.lion_(after, torch.zeros(20), grad, lr=0.5, betas=(0.9, 0.99), weight_decay=0.0, isa=isa)
        assert after.tolist() == [1.0, 1.0, 1.0, 0.5, 1.5] * 4
