"""Runs forward on the `example_input_array` of a LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.torch_private import tree_leaves, tree_map


def zeros_as(example: Any, device: str, batch: int | None = None) -> Any:
    """Makes zeros with the shapes and dtypes of an example.

    Args:
        example: a tensor, or a tuple or mapping with tensors.
        device: where they are made.
        batch: the first size of every tensor; None: that of the example.
    """

    def zeros(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = value.shape if batch is None or value.ndim == 0 else (batch, *value.shape[1:])
        return torch.zeros(shape, dtype=value.dtype, device=device)

    return tree_map(zeros, example)


def loss_of(module: nn.Module, example: Any) -> Tensor:
    """Runs forward on an example as Lightning does, and returns a scalar that depends on all that it computes.

    Args:
        module: the module.
        example: one argument of forward, or a tuple or mapping of its arguments.

    Raises:
        ValueError: forward returns no floating-point tensor.
    """
    if isinstance(example, tuple):
        output = module(*example)
    else:
        output = module(**example) if isinstance(example, Mapping) else module(example)
    tensors = [value for value in tree_leaves(output) if isinstance(value, Tensor) and value.is_floating_point()]
    if not tensors:
        raise ValueError(f"forward returns a {type(output).__name__} without a floating-point tensor; expected one")
    return torch.stack([tensor.float().mean() for tensor in tensors]).sum()
