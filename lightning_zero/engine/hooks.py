"""Stage 3's forward and backward hooks: parameters are whole exactly while their unit computes.

A unit gathers its buckets before its forward and frees them after it, gathers them again when the first gradient of its
outputs arrives, and frees them when its inputs have theirs or all its own gradients are reduced. Every module that
holds a parameter itself gathers as well, so that calling a part of the model (``module.net.generate()``) works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.bucket import Bucket


class UnshardHooks:
    """The hooks of one module.

    Args:
        module: a unit, or a module that holds parameters itself.
        buckets: the buckets that its forward and backward need.
        owns: whether it frees them afterwards (a unit), or leaves that to its unit or to the end of the step.
    """

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket], owns: bool) -> None:
        self._buckets = tuple(buckets)
        self._owns = owns
        self._backward_passes = 0  # calls of the module whose backward has begun and not ended
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            # Also when forward raises: otherwise a caught error would leave the unit gathered for good.
            module.register_forward_hook(self._after_forward, always_call=True),
        ]

    def remove(self) -> None:
        """Detach from the module."""
        for handle in self._handles:
            handle.remove()

    def end_backward(self) -> None:
        """Forget backward passes whose end no hook saw (inputs without gradients)."""
        self._backward_passes = 0

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for bucket in self._buckets:
            bucket.unshard()
        # A forward inside backward is the recomputation of a checkpoint: the hooks of the first forward still stand.
        if self._owns and not self._backward_passes and (inputs := _differentiable((args, kwargs))):
            register_multi_grad_hook(inputs, self._after_backward, mode="all")

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs = _differentiable(output)
        if outputs and not self._backward_passes:
            register_multi_grad_hook(outputs, self._before_backward, mode="any")
        if self._owns and not self._backward_passes:
            self._reshard()

    def _before_backward(self, grad: Tensor) -> None:
        self._backward_passes += self._owns
        for bucket in self._buckets:
            bucket.unshard()

    def _after_backward(self, grads: Sequence[Tensor | None]) -> None:
        # Of a module called twice, the first call's backward may have begun already: its output is the second's input.
        self._backward_passes = max(self._backward_passes - 1, 0)
        if not self._backward_passes:
            self._reshard()

    def _reshard(self) -> None:
        for bucket in self._buckets:
            bucket.reshard()


def refresh_before_forward(module: nn.Module, buckets: Sequence[Bucket]) -> RemovableHandle:
    """Stages 0-2: gather what the last update made stale, when the module that reads it computes."""

    def refresh(module: nn.Module, args: tuple[Any, ...]) -> None:
        for bucket in buckets:
            bucket.unshard()

    return module.register_forward_pre_hook(refresh, prepend=True)


def _differentiable(tree: Any) -> list[Tensor]:
    if not torch.is_grad_enabled():
        return []
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
