"""Checkpoints from which a run goes on: recovers and finds them, and has all ranks load the same one.

Lightning searches for the last checkpoint on each rank by itself, before there is a process group. Of a name at a URL
it loses the protocol, and it asks for the time of a folder, which an object store does not have.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_zero import checkpoint as _checkpoint
from lightning_zero.checkpoint.errors import CheckpointError, shortened, together
from lightning_zero.checkpoint.remote import Location, RemotePath
from lightning_zero.integration import private
from lightning_zero.integration.base import EngineStrategy
from lightning_zero.integration.patches import replace_methods
from lightning_zero.sharding import Group


def prepared(function: Callable[..., Any], trainer: pl.Trainer | None) -> Callable[..., Any]:
    """Prepares a run to resume.

    Args:
        function: the Trainer's function for the run.
        trainer: the Trainer; ``None`` if the launcher only starts ranks.

    Returns:
        The function to launch in place of ``function``.
    """
    if trainer is None:
        return function
    for callback in trainer.checkpoint_callbacks:
        if isinstance(folder := _folder_of(callback, trainer), Path):  # a save to a URL renames nothing
            _checkpoint.recover_all(folder)
    return functools.partial(_run, trainer, function)


def _run(trainer: pl.Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the Trainer's function in a rank, which may be another process than that of :func:`prepared`."""
    connector = private.checkpoint_connector(trainer)
    own_choose, own_start = private.choose_method(connector), connector.resume_start

    def choose(_: Any, *args: Any, **kwargs: Any) -> Any:
        with _searching_urls(trainer):
            return own_choose(*args, **kwargs)

    def resume_start(_: Any, checkpoint_path: private.PathLike | None = None, weights_only: bool | None = None) -> None:
        assert isinstance(trainer.strategy, EngineStrategy)
        own_start(_agreed(checkpoint_path, trainer.strategy.world), weights_only=weights_only)

    undo = replace_methods(connector, {private.CHOOSE: choose, "resume_start": resume_start})
    try:
        return function(*args, **kwargs)
    finally:
        undo()


def _folder_of(callback: Callback, trainer: pl.Trainer) -> Location | None:
    """The folder of a callback's checkpoints, if it is known without the logger, which may begin its run for that."""
    folder = getattr(callback, "dirpath", None)  # of `ModelCheckpoint`, `OnExceptionCheckpoint`, maybe of others
    if folder is None and not trainer.loggers:
        folder = f"{trainer.default_root_dir}/checkpoints"
    return _checkpoint.locate(folder) if isinstance(folder, str | os.PathLike) else None


@contextlib.contextmanager
def _searching_urls(trainer: pl.Trainer) -> Iterator[None]:
    """A context in which Lightning finds the last checkpoint at a URL, too, and knows when a folder was completed."""
    with contextlib.ExitStack() as stack:
        for callback in trainer.checkpoint_callbacks:
            folder = _folder_of(callback, trainer)
            if isinstance(callback, ModelCheckpoint) and isinstance(folder, RemotePath):
                find = functools.partial(_find_last, folder)
                stack.callback(replace_methods(callback, {private.FIND_LAST: find}))
        stack.enter_context(private.asking(_filesystem_of))
        yield


def _find_last(folder: RemotePath, callback: ModelCheckpoint, trainer: pl.Trainer) -> set[str]:
    """Find checkpoints by the names for which Lightning looks; they keep the protocol and the host of the URL."""
    last, suffix = re.compile(callback.CHECKPOINT_NAME_LAST), callback.FILE_EXTENSION
    return {str(path) for path in folder.children() if path.name.endswith(suffix) and last.match(path.name)}


class _AtUrl(NamedTuple):
    """Answers for one URL what Lightning asks a file system about a checkpoint that it has found."""

    completed: datetime | None

    def exists(self, path: private.PathLike) -> bool:
        return self.completed is not None

    def modified(self, path: private.PathLike) -> datetime | None:
        return self.completed


def _filesystem_of(path: private.PathLike) -> Any:
    location = _checkpoint.locate(path)
    return _AtUrl(_checkpoint.completed_at(location)) if isinstance(location, RemotePath) else get_filesystem(path)


def _agreed(path: private.PathLike | None, world: Group) -> private.PathLike | None:
    """The checkpoint to load; all ranks load one if any of them has found one. Collective.

    A rank may have looked while another one renamed the checkpoint, or on a disk of its own.

    Args:
        path: the one that this rank was given or has found; ``None`` if there is none.
        world: the group of all ranks.

    Raises:
        CheckpointError: some ranks do not see it; raised on all ranks.
    """
    own = None if path is None else os.fspath(path)
    found = {rank: each for rank, each in enumerate(world.all_gather_object(own, "agree on a checkpoint")) if each}
    if len(found) in (0, world.size):
        return path
    finder, first = next(iter(found.items()))
    seen = together(world, lambda: bool(own) or _checkpoint.locate(first).exists(), f"look for the checkpoint {first}")
    if blind := [str(rank) for rank, sees in enumerate(seen) if not sees]:
        raise CheckpointError(
            f"rank {finder} has found the checkpoint {first}, but rank{'s' * (len(blind) > 1)} {shortened(blind)} "
            "cannot see it, and a run resumes on all ranks or on none. Save to a file system that all nodes share, or "
            "copy the checkpoint to the same path on every node; to start anew, leave ckpt_path out"
        )
    return path or first
