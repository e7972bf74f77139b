"""What only a CUDA device can show: pinned memory, copies between host and device, and memory saved."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import run
from helpers import models
from helpers.ranks import RankPool, ranks
from lightning import LightningModule
from strategy.fits import NAMES, Lit, Recipe, assert_close, fit, make_trainer, reference, state_of
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_zero.engine import HostStore

pytestmark = pytest.mark.gpu

MIB = 2**20


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
    tensor = HostStore(pin=True).zeros(numel, torch.float32)
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
    host = HostStore(pin=True).zeros(MIB + 3, dtype)
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
    store = HostStore(pin=True)
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
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        block = self.model.blocks[0]
        self.notes.append((block.up.weight.dtype, block.norm1.weight.dtype, autocast, self.device.type))
        return loss


TABLE = {
    "32-true": (torch.float32, torch.float32, None),
    "64-true": (torch.float64, torch.float64, None),
    "bf16-mixed": (torch.bfloat16, torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, torch.bfloat16, None),
}


@ranks(1)
@pytest.mark.parametrize("precision", TABLE)
@pytest.mark.parametrize("name", ["zero0", "zero2_offload", "zero3", "zero3_offload"])
def test_the_precision_table_holds_on_a_gpu(pool: RankPool, name: str, precision: str) -> None:
    recipe = Recipe(optimizer="momentum")
    (result,) = pool.run(fit, name, recipe, Noted, accelerator="gpu", precision=precision)
    assert set(result.notes) == {(*TABLE[precision], "cuda")}
    master = torch.float64 if precision == "64-true" else torch.float32
    assert {value.dtype for value in result.weights.values()} == {master}
    model = recipe.make_model().to(master)
    tolerance = 5e-2 if "bf16" in precision else 1e-3
    expected = reference(name, recipe, 1, model=model).weights
    torch.testing.assert_close(result.weights, expected, rtol=tolerance, atol=tolerance)


@ranks(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload"])
def test_a_run_resumes_on_a_gpu(pool: RankPool, name: str, precision: str, tmp_path: Path) -> None:
    recipe, path = Recipe(optimizer="momentum", scheduled=True), str(tmp_path / "a.ckpt")
    flags = {"accelerator": "gpu", "precision": precision}
    whole = pool.run(run, name, recipe, steps=6, save=(2, path), **flags)[0].weights
    other = dataclasses.replace(recipe, seed=7)
    resumed = pool.run(run, name, other, steps=6, resume=path, **flags)[0].weights
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
