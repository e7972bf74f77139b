"""What only a CUDA device can show: pinned memory, copies between host and device, and memory saved."""

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
from helpers import models
from helpers.ranks import RankPool, ranks
from lightning import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from strategy.fits import (
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
from lightning_zero.storage import HostStore

pytestmark = pytest.mark.gpu

MIB = 2**20
CUDA = torch.device("cuda", 0)


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


@pytest.mark.parametrize("numel", [1, 1000, 3 * MIB])
def test_host_memory_is_pinned_while_it_lives(runtime: Runtime, numel: int) -> None:
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


def test_host_memory_without_a_device_is_not_pinned(runtime: Runtime) -> None:
    assert not HostStore().zeros(10, torch.float32).is_pinned()
    assert runtime.registered == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_copies_to_and_from_pinned_memory_are_exact(dtype: torch.dtype) -> None:
    host = HostStore(pin_for=CUDA).zeros(MIB + 3, dtype)
    device = torch.randn(MIB + 3, device="cuda").to(dtype)
    host.copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, device.cpu())
    back = host.to("cuda", non_blocking=True)
    assert torch.equal(back, device)
    # A part, from an offset that is no multiple of a page.
    host[5:1005].copy_(device[:1000], non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host[5:1005], device[:1000].cpu())


def test_pinned_memory_may_be_taken_and_given_back_many_times() -> None:
    store = HostStore(pin_for=CUDA)
    for size in range(1, 200):
        assert store.zeros(size * 1021, torch.float32).is_pinned()


@ranks(1)
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("name", NAMES)
def test_float64_training_on_a_gpu_equals_one_cpu_process(pool: RankPool, name: str, optimizer: str) -> None:
    recipe = Recipe(dtype=torch.float64, optimizer=optimizer, micro=2, tail=1, scheduled=True)
    results = pool.run(fit, name, recipe, accelerator="gpu", gradient_clip_val=0.3)
    assert_close(results[0].weights, reference(name, recipe, 1, clip_norm=0.3).weights)


@ranks(1)
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("name", NAMES)
def test_fp32_training_on_a_gpu_is_near_one_cpu_process(pool: RankPool, name: str, optimizer: str) -> None:
    """Two devices round products differently, and Adam divides by the gradient's size: hence the wide bound."""
    recipe = Recipe(optimizer=optimizer, micro=2)
    results = pool.run(fit, name, recipe, accelerator="gpu")
    expected = reference(name, recipe, 1).weights
    torch.testing.assert_close(results[0].weights, expected, rtol=1e-3, atol=1e-4)


class Placed(Lit):
    """Notes where things are in the second step, when optimizer state exists."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == 1:
            strategy = self.trainer.strategy
            for bucket in strategy.engine.buckets:
                state = strategy.engine.updaters[0].state_of(bucket)
                tensors = [bucket.master.read(0, 1), *state.flat.values()]
                self.notes.append(
                    {
                        "batch": batch.device.type,
                        "flat": bucket.flat.device.type,
                        "shard": bucket.shard.device.type,
                        "state": {tensor.device.type for tensor in tensors},
                        "pinned": all(tensor.is_pinned() for tensor in tensors),
                    }
                )
        return super().training_step(batch, index)


@ranks(1)
@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_state_rest_where_the_name_says(pool: RankPool, name: str) -> None:
    (result,) = pool.run(fit, name, Recipe(), Placed, accelerator="gpu")
    offloaded = "offload" in name
    expected = {
        "batch": "cuda",
        "flat": "cuda",
        "shard": "cpu" if name == "zero3_offload" else "cuda",
        "state": {"cpu"} if offloaded else {"cuda"},
        "pinned": offloaded,
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


def peak_memory(name: str, precision: str) -> int:
    """Bytes on the device at the worst moment of a fit."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    make_trainer(name, accelerator="gpu", precision=precision).fit(Deep())
    return torch.cuda.max_memory_allocated() - before


@ranks(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_offloading_saves_device_memory(pool: RankPool, precision: str) -> None:
    peaks = {name: pool.run(peak_memory, name, precision)[0] / MIB for name in NAMES}
    print(peaks)
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


def fit_asked(form: str, name: str, precision: str, recipe: Recipe, device: str = "cuda") -> Fitted:
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
    return fit(recipe=recipe, module=Noted, accelerator="gpu" if device == "cuda" else device, **given[form]())


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


def check_row(result: Fitted, precision: str, device: str = "cuda") -> None:
    *dtypes, scaler = TABLE[precision]
    assert set(result.notes) == {(*dtypes, device, scaler)}
    master = FP64 if precision == "64-true" else FP32
    assert {value.dtype for value in result.weights.values()} == {master}


@ranks(1)
@pytest.mark.parametrize("precision", TABLE)
@pytest.mark.parametrize("name", ["zero0", "zero2_offload", "zero3", "zero3_offload"])
@pytest.mark.parametrize("form", FORMS)
def test_the_precision_table_holds_on_a_gpu(pool: RankPool, form: str, name: str, precision: str) -> None:
    """Here "16-mixed" by flag is fp16, as it says."""
    recipe = Recipe(optimizer="momentum")
    (result,) = pool.run(fit_asked, form, name, precision, recipe)
    check_row(result, precision)
    if precision.startswith("16") and "plugin" not in form:
        return  # the default scale skips the first steps of this model
    if precision == "16-true" and form.startswith("stock"):
        return
    tolerance = TOLERANCES[TABLE[precision][0]]
    model = recipe.make_model().to(FP64 if precision == "64-true" else FP32)
    expected = reference(name, recipe, 1, model=model).weights
    torch.testing.assert_close(result.weights, expected, rtol=tolerance, atol=tolerance)


@ranks(1)
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
@pytest.mark.parametrize("name", NAMES)
def test_fp16_training_on_a_gpu_is_near_fp32_on_a_cpu(
    pool: RankPool, name: str, precision: str, micro: int, optimizer: str
) -> None:
    """Adam's first steps have the size of the learning rate whatever the gradient: hence the wide bound."""
    check_fp16_parity(pool, name, precision, micro, optimizer)


def check_fp16_parity(
    pool: RankPool, name: str, precision: str, micro: int, optimizer: str, accelerator: str = "gpu"
) -> None:
    recipe = Recipe(optimizer=optimizer, micro=micro, scheduled=True)
    flags = {"plugins": [ours(precision)], "accelerator": accelerator, "gradient_clip_val": 0.3}
    (result,) = pool.run(fit, name, recipe, **flags)
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


@ranks(1)
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
@pytest.mark.parametrize("name", NAMES)
def test_an_overflow_on_a_gpu_skips_the_step(pool: RankPool, name: str, precision: str) -> None:
    check_overflow(pool, name, precision)


def check_overflow(pool: RankPool, name: str, precision: str, accelerator: str = "gpu") -> None:
    recipe = Recipe(steps=4, micro=2, scheduled=True)
    scaler = DynamicLossScaler(init_scale=SCALE, hysteresis=2, window=2)
    flags = {"accelerator": accelerator, "gradient_clip_val": 0.3}
    plugin = ZeroPrecision(precision, scaler=scaler)  # type: ignore[arg-type]
    (planted,) = pool.run(fit, name, recipe, Overflowing, plugins=[plugin], **flags)
    scales, skipped, weights = zip(*planted.notes, strict=True)
    assert scales == (SCALE, SCALE, SCALE, 2 * SCALE)
    assert skipped == (0, 1, 1, 1)
    assert_same(weights[1], weights[0])
    plugin = ZeroPrecision(precision, scaler=StaticLossScaler(SCALE))  # type: ignore[arg-type]
    (without,) = pool.run(fit, name, recipe, WithoutTheSecondStep, plugins=[plugin], **flags)
    # Sums on a GPU may be made in another order the second time.
    torch.testing.assert_close(planted.weights, without.weights, rtol=1e-3, atol=1e-4)


@ranks(1)
@pytest.mark.parametrize("options", [{}, {"checkpoint_format": "sharded"}, {"async_save": True}])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["zero2", "zero2_offload", "zero3_offload"])
def test_a_run_resumes_on_a_gpu(
    pool: RankPool, name: str, precision: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """A save in the background is of the step that it was asked in: the training steps that follow overwrite it."""
    recipe, path = Recipe(optimizer="momentum", scheduled=True), str(tmp_path / "a.ckpt")
    flags = {"accelerator": "gpu", "precision": precision}
    strategy = {**STRATEGIES[name], **options}
    whole = pool.run(run, strategy, recipe, steps=6, save=(2, path), **flags)[0].weights
    other = dataclasses.replace(recipe, seed=7)
    resumed = pool.run(run, strategy, other, steps=6, resume=path, **flags)[0].weights
    torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-6)
    on_cpu = pool.run(run, name, other, steps=6, resume=path, precision=precision)[0].weights
    tolerance = 5e-2 if precision == "bf16-mixed" else 1e-3
    torch.testing.assert_close(on_cpu, whole, rtol=tolerance, atol=tolerance)


@ranks(1)
@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload"])
def test_evaluation_and_a_second_fit_on_a_gpu(pool: RankPool, name: str) -> None:
    """`teardown` must not move what the next entry point needs."""
    recipe = Recipe(dtype=torch.float64, optimizer="momentum")
    first = reference(name, recipe, 1)
    model = recipe.make_model()
    model.load_state_dict(first.weights)
    expected = reference(name, recipe, 1, model=model).weights
    weights, loss = pool.run(fit_test_fit, name, recipe)[0]
    assert_close(weights, expected)
    with torch.no_grad():
        losses = [models.next_token_loss(model, step[0][0]).item() for step in recipe.batches(1)]
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def fit_test_fit(name: str, recipe: Recipe) -> tuple[dict[str, Tensor], float]:
    lit = Lit(recipe)
    trainer = make_trainer(name, accelerator="gpu")
    trainer.fit(lit)
    loss = trainer.test(lit, verbose=False)[0]["test_loss"]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(lit)
    return state_of(trainer), loss


def test_the_random_state_of_the_gpu_is_saved_and_restored() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.manual_seed(3)
    saved = rng.gather(Group(), device)
    expected = torch.rand(4, device=device)
    rng.restore(saved, 0, device)
    assert torch.equal(torch.rand(4, device=device), expected)
    rng.restore({name: torch.cat([state, state.flip(1)]) for name, state in saved.items() if name == "cuda"}, 2, device)
    assert not torch.equal(torch.rand(4, device=device), expected)
