"""The kernels' arithmetic in torch's operations gives the bits of the kernels."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from ops.problems import FLOATS, RULES, Layout, make_tensors, ordinary, random_bits

from lightning_zero import ops
from lightning_zero.ops import formulas

EXACT = formulas.Fused(formulas._add_product, formulas._add_product)
COUNTS = (0, 1, 7, 16, 67, 1003)


@pytest.mark.parametrize("fused", ["of the device", "exact"])
@pytest.mark.parametrize("name", RULES)
def test_updates_are_those_of_the_kernels(name: str, fused: str) -> None:
    rule = RULES[name]
    formula = getattr(formulas, rule.update.__name__)
    generator = torch.Generator().manual_seed(1)
    device = formulas.fused_on(torch.device("cpu")) if fused == "of the device" else EXACT
    for count in COUNTS:
        for dtype in FLOATS:
            ours = make_tensors(rule, Layout(dtype, "fp32", torch.float32), count, ordinary, generator)
            theirs = {key: value.clone() for key, value in ours.items()}
            for step in (1, 2, 1000):
                options = {"step": step, "grad_scale": 0.37, "maximize": step == 2}
                if rule.update is ops.sgd_ and rule.states:
                    options["first"] = step == 1
                rule(theirs, **options)
                with mock.patch.object(formulas, "fused_on", return_value=device):
                    formula(**ours, **rule.arguments | options)
                for key, value in ours.items():
                    assert torch.equal(value, theirs[key]), (count, dtype, step, key)


def test_a_multiply_add_in_fp64_is_rounded_once() -> None:
    """Of any bits; where the kernels' SGD is one multiply-add, ``param - lr * grad``."""
    generator = torch.Generator().manual_seed(2)
    for make in (random_bits, ordinary):
        param, grad = (make(1 << 16, torch.float32, generator) for _ in range(2))
        for lr in (0.1, 1.0, 1e-30, 3e30):
            expected = param.clone()
            ops.sgd_(expected, None, grad, lr=lr)
            found = param.clone()
            formulas._add_product(found, grad, -torch.tensor(lr).item())
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_device_that_rounds_products_has_them_in_fp64() -> None:
    formulas.fused_on.cache_clear()
    with mock.patch.object(formulas, "_add_product_natively", lambda total, a, b: total.add_(a * b)):
        fused = formulas.fused_on(torch.device("cpu"))
    formulas.fused_on.cache_clear()
    assert fused.add_product is formulas._add_product


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_squares_are_those_of_the_kernel(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for count in (0, 1, 15, 257, 5000, 65537, 300_000, formulas.TILE + 70_000):
        values = ordinary(count, dtype, generator)
        assert formulas.sum_of_squares(values).item().hex() == ops.sum_of_squares(values).hex(), count
    values[-1] = torch.inf
    assert formulas.sum_of_squares(values).isinf()
