"""What cannot work is refused before training starts, with the value, what was expected, and what to do."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import models
from helpers.ranks import RankError, RankPool, ranks
from lightning import Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision, Precision
from strategy.fits import Lit, Recipe, StrategyArgument, assert_as_ddp, fit
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import DynamicLossScaler, ZeroPrecision, ZeroStrategy, gathered_parameters
from lightning_zero.integration.names import STRATEGIES


def contains(*parts: str) -> str:
    """A pattern for a message that holds all of these."""
    return "(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts)


def refused(
    cls: Callable[..., object], options: dict[str, Any], *parts: str, error: Any = (ValueError, TypeError)
) -> bool:
    """Whether arguments are refused with all of these in the message."""
    try:
        cls(**options)
    except error as caught:
        return all(part in str(caught) for part in parts)
    return False


def test_stage() -> None:
    for value in [-1, 4, 1.5, 2.0, True, False, "2", None, [2]]:
        assert refused(ZeroStrategy, {"stage": value}, f"stage={value!r}", "0, 1, 2, 3", error=ValueError), value


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
        assert ZeroStrategy(2, offload_optimizer=word, nvme_path="/disk").options.offload_optimizer == word


REFUSED: list[tuple[str, Any, str]] = [
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
    ("master_layout", "half", "'fp32', 'split'"),
    ("start_method", "thread", "'popen', 'spawn', 'fork', 'forkserver'"),
    ("skip_nonfinite", "no", "True or False"),
    ("max_consecutive_skips", 0, ">= 1"),
    ("checksums", 3, "True or False"),
    ("units", "Block", "list"),
    ("units", nn.Linear, "list"),
    ("units", 5, "list"),
    ("units", [3], "pattern"),
]


def test_other_options() -> None:
    for option, value, expected in REFUSED:
        options = {"stage": 2, option: value}
        assert refused(ZeroStrategy, options, f"{option}={value!r}", expected), (option, value)


def test_stores() -> None:
    for option in ("offload_optimizer", "offload_params"):
        for value in ("CPU", "gpu", "disk", None, True, 1, []):
            options, parts = {"stage": 3, option: value}, (f"{option}={value!r}", "'none'", "'cpu'")
            assert refused(ZeroStrategy, options, *parts, error=ValueError), (option, value)
        options, parts = {"stage": 0, option: "cpu"}, ("stage=0", f"{option}='cpu'", "stage=1")
        assert refused(ZeroStrategy, options, *parts, error=ValueError), option
    for stage in (1, 2):
        options = {"stage": stage, "offload_optimizer": "cpu", "offload_params": "cpu"}
        parts = ("offload_params='cpu'", f"stage={stage}", "stage=3")
        assert refused(ZeroStrategy, options, *parts, error=ValueError), stage


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
def test_more_ranks_than_devices(pool: RankPool) -> None:
    refuse(pool, contains("2 ranks", "= 1", "destroy_process_group"), "zero2", devices=1)


@ranks(1)
def test_fewer_ranks_than_devices(pool: RankPool) -> None:
    refuse(pool, contains("1 ranks", "= 2", "destroy_process_group"), "zero2", devices=2)


@ranks(2)
def test_shards_that_do_not_divide_the_ranks(pool: RankPool) -> None:
    refuse(pool, contains("shard_size=3", "world size 2", "[1, 2]"), {"stage": 2, "shard_size": 3})


@ranks(2)
def test_units_that_match_nothing(pool: RankPool) -> None:
    refuse(pool, contains("'Brick'", "Block", "Linear"), {"stage": 3, "units": ["Block", "Brick"]})


class GlobalNorm(Optimizer):
    """A rule with a norm over all parameters, under a name that no list has: it must be tried out."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm)


class ByLBFGS(Untrained):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.LBFGS(self.parameters())


class ByGlobalNorm(Untrained):
    def configure_optimizers(self) -> Optimizer:
        return GlobalNorm(self.parameters())


@ranks(2)
@pytest.mark.parametrize("module", [ByLBFGS, ByGlobalNorm])
def test_an_optimizer_that_reads_all_parameters(pool: RankPool, module: type[Lit]) -> None:
    name = module.__name__.removeprefix("By")
    refuse(pool, contains(f"ValueError: {name}", "cannot run over shards", "AdamW"), "zero3", module)


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
def test_a_lazy_layer(pool: RankPool) -> None:
    refuse(pool, contains("'lazy.weight'", "no shape", "configure_model"), "zero3", LazyLayer)


class Renormalized(Lit):
    """Rows of an embedding are kept short: by forward, or after each step as the message about that says."""

    def __init__(self, recipe: Recipe, max_norm: float | None = 0.5) -> None:
        super().__init__(recipe)
        torch.manual_seed(0)
        self.rows = nn.Embedding(models.VOCAB, 3, max_norm=max_norm)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step(batch, index) + (self.rows(batch).sum(-1) - 1).square().mean()


class RenormalizedByHand(Renormalized):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe, max_norm=None)

    def on_train_batch_end(self, *_: Any) -> None:
        ours = isinstance(self.trainer.strategy, ZeroStrategy)
        with torch.no_grad(), gathered_parameters(self.rows) if ours else nullcontext():
            self.rows.weight.renorm_(2.0, 0, 0.5)


@ranks(2)
@pytest.mark.parametrize("name", ["zero0", "zero3"])
def test_an_embedding_that_forward_renormalizes(pool: RankPool, name: str) -> None:
    told = "gathered_parameters(self.rows): self.rows.weight.renorm_(2.0, 0, 0.5)"
    refuse(pool, contains("'rows'", "max_norm=0.5", "2 ranks", "max_norm=None", told), name, Renormalized)
    assert_as_ddp(pool, name, RenormalizedByHand)


@ranks(1)
def test_one_rank_may_renormalize_in_forward(pool: RankPool) -> None:
    for name in ("zero2_offload", "zero3"):
        assert_as_ddp(pool, name, Renormalized)


# -------------------------------------------------------------------------------------------------------- precision


def test_an_unknown_precision() -> None:
    for precision in ("transformer-engine", "fp16", 8):
        parts = (f"precision={precision!r}", "'bf16-mixed'")
        assert refused(ZeroPrecision, {"precision": precision}, *parts, error=ValueError), precision


def test_a_scaler_that_is_none() -> None:
    with pytest.raises(TypeError, match=contains("scaler=65536", "DynamicLossScaler(...)", "StaticLossScaler(scale)")):
        ZeroPrecision("16-mixed", scaler=65536)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=contains("DynamicLossScaler", "StaticLossScaler(scale)")):
        ZeroPrecision("16-mixed", scaler=DynamicLossScaler)  # type: ignore[arg-type]  # the class


def test_options_of_the_precision() -> None:
    for option in ("master_weights", "cast_inputs"):
        options = {"precision": "bf16-mixed", option: "no"}
        assert refused(ZeroPrecision, options, f"{option}='no'", "True or False", error=TypeError), option
    options = {"precision": "32-true", "cast_inputs": True}  # to no dtype
    assert refused(ZeroPrecision, options, "cast_inputs=True", "'32-true'", "param_dtype='float32'", error=ValueError)
    for option in ("param_dtype", "reduce_dtype", "grad_dtype"):
        for value in ("bf16", "int32", torch.int32, 16):
            options = {"precision": "bf16-mixed", option: value}
            assert refused(ZeroPrecision, options, f"{option}={value!r}", "bfloat16"), (option, value)


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


@ranks(1)
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_our_plugin_under_another_strategy(pool: RankPool, strategy: str) -> None:
    with pytest.raises(RankError, match=contains("ZeroPrecision", "ZeroStrategy", "precision='bf16-mixed'")):
        pool.run(fit, strategy, Recipe(), Untrained, plugins=[ZeroPrecision("bf16-mixed")])


class Replacing(Lit):
    """Makes its optimizer anew in the middle of the fit."""

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch:
            self.trainer.strategy.setup_optimizers(self.trainer)


@ranks(2)
@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 0.5}])
def test_an_optimizer_that_replaces_another_during_a_fit(pool: RankPool, flags: dict[str, Any]) -> None:
    message = contains("this AdamW", "configure_optimizers returned", "another fit, trainer.fit(module)")
    with pytest.raises(RankError, match=message) as caught:
        pool.run_within(20, fit, "zero2", Recipe(), Replacing, max_epochs=2, **flags)
    assert {failure.kind for failure in caught.value.failures.values()} == {"RuntimeError"}
