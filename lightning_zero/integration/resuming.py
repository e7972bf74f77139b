"""Checkpoints from which a run goes on: recovers and finds them.

Lightning searches for the last one. Of a name at a URL it loses the protocol, and it asks for the time of a folder,
which an object store does not have.
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
from lightning_zero.checkpoint.remote import Location, RemotePath
from lightning_zero.integration import private
from lightning_zero.integration.patches import replace_methods


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
    own_choose = private.choose_method(connector)

    def choose(_: Any, *args: Any, **kwargs: Any) -> Any:
        with _searching_urls(trainer):
            return own_choose(*args, **kwargs)

    undo = replace_methods(connector, {private.CHOOSE: choose})
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
