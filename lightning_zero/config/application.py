"""Hydra applications that train with Lightning: the main function's decorator, and one run folder for all ranks."""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_zero.config.arguments import check_trainer
from lightning_zero.config.errors import check_added, check_complete, groups_of_application, run_with_clear_errors

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from lightning_zero.config.errors import Task

_RUN_DIR_KEY = "run_dir"
_LARGEST_STEP = 2**31  # larger numbers of SLURM's steps stand for a script itself, or an interactive shell


def hydra_main(config_name: str, config_path: str | None = None) -> Callable[["Task"], Callable[[], None]]:
    """Decorates the main function of a script, as `hydra.main` does.

    On top of `hydra.main`, a misspelt key, option or value ends the program with a message that lists the valid
    ones, and the ranks that torchrun or SLURM starts share one run folder. In a job of SLURM, `${now:...}` is the
    number of the job and of its step instead of the time, so that a requeued job finds its folder, with the checkpoint
    to go on from. `HYDRA_FULL_ERROR=1` shows complete stack traces.

    Args:
        config_name: The primary configuration, without `.yaml`.
        config_path: Its folder, relative to the script, or `pkg://package`.
    """

    def decorate(task: "Task") -> Callable[[], None]:
        @functools.wraps(task)
        def run() -> None:
            import hydra

            # Lightning itself uses APIs that newer torch deprecates, which users cannot change.
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
            warnings.filterwarnings("ignore", message=".*nn.functional.all_gather is deprecated")
            if _runs_task():
                _move_overrides_last()
                _join_run_folder()
            main = hydra.main(version_base="1.3", config_path=config_path, config_name=config_name)
            groups = functools.partial(groups_of_application, task, config_path)
            with _schemas_hidden(), _named_by_job():
                run_with_clear_errors(main(_prepared(task)), task, groups)

        return run

    return decorate


def _prepared(task: "Task") -> "Task":
    """Wraps a task in checks of its composed configuration, and tells the other ranks the folder of rank 0."""

    @functools.wraps(task)
    def run(cfg: "DictConfig") -> Any:
        check_added(cfg)
        check_complete(cfg)
        check_trainer(cfg)
        _publish_run_folder()
        return task(cfg)

    return run


@contextmanager
def _schemas_hidden() -> Iterator[None]:
    """Hides our schemas in the groups that `--help` lists, since users do not choose them."""
    from hydra._internal.hydra import Hydra

    own = Hydra.list_all_config_groups

    def list_groups(hydra: Hydra, parent: str = "") -> list[str]:
        return [group for group in own(hydra, parent) if not group.startswith("schema/")]

    Hydra.list_all_config_groups = list_groups  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Hydra.list_all_config_groups = own  # type: ignore[method-assign]


# -- one run folder for all ranks ---------------------------------------------------------------------------


def _slurm_job() -> str | None:
    """Returns a name of the job and its step if `srun` starts the ranks; a requeued job keeps it.

    What a job's script starts without `srun` are several runs, which no step tells apart.
    """
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID", "")
    by_srun = step.isdecimal() and int(step) < _LARGEST_STEP
    if job is None or not by_srun or TorchElasticEnvironment.detect() or not SLURMEnvironment.detect():
        return None
    return f"job_{job}_{step}"


@contextmanager
def _named_by_job() -> Iterator[None]:
    """Makes `${now:...}` the job of SLURM, if there is one: ranks and requeued jobs have clocks of their own."""
    from hydra._internal import hydra as single
    from hydra._internal.core_plugins import basic_launcher as sweep
    from omegaconf import OmegaConf

    own: Callable[[], None] = single.setup_globals  # type: ignore[attr-defined]
    job = _slurm_job() if _runs_task() else None

    def set_up() -> None:
        own()
        if job is not None:
            OmegaConf.register_new_resolver("now", lambda pattern: job, replace=True)

    single.setup_globals = sweep.setup_globals = set_up  # type: ignore[attr-defined]
    try:
        yield
    finally:
        single.setup_globals = sweep.setup_globals = own  # type: ignore[attr-defined]


@functools.cache  # rank 0 serves it to the others until it ends
def _torchrun_store() -> Any:
    """Connects to the key-value store of torchrun's ranks, before there is a process group; None without torchrun.

    Its server is in torchrun's agent, or in rank 0 if that may not be shared (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE`).
    There it is one with the server of the process group, which has the same address.
    """
    in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    if in_agent is None:
        return None
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    serves = in_agent != "True" and os.environ["RANK"] == "0"
    store = TCPStore(address, port, is_master=serves, wait_for_workers=False, multi_tenant=True)
    return PrefixStore(f"lightning_zero/attempt_{attempt}", store)


def _publish_run_folder() -> None:
    """Tells the other ranks of torchrun which folder rank 0 writes to, as an override."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    store = _torchrun_store()
    if store is not None and os.environ["RANK"] == "0":
        hydra = HydraConfig.get()
        key, folder = ("sweep", hydra.sweep.dir) if hydra.mode == RunMode.MULTIRUN else ("run", hydra.run.dir)
        path = str(Path(hydra.runtime.cwd, folder)).replace("'", r"\'")
        store.set(_RUN_DIR_KEY, f"hydra.{key}.dir='{path}'")


def _join_run_folder() -> None:
    """Makes the other ranks of torchrun or SLURM use rank 0's folder, and leave its configuration and log to rank 0.

    Lightning's launcher passes the same three overrides to the ranks that it starts. The last override of a key counts.
    """
    if _slurm_job() is not None:  # all have the same folder
        store, rank = None, os.environ.get("SLURM_PROCID", "0")
    elif (store := _torchrun_store()) is not None:
        rank = os.environ["RANK"]
    else:
        return
    if rank != "0":
        folder = [] if store is None else [store.get(_RUN_DIR_KEY).decode()]
        sys.argv += [*folder, f"hydra.job.name=train_rank_{rank}", "hydra.output_subdir=null"]


def _move_overrides_last() -> None:
    """Moves flags before overrides, since Hydra takes overrides only in one block, and ranks get more appended."""
    from hydra._internal.utils import get_args

    overrides = get_args().overrides
    sys.argv[1:] = [*(word for word in sys.argv[1:] if word not in overrides), *overrides]


def _runs_task() -> bool:
    """Tells whether the command line runs the task, instead of only printing something."""
    from hydra._internal.utils import get_args

    args = get_args()
    return not (args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)
