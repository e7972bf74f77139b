"""What cannot work is refused before training starts, with the value, what was expected, and what to do."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import RankError, RankPool, ranks
from lightning import Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from strategy.fits import Lit, Recipe, StrategyArgument, fit
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import DynamicLossScaler, ZeroPrecision, ZeroStrategy
from lightning_zero.integration.names import STRATEGIES


def contains(*parts: str) -> str:
    """A pattern for a message that holds all of these."""
    return "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)


@pytest.mark.parametrize("value", [-1, 4, 1.5, 2.0, True, False, "2", None, [2]])
def test_stage(value: Any) -> None:
    with pytest.raises(ValueError, match=contains(f"stage={value!r}", "0, 1, 2, 3")):
        ZeroStrategy(stage=value)


@pytest.mark.parametrize(
    ("option", "meant"),
    [("offlod_optimizer", "offload_optimizer"), ("bucket_size", "bucket_size_mb"), ("cpu_checkpointing", None)],
)
def test_an_unknown_option_lists_the_known(option: str, meant: str | None) -> None:
    with pytest.raises(TypeError, match=contains(option, "offload_params", "shard_size", "timeout")) as caught:
        ZeroStrategy(2, **{option: "cpu"})
    assert (f"did you mean {meant!r}" in str(caught.value)) == (meant is not None)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("zero4", "zero"), ("zero3-offload", "zero3_offload"), ("zero_offload", "zero"), ("zer2", "zero2")],
)
def test_a_name_that_is_nearly_ours_lists_ours(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=contains(f"strategy={name!r}", f"mean '{meant}", *STRATEGIES)):
        Trainer(strategy=name, accelerator="cpu", logger=False)
    with pytest.raises(ValueError, match="invalid strategy name: `strategy='dpd'`"):
        Trainer(strategy="dpd", accelerator="cpu", logger=False)


def test_a_store_that_is_listed_is_accepted() -> None:
    """By whoever writes what DeepSpeed's strategy takes, for one."""
    with pytest.raises(ValueError, match="offload_optimizer=True") as caught:
        ZeroStrategy(2, offload_optimizer=True)  # type: ignore[arg-type]
    for word in re.findall(r"'(\w+)'", str(caught.value)):
        assert ZeroStrategy(2, offload_optimizer=word).options.offload_optimizer == word


@pytest.mark.parametrize("option", ["offload_optimizer", "offload_params"])
@pytest.mark.parametrize("value", ["CPU", "gpu", "nvme", None, True, 1, []])
def test_an_unknown_store(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=contains(f"{option}={value!r}", "'none'", "'cpu'")):
        ZeroStrategy(3, **{option: value})


@pytest.mark.parametrize("option", ["offload_optimizer", "offload_params"])
def test_stage_0_has_no_host_store(option: str) -> None:
    with pytest.raises(ValueError, match=contains("stage=0", f"{option}='cpu'", "stage=1")):
        ZeroStrategy(0, **{option: "cpu"})


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_are_offloaded_at_stage_3_only(stage: int) -> None:
    with pytest.raises(ValueError, match=contains("offload_params='cpu'", f"stage={stage}", "stage=3")):
        ZeroStrategy(stage, offload_optimizer="cpu", offload_params="cpu")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("shard_size", 0, ">= 1"),
        ("shard_size", True, ">= 1"),
        ("shard_size", 2.0, ">= 1"),
        ("shard_size", "2", ">= 1"),
        ("bucket_size_mb", 0, "greater than 0"),
        ("bucket_size_mb", -1.0, "greater than 0"),
        ("bucket_size_mb", float("nan"), "greater than 0"),
        ("bucket_size_mb", "25", "greater than 0"),
        ("bucket_size_mb", None, "greater than 0"),
        ("bucket_size_mb", float("inf"), "greater than 0"),
        ("timeout", 0, "greater than 0"),
        ("timeout", "1800", "greater than 0"),
        ("timeout", None, "greater than 0"),
        ("timeout", float("nan"), "greater than 0"),
        ("timeout", float("inf"), "seconds"),
        ("native_optimizer", "on", "'auto', 'off'"),
        ("native_optimizer", True, "'auto', 'off'"),
        ("start_method", "thread", "'popen', 'spawn', 'fork', 'forkserver'"),
        ("skip_nonfinite", "no", "True or False"),
        ("max_consecutive_skips", 0, ">= 1"),
        ("checksums", 3, "True or False"),
        ("units", "Block", "list"),
        ("units", nn.Linear, "list"),
        ("units", 5, "list"),
        ("units", [3], "pattern"),
    ],
)
def test_other_options(option: str, value: Any, expected: str) -> None:
    with pytest.raises((ValueError, TypeError), match=contains(f"{option}={value!r}", expected)):
        ZeroStrategy(2, **{option: value})


def test_stage_0_has_no_shards() -> None:
    with pytest.raises(ValueError, match=contains("shard_size=2", "stage=0", "stage=1")):
        ZeroStrategy(0, shard_size=2)


def test_a_notebook_has_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ValueError, match=contains("start_method='popen'", "notebook", "start_method='fork'")):
        Trainer(strategy="zero2", accelerator="cpu", logger=False)


def test_an_engine_is_asked_for_too_early() -> None:
    with pytest.raises(RuntimeError, match="exist from the start of Trainer"):
        ZeroStrategy(2).engine  # noqa: B018


# ------------------------------------------------------------------------------------------------ errors of a fit


class Untrained(Lit):
    def training_step(self, batch: Tensor, index: int) -> None:
        raise AssertionError("training started")


def refuse(
    pool: RankPool, message: str, strategy: StrategyArgument, module: type[Lit] = Untrained, **flags: Any
) -> None:
    """Every rank refuses, with its own error rather than another rank's."""
    with pytest.raises(RankError, match=message) as caught:
        pool.run_within(10, fit, strategy, Recipe(), module, **flags)
    assert {failure.kind for failure in caught.value.failures.values()} <= {"ValueError", "TypeError"}
    assert len(caught.value.failures) == pool.world_size


@ranks(2)
@pytest.mark.parametrize("name", ["zero0", "zero2", "zero3_offload"])
def test_more_ranks_than_devices(pool: RankPool, name: str) -> None:
    refuse(pool, contains("2 ranks", "= 1", "destroy_process_group"), name, devices=1)


@ranks(1)
def test_fewer_ranks_than_devices(pool: RankPool) -> None:
    refuse(pool, contains("1 ranks", "= 2", "destroy_process_group"), "zero2", devices=2)


@ranks(2)
@pytest.mark.parametrize("size", [3, 4])
def test_shards_that_do_not_divide_the_ranks(pool: RankPool, size: int) -> None:
    refuse(pool, contains(f"shard_size={size}", "world size 2", "[1, 2]"), {"stage": 2, "shard_size": size})


@ranks(2)
@pytest.mark.parametrize("units", [["Brick"], ["model.blocks.7"], [nn.Conv2d], ["Block", "Brick"]], ids=str)
def test_units_that_match_nothing(pool: RankPool, units: list[Any]) -> None:
    refuse(pool, contains(repr(units[-1]), "Block", "Linear"), {"stage": 3, "units": units})


class Lamb(Optimizer):
    """A rule with a norm over the whole parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"] * parameter.norm())


class TrustRatio(Lamb):
    """The same under a name that no list has: it must be tried out."""


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "LBFGS": torch.optim.LBFGS,
    "Adafactor": torch.optim.Adafactor,
    "SparseAdam": torch.optim.SparseAdam,
    "Lamb": Lamb,
    "TrustRatio": TrustRatio,
}


class OddOptimizer(Untrained):
    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[type(self).__name__](self.parameters())


def odd(name: str) -> type[Lit]:
    return type(name, (OddOptimizer,), {})


def fit_odd(strategy: StrategyArgument, name: str) -> None:
    fit(strategy, Recipe(), odd(name))


@ranks(2)
@pytest.mark.parametrize("strategy", ["zero0", "zero3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_is_not_element_wise(pool: RankPool, strategy: str, name: str) -> None:
    with pytest.raises(RankError, match=contains(f"ValueError: {name}", "element-wise", "AdamW")) as caught:
        pool.run_within(10, fit_odd, strategy, name)
    assert len(caught.value.failures) == 2


class ForeignParameter(Untrained):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(2, 3))], lr=0.1)


@ranks(2)
def test_a_parameter_from_outside_the_module(pool: RankPool) -> None:
    refuse(pool, contains("SGD", "(2, 3)", "registered"), "zero2", ForeignParameter)


class ComplexParameter(Untrained):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))


@ranks(2)
def test_a_complex_parameter(pool: RankPool) -> None:
    refuse(pool, contains("'phase'", "complex64", "ddp"), "zero3", ComplexParameter)


class LazyLayer(Untrained):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.lazy = nn.LazyLinear(3)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


@ranks(2)
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_a_lazy_layer(pool: RankPool, name: str) -> None:
    refuse(pool, contains("'lazy.weight'", "no shape", "configure_model"), name, LazyLayer)


# -------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("precision", ["transformer-engine", "fp16", 8])
def test_an_unknown_precision(precision: Any) -> None:
    with pytest.raises(ValueError, match=contains(f"precision={precision!r}", "'bf16-mixed'")):
        ZeroPrecision(precision)


def test_a_scaler_that_is_none() -> None:
    with pytest.raises(TypeError, match=contains("scaler=65536", "DynamicLossScaler(...)", "StaticLossScaler(scale)")):
        ZeroPrecision("16-mixed", scaler=65536)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=contains("DynamicLossScaler", "StaticLossScaler(scale)")):
        ZeroPrecision("16-mixed", scaler=DynamicLossScaler)  # type: ignore[arg-type]  # the class


@pytest.mark.parametrize("option", ["master_weights", "cast_inputs"])
def test_a_switch_that_is_no_bool(option: str) -> None:
    with pytest.raises(TypeError, match=contains(f"{option}='no'", "True or False")):
        ZeroPrecision("bf16-mixed", **{option: "no"})


class Mine(Precision):
    precision = "32-true"


@pytest.mark.parametrize("plugin", [Mine(), FSDPPrecision("32-true")], ids=["user", "fsdp"])
def test_another_strategys_plugin(plugin: Precision) -> None:
    name = type(plugin).__name__
    with pytest.raises(TypeError, match=contains(name, "ZeroPrecision", "'bf16-mixed'")):
        ZeroStrategy(2, precision_plugin=plugin)
    with pytest.raises(TypeError, match=contains(name, "ZeroPrecision", "'bf16-mixed'")):
        Trainer(
            strategy="zero2", plugins=[plugin], accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
        )


@pytest.mark.parametrize("option", ["param_dtype", "reduce_dtype", "grad_dtype"])
@pytest.mark.parametrize("value", ["bf16", "int32", torch.int32, 16])
def test_a_dtype_that_is_none(option: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=contains(f"{option}={value!r}", "bfloat16")):
        ZeroPrecision("bf16-mixed", **{option: value})


@ranks(1)
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_our_plugin_under_another_strategy(pool: RankPool, strategy: str) -> None:
    with pytest.raises(RankError, match=contains("ZeroPrecision", "ZeroStrategy", "precision='bf16-mixed'")):
        pool.run(fit, strategy, Recipe(), Untrained, plugins=[ZeroPrecision("bf16-mixed")])
