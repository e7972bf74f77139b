"""Comparisons of every kernel: with torch in fp64, between instruction sets, between numbers of threads.

The tolerances say what "equal to torch" means. The reference computes in fp64 from the same inputs; "terms" is what it
gives from their magnitudes, so that cancellation is no excuse and no error.

- fp32 state: within 2^-22 of its terms. bf16 state, which is rounded stochastically: within one bf16 neighbour of that.
- parameters: within 2 fp32 ulp plus 2^-21 of the update's terms; 2^-6 with bf16 state, on whose rounding the update
  depends. A split master is compared joined; a 16-bit copy must be the parameter rounded to nearest.
- instruction sets and numbers of threads: bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

COUNT = 1003  # elements of a case: several vectors of every kernel, and a rest
LARGE = 3 * 2**18 + 17  # elements that are shared out to threads in several pieces
GRAD_SCALE = 0.5
_INDEX = 11  # of the first element

_INTEGERS = {4: torch.int32, 2: torch.int16}
_BFLOAT16, _FLOAT16, _FLOAT32 = torch.bfloat16, torch.float16, torch.float32
_INT8 = torch.int8
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # state that kernels take in 8 bits, in blocks


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison.

    Attributes:
        kernel: what was run, such as "adamw".
        case: on which layout of memory, such as "split bf16".
        isa: on which instruction set.
        against: "torch" (for Lion, which torch lacks, its formula), "isa" or "threads".
        passed: whether it came out within the tolerance.
        detail: how close, or what was wrong.
    """

    kernel: str
    case: str
    isa: str
    against: str
    passed: bool
    detail: str


class Layout(NamedTuple):
    """Formats of an update's tensors."""

    name: str
    grad: torch.dtype = _FLOAT32
    copy: torch.dtype | None = None
    split: torch.dtype | None = None
    state: torch.dtype = _FLOAT32


LAYOUTS = (
    Layout("fp32"),
    Layout("fp32, bf16 gradient and copy", grad=_BFLOAT16, copy=_BFLOAT16),
    Layout("fp32, fp16 gradient and copy", grad=_FLOAT16, copy=_FLOAT16),
    Layout("split bf16", grad=_BFLOAT16, split=_BFLOAT16),
    Layout("split fp16", grad=_FLOAT16, split=_FLOAT16),
    Layout("bf16 state", copy=_BFLOAT16, state=_BFLOAT16),
    Layout("split bf16, bf16 state", grad=_BFLOAT16, split=_BFLOAT16, state=_BFLOAT16),
    Layout("split bf16, 8-bit state", grad=_BFLOAT16, split=_BFLOAT16, state=_INT8),
)

Reference = Callable[[Tensor, list[Tensor], Tensor, Mapping[str, Any]], None]


class Rule(NamedTuple):
    """An update rule: the kernel's name in `lightning_zero.ops` with its states and arguments, and the reference."""

    name: str
    kernel: str
    states: tuple[str, ...]
    arguments: Mapping[str, Any]
    reference: Reference

    def takes(self, layout: Layout) -> bool:
        """Whether there is a kernel for it."""
        if layout.state == _INT8:
            return bool(self.states) and set(self.states) <= _SIGNED.keys()
        return bool(self.states) or layout.state == _FLOAT32


def _adam(param: Tensor, states: list[Tensor], grad: Tensor, arguments: Mapping[str, Any]) -> None:
    exp_avg, exp_avg_sq, *maximum = states
    update = adamw if arguments["decoupled"] else adam
    update(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        maximum,
        [torch.tensor(arguments["step"] - 1.0)],
        foreach=False,
        amsgrad=bool(maximum),
        beta1=arguments["betas"][0],
        beta2=arguments["betas"][1],
        lr=arguments["lr"],
        weight_decay=arguments["weight_decay"],
        eps=arguments["eps"],
        maximize=False,
    )


def _adagrad(param: Tensor, states: list[Tensor], grad: Tensor, arguments: Mapping[str, Any]) -> None:
    others = {name: arguments[name] for name in ("lr", "weight_decay", "lr_decay", "eps")}
    step = torch.tensor(arguments["step"] - 1.0)
    adagrad([param], [grad], states, [step], foreach=False, maximize=False, **others)


def _lion(param: Tensor, states: list[Tensor], grad: Tensor, arguments: Mapping[str, Any]) -> None:
    (exp_avg,), (beta1, beta2) = states, arguments["betas"]
    direction = (beta1 * exp_avg + (1.0 - beta1) * grad).sign()
    param -= arguments["lr"] * (direction + arguments["weight_decay"] * param)
    exp_avg.copy_(beta2 * exp_avg + (1.0 - beta2) * grad)


def _sgd(param: Tensor, states: list[Tensor], grad: Tensor, arguments: Mapping[str, Any]) -> None:
    others = {name: arguments[name] for name in ("lr", "weight_decay", "momentum", "dampening", "nesterov")}
    buffers: list[Tensor | None] = [*states] or [None]
    sgd([param], [grad], buffers, foreach=False, maximize=False, **others)


_ADAM = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "step": 3}
_SGD = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
_MOMENTS = ("exp_avg", "exp_avg_sq")

RULES = (
    Rule("adam", "adamw_", _MOMENTS, _ADAM | {"decoupled": False}, _adam),
    Rule("adamw", "adamw_", _MOMENTS, _ADAM | {"decoupled": True}, _adam),
    Rule("adamw amsgrad", "adamw_", (*_MOMENTS, "max_exp_avg_sq"), _ADAM | {"decoupled": True}, _adam),
    Rule(
        "adagrad",
        "adagrad_",
        ("sum",),
        {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.1, "step": 3},
        _adagrad,
    ),
    Rule("lion", "lion_", ("exp_avg",), {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "step": 3}, _lion),
    Rule("sgd", "sgd_", (), _SGD | {"momentum": 0.0}, _sgd),
    Rule("sgd momentum", "sgd_", ("momentum_buffer",), _SGD | {"dampening": 0.5}, _sgd),
    Rule("sgd nesterov", "sgd_", ("momentum_buffer",), _SGD | {"nesterov": True}, _sgd),
)


class _Case:
    """One rule on one layout: the inputs, and the results that the reference computes from them."""

    def __init__(self, rule: Rule, layout: Layout, count: int) -> None:
        self.rule, self.layout = rule, layout
        generator = torch.Generator().manual_seed(7)

        def magnitudes(low: float, high: float) -> Tensor:
            return torch.exp2(low + (high - low) * torch.rand(count, generator=generator))

        def signs() -> Tensor:
            return 2.0 * torch.randint(2, (count,), generator=generator) - 1.0

        # Gradient and parameter have one sign, so that a weight decay in the gradient cancels nothing of it.
        shared = signs()
        self.param = shared * magnitudes(-6.0, 2.0)
        self.grad = (shared * magnitudes(-8.0, 1.0)).to(layout.grad)
        values = {
            name: magnitudes(-14.0, 0.0) if name.endswith(("sq", "sum")) else signs() * magnitudes(-8.0, 0.0)
            for name in rule.states
        }
        self.states = {
            name: _in_8_bits(shared, name, value) if layout.state == _INT8 else value.to(layout.state)
            for name, value in values.items()
        }

    def expect(self) -> None:
        """Computes the reference and the tolerances; only a case that is compared with torch needs them."""
        param, grad = self.param.double(), self.grad.double() * GRAD_SCALE
        states = [state.double() for state in self.states.values()]
        scales = [state.abs() for state in states]
        shrunk = param.abs()
        self.rule.reference(shrunk, scales, grad.abs(), self.rule.arguments)
        update = param.abs() - shrunk
        self.rule.reference(param, states, grad, self.rule.arguments)
        self.expected = dict(zip(self.rule.states, states, strict=True)) | {"param": param}
        # The update uses bf16 state as it is stored, 8-bit state before.
        relative = 2.0**-6 if self.layout.state == _BFLOAT16 and states else 2.0**-21
        self.tolerances = {
            name: 2.0**-22 * scale + _rounding(name, state, self.layout.state)
            for name, scale, state in zip(self.rule.states, scales, states, strict=True)
        } | {"param": 2.0 * _spacing(param, _FLOAT32) + relative * update}

    def run(self, ops: ModuleType, isa: str, threads: int | None = None) -> dict[str, Tensor]:
        """Runs the kernel on copies of the inputs; returns the results by name."""
        results = {name: state.clone() for name, state in self.states.items()}
        options: dict[str, Any] = {"isa": isa, "threads": threads}
        call: dict[str, Any] = {"grad": self.grad.clone(), "grad_scale": GRAD_SCALE, "seed": 5, "index": _INDEX}
        if self.rule.kernel == "sgd_" and not self.states:
            call["momentum_buffer"] = None
        param = self.param.clone()
        if self.layout.split is None:
            call["param"] = param
        else:
            results["high"] = call["param"] = torch.empty_like(param, dtype=self.layout.split)
            results["remainder"] = call["remainder"] = torch.empty_like(param, dtype=torch.int16)
            ops.split_(param, call["param"], call["remainder"], **options)
        if self.layout.copy is not None:
            results["copy"] = call["copy_out"] = torch.empty_like(param, dtype=self.layout.copy)
        states: dict[str, Any] = {name: results[name] for name in self.rule.states}
        if self.layout.state == _INT8:
            states = {name: _quantized(ops, name, value, options) for name, value in states.items()}
        getattr(ops, self.rule.kernel)(**call, **states, **self.rule.arguments, **options)
        if self.layout.state == _INT8:
            for name, state in states.items():
                ops.dequantize_(results[name], state, signed=_SIGNED[name], index=_INDEX, **options)
        if self.layout.split is not None:
            ops.join_(param, call["param"], call["remainder"], **options)
        results["param"] = param
        return results

    def compare(self, results: Mapping[str, Tensor]) -> tuple[bool, str]:
        worst = 0.0
        for name, expected in self.expected.items():
            errors = (results[name].double() - expected).abs() / self.tolerances[name]
            error, place = errors.nan_to_num(torch.inf).max(0)
            if not error <= 1.0:
                found, wanted = float(results[name][place]), float(expected[place])
                return False, f"{name}[{int(place)}] is {found!r}, expected {wanted!r}: {error:.3g} x the tolerance"
            worst = max(worst, float(error))
        if self.layout.copy is not None and not _same_bits(results["copy"], results["param"].to(self.layout.copy)):
            return False, f"the {self.layout.copy} copy is not the parameter rounded to nearest"
        return True, f"within {worst:.2f} of the tolerance"


def _in_8_bits(signs: Tensor, name: str, values: Tensor) -> Tensor:
    """Returns numbers near these that have an 8-bit form, in blocks whose largest is about 1.

    Of such short numbers and gradients some would cancel exactly, and rounding decide the sign of Lion's step: with the
    signs of the gradients none do.
    """
    shorter = (values.abs().view(torch.int32) & ~0x7FFFF).view(_FLOAT32)  # four bits of the significand
    kept = torch.where(values.abs() < 2.0**-6, 0.0, shorter)
    return kept * signs if _SIGNED[name] else kept


def _quantized(ops: ModuleType, name: str, values: Tensor, options: Mapping[str, Any]) -> Any:
    codes, blocks = torch.empty_like(values, dtype=_INT8), ops.count_blocks(_INDEX, values.numel())
    state = ops.Quantized(codes, torch.empty(blocks, dtype=torch.uint8))
    ops.quantize_(values, state, signed=_SIGNED[name], index=_INDEX, **options)
    return state


def _rounding(name: str, state: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns how far stored numbers may be from those that were computed."""
    if dtype == _BFLOAT16:
        return _spacing(state, _BFLOAT16)
    if dtype == _INT8:  # a step of the small float, and that of the smallest ones of a block whose largest is below 4
        return state.abs() / 16 + 4.0 * (2.0**-10 if _SIGNED[name] else 2.0**-18)
    return torch.zeros_like(state)


def _spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the distance between neighbours in `dtype` at these numbers."""
    return torch.ldexp(torch.full_like(values, torch.finfo(dtype).eps), torch.frexp(values).exponent - 1)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    integer = _INTEGERS[left.itemsize]
    return torch.equal(left.view(integer), right.view(integer))


def _difference(results: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> tuple[bool, str]:
    unlike = [name for name, result in results.items() if not _same_bits(result, others[name])]
    return not unlike, f"differs in {', '.join(unlike)}" if unlike else "same bits"


def _attempt(kernel: str, case: str, isa: str, against: str, compare: Callable[[], tuple[bool, str]]) -> Check:
    """Makes the check that `compare` runs; an error that a kernel raises is a failure."""
    try:
        passed, detail = compare()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        passed, detail = False, f"{type(error).__name__}: {error}"
    return Check(kernel, case, isa, against, passed, detail)


def check_kernels(ops: ModuleType, isas: Sequence[str]) -> list[Check]:
    """Runs all checks.

    Args:
        ops: the module `lightning_zero.ops`.
        isas: supported instruction sets, that in use first; the others are compared with it.
    """
    checks: list[Check] = []
    with torch.no_grad():
        for isa in isas:
            checks += [*_check_squares(ops, isa, isas[0]), *_check_adds(ops, isa), *_check_sums(ops, isa)]
            checks += [*_check_splits(ops, isa), *_check_threads(ops, isa)]
        for rule in RULES:
            for layout in LAYOUTS:
                if rule.takes(layout):
                    checks += _check_update(ops, _Case(rule, layout, COUNT), isas)
    return checks


def _check_update(ops: ModuleType, case: _Case, isas: Sequence[str]) -> Iterator[Check]:
    case.expect()
    by_isa: dict[str, dict[str, Tensor]] = {}

    def against_torch() -> tuple[bool, str]:
        by_isa[isa] = case.run(ops, isa)
        return case.compare(by_isa[isa])

    for isa in isas:
        names = case.rule.name, case.layout.name, isa
        yield _attempt(*names, "torch", against_torch)
        if isa in by_isa and isas[0] in by_isa and isa != isas[0]:
            passed, detail = _difference(by_isa[isa], by_isa[isas[0]])
            yield Check(*names, "isa", passed, f"{detail} as {isas[0]}" if passed else f"{detail} from {isas[0]}")


def _numbers(count: int, dtype: torch.dtype = _FLOAT32) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-12, 12, (count,), generator=generator)
    return torch.ldexp(torch.randn(count, generator=generator), exponents).to(dtype)


def _check_squares(ops: ModuleType, isa: str, baseline: str) -> Iterator[Check]:
    for dtype in (_FLOAT32, _BFLOAT16, _FLOAT16):
        values = _numbers(COUNT, dtype)

        def against_torch(values: Tensor = values) -> tuple[bool, str]:
            found, wanted = ops.sum_of_squares(values, isa=isa), float(values.double().square().sum())
            relative = abs(found - wanted) / wanted
            return relative <= 2.0**-40, f"{found!r}, expected {wanted!r} within 2^-40"

        def against_isa(values: Tensor = values) -> tuple[bool, str]:
            found, other = (ops.sum_of_squares(values, isa=name) for name in (isa, baseline))
            return found == other, f"{found!r}, {baseline} gives {other!r}"

        case = str(dtype).removeprefix("torch.")
        yield _attempt("sum_of_squares", case, isa, "torch", against_torch)
        if isa != baseline:
            yield _attempt("sum_of_squares", case, isa, "isa", against_isa)


def _check_adds(ops: ModuleType, isa: str) -> Iterator[Check]:
    for dtype in (_FLOAT32, _BFLOAT16, _FLOAT16):
        total, values = _numbers(COUNT), _numbers(COUNT, dtype).flip(0)

        def against_torch(total: Tensor = total, values: Tensor = values) -> tuple[bool, str]:
            found = total.clone()
            ops.add_(found, values, isa=isa)
            same = _same_bits(found, total.add(values))
            return same, "torch's bits" if same else "the sums are not torch's"

        case = str(dtype).removeprefix("torch.")
        yield _attempt("add", case, isa, "torch", against_torch)


def _check_sums(ops: ModuleType, isa: str) -> Iterator[Check]:
    for dtype in (_FLOAT32, _BFLOAT16, _FLOAT16):
        parts = [_numbers(COUNT, dtype), _numbers(COUNT, dtype).flip(0), _numbers(COUNT, dtype).roll(1)]

        def against_torch(parts: Sequence[Tensor] = parts) -> tuple[bool, str]:
            first, second, third = (part.float() for part in parts)
            expected = (first + second + third).to(parts[0].dtype)
            found, wide, total = torch.empty_like(expected), torch.empty_like(first), first.clone()
            ops.sum_(found, parts, isa=isa)
            ops.sum_(wide, parts, isa=isa)
            ops.sum_(total, parts, add=True, isa=isa)
            pairs = [(found, expected), (wide, expected.float()), (total, first + expected.float())]
            same = all(_same_bits(*pair) for pair in pairs)
            return same, "torch's bits" if same else "the sums are not torch's"

        case = str(dtype).removeprefix("torch.")
        yield _attempt("sum", case, isa, "torch", against_torch)


def _check_splits(ops: ModuleType, isa: str) -> Iterator[Check]:
    for dtype in (_BFLOAT16, _FLOAT16):
        whole = _numbers(COUNT).clamp(-60000.0, 60000.0)
        whole[whole.abs() < 2.0**-16] = 1.0  # below that a split fp16 number is not exact

        def against_torch(whole: Tensor = whole, dtype: torch.dtype = dtype) -> tuple[bool, str]:
            high, remainder = torch.empty_like(whole, dtype=dtype), torch.empty_like(whole, dtype=torch.int16)
            joined = torch.empty_like(whole)
            ops.split_(whole, high, remainder, isa=isa)
            ops.join_(joined, high, remainder, isa=isa)
            if not _same_bits(joined, whole):
                return False, "the joined numbers are not those that were split"
            distance, nearest = (whole - high).abs(), (whole - whole.to(dtype)).abs()
            if not torch.equal(distance, nearest):
                return False, f"the high part is not the nearest {dtype}"
            return True, "nearest high part, joined bit for bit"

        case = str(dtype).removeprefix("torch.")
        yield _attempt("split, join", case, isa, "torch", against_torch)


def _check_threads(ops: ModuleType, isa: str) -> Iterator[Check]:
    """Compares one thread with all, or with two where there is one: in an update, a split (with it) and a sum."""
    threads = max(2, ops.get_num_threads())
    names = f"{threads} threads", isa, "threads"
    rule = next(rule for rule in RULES if rule.name == "adamw")
    layout = next(layout for layout in LAYOUTS if layout.name == "split bf16, bf16 state")
    case, values = _Case(rule, layout, LARGE), _numbers(LARGE)

    def update() -> tuple[bool, str]:
        return _difference(case.run(ops, isa, threads), case.run(ops, isa, 1))

    def total() -> tuple[bool, str]:
        found, other = (ops.sum_of_squares(values, isa=isa, threads=number) for number in (threads, 1))
        return found == other, f"{found!r}, one thread gives {other!r}"

    yield _attempt("adamw", *names, update)
    yield _attempt("sum_of_squares", *names, total)
