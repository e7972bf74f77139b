"""Errors in a configuration, which users see as messages instead of stack traces.

There are mistakes that Hydra finds (a key, an option, a value), mistakes that it does not find (an added key that
nothing uses, a key without a value) and mistakes that the application finds (:class:`ConfigError`). Each ends the
program with a message that lists the valid choices.
"""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import DictConfig

    Options = dict[str, list[str]]  # by group
    Task = Callable[[DictConfig], Any]

_TOP = "the configuration"
_CLEAR_ERRORS = "LIGHTNING_ZERO_CLEAR_ERRORS"


class ConfigError(ValueError):
    """A configuration cannot be used. With :func:`hydra_main` users see only its message."""


def run_with_clear_errors(main: Callable[[], None], task: "Task", groups: Callable[[], "Options"]) -> None:
    """Runs `main`. A configuration error becomes a message; other errors show only the frames below `task`."""
    from hydra.errors import HydraException

    if os.environ.get("HYDRA_FULL_ERROR") == "1" and _CLEAR_ERRORS not in os.environ:
        return main()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then passes exceptions on instead of printing them
    os.environ[_CLEAR_ERRORS] = "1"  # tells ranks that Lightning launches that the user did not set the other one
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


def groups_of_application(task: "Task", config_path: str | None) -> "Options":
    """Lists the groups that the application can choose from, with their options."""
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
        return _groups_known_to(GlobalHydra.instance().config_loader())


def _groups_known_to(loader: "ConfigLoader") -> "Options":
    names = [name for name in loader.list_groups("") if name not in ("hydra", "schema")]
    return {name: options for name in names if (options := loader.get_group_options(name))}


def _frames_from(task: "Task", error: Exception) -> TracebackType | None:
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code is not getattr(task, "__code__", None):
        frame = frame.tb_next
    return frame or error.__traceback__


def check_added(cfg: "DictConfig") -> None:
    """Refuses a key that the command line adds at the top level and nothing uses, such as a misspelt `+group=`."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    if not GlobalHydra().is_initialized():
        return  # a job that is run again, as it was composed
    loader, hydra = GlobalHydra.instance().config_loader(), HydraConfig.get()
    overrides = OverridesParser.create().parse_overrides(list(hydra.overrides.task))

    def chooses(override: Override) -> bool:  # of an option of a group; Hydra needs a hundredth of a second to know
        return bool(loader.get_group_options(override.key_or_group))

    added = [o for o in overrides if (o.is_add() or o.is_force_add()) and not chooses(o)]
    if not added:
        return
    choices = filter(chooses, overrides)
    given = [*hydra.overrides.hydra, *(str(override.input_line) for override in choices)]
    before = loader.load_configuration(hydra.job.config_name, given, RunMode.RUN)
    everything = OmegaConf.to_yaml(cfg) + OmegaConf.to_yaml(HydraConfig.instance().cfg)
    for key in (override.key_or_group.partition(".")[0] for override in added):
        if key not in before and not re.search(rf"\$\{{[^}}]*(?<![\w.]){re.escape(key)}(?!\w)", everything):
            keys = _names([*before, *_groups_known_to(loader)])
            advice = f"name it in the primary configuration, or in a value as ${{{key}}}"
            raise ConfigError(f"{no_such_key(key, key, _TOP, keys)}\nA key that nothing uses is not added: {advice}.")


def check_complete(cfg: "DictConfig") -> None:
    """Refuses a configuration in which a key is still without a value (`???`)."""
    from omegaconf import OmegaConf

    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(f"{', '.join(missing)}: no value yet. Set it on the command line: {missing[0]}=...")


def explain(error: "HydraException", groups: Sequence[str] = ()) -> str | None:
    """Says what to change in the configuration; None if the stack trace says more.

    Args:
        error: The error that Hydra raised.
        groups: Names of groups, one of which a misspelt name could mean.
    """
    from hydra.errors import InstantiationException, MissingConfigException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    cause = error.__cause__
    if isinstance(error, MissingConfigException):
        return _explain_option(error, groups)
    if isinstance(error, InstantiationException):
        return f"{str(error).splitlines()[0]}\n{cause}{_advice(cause)}" if _is_about_input(cause) else None
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return _explain_key(cause, groups)
    if isinstance(cause, OmegaConfBaseException):
        return f"{cause.full_key}: {str(cause).splitlines()[0]}"
    return str(error)


def _is_about_input(cause: BaseException | None) -> bool:
    """Tells whether an object's own error says what to change: a value, or a package that has to be installed."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    if isinstance(cause, ImportError):
        return cause.name is None  # raised with a message instead of by an import statement
    return isinstance(cause, ValueError | TypeError | MisconfigurationException)


def _advice(cause: BaseException | None) -> str:
    """Adds what Lightning's own error leaves open."""
    fewer = "\nUse fewer trainer.devices, or trainer=cpu, where a rank is a process on the CPU."
    return fewer if "your machine only has" in str(cause) else ""


def _explain_option(error: "MissingConfigException", groups: Sequence[str]) -> str:
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    if options := list(error.options or ()):
        return f"{group}={option}: no such option.{_closest(option, options)}\n{group} can be: {', '.join(options)}"
    if group and group not in groups:
        return f"{group}: no such group.{_closest(group, groups)}\nThe groups are: {', '.join(groups)}"
    return str(error)


def _explain_no_choice(error: Exception, groups: Callable[[], "Options"]) -> str | None:
    """Lists the options of a group that the task reads, but that the command line removed or set to null."""
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
    """Lists keys that the command line sets to a value that names no option, such as null."""
    from hydra._internal.utils import get_args
    from hydra.core.override_parser.overrides_parser import OverridesParser

    overrides = OverridesParser.create().parse_overrides(get_args().overrides)
    single = [o for o in overrides if not (o.is_delete() or o.is_sweep_override())]
    return [o.key_or_group for o in single if not isinstance(o.value(), str | list | dict)]


def _explain_key(cause: Any, groups: Sequence[str]) -> str:
    owner = str(cause.full_key).rpartition(".")[0] or _TOP
    # A group without a chosen option has no key.
    keys = _names([*(cause.parent_node or ()), *(groups if owner == _TOP else ())])
    message = no_such_key(str(cause.full_key), str(cause.key), owner, keys)
    if owner != _TOP and cause.object_type is dict:
        message += f"\nTo add a key that is not there yet: +{cause.full_key}=..."
    return message


def _names(keys: Iterable[Any]) -> list[str]:
    """Lists every key once, without those of Hydra itself."""
    return [str(key) for key in dict.fromkeys(keys) if not str(key).startswith("_") and key != "hydra"]


def no_such_key(full_key: str, key: str, owner: str, keys: list[str]) -> str:
    """Writes that a key is not among those of its owner, with the closest one and all of them."""
    has = f"{owner} has: {', '.join(keys)}" if keys else f"{owner} has no keys."
    return f"{full_key}: no such key.{_closest(key, keys)}\n{has}"


def _closest(word: str, candidates: Sequence[str]) -> str:
    matches = difflib.get_close_matches(word, candidates, n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
