"""What each `precision=` means, however it is asked for: dtypes, autocast, masters, and the numbers that result."""

from __future__ import annotations

import dataclasses
import functools
import warnings
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
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from strategy.fits import (
    Fitted,
    Lit,
    Recipe,
    assert_same,
    assert_same_states,
    fit,
    is_native,
    main_names,
    make_trainer,
    more_names,
    more_names_and_sizes,
    reference,
    slow_unless,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_zero import DynamicLossScaler, StaticLossScaler, ZeroPrecision, ZeroStrategy

FLAGS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")
DOWNGRADE = "AMP with fp16 is not supported on CPU"


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
        return hidden.float().square().mean() / 100  # gradients that the default loss scale does not make infinite

    def on_train_start(self) -> None:
        # Before the first step: masters are the initial values, unrounded.
        state = self.trainer.strategy.lightning_module_state_dict()
        self.notes["state"] = {name: value.clone() for name, value in state.items()}
        self.notes["masters"] = {
            name: bucket.master.dtype for bucket in self.trainer.strategy.engine.buckets for name in bucket.names
        }
        scaler = self.trainer.strategy.precision_plugin.scaler
        self.notes["scaler"] = None if scaler is None else type(scaler)
        self.notes["loss_scale"] = self.trainer.strategy.loss_scale

    def on_train_end(self) -> None:
        state = self.trainer.strategy.lightning_module_state_dict()
        if self.trainer.is_global_zero:  # elsewhere there may be none
            self.notes["trained"] = not torch.equal(state["linear.weight"], self.notes["state"]["linear.weight"])
        self.notes["skipped"] = self.trainer.strategy.skipped_steps

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        batches = [(torch.randn(3, 4), torch.arange(3)) for _ in range(2)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def probe(form: str, flag: str, strategy: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Notes of a fit, and the module's initial state, for one way of asking for a precision."""
    module = Probe()
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    stage = int(strategy[4])
    given: dict[str, Callable[[], dict[str, Any]]] = {
        "flag": lambda: {"strategy": strategy, "precision": flag},
        "flag and instance": lambda: {"strategy": ZeroStrategy(stage), "precision": flag},
        "plugin": lambda: {"strategy": strategy, "plugins": [ZeroPrecision(flag, **options)]},
        "plugin and instance": lambda: {"strategy": ZeroStrategy(stage), "plugins": [ZeroPrecision(flag, **options)]},
        "stock plugin": lambda: {"strategy": strategy, "plugins": [stock_plugin(flag)]},
        "stock plugin and instance": lambda: {"strategy": ZeroStrategy(stage), "plugins": [stock_plugin(flag)]},
        "plugin in instance": lambda: {
            "strategy": ZeroStrategy(stage, precision_plugin=ZeroPrecision(flag, **options))
        },
        "stock plugin in instance": lambda: {"strategy": ZeroStrategy(stage, precision_plugin=stock_plugin(flag))},
        "plugin in instance and its flag": lambda: {
            "strategy": ZeroStrategy(stage, precision_plugin=ZeroPrecision(flag, **options)),
            "precision": flag,
        },
        "stock plugin in instance and its flag": lambda: {
            "strategy": ZeroStrategy(stage, precision_plugin=stock_plugin(flag)),
            "precision": flag,
        },
    }
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            max_steps=1,
            enable_model_summary=False,
            **quiet,
            **given[form](),
        )
        trainer.fit(module)
    module.notes["downgraded"] = any(DOWNGRADE in str(warning.message) for warning in caught)
    module.notes["after"] = torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
    return module.notes, initial


def stock_plugin(flag: str) -> Precision:
    plugins: dict[str, Callable[[], Precision]] = {
        "32-true": Precision,
        "64-true": DoublePrecision,
        "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
        "bf16-true": lambda: HalfPrecision("bf16-true"),
        "16-mixed": lambda: MixedPrecision("16-mixed", "cpu"),
        "16-true": lambda: HalfPrecision("16-true"),
    }
    return plugins[flag]()


FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True)
class Expected:
    """One row of the table; `step` is the dtype of inputs, buffers and new tensors."""

    linear: torch.dtype
    norms: torch.dtype
    step: torch.dtype
    master: torch.dtype
    autocast: torch.dtype | None = None
    scaler: type | None = None


TABLE = {
    "32-true": Expected(linear=FP32, norms=FP32, step=FP32, master=FP32),
    "64-true": Expected(linear=FP64, norms=FP64, step=FP64, master=FP64),
    "bf16-mixed": Expected(linear=BF16, norms=FP32, step=FP32, master=FP32, autocast=BF16),
    "bf16-true": Expected(linear=BF16, norms=BF16, step=BF16, master=FP32),
    "16-mixed": Expected(linear=FP16, norms=FP32, step=FP32, master=FP32, autocast=FP16, scaler=DynamicLossScaler),
    "16-true": Expected(linear=FP16, norms=FP16, step=FP16, master=FP32, scaler=DynamicLossScaler),
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
    assert notes["scaler"] is row.scaler
    assert notes["loss_scale"] == (1.0 if row.scaler is None else 2.0**16)
    assert notes.get("trained", True)
    assert notes["skipped"] == 0


FORMS = (
    "flag",
    "flag and instance",
    "plugin",
    "plugin and instance",
    "stock plugin",
    "stock plugin and instance",
    "plugin in instance",
    "stock plugin in instance",
    "plugin in instance and its flag",
    "stock plugin in instance and its flag",
)


@ranks(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flag", FLAGS)
def test_a_precision_means_the_same_however_it_is_asked_for(pool: RankPool, flag: str, form: str) -> None:
    """But for one way: Lightning makes bf16 of a bare flag "16-mixed" on a CPU, and warns."""
    notes, initial = pool.run(probe, form, flag, "zero2", {})[0]
    downgraded = flag == "16-mixed" and form in ("flag", "flag and instance")
    assert notes["downgraded"] == downgraded
    check_row(notes, TABLE["bf16-mixed" if downgraded else flag])
    for name, value in notes["state"].items():
        if name not in ("offset", "norms.0.running_mean", "norms.0.running_var"):
            assert torch.equal(value, initial[name].to(value.dtype)), name  # unrounded


@ranks(2)
@main_names
@pytest.mark.parametrize("flag", FLAGS)
def test_a_precision_means_the_same_at_every_stage(pool: RankPool, name: str, flag: str) -> None:
    for notes, _ in pool.run(probe, "plugin" if flag == "16-mixed" else "flag", flag, name, {}):
        check_row(notes, TABLE[flag])


def plugin_of(flag: str, stock: bool) -> Precision:
    return stock_plugin(flag) if stock else ZeroPrecision(flag)  # type: ignore[arg-type]


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("instance", [False, True], ids=["name", "instance"])
def test_lightning_refuses_a_flag_beside_plugins(instance: bool, stock: bool) -> None:
    """Whichever they are, equal or not."""
    for flag in FLAGS:
        for other in FLAGS:
            strategy = ZeroStrategy(2) if instance else "zero2"
            with pytest.raises(ValueError, match="Received both `precision="):
                Trainer(strategy=strategy, precision=flag, plugins=[plugin_of(other, stock)], accelerator="cpu")


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_lightning_refuses_a_plugin_in_the_instance_beside_plugins(stock: bool) -> None:
    for flag in FLAGS:
        for other in FLAGS:
            strategy = ZeroStrategy(2, precision_plugin=plugin_of(flag, stock))
            with pytest.raises(
                MisconfigurationException, match="precision set through both strategy class and plugins"
            ):
                Trainer(strategy=strategy, plugins=[plugin_of(other, stock)], accelerator="cpu")


def contradict(stock: bool) -> dict[tuple[str, str], str]:
    """What each other flag beside a plugin in the instance says, by plugin and flag."""
    said = {}
    for plugin in FLAGS:
        for flag in FLAGS:
            if flag not in ("32-true", plugin):  # Lightning does not tell a "32-true" from no flag
                strategy = ZeroStrategy(2, precision_plugin=plugin_of(plugin, stock))
                trainer = Trainer(
                    strategy=strategy,
                    precision=flag,  # type: ignore[arg-type]
                    accelerator="cpu",
                    devices=dist.get_world_size(),
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                )
                with pytest.raises(ValueError, match="contradicts") as caught:
                    trainer.fit(Probe())
                said[plugin, flag] = str(caught.value)
    return said


@ranks(1)
@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_we_refuse_a_flag_that_contradicts_the_plugin_in_the_instance(pool: RankPool, stock: bool) -> None:
    (said,) = pool.run(contradict, stock)
    assert len(said) == len(FLAGS) * (len(FLAGS) - 2) + 1
    for (plugin, flag), message in said.items():
        assert f"precision={flag!r}" in message
        assert f"which says {plugin!r}" in message


def scaler_of(plugin: Precision) -> dict[str, Any]:
    """The configuration of the loss scaler that our plugin makes of a stock one."""
    strategy = ZeroStrategy(2, precision_plugin=plugin)
    assert isinstance(strategy.precision_plugin, ZeroPrecision)
    scaler = strategy.precision_plugin.scaler
    return {} if scaler is None else {name: value for name, value in vars(scaler).items() if name[0] != "_"}


def test_a_custom_grad_scaler_keeps_its_numbers() -> None:
    """torch lowers its scale at every overflow."""
    numbers = {"init_scale": 2.0**7, "growth_factor": 4.0, "backoff_factor": 0.25}
    stock = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **numbers, growth_interval=7))
    expected = vars(DynamicLossScaler(**numbers, window=7, hysteresis=1))
    assert scaler_of(stock) == {name: value for name, value in expected.items() if name[0] != "_"}
    for one in ("init_scale", "growth_factor", "backoff_factor"):
        stock = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **{one: numbers[one]}))
        made = scaler_of(stock)
        assert (made[one], made["hysteresis"], made["window"]) == (numbers[one], 1, 2000)


def test_the_default_grad_scaler_becomes_our_default() -> None:
    expected = {name: value for name, value in vars(DynamicLossScaler()).items() if name[0] != "_"}
    assert scaler_of(MixedPrecision("16-mixed", "cpu")) == scaler_of(ZeroPrecision("16-mixed")) == expected
    assert scaler_of(HalfPrecision("16-true")) == scaler_of(ZeroPrecision("16-true")) == expected


def test_a_disabled_grad_scaler_scales_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    strategy = ZeroStrategy(2, precision_plugin=MixedPrecision("16-mixed", "cpu", scaler))
    made = strategy.precision_plugin.scaler  # type: ignore[attr-defined]
    assert made is None or (isinstance(made, StaticLossScaler) and made.scale == 1.0)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_scaler_that_is_given_is_used(flag: Any) -> None:
    for scaler in (StaticLossScaler(8.0), DynamicLossScaler(hysteresis=4)):
        assert ZeroPrecision(flag, scaler=scaler).scaler is scaler
    made = ZeroPrecision(flag).scaler
    assert type(made) is (DynamicLossScaler if flag.startswith("16") else type(None))


@ranks(1)
@pytest.mark.parametrize("name", ["zero1", "zero3_offload"])
def test_masters_may_be_left_out(pool: RankPool, name: str) -> None:
    for flag in ("bf16-mixed", "bf16-true", "16-mixed", "16-true"):
        dtype = TABLE[flag].linear
        notes, _ = pool.run(probe, "plugin", flag, name, {"master_weights": False})[0]
        assert notes["linear"] == dtype
        assert notes["masters"]["linear.weight"] == dtype
        assert notes["state"]["linear.weight"].dtype == dtype


@ranks(1)
@pytest.mark.parametrize("flag", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", ["zero0", "zero3"])
def test_parameters_may_stay_fp32_under_autocast(pool: RankPool, name: str, flag: str) -> None:
    notes, _ = pool.run(probe, "plugin", flag, name, {"param_dtype": "float32"})[0]
    row = dataclasses.replace(TABLE[flag], linear=FP32)
    assert notes.pop("hidden") == TABLE[flag].linear
    check_row(notes | {"hidden": FP32}, row)


@ranks(1)
@pytest.mark.parametrize(
    ("flag", "cast", "dtype"),
    [("bf16-mixed", True, BF16), ("16-mixed", True, FP16), ("bf16-true", False, FP32), ("16-true", False, FP32)],
)
def test_inputs_are_cast_as_asked(pool: RankPool, flag: str, cast: bool, dtype: torch.dtype) -> None:
    # A 16-bit layer takes no fp32 input outside autocast: what was asked for shows in the error.
    if not cast:
        with pytest.raises(Exception, match="dtype"):
            pool.run(probe, "plugin", flag, "zero2", {"cast_inputs": cast})
    else:
        assert pool.run(probe, "plugin", flag, "zero2", {"cast_inputs": cast})[0][0]["input"] == dtype


@pytest.mark.parametrize("flag", ["16-mixed", 16, "16"])
@pytest.mark.filterwarnings("ignore:.*supported for historical reasons.*")
def test_lightning_turns_fp16_on_cpu_into_bf16(flag: Any) -> None:
    with pytest.warns(UserWarning, match=DOWNGRADE):
        trainer = Trainer(
            strategy="zero2", precision=flag, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
        )
    assert isinstance(trainer.precision_plugin, ZeroPrecision)
    assert trainer.precision_plugin.precision == trainer.precision == "bf16-mixed"


# ------------------------------------------------------------------------------------------------------------ numbers


def to_bf16(model: nn.Module) -> nn.Module:
    return model.to(BF16)


def to_fp16(model: nn.Module) -> nn.Module:
    return model.to(FP16)


def but_norms(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    return model


def autocast_loss(dtype: torch.dtype, model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        return models.next_token_loss(model, batch)


def mixed(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "cast": functools.partial(but_norms, dtype=dtype),
        "loss_fn": functools.partial(autocast_loss, dtype),
    }


SCALE = 2.0**10  # the default is too large for these gradients
NUMBERS: dict[str, dict[str, Any]] = {
    "bf16-true": {"cast": to_bf16},
    "bf16-mixed": mixed(BF16),
    "16-true": {"cast": to_fp16, "loss_scale": SCALE},
    "16-mixed": {**mixed(FP16), "loss_scale": SCALE},
}


def asked(flag: str, **options: Any) -> dict[str, Any]:
    """The Trainer's arguments for a precision of `NUMBERS`."""
    if flag.startswith("bf16") and not options:
        return {"precision": flag}
    scaler = None if flag.startswith("bf16") else DynamicLossScaler(init_scale=SCALE)
    return {"plugins": [ZeroPrecision(flag, scaler=scaler, **options)]}  # type: ignore[arg-type]


@pytest.mark.parametrize("micro", slow_unless([2], [1, 2]))
@more_names_and_sizes
@pytest.mark.parametrize("flag", NUMBERS)
def test_training_in_16_bits_equals_the_reference(pool: RankPool, flag: str, name: str, micro: int) -> None:
    recipe = Recipe(optimizer="momentum", micro=micro)
    results = pool.run(fit, name, recipe, **asked(flag))
    expected = reference(name, recipe, pool.world_size, **NUMBERS[flag])
    assert_same(results[0].weights, expected.weights)
    assert_same_states(results[0].optimizer_states[0], expected.optimizer_state)
    assert {value.dtype for value in results[0].weights.values()} == {FP32}


@ranks(2)
@main_names
@pytest.mark.parametrize("flag", NUMBERS)
def test_adamw_in_16_bits_with_clipping(pool: RankPool, flag: str, name: str) -> None:
    recipe = Recipe(micro=2, tail=1)
    results = pool.run(fit, name, recipe, **asked(flag), gradient_clip_val=0.3)
    expected = reference(name, recipe, pool.world_size, clip_norm=0.3, **NUMBERS[flag])
    if not is_native(name, recipe):
        assert_same(results[0].weights, expected.weights)
    else:
        # One unit in the last place of a master may round its 16-bit copy the other way, which the next step feels.
        torch.testing.assert_close(results[0].weights, expected.weights, rtol=0, atol=recipe.steps * 1e-2)
        difference = torch.cat([(results[0].weights[k] - v).flatten() for k, v in expected.weights.items()])
        assert difference.abs().median() < 1e-6


class PowersOfTwo(Recipe):
    """Momentum whose rates multiply 16-bit values without rounding.

    torch rounds such a product only in what is left of a tensor after whole vectors, so that it matters where a shard
    ends.
    """

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=2.0**-3, momentum=0.9, weight_decay=2.0**-3)


@more_names_and_sizes
@pytest.mark.parametrize("flag", ["bf16-true", "16-true"])
def test_16_bits_without_masters_equal_the_reference(pool: RankPool, name: str, flag: str) -> None:
    recipe = PowersOfTwo(dtype=TABLE[flag].linear)
    wide = dataclasses.replace(recipe, dtype=FP32)
    results = pool.run(fit, name, wide, **asked(flag, master_weights=False))
    scale = {"loss_scale": SCALE} if flag == "16-true" else {}
    assert_same(results[0].weights, reference(name, recipe, pool.world_size, **scale).weights)


@more_names_and_sizes
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
@more_names
@pytest.mark.parametrize("flag", ["bf16-mixed", "16-mixed"])
def test_fp32_parameters_under_autocast_are_lightnings_own_arithmetic(pool: RankPool, name: str, flag: str) -> None:
    recipe = Recipe(optimizer="momentum", micro=2)
    plain = pool.run(fit_stock, flag, recipe)[0].weights
    ours = pool.run(fit, name, recipe, **asked(flag, param_dtype="float32"))[0].weights
    assert_same(ours, plain)


def fit_stock(flag: str, recipe: Recipe) -> Fitted:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if flag == "16-mixed" else None
    return fit("ddp", recipe, plugins=[MixedPrecision(flag, "cpu", scaler)])  # type: ignore[arg-type]


@more_names_and_sizes
def test_float64_training_equals_the_reference(pool: RankPool, name: str) -> None:
    """A module of fp32 under `64-true` is trained in fp64 from its fp32 values."""
    recipe = Recipe(micro=2)
    results = pool.run(fit, name, recipe, precision="64-true")
    model = recipe.make_model().double()
    expected = reference(name, recipe, pool.world_size, model=model)
    assert_same(results[0].weights, expected.weights)


@ranks(2)
@pytest.mark.parametrize("name", slow_unless(["zero2"], ["zero1", "zero2"]))
@pytest.mark.parametrize("option", ["reduce_dtype", "grad_dtype"])
@pytest.mark.parametrize(
    ("flag", "dtype"),
    [("bf16-true", "float32"), ("bf16-true", "bfloat16"), ("16-true", "float32"), ("16-true", "float16")],
)
def test_dtypes_of_reduction_and_gradients(pool: RankPool, name: str, option: str, flag: str, dtype: str) -> None:
    recipe = Recipe(optimizer="momentum", micro=2)
    options: dict[str, Any] = {option: dtype}
    results = pool.run(fit, name, recipe, **asked(flag, **options))
    expected = reference(name, recipe, 2, **NUMBERS[flag], **{option: getattr(torch, dtype)})
    assert_same(results[0].weights, expected.weights)


def default_dtypes(name: str, flag: str) -> list[torch.dtype]:
    """Of tensors made in `init_module`, outside, and in a step."""
    trainer = make_trainer(name, precision=flag)
    with trainer.init_module():
        inside = nn.Linear(2, 2).weight.dtype
    return [inside, nn.Linear(2, 2).weight.dtype]


@ranks(1)
@pytest.mark.parametrize(
    ("flag", "dtype"),
    [("32-true", FP32), ("64-true", FP64), ("bf16-mixed", FP32), ("bf16-true", FP32), ("16-true", FP32)],
)
def test_modules_are_made_at_full_precision(pool: RankPool, flag: str, dtype: torch.dtype) -> None:
    assert pool.run(default_dtypes, "zero3", flag) == [[dtype, FP32]]


def evaluate(name: str, flag: str, recipe: Recipe) -> tuple[float, list[torch.dtype]]:
    lit = Lit(recipe)
    trainer = make_trainer(name, precision=flag)
    predictions = trainer.predict(lit)
    return trainer.test(lit, verbose=False)[0]["test_loss"], [p.dtype for p in predictions]


@ranks(2)
@pytest.mark.parametrize("name", slow_unless(["zero3"], ["zero0", "zero2_offload", "zero3"]))
@pytest.mark.parametrize(
    ("flag", "dtype"), [("32-true", FP32), ("64-true", FP64), ("bf16-mixed", BF16), ("16-true", FP16)]
)
def test_evaluation_uses_the_precision_too(pool: RankPool, name: str, flag: str, dtype: torch.dtype) -> None:
    recipe = Recipe()
    model = recipe.make_model()
    batches = [batch for step in recipe.batches(pool.world_size) for batch in step[0]]
    with torch.no_grad():
        expected = torch.stack([models.next_token_loss(model, batch) for batch in batches]).mean().item()
    for loss, dtypes in pool.run(evaluate, name, flag, recipe):
        assert loss == pytest.approx(expected, rel=1e-5 if dtype.itemsize > 2 else 2e-2)
        assert set(dtypes) == {dtype}
