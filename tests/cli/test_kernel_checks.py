"""The checks find what is wrong with a kernel, and nothing wrong with those that are right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero import ops
from lightning_zero.cli import kernel_checks
from lightning_zero.cli.kernel_checks import LAYOUTS, RULES, Check, check_kernels

ISAS = ops.supported_isas()[::-1]


def failures(sabotaged: dict[str, Any], isas: tuple[str, ...] = ISAS[:1]) -> list[Check]:
    module: Any = SimpleNamespace(**({name: getattr(ops, name) for name in ops.__all__} | sabotaged))
    return [check for check in check_kernels(module, isas) if not check.passed]


def test_all_rules_and_layouts_pass_on_every_instruction_set() -> None:
    checks = check_kernels(ops, ISAS)
    assert [check for check in checks if not check.passed] == []
    for isa in ISAS:
        against_torch = {
            (check.kernel, check.case) for check in checks if check.isa == isa and check.against == "torch"
        }
        for rule in RULES:
            for layout in LAYOUTS:
                stateful = rule.name in ("adam", "adamw", "lion") if layout.state == torch.int8 else bool(rule.states)
                expected = stateful or layout.state == torch.float32
                assert ((rule.name, layout.name) in against_torch) == expected
    assert len({(check.kernel, check.case, check.isa, check.against) for check in checks}) == len(checks)


@pytest.mark.parametrize("kernel", ["adamw_", "adagrad_", "lion_", "sgd_"])
def test_a_learning_rate_that_is_slightly_off_fails(kernel: str) -> None:
    right = getattr(ops, kernel)

    def wrong(*, lr: float, **arguments: Any) -> None:
        right(lr=lr * (1.0 + 2.0**-15), **arguments)

    failed = failures({kernel: wrong})
    fp32 = {layout.name for layout in LAYOUTS if layout.state == torch.float32}
    names = {rule.name for rule in RULES if rule.kernel == kernel}
    assert {check.kernel for check in failed} == names
    for name in names:
        assert {check.case for check in failed if check.kernel == name} >= fp32
    assert all(check.detail.startswith("param[") for check in failed)


def test_a_second_moment_that_is_slightly_off_fails() -> None:
    def wrong(*, betas: tuple[float, float], **arguments: Any) -> None:
        ops.adamw_(betas=(betas[0], betas[1] + 1e-5), **arguments)

    assert any("exp_avg_sq[" in check.detail for check in failures({"adamw_": wrong}))


def test_nan_fails() -> None:
    def wrong(*, param: torch.Tensor, **arguments: Any) -> None:
        ops.sgd_(param=param, **arguments)
        param[-1] = torch.nan

    assert {check.kernel for check in failures({"sgd_": wrong})} == {"sgd", "sgd momentum", "sgd nesterov"}


def test_a_copy_that_is_not_rounded_to_nearest_fails() -> None:
    def wrong(*, copy_out: torch.Tensor | None = None, **arguments: Any) -> None:
        ops.lion_(copy_out=copy_out, **arguments)
        if copy_out is not None:
            copy_out.view(torch.int16)[5] += 1

    failed = failures({"lion_": wrong})
    assert {check.case for check in failed} == {layout.name for layout in LAYOUTS if layout.copy is not None}
    assert all("copy is not the parameter rounded" in check.detail for check in failed)


@pytest.mark.skipif(len(ISAS) == 1, reason="needs a second instruction set")
def test_a_last_bit_between_instruction_sets_fails() -> None:
    def wrong(*, isa: str, exp_avg: Any, **arguments: Any) -> None:
        ops.lion_(isa=isa, exp_avg=exp_avg, **arguments)
        if isa == ISAS[1] and isinstance(exp_avg, torch.Tensor) and exp_avg.dtype == torch.float32:
            exp_avg.view(torch.int32)[7] ^= 1

    failed = failures({"lion_": wrong}, ISAS[:2])
    assert {(check.isa, check.against) for check in failed} == {(ISAS[1], "isa")}
    assert all("differs in exp_avg" in check.detail for check in failed)


def test_a_last_bit_between_numbers_of_threads_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_checks, "RULES", [rule for rule in RULES if rule.name == "adamw"])

    def wrong(*, threads: int | None, param: torch.Tensor, **arguments: Any) -> None:
        ops.adamw_(threads=threads, param=param, **arguments)
        if threads is not None and threads > 1:
            param.view(torch.int16)[-1] ^= 1

    assert [(check.kernel, check.against) for check in failures({"adamw_": wrong})] == [("adamw", "threads")]


def test_sums_and_splits_that_are_wrong_fail() -> None:
    def total(values: torch.Tensor, **options: Any) -> float:
        return ops.sum_of_squares(values, **options) * (1.0 + 2.0**-30)

    def split(whole: torch.Tensor, high: torch.Tensor, remainder: torch.Tensor, **options: Any) -> None:
        ops.split_(whole, high, remainder, **options)
        remainder[3] ^= 1

    assert {check.kernel for check in failures({"sum_of_squares": total})} == {"sum_of_squares"}
    assert "split, join" in {check.kernel for check in failures({"split_": split})}


def test_an_error_in_a_kernel_is_a_failure() -> None:
    def wrong(**_: Any) -> None:
        raise ValueError("no such thing")

    failed = failures({"adagrad_": wrong})
    assert {check.kernel for check in failed} == {"adagrad"}
    assert {check.detail for check in failed} == {"ValueError: no such thing"}
