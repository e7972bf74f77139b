"""The Hydra groups of the package: every option composes and builds, and mistakes are explained."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool, free_port, ranks
from helpers.scripts import overridden
from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from omegaconf import DictConfig, OmegaConf
from torch.nn.parallel import DistributedDataParallel

import lightning_zero
from lightning_zero import CheckpointError, DynamicLossScaler, StaticLossScaler, ZeroPrecision, ZeroStrategy
from lightning_zero.callbacks import EMA, Breakdown, MemoryReport
from lightning_zero.config import (
    ConfigError,
    build_fabric,
    build_optimizers,
    build_trainer,
    hydra_main,
    micro_batch_size,
)
from lightning_zero.config.application import _prepared, _runs_task, _torchrun_store
from lightning_zero.config.builders import build_group
from lightning_zero.config.errors import groups_of_application, run_with_clear_errors
from lightning_zero.config.schemas import SCHEMAS, DynamicLossScalerConf, OffloadStore, StrategyConf
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.update import CPUOptimizer
from lightning_zero.update.native import Numbers

CONF = Path(str(resources.files("lightning_zero.conf")))
GROUPS = ("strategy", "precision", "optimizer", "scheduler", "trainer", "logger", "callbacks")
PRIMARY = """\
defaults:
  - strategy: zero2
  - precision: fp32
  - optimizer: adamw
  - scheduler: none
  - trainer: cpu
  - logger: none
  - callbacks: none
  - experiment: null
  - override hydra/job_logging: quiet
  - _self_
run_dir: ???
"""

ASYNC = "{_target_: lightning.pytorch.plugins.io.AsyncCheckpointIO}"

Compose = Callable[..., DictConfig]


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def each_option(*groups: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("group", "option"), [(g, o) for g in groups for o in options(g)])


def write_application(folder: Path) -> Path:
    """The configuration folder of an application that uses every group."""
    (folder / "main.yaml").write_text(PRIMARY)
    (folder / "experiment").mkdir()
    (folder / "experiment" / "small.yaml").write_text("# @package _global_\ntrainer:\n  max_steps: 2\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same, for a test that changes it or runs the application."""
    return write_application(tmp_path)


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, for tests that only compose."""
    folder = write_application(tmp_path_factory.mktemp("application"))
    (folder / "groups.yaml").write_text("run_dir: ???\n")
    return folder


@pytest.fixture(scope="module")
def compose_once(application: Path) -> Callable[..., DictConfig]:
    """Composes a configuration of a name; the same one is composed only once, since that takes a tenth of a second."""

    @functools.cache
    def composed(name: str, *overrides: str) -> DictConfig:
        with initialize_config_dir(str(application), version_base="1.3"):
            return compose(name, overrides=[f"run_dir={application}", *overrides])

    return composed


@pytest.fixture
def composed(compose_once: Callable[..., DictConfig]) -> Compose:
    """The application's configuration with these overrides."""
    return lambda *overrides: copy.deepcopy(compose_once("main", *overrides))


@pytest.fixture
def chosen(compose_once: Callable[..., DictConfig]) -> Compose:
    """Nothing but these options of groups, and overrides of what is in them."""

    def choose(*overrides: str) -> DictConfig:
        return copy.deepcopy(compose_once("groups", *(o if "." in o.split("=")[0] else f"+{o}" for o in overrides)))

    return choose


# -- options --


def test_the_groups_hold_the_promised_options() -> None:
    assert options("strategy") == sorted(["auto", "ddp", *STRATEGIES])
    assert options("precision") == ["bf16", "bf16_true", "fp16", "fp16_static", "fp16_true", "fp32", "fp64"]
    ours = ["cpu_adagrad", "cpu_adam", "cpu_adamw", "cpu_lion", "cpu_sgd"]
    others = ["adamw8bit", "lamb"]
    torchs = ["adafactor", "adagrad", "adam", "adamw", "lion", "muon", "rmsprop", "sgd"]
    assert options("optimizer") == sorted([*others, *ours, *torchs])
    assert options("scheduler") == ["cosine", "none", "onecycle", "warmup", "warmup_decay"]
    assert options("trainer") == ["cpu", "default", "gpu"]
    assert options("logger") == ["csv", "none", "tensorboard"]
    assert options("callbacks") == ["breakdown", "default", "ema", "memory", "none", "trace"]


def test_every_strategy_builds_and_its_name_means_what_it_says(
    composed: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    meaning = {
        "auto": (3, "cpu", "cpu"),  # until it has chosen
        "ddp": None,
        "zero0": (0, "none", "none"),
        "zero1": (1, "none", "none"),
        "zero2": (2, "none", "none"),
        "zero3": (3, "none", "none"),
        "zero1_offload": (1, "cpu", "none"),
        "zero2_offload": (2, "cpu", "none"),
        "zero3_offload": (3, "cpu", "cpu"),
        "zero1_nvme": (1, "nvme", "none"),
        "zero2_nvme": (2, "nvme", "none"),
        "zero3_nvme": (3, "nvme", "nvme"),
    }
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", "/local")
    for option in options("strategy"):
        strategy = build_trainer(composed(f"strategy={option}")).strategy
        found = None
        if isinstance(strategy, ZeroStrategy):
            found = (strategy.stage, strategy.offload_optimizer, strategy.offload_params)
        assert found == meaning[option], option


@each_option("precision")
def test_every_precision_builds_with_our_strategies(composed: Compose, group: str, option: str) -> None:
    plugin = build_trainer(composed(f"{group}={option}")).precision_plugin
    assert isinstance(plugin, ZeroPrecision)
    kinds = {"fp16": DynamicLossScaler, "fp16_true": DynamicLossScaler, "fp16_static": StaticLossScaler}
    assert type(plugin.scaler) is kinds.get(option, type(None))


@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
@each_option("precision")
def test_every_precision_builds_with_ddp_or_says_why_not(composed: Compose, group: str, option: str) -> None:
    cfg = composed(f"{group}={option}", "strategy=ddp")
    if option == "fp16_static":
        with pytest.raises(ValueError, match=r"StaticLossScaler.*DDPStrategy does not know"):
            build_trainer(cfg)
    else:
        downgraded = {"fp16": "bf16-mixed"}  # by Lightning, on a CPU
        assert build_trainer(cfg).precision == downgraded.get(option, cfg.precision.precision)


@pytest.mark.parametrize("build", [build_trainer, build_fabric])
def test_another_strategy_says_what_to_do_with_a_folder(
    build: Callable[[DictConfig], Any], composed: Compose, tmp_path: Path
) -> None:
    strategy = build(composed("strategy=ddp")).strategy
    with pytest.raises(CheckpointError, match=f"lightning-zero consolidate {tmp_path} one.ckpt"):
        strategy.load_checkpoint(tmp_path)
    torch.save({"epoch": 1}, tmp_path / "file")
    assert strategy.load_checkpoint(tmp_path / "file") == {"epoch": 1}


def test_every_option_of_a_loss_scaler_can_be_overridden(composed: Compose) -> None:
    values: dict[str, Any] = {
        "init_scale": 128.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "window": 7,
        "hysteresis": 4,
        "min_scale": 2.0,
        "max_scale": 512.0,
        "consecutive_hysteresis": True,
        "on_min_scale": "continue",
    }
    assert set(values) == {f.name for f in dataclasses.fields(DynamicLossScalerConf)} - {"_target_"}
    for option in ("fp16", "fp16_true"):
        cfg = composed(f"precision={option}", *(f"precision.scaler.{k}={v}" for k, v in values.items()))
        scaler = build_trainer(cfg).precision_plugin.scaler
        assert {name: getattr(scaler, name) for name in values} == values
    static = composed("precision=fp16_static", "precision.scaler.scale=8")
    assert build_trainer(static).precision_plugin.scaler.scale == 8


@each_option("optimizer")
def test_every_optimizer_builds_with_its_own_defaults(chosen: Compose, group: str, option: str) -> None:
    cfg = chosen(f"{group}={option}", "scheduler=none")
    if option == "lamb":
        pytest.importorskip("pytorch_optimizer")
    parameter = torch.nn.Parameter(torch.zeros(2))
    built = build_optimizers(cfg.optimizer, cfg.scheduler, [parameter], 10)["optimizer"]
    plain = type(built)([parameter])
    home = lightning_zero if isinstance(built, CPUOptimizer | lightning_zero.Muon) else torch.optim
    home = import_module("pytorch_optimizer") if option == "lamb" else home
    assert isinstance(built, CPUOptimizer) == (option.startswith("cpu_") or option in ("adamw8bit", "lion"))
    assert type(built) is getattr(home, type(built).__name__)
    assert built.defaults == plain.defaults
    if isinstance(built, CPUOptimizer):
        assert built.numbers == (Numbers("split", torch.int8) if option == "adamw8bit" else plain.numbers)


def test_a_package_that_is_missing_is_named(chosen: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.config.builders.find_spec", lambda name: None)
    cfg = chosen("optimizer=lamb", "scheduler=none")
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ConfigError, match=r"pytorch_optimizer\.Lamb .*not installed: pip install pytorch-optimizer"):
        build_optimizers(cfg.optimizer, cfg.scheduler, parameters, 10)
    cfg.optimizer = {"_target_": "trch.optim.SGD"}
    with pytest.raises(ConfigError, match=r"a package, trch, that is not installed: correct the name"):
        build_optimizers(cfg.optimizer, cfg.scheduler, parameters, 10)


def test_an_optimizer_of_the_script_is_found(chosen: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it runs as a file, so that its module has no specification."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "OfScript", type("OfScript", (torch.optim.SGD,), {}), raising=False)
    cfg = chosen("optimizer=adamw", "scheduler=none")
    cfg.optimizer = {"_target_": "__main__.OfScript"}
    built = build_optimizers(cfg.optimizer, cfg.scheduler, [torch.nn.Parameter(torch.zeros(2))], 10)["optimizer"]
    assert type(built).__name__ == "OfScript"


def test_a_module_gives_the_groups_that_an_optimizer_asks_for(chosen: Compose) -> None:
    module = torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    for option, groups in (("muon", [[module[1].weight], None]), ("adamw", [None])):
        cfg = chosen(f"optimizer={option}", "scheduler=none")
        built = build_optimizers(cfg.optimizer, cfg.scheduler, module, 10)["optimizer"]
        assert len(built.param_groups) == len(groups)
        assert groups[0] is None or built.param_groups[0]["params"] == groups[0]
        assert sum(len(group["params"]) for group in built.param_groups) == len(list(module.parameters()))


def test_a_state_dtype_has_a_name(chosen: Compose) -> None:
    cfg = chosen(
        "optimizer=cpu_adamw", "scheduler=none", "optimizer.state_dtype=bfloat16", "optimizer.master_layout=split"
    )
    built = build_optimizers(cfg.optimizer, cfg.scheduler, [torch.nn.Parameter(torch.zeros(2))], 10)["optimizer"]
    assert built.numbers == Numbers("split", torch.bfloat16, 0)


@pytest.mark.parametrize(
    ("option", "total"), [("cosine", 1100), ("warmup", None), ("warmup_decay", 1100), ("onecycle", 1100)]
)
def test_every_scheduler_builds_over_the_whole_fit(chosen: Compose, option: str, total: int | None) -> None:
    cfg = chosen("optimizer=adamw", f"scheduler={option}", "optimizer.lr=0.5")
    built = build_optimizers(cfg.optimizer, cfg.scheduler, [torch.nn.Parameter(torch.zeros(2))], 1100)
    assert built["lr_scheduler"]["interval"] == "step"
    scheduler = built["lr_scheduler"]["scheduler"]
    assert getattr(scheduler, "total_steps", None) == total
    rates = []
    for _ in range(1100):
        rates += scheduler.get_last_lr()
        built["optimizer"].step()
        scheduler.step()
    assert max(rates) == pytest.approx(0.5)  # the peak is the optimizer's own rate


@pytest.mark.parametrize(
    ("option", "steps"),
    [
        ("cosine", {1: 0, 50: 5, 999: 99, 2000: 100}),
        ("warmup_decay", {1: 2, 3: 2, 50: 25, 1999: 999, 2000: 1000, 9000: 1000}),  # two are its least
    ],
)
def test_a_short_fit_has_a_short_warmup(chosen: Compose, option: str, steps: dict[int, int]) -> None:
    cfg = chosen("optimizer=adamw", f"scheduler={option}")
    for total, expected in steps.items():
        built = build_optimizers(cfg.optimizer, cfg.scheduler, [torch.nn.Parameter(torch.zeros(2))], total)
        assert built["lr_scheduler"]["scheduler"].warmup_steps == expected


def test_parameter_groups_keep_their_own_settings(chosen: Compose) -> None:
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(2, 2))]},
        {"params": [torch.nn.Parameter(torch.zeros(2))], "weight_decay": 0.0},
    ]
    cfg = chosen("optimizer=adamw", "scheduler=none", "optimizer.weight_decay=0.3")
    built = build_optimizers(cfg.optimizer, cfg.scheduler, groups, 10)["optimizer"]
    assert [group["weight_decay"] for group in built.param_groups] == [0.3, 0.0]
    assert built.param_groups[0]["betas"] == (0.9, 0.999)


def test_default_callbacks_write_below_the_run_folder(chosen: Compose) -> None:
    cfg = chosen("callbacks=default", "callbacks.model_summary=null", "callbacks.checkpoint.monitor=null")
    callbacks = build_group(cfg.callbacks)
    assert len(callbacks) == 5
    best, last = [c for c in callbacks if isinstance(c, ModelCheckpoint)]
    assert best.dirpath == last.dirpath == f"{cfg.run_dir}/checkpoints"
    assert best.state_key != last.state_key


class Worse(BoringModel):
    """Its validation loss rises, so that the first checkpoint stays the best."""

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", float(self.trainer.global_step))


def keeps_the_last(cfg: DictConfig) -> list[tuple[int, dict[str, int]]]:
    """Steps of a fit and of the one that resumes it, each with those of its checkpoints."""
    found, folder, resumed = [], Path(cfg.run_dir, "checkpoints"), None
    for steps in (6, 8):
        cfg.trainer.max_steps = steps
        build_trainer(cfg).fit(Worse(), ckpt_path=resumed)
        found.append((steps, {file.name: torch.load(file)["global_step"] for file in folder.iterdir()}))
        resumed = folder / "last.ckpt"
    return found


@ranks(1)
def test_the_last_checkpoint_is_that_of_the_last_validation(pool: RankPool, composed: Compose, tmp_path: Path) -> None:
    """Where none ran it is that of the end. A resumed run goes on writing it."""
    for limit, best in ((1, {"best.ckpt": 2}), (0, {})):
        cfg = composed("callbacks=default", "callbacks.model_summary=null", "callbacks.progress_bar=null")
        cfg.run_dir = str(tmp_path / str(limit))
        cfg.trainer.update(limit_val_batches=limit, val_check_interval=2, check_val_every_n_epoch=None)
        assert pool.run(keeps_the_last, cfg) == [[(steps, {"last.ckpt": steps, **best}) for steps in (6, 8)]]


def test_the_average_comes_on_top_of_the_default_callbacks(chosen: Compose) -> None:
    cfg = chosen("callbacks=ema", "callbacks.ema.decay=0.5")
    assert list(cfg.callbacks) == [*chosen("callbacks=default").callbacks, "ema"]
    (ema,) = [callback for callback in build_group(cfg.callbacks) if isinstance(callback, EMA)]
    arguments = {k: v for k, v in cfg.callbacks.ema.items() if k not in ("_target_", "decay")}
    defaults = {name: p.default for name, p in inspect.signature(EMA).parameters.items() if name != "decay"}
    assert arguments == defaults
    assert ema.should_update(step_idx=0)


@pytest.mark.parametrize("option", ["cpu", "default", "gpu"])
def test_every_trainer_builds(composed: Compose, option: str) -> None:
    cfg = composed(f"trainer={option}")
    if option == "gpu" and not torch.cuda.is_available():
        with pytest.raises(InstantiationException, match="No supported gpu backend found"):
            build_trainer(cfg)
    else:
        assert build_trainer(cfg).num_devices >= 1


def test_the_tensorboard_logger_writes_below_the_run_folder(chosen: Compose) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra 'tensorboard'")
    cfg = chosen("logger=tensorboard")
    (logger,) = build_group(cfg.logger)
    assert Path(logger.log_dir) == Path(cfg.run_dir, "tensorboard")


def test_the_csv_logger_writes_below_the_run_folder(chosen: Compose) -> None:
    cfg = chosen("logger=csv")
    (logger,) = build_group(cfg.logger)
    assert isinstance(logger, CSVLogger)
    assert Path(logger.log_dir) == Path(cfg.run_dir, "csv")


@pytest.mark.parametrize(("option", "kind"), [("breakdown", Breakdown), ("memory", MemoryReport)])
def test_reports_come_on_top_of_the_default_callbacks(chosen: Compose, option: str, kind: type[Callback]) -> None:
    cfg = chosen(f"callbacks={option}", f"callbacks.{option}.table=false")
    assert list(cfg.callbacks) == [*chosen("callbacks=default").callbacks, option]
    (report,) = [callback for callback in build_group(cfg.callbacks) if isinstance(callback, kind)]
    assert report.table is False  # type: ignore[attr-defined]


def test_the_trainer_takes_callbacks_of_the_application(composed: Compose) -> None:
    mine = Callback()
    trainer = build_trainer(composed("callbacks=default", "logger=csv"), callbacks=[mine])
    assert mine in trainer.callbacks
    assert any(isinstance(callback, LearningRateMonitor) for callback in trainer.callbacks)


def test_default_callbacks_work_without_a_logger(composed: Compose) -> None:
    trainer = build_trainer(composed("callbacks=default", "logger=none"))
    assert trainer.loggers == []
    assert not any(isinstance(callback, LearningRateMonitor) for callback in trainer.callbacks)


SWITCHES = {"checkpoint": Checkpoint, "progress_bar": ProgressBar, "model_summary": ModelSummary}


def count_of(kind: type[Callback], cfg: DictConfig, mine: Sequence[Callback] = ()) -> int:
    return sum(isinstance(callback, kind) for callback in build_trainer(cfg, callbacks=mine).callbacks)  # type: ignore[attr-defined]


def flag_of(name: str) -> str:
    return f"enable_{name.replace('checkpoint', 'checkpointing')}"


@pytest.mark.parametrize("option", ["default", "none"])
def test_the_trainer_switches_callbacks_off(composed: Compose, option: str) -> None:
    for name, kind in SWITCHES.items():
        for value in (False, True):
            cfg = composed(f"callbacks={option}")
            cfg.trainer[flag_of(name)] = value
            assert (count_of(kind, cfg) > 0) == value, name


def test_the_group_switches_callbacks_off(composed: Compose) -> None:
    for name, kind in SWITCHES.items():
        count = 2 if kind is Checkpoint else 1  # the best one and the last one
        assert count_of(kind, composed("callbacks=default")) == count
        assert count_of(kind, composed("callbacks=none")) == 1
        off = composed("callbacks=default")
        off.callbacks[name] = None
        assert count_of(kind, off) == count - 1
        off.callbacks.last = None
        assert count_of(kind, off) == 0
        mine = [c for c in build_group(composed("callbacks=default").callbacks) if isinstance(c, kind)]
        assert count_of(kind, off, mine) == count
        off.trainer[flag_of(name)] = True
        assert count_of(kind, off) == 1
    gone = composed("callbacks=default", "~callbacks.checkpoint", "~callbacks.last")
    assert count_of(Checkpoint, gone) == 0
    assert count_of(ProgressBar, gone) == 1


def test_anything_the_trainer_takes_can_be_added(composed: Compose) -> None:
    assert build_trainer(composed("+trainer.min_steps=3")).min_steps == 3


# -- schemas --

# Arguments with defaults other than the constructor's, which has none for some of them.
OTHER_DEFAULTS = {
    "strategy/ddp": {"gradient_as_bucket_view", "bucket_cap_mb"},
    "loss_scaler/static": {"scale"},
    "scheduler/cosine": {"total_steps", "warmup_steps", "min_lr_ratio"},
    "scheduler/warmup_decay": {"total_steps", "warmup_steps"},
    "scheduler/onecycle": {"total_steps"},
}


@pytest.mark.parametrize("path", SCHEMAS)
def test_schemas_agree_with_what_they_configure(path: str) -> None:
    values = dataclasses.asdict(SCHEMAS[path]())
    module, _, name = values["_target_"].rpartition(".")
    if path == "optimizer/lamb":
        pytest.importorskip("pytorch_optimizer")
    parameters = dict(inspect.signature(getattr(import_module(module), name).__init__).parameters)
    if path == "strategy/ddp":  # passes the rest on
        parameters |= inspect.signature(DistributedDataParallel.__init__).parameters
    if path == "strategy/auto":
        parameters = dict(inspect.signature(ZeroStrategy.__init__).parameters) | parameters
    differing = set()
    for option, value in values.items():
        if not option.startswith("_"):
            default = parameters[option].default
            plain = str(default).removeprefix("torch.") if isinstance(default, torch.dtype) else default
            if plain != (tuple(value) if isinstance(value, list) else value):
                differing.add(option)
    assert differing == OTHER_DEFAULTS.get(path, set())


@pytest.mark.parametrize(
    ("path", "option"),
    [("strategy/zero", "zero2"), ("strategy/auto", "auto"), ("strategy/ddp", "ddp"), ("precision/zero", "fp32")]
    + [(path, path.partition("/")[2]) for path in SCHEMAS if path.startswith(("optimizer", "scheduler"))],
)
def test_yaml_and_schema_state_the_same_defaults(chosen: Compose, path: str, option: str) -> None:
    group = path.partition("/")[0]
    assert chosen(f"{group}={option}")[group] == OmegaConf.structured(SCHEMAS[path])


def test_stores_reach_the_strategy_as_plain_text(composed: Compose) -> None:
    store = composed("strategy=zero2_offload").strategy.offload_optimizer
    assert store == "cpu"
    assert f"{store!r} {store}" == "'cpu' cpu"
    options = build_trainer(composed("strategy=zero2_offload")).strategy.options
    assert type(options.offload_optimizer) is type(options.offload_params) is str  # a checkpoint holds them
    assert StrategyConf().offload_params is OffloadStore.none


@each_option("strategy")
def test_a_configuration_can_be_pickled(chosen: Compose, group: str, option: str) -> None:
    node = chosen(f"{group}={option}")[group]  # with the model that keeps it, for ranks that are spawned
    restored = pickle.loads(pickle.dumps(node))
    assert (restored, OmegaConf.get_type(restored)) == (node, OmegaConf.get_type(node))


@pytest.mark.parametrize("path", [f"{group}/{option}" for group in GROUPS for option in options(group)])
def test_every_default_has_a_comment(path: str) -> None:
    lines = (CONF / f"{path}.yaml").read_text().splitlines()
    assert lines[0].startswith("# ")
    for line in lines[1:]:
        key, _, value = line.strip().partition(":")
        structural = not value.strip() or key in ("_target_", "{}") or line.strip() == "- _self_"
        assert structural or " # " in line, line


# -- ranks of torchrun and SLURM --


@pytest.fixture
def run_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[HydraConf]]]:
    """Run one rank of an application with a command line; returns Hydra's configuration of each job."""
    with (folder / "main.yaml").open("a") as file:
        file.write("hydra: {run: {dir: 'rank_${oc.env:RANK}'}, sweep: {dir: 'rank_${oc.env:RANK}'}}\n")
    for name, value in (("USE_AGENT_STORE", "False"), ("RESTART_COUNT", "0"), ("RUN_ID", "job")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.chdir(folder)
    stores = []

    def run(rank: int, *words: str) -> list[HydraConf]:
        seen: list[HydraConf] = []
        monkeypatch.setattr(sys, "argv", ["main.py", *words])
        monkeypatch.setenv("RANK", str(rank))
        _torchrun_store.cache_clear()  # each rank is a process
        hydra_main(config_name="main", config_path=str(folder))(lambda cfg: seen.append(HydraConfig.get()))()
        if rank == 0:
            stores.append(_torchrun_store())  # which it serves until it ends
        return seen

    yield run
    _torchrun_store.cache_clear()


@pytest.mark.parametrize(
    "words",
    [
        ["hydra.mode=MULTIRUN", "hydra.sweep.dir='rank ${oc.env:RANK}'", "--run"],
        ["hydra.run.dir='rank ${oc.env:RANK}'", "--config-dir", "experiment"],
    ],
)
def test_ranks_of_torchrun_share_a_folder(run_rank: Callable[..., list[HydraConf]], words: list[str]) -> None:
    words = ["run_dir=x", *words]
    first, second = run_rank(0, *words), run_rank(1, *words)
    assert [job.runtime.output_dir for job in first] == [job.runtime.output_dir for job in second]
    assert [job.job.name for job in second] == ["train_rank_1"]
    of_group, *_ = next(torch.distributed.rendezvous("env://", rank=0, world_size=1))  # at the same address
    of_group.set("key", "value")


def test_ranks_of_slurm_share_a_folder_that_a_requeued_job_keeps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (folder / "main.yaml").open("a") as file:
        file.write("hydra: {run: {dir: 'outputs/${now:%S.%f}'}}\n")
    monkeypatch.chdir(folder)
    for name, value in (("NTASKS", "2"), ("JOB_NAME", "train"), ("JOB_ID", "17"), ("STEP_ID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)

    def run(rank: int, *words: str) -> tuple[str, str, str]:
        seen = []

        def task(cfg: DictConfig) -> None:
            seen.append((HydraConfig.get().runtime.output_dir, HydraConfig.get().job.name, cfg.logger.csv.version))

        monkeypatch.setenv("SLURM_PROCID", str(rank))
        monkeypatch.setattr(sys, "argv", ["main.py", "logger=csv", "run_dir=x", *words])
        hydra_main(config_name="main", config_path=str(folder))(task)()
        return seen[0]

    path = str(folder / "outputs/job_17_0")
    assert (run(0), run(1)) == ((path, "test_conf", ""), (path, "train_rank_1", ""))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run(0) == (path, "test_conf", "1")  # the log before the restart stays
    monkeypatch.setenv("SLURM_STEP_ID", "1")  # the job script's second srun is another run
    assert run(0)[0] == str(folder / "outputs/job_17_1")
    assert run(0, "hydra.run.dir=other")[0] == str(folder / "other")
    swept = run(0, "hydra.mode=MULTIRUN", "hydra.sweep.dir='swept/${now:%f}'")[0]
    assert swept == str(folder / "swept/job_17_1/0")
    monkeypatch.delenv("SLURM_STEP_ID")  # a script, or an interactive shell, starts many runs without `srun`
    assert "job_17" not in run(0)[0]


@pytest.mark.parametrize("words", [["-c", "job"], ["--version"]])
def test_a_rank_that_only_prints_waits_for_no_other(run_rank: Callable[..., list[HydraConf]], words: list[str]) -> None:
    code = None
    try:
        assert run_rank(1, *words) == []
    except SystemExit as end:
        code = end.code
    assert not code


def test_what_only_prints_runs_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["--info", "searchpath"], ["-h"], ["--hydra-help"], ["--shell-completion"], ["-c", "job"]):
        monkeypatch.setattr(sys, "argv", ["main.py", *words])
        assert not _runs_task()
    monkeypatch.setattr(sys, "argv", ["main.py", "a=b"])
    assert _runs_task()


# -- mistakes --


@pytest.fixture
def run_app(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run an application with a command line; returns the message that it ends with."""

    def run(*overrides: str, task: Callable[[DictConfig], Any] = build_trainer) -> str:
        monkeypatch.setattr(sys, "argv", ["main.py", *overrides, f"hydra.run.dir={folder}/run"])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        with pytest.raises(SystemExit) as caught:
            hydra_main(config_name="main", config_path=str(folder))(task)()
        assert isinstance(caught.value.code, str)  # printed to stderr, and the exit code is 1
        return caught.value.code

    return run


@pytest.fixture
def message_of(application: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The message with which an application ends that composes a configuration so and runs a task."""

    def run(make: Callable[[], DictConfig], task: Callable[[DictConfig], Any]) -> str:
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
        groups = functools.partial(groups_of_application, task, str(application))
        with pytest.raises(SystemExit) as caught:
            run_with_clear_errors(lambda: _prepared(task)(make()), task, groups)
        assert isinstance(caught.value.code, str)
        assert "Traceback" not in caught.value.code
        return caught.value.code

    return run


def use_and_train(cfg: DictConfig) -> None:
    """As tasks do, this one uses some values before there is a Trainer."""
    assert cfg.trainer.max_steps + 0 >= -1
    assert cfg.scheduler is not None
    build_trainer(cfg)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["strategy.stge=1"], ["strategy.stge: no such key. Did you mean 'stage'?", "offload_optimizer"]),
        ([], ["run_dir: no value yet", "run_dir=..."]),
        (
            ["run_dir=x", "+eksperiment=small"],
            ["eksperiment: no such key. Did you mean 'experiment'?", "the configuration has: strategy, precision"],
        ),
        (["run_dir=x", "+speed=2"], ["speed: no such key.\n", "A key that nothing uses is not added"]),
        (["run_dir=x", "+trainer.devises=2"], ["trainer.devises: no such key. Did you mean 'devices'?", "max_time"]),
        (
            ["~experiment", "run_dir=null", "strategy=null"],
            ["strategy: no option is chosen.", "strategy can be: auto, ddp, zero0"],
        ),
    ],
)
def test_mistakes_name_what_would_be_right(
    run_app: Callable[..., str], overrides: list[str], expected: list[str]
) -> None:
    message = run_app(*overrides, task=use_and_train)
    assert "Traceback" not in message
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["trainer.devises=2"],
            ["Did you mean 'devices'?", "trainer has: accelerator", "+trainer.devises=..."],
        ),
        (["stratgy=zero1"], ["stratgy: no such key. Did you mean 'strategy'?", "the configuration has:"]),
        (["strategy=zero2_ofload"], ["Did you mean 'zero2_offload'?", "strategy can be: auto, ddp, zero0"]),
        (["precision=fp8"], ["precision=fp8: no such option", "bf16_true, fp16, fp16_static, fp16_true, fp32, fp64"]),
        (
            ["strategy.offload_optimizer=gpu"],
            ["strategy.offload_optimizer", "expected one of [none, cpu, nvme]"],
        ),
        (["strategy.shard_size=two"], ["strategy.shard_size: Value 'two'", "Integer"]),
        (["scheduler.steps=3"], ["scheduler has no keys."]),
        (["experiment=smaller"], ["experiment=smaller: no such option. Did you mean 'small'?"]),
        (["scheduler=warmup", "scheduler.warmup_type=exp"], ["scheduler.warmup_type", "one of [log, linear]"]),
        (["trainer.max_steps=abc"], ["trainer.max_steps=abc must be a whole number."]),
        (["~scheduler"], ["scheduler: no option is chosen.", "scheduler can be: cosine, none, onecycle"]),
    ],
)
def test_mistakes_in_overrides_name_what_would_be_right(
    compose_once: Compose, message_of: Callable[..., str], overrides: list[str], expected: list[str]
) -> None:
    message = message_of(lambda: compose_once("main", *overrides), use_and_train)
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["trainer.limit_val_batches=all"], ["trainer.limit_val_batches=all must be a number or null."]),
        (["+trainer.strategy=ddp"], ["trainer.strategy has no effect", "Use strategy=... instead"]),
        (["+trainer.precision=64"], ["trainer.precision has no effect", "Use precision=... instead"]),
        (["+trainer.callbacks=[]"], ["trainer.callbacks has no effect", "Use callbacks=... instead"]),
        (["+callbacks.x=5"], ["callbacks.x=5 must be null, or keys of which `_target_` names a class"]),
        (["callbacks=default", "callbacks.checkpoint=5"], ["callbacks.checkpoint=5 must be null"]),
        (["strategy.bucket_size_mb=-1"], ["bucket_size_mb=-1.0 must be a number greater than 0"]),
        (["trainer.max_steps=-5"], ["`max_steps` must be a non-negative integer or -1"]),
        (["trainer.accumulate_grad_batches=0"], ["accumulate_grad_batches=0 must be at least 1"]),
        (["trainer.gradient_clip_val=-1"], ["gradient_clip_val=-1 must be at least 0"]),
    ],
)
def test_refused_values_name_what_would_be_right(
    composed: Compose, message_of: Callable[..., str], changes: list[str], expected: list[str]
) -> None:
    groups = [change for change in changes if "." not in change.split("=")[0]]
    cfg = overridden(composed(*groups), *(change for change in changes if change not in groups))
    message = message_of(lambda: cfg, build_trainer)
    for part in expected:
        assert part in message


@pytest.mark.parametrize("override", ["++trainer.max_steps=3", "+tag=a", "+more@trainer=long"])
def test_additions_that_are_used_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    (folder / "main.yaml").write_text(PRIMARY.replace("run_dir: ???", "run_dir: {name: '${oc.select:tag,b}'}"))
    (folder / "more").mkdir()
    (folder / "more" / "long.yaml").write_text("min_steps: 3\n")
    seen = []
    monkeypatch.setattr(sys, "argv", ["main.py", override, f"hydra.run.dir={folder}/run"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    hydra_main(config_name="main", config_path=str(folder))(seen.append)()
    assert len(seen) == 1


class OfThree(torch.optim.SGD):
    """An optimizer of an application, with betas of its own kind."""

    def __init__(self, params: Any, betas: Any) -> None:
        super().__init__(params)
        self.betas = betas


@pytest.mark.parametrize("betas", [(0.98, 0.92, 0.99), None, 0.9])
def test_betas_of_other_optimizers_are_their_own(betas: Any) -> None:
    optimizer = OmegaConf.create({"_target_": f"{__name__}.OfThree", "betas": betas})
    built = build_optimizers(optimizer, OmegaConf.create(), [torch.nn.Parameter(torch.zeros(2))], 10)["optimizer"]
    assert built.betas == betas
    optimizer._target_ = "torch.optim.AdamW"
    with pytest.raises(InstantiationException if betas is None else ConfigError, match=r"NoneType|must be two numbers"):
        build_optimizers(optimizer, OmegaConf.create(), [torch.nn.Parameter(torch.zeros(2))], 10)


class OwnFabricStrategy(lightning_zero.ZeroFabricStrategy):
    """A strategy of an application."""


@pytest.mark.parametrize("target", ["lightning_zero.ZeroFabricStrategy", f"{__name__}.OwnFabricStrategy"])
def test_fabric_takes_its_own_strategy(composed: Compose, target: str) -> None:
    strategy = build_fabric(composed(f"strategy._target_={target}", "strategy.stage=1")).strategy
    assert type(strategy).__name__ == target.rpartition(".")[2]
    assert strategy.options.stage == 1  # type: ignore[attr-defined]


def test_fabric_refuses_what_it_cannot_do(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="strategy='zero_auto' works with the Trainer, which shows it the module"):
        build_fabric(composed("strategy=auto"))
    with pytest.raises(ConfigError, match=r"trainer\.plugins has no effect: the group 'precision' sets it"):
        build_fabric(composed(f"+trainer.plugins=[{ASYNC}]"))
    with pytest.raises(ConfigError, match="accumulate_grad_batches=0 must be at least 1"):
        build_fabric(overridden(composed(), "trainer.accumulate_grad_batches=0"))
    monkeypatch.setattr("lightning_zero.integration.launchers._in_sweep", lambda: True)
    for strategy in ("zero2", "ddp"):
        with pytest.raises(ConfigError, match="multirun cannot run this job on 2 ranks"):
            build_fabric(composed(f"strategy={strategy}", "trainer.devices=2"))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["scheduler=cosine", "scheduler.warmup_steps=100"],
            ["WarmupCosineLR", "warmup_steps=100 must be", "less than total_steps=50"],
        ),
        (["optimizer.lr=-1"], ["AdamW", "Invalid learning rate: -1"]),
        (["optimizer.betas=[0.9]"], ["optimizer.betas=[0.9] must be two numbers, such as [0.9,0.999]"]),
        (
            ["+scheduler._target_=lightning_zero.schedulers.WarmupLR", "+scheduler.warmup_steps=null"],
            ["scheduler.warmup_steps is null, and no scheduler.total_steps is there that it could follow from: set it"],
        ),
        (["scheduler=warmup", "scheduler.warmup_steps=-1"], ["WarmupLR", "warmup_steps=-1 must be at least 1"]),
        (["+scheduler._target_=torch.optim.lr_scheduler.StepLR"], ["StepLR", "missing", "'step_size'"]),
    ],
)
def test_refused_optimizers_and_schedulers_end_with_a_message(
    chosen: Compose, message_of: Callable[..., str], overrides: list[str], expected: list[str]
) -> None:
    def task(cfg: DictConfig) -> None:
        build_optimizers(cfg.optimizer, cfg.scheduler, [torch.nn.Parameter(torch.zeros(2))], 50)

    scheduler = [] if overrides[0].startswith("scheduler=") else ["scheduler=none"]
    message = message_of(lambda: chosen("optimizer=adamw", *scheduler, *overrides), task)
    for part in expected:
        assert part in message


@pytest.mark.parametrize("total", [math.inf, -1])
def test_a_schedule_over_a_fit_without_end_is_refused(
    chosen: Compose, message_of: Callable[..., str], total: float
) -> None:
    def task(cfg: DictConfig) -> None:
        build_optimizers(cfg.optimizer, cfg.scheduler, [torch.nn.Parameter(torch.zeros(2))], total)

    message = message_of(lambda: chosen("optimizer=adamw", "scheduler=cosine"), task)
    assert message.startswith("scheduler.total_steps is null, and the fit has no end: set trainer.max_steps")


def test_help_lists_the_groups_that_one_can_choose(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        hydra_main(config_name="main", config_path=str(folder))(build_trainer)()
    text = capsys.readouterr().out
    assert "strategy: auto, ddp, zero0, zero1" in text
    assert "schema" not in text


def test_a_misspelt_group_in_a_file_is_named(run_app: Callable[..., str], folder: Path) -> None:
    (folder / "main.yaml").write_text(PRIMARY.replace("- strategy: zero2", "- stratgy: zero2"))
    message = run_app()
    assert "stratgy: no such group. Did you mean 'strategy'?" in message
    assert (
        "The groups are: callbacks, experiment, logger, optimizer, precision, scheduler, strategy, trainer" in message
    )


def test_a_missing_logger_package_is_named(
    composed: Compose, message_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_TENSORBOARD_AVAILABLE", "_TENSORBOARDX_AVAILABLE"):
        monkeypatch.setattr(f"lightning.fabric.loggers.tensorboard.{name}", False)
    message = message_of(lambda: composed("logger=tensorboard"), build_trainer)
    assert "Neither `tensorboard` nor `tensorboardX` is available. Try `pip install`ing either." in message


def test_more_devices_than_gpus_are_refused_with_what_to_use(
    composed: Compose, message_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    message = message_of(lambda: composed("trainer.accelerator=gpu", "trainer.devices=2"), build_trainer)
    assert message.endswith("Use fewer trainer.devices, or trainer=cpu, where a rank is a process on the CPU.")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "devices"), [("zero2", "1,2"), ("ddp", "2")])
def test_a_sweep_over_several_ranks_is_refused(
    run_app: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, devices: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # as a job on one rank leaves it
    sweep = ("--multirun", f"hydra.sweep.dir={folder}/sweep", f"trainer.devices={devices}")
    message = run_app(*sweep, f"strategy={strategy}", "run_dir=x")
    assert "multirun cannot run this job on 2 ranks" in message
    assert "torchrun --nproc_per_node 2 train.py --multirun" in message
    assert "for s in zero1 zero2; do python train.py strategy=$s trainer.devices=2; done" in message


@pytest.mark.parametrize("how", ["spawn", "torchrun"])
def test_a_sweep_whose_ranks_start_otherwise_is_not_refused(
    composed: Compose, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("lightning_zero.integration.launchers._in_sweep", lambda: True)
    overrides = ["trainer.devices=2"]
    if how == "spawn":
        overrides.append("strategy.start_method=spawn")
    else:
        variables = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
        for name, value in {**variables, "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
    assert build_trainer(composed(*overrides)).num_devices == 2
    build_fabric(composed(*overrides))


@pytest.mark.slow
def test_a_sweep_of_single_ranks_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = []
    sweep = ["--multirun", f"hydra.sweep.dir={folder}/sweep", "run_dir=x", "strategy=zero1,zero2"]
    monkeypatch.setattr(sys, "argv", ["main.py", *sweep])
    task = hydra_main(config_name="main", config_path=str(folder))
    task(lambda cfg: stages.append(build_trainer(cfg).strategy.stage))()  # type: ignore[attr-defined]
    assert stages == [1, 2]


def test_errors_of_the_program_keep_their_type(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def task(cfg: DictConfig) -> None:
        raise LookupError("mine")

    monkeypatch.setattr(sys, "argv", ["main.py", f"hydra.run.dir={folder}/run", "run_dir=x"])
    with pytest.raises(LookupError, match="mine") as caught:
        hydra_main(config_name="main", config_path=str(folder))(task)()
    assert "hydra/_internal" not in "".join(str(entry.path) for entry in caught.traceback)


def test_a_batch_that_does_not_divide_ends_the_program_with_a_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py", f"hydra.run.dir={folder}/run", "run_dir=x"])
    with pytest.raises(SystemExit, match=r"^data\.batch_size=16 cannot be split evenly over 3 ranks"):
        hydra_main(config_name="main", config_path=str(folder))(lambda cfg: micro_batch_size(16, 3, 1))()


@pytest.mark.parametrize("build", [build_trainer, build_fabric])
@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy=ddp", f"+trainer.plugins=[{ASYNC}]"),
        ("strategy=ddp", f"+strategy.checkpoint_io={ASYNC}"),
        ("strategy=zero2", f"+strategy.checkpoint_io={ASYNC}"),
    ],
)
def test_a_plugin_of_the_user_is_used(
    build: Callable[[DictConfig], Any], composed: Compose, overrides: tuple[str, str]
) -> None:
    assert isinstance(build(composed(*overrides)).strategy.checkpoint_io, AsyncCheckpointIO)


def test_precision_settings_of_ours_are_refused_elsewhere(composed: Compose) -> None:
    with pytest.raises(ValueError, match=r"reduce_dtype.*DDPStrategy does not know"):
        build_trainer(composed("strategy=ddp", "precision.reduce_dtype=float32"))


def test_a_refused_loss_scaler_is_named_by_what_differs(composed: Compose) -> None:
    with pytest.raises(ConfigError, match=re.escape("precision has {'scaler': {'hysteresis': 4}}, which")):
        build_trainer(composed("strategy=ddp", "precision=fp16", "precision.scaler.hysteresis=4"))


def test_no_scheduler_wins_over_an_experiments_values() -> None:
    values = OmegaConf.create({"warmup_steps": 100})  # of an experiment that wants another option than `none`
    optimizer = OmegaConf.create({"_target_": "torch.optim.SGD", "lr": 0.1})
    built = build_optimizers(optimizer, values, [torch.nn.Parameter(torch.zeros(2))], 10)
    assert set(built) == {"optimizer"}


def test_a_batch_that_does_not_divide_is_refused() -> None:
    assert micro_batch_size(12, 3, 2) == 2
    message = (
        "=10 .* 3 ranks x 1 micro-batches: use a multiple of 3, such as data.batch_size=9, or another trainer.devices"
    )
    with pytest.raises(ValueError, match=message):
        micro_batch_size(10, 3, 1)
    with pytest.raises(ValueError, match=r"such as data\.batch_size=8"):
        micro_batch_size(2, 4, 2)
