"""The owned slice of the averaged gradient, kept until the next ``zero_grad``."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.engine.stores import Store


def log_dtype(fixed: torch.dtype | None, values: torch.dtype, again: bool) -> torch.dtype:
    """The dtype of a log.

    Args:
        fixed: what the policy asks for; ``None`` leaves it to what arrives.
        values: dtype of what arrives.
        again: whether something has arrived before.
    """
    return fixed or (torch.promote_types(values, torch.float32) if again else values)


class GradientLog:
    """Accumulates the reduced gradients of one shard over micro-batches.

    Its dtype does not depend on stage or store, since overflow and norm are judged from these values.

    Args:
        store: where the log rests.
        numel: length of the shard.
        dtype: a fixed dtype, or ``None`` for that of what arrives, raised to fp32 by a second arrival.
    """

    def __init__(self, store: Store, numel: int, dtype: torch.dtype | None) -> None:
        self._store = store
        self._numel = numel
        self._fixed_dtype = dtype
        self._values: Tensor | None = None  # 1-D
        self._empty = True

    def add(self, values: Tensor) -> None:
        """Add ``values`` (1-D)."""
        log = self._ensure(log_dtype(self._fixed_dtype, values.dtype, again=not self._empty))
        if self._empty:
            log.copy_(values)
            self._empty = False
        else:
            log.add_(values.to(self._store.device))

    def read(self, start: int, stop: int) -> Tensor:
        """A view of the gradient of elements ``[start, stop)``; zeros where nothing arrived."""
        if self._empty:
            self._ensure(self._fixed_dtype or torch.float32).zero_()
            self._empty = False
        assert self._values is not None
        return self._values[start:stop]

    def widen(self) -> None:
        """Make the values fp32, unless the dtype is fixed, before they are scaled or compared with fp32 numbers."""
        if not self._empty and self._fixed_dtype is None:
            self._ensure(torch.float32)

    def clear(self) -> None:
        """Forget the values; the memory is kept for the next step."""
        self._empty = True

    @property
    def empty(self) -> bool:
        """Whether no gradient has arrived since it was cleared."""
        return self._empty

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return 0 if self._values is None else self._values.nbytes

    def _ensure(self, dtype: torch.dtype) -> Tensor:
        """The tensor, at least as wide as ``dtype``; a wider one of an earlier step holds the same values."""
        if self._values is None:
            self._values = self._store.zeros(self._numel, dtype)
        elif torch.promote_types(self._values.dtype, dtype) != self._values.dtype:
            narrow = self._values
            self._values = self._store.zeros(self._numel, dtype)
            self._values.copy_(narrow)
        return self._values
