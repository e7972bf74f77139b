"""Builds objects from a configuration: the Trainer, optimizers with schedulers, groups of callbacks and loggers."""

import math
from collections.abc import Iterable
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_zero.config.arguments import check_trainer
from lightning_zero.config.errors import ConfigError
from lightning_zero.config.schemas import DynamicLossScalerConf, PrecisionConf

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.utilities.types import OptimizerLRScheduler
    from omegaconf import DictConfig
    from torch.nn import Module


_DISTRIBUTIONS = {"pytorch_optimizer": "pytorch-optimizer"}  # by packages that options of our groups need


def build_trainer(cfg: "DictConfig", callbacks: Iterable["Callback"] = ()) -> "Trainer":
    """Builds the Trainer that the groups `trainer strategy precision logger callbacks` describe.

    Args:
        cfg: A configuration with these groups. If `trainer.enable_checkpointing`, `enable_progress_bar` or
            `enable_model_summary` is null, Lightning adds such a callback only if the group of callbacks is empty.
        callbacks: The application's own callbacks, which come before those of the group.
    """
    from hydra.utils import instantiate
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.strategies import DDPStrategy, Strategy

    from lightning_zero.integration.launchers import why_not_in_sweep

    check_trainer(cfg)
    _check_sizes(cfg.trainer)
    strategy = instantiate(cfg.strategy, _convert_="all")
    precision = _precision_arguments(cfg.precision, strategy)
    _check_groups(cfg.trainer, {"strategy", "precision", "logger", "callbacks", *precision})
    loggers = build_group(cfg.logger)
    everything = [*callbacks, *build_group(cfg.callbacks)]
    if not loggers:  # Lightning would refuse it
        everything = [callback for callback in everything if not isinstance(callback, LearningRateMonitor)]
    trainer: Trainer = instantiate(
        cfg.trainer,
        strategy=strategy,
        logger=loggers,
        _convert_="all",
        **_flags_and_callbacks(cfg, everything),
        **precision,
    )
    if isinstance(trainer.strategy, DDPStrategy) and (reason := why_not_in_sweep(trainer.strategy)):
        raise ConfigError(reason)  # ours has refused by itself
    _explain_folders(trainer.strategy, Strategy)
    return trainer


def build_fabric(cfg: "DictConfig") -> "Fabric":
    """Builds the Fabric that the groups `trainer strategy precision logger` describe.

    Args:
        cfg: A configuration with these groups, as for :func:`build_trainer`; of `trainer` it takes `accelerator`,
            `devices`, `num_nodes` and `plugins`, since the loop decides everything else.

    Raises:
        ConfigError: Fabric has no such strategy, a value is out of range, or a job of a sweep cannot start its ranks.
    """
    from hydra.utils import get_class, instantiate
    from lightning.fabric import Fabric, strategies
    from lightning.fabric.strategies.ddp import DDPStrategy
    from lightning.fabric.strategies.strategy import Strategy

    from lightning_zero import ZeroFabricStrategy, ZeroStrategy
    from lightning_zero.integration.auto import ZeroAutoStrategy
    from lightning_zero.integration.launchers import why_not_in_sweep
    from lightning_zero.integration.names import WITHOUT_AUTO

    check_trainer(cfg)
    _check_sizes(cfg.trainer)
    names = [str(name) for name in cfg.strategy if not str(name).startswith("_")]
    options, target = _values(cfg.strategy, names), get_class(cfg.strategy["_target_"])
    if issubclass(target, ZeroAutoStrategy):
        raise ConfigError(f"{WITHOUT_AUTO}.")
    if issubclass(target, ZeroStrategy | ZeroFabricStrategy):
        strategy: Any = (target if issubclass(target, ZeroFabricStrategy) else ZeroFabricStrategy)(**options)
        precision: dict[str, Any] = {"plugins": [instantiate(cfg.precision, _convert_="all")]}
    elif (same := getattr(strategies, target.__name__, None)) is not None:  # Fabric's strategy of the same name
        strategy = same(**options)
        precision = _precision_of_others(cfg.precision, target.__name__)
    else:
        raise ConfigError(
            f"strategy._target_={target.__module__}.{target.__name__} is a strategy of the Trainer; Fabric has none of "
            "that name. Choose a zero strategy, or ddp."
        )
    _check_groups(cfg.trainer, precision)
    flags = _values(cfg.trainer, ("accelerator", "devices", "num_nodes", "plugins"))
    fabric = Fabric(strategy=strategy, loggers=build_group(cfg.logger), **flags, **precision)
    if isinstance(fabric.strategy, DDPStrategy) and (reason := why_not_in_sweep(fabric.strategy)):
        raise ConfigError(reason)
    _explain_folders(fabric.strategy, Strategy)
    return fabric


def _explain_folders(strategy: Any, base: type) -> None:
    """Has another strategy say what to do with a folder, and decode 8-bit state, if it reads files by a plugin.

    Args:
        strategy: A strategy of the Trainer or of Fabric; one with a plugin of the user is left alone.
        base: The base class of all of them, whose method reads by the plugin.
    """
    from lightning.fabric.plugins.io import TorchCheckpointIO

    from lightning_zero.integration.checkpointing import FileCheckpointIO

    by_plugin = type(strategy).load_checkpoint is base.load_checkpoint  # type: ignore[attr-defined]
    if by_plugin and type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = FileCheckpointIO()


def _check_groups(trainer: "DictConfig", given: Iterable[str]) -> None:
    """Refuses arguments of the Trainer that other groups set, since they would have no effect."""
    for name in given:
        if name in trainer:
            group = "precision" if name == "plugins" else name
            raise ConfigError(f"trainer.{name} has no effect: the group {group!r} sets it. Use {group}=... instead.")


def _check_sizes(trainer: "DictConfig") -> None:
    """Refuses values that Lightning accepts, but with which the training fails later or follows a wrong rule."""
    for name, least in (("accumulate_grad_batches", 1), ("gradient_clip_val", 0), ("log_every_n_steps", 0)):
        if isinstance(value := trainer.get(name), int | float) and value < least:
            raise ConfigError(f"trainer.{name}={value} must be at least {least}.")


def _flags_and_callbacks(cfg: "DictConfig", callbacks: list["Callback"]) -> dict[str, Any]:
    """Makes the Trainer's flags and callbacks agree, since Lightning refuses a callback whose flag is off.

    If a flag is false, its callbacks are left out. If it is null, it is set by whether there are such callbacks; for an
    empty group of callbacks, Lightning adds its own.
    """
    from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar

    kinds: dict[str, type] = {
        "enable_checkpointing": Checkpoint,
        "enable_progress_bar": ProgressBar,
        "enable_model_summary": ModelSummary,
    }
    flags = {flag: cfg.trainer.get(flag, True) for flag in kinds}
    for flag, kind in kinds.items():
        if flags[flag] is None:
            flags[flag] = not cfg.callbacks or any(isinstance(callback, kind) for callback in callbacks)
    off = tuple(kind for flag, kind in kinds.items() if not flags[flag])
    return {**flags, "callbacks": [callback for callback in callbacks if not isinstance(callback, off)]}


def build_group(group: "DictConfig") -> list[Any]:
    """Builds an object for every entry of a group of named objects; an entry set to null is left out.

    Raises:
        ConfigError: An entry is something else.
    """
    from hydra.utils import instantiate
    from omegaconf import DictConfig

    for name, node in group.items():
        if node is not None and not (isinstance(node, DictConfig) and "_target_" in node):
            key = group._get_full_key(str(name))
            raise ConfigError(f"{key}={node} must be null, or keys of which `_target_` names a class.")
    return [instantiate(node, _convert_="all") for node in group.values() if node is not None]


def _precision_arguments(cfg: "DictConfig", strategy: "Strategy") -> dict[str, Any]:
    """Gives our strategies our plugin, and any other strategy only the name of the precision."""
    from hydra.utils import instantiate

    from lightning_zero import ZeroStrategy

    if isinstance(strategy, ZeroStrategy):
        return {"plugins": [instantiate(cfg, _convert_="all")]}
    return _precision_of_others(cfg, type(strategy).__name__)


def _precision_of_others(cfg: "DictConfig", strategy: str) -> dict[str, Any]:
    """Gives the Trainer's precision flag; refuses settings that only our plugin supports."""
    from omegaconf import OmegaConf

    # A loss scaler with default settings stands for the loss scaler of the other strategy.
    plain = asdict(PrecisionConf(precision=cfg.precision, scaler=DynamicLossScalerConf()))
    own = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(own, dict)
    if changed := _changed(own, plain):
        raise ConfigError(
            f"precision has {changed}, which {strategy} does not know: "
            "leave these keys at their defaults or choose a zero strategy."
        )
    return {"precision": cfg.precision}


def _changed(values: dict[Any, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Picks the values that are not null and differ from the plain ones; in mappings only the differing items."""
    changed = {}
    for key, value in values.items():
        default = plain.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _changed(value, default) or None
        if value is not None and value != default:
            changed[key] = value
    return changed


def micro_batch_size(batch_size: int, world_size: int, accumulate: int) -> int:
    """Divides a global batch, `data.batch_size`, and returns the number of samples in a rank's micro-batch.

    Args:
        batch_size: Samples per optimizer step, over all ranks and micro-batches.
        world_size: Number of ranks.
        accumulate: Micro-batches per optimizer step.

    Raises:
        ConfigError: It does not divide evenly.
    """
    parts = world_size * accumulate
    if batch_size < parts or batch_size % parts:
        near = max(1, round(batch_size / parts)) * parts
        raise ConfigError(
            f"data.batch_size={batch_size} cannot be split evenly over {world_size} ranks x {accumulate} "
            f"micro-batches: use a multiple of {parts}, such as data.batch_size={near}, or another trainer.devices."
        )
    return batch_size // parts


def build_optimizers(
    optimizer: "DictConfig", scheduler: "DictConfig", params: "Iterable[Any] | Module", total_steps: float
) -> "OptimizerLRScheduler":
    """Builds the optimizer and the scheduler of the groups `optimizer` and `scheduler`, for `configure_optimizers`.

    Args:
        optimizer: A torch optimizer's class and arguments.
        scheduler: A scheduler's class and arguments; without a class: none.
        params: Parameters or parameter groups; or a module. If the optimizer's class has a function `groups_of`, as
            `Muon` has, it makes the groups from the module's parameters.
        total_steps: Optimizer steps of the fit, for a scheduler whose `total_steps` is null. If `warmup_steps` is null,
            the warm-up has 100 of these steps, or a tenth if that is less (for `WarmupDecayLR` 1000, or half).

    Raises:
        ConfigError: A value is out of range, or the class is of a package that is not installed.
    """
    options = _arguments(optimizer)
    betas, known = options.get("betas"), optimizer["_target_"].startswith(("torch.optim.", "lightning_zero."))
    if known and betas is not None and not (isinstance(betas, tuple) and len(betas) == 2):  # others may take three
        raise ConfigError(f"optimizer.betas={optimizer.betas} must be two numbers, such as [0.9,0.999].")
    built = _build(optimizer, _groups(_find_class(optimizer), params), **options)
    if not scheduler or "_target_" not in scheduler:
        return {"optimizer": built}
    arguments = _arguments(scheduler)
    if "total_steps" in arguments and arguments["total_steps"] is None:
        if total_steps < 0 or not math.isfinite(total_steps):  # Lightning gives -1 for data without a length
            raise ConfigError(
                "scheduler.total_steps is null, and the fit has no end: set trainer.max_steps; trainer.max_epochs does "
                "for data that has a length."
            )
        arguments["total_steps"] = max(int(total_steps), _least_steps(scheduler["_target_"]))
    if "warmup_steps" in arguments and arguments["warmup_steps"] is None:
        if "total_steps" not in arguments:
            raise ConfigError(
                "scheduler.warmup_steps is null, and no scheduler.total_steps is there that it could follow from: "
                "set it."
            )
        arguments["warmup_steps"] = _usual_warmup(scheduler["_target_"], arguments["total_steps"])
    schedule = _build(scheduler, built, **arguments)
    return {"optimizer": built, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _usual_warmup(target: str, total_steps: int) -> int:
    """Gives the default number of warm-up steps of a scheduler's class, for a fit of `total_steps`."""
    return max(1, min(1000, total_steps // 2)) if _decays(target) else min(100, total_steps // 10)


def _least_steps(target: str) -> int:
    """Gives the shortest schedule of a scheduler's class; a shorter fit ends within it."""
    return 3 if _decays(target) else 0


def _decays(target: str) -> bool:
    from hydra.utils import get_class

    from lightning_zero.schedulers import WarmupDecayLR

    return issubclass(get_class(target), WarmupDecayLR)


def _groups(cls: Any, params: "Iterable[Any] | Module") -> Iterable[Any]:
    """Gives the parameter groups; for a module, those that the optimizer's class makes."""
    from torch.nn import Module

    if not isinstance(params, Module):
        return params
    groups: Iterable[Any] = cls.groups_of(params) if hasattr(cls, "groups_of") else params.parameters()
    return groups


def _find_class(cfg: "DictConfig") -> Any:
    """Gives the class of a node.

    Raises:
        ConfigError: Its package is not installed.
    """
    from hydra.utils import get_class

    package = cfg["_target_"].partition(".")[0]
    if _is_missing(package):
        install = _DISTRIBUTIONS.get(package)
        advice = "correct the name, or install the package" if install is None else f"pip install {install}"
        raise ConfigError(f"{cfg['_target_']} is of a package, {package}, that is not installed: {advice}")
    return get_class(cfg["_target_"])


def _is_missing(package: str) -> bool:
    try:
        return find_spec(package) is None
    except ValueError:  # `__main__`, the user's script, has no spec
        return False


def _build(cfg: "DictConfig", *args: Any, **kwargs: Any) -> Any:
    """Builds an object of the node's class from these arguments; fails as `instantiate` does."""
    from hydra.errors import InstantiationException

    found = _find_class(cfg)
    try:
        return found(*args, **kwargs)
    except (ValueError, TypeError) as error:
        raise InstantiationException(f"Error in call to target {cfg['_target_']!r}:\n{error!r}") from error


def _values(cfg: "DictConfig", names: Iterable[str]) -> dict[str, Any]:
    """Reads those of the names that a node has, and builds the objects that it describes, such as a `CheckpointIO`."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    values = {name: cfg[name] for name in names if name in cfg}
    return {n: instantiate(v, _convert_="all") if OmegaConf.is_config(v) else v for n, v in values.items()}


def _arguments(cfg: "DictConfig") -> dict[str, Any]:
    """Reads a node's keyword arguments; lists become tuples, the type that torch has for `betas`."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    arguments = {str(k): v for k, v in plain.items() if not str(k).startswith("_")}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
