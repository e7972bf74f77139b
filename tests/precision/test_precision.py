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
    MOMENTUM,
    Fitted,
    Lit,
    Recipe,
    assert_same,
    assert_same_states,
    fit,
    main_names,
    main_names_and,
    make_trainer,
    reference,
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
            "module": self.dtype,
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
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


def check_row(notes: dict[str, Any], row: Expected, case: Any) -> None:
    assert notes["linear"] == notes["scale"] == row.linear, case
    assert notes["norms"] == {row.norms}, case
    assert notes["input"] == notes["offset"] == notes["running_mean"] == notes["made"] == row.step, case
    assert notes["module"] == row.step, case
    assert notes["label"] == notes["count"] == torch.int64, case
    assert notes["autocast"] == row.autocast, case
    assert notes["hidden"] == row.linear, case
    assert set(notes["masters"].values()) == {row.master}, case
    assert notes["after"] == (FP32, False), case
    assert notes["scaler"] is row.scaler, case
    assert notes["loss_scale"] == (1.0 if row.scaler is None else 2.0**16), case
    assert notes.get("trained", True), case
    assert notes["skipped"] == 0, case


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


def probe_each(cases: list[tuple[str, str, str]]) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    return [probe(form, flag, strategy, {}) for form, flag, strategy in cases]


# Every form with a flag that it could get wrong, and every flag by each form that translates it.
CASES = [
    *((form, "bf16-mixed", "zero2") for form in FORMS),
    *((form, "16-mixed", "zero2") for form in ("flag", "flag and instance")),
    *((form, flag, "zero2") for form in ("plugin", "stock plugin") for flag in FLAGS if flag != "bf16-mixed"),
]


@ranks(1)
def test_a_precision_means_the_same_however_it_is_asked_for(pool: RankPool) -> None:
    """But for one way: Lightning makes bf16 of a bare flag "16-mixed" on a CPU, and warns."""
    for (form, flag, _), (notes, initial) in zip(CASES, pool.run(probe_each, CASES)[0], strict=True):
        downgraded = flag == "16-mixed" and form in ("flag", "flag and instance")
        assert notes["downgraded"] == downgraded, (form, flag)
        check_row(notes, TABLE["bf16-mixed" if downgraded else flag], (form, flag))
        for name, value in notes["state"].items():
            if name not in ("offset", "norms.0.running_mean", "norms.0.running_var"):
                assert torch.equal(value, initial[name].to(value.dtype)), (form, flag, name)  # unrounded


@ranks(2)
@main_names
def test_a_precision_means_the_same_on_more_ranks(pool: RankPool, name: str) -> None:
    cases = [("plugin" if flag == "16-mixed" else "flag", flag, name) for flag in FLAGS]
    for results in pool.run(probe_each, cases):
        for flag, (notes, _) in zip(FLAGS, results, strict=True):
            check_row(notes, TABLE[flag], flag)


def plugin_of(flag: str, stock: bool) -> Precision:
    return stock_plugin(flag) if stock else ZeroPrecision(flag)  # type: ignore[arg-type]


def test_lightning_refuses_a_flag_beside_plugins() -> None:
    """Whichever they are, equal or not."""
    for strategy, stock in (("zero2", False), (ZeroStrategy(2), True)):
        with pytest.raises(ValueError, match="Received both `precision="):
            Trainer(
                strategy=strategy, precision="bf16-true", plugins=[plugin_of("bf16-true", stock)], accelerator="cpu"
            )


def test_lightning_refuses_a_plugin_in_the_instance_beside_plugins() -> None:
    strategy = ZeroStrategy(2, precision_plugin=plugin_of("bf16-true", stock=False))
    with pytest.raises(MisconfigurationException, match="precision set through both strategy class and plugins"):
        Trainer(strategy=strategy, plugins=[plugin_of("bf16-true", stock=True)], accelerator="cpu")


CONTRADICTIONS = [("32-true", "bf16-mixed"), ("bf16-mixed", "bf16-true"), ("16-true", "64-true")]  # plugin, flag


def contradict(stock: bool) -> list[str]:
    """What another flag beside a plugin in the instance says; Lightning does not tell a "32-true" from no flag."""
    said = []
    for plugin, flag in CONTRADICTIONS:
        strategy = ZeroStrategy(2, precision_plugin=plugin_of(plugin, stock))
        trainer = Trainer(
            strategy=strategy,
            precision=flag,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,  # type: ignore[arg-type]
        )
        with pytest.raises(ValueError, match="contradicts") as caught:
            trainer.fit(Probe())
        said.append(str(caught.value))
    return said


@ranks(1)
def test_we_refuse_a_flag_that_contradicts_the_plugin_in_the_instance(pool: RankPool) -> None:
    for stock in (False, True):
        for (plugin, flag), message in zip(CONTRADICTIONS, pool.run(contradict, stock)[0], strict=True):
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


def test_a_scaler_that_is_given_is_used() -> None:
    for flag in FLAGS:
        for scaler in (StaticLossScaler(8.0), DynamicLossScaler(hysteresis=4)):
            assert ZeroPrecision(flag, scaler=scaler).scaler is scaler, flag
        made = ZeroPrecision(flag).scaler
        assert type(made) is (DynamicLossScaler if flag.startswith("16") else type(None)), flag


@ranks(1)
def test_masters_may_be_left_out(pool: RankPool) -> None:
    for flag, name in (
        ("bf16-mixed", "zero1"),
        ("bf16-true", "zero3_offload"),
        ("16-mixed", "zero3_offload"),
        ("16-true", "zero1"),
    ):
        dtype = TABLE[flag].linear
        notes, _ = pool.run(probe, "plugin", flag, name, {"master_weights": False})[0]
        assert notes["linear"] == dtype
        assert notes["masters"]["linear.weight"] == dtype
        assert notes["state"]["linear.weight"].dtype == dtype


@ranks(1)
@pytest.mark.parametrize(("name", "flag"), [("zero0", "bf16-mixed"), ("zero3", "16-mixed")])
def test_parameters_may_stay_fp32_under_autocast(pool: RankPool, name: str, flag: str) -> None:
    notes, _ = pool.run(probe, "plugin", flag, name, {"param_dtype": "float32"})[0]
    row = dataclasses.replace(TABLE[flag], linear=FP32)
    assert notes.pop("hidden") == TABLE[flag].linear
    check_row(notes | {"hidden": FP32}, row, flag)


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


@ranks(2)
@pytest.mark.parametrize(
    ("flag", "name"),
    [("bf16-true", "zero3"), ("bf16-mixed", "zero2_offload"), ("16-true", "zero2_offload"), ("16-mixed", "zero3")],
)
def test_training_in_16_bits_equals_the_reference(pool: RankPool, flag: str, name: str) -> None:
    recipe = Recipe(optimizer="momentum", micro=2)
    results = pool.run(fit, name, recipe, **asked(flag))
    expected = reference(name, recipe, pool.world_size, **NUMBERS[flag])
    assert_same(results[0].weights, expected.weights)
    assert_same_states(results[0].optimizer_states[0], expected.optimizer_state)
    assert {value.dtype for value in results[0].weights.values()} == {FP32}


class PowersOfTwo(Recipe):
    """Momentum whose rates multiply 16-bit values without rounding.

    torch rounds such a product only in what is left of a tensor after whole vectors, so that it matters where a shard
    ends.
    """

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=2.0**-3, momentum=0.9, weight_decay=2.0**-3)


@ranks(2)
@main_names_and("flag", "16-true", "bf16-true")
def test_16_bits_without_masters_equal_the_reference(pool: RankPool, name: str, flag: str) -> None:
    recipe = PowersOfTwo(dtype=TABLE[flag].linear)
    wide = dataclasses.replace(recipe, dtype=FP32)
    results = pool.run(fit, name, wide, **asked(flag, master_weights=False))
    scale = {"loss_scale": SCALE} if flag == "16-true" else {}
    assert_same(results[0].weights, reference(name, recipe, pool.world_size, **scale).weights)


@ranks(2)
@main_names
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
@main_names_and("flag", "16-mixed", "bf16-mixed")
def test_fp32_parameters_under_autocast_are_lightnings_own_arithmetic(pool: RankPool, name: str, flag: str) -> None:
    recipe = Recipe(optimizer="momentum", micro=2)
    plain = pool.run(fit_stock, flag, recipe)[0].weights
    ours = pool.run(fit, name, recipe, **asked(flag, param_dtype="float32"))[0].weights
    assert_same(ours, plain)


class CalledAgain(Lit):
    """Calls its network twice before each of two steps of one training step."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            losses = [models.next_token_loss(self.model, each) for each in (batch, batch.flip(1))]
            optimizer.zero_grad()
            self.manual_backward(losses[0] + losses[1])
            optimizer.step()


@ranks(1)
@main_names_and("flag", "bf16-mixed", "16-mixed")
def test_weights_under_autocast_are_cast_at_every_use(pool: RankPool, name: str, flag: str) -> None:
    """No use has a cast from before a step, and the gradients of two uses are summed in fp32."""
    plain = pool.run(fit_stock, flag, MOMENTUM, CalledAgain)[0].weights
    ours = pool.run(fit, name, MOMENTUM, CalledAgain, **asked(flag, param_dtype="float32"))[0].weights
    assert_same(ours, plain)


def fit_stock(flag: str, recipe: Recipe, module: type[Lit] = Lit) -> Fitted:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if flag == "16-mixed" else None
    return fit("ddp", recipe, module, plugins=[MixedPrecision(flag, "cpu", scaler)])  # type: ignore[arg-type]


@ranks(2)
@main_names
def test_float64_training_equals_the_reference(pool: RankPool, name: str) -> None:
    """A module of fp32 under `64-true` is trained in fp64 from its fp32 values."""
    recipe = Recipe(micro=2)
    results = pool.run(fit, name, recipe, precision="64-true")
    model = recipe.make_model().double()
    expected = reference(name, recipe, pool.world_size, model=model)
    assert_same(results[0].weights, expected.weights)


@ranks(2)
@pytest.mark.parametrize(
    ("option", "flag", "dtype"), [("reduce_dtype", "bf16-true", "float32"), ("grad_dtype", "16-true", "float16")]
)
def test_dtypes_of_reduction_and_gradients(pool: RankPool, option: str, flag: str, dtype: str) -> None:
    """That the options arrive; tests of the engine go through the dtypes."""
    name = "zero2"
    recipe = Recipe(optimizer="momentum", micro=2)
    options: dict[str, Any] = {option: dtype}
    results = pool.run(fit, name, recipe, **asked(flag, **options))
    expected = reference(name, recipe, 2, **NUMBERS[flag], **{option: getattr(torch, dtype)})
    assert_same(results[0].weights, expected.weights)


def default_dtypes(name: str) -> dict[str, list[torch.dtype]]:
    """Of tensors made in `init_module`, and after it, by flag."""
    made = {}
    for flag in ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true"):
        with make_trainer(name, precision=flag).init_module():
            inside = nn.Linear(2, 2).weight.dtype
        made[flag] = [inside, nn.Linear(2, 2).weight.dtype]
    return made


@ranks(1)
def test_modules_are_made_at_full_precision(pool: RankPool) -> None:
    (made,) = pool.run(default_dtypes, "zero3")
    assert made == {flag: [FP64 if flag == "64-true" else FP32, FP32] for flag in made}


def evaluate(name: str, flag: str, recipe: Recipe) -> tuple[float, list[torch.dtype]]:
    lit = Lit(recipe)
    trainer = make_trainer(name, precision=flag)
    predictions = trainer.predict(lit)
    return trainer.test(lit, verbose=False)[0]["test_loss"], [p.dtype for p in predictions]


@ranks(2)
@pytest.mark.parametrize(
    ("name", "flag", "dtype"),
    [("zero2_offload", "64-true", FP64), ("zero3", "bf16-mixed", BF16), ("zero3", "16-true", FP16)],
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


class CallsInHook(Lit):
    """Calls itself outside of its steps, in the ways of the docs."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step(batch, index) + self(torch.ones(2, 4)).float().square().mean()

    def on_validation_epoch_end(self) -> None:
        x = torch.ones(2, 4)
        if self.trainer.precision_plugin.policy.param_dtype == FP32:
            self.notes.append(self(x).dtype)
            return
        try:
            self(x)
        except RuntimeError as error:
            self.notes.append("must have the same dtype" in str(error))
        with self.trainer.precision_plugin.forward_context():
            self.notes.append(self(x).dtype)


@ranks(1)
@main_names_and("flag", "bf16-mixed", "16-mixed")
def test_calls_in_hooks_need_the_precisions_context(pool: RankPool, name: str, flag: str) -> None:
    validating = {"limit_val_batches": 1}
    fitted = pool.run(fit, name, Recipe(steps=1), CallsInHook, **asked(flag), **validating)[0]
    assert fitted.notes == [True, BF16 if flag == "bf16-mixed" else FP16]
    fitted = pool.run(fit, name, Recipe(steps=1), CallsInHook, **asked(flag, param_dtype="float32"), **validating)[0]
    assert fitted.notes == [FP32]
