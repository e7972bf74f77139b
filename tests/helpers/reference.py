"""The reference for sharded training: one process that runs every rank's micro-batches with a stock optimizer.

It sums gradients in rank order, pre-divided by the world size, as a rank-ordered reduction does:
`g = (g_0 / W + g_1 / W) + g_2 / W ...`, each term `g_r * (1 / W)` rounded to the reduce dtype.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from helpers import place

Batches = Sequence[Sequence[Sequence[Tensor]]]  # [step][micro-batch][rank]
LossFunction = Callable[[nn.Module, Tensor], Tensor]
OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
Gradients = Sequence[Tensor | None]  # by parameter; None where nothing used it
NORMALIZATIONS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """The results of a training, with copied tensors; `norms` are the steps' global gradient norms before clipping.

    `weights` includes rank 0's buffers; `buffers` has the buffers of every rank by name, from the reference only.
    """

    weights: dict[str, Tensor]
    optimizer_state: dict[str, dict[str, Any]]
    norms: list[float]
    buffers: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)


class RankBuffers:
    """The buffers that each rank would have of one model; the ranks share only its parameters."""

    def __init__(self, model: nn.Module, world: int) -> None:
        self._model = model
        self._modules = list(model.modules())
        # Copied together, so that a buffer that is registered twice stays one.
        self._held = [copy.deepcopy([module._buffers for module in self._modules]) for _ in range(world)]

    def load(self, rank: int) -> None:
        """Put a rank's buffers into the model, which may change or replace them until the next call."""
        for module, buffers in zip(self._modules, self._held[rank], strict=True):
            module._buffers = buffers

    def share(self) -> None:
        """Copy rank 0's buffers to all ranks, except statistics of normalization layers, which are each rank's own."""
        for rank in range(1, len(self._held)):
            copied = copy.deepcopy(self._held[0])
            for number, module in enumerate(self._modules):
                if not (module.training and isinstance(module, NORMALIZATIONS)):
                    self._held[rank][number] = copied[number]

    def by_name(self) -> list[dict[str, Tensor]]:
        named = []
        for rank in range(len(self._held)):
            self.load(rank)
            named.append(dict(self._model.named_buffers(remove_duplicate=False)))
        return named


def train_reference(
    model: nn.Module,
    make_optimizer: OptimizerFactory,
    batches: Batches,
    loss_fn: LossFunction,
    *,
    reduce_each: bool,
    accumulate: int | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    make_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
    cast: Callable[[nn.Module], nn.Module] | None = None,
    reduce_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    loss_scale: float | Sequence[float] = 1.0,
    skip_nonfinite: bool = False,
    shard_size: int | None = None,
) -> Trained:
    """Train a copy of `model` on `batches` and return the result.

    `reduce_each=True` reduces every micro-batch and sums the results (stages 2 and 3); False sums each rank's
    micro-batches first and reduces the sums (stages 0 and 1). A loss is divided by `accumulate` (default: the
    number of the step's micro-batches), as Lightning does. `cast` makes the working copy, which computes, from a copy
    of the model; the optimizer then updates masters in `model`'s own precision, which are rounded into the former.

    Gradients are reduced in `reduce_dtype` (default: the parameter's) and kept in `grad_dtype` (default: the
    reduce dtype, or fp32 if that has 16 bits and there are several micro-batches). They are gradients of the loss
    times `loss_scale` (one for all steps, or one for each), and divided by it in the master's precision before
    clipping. `skip_nonfinite=True` skips optimizer and scheduler if a gradient is not finite; the step's norm is then
    not finite either. Groups of `shard_size` ranks (default: all) are summed first, and then their sums.
    """
    master = place.placed(copy.deepcopy(model))
    working = master if cast is None else cast(copy.deepcopy(master))
    optimizer = make_optimizer(master)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    buffers = RankBuffers(working, len(batches[0][0]))
    norms = []

    def gradients_of(rank: int, batch: Tensor, divisor: int, scale: float) -> Gradients:
        buffers.load(rank)
        return rank_gradients(working, batch, loss_fn, divisor, scale)

    scales = [loss_scale] * len(batches) if isinstance(loss_scale, float | int) else loss_scale
    for step, scale in zip(batches, scales, strict=True):
        divisor = accumulate or len(step)
        micro = [[gradients_of(rank, batch, divisor, scale) for rank, batch in enumerate(ranks)] for ranks in step]
        buffers.share()
        gradients = (reduce_then_sum if reduce_each else sum_then_reduce)(micro, reduce_dtype, grad_dtype, shard_size)
        set_gradients(master, gradients, scale)
        if skip_nonfinite and not all_finite(parameter.grad for parameter in master.parameters()):
            norms.append(clip_gradients(master, None, None))
            continue
        norms.append(clip_gradients(master, clip_norm, clip_value))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        follow(working, master)
    named = [place.moved(each, "cpu") for each in buffers.by_name()]
    buffers.load(0)
    for module, trained in zip(master.modules(), working.modules(), strict=True):
        module._buffers = trained._buffers
    weights = {name: value.clone() for name, value in master.state_dict().items()}
    return Trained(place.moved(weights, "cpu"), place.moved(state_by_name(master, optimizer), "cpu"), norms, named)


def rank_gradients(
    model: nn.Module, batch: Tensor, loss_fn: LossFunction, divisor: int, scale: float = 1.0
) -> Gradients:
    """One rank's gradients of one micro-batch's loss times `scale`."""
    model.zero_grad(set_to_none=True)
    loss = loss_fn(model, place.moved(batch, next(model.parameters()).device)) / divisor
    if scale != 1.0:
        # In fp32 at least, since in 16 bits the product may overflow.
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def reduce_then_sum(
    micro: Sequence[Sequence[Gradients]],
    reduce_dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    shard_size: int | None = None,
) -> Gradients:
    """Reduce each micro-batch over a group's ranks, sum over micro-batches in the dtype gradients are kept in, then
    over groups."""
    world = len(micro[0])
    groups = [
        sum_micro([reduce_ranks(ranks[group], reduce_dtype, world) for ranks in micro], grad_dtype)
        for group in groups_of(world, shard_size)
    ]
    return [ordered_sum(terms) for terms in zip(*groups, strict=True)]


def sum_then_reduce(
    micro: Sequence[Sequence[Gradients]],
    reduce_dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    shard_size: int | None = None,
) -> Gradients:
    """Sum each rank's micro-batches (in fp32 if they are 16-bit and several), then reduce the sums."""
    local = [sum_micro(rank, None) for rank in zip(*micro, strict=True)]
    groups = [reduce_ranks(local[group], reduce_dtype, len(local)) for group in groups_of(len(local), shard_size)]
    return [kept(ordered_sum(terms), grad_dtype, len(micro)) for terms in zip(*groups, strict=True)]


def groups_of(world: int, shard_size: int | None) -> list[slice]:
    """The shard groups, which consist of consecutive ranks."""
    size = shard_size or world
    return [slice(first, first + size) for first in range(0, world, size)]


def sum_micro(micro: Sequence[Gradients], dtype: torch.dtype | None) -> Gradients:
    """The sum over micro-batches, in order, in the dtype in which gradients are kept."""
    terms = zip(*micro, strict=True)
    return [ordered_sum([kept(g, dtype, len(micro)) for g in each]) for each in terms]


def reduce_ranks(per_rank: Sequence[Gradients], dtype: torch.dtype | None, world: int | None = None) -> Gradients:
    """The rank-ordered sum of gradients divided by `world` (default: the number of ranks); None counts as zeros."""
    scale = 1.0 / (world or len(per_rank))
    scaled = ([None if g is None else g.to(dtype or g.dtype) * scale for g in rank] for rank in per_rank)
    return [ordered_sum(terms) for terms in zip(*scaled, strict=True)]


def ordered_sum(terms: Sequence[Tensor | None]) -> Tensor | None:
    """((t_0 + t_1) + t_2) + ... over the terms that are not None."""
    present = [term for term in terms if term is not None]
    if not present:
        return None
    total = present[0].clone()
    for term in present[1:]:
        total += term
    return total


def kept(gradient: Tensor | None, dtype: torch.dtype | None, micro_batches: int) -> Tensor | None:
    """The gradient in the dtype in which it is kept."""
    if gradient is None:
        return None
    if dtype is None and micro_batches > 1 and gradient.element_size() == 2:
        dtype = torch.float32
    return gradient.to(dtype or gradient.dtype)


def set_gradients(model: nn.Module, gradients: Gradients, scale: float = 1.0) -> None:
    """Set each parameter's gradient, in the parameter's dtype, divided by `scale`."""
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        if parameter.grad is not None and scale != 1.0:
            parameter.grad.div_(scale)


def all_finite(gradients: Iterable[Tensor | None]) -> bool:
    """Whether every element of every gradient is finite."""
    return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)


def clip_gradients(model: nn.Module, clip_norm: float | None, clip_value: float | None) -> float:
    """Clip in place and return the global norm before clipping.

    The norm and the coefficient `min(1, clip_norm / (norm + 1e-6))` are computed in float64. For gradients of
    32 and 16 bits the multiplication rounds the coefficient to fp32, which makes the order of adding squares
    irrelevant, and then the product to the gradient's dtype.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = math.sqrt(math.fsum(float(gradient.double().square().sum()) for gradient in gradients))
    for gradient in gradients:
        if clip_norm is not None:
            gradient.mul_(min(1.0, clip_norm / (norm + 1e-6)))
        if clip_value is not None:
            gradient.clamp_(-clip_value, clip_value)
    return norm


@torch.no_grad()
def follow(working: nn.Module, master: nn.Module) -> None:
    """Round the masters into the working copy."""
    if working is not master:
        for low, high in zip(working.parameters(), master.parameters(), strict=True):
            low.copy_(high)


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """A copy of the optimizer's state by parameter name, for parameters with state."""
    named = ((name, optimizer.state.get(parameter)) for name, parameter in model.named_parameters())
    return {name: copy.deepcopy(state) for name, state in named if state}
