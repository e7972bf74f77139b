"""Runs `python examples/...` inside the ranks of a pool, including Hydra's command line, but without a launcher."""

from __future__ import annotations

import copy
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

# Settings that make any run of the examples short; a configuration gets those for which it has a key.
SHORT = {
    "trainer.accelerator": "cpu",
    "trainer.max_steps": 3,
    "trainer.val_check_interval": 3,
    "trainer.limit_val_batches": 1,
    "trainer.num_sanity_val_steps": 1,
    "trainer.log_every_n_steps": 1,
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "scheduler.warmup_steps": 1,
    "model.n_layer": 1,
    "model.n_embd": 24,
    "model.context": 8,
    "data.batch_size": 4,
    "data.val_batch_size": 4,
    "data.eval_batch_size": 4,
    "data.train_images": 16,
    "data.test_images": 8,
    "data.vocab": "vocab",  # otherwise it is downloaded
    "vocab": "vocab",
    "sample.length": 5,
    "length": 5,
}
# Hydra would replace the handlers of this process.
_NO_LOGGING = ("hydra/job_logging=none", "hydra/hydra_logging=none")


class Run(NamedTuple):
    """A script of an example, and the arguments to run it with."""

    script: Path
    arguments: list[str]
    world_size: int


def short_run(script: Path, overrides: Sequence[str]) -> Run:
    """A run of a script with these overrides, and those that make it short; its results are in the folder `run`."""
    if "--help" in overrides:
        return Run(script, [*overrides], 1)
    with initialize_config_dir(str(script.parent / "conf"), version_base="1.3"):
        own = script.parent / "conf" / f"{script.stem}.yaml"
        cfg = compose(script.stem if own.exists() else "train", [*overrides])
    known = [key for key in SHORT if _has(cfg, key)]
    run_dir = ["hydra.run.dir=run"] if "run_dir" in cfg else []
    ranks = cfg.get("trainer", {"devices": 1})["devices"]
    return Run(script, [*overrides, *(f"{key}={SHORT[key]}" for key in known), *run_dir], ranks)


def _has(cfg: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    return node is not None and name in node


def overridden(cfg: DictConfig, *overrides: str) -> DictConfig:
    """A copy with other values, parsed as Hydra does; composing it again would take a tenth of a second."""
    copied = copy.deepcopy(cfg)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        added = override.is_add() or override.is_force_add()
        OmegaConf.update(copied, override.key_or_group, override.value(), force_add=added)
    return copied


def run_script(script: Path, arguments: Sequence[str], folder: Path) -> None:
    """Run a Hydra application of ``examples`` as if its command line were typed in ``folder``.

    Raises:
        RuntimeError: it ended with a message, or with an exit code other than 0.
    """
    os.chdir(folder)  # the pool changes back
    command = [str(script), *arguments, *([] if "--help" in arguments else _NO_LOGGING)]
    with _modules_of(script.parent), _no_hydra(), mock.patch.object(sys, "argv", command):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{script.name} ended with {end.code}") from end


@contextmanager
def _modules_of(folder: Path) -> Iterator[None]:
    """A context in which the modules of an example can be imported; the examples use the same module names."""
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        try:
            yield
        finally:
            for path in folder.glob("*.py"):
                sys.modules.pop(path.stem, None)


@contextmanager
def _no_hydra() -> Iterator[None]:
    """A context after which no Hydra application is active in this process."""
    before = HydraConfig.instance().cfg
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before
