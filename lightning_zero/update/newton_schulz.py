"""A Muon that orthogonalizes matrices of equal shape together, and otherwise is torch's."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.update.native import ParamGroup
from lightning_zero.update.shell import loss_by
from lightning_zero.update.two_places import StepInParts

# Number of elements that are iterated on together on the host. Small matrices gain most, because for them the overhead
# of a call is as long as its arithmetic. Larger batches do not stay in the cache of a core between two products and are
# no faster than single matrices.
_HOST_BATCH = 1 << 17
# For products of at most 16^3 multiply-adds, torch uses another routine for single ones than for batched ones.
_HOST_LEAST = 17


class BatchedMuon(torch.optim.Muon):
    """:class:`torch.optim.Muon` with one Newton-Schulz iteration for several matrices of equal shape.

    A group's entry ``batched`` says where this is done. ``None``: for matrices of more than 16 rows and columns in host
    memory, if a trial finds that the processor's batched products have the same bits as single ones. ``True``: also on
    accelerators, whose libraries may sum in another order. ``False``: nowhere. All other matrices are updated by
    torch's own step.
    """

    dtypes_stated = True  # of all tensors that it makes; see `TorchUpdater.alike_under`

    def at_once(self, group: ParamGroup, shape: torch.Size, device: torch.device) -> int:
        """The most matrices of a shape that are iterated on together on ``device``.

        On the meta device there is no limit, so that a trial with some number of matrices measures the memory which
        that number takes elsewhere.
        """
        batched = group.get("batched")
        if batched is False or shape.numel() == 0:
            return 1
        if device.type == "cpu":
            count = _HOST_BATCH // shape.numel() if min(shape) >= _HOST_LEAST else 1
            return count if count > 1 and _has_bits_of_single(*shape, torch.get_num_threads()) else 1
        return 1 << 31 if batched or device.type == "meta" else 1

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the matrices that have a gradient; returns what ``closure`` returns, or None without one."""
        loss = loss_by(closure)
        groups, single = self.param_groups, list[ParamGroup]()
        for group in groups:
            alone: list[Tensor] = []
            for members in self._batches(group):
                if len(members) > 1:
                    self._update(group, members)
                else:
                    alone += members
            single.append(group | {"params": alone})
        self.param_groups = single  # for torch's step, which is called without its hooks
        try:
            inspect.unwrap(torch.optim.Muon.step)(self)
        finally:
            self.param_groups = groups
        return loss

    def _batches(self, group: ParamGroup) -> list[list[Tensor]]:
        """Sort the parameters with a gradient into batches. One that torch's step must update is a batch of its own."""
        batches: list[list[Tensor]] = []
        by_shape: dict[Any, list[Tensor]] = {}  # for each shape and device the batch that parameters are added to
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            key = parameter.shape, parameter.device
            batch = by_shape.get(key)
            plain = parameter.is_floating_point() and parameter.grad.layout == torch.strided
            # Without Nesterov's momentum, torch's step divides a bf16 momentum by its norm in place.
            plain = plain and (group["nesterov"] or parameter.grad.dtype != torch.bfloat16)
            if batch is None or not plain or len(batch) >= self.at_once(group, *key):
                batch = []
                batches.append(batch)
            batch.append(parameter)
            if plain:
                by_shape[key] = batch
        return batches

    def _update(self, group: ParamGroup, members: Sequence[Tensor]) -> None:
        """Update matrices of equal shape with the arithmetic of torch's step."""
        parts, first = MuonInParts(), members[0]
        updates = torch.empty(len(members), *first.shape, dtype=parts.dtype, device=first.device)
        for parameter, update in zip(members, updates, strict=True):
            assert parameter.grad is not None
            parts.prepare(group, parameter.grad, self.state[parameter], update)
        updates = orthogonalized(updates, group["ns_coefficients"], group["ns_steps"], group["eps"])
        for parameter, update in zip(members, updates, strict=True):
            parts.apply(group, parameter, update)


class MuonInParts:
    """The arithmetic of torch's Muon in three parts: momentum, the Newton-Schulz iteration, and the update of values.

    See :class:`~lightning_zero.update.two_places.StepInParts`.
    """

    dtype = torch.bfloat16

    def fits(self, group: ParamGroup, shape: torch.Size, dtype: torch.dtype) -> bool:
        # torch adds a transposed update to bf16 values with other roundings than a contiguous update.
        plain = dtype.is_floating_point and dtype != torch.bfloat16
        return plain and len(shape) == 2 and shape.numel() > 0 and bool(group.get("on_device", True))

    def prepare(self, group: ParamGroup, gradient: Tensor, state: dict[str, Any], into: Tensor) -> None:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        into.copy_(gradient.lerp(average, group["momentum"]) if group["nesterov"] else average)

    def compute(self, group: ParamGroup, batch: Tensor) -> None:
        for matrices in (batch,) if group.get("batched") else batch:
            matrices.copy_(orthogonalized(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"]))

    def apply(self, group: ParamGroup, parameter: Tensor, update: Tensor) -> None:
        rate: Any = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(update, alpha=-(rate * _scale(group["adjust_lr_fn"], *parameter.shape)))


def parts_of(optimizer: Optimizer) -> StepInParts | None:
    """The step of ``optimizer`` in parts, if it is torch's Muon itself or :class:`BatchedMuon`; otherwise ``None``."""
    return MuonInParts() if type(optimizer) in (torch.optim.Muon, BatchedMuon) else None


def orthogonalized(matrices: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Replace the singular values of each matrix by numbers near 1, by a Newton-Schulz iteration of fifth order.

    See https://kellerjordan.github.io/posts/muon/.

    Args:
        matrices: ``[batch, rows, columns]``, bf16; or one matrix, ``[rows, columns]``, for which the operators of
            torch's Muon are used.
        coefficients: those of x, x³ and x⁵ in the polynomial that every iteration applies to the singular values.
        steps: number of iterations.
        eps: the least Frobenius norm by which a matrix is divided before the iteration.

    Returns:
        The new matrices, with the shape and dtype of ``matrices``.
    """
    first, third, fifth = coefficients
    tall = matrices.size(-2) > matrices.size(-1)
    found = matrices.mT if tall else matrices  # so that the Gram matrix is the smaller of the two
    alone = found.dim() == 2
    norm = found.norm() if alone else torch.linalg.vector_norm(found, dim=(-2, -1), keepdim=True)
    multiply, add = (torch.mm, torch.addmm) if alone else (torch.bmm, torch.baddbmm)
    found = found / norm.clamp(min=eps)
    for _ in range(steps):
        gram = multiply(found, found.mT)
        gram = add(gram, gram, gram, beta=third, alpha=fifth)
        found = add(found, gram, found, beta=first)
    return found.mT if tall else found


@functools.cache
def _has_bits_of_single(rows: int, columns: int, threads: int) -> bool:
    """Tell whether batched products on this processor have the same bits as products of single matrices.

    Args:
        rows: number of rows of each matrix.
        columns: number of columns of each matrix.
        threads: number of torch's threads. They may divide sums, so that the answer depends on them.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, rows, columns, generator=generator, dtype=torch.float32, device="cpu").bfloat16()
    found = drawn.mT if rows > columns else drawn
    gram = torch.bmm(found, found.mT)
    squares = torch.baddbmm(gram, gram, gram, beta=0.5, alpha=2.0)
    updates = torch.baddbmm(found, gram, found, beta=3.0)
    pairs = [
        (gram, [x @ x.mT for x in found]),
        (squares, [torch.addmm(g, g, g, beta=0.5, alpha=2.0) for g in gram]),
        (updates, [torch.addmm(x, g, x, beta=3.0) for x, g in zip(found, gram, strict=True)]),
    ]
    return all(torch.equal(together, torch.stack(single)) for together, single in pairs)


def _scale(rule: str | None, rows: int, columns: int) -> float:
    """The factor of the learning rate; see :class:`lightning_zero.update.Muon`."""
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
