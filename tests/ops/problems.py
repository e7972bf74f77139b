"""Rules, memory layouts and tensors for the tests of the kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_zero import ops

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)
INTEGERS = {4: torch.int32, 2: torch.int16}
ALIGNMENT = 64  # bytes
GUARD = 64  # elements around a tensor that nobody may write to; keeps the alignment

Make = Callable[[int, torch.dtype, torch.Generator], Tensor]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """A kernel with its hyperparameters, and the names of its state."""

    update: Callable[..., None]
    states: tuple[str, ...]
    arguments: dict[str, Any]

    def __call__(self, tensors: Mapping[str, Tensor], **options: Any) -> None:
        self.update(**tensors, **self.arguments | options)


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOMENTUM = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}

RULES = {
    "adam": Rule(ops.adamw_, _MOMENTS, _ADAM | {"decoupled": False}),
    "adamw": Rule(ops.adamw_, _MOMENTS, _ADAM),
    "amsgrad": Rule(ops.adamw_, (*_MOMENTS, "max_exp_avg_sq"), _ADAM | {"decoupled": False, "betas": (0.4, 0.9)}),
    "amsgradw": Rule(ops.adamw_, (*_MOMENTS, "max_exp_avg_sq"), _ADAM | {"betas": (0.95, 0.98)}),
    "adagrad": Rule(ops.adagrad_, ("sum",), {"lr": 0.01, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.1}),
    "lion": Rule(ops.lion_, ("exp_avg",), {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "sgd": Rule(ops.sgd_, (), {"momentum_buffer": None, "lr": 0.1, "weight_decay": 0.1}),
    "momentum": Rule(ops.sgd_, ("momentum_buffer",), _MOMENTUM),
    "nesterov": Rule(ops.sgd_, ("momentum_buffer",), _MOMENTUM | {"nesterov": True}),
    "dampening": Rule(ops.sgd_, ("momentum_buffer",), _MOMENTUM | {"dampening": 0.3}),
}
NOT_NEGATIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum"})


class Master(NamedTuple):
    """How the parameter is kept: whole with or without a 16-bit copy, or split."""

    split: torch.dtype | None = None
    copy: torch.dtype | None = None
    ties: str = "even"


MASTERS = {
    "fp32": Master(),
    "bf16 copy": Master(copy=torch.bfloat16),
    "bf16 copy away": Master(copy=torch.bfloat16, ties="away"),
    "fp16 copy": Master(copy=torch.float16),
    "split bf16": Master(split=torch.bfloat16),
    "split fp16": Master(split=torch.float16),
}


class Layout(NamedTuple):
    grad: torch.dtype
    master: str
    state: torch.dtype


def layouts(rule: Rule) -> list[Layout]:
    """All there are; a rule without a state has no dtype of it to choose."""
    state_dtypes = (torch.float32, torch.bfloat16) if rule.states else (torch.float32,)
    return [Layout(*each) for each in product(FLOATS, MASTERS, state_dtypes)]


def random_bits(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every bit pattern alike: NaN, infinities and subnormal numbers included."""
    integer = INTEGERS[dtype.itemsize]
    info = torch.iinfo(integer)
    return torch.randint(info.min, info.max + 1, (count,), generator=generator).to(integer).view(dtype)


def ordinary(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers of many magnitudes, none of them special."""
    exponents = torch.randint(-30, 4, (count,), generator=generator)
    return (torch.randn(count, generator=generator) * 2.0**exponents).to(dtype)


def make_tensors(rule: Rule, layout: Layout, count: int, make: Make, generator: torch.Generator) -> Tensors:
    """The tensor arguments of one update."""
    master = MASTERS[layout.master]
    tensors: Tensors = {"param": make(count, master.split or torch.float32, generator)}
    if master.split is not None:
        tensors["remainder"] = random_bits(count, torch.int16, generator)
        if make is ordinary:
            whole = make(count, torch.float32, generator)
            ops.split_(whole, tensors["param"], tensors["remainder"])
    if master.copy is not None:
        tensors["copy_out"] = torch.zeros(count, dtype=master.copy)
    for name in rule.states:
        state = make(count, layout.state, generator)
        tensors[name] = state.abs() if make is ordinary and name in NOT_NEGATIVE else state
    tensors["grad"] = make(count, layout.grad, generator)
    return tensors


def placed(values: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
    """A copy of `values` that begins `offset` elements after an aligned address, and the guarded buffer around it."""
    begin, count = GUARD + offset, values.numel()
    buffer = torch.full((begin + count + GUARD,), 7, dtype=values.dtype)
    assert buffer.data_ptr() % ALIGNMENT == 0
    view = buffer[begin : begin + count]
    view.copy_(values)
    return view, buffer


def run(rule: Rule, tensors: Tensors, offsets: Mapping[str, int] | None = None, **options: Any) -> Tensors:
    """The tensors after an update of copies of them; checks that nothing beside them is written."""
    copies = {name: placed(values, (offsets or {}).get(name, 0)) for name, values in tensors.items()}
    rule({name: view for name, (view, _) in copies.items()}, **options)
    for name, (view, buffer) in copies.items():
        begin = view.storage_offset()
        assert (buffer[:begin] == 7).all(), name
        assert (buffer[begin + view.numel() :] == 7).all(), name
    results = {name: view for name, (view, _) in copies.items()}
    assert same_bits(results["grad"], tensors["grad"])
    return results


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Equal bits; two NaNs are equal whatever their payload."""
    integer = INTEGERS[expected.itemsize]
    if torch.equal(actual.view(integer), expected.view(integer)):
        return True
    nan = expected.isnan()
    return torch.equal(actual.isnan(), nan) and torch.equal(actual[~nan].view(integer), expected[~nan].view(integer))


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert same_bits(actual[name], expected[name]), name


def joined(high: Tensor, remainder: Tensor, isa: str | None = None) -> Tensor:
    whole = torch.empty(high.shape, dtype=torch.float32)
    ops.join_(whole.view(-1), high.view(-1), remainder.view(-1), isa=isa)
    return whole


def split(whole: Tensor, dtype: torch.dtype, isa: str | None = None) -> tuple[Tensor, Tensor]:
    high, remainder = torch.empty_like(whole, dtype=dtype), torch.empty_like(whole, dtype=torch.int16)
    ops.split_(whole, high, remainder, isa=isa)
    return high, remainder


def from_bits(bits: Tensor) -> Tensor:
    """fp32 numbers of bits in [0, 2^32), given as int64."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


@dataclass(frozen=True)
class Problem:
    """An update drawn at random; `run(**settings)` gives its results."""

    rule: Rule
    tensors: Tensors
    offsets: dict[str, int]
    options: dict[str, Any]

    def run(self, **settings: Any) -> Tensors:
        return run(self.rule, self.tensors, self.offsets, **self.options | settings)


def offsets_of(tensors: Tensors, number: int) -> dict[str, int]:
    """An offset for every tensor, each another one; all are reached as `number` counts up."""
    return {
        name: (number * (2 * k + 1) + 5 * k) % (ALIGNMENT // tensor.itemsize)
        for k, (name, tensor) in enumerate(tensors.items())
    }


@st.composite
def problems(draw: st.DrawFn, max_count: int = 257) -> Problem:
    rule = RULES[draw(st.sampled_from(sorted(RULES)))]
    layout = draw(st.sampled_from(layouts(rule)))
    count = draw(st.integers(0, max_count))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    tensors = make_tensors(rule, layout, count, draw(st.sampled_from([random_bits, ordinary])), generator)
    options: dict[str, Any] = {
        "lr": draw(st.sampled_from([0.0, 1e-3, 0.5])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "step": draw(st.sampled_from([1, 2, 1000, 10**9])),
        "grad_scale": draw(st.sampled_from([1.0, 0.3, -2.0, 2.0**-16])),
        "maximize": draw(st.booleans()),
        "copy_ties": MASTERS[layout.master].ties,
        "seed": draw(st.integers(0, 2**64 - 1)),
        "index": draw(st.one_of(st.integers(0, 2**64 - 1), st.integers(2**32 - 300, 2**32))),
    }
    if "betas" in rule.arguments:
        options["betas"] = draw(st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.0), (0.3, 0.99)]))
    if "eps" in rule.arguments:
        options["eps"] = draw(st.sampled_from([0.0, 1e-8, 1e-3]))
    if "momentum" in rule.arguments:
        options["first"] = draw(st.booleans())
    offsets = {name: draw(st.integers(0, ALIGNMENT // tensor.itemsize - 1)) for name, tensor in tensors.items()}
    return Problem(rule, tensors, offsets, options)


def fresh(name: str) -> ModuleType:
    """A second instance of a module of `lightning_zero.ops`, imported under the present environment."""
    spec = importlib.util.spec_from_file_location(f"fresh_{name}", Path(ops.__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
