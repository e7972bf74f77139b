"""What comes with the Trainer (tuner, profilers, loggers, flags) at `zero2` and `zero3_offload`, as under ddp."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankError, RankPool
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import rank_zero_only
from strategy.fits import DDP, MOMENTUM, Lit, assert_same, fit, make_trainer, state_of
from strategy.test_lightning_callbacks import fit_pruned, fit_swa
from strategy.test_trainer_flags import Tunable
from torch import Tensor

from lightning_zero import ZeroPrecision

NAMES = ("zero2", "zero3_offload")
every_name = pytest.mark.parametrize("name", NAMES)
PROFILERS: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
    "pass": PassThroughProfiler,
}
pytestmark = pytest.mark.slow


def with_one_name(what: str, values: Iterable[str]) -> pytest.MarkDecorator:
    """Each value with one of the names, in turn."""
    return pytest.mark.parametrize(("name", what), list(zip(itertools.cycle(NAMES), values, strict=False)))


def profile(name: str, kind: str, folder: str) -> tuple[dict[str, Tensor], str]:
    """The weights, and what the profiler has written on rank 0."""
    files = {} if kind == "pass" else {"dirpath": folder, "filename": "profile"}
    profiler = PROFILERS[kind](**files)
    trainer = make_trainer(name, profiler=profiler, limit_val_batches=1)
    lit = Lit(MOMENTUM)
    trainer.fit(lit)
    trainer.test(lit, verbose=False)
    trainer.strategy.barrier()
    written = sorted(Path(folder).glob("fit-profile*")) if trainer.is_global_zero else []
    return state_of(trainer), written[0].read_text() if written else ""


@with_one_name("kind", PROFILERS)
@pytest.mark.filterwarnings("ignore")
def test_profilers(pool2: RankPool, name: str, kind: str, tmp_path: Path) -> None:
    weights, text = pool2.run(profile, name, kind, str(tmp_path))[0]
    assert_same(weights, pool2.run(profile, DDP, "pass", str(tmp_path / "ddp"))[0][0])
    if kind != "pass":
        assert "run_training_batch" in text
        assert "ZeroStrategy" in text


class Logging(Lit):
    """Logs in every way: by step, by epoch, reduced, and hyperparameters."""

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self.save_hyperparameters({"width": 6})

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        assert loss is not None
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"index": float(index), "rank": float(self.global_rank)}, reduce_fx="max", sync_dist=True)
        return loss


def log(name: str, folder: str) -> None:
    logger = CSVLogger(folder, name="", version="")
    trainer = make_trainer(name, logger=logger, log_every_n_steps=1, limit_val_batches=None, max_epochs=2)
    trainer.fit(Logging(MOMENTUM))


@every_name
def test_loggers(pool2: RankPool, name: str, tmp_path: Path) -> None:
    """The same rows, once."""
    tables = []
    for each in (name, DDP):
        folder = tmp_path / each
        pool2.run(log, each, str(folder))
        assert "width: 6" in (folder / "hparams.yaml").read_text()
        with (folder / "metrics.csv").open() as file:
            tables.append([*csv.DictReader(file)])
    assert tables[0] == tables[1]
    assert len(tables[0]) > 2 * MOMENTUM.steps


def log_for_tensorboard(name: str, folder: str) -> None:
    logger = TensorBoardLogger(folder, name="", version="")
    trainer = make_trainer(name, logger=logger, log_every_n_steps=1, limit_val_batches=None, max_epochs=2)
    trainer.fit(Logging(MOMENTUM))


@every_name
def test_tensorboard(pool2: RankPool, name: str, tmp_path: Path) -> None:
    """The same curves, in one file."""
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra `tensorboard`"
    )
    curves = []
    for each in (name, DDP):
        folder = tmp_path / each
        pool2.run(log_for_tensorboard, each, str(folder))
        assert len([*folder.glob("events.*")]) == 1
        events = accumulators.EventAccumulator(str(folder))
        events.Reload()
        tags = events.Tags()["scalars"]
        curves.append({tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags})
    assert curves[0] == curves[1]
    assert {"loss_step", "loss_epoch", "val_loss"} <= set(curves[0])
    assert len(curves[0]["loss_step"]) == 2 * MOMENTUM.steps


class Drawing(CSVLogger):
    """Draws the graph as that of TensorBoard does: rank 0 alone runs the module."""

    traced: Any = None

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Tensor | None = None) -> None:
        self.traced = torch.jit.trace(model.model, model.example_input_array)(model.example_input_array)


def draw(name: str, precision: Any, folder: str) -> tuple[Any, dict[str, Tensor]]:
    logger = Drawing(folder)
    lit = Lit(MOMENTUM)
    lit.example_input_array = torch.arange(1, 4).unsqueeze(0)
    trainer = make_trainer(name, logger=logger, precision=precision)
    trainer.fit(lit)
    assert "log_graph" not in vars(logger)
    return logger.traced, state_of(trainer)


@pytest.mark.parametrize(("name", "precision"), [("zero3", "32-true"), ("zero2", "bf16-mixed"), ("zero3", "16-true")])
def test_a_logger_draws_the_graph_on_rank_0(pool2: RankPool, name: str, precision: str, tmp_path: Path) -> None:
    traced, weights = pool2.run(draw, name, precision, str(tmp_path))[0]
    assert_same({"": traced}, {"": MOMENTUM.make_model()(torch.arange(1, 4).unsqueeze(0))})
    assert_same(weights, pool2.run(fit, name, MOMENTUM, precision=precision)[0].weights)


def tune(name: str) -> None:
    Tuner(make_trainer(name)).scale_batch_size(Tunable(MOMENTUM))


@pytest.mark.parametrize("name", ["zero2", "zero3_offload", "ddp"])
def test_the_batch_size_finder_is_refused_as_under_ddp(pool1: RankPool, name: str) -> None:
    """Lightning does so for every strategy of several processes, also on one."""
    with pytest.raises(RankError, match="Tuning the batch size is currently not supported with distributed strategies"):
        pool1.run(tune, name)


def find_rate(name: str, folder: str, mode: str) -> tuple[Any, float, dict[str, Tensor]]:
    trainer = make_trainer(name, default_root_dir=folder)
    lit = Tunable(MOMENTUM)
    options = {"num_training": 8, "min_lr": 1e-4, "max_lr": 0.5, "mode": mode}
    found = Tuner(trainer).lr_find(lit, **options)  # type: ignore[arg-type]
    assert found is not None
    trainer.fit(lit)
    return found.results, lit.lr, state_of(trainer)


@with_one_name("mode", ["exponential", "linear"])
@pytest.mark.filterwarnings("ignore")
def test_the_learning_rate_is_found(pool2: RankPool, name: str, mode: str, tmp_path: Path) -> None:
    found, rate, weights = pool2.run(find_rate, name, str(tmp_path), mode)[0]
    results, expected, plain = pool2.run(find_rate, DDP, str(tmp_path), mode)[0]
    assert (found, rate) == (results, expected)
    assert_same(weights, plain)


def fit_flags(name: str, **flags: Any) -> dict[str, Tensor]:
    trainer = make_trainer(name, **flags)
    trainer.fit(Lit(MOMENTUM))
    return state_of(trainer)


FLAGS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 2, "max_epochs": 2, "limit_val_batches": None},
    "limits": {"limit_train_batches": 0.5, "limit_val_batches": 0.5, "val_check_interval": 2, "max_epochs": 2},
    "inference_mode": {"inference_mode": False, "limit_val_batches": None, "num_sanity_val_steps": 2},
    "detect_anomaly": {"detect_anomaly": True},
    "barebones": {
        "barebones": True,
        "num_sanity_val_steps": None,
        **dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"]),
    },
}


@with_one_name("flag", FLAGS)
@pytest.mark.filterwarnings("ignore")
def test_flags(pool2: RankPool, name: str, flag: str) -> None:
    assert_same(pool2.run(fit_flags, name, **FLAGS[flag])[0], pool2.run(fit_flags, DDP, **FLAGS[flag])[0])


def fit_plugins(name: str, folder: str) -> dict[str, Tensor]:
    """A precision, and a CheckpointIO of Lightning's that writes beside the training."""
    plugins = [ZeroPrecision("bf16-mixed"), AsyncCheckpointIO()]
    trainer = make_trainer(name, plugins=plugins, default_root_dir=folder, enable_checkpointing=True, logger=False)
    trainer.fit(Lit(MOMENTUM))
    path = f"{folder}/by_plugin.ckpt"
    trainer.save_checkpoint(path)
    trainer.strategy.teardown()  # waits for the writer
    trainer.strategy.barrier()
    saved = torch.load(path, weights_only=True)["state_dict"]
    return {key.removeprefix("model."): value for key, value in saved.items()}


@every_name
@pytest.mark.filterwarnings("ignore")
def test_plugins_together(pool2: RankPool, name: str, tmp_path: Path) -> None:
    saved = pool2.run(fit_plugins, name, str(tmp_path))[0]
    assert_same(saved, pool2.run(fit_flags, name, precision="bf16-mixed")[0])


# -------------------------------------------------------------------------------- callbacks that change the weights


@every_name
@pytest.mark.filterwarnings("ignore:.*keeps a full copy")
def test_stochastic_weight_averaging(pool2: RankPool, name: str) -> None:
    assert_same(pool2.run(fit_swa, name, Lit)[0].weights, pool2.run(fit_swa, DDP, Lit)[0].weights)


@every_name
def test_pruning(pool2: RankPool, name: str, tmp_path: Path) -> None:
    actual, expected = (pool2.run(fit_pruned, each, True, str(tmp_path / each))[0] for each in (name, DDP))
    assert_same(actual.weights, expected.weights)
