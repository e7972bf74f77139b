"""What a device shows that is not the host: pinned memory, copies between the two, memory saved, precisions.

The tests run on the simulated device everywhere, and on CUDA where there is one; those of CUDA's own calls there alone.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import run
from device.where import DevicePool, every_case
from helpers import models
from helpers.ranks import slow_unless
from lightning import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from strategy.fits import (
    FEW,
    NAMES,
    Fitted,
    Lit,
    Recipe,
    assert_close,
    assert_same,
    fit,
    make_trainer,
    reference,
    state_of,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_zero import DynamicLossScaler, StaticLossScaler, ZeroPrecision, ZeroStrategy
from lightning_zero.checkpoint import rng
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.sharding import Group
from lightning_zero.sharding.gradients import Held
from lightning_zero.storage import HostStore, device_type

MIB = 2**20
CUDA = torch.device("cuda", 0)
on_device = pytest.mark.device("lazy")
few_names = pytest.mark.parametrize("name", slow_unless(FEW, NAMES))


class Runtime:
    """The CUDA runtime, with a record of what is registered."""

    def __init__(self) -> None:
        self._runtime = torch.cuda.cudart()
        self.registered: dict[int, int] = {}  # by address: bytes
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:  # noqa: N802
        result = self._runtime.cudaHostRegister(address, nbytes, flags)
        if int(result) == 0:
            self.registered[address] = nbytes
        return result

    def cudaHostUnregister(self, address: int) -> Any:  # noqa: N802
        self.unregistered.append(address)
        return self._runtime.cudaHostUnregister(address)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    torch.cuda.init()
    recorder = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: recorder)
    return recorder


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1, 1000, 3 * MIB])
def test_cudas_runtime_pins_host_memory_while_it_lives(runtime: Runtime, numel: int) -> None:
    tensor = HostStore(pin_for=CUDA).zeros(numel, torch.float32)
    assert tensor.is_pinned()
    assert tensor.count_nonzero() == 0
    address = tensor.data_ptr()
    assert runtime.registered == {address: 4 * numel}
    view = tensor[: numel // 2 + 1]
    del tensor
    gc.collect()
    assert runtime.unregistered == []  # a view keeps it
    del view
    gc.collect()
    assert runtime.unregistered == [address]


@pytest.mark.gpu
def test_a_refusal_to_pin_is_named_and_ends_nothing_else() -> None:
    """The runtime keeps the last error, which torch would raise after whatever kernel comes next."""
    kind, host = device_type(CUDA), HostStore(pin_for=CUDA).zeros(1000, torch.float32)
    with pytest.raises(RuntimeError, match=r"could not pin 4000 bytes of host memory: .*already"):
        kind.pin(host.data_ptr(), 4000)
    assert torch.ones(3, device=CUDA).sum().item() == 3


@pytest.mark.gpu
def test_host_memory_without_a_device_is_not_pinned(runtime: Runtime) -> None:
    assert not HostStore().zeros(10, torch.float32).is_pinned()
    assert runtime.registered == {}


@pytest.mark.device("lazy", "random1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_to_and_from_pinned_memory_are_exact(dtype: torch.dtype, device: torch.device) -> None:
    host = HostStore(pin_for=device).zeros(MIB + 3, dtype)
    values = torch.randn(MIB + 3, device=device).to(dtype)
    host.copy_(values, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(host, values.cpu())
    back = host.to(device, non_blocking=True)
    assert torch.equal(back, values)
    # A part, from an offset that is no multiple of a page.
    host[5:1005].copy_(values[:1000], non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(host[5:1005], values[:1000].cpu())


@on_device
def test_pinned_memory_may_be_taken_and_given_back_many_times(device: torch.device) -> None:
    store = HostStore(pin_for=device)
    for size in range(1, 200):
        assert store.zeros(size * 1021, torch.float32).is_pinned()


@pytest.mark.device("lazy", "random1", "random2")
def test_memory_is_given_back_when_the_last_copy_from_it_has_ended(device: torch.device) -> None:
    for value in range(1, 4):
        host = HostStore(pin_for=device).zeros(MIB, torch.float32).fill_(value)
        copy = torch.empty(MIB, device=device)
        copy.copy_(host, non_blocking=True)
        del host
        gc.collect()
        assert copy.eq(value).all().item()


@pytest.mark.device("lazy", "random1")
def test_small_values_arrive_without_a_wait(device: torch.device) -> None:
    """Their source is freed at once, and its memory given out again."""
    kind = device_type(device)
    sent = [kind.send(torch.full((5,), float(value)), device) for value in range(20)]
    assert all(values.eq(value).all().item() for value, values in enumerate(sent))


@on_device
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@few_names
def test_float64_training_on_a_device_equals_one_cpu_process(
    device_pool1: DevicePool, name: str, optimizer: str
) -> None:
    recipe = Recipe(dtype=torch.float64, optimizer=optimizer, micro=2, tail=1, scheduled=True)
    results = device_pool1.run(fit, name, recipe, accelerator=device_pool1.where.accelerator, gradient_clip_val=0.3)
    assert_close(results[0].weights, reference(name, recipe, 1, clip_norm=0.3).weights)


@pytest.mark.slow
@on_device
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("name", NAMES)
def test_fp32_training_on_a_device_is_near_one_cpu_process(device_pool1: DevicePool, name: str, optimizer: str) -> None:
    """Two devices round products differently, and Adam divides by the gradient's size: hence the wide bound."""
    recipe = Recipe(optimizer=optimizer, micro=2)
    results = device_pool1.run(fit, name, recipe, accelerator=device_pool1.where.accelerator)
    expected = reference(name, recipe, 1).weights
    torch.testing.assert_close(results[0].weights, expected, rtol=1e-3, atol=1e-4)


class Placed(Lit):
    """Notes where things are in the second step, when optimizer state exists."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == 1:
            strategy = self.trainer.strategy
            for bucket in strategy.engine.buckets:
                state = strategy.engine.updaters[0].state_of(bucket)
                master, states = bucket.master.read(0, 1), [flat.read(0, 1) for flat in state.flat.values()]
                self.notes.append(
                    {
                        "batch": batch.device.type,
                        "flat": bucket.flat.device.type,
                        "shard": bucket.shard.device.type,
                        "state": {tensor.device.type for tensor in (master, *states)},
                        "pinned": (master.is_pinned(), any(tensor.is_pinned() for tensor in states)),
                    }
                )
        return super().training_step(batch, index)


@on_device
@few_names
def test_parameters_and_state_rest_where_the_name_says(device_pool1: DevicePool, name: str) -> None:
    (result,) = device_pool1.run(fit, name, Recipe(), Placed, accelerator=device_pool1.where.accelerator)
    offloaded, device = "offload" in name, device_pool1.where.type
    expected = {
        "batch": device,
        "flat": device,
        "shard": "cpu" if name == "zero3_offload" else device,
        "state": {"cpu"} if offloaded else {device},
        "pinned": (offloaded, False),  # fp32 masters are copied to the parameters as they are, state is not
    }
    assert result.notes
    assert all(note == expected for note in result.notes)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Deep(LightningModule):
    """Its 64 MiB of parameters, not its activations, fill the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(16))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader([torch.randn(2, 1024) for _ in range(3)], batch_size=None)  # type: ignore[arg-type]


def peak_memory(name: str, precision: str, accelerator: str) -> int:
    """Bytes on the device at the worst moment of a fit."""
    gc.collect()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    make_trainer(name, accelerator=accelerator, precision=precision).fit(Deep())
    return torch.accelerator.max_memory_allocated() - before


@pytest.mark.slow
@on_device
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_offloading_saves_device_memory(device_pool1: DevicePool, precision: str) -> None:
    accelerator = device_pool1.where.accelerator
    names = ("zero0", "zero1_offload", "zero2_offload", "zero3_offload")
    peaks = {name: device_pool1.run(peak_memory, name, precision, accelerator)[0] / MIB for name in names}
    assert peaks["zero2_offload"] < 0.6 * peaks["zero0"]
    assert peaks["zero1_offload"] < 0.7 * peaks["zero0"]
    assert peaks["zero3_offload"] < 0.5 * peaks["zero2_offload"]


class Noted(Lit):
    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = super().training_step(batch, index)
        device = self.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        block = self.model.blocks[0]
        self.notes.append((block.up.weight.dtype, block.norm1.weight.dtype, autocast, device))
        scaler = self.trainer.strategy.precision_plugin.scaler
        self.scaler = None if scaler is None else type(scaler)
        return loss

    def on_train_end(self) -> None:
        self.notes = [(*note, self.scaler) for note in self.notes]


FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Dtypes of parameters, of norms and of autocast; the loss scaler.
TABLE = {
    "32-true": (FP32, FP32, None, None),
    "64-true": (FP64, FP64, None, None),
    "bf16-mixed": (BF16, FP32, BF16, None),
    "bf16-true": (BF16, BF16, None, None),
    "16-mixed": (FP16, FP32, FP16, DynamicLossScaler),
    "16-true": (FP16, FP16, None, DynamicLossScaler),
}
TOLERANCES = {FP64: 1e-3, FP32: 1e-3, FP16: 1e-2, BF16: 5e-2}
SCALE = 2.0**10
STOCK: dict[str, Callable[[str], Precision]] = {
    "32-true": lambda device: Precision(),
    "64-true": lambda device: DoublePrecision(),
    "bf16-mixed": lambda device: MixedPrecision("bf16-mixed", device),
    "bf16-true": lambda device: HalfPrecision("bf16-true"),
    "16-mixed": lambda device: MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=SCALE)),
    "16-true": lambda device: HalfPrecision("16-true"),
}


def ours(precision: str) -> ZeroPrecision:
    """The default scale is too large for these gradients."""
    scaler = DynamicLossScaler(init_scale=SCALE) if precision.startswith("16") else None
    return ZeroPrecision(precision, scaler=scaler)  # type: ignore[arg-type]


def fit_asked(form: str, name: str, precision: str, recipe: Recipe, device: str) -> Fitted:
    """A fit whose precision is asked for in one of `FORMS`."""
    stage, offloaded = int(name[4]), "cpu" if "offload" in name else "none"
    instance = functools.partial(
        ZeroStrategy, stage, offload_optimizer=offloaded, offload_params=offloaded if stage == 3 else "none"
    )
    given: dict[str, Callable[[], dict[str, Any]]] = {
        "flag": lambda: {"strategy": name, "precision": precision},
        "flag and instance": lambda: {"strategy": instance(), "precision": precision},
        "plugin": lambda: {"strategy": name, "plugins": [ours(precision)]},
        "plugin and instance": lambda: {"strategy": instance(), "plugins": [ours(precision)]},
        "stock plugin": lambda: {"strategy": name, "plugins": [STOCK[precision](device)]},
        "plugin in instance": lambda: {"strategy": instance(precision_plugin=ours(precision))},
        "stock plugin in instance": lambda: {"strategy": instance(precision_plugin=STOCK[precision](device))},
        "plugin in instance and its flag": lambda: {
            "strategy": instance(precision_plugin=ours(precision)),
            "precision": precision,
        },
    }
    return fit(recipe=recipe, module=Noted, accelerator=device, **given[form]())


FORMS = (
    "flag",
    "flag and instance",
    "plugin",
    "plugin and instance",
    "stock plugin",
    "plugin in instance",
    "stock plugin in instance",
    "plugin in instance and its flag",
)


def check_row(result: Fitted, precision: str, device: str) -> None:
    *dtypes, scaler = TABLE[precision]
    assert set(result.notes) == {(*dtypes, device, scaler)}
    master = FP64 if precision == "64-true" else FP32
    assert {value.dtype for value in result.weights.values()} == {master}


ASKED = [(form, precision) for form in FORMS for precision in TABLE]


@on_device
@pytest.mark.parametrize("asked", slow_unless([("flag", "bf16-mixed"), ("plugin", "16-mixed")], ASKED), ids="-".join)
def test_the_precision_table_holds_on_a_device(device_pool1: DevicePool, asked: tuple[str, str]) -> None:
    """Here "16-mixed" by flag is fp16, as it says."""
    (form, precision), recipe, device = asked, Recipe(optimizer="momentum"), device_pool1.where.type
    names = ("zero0", "zero2_offload", "zero3", "zero3_offload")  # each with each precision, and with each form
    name = names[(FORMS.index(form) + list(TABLE).index(precision)) % len(names)]
    (result,) = device_pool1.run(fit_asked, form, name, precision, recipe, device)
    check_row(result, precision, device)
    if precision.startswith("16") and "plugin" not in form:
        return  # the default scale skips the first steps of this model
    if precision == "16-true" and form.startswith("stock"):
        return
    tolerance = TOLERANCES[TABLE[precision][0]]
    model = recipe.make_model().to(FP64 if precision == "64-true" else FP32)
    expected = reference(name, recipe, 1, model=model).weights
    torch.testing.assert_close(result.weights, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@on_device
@every_case(optimizer=["adamw", "momentum"], micro=[1, 3], precision=["16-mixed", "16-true"], name=NAMES)
def test_fp16_training_on_a_device_is_near_fp32_on_a_cpu(
    device_pool1: DevicePool, name: str, precision: str, micro: int, optimizer: str
) -> None:
    """Adam's first steps have the size of the learning rate whatever the gradient: hence the wide bound."""
    recipe = Recipe(optimizer=optimizer, micro=micro, scheduled=True)
    flags = {"plugins": [ours(precision)], "accelerator": device_pool1.where.accelerator, "gradient_clip_val": 0.3}
    (result,) = device_pool1.run(fit, name, recipe, **flags)
    expected = reference(name, recipe, 1, clip_norm=0.3).weights
    torch.testing.assert_close(result.weights, expected, rtol=1e-2, atol=2.5e-2 if optimizer == "adamw" else 5e-3)
    differences = torch.cat([(result.weights[key] - value).flatten().abs() for key, value in expected.items()])
    assert differences.median() < 1e-3


class Overflowing(Lit):
    """One micro-batch of the second step has an infinite gradient; notes scale, skips and weights after each step."""

    without: tuple[int, ...] = ()

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = super().training_step(batch, index)
        planted = index == 2 * self.recipe.micro - 1 and not self.without
        return loss + (self.model.norm.weight * math.inf).sum() if planted else loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        if (index + 1) % self.recipe.micro == 0:
            strategy = self.trainer.strategy
            self.notes.append((strategy.loss_scale, strategy.skipped_steps, state_of(self.trainer)))

    def loader(self) -> Any:
        kept = [batch for n, batch in enumerate(super().loader()) if n not in self.without]
        return DataLoader(kept, batch_size=None)  # type: ignore[arg-type]

    train_dataloader = loader


class WithoutTheSecondStep(Overflowing):
    without = (2, 3)


@on_device
@pytest.mark.parametrize("precision", slow_unless(["16-mixed"], ["16-mixed", "16-true"]))
@few_names
def test_an_overflow_on_a_device_skips_the_step(device_pool1: DevicePool, name: str, precision: str) -> None:
    recipe = Recipe(steps=4, micro=2, scheduled=True)
    scaler = DynamicLossScaler(init_scale=SCALE, hysteresis=2, window=2)
    flags = {"accelerator": device_pool1.where.accelerator, "gradient_clip_val": 0.3}
    plugin = ZeroPrecision(precision, scaler=scaler)  # type: ignore[arg-type]
    (planted,) = device_pool1.run(fit, name, recipe, Overflowing, plugins=[plugin], **flags)
    scales, skipped, weights = zip(*planted.notes, strict=True)
    assert scales == (SCALE, SCALE, SCALE, 2 * SCALE)
    assert skipped == (0, 1, 1, 1)
    assert_same(weights[1], weights[0])
    plugin = ZeroPrecision(precision, scaler=StaticLossScaler(SCALE))  # type: ignore[arg-type]
    (without,) = device_pool1.run(fit, name, recipe, WithoutTheSecondStep, plugins=[plugin], **flags)
    # Sums on a GPU may be made in another order the second time.
    torch.testing.assert_close(planted.weights, without.weights, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@on_device
@every_case(
    precision=["32-true", "bf16-mixed"],
    options=[{}, {"checkpoint_format": "sharded"}, {"async_save": True}],
    name=["zero2", "zero2_offload", "zero3_offload"],
)
def test_a_run_resumes_on_a_device(
    device_pool1: DevicePool, name: str, precision: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """A save in the background is of the step that it was asked in: the training steps that follow overwrite it."""
    recipe, path = Recipe(optimizer="momentum", scheduled=True), str(tmp_path / "a.ckpt")
    flags = {"accelerator": device_pool1.where.accelerator, "precision": precision}
    strategy = {**STRATEGIES[name], **options}
    whole = device_pool1.run(run, strategy, recipe, steps=6, save=(2, path), **flags)[0].weights
    other = dataclasses.replace(recipe, seed=7)
    resumed = device_pool1.run(run, strategy, other, steps=6, resume=path, **flags)[0].weights
    torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-6)
    on_cpu = device_pool1.run(run, name, other, steps=6, resume=path, precision=precision)[0].weights
    tolerance = 5e-2 if precision == "bf16-mixed" else 1e-3
    torch.testing.assert_close(on_cpu, whole, rtol=tolerance, atol=tolerance)


@on_device
@pytest.mark.parametrize("name", slow_unless(["zero3_offload"], ["zero2_offload", "zero3_offload"]))
def test_evaluation_and_a_second_fit_on_a_device(device_pool1: DevicePool, name: str) -> None:
    """`teardown` must not move what the next entry point needs."""
    recipe = Recipe(dtype=torch.float64, optimizer="momentum")
    first = reference(name, recipe, 1)
    model = recipe.make_model()
    model.load_state_dict(first.weights)
    expected = reference(name, recipe, 1, model=model).weights
    weights, loss = device_pool1.run(fit_test_fit, name, recipe, device_pool1.where.accelerator)[0]
    assert_close(weights, expected)
    with torch.no_grad():
        losses = [models.next_token_loss(model, step[0][0]).item() for step in recipe.batches(1)]
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def fit_test_fit(name: str, recipe: Recipe, accelerator: str) -> tuple[dict[str, Tensor], float]:
    lit = Lit(recipe)
    trainer = make_trainer(name, accelerator=accelerator)
    trainer.fit(lit)
    loss = trainer.test(lit, verbose=False)[0]["test_loss"]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(lit)
    return state_of(trainer), loss


@on_device
def test_the_random_state_of_a_device_is_saved_and_restored(device: torch.device) -> None:
    torch.get_device_module(device).manual_seed(3)
    saved = rng.gather(Group(), device)
    expected = torch.rand(4, device=device)
    rng.restore(saved, 0, device)
    assert torch.equal(torch.rand(4, device=device), expected)
    state = saved[device.type]
    rng.restore({device.type: torch.cat([state, state.flip(1)])}, 2, device)
    assert not torch.equal(torch.rand(4, device=device), expected)


@on_device
def test_the_peak_is_what_tensors_took(device: torch.device) -> None:
    torch.accelerator.reset_peak_memory_stats()
    before = device_type(device).peak_bytes(device)
    assert before is not None
    torch.ones(MIB, device=device)
    peak = device_type(device).peak_bytes(torch.device(device.type))
    assert peak is not None
    assert 4 * MIB <= peak - before <= 4 * MIB + 512


class Collected(Lit):
    """Notes in the second micro-batch of a step where the first one's gradients are."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == 1:
            self.notes = [gradients.held for gradients in self.trainer.strategy.engine._map.gradients]
        return super().training_step(batch, index)


@on_device
@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload"])
def test_sums_of_micro_batches_have_the_same_bits_on_the_device_as_on_the_host(
    device_pool1: DevicePool, name: str
) -> None:
    """Without clipping: the norm is summed where the gradients are, in other orders."""
    recipe, where = Recipe(optimizer="momentum", micro=3, tail=1), device_pool1.where
    flags = {"accelerator": where.accelerator, "precision": "bf16-true"}
    on_host, on_the_device = (
        device_pool1.run(fit, {**STRATEGIES[name], "accumulate_on_device": there}, recipe, Collected, **flags)[0]
        for there in (False, True)
    )
    assert set(on_host.notes) == {Held.SHARDED}
    assert set(on_the_device.notes) == {Held.WINDOW}
    if where.simulated:
        assert_same(on_the_device.weights, on_host.weights)
    torch.testing.assert_close(on_the_device.weights, on_host.weights, rtol=1e-3, atol=1e-4)


def trained_by(name: str, rule: str, accelerator: str) -> dict[str, Tensor]:
    recipe = Recipe(optimizer=rule)
    return fit(name, recipe, accelerator=accelerator).weights


@pytest.mark.simulated
@on_device
@pytest.mark.parametrize("rule", ["nadam", "radam"])
def test_where_state_rests_changes_no_bit(device_pool1: DevicePool, rule: str) -> None:
    """Torch takes another form of these rules on most devices than on the host."""
    names = ("zero0", "zero2_offload", "zero3_offload")
    first, *others = (device_pool1.run(trained_by, name, rule, "sim")[0] for name in names)
    for weights in others:
        assert_same(weights, first)


@pytest.mark.slow
@on_device
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_offloaded_muon_iterates_on_the_device(device_pool1: DevicePool, name: str) -> None:
    """To the bits of a momentum that is there; on CUDA the host's rounds otherwise before it becomes bf16."""
    recipe, accelerator = Recipe(optimizer="muon", micro=2), device_pool1.where.accelerator
    kept, offloaded = (
        device_pool1.run(fit, strategy, recipe, accelerator=accelerator)[0].weights
        for strategy in (name, f"{name}_offload")
    )
    if device_pool1.where.simulated:
        assert_same(offloaded, kept)
    torch.testing.assert_close(offloaded, kept, rtol=1e-2, atol=1e-3)
