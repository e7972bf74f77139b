"""The Trainer's flags and the module's small services: same numbers with them as without, or as under ddp."""

from __future__ import annotations

import copy
import io
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import models
from helpers.ranks import RankPool, ranks
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LambdaCallback,
    LearningRateFinder,
    OnExceptionCheckpoint,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.tuner import Tuner
from safetensors.torch import load_model, save_model
from strategy.fits import (
    DDP,
    MOMENTUM,
    Fitted,
    Lit,
    Recipe,
    assert_as_ddp,
    assert_same,
    fit,
    main_names,
    main_names_and,
    make_trainer,
    observe,
    reference,
    state_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import gathered_parameters
from lightning_zero.integration import steps

# Each changes which batches are seen, when, or how backward runs.
TOGETHER: dict[str, Any] = {
    "limit_train_batches": 3,
    "max_epochs": 2,
    "reload_dataloaders_every_n_epochs": 1,
    "num_sanity_val_steps": 2,
    "limit_val_batches": None,
    "detect_anomaly": True,
    "profiler": "simple",
}
OVERFIT: dict[str, Any] = {"overfit_batches": 2, "max_epochs": 2, "limit_val_batches": None}
OTHERS: dict[str, Any] = {
    "max_steps": 3,
    "max_epochs": -1,
    "max_time": timedelta(hours=1),
    "inference_mode": False,
    "limit_val_batches": 1,
    "val_check_interval": 2,
    "profiler": "advanced",
    "deterministic": True,
    "benchmark": False,
}
DEV: dict[str, Any] = {"fast_dev_run": 2}


@ranks(2)
@main_names_and("flags", TOGETHER, OVERFIT, OTHERS, DEV)
@pytest.mark.filterwarnings("ignore:.*overfit", "ignore:Anomaly Detection")
def test_flags_change_no_number(pool: RankPool, name: str, flags: dict[str, Any]) -> None:
    assert_as_ddp(pool, name, Lit, **flags)


def fit_barebones(name: str) -> dict[str, Tensor]:
    unset = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"])
    lit = Lit(MOMENTUM)
    trainer = make_trainer(name, barebones=True, num_sanity_val_steps=None, **unset)
    trainer.fit(lit)
    return state_of(trainer)


@ranks(2)
@main_names
def test_barebones(pool: RankPool, name: str) -> None:
    assert_same(pool.run(fit_barebones, name)[0], reference(name, MOMENTUM, 2).weights)


class Services(Lit):
    """Uses what a LightningModule and its strategy offer for communication."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        loss = super().training_step(batch, index)
        assert loss is not None
        strategy = self.trainer.strategy
        self.log("mean", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.print("step", index)
        strategy.barrier()
        gathered = self.all_gather(loss.detach())
        self.notes.append((gathered.shape, gathered.sum().item()))
        self.notes.append(strategy.broadcast(f"from {dist.get_rank()}"))
        self.notes.append(strategy.reduce(loss.detach().clone(), reduce_op="mean").item())
        self.notes.append(strategy.reduce_boolean_decision(dist.get_rank() == 0, all=False))
        return loss


@ranks(2)
@main_names
def test_services_of_the_strategy(pool: RankPool, name: str) -> None:
    expected, actual = pool.run(fit, DDP, MOMENTUM, Services), pool.run(fit, name, MOMENTUM, Services)
    assert_same(actual[0].weights, expected[0].weights)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.notes == theirs.notes
        assert mine.metrics == theirs.metrics


class Synced(Lit):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.norm = nn.BatchNorm1d(models.VOCAB)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        logits = self.norm(self.model(batch[:, :-1]).flatten(0, 1))
        return nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    def on_train_start(self) -> None:
        self.notes.append(type(self.norm).__name__)


@ranks(2)
@main_names
def test_batch_norm_is_converted(pool: RankPool, name: str) -> None:
    """torch's SyncBatchNorm computes on GPUs only; that it says so shows that the layer is there."""
    with pytest.raises(Exception, match=r"SyncBatchNorm expected input tensor to be on|batch_norm_stats"):
        pool.run_within(10, fit, name, MOMENTUM, Synced, sync_batchnorm=True)


class Watched(LayerSync):
    """Notes the modules that it is applied to, and those that it gives back."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.given_back: list[nn.Module] = []

    def apply(self, model: nn.Module) -> nn.Module:
        self.modules.append(model)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        self.given_back.append(model)
        return nn.Module.train(model)  # Lightning's gives back new layers, which train


def synced() -> bool:
    """Whether layers are synchronized of each module that one Trainer takes, until it is released."""
    sync, first, second = Watched(), Lit(MOMENTUM), Lit(MOMENTUM)
    trainer = make_trainer("zero3", plugins=[sync], limit_val_batches=None)
    trainer.validate(first, verbose=False)
    trainer.fit(first)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second)
    trainer.test(second, verbose=False)
    kept = not sync.given_back
    second.eval()
    trainer.strategy.release()
    return kept and not second.training and sync.modules == [first, second] and sync.given_back == [second]


def test_layers_are_synchronized_of_every_module(pool1: RankPool) -> None:
    assert pool1.run(synced) == [True]


# ----------------------------------------------------------------------------------------- callbacks and tuning


class Tunable(Lit):
    """A learning rate and a batch size to be found."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.lr, self.batch_size = 0.1, 1

    def train_dataloader(self) -> Any:
        batches = models.rank_batches(self.recipe.batches(dist.get_world_size()), dist.get_rank())
        self.notes.append(self.batch_size)
        return DataLoader(torch.cat(batches * 8), batch_size=self.batch_size)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9)


def fit_with(name: str, kind: str, folder: str) -> tuple[Fitted, Any]:
    lit = Tunable(Recipe(optimizer="momentum", steps=4))
    watching = [
        LearningRateFinder(num_training_steps=8, min_lr=1e-4, max_lr=0.5),
        Timer(timedelta(hours=1)),
        DeviceStatsMonitor(cpu_stats=False),
        LambdaCallback(on_train_batch_end=lambda *_: lit.notes.append("end")),
    ]
    flags = {"logger": CSVLogger(folder), "limit_train_batches": 4, "default_root_dir": folder}
    if kind == "tuner":
        trainer = make_trainer(name, **flags)
        found = Tuner(trainer).lr_find(lit, num_training=8, min_lr=1e-4, max_lr=0.5)
        assert found is not None
        lit.notes.append(found.results["loss"])
    else:
        trainer = make_trainer(name, callbacks=watching, **flags)
    trainer.fit(lit)
    return observe(trainer, lit), (lit.lr, lit.batch_size)


@ranks(2)
@main_names_and("kind", "callbacks", "tuner")
def test_callbacks_that_tune_and_watch(pool: RankPool, name: str, kind: str, tmp_path: Path) -> None:
    expected, found = pool.run(fit_with, DDP, kind, str(tmp_path / "ddp"))[0]
    actual, mine = pool.run(fit_with, name, kind, str(tmp_path / "zero"))[0]
    assert mine == found
    assert_same(actual.weights, expected.weights)
    assert actual.notes == expected.notes


class Notified:
    """Can be called, but has no code as a function has."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


def fit_with_callables(name: str) -> int:
    notified = Notified()
    hooks = LambdaCallback(on_exception=print, on_after_backward=notified, on_train_batch_end=notified)
    fit(name, MOMENTUM, callbacks=[hooks])
    return notified.calls


@ranks(2)
@main_names
def test_hooks_may_be_any_callables(pool: RankPool, name: str) -> None:
    assert pool.run(fit_with_callables, name) == [2 * MOMENTUM.steps] * 2


class Fails(Lit):
    """Ends in the middle: by an error, Ctrl-C, or by request."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2 and not self.notes:
            self.notes.append("ended")
            self.end()

    def end(self) -> None:
        raise RuntimeError("the data are bad")


class Stops(Fails):
    def end(self) -> None:
        self.trainer.should_stop = True


class Interrupted(Fails):
    def end(self) -> None:
        raise KeyboardInterrupt


def fit_and_go_on(name: str, folder: str, kind: type[Fails]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A fit that ends early; then one more with the same Trainer and module. The weights after each."""
    lit = kind(MOMENTUM)
    trainer = make_trainer(name, max_epochs=2, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True)
    if kind is Stops:
        trainer.fit(lit)
    else:
        with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
            trainer.fit(lit)
        saved = torch.load(f"{folder}/on_exception.ckpt", weights_only=True)
        assert saved["global_step"] == 2
    first = state_of(trainer)
    again = make_trainer(name)
    again.fit(lit)
    return first, state_of(again)


@ranks(2)
@main_names_and("kind", Fails, Stops, Interrupted)
def test_a_fit_that_ended_early_goes_on(pool: RankPool, name: str, kind: type[Fails], tmp_path: Path) -> None:
    expected = pool.run(fit_and_go_on, DDP, str(tmp_path / "ddp"), kind)[0]
    actual = pool.run(fit_and_go_on, name, str(tmp_path / "zero"), kind)[0]
    for mine, theirs in zip(actual, expected, strict=True):
        assert_same(mine, theirs)


def peaks_told(name: str, precision: str) -> set[float | None]:
    """What the monitor takes for the device's peak, where each dtype has one."""
    monitor = ThroughputMonitor(batch_size_fn=len)

    def peak(device: torch.device, dtype: torch.dtype) -> int:
        return {torch.float32: 1, torch.bfloat16: 2}[dtype]

    module = "lightning.pytorch.callbacks.throughput_monitor"
    with mock.patch(f"{module}.get_available_flops", peak), mock.patch.object(steps, "get_available_flops", peak):
        fit(name, MOMENTUM, callbacks=[monitor], precision=precision)
    return {monitor.available_flops, *(each.available_flops for each in monitor._throughputs.values())}


@ranks(1)
@pytest.mark.filterwarnings("ignore:.*flops_per_batch")
def test_the_throughput_monitor_knows_the_dtype(pool: RankPool) -> None:
    assert pool.run(peaks_told, "zero2", "bf16-mixed") == [{2}]
    assert pool.run(peaks_told, "zero2", "32-true") == [{1}]


# ------------------------------------------------------------------------------------------ the module afterwards


def identities(name: str) -> None:
    """Parameters are the same objects in the same order, during the fit and after it."""
    lit = Lit(MOMENTUM)
    before = [(n, id(p)) for n, p in lit.named_parameters()]
    trainer = make_trainer(name)
    trainer.fit(lit)
    assert [(n, id(p)) for n, p in lit.named_parameters()] == before
    assert all(isinstance(p, nn.Parameter) for p in lit.parameters())
    with gathered_parameters(lit):
        assert {type(p).__name__ for p in lit.parameters()} == {"Parameter"}
    trainer.strategy.release()
    assert [(n, id(p)) for n, p in lit.named_parameters()] == before
    assert {type(p) for p in lit.parameters()} == {nn.Parameter}


@ranks(2)
@main_names
def test_parameters_keep_identity_and_order(pool: RankPool, name: str) -> None:
    pool.run(identities, name)


def copies(name: str, released: bool) -> list[dict[str, Tensor]]:
    """The weights of a deep copy, a pickled one and a saved one, each of which trains on by itself."""
    lit = Lit(MOMENTUM)
    trainer = make_trainer(name)
    trainer.fit(lit)
    if released:
        trainer.strategy.release()
    buffer = io.BytesIO()
    with gathered_parameters(lit):
        made = [copy.deepcopy(lit), copy.deepcopy(lit.model), pickle.loads(pickle.dumps(lit.model))]
        torch.save(lit.model, buffer)
    buffer.seek(0)
    made.append(torch.load(buffer, weights_only=False))
    states = []
    for module in made:
        model = module.model if isinstance(module, Lit) else module
        states.append({n: v.detach().clone() for n, v in model.state_dict().items()})
        optimizer = MOMENTUM.make_optimizer(model)
        models.next_token_loss(model, torch.arange(1, 7).view(1, -1)).backward()
        optimizer.step()
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        assert not torch.equal(model.head.weight, states[-1]["head.weight"])
    return states


@ranks(2)
@main_names_and("released", False, True)
def test_modules_are_copied_and_pickled(pool: RankPool, name: str, released: bool) -> None:
    expected = reference(name, MOMENTUM, 2).weights
    for states in pool.run(copies, name, released):
        for state in states:
            assert_same(state, expected)


def trainers_made(name: str) -> list[tuple[dict[str, float], dict[str, Tensor]]]:
    """Copies of a Trainer that has run, each of which evaluates the module and then fits another one."""
    lit = Lit(MOMENTUM)
    trainer = make_trainer(name, limit_test_batches=2, limit_train_batches=2)
    trainer.fit(lit)
    buffer = io.BytesIO()
    trainer.strategy.release()  # the module is part of the Trainer
    torch.save(trainer, buffer)
    buffer.seek(0)
    made = [
        trainer,
        copy.deepcopy(trainer),
        pickle.loads(pickle.dumps(trainer)),
        torch.load(buffer, weights_only=False),
    ]
    results = []
    for one in made:
        (losses,) = one.test(copy.deepcopy(lit), verbose=False)
        fresh = Lit(MOMENTUM)
        one.fit_loop.epoch_progress.reset()
        one.fit_loop.max_epochs = 1
        one.fit(fresh)
        results.append((losses, state_of(one)))
    return results


@ranks(2)
@main_names
def test_trainers_are_copied_and_pickled(pool: RankPool, name: str) -> None:
    for first, *copied in pool.run(trainers_made, name):
        assert first[0]
        for losses, weights in copied:
            assert losses == first[0]
            assert_same(weights, first[1])


def export(name: str, precision: str, path: Path) -> tuple[bool, bool, bool, set[torch.dtype]]:
    lit = Lit(Recipe(model="mlp"))
    trainer = make_trainer(name, precision=precision)
    trainer.fit(lit)
    trainer.strategy.release(lit)  # by its name, as one that no Trainer has run
    tokens = torch.arange(1, 6, device=lit.device).view(1, -1)
    expected = lit.model(tokens)
    exported = torch.export.export(lit.model, (tokens,)).module()(tokens)
    traced = torch.jit.trace(lit.model, (tokens,))(tokens)
    save_model(lit.model, str(path))
    load_model(loaded := Recipe(model="mlp", dtype=lit.dtype, seed=1).make_model().to(lit.device), path)
    return (
        torch.equal(exported, expected),
        torch.equal(traced, expected),
        torch.equal(loaded(tokens), expected),
        {lit.dtype, *(p.dtype for p in lit.parameters())},
    )


@ranks(1)
@pytest.mark.parametrize(
    ("name", "precision", "dtype"),
    [("zero2_offload", "bf16-true", torch.float32), ("zero3", "64-true", torch.float64)],
)
@pytest.mark.filterwarnings("ignore")
def test_a_released_module_is_exported(
    pool: RankPool, name: str, precision: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert pool.run(export, name, precision, tmp_path / "m.safetensors")[0] == (True, True, True, {dtype})
