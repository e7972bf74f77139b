"""Hydra applications that train with Lightning: the decorator, clear errors, objects from a configuration."""

import difflib
import functools
import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lightning_zero.config import DynamicLossScalerConf, PrecisionConf

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.errors import HydraException, MissingConfigException
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.utilities.types import OptimizerLRScheduler
    from omegaconf import DictConfig

    Options = dict[str, list[str]]  # by group
    Task = Callable[[DictConfig], Any]

_RUN_DIR_KEY = "run_dir"
_TOP = "the configuration"
_CLEAR_ERRORS = "LIGHTNING_ZERO_CLEAR_ERRORS"


class ConfigError(ValueError):
    """A configuration that cannot be used. Under :func:`hydra_main` its message is all that the user sees."""


def hydra_main(config_name: str, config_path: str | None = None) -> Callable[["Task"], Callable[[], None]]:
    """Decorate the main function of a script, as `hydra.main` does.

    On top of `hydra.main`, a misspelt key, option or value ends the program with a message that lists the valid
    ones, and the ranks that torchrun starts share one run folder. `HYDRA_FULL_ERROR=1` shows complete stack traces.

    Args:
        config_name: The primary configuration, without `.yaml`.
        config_path: Its folder, relative to the script, or `pkg://package`.
    """

    def decorate(task: "Task") -> Callable[[], None]:
        @functools.wraps(task)
        def run() -> None:
            import hydra

            # Lightning's own use of APIs that newer torch deprecates: nothing a user could change.
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
            warnings.filterwarnings("ignore", message=".*nn.functional.all_gather is deprecated")
            if _runs_task():
                _move_overrides_last()
                _join_run_folder()
            main = hydra.main(version_base="1.3", config_path=config_path, config_name=config_name)
            _run_with_clear_errors(main(_prepared(task)), task, functools.partial(_groups, task, config_path))

        return run

    return decorate


def _prepared(task: "Task") -> "Task":
    """What happens between the composition and the task."""

    @functools.wraps(task)
    def run(cfg: "DictConfig") -> Any:
        _check_added(cfg)
        _check_complete(cfg)
        _publish_run_folder()
        return task(cfg)

    return run


# -- one run folder for all ranks ---------------------------------------------------------------------------


def _torchrun_store() -> Any:
    """The key-value store that torchrun's agent offers before there is a process group, or None."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = TCPStore(address, port, is_master=False, wait_for_workers=False)
    return PrefixStore(f"lightning_zero/attempt_{attempt}", store)


def _publish_run_folder() -> None:
    """Tell the other ranks of torchrun which folder rank 0 writes to, as an override."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    store = _torchrun_store()
    if store is not None and os.environ["RANK"] == "0":
        hydra = HydraConfig.get()
        key, folder = ("sweep", hydra.sweep.dir) if hydra.mode == RunMode.MULTIRUN else ("run", hydra.run.dir)
        path = str(Path(hydra.runtime.cwd, folder)).replace("'", r"\'")
        store.set(_RUN_DIR_KEY, f"hydra.{key}.dir='{path}'")


def _join_run_folder() -> None:
    """Make the other ranks of torchrun use rank 0's folder: their own clock would name another one.

    Lightning's launcher gives the ranks that it starts the same three overrides. The last of a key counts.
    """
    store = _torchrun_store()
    if store is None or os.environ["RANK"] == "0":
        return
    name = f"hydra.job.name=train_rank_{os.environ['RANK']}"
    sys.argv += [store.get(_RUN_DIR_KEY).decode(), name, "hydra.output_subdir=null"]


def _move_overrides_last() -> None:
    """Put flags first: Hydra takes overrides in one piece only, and ranks get more of them appended."""
    from hydra._internal.utils import get_args

    overrides = get_args().overrides
    sys.argv[1:] = [*(word for word in sys.argv[1:] if word not in overrides), *overrides]


def _runs_task() -> bool:
    """Whether the command line runs the task, and does not just print something."""
    from hydra._internal.utils import get_args

    args = get_args()
    return not (args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)


# -- errors -------------------------------------------------------------------------------------------------


def _run_with_clear_errors(main: Callable[[], None], task: "Task", groups: Callable[[], "Options"]) -> None:
    """Run `main`; a configuration error becomes a message, any other keeps the frames below `task` only."""
    from hydra.errors import HydraException

    if os.environ.get("HYDRA_FULL_ERROR") == "1" and _CLEAR_ERRORS not in os.environ:
        return main()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then passes exceptions on instead of printing them
    os.environ[_CLEAR_ERRORS] = "1"  # tells the ranks that Lightning launches who has set the other
    try:
        return main()
    except ConfigError as error:
        sys.exit(str(error))
    except HydraException as error:
        if (message := explain(error, list(groups()))) is None:
            raise
        sys.exit(message)
    except Exception as error:
        if message := _explain_no_choice(error, groups):
            sys.exit(message)
        error.__traceback__ = _frames_from(task, error)
        raise
    finally:
        del os.environ["HYDRA_FULL_ERROR"], os.environ[_CLEAR_ERRORS]


def _groups(task: "Task", config_path: str | None) -> "Options":
    """The groups that the application can choose from."""
    from hydra import initialize_config_dir, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    if config_path is None:
        return {}
    if config_path.startswith("pkg://"):
        opened: Any = initialize_config_module(config_path.removeprefix("pkg://"), version_base="1.3")
    else:
        folder = Path(inspect.getfile(task)).resolve().parent / config_path
        opened = initialize_config_dir(str(folder), version_base="1.3")
    with opened:
        return _groups_of(GlobalHydra.instance().config_loader())


def _groups_of(loader: "ConfigLoader") -> "Options":
    names = [name for name in loader.list_groups("") if name not in ("hydra", "schema")]
    return {name: options for name in names if (options := loader.get_group_options(name))}


def _frames_from(task: "Task", error: Exception) -> TracebackType | None:
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code is not getattr(task, "__code__", None):
        frame = frame.tb_next
    return frame or error.__traceback__


def _check_added(cfg: "DictConfig") -> None:
    """Refuse a key that the command line adds at the top and nothing uses: Hydra takes a misspelt `+group=` for one."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    if not GlobalHydra().is_initialized():
        return  # a job that is run again, as it was composed
    loader, hydra = GlobalHydra.instance().config_loader(), HydraConfig.get()
    overrides = OverridesParser.create().parse_overrides(list(hydra.overrides.task))
    choices = [override for override in overrides if loader.get_group_options(override.key_or_group)]
    added = [o for o in overrides if (o.is_add() or o.is_force_add()) and o not in choices]
    if not added:
        return
    given = [*hydra.overrides.hydra, *(str(override.input_line) for override in choices)]
    before = loader.load_configuration(hydra.job.config_name, given, RunMode.RUN)
    everything = OmegaConf.to_yaml(cfg) + OmegaConf.to_yaml(HydraConfig.instance().cfg)
    for key in (override.key_or_group.partition(".")[0] for override in added):
        if key not in before and not re.search(rf"\$\{{[^}}]*(?<![\w.]){re.escape(key)}(?!\w)", everything):
            keys = _names([*before, *_groups_of(loader)])
            advice = f"name it in the primary configuration, or in a value as ${{{key}}}"
            raise ConfigError(f"{_no_such_key(key, key, _TOP, keys)}\nA key that nothing uses is not added: {advice}.")


def _check_complete(cfg: "DictConfig") -> None:
    from omegaconf import OmegaConf

    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(f"{', '.join(missing)}: no value yet. Set it on the command line: {missing[0]}=...")


def explain(error: "HydraException", groups: Sequence[str] = ()) -> str | None:
    """What to change in the configuration, or None where the stack trace says more.

    Args:
        error: What Hydra has raised.
        groups: Names that a misspelt group could stand for.
    """
    from hydra.errors import InstantiationException, MissingConfigException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    cause = error.__cause__
    if isinstance(error, MissingConfigException):
        return _explain_option(error, groups)
    if isinstance(error, InstantiationException):
        return f"{str(error).splitlines()[0]}\n{cause}" if _is_about_input(cause) else None
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return _explain_key(cause, groups)
    if isinstance(cause, OmegaConfBaseException):
        return f"{cause.full_key}: {str(cause).splitlines()[0]}"
    return str(error)


def _is_about_input(cause: BaseException | None) -> bool:
    """Whether an object's own error says what to change: a value, or a package that has to be installed."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    if isinstance(cause, ImportError):
        return cause.name is None  # raised with a message, and not by an import statement
    return isinstance(cause, ValueError | TypeError | MisconfigurationException)


def _explain_option(error: "MissingConfigException", groups: Sequence[str]) -> str:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    if options := list(error.options or ()):
        return f"{group}={option}: no such option.{_closest(option, options)}\n{group} can be: {', '.join(options)}"
    if group and group not in groups:
        return f"{group}: no such group.{_closest(group, groups)}\nThe groups are: {', '.join(groups)}"
    return str(error)


def _explain_no_choice(error: Exception, groups: Callable[[], "Options"]) -> str | None:
    """What to choose where the command line takes a group that the task reads out, or sets it to null."""
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        unchosen = [str(error.full_key)]
    elif str(error).startswith("Config group override must be"):
        unchosen = _given_without_name()
    else:
        return None
    for group, options in groups().items():
        if group in unchosen:
            return f"{group}: no option is chosen.\n{group} can be: {', '.join(options)}"
    return None


def _given_without_name() -> list[str]:
    """Keys that the command line sets to what names no option, as null."""
    from hydra._internal.utils import get_args
    from hydra.core.override_parser.overrides_parser import OverridesParser

    overrides = OverridesParser.create().parse_overrides(get_args().overrides)
    single = [o for o in overrides if not (o.is_delete() or o.is_sweep_override())]
    return [o.key_or_group for o in single if not isinstance(o.value(), str | list | dict)]


def _explain_key(cause: Any, groups: Sequence[str]) -> str:
    owner = str(cause.full_key).rpartition(".")[0] or _TOP
    # A group that no option is chosen of has no key.
    keys = _names([*(cause.parent_node or ()), *(groups if owner == _TOP else ())])
    message = _no_such_key(str(cause.full_key), str(cause.key), owner, keys)
    if owner != _TOP and cause.object_type is dict:
        message += f"\nTo add a key that is not there yet: +{cause.full_key}=..."
    return message


def _names(keys: Iterable[Any]) -> list[str]:
    """Each once, without Hydra's own."""
    return [str(key) for key in dict.fromkeys(keys) if not str(key).startswith("_") and key != "hydra"]


def _no_such_key(full_key: str, key: str, owner: str, keys: list[str]) -> str:
    has = f"{owner} has: {', '.join(keys)}" if keys else f"{owner} has no keys."
    return f"{full_key}: no such key.{_closest(key, keys)}\n{has}"


def _closest(word: str, candidates: Sequence[str]) -> str:
    matches = difflib.get_close_matches(word, candidates, n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


# -- objects from a configuration ---------------------------------------------------------------------------


def build_trainer(cfg: "DictConfig", callbacks: Iterable["Callback"] = ()) -> "Trainer":
    """The Trainer that the groups `trainer strategy precision logger callbacks` describe.

    Args:
        cfg: A configuration with these groups. Where `trainer.enable_checkpointing`, `enable_progress_bar` or
            `enable_model_summary` is null, a group of callbacks that is not empty decides: Lightning adds none then.
        callbacks: The application's own callbacks, which come before those of the group.
    """
    from hydra.utils import instantiate
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_zero.multirun import why_not_in_sweep

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
    return trainer


def _check_groups(trainer: "DictConfig", given: Iterable[str]) -> None:
    """Refuse arguments of the Trainer that come from other groups: they would have no effect."""
    for name in given:
        if name in trainer:
            group = "precision" if name == "plugins" else name
            raise ConfigError(f"trainer.{name} has no effect: the group {group!r} says it. Use {group}=... instead.")


def _check_sizes(trainer: "DictConfig") -> None:
    """Refuse what Lightning takes and what then fails, or trains by a wrong rule."""
    for name, least in (("accumulate_grad_batches", 1), ("gradient_clip_val", 0), ("log_every_n_steps", 0)):
        if isinstance(value := trainer.get(name), int | float) and value < least:
            raise ConfigError(f"trainer.{name}={value} must be at least {least}.")


def _flags_and_callbacks(cfg: "DictConfig", callbacks: list["Callback"]) -> dict[str, Any]:
    """Arguments of the trainer that agree: Lightning refuses a callback against its flag, or adds one of its own.

    A flag that is false leaves its callbacks out. One that is null goes by whether there are any, but an empty group
    stands for those of Lightning.
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
    """An object for every entry of a group of named objects; an entry set to null is left out.

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
    """Our plugin goes with our strategies; others take the name as their flag and nothing else."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from lightning_zero import ZeroStrategy

    if isinstance(strategy, ZeroStrategy):
        return {"plugins": [instantiate(cfg, _convert_="all")]}
    # A loss scaler at its defaults stands for the one that any other strategy has of its own.
    plain = asdict(PrecisionConf(precision=cfg.precision, scaler=DynamicLossScalerConf()))
    own = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(own, dict)
    if changed := _changed(own, plain):
        raise ConfigError(
            f"precision has {changed}, which {type(strategy).__name__} does not know: "
            "leave these keys at their defaults or choose a zero strategy."
        )
    return {"precision": cfg.precision}


def _changed(values: dict[Any, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """The values that are not null and differ from the plain ones; of mappings, what differs inside."""
    changed = {}
    for key, value in values.items():
        default = plain.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _changed(value, default) or None
        if value is not None and value != default:
            changed[key] = value
    return changed


def micro_batch_size(batch_size: int, world_size: int, accumulate: int) -> int:
    """Samples that a rank takes at once of a global batch, `data.batch_size`; ConfigError where it does not divide.

    Args:
        batch_size: Samples per optimizer step, over all ranks and micro-batches.
        world_size: Number of ranks.
        accumulate: Micro-batches per optimizer step.
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
    optimizer: "DictConfig", scheduler: "DictConfig", params: Iterable[Any], total_steps: float
) -> "OptimizerLRScheduler":
    """What `configure_optimizers` returns for the groups `optimizer` and `scheduler`.

    Args:
        optimizer: A torch optimizer's class and arguments.
        scheduler: A scheduler's class and arguments; without a class: none.
        params: Parameters or parameter groups.
        total_steps: Optimizer steps of the fit, for a scheduler whose `total_steps` is null.
    """
    options = _arguments(optimizer)
    if len(options.get("betas", (0, 0))) != 2:
        raise ConfigError(f"optimizer.betas={list(options['betas'])} must be two numbers, such as [0.9,0.999].")
    built = _build(optimizer, params, **options)
    if not scheduler or "_target_" not in scheduler:
        return {"optimizer": built}
    arguments = _arguments(scheduler)
    if "total_steps" in arguments and arguments["total_steps"] is None:
        if not math.isfinite(total_steps):
            raise ConfigError(
                "scheduler.total_steps is null, and the fit has no end: set trainer.max_steps or max_epochs."
            )
        arguments["total_steps"] = int(total_steps)
    schedule = _build(scheduler, built, **arguments)
    return {"optimizer": built, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _build(cfg: "DictConfig", *args: Any, **kwargs: Any) -> Any:
    """An object of the node's class from these arguments; fails as `instantiate` does."""
    from hydra.errors import InstantiationException
    from hydra.utils import get_class

    target = cfg["_target_"]
    try:
        return get_class(target)(*args, **kwargs)
    except (ValueError, TypeError) as error:
        raise InstantiationException(f"Error in call to target {target!r}:\n{error!r}") from error


def _arguments(cfg: "DictConfig") -> dict[str, Any]:
    """A node's keyword arguments; lists become tuples, the type that torch has for `betas`."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    arguments = {str(k): v for k, v in plain.items() if not str(k).startswith("_")}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
