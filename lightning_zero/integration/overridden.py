"""Finds the hooks that user code overrides."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden


def overrides(owner: pl.LightningModule | pl.LightningDataModule | pl.Callback, hook: str) -> bool:
    """Whether a module, its data or a callback has a hook of its own, which may be any callable."""
    try:
        return is_overridden(hook, owner)
    except AttributeError:  # Lightning compares code, which functions of C and objects that can be called have not
        return True
