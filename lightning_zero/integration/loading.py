"""Makes modules from checkpoints, without a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_zero import checkpoint
from lightning_zero.integration import private
from lightning_zero.sharding import Group

M = TypeVar("M", LightningModule, LightningDataModule)


def load_from_checkpoint(
    cls: type[M],
    path: str | Path,
    *,
    map_location: private.MapLocation = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    checksums: bool = True,
    **kwargs: Any,
) -> M:
    """Make a module as ``cls.load_from_checkpoint`` does, from one file or a folder (``"sharded"`` or FSDP's).

    Args:
        cls: the class of the module.
        path: path of the checkpoint, or a URL that fsspec supports.
        map_location: device to load to, as in :func:`torch.load`; the checkpoint's tensors are on the CPU.
        strict: whether all names must match.
        weights_only: False also loads pickled objects; use it only for files that you trust.
        checksums: verify the checkpoint first, which reads everything once more.
        **kwargs: arguments of the class that differ from the saved ones, and ``hparams_file``.

    Returns:
        The module, on the CPU unless ``map_location`` says otherwise, with its hyperparameters, its weights at full
        precision, and no optimizer state.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        TypeError: ``cls`` is not the class of a LightningModule or LightningDataModule.
        FileNotFoundError: there is no checkpoint at ``path``.
    """
    if not (isinstance(cls, type) and issubclass(cls, LightningModule | LightningDataModule)):
        raise TypeError(f"cls={cls!r} must be a class: of a LightningModule or a LightningDataModule")
    is_module = issubclass(cls, LightningModule)
    arguments = {"strict": strict, **kwargs} if is_module else kwargs  # data modules have no weights
    loaded = checkpoint.load(checkpoint.locate(path), Group(), weights_only is not False, checksums)
    with private.reading(loaded), checkpoint.FullPrecision():  # only one tensor of the file is in memory at a time
        made = cls.load_from_checkpoint(path, weights_only=weights_only, **arguments)
    return made.to(_device(map_location)) if isinstance(made, LightningModule) else made


def _device(map_location: private.MapLocation) -> torch.device:
    """The device to which :func:`torch.load` moves tensors of the CPU."""
    if callable(map_location):
        storage = map_location(torch.UntypedStorage(0), "cpu")
        return torch.device("cpu") if storage is None else storage.device
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    return torch.device("cpu" if map_location is None else map_location)
