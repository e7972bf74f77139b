"""What each `precision=` means, however it is asked for: dtypes, autocast, masters, and the numbers that result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import models
from helpers.ranks import RankPool, ranks
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from strategy.fits import (
    Lit,
    Recipe,
    assert_same,
    assert_same_states,
    every_name,
    fit,
    is_native,
    make_trainer,
    one_or_two_ranks,
    reference,
    slow_unless,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_zero import ZeroPrecision, ZeroStrategy

FLAGS = ("32-true", "64-true", "bf16-mixed", "bf16-true")


class LlamaRMSNorm(nn.Module):
    """A normalization layer that only its name tells."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Probe(LightningModule):
    """Notes what a step sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), LlamaRMSNorm()])
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.full((4,), 0.1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.notes: dict[str, Any] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, label = batch
        hidden = self.linear(x)
        made = torch.zeros(1)
        self.notes |= {
            "input": x.dtype,
            "label": label.dtype,
            "linear": self.linear.weight.dtype,
            "norms": {p.dtype for p in self.norms.parameters()},
            "scale": self.scale.dtype,
            "offset": self.offset.dtype,
            "count": self.count.dtype,
            "running_mean": self.norms[0].running_mean.dtype,
            "autocast": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            "hidden": hidden.dtype,
            "made": made.dtype,
        }
        hidden = hidden * self.scale + self.offset
        for norm in self.norms:
            hidden = norm(hidden)
        return hidden.float().square().mean()

    def on_train_start(self) -> None:
        # Before the first step: masters are the initial values, unrounded.
        state = self.trainer.strategy.lightning_module_state_dict()
        self.notes["state"] = {name: value.clone() for name, value in state.items()}
        self.notes["masters"] = {
            name: bucket.master.dtype for bucket in self.trainer.strategy.engine.buckets for name in bucket.names
        }

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        batches = [(torch.randn(3, 4), torch.arange(3)) for _ in range(2)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def probe(form: str, flag: str, strategy: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Notes of a fit, and the module's initial state, for one way of asking for a precision."""
    module = Probe()
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    given: dict[str, Callable[[], dict[str, Any]]] = {
        "flag": lambda: {"strategy": strategy, "precision": flag},
        "flag and instance": lambda: {"strategy": ZeroStrategy(int(strategy[4])), "precision": flag},
        "plugin": lambda: {"strategy": strategy, "plugins": [ZeroPrecision(flag, **options)]},
        "plugin in instance": lambda: {
            "strategy": ZeroStrategy(int(strategy[4]), precision_plugin=ZeroPrecision(flag, **options))
        },
        "plugin and instance": lambda: {
            "strategy": ZeroStrategy(int(strategy[4])),
            "plugins": [ZeroPrecision(flag, **options)],
        },
        "stock plugin in instance": lambda: {
            "strategy": ZeroStrategy(int(strategy[4]), precision_plugin=stock_plugin(flag))
        },
    }
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=1,
        enable_model_summary=False,
        **quiet,
        **given[form](),
    )
    trainer.fit(module)
    module.notes["after"] = torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
    return module.notes, initial


def stock_plugin(flag: str) -> Precision:
    plugins: dict[str, Callable[[], Precision]] = {
        "32-true": Precision,
        "64-true": DoublePrecision,
        "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
        "bf16-true": lambda: HalfPrecision("bf16-true"),
    }
    return plugins[flag]()


FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Expected:
    """One row of the table; `step` is the dtype of inputs, buffers and new tensors."""

    linear: torch.dtype
    norms: torch.dtype
    step: torch.dtype
    master: torch.dtype
    autocast: torch.dtype | None = None


TABLE = {
    "32-true": Expected(linear=FP32, norms=FP32, step=FP32, master=FP32),
    "64-true": Expected(linear=FP64, norms=FP64, step=FP64, master=FP64),
    "bf16-mixed": Expected(linear=BF16, norms=FP32, step=FP32, master=FP32, autocast=BF16),
    "bf16-true": Expected(linear=BF16, norms=BF16, step=BF16, master=FP32),
}


def check_row(notes: dict[str, Any], row: Expected) -> None:
    assert notes["linear"] == notes["scale"] == row.linear
    assert notes["norms"] == {row.norms}
    assert notes["input"] == notes["offset"] == notes["running_mean"] == notes["made"] == row.step
    assert notes["label"] == notes["count"] == torch.int64
    assert notes["autocast"] == row.autocast
    assert notes["hidden"] == row.linear
    assert set(notes["masters"].values()) == {row.master}
    assert notes["after"] == (FP32, False)


FORMS = (
    "flag",
    "flag and instance",
    "plugin",
    "plugin in instance",
    "plugin and instance",
    "stock plugin in instance",
)


@ranks(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flag", FLAGS)
def test_a_precision_means_the_same_however_it_is_asked_for(pool: RankPool, flag: str, form: str) -> None:
    notes, initial = pool.run(probe, form, flag, "zero2", {})[0]
    check_row(notes, TABLE[flag])
    for name, value in notes["state"].items():
        if name not in ("offset", "norms.0.running_mean", "norms.0.running_var"):
            assert torch.equal(value, initial[name].to(value.dtype)), name  # unrounded


@one_or_two_ranks
@every_name
@pytest.mark.parametrize("flag", FLAGS)
def test_a_precision_means_the_same_at_every_stage(pool: RankPool, name: str, flag: str) -> None:
    for notes, _ in pool.run(probe, "flag", flag, name, {}):
        check_row(notes, TABLE[flag])


@ranks(1)
@pytest.mark.parametrize("name", ["zero1", "zero3_offload"])
def test_masters_may_be_left_out(pool: RankPool, name: str) -> None:
    for flag in ("bf16-mixed", "bf16-true"):
        notes, _ = pool.run(probe, "plugin", flag, name, {"master_weights": False})[0]
        assert notes["linear"] == BF16
        assert notes["masters"]["linear.weight"] == BF16
        assert notes["state"]["linear.weight"].dtype == BF16


@ranks(1)
@pytest.mark.parametrize("name", ["zero0", "zero3"])
def test_parameters_may_stay_fp32_under_autocast(pool: RankPool, name: str) -> None:
    notes, _ = pool.run(probe, "plugin", "bf16-mixed", name, {"param_dtype": "float32"})[0]
    row = dataclasses.replace(TABLE["bf16-mixed"], linear=FP32)
    assert notes.pop("hidden") == BF16
    check_row(notes | {"hidden": FP32}, row)


@ranks(1)
@pytest.mark.parametrize(("flag", "cast", "dtype"), [("bf16-mixed", True, BF16), ("bf16-true", False, FP32)])
def test_inputs_are_cast_as_asked(pool: RankPool, flag: str, cast: bool, dtype: torch.dtype) -> None:
    # A bf16 layer takes no fp32 input outside autocast: what was asked for shows in the error.
    if flag == "bf16-true":
        with pytest.raises(Exception, match="dtype"):
            pool.run(probe, "plugin", flag, "zero2", {"cast_inputs": cast})
    else:
        assert pool.run(probe, "plugin", flag, "zero2", {"cast_inputs": cast})[0][0]["input"] == dtype


@pytest.mark.parametrize("flag", ["16-mixed", 16, "16"])
@pytest.mark.filterwarnings("ignore:.*supported for historical reasons.*")
def test_lightning_turns_fp16_on_cpu_into_bf16(flag: Any) -> None:
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        trainer = Trainer(
            strategy="zero2", precision=flag, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
        )
    assert isinstance(trainer.precision_plugin, ZeroPrecision)
    assert trainer.precision_plugin.precision == trainer.precision == "bf16-mixed"


# ------------------------------------------------------------------------------------------------------------ numbers


def to_bf16(model: nn.Module) -> nn.Module:
    return model.to(BF16)


def to_bf16_but_norms(model: nn.Module) -> nn.Module:
    model.to(BF16)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    return model


def autocast_loss(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return models.next_token_loss(model, batch)


NUMBERS: dict[str, dict[str, Any]] = {
    "bf16-true": {"cast": to_bf16},
    "bf16-mixed": {"cast": to_bf16_but_norms, "loss_fn": autocast_loss},
}


@one_or_two_ranks
@pytest.mark.parametrize("micro", [1, 2])
@every_name
@pytest.mark.parametrize("flag", NUMBERS)
def test_bf16_training_equals_the_reference(pool: RankPool, flag: str, name: str, micro: int) -> None:
    recipe = Recipe(optimizer="momentum", micro=micro)
    results = pool.run(fit, name, recipe, precision=flag)
    expected = reference(name, recipe, pool.world_size, **NUMBERS[flag])
    assert_same(results[0].weights, expected.weights)
    assert_same_states(results[0].optimizer_states[0], expected.optimizer_state)
    assert {value.dtype for value in results[0].weights.values()} == {FP32}


@one_or_two_ranks
@every_name
@pytest.mark.parametrize("flag", NUMBERS)
def test_bf16_adamw_with_clipping(pool: RankPool, flag: str, name: str) -> None:
    recipe = Recipe(micro=2, tail=1)
    results = pool.run(fit, name, recipe, precision=flag, gradient_clip_val=0.3)
    expected = reference(name, recipe, pool.world_size, clip_norm=0.3, **NUMBERS[flag])
    if not is_native(name, recipe):
        assert_same(results[0].weights, expected.weights)
    else:
        # One unit in the last place of a master may round its bf16 copy the other way, which the next step feels.
        torch.testing.assert_close(results[0].weights, expected.weights, rtol=0, atol=recipe.steps * 1e-2)
        difference = torch.cat([(results[0].weights[k] - v).flatten() for k, v in expected.weights.items()])
        assert difference.abs().median() < 1e-6


@one_or_two_ranks
@every_name
def test_bf16_without_masters_equals_the_reference(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum", dtype=BF16)
    plugin = ZeroPrecision("bf16-true", master_weights=False)
    wide = dataclasses.replace(recipe, dtype=FP32)
    results = pool.run(fit, name, wide, plugins=[plugin])
    assert_same(results[0].weights, reference(name, recipe, pool.world_size).weights)


@one_or_two_ranks
@pytest.mark.parametrize("name", ["zero1", "zero2_offload", "zero3"])
def test_small_updates_survive_in_masters(pool: RankPool, name: str) -> None:
    """Each is less than half a unit in the last place of a bf16 weight."""
    recipe = Recipe(optimizer="sgd", options={"lr": 1e-5}, steps=4)
    start = recipe.make_model().state_dict()
    kept = pool.run(fit, name, recipe, precision="bf16-true")[0].weights
    assert_same(kept, reference(name, recipe, pool.world_size, cast=to_bf16).weights)
    assert not torch.equal(kept["blocks.0.up.weight"], start["blocks.0.up.weight"])
    plugin = ZeroPrecision("bf16-true", master_weights=False)
    lost = pool.run(fit, name, recipe, plugins=[plugin])[0].weights
    assert torch.equal(lost["blocks.0.up.weight"], start["blocks.0.up.weight"].to(BF16))


@ranks(1)
@every_name
def test_fp32_parameters_under_autocast_are_lightnings_own_arithmetic(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum", micro=2)
    plain = pool.run(fit, "ddp", recipe, precision="bf16-mixed")[0].weights
    ours = pool.run(fit, name, recipe, plugins=[ZeroPrecision("bf16-mixed", param_dtype="float32")])[0].weights
    assert_same(ours, plain)


@one_or_two_ranks
@every_name
def test_float64_training_equals_the_reference(pool: RankPool, name: str) -> None:
    """A module of fp32 under `64-true` is trained in fp64 from its fp32 values."""
    recipe = Recipe(micro=2)
    results = pool.run(fit, name, recipe, precision="64-true")
    model = recipe.make_model().double()
    expected = reference(name, recipe, pool.world_size, model=model)
    assert_same(results[0].weights, expected.weights)


@ranks(2)
@pytest.mark.parametrize("name", slow_unless(["zero2"], ["zero1", "zero2", "zero3"]))
@pytest.mark.parametrize("option", ["reduce_dtype", "grad_dtype"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_of_reduction_and_gradients(pool: RankPool, name: str, option: str, dtype: str) -> None:
    recipe = Recipe(optimizer="momentum", micro=2)
    options: dict[str, Any] = {option: dtype}
    results = pool.run(fit, name, recipe, plugins=[ZeroPrecision("bf16-true", **options)])
    expected = reference(name, recipe, 2, cast=to_bf16, **{option: getattr(torch, dtype)})
    assert_same(results[0].weights, expected.weights)


def default_dtypes(name: str, flag: str) -> list[torch.dtype]:
    """Of tensors made in `init_module`, outside, and in a step."""
    trainer = make_trainer(name, precision=flag)
    with trainer.init_module():
        inside = nn.Linear(2, 2).weight.dtype
    return [inside, nn.Linear(2, 2).weight.dtype]


@ranks(1)
@pytest.mark.parametrize(
    ("flag", "dtype"), [("32-true", FP32), ("64-true", FP64), ("bf16-mixed", FP32), ("bf16-true", FP32)]
)
def test_modules_are_made_at_full_precision(pool: RankPool, flag: str, dtype: torch.dtype) -> None:
    assert pool.run(default_dtypes, "zero3", flag) == [[dtype, FP32]]


def evaluate(name: str, flag: str, recipe: Recipe) -> tuple[float, list[torch.dtype]]:
    lit = Lit(recipe)
    trainer = make_trainer(name, precision=flag)
    predictions = trainer.predict(lit)
    return trainer.test(lit, verbose=False)[0]["test_loss"], [p.dtype for p in predictions]


@one_or_two_ranks
@pytest.mark.parametrize("name", ["zero0", "zero2_offload", "zero3"])
@pytest.mark.parametrize(("flag", "dtype"), [("32-true", FP32), ("64-true", FP64), ("bf16-mixed", BF16)])
def test_evaluation_uses_the_precision_too(pool: RankPool, name: str, flag: str, dtype: torch.dtype) -> None:
    recipe = Recipe()
    model = recipe.make_model()
    batches = [batch for step in recipe.batches(pool.world_size) for batch in step[0]]
    with torch.no_grad():
        expected = torch.stack([models.next_token_loss(model, batch) for batch in batches]).mean().item()
    for loss, dtypes in pool.run(evaluate, name, flag, recipe):
        assert loss == pytest.approx(expected, rel=2e-2 if dtype == BF16 else 1e-5)
        assert set(dtypes) == {dtype}
