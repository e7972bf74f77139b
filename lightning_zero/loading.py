"""Modules from checkpoints, without a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from lightning.fabric.utilities.types import _MAP_LOCATION_TYPE
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core import saving

from lightning_zero import checkpoint
from lightning_zero.engine import Group

M = TypeVar("M", LightningModule, LightningDataModule)


def load_from_checkpoint(
    cls: type[M],
    path: str | Path,
    *,
    map_location: _MAP_LOCATION_TYPE = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    checksums: bool = True,
    **kwargs: Any,
) -> M:
    """As ``cls.load_from_checkpoint``, from one file or from a folder (``checkpoint_format="sharded"``, FSDP's).

    Args:
        cls: the class of the module.
        path: of the checkpoint.
        map_location: where to, as in :func:`torch.load`; the checkpoint's tensors are on the CPU.
        strict: whether all names must match.
        weights_only: False also loads pickled objects, from who you trust.
        checksums: verify them first, which reads everything once more.
        **kwargs: arguments of the class, where they are not as they were saved.

    Returns:
        The module, on the CPU unless ``map_location`` says otherwise, with its hyperparameters, its weights at full
        precision, and no optimizer state.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        FileNotFoundError: there is none.
    """
    if "://" in str(path):  # Lightning fetches it
        return cls.load_from_checkpoint(path, map_location, strict=strict, weights_only=weights_only, **kwargs)
    loaded = checkpoint.load(Path(path).expanduser(), Group(), weights_only is not False, checksums)
    # What reads the file there is the only part that knows no folders.
    with patch.object(saving, "pl_load", lambda *_, **__: loaded):
        module = cls.load_from_checkpoint(path, strict=strict, weights_only=weights_only, **kwargs)
    return module.to(_device(map_location)) if isinstance(module, LightningModule) else module


def _device(map_location: _MAP_LOCATION_TYPE) -> torch.device:
    """Where :func:`torch.load` puts what is on the CPU."""
    if callable(map_location):
        storage = map_location(torch.UntypedStorage(0), "cpu")
        return torch.device("cpu") if storage is None else storage.device
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu")
    return torch.device("cpu" if map_location is None else map_location)
